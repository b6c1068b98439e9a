"""What holds for every kernel file: its operators, its launchers, its record, and its import without Triton or a device."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from neurips26_lit.core import kernels

# name: (operator calls, launches, code that uses the kernel without Triton, what it prints)
KNOWN = {
    "monarch_attention": (4, 126, """one = torch.ones(1, 1, 1, 2, 1, 8)
print(kernel.monarch_attention_tiles(one, one, one).flatten()[:2].tolist())""", "[1.0, 1.0]"),
    "paged_gqa": (4, 10, """ids, counts = kernel.union_tables(torch.ones(1, 2, 1, 3, dtype=torch.bool), 2)
print(ids.tolist(), counts.tolist())""", "[[[0, 1, 2]]] [[3]]"),
}


def module(name: str):
    return importlib.import_module(f"neurips26_lit.kernels.{name}")


def test_no_kernel_is_left_out():
    assert sorted(KNOWN) == sorted(kernels.kernel_names())


@pytest.mark.parametrize("name", KNOWN)
def test_opcheck_of_the_cpu_path(name):
    assert kernels.opcheck(name) == (KNOWN[name][0], [])


@pytest.mark.parametrize("name", KNOWN)
def test_launchers_ask_for_what_was_compiled(name):
    "Types, constants and alignments of every launch, as the compiler would get them."
    assert kernels.launches(name) == (KNOWN[name][1], [])


@pytest.mark.parametrize("name, call", [(name, call) for name, (calls, *_) in KNOWN.items() for call in range(calls)])
def test_opcheck_of_the_triton_path(name, call):
    op, arguments = module(name).examples()[call]
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", KNOWN)
def test_imports_without_triton_and_without_looking_for_a_device(name):
    code = f"""
import sys; sys.modules["triton"] = None
import torch
def boom(*a, **k): raise SystemExit("looked for a device")
torch.cuda.is_available = torch.cuda.get_device_properties = torch.cuda.get_device_capability = torch.cuda.device_count = boom
from neurips26_lit.kernels import {name} as kernel
for op, args in kernel.examples(): op(*args)
{KNOWN[name][2]}
"""
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.stdout.strip() == KNOWN[name][3], ran.stderr


@pytest.mark.parametrize("name", KNOWN)
def test_compilers_share_one_order(name):
    "Each process compiles every second configuration, so two of them must count alike."
    code = f"from neurips26_lit.core import kernels; print([(s.name, s.config, a) for s, a in kernels._configurations(kernels._load({name!r}), kernels.ARCHS)])"
    orders = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2", "3")]
    assert len(orders[0]) > 100 and len(set(orders)) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_record_is_fresh_and_without_spills(name):
    assert kernels.stale(name) == ""
    rows = [kernels.Resource(**r) for r in kernels.resources(name).to_dict("records")]
    assert [line for r in rows for line in kernels.problems(r)] == []
    assert {(r.kernel, r.config, r.arch) for r in rows} == {(s.name, s.config, arch) for arch in kernels.ARCHS for s in module(name).specs(arch)}
