"""The GPU benchmark's own logic, on the CPU: gate before speed, reasons for what is left out, peers that compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ci"))

import gpu_bench
import gpu_monarch

CELL = gpu_bench.Cell(B=2, Hq=6, Hkv=2, D=16, page=16, chunk=40, keys=160, density=0.4, dtype="float32")


@pytest.fixture(scope="module")
def data() -> gpu_bench.Data:
    torch.manual_seed(0)
    pool = gpu_bench.make_pool(CELL, "cpu")
    d = gpu_bench.make_data(CELL, pool, "cpu")
    d.keep["place"] = pool[-1]
    return d


def outside(code: str, *arguments: str) -> subprocess.CompletedProcess:
    "In a process without the interpreter, where the operator takes the PyTorch path."
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, 'ci')\n{code}", *arguments], check=False, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict, Path]:
    "A dry run, one without time, and one with a kernel whose scale is off by 1 %: exit status and file of each."
    folder = tmp_path_factory.mktemp("bench")
    done = outside(
        """
import json, pathlib, gpu_bench
out, kernel, codes = pathlib.Path(sys.argv[1]), "paged_gqa", {}
call = lambda name, *a: codes.__setitem__(name, gpu_bench.main([kernel, "--dry-run", "--repeats", "5", "--out", str(out / name), *a]))
call("whole")
call("no_time", "--minutes", "0")
from neurips26_lit.kernels import paged_gqa
right = paged_gqa.prefill_reference
paged_gqa.prefill_reference = lambda *a: right(*a[:-1], 1.01 * a[-1])
call("wrong")
kernel = "monarch_attention"
call("tiles")
from neurips26_lit.kernels import monarch_attention
good = monarch_attention.forward_reference
monarch_attention.forward_reference = lambda q, k, v, scale, causal: good(q, k, v, 1.01 * scale if q.dtype == monarch_attention.torch.float32 else scale, causal)
call("wrong_tiles")
print(json.dumps(codes))
""",
        str(folder),
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: (code, json.loads(next((folder / name).glob("*.json")).read_text())) for name, code in codes.items()}, folder


def test_dry_run_times_every_method_that_is_right(runs):
    code, record = runs[0]["whole"]
    assert code == 0 and record["complete"] and record["gate_passed"] and len(record["gate"]) == 6
    timed = {r["method"] for r in record["rows"] if r["ms"]}
    assert timed == {"ours", "sdpa_flash", "sdpa_cudnn", "flex"}
    assert all(r["ms"] or r["reason"] == "flashinfer is not installed" for r in record["rows"])
    assert all(r["commit"] and r["torch"] == torch.__version__ and r["gpu"] for r in record["rows"])
    assert all(r["low"] <= r["speedup"] <= r["high"] and r["n"] == 5 for r in record["rows"] if r["ms"])
    assert next((runs[1] / "whole").glob("*.png")).stat().st_size > 10_000


def test_without_time_every_cell_is_a_row_with_its_reason(runs):
    code, record = runs[0]["no_time"]
    assert code == 0 and len(record["rows"]) == 2 and all(r["reason"].startswith("time limit: ") and r["ms"] is None for r in record["rows"])


def test_wrong_answers_stop_the_run_before_any_speed(runs):
    code, record = runs[0]["wrong"]
    assert code == 1 and not record["gate_passed"] and record["rows"] == []
    assert sum(not r["ok"] for r in record["gate"]) == 5 and "relative error" in record["gate"][0]["why"]


def test_monarch_against_dense_attention(runs):
    code, record = runs[0]["tiles"]
    assert code == 0 and record["complete"] and len(record["gate"]) == 8 and all(r["ok"] for r in record["gate"])
    timed = {(r["method"], r["pass"]) for r in record["rows"] if r["ms"]}
    assert timed == {(m, p) for m in ("ours", "sdpa_flash", "sdpa_cudnn") for p in ("forward", "forward + backward")} | {("reference, eager", "forward"), ("flex", "forward")}
    left_out = [r for r in record["rows"] if not r["ms"]]
    assert [(r["method"], r["pass"]) for r in left_out] == [("flex", "forward + backward")] and "backward on CPU" in left_out[0]["reason"]
    code, record = runs[0]["wrong_tiles"]
    assert code == 1 and record["rows"] == [] and sum(not r["ok"] for r in record["gate"]) >= 2


def test_monarch_checks_see_a_wrong_answer():
    suite = gpu_bench.MonarchAttention("cpu", True)
    for cell in suite.cells():
        d = suite.data(cell, suite.pool(cell))
        for name, call in suite.methods(d, 60).items():
            if name == "flex" and cell.backward: continue  # PyTorch has no backward of it on a CPU
            got = [x.double() for x in call()]
            assert suite.error(d, tuple(got), name) <= 1e-5, name
            for x in got:
                right, x[0, -1, -1, -1, -1] = x[0, -1, -1, -1, -1].clone(), 0.0
                assert suite.error(d, tuple(got), name) > 1e-2, name
                x[0, -1, -1, -1, -1] = right


def test_the_sparse_rival_of_monarch_reads_its_density_and_no_more():
    blocks = gpu_monarch.random_blocks(300, 700, 0.35, "cpu")
    assert blocks.shape == (3, 6) and (blocks.sum(1) == 2).all()
    mask = gpu_monarch.block_mask(blocks, 300, 700)
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == 6 and mask.kv_num_blocks.sum() == blocks[:, -1].sum()
    q, k, v = (torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (300, 700, 701))
    from torch.nn.attention.flex_attention import flex_attention

    see = blocks.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :700]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v[:, :, :700], attn_mask=see)
    assert (flex_attention(q, k, v[:, :, :700], block_mask=mask) - want).abs().max() <= 1e-5


def test_rows_of_masked_attention_and_their_gradient():
    suite = gpu_bench.MonarchAttention("cpu", True)
    d = suite.data(suite.cells()[1], suite.pool(suite.cells()[1]))
    q, k, v, g = (d.dense(x).double() for x in (d.q, d.k, d.v, d.grad))
    see = torch.rand(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(0)) < 0.5
    out, dq, *_ = gpu_monarch.gradients(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=see), q, k, v, g)
    rows = torch.tensor([0, 5, 47])
    for got, want in zip(gpu_monarch.dense_rows(d, 1, rows, see[rows]), (out, dq)): assert (got - want[0, 1, rows]).abs().max() <= 1e-12


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_3():
    ran = subprocess.run([sys.executable, "ci/gpu_bench.py"], check=False, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 3 and ran.stdout == "" and ran.stderr == "gpu_bench: needs gpu: PyTorch sees no CUDA device (--dry-run shows the path on the CPU)\n"


def test_an_unknown_kernel_is_named():
    assert gpu_bench.main(["nope"]) == 2


def test_table_and_mask_say_the_same(data):
    for b, r in ((0, 0), (1, 1)):
        assert data.ids[b, r, : data.counts[b, r]].tolist() == data.selected[b, r].nonzero().flatten().tolist()


def test_block_mask_is_the_table_under_the_causal_mask(data):
    "FlexAttention must do the same work: every needed tile listed once, and as full only where every row sees all of it."
    mask = gpu_bench.block_mask(data, q_block=16)
    position = CELL.q_start + torch.arange(48).clamp(max=CELL.chunk - 1)
    see = (torch.arange(CELL.keys) <= position[:, None]) & data.selected.repeat_interleave(CELL.G, 1).repeat_interleave(CELL.page, -1)[:, :, None]
    tiles = see.unflatten(2, (3, 16)).unflatten(-1, (10, 16)).transpose(3, 4)
    listed = lambda n, ids: torch.zeros(*n.shape, 10, dtype=torch.bool).scatter_(-1, ids.long(), torch.arange(10) < n[..., None])
    full, partial = listed(mask.full_kv_num_blocks, mask.full_kv_indices), listed(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full | partial, tiles.flatten(4).any(-1)) and not (full & partial).any()
    assert (tiles.flatten(4).all(-1) | ~full).all()


def test_flashinfer_tables_give_the_same_attention(data):
    "Emulate what FlashInfer does with them: the last query sees the last listed key."
    indptr, indices, last = gpu_bench.flashinfer_tables(data.ids, data.pages, data.counts, data.seq_lens, CELL.page)
    out = torch.empty_like(data.q)
    for row in range(CELL.B * CELL.Hkv):
        listed = indices[indptr[row] : indptr[row + 1]].long()
        n = (len(listed) - 1) * CELL.page + int(last[row])
        k, v = (x[listed].reshape(-1, CELL.D)[:n] for x in (data.k_pages, data.v_pages))
        see = torch.arange(n) <= n - CELL.chunk + torch.arange(CELL.chunk)[:, None]
        b, r = divmod(row, CELL.Hkv)
        heads = slice(r * CELL.G, (r + 1) * CELL.G)
        out[b, heads] = torch.nn.functional.scaled_dot_product_attention(data.q[b, heads], k, v, attn_mask=see)
    assert gpu_bench.spot_error(data, out, dense=False) <= 1e-6


def test_spot_check_sees_a_wrong_row(data):
    out = torch.nn.functional.scaled_dot_product_attention(data.q, data.k, data.v, enable_gqa=True, attn_mask=torch.arange(160) <= 120 + torch.arange(40)[:, None])
    assert gpu_bench.spot_error(data, out, dense=True) <= 1e-6
    out[1, 5, 39] = float("nan")
    assert gpu_bench.spot_error(data, out, dense=True) == float("inf")


def test_work_is_counted_under_the_causal_mask(data):
    suite = gpu_bench.PagedGQA("cpu", True)
    causal = torch.arange(CELL.keys) <= CELL.q_start + torch.arange(CELL.chunk)[:, None]
    table = causal & data.selected.repeat_interleave(CELL.G, 1).repeat_interleave(CELL.page, -1)[:, :, None]
    dense_pairs, table_pairs = CELL.B * CELL.Hq * int(causal.sum()), int(table.sum())
    q_out, token = 2 * data.q.numel() * 4, 2 * CELL.D * 4
    assert suite.work(data, "sdpa_flash") == (4 * CELL.D * dense_pairs, q_out + token * CELL.B * CELL.Hkv * CELL.keys)
    assert suite.work(data, "ours") == (4 * CELL.D * table_pairs, q_out + token * int(data.counts.sum()) * CELL.page)
