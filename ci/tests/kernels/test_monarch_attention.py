"""Monarch attention, forward and backward: the Triton code in the interpreter, against stored factors in float64."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from neurips26_lit.core import kernels
from neurips26_lit.kernels import monarch_attention as M

F32, F16, F64 = torch.float32, torch.float16, torch.float64
HYPOTHESIS = dict(deadline=None, derandomize=True, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    "Every output and every summary begins as NaN: a number that the kernels forget to write, or read without having written it, is seen."
    monkeypatch.setattr(M, "_empty", poison)


def poison(shape, dtype, device):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


@dataclass
class Problem:
    "Inputs of the kernels with the gradients that reach their two outputs."
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    grad_lse: Tensor
    causal: int = 0

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        "Leaves with the strides of the originals."
        return [x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]


def make(A, F, b1, b2, D, *, B=1, H=1, causal=0, spread=1.0, seed=0, strided=False, dtype=F32) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def tiles(n: int) -> Tensor:
        if not strided: return (spread * torch.randn(B, n, b1, b2, H, D, generator=g)).to(dtype)
        return (spread * torch.randn(B, H, b2, b1, n, D + 8, generator=g)).to(dtype).permute(0, 4, 3, 2, 1, 5)[..., :D]

    return Problem(tiles(A), tiles(F), tiles(F), torch.randn(B, A, b1, b2, H, D, generator=g), torch.randn(B, H, A, b2, b1, generator=g), causal)


def stored_factors(q: Tensor, k: Tensor, v: Tensor, causal: int) -> tuple[Tensor, Tensor]:
    "(out, lse) with both factors in memory, in the type of q, differentiated by autograd."
    B, A, b1, b2, H, D = q.shape
    z = torch.einsum("bakjhd,bfklhd->bhafkjl", q, k) / math.sqrt(D)
    R = z.softmax(-1)
    entropy = -(R * z.log_softmax(-1)).sum(-1)
    rows = torch.einsum("baijhd,bhafkjl,bfklhd->bhajifk", q / math.sqrt(D), R, k) + entropy.permute(0, 1, 2, 5, 3, 4)[:, :, :, :, None]
    if causal:
        seen = torch.arange(k.shape[1]) // causal <= torch.arange(A)[:, None] // causal
        rows = rows.masked_fill(~seen[:, None, None, :, None], -math.inf)
    L = rows.flatten(-2).softmax(-1).view_as(rows)
    return torch.einsum("bhajifk,bhafkjl,bfklhd->baijhd", L, R, v), rows.flatten(-2).logsumexp(-1)


def results(f, p: Problem, dtype: torch.dtype, backward: bool = True) -> dict[str, Tensor]:
    "out, lse and gradients in float64."
    inputs = p.inputs(dtype)
    out, lse = f(*inputs, p.causal)
    if not backward: return {"out": out.detach().double(), "lse": lse.detach().double()}
    torch.autograd.backward((out, lse), (p.grad.to(out.dtype), p.grad_lse.to(lse.dtype)))
    return {n: x.detach().double() for n, x in zip(NAMES, (out, lse, *(x.grad for x in inputs)))}


def verdict(p: Problem, module=M, backward: bool = True) -> str:
    """What is wrong with the kernels on this problem; empty if nothing: finite first, then at most twice PyTorch's own error plus a little.

    In float32 the little grows with the logits: rounding one of size z, or the log-sum-exp kept for the backward pass, moves a weight by z * 6e-8."""
    dtype = p.q.dtype
    op = lambda q, k, v, causal: module.monarch_attention_tiles(q, k, v, causal=causal, return_lse=True)
    got = results(op, p, dtype, backward)
    exact, plain = results(stored_factors, p, F64, backward), results(stored_factors, p, dtype, backward)
    eps = 4e-7 * (1 + float(exact["lse"].abs().max())) if dtype == F32 else 2e-3
    for name, x in got.items():
        if not x.isfinite().all(): return f"{name}: not finite"
        size = float(exact[name].abs().max()) + 1e-3
        error, allowed = float((x - exact[name]).abs().max()), 2 * float((plain[name] - exact[name]).abs().max()) + eps * max(size, 1.0)
        if not error <= allowed: return f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    return ""


# --- the kernels -----------------------------------------------------------------------------------------------------------
CASES = {  # A, F, b1, b2, D, options
    "one token": (1, 1, 1, 1, 8, {}),
    "columns: block - 1": (1, 1, 1, 15, 16, {}),
    "columns: block": (1, 1, 1, 16, 16, {}),
    "columns: block + 1": (1, 1, 1, 17, 16, {}),
    "columns: a prime, many blocks": (1, 1, 1, 37, 24, {}),
    "columns: block + 1 in fp16": (1, 1, 1, 65, 64, dict(dtype=F16)),
    "rows: block - 1": (1, 1, 31, 1, 16, {}),
    "rows: block + 1": (1, 1, 33, 1, 16, dict(dtype=F16)),
    "key rows: block + 1": (1, 1, 17, 1, 16, {}),
    "key tiles cross a block": (1, 3, 7, 2, 16, dict(dtype=F16)),
    "rectangular": (2, 3, 2, 3, 40, {}),
    "D above 64": (1, 2, 2, 2, 72, {}),
    "D 128 in fp16": (1, 2, 1, 3, 128, dict(dtype=F16)),
    "batch and heads, strided": (1, 2, 2, 3, 16, dict(B=2, H=2, strided=True)),
    "large logits": (1, 2, 2, 5, 16, dict(spread=8.0)),
    "large logits in fp16": (1, 2, 2, 5, 16, dict(spread=5.0, dtype=F16)),
    "causal, one tile a chunk": (3, 3, 2, 2, 16, dict(causal=1)),
    "causal, two tiles a chunk": (4, 4, 1, 3, 16, dict(causal=2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_cases(case):
    *shape, options = case
    assert verdict(make(*shape, **options)) == ""


@st.composite
def problems(draw, most: int = 3):
    "Shapes that divide nothing in particular, small enough for the interpreter."
    causal = draw(st.sampled_from([0, 0, 1, 2]))
    A = draw(st.integers(1, 2)) * max(causal, 1)
    return make(A, A if causal else draw(st.integers(1, 3)), draw(st.integers(1, most)), draw(st.integers(1, most + 2)), draw(st.sampled_from([8, 24, 64])), causal=causal,
                H=draw(st.integers(1, 2)) if A < 3 else 1, spread=draw(st.sampled_from([0.0, 1.0, 4.0])), seed=draw(st.integers(0, 2**31)), strided=draw(st.booleans()), dtype=draw(st.sampled_from([F32, F16])))


@settings(max_examples=4, **HYPOTHESIS)
@given(p=problems(most=2))
def test_kernels_are_the_factors(p):
    assert verdict(p) == ""


def reference(q, k, v, causal):
    "The CPU path, with its explicit backward pass."
    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = M.forward_reference(q, k, v, q.shape[-1] ** -0.5, causal)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, g, g_lse):
            q, k, v, out, lse = ctx.saved_tensors
            return M.backward_reference(g, q, k, v, torch.einsum("baijhd,baijhd->bhaji", out, g) - g_lse, lse, q.shape[-1] ** -0.5, causal)
    return Reference.apply(q, k, v)


@settings(max_examples=40, **HYPOTHESIS)
@given(p=problems(most=6))
def test_reference_is_the_factors(p):
    got, exact = results(reference, p, F64), results(stored_factors, p, F64)
    assert all((got[n] - exact[n]).abs().max() <= 1e-8 * (1 + exact[n].abs().max()) for n in NAMES)


def test_gradcheck_of_the_cpu_path():
    p = make(2, 2, 2, 2, 3, causal=1, dtype=F64)
    assert torch.autograd.gradcheck(lambda q, k, v: reference(q, k, v, 1), p.inputs(F64))
    assert torch.autograd.gradcheck(lambda q, k, v: reference(q, k, v, 0), p.inputs(F64))


def test_slices_of_tiles_and_heads_change_nothing(monkeypatch):
    p = make(2, 2, 1, 3, 16, H=2, causal=1)
    whole = results(lambda q, k, v, c: M.monarch_attention_tiles(q, k, v, causal=c, return_lse=True), p, F32)
    monkeypatch.setattr(M, "WORKSPACE", 1)                                                     # one tile of one head at a time
    assert len(list(M.workspace_slices(p.q, p.k, 2, 1))) == 4
    parts = results(lambda q, k, v, c: M.monarch_attention_tiles(q, k, v, causal=c, return_lse=True), p, F32)
    assert all((whole[n] - parts[n]).abs().max() <= 1e-6 for n in NAMES) and verdict(p) == ""


@pytest.mark.parametrize("limit", [1, 10_000, 100_000, 10**9])
def test_workspace_is_kept_and_covers_all(limit):
    q, k = torch.empty(2, 7, 3, 5, 6, 16, device="meta"), torch.empty(2, 4, 3, 5, 6, 16, device="meta")
    unit = 2 * 2 * 4 * 3 * 5 * 16 * 4
    seen = torch.zeros(7, 6, dtype=torch.int)
    for at, hs in M.workspace_slices(q, k, 2, limit):
        seen[at, hs] += 1
        count = (at.stop - at.start) * (hs.stop - hs.start)
        assert count == 1 or count * unit <= limit
    assert (seen == 1).all()


def test_gradients_are_the_same_bits_every_time():
    p = make(2, 2, 2, 3, 16)
    op = lambda q, k, v, c: M.monarch_attention_tiles(q, k, v, return_lse=True)
    first, second = results(op, p, F32), results(op, p, F32)
    assert all(torch.equal(first[n], second[n]) for n in NAMES)


# --- memory and cost ---------------------------------------------------------------------------------------------------------
def test_memory_of_the_cpu_path_is_not_quadratic():
    "The largest tensor that any operation of a forward and backward pass makes, against the length."
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(x.numel() for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Tensor))])
            return result

    sizes = {}
    for frames in (32, 64, 96):
        x = torch.randn(1, frames, 16, 16, 1, 4)
        with Largest() as watch:
            out, lse = M.forward_reference(x, x, x, 0.5, 0)
            M.backward_reference(torch.ones_like(out), x, x, x, torch.zeros_like(lse), lse, 0.5, 0)
        sizes[frames * 256] = watch.numel
    assert max(sizes.values()) <= 2**22 and 24576**2 / sizes[24576] > 140


def test_flops_are_what_the_products_take():
    from torch.utils.flop_counter import FlopCounterMode

    p = make(3, 3, 2, 5, 16, causal=1)
    with FlopCounterMode(display=False) as counter: out, lse = M.forward_reference(p.q, p.k, p.v, 0.25, 0)
    assert counter.get_total_flops() == M.monarch_flops(tuple(p.q.shape), 3)
    text = Path(M.__file__).read_text()
    products = {name: text.split(f"def {name}_kernel(")[1].split("@jit")[0].split("# ------")[0].count("tl.dot(") for name in M.KERNELS}
    columns, rows = products["column"] + products["column_dq"] + products["column_dkv"], products["row_dq"] + products["row_dkv"]
    assert M.monarch_flops(tuple(p.q.shape), 3, backward=True) == 2 * 16 * 9 * (columns * 2 * 5 * 5 + rows * 2 * 2 * 5)
    assert M.monarch_flops(tuple(p.q.shape), 3, 1) * 9 == M.monarch_flops(tuple(p.q.shape), 3) * 6
    least, launched = M.monarch_bytes((1, 3, 2, 5, 1, 16), 3, 4)
    tile = 2 * 5 * 16 * 4
    assert least == 12 * tile and launched == 6 * tile + 9 * 7 * tile + 3 * 9 * 10 * 4


# --- the boundary ------------------------------------------------------------------------------------------------------------
BAD = {
    "q: expected a non-empty": lambda a: {"q": a["q"][0]},
    "q: the kernel takes float16": lambda a: {n: a[n].double() for n in ("q", "k", "v")},
    "q: the kernel takes head sizes": lambda a: {n: a[n][..., :7] for n in ("q", "k", "v")},
    "k: expected": lambda a: {"k": a["k"][:, :, :1], "v": a["v"][:, :, :1]},
    "k: torch.float16 differs": lambda a: {"k": a["k"].half()},
    "v: expected the shape": lambda a: {"v": a["v"][:, :1]},
    "v: torch.float16 differs": lambda a: {"v": a["v"].half()},
    "q: expected floats": lambda a: {n: a[n].long() for n in ("q", "k", "v")},
    "scale: expected": lambda a: {"scale": math.nan},
    "causal: expected": lambda a: {"causal": -1},
    "causal: chunks of 3": lambda a: {"causal": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_names_the_argument(message):
    p = make(2, 2, 2, 3, 16)
    arguments = dict(q=p.q, k=p.k, v=p.v)
    with pytest.raises(ValueError) as error: M.monarch_attention_tiles(**{**arguments, **BAD[message](arguments)})
    assert str(error.value).startswith(message)


# --- the compiled record ---------------------------------------------------------------------------------------------------------
def test_record_is_what_the_compiler_gives():
    "A spot check: one configuration, compiled now."
    recorded = {(r["kernel"], r["config"], r["arch"]): r for r in kernels.resources("monarch_attention").to_dict("records")}
    rows, failed = kernels.compile_all("monarch_attention", (90,), jobs=1, every=len(M.specs(90)))
    assert failed == [] and [vars(r) for r in rows] == [recorded[r.kernel, r.config, r.arch] for r in rows] and len(rows) == 1


def test_launcher_chooses_only_recorded_configurations():
    for arch in kernels.ARCHS:
        compiled = [(s.name, s.constexprs, s.options) for s in M.specs(arch)]
        for name in M.KERNELS:
            assert all((f"{name}_kernel", *M.config(name, arch, dtype, D)) in compiled for dtype in M.TYPES for D in range(8, 129, 8))


# --- mutations: each changes one thing in the kernels, and the tests above must notice ---------------------------------------------
MUTATIONS = {  # name: (old, new, needs the backward pass, problem)
    "scale off by 1 %": ("self.scale * LOG2E,\n                 self.q,", "1.01 * self.scale * LOG2E,\n                 self.q,", False, 0),
    "sign of the entropy": ("input_precision=\"ieee\") * scale - bias[None, :]\n        s = tl.where(", "input_precision=\"ieee\") * scale + bias[None, :]\n        s = tl.where(", False, 0),
    "moment not moved with the maximum": ("keep * (moment + shift * total)", "keep * moment", False, 1),
    "column mask off by one": ("z = tl.where((col < B2)[None, :]", "z = tl.where((col < B2 - 1)[None, :]", False, 0),
    "a chunk too many is seen": ("// tl.maximum(causal, 1) + 1) * causal)", "// tl.maximum(causal, 1) + 2) * causal)", False, 2),
    "row pass forgets the last key row": ("count = _last_seen(a, a0, F, causal) * B1\n    first = ((bh.to(tl.int64) * A + a) * B2 + j) * F * B1\n\n    top", "count = _last_seen(a, a0, F, causal) * B1 - 1\n    first = ((bh.to(tl.int64) * A + a) * B2 + j) * F * B1\n\n    top", False, 0),
    "gradient of the entropy dropped": ("dz = r * (dr - less[:, None] + g_entropy[:, None] * (log_r - entropy[:, None]))", "dz = r * (dr - less[:, None])", True, 0),
    "dk misses the pooled keys": ("acc_k = tl.dot(r, g_keys, acc_k, input_precision=\"ieee\")", "acc_k = acc_k", True, 0),
    "delta ignored": ("ds = p * (tl.dot(g_out, tl.trans(values), input_precision=\"ieee\") - inner[:, None])", "ds = p * tl.dot(g_out, tl.trans(values), input_precision=\"ieee\")", True, 0),
    "a chunk's first query tile skipped": ("tl.maximum(f // tl.maximum(causal, 1) * causal - a0, 0)", "tl.maximum(f // tl.maximum(causal, 1) * causal - a0 + 1, 0)", True, 2),
}


def probe(which: int) -> Problem:
    return [make(1, 2, 2, 3, 16, seed=3), make(1, 1, 1, 33, 16, spread=2.0, seed=1), make(2, 2, 1, 3, 16, causal=1, seed=2)][which]


def changed(name: str, edits: list[tuple[str, str]], tmp_path: Path):
    "The kernel file with text replaced, as a module of its own."
    text = Path(M.__file__).read_text().replace('NAMESPACE = "neurips26"', f'NAMESPACE = "{name}"')
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._empty = poison
    return module


def test_unchanged_copy_passes(tmp_path):
    module = changed("copy", [], tmp_path)
    assert [verdict(probe(i), module) for i in range(3)] == [""] * 3


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutation_is_noticed(what, tmp_path):
    old, new, backward, which = MUTATIONS[what]
    assert verdict(probe(which), changed(f"mutant_{list(MUTATIONS).index(what)}", [(old, new)], tmp_path), backward) != ""
