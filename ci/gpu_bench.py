"""Benchmark of the hand-written kernels on a GPU: correctness first, then time against the strongest peers in the same run.

A suite has `gate()`, which compares the kernel with float64 over shapes and types, and `cells()`, the grid. In each cell
every method's output is checked again before anything is timed; all methods of a cell are timed in turns. Rows are written
after every cell, so that a stop at the time limit loses nothing, and what was left out is a row with its reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "ci" / "tests" / "kernels")]

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_monarch import MonarchAttention
from neurips26_lit.core import bench


class Skip(Exception):
    "A method that can't run here; the message is the reason in its row."


# --- paged_gqa -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    "One point of the grid: a chunk of queries at the end of `keys` tokens, reading a share `density` of the blocks."
    B: int
    Hq: int
    Hkv: int
    D: int
    page: int
    chunk: int
    keys: int
    density: float
    dtype: str = "bfloat16"

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    @property
    def q_start(self) -> int:
        return self.keys - self.chunk

    def label(self) -> dict:
        return {"chunk": self.chunk, "keys": self.keys, "density": self.density, "page": self.page, "dtype": self.dtype}


@dataclass
class Data:
    "Tensors of a cell. The same tokens lie in dense k, v and, page by page in shuffled places, in the pool."
    cell: Cell
    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    selected: Tensor     # Bool [B, Hkv, blocks]
    ids: Tensor
    pages: Tensor
    counts: Tensor
    seq_lens: Tensor
    mask: Tensor         # Bool [B, Hq, nq, blocks]: a selection whose union is `selected`
    keep: dict = field(default_factory=dict)


def make_pool(cell: Cell, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    "Dense k, v [B, Hkv, keys, D], the shuffled pool, and the block table [B, Hkv, blocks]."
    shape = (cell.B, cell.Hkv, cell.keys, cell.D)
    k, v = (torch.randn(shape, device=device, dtype=getattr(torch, cell.dtype)) for _ in range(2))
    blocks = cell.keys // cell.page
    place = torch.randperm(cell.B * cell.Hkv * blocks, device=device)
    k_pages, v_pages = (torch.empty(len(place), cell.page, cell.D, device=device, dtype=k.dtype) for _ in range(2))
    k_pages[place], v_pages[place] = k.view(-1, cell.page, cell.D), v.view(-1, cell.page, cell.D)
    return k, v, k_pages, v_pages, place.view(cell.B, cell.Hkv, blocks).int()


def make_data(cell: Cell, pool: tuple, device: str) -> Data:
    "Queries and a random table of the cell's density; blocks of the chunk itself are always read."
    from neurips26_lit.kernels import paged_gqa

    k, v, k_pages, v_pages, place = pool
    blocks, own = cell.keys // cell.page, -(-cell.chunk // cell.page)
    wanted = max(round(cell.density * blocks), own)
    score = torch.rand(cell.B, cell.Hkv, blocks, device=device)
    score[..., blocks - own:] = 2.0
    selected = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(wanted, -1).indices, True)
    nq = -(-cell.chunk // cell.page)
    owner = torch.randint(cell.G * nq, selected.shape, device=device)                    # the one (head, query block) that asks for it
    mask = (owner[:, :, None] == torch.arange(cell.G * nq, device=device)[:, None]) & selected[:, :, None]
    mask = mask.reshape(cell.B, cell.Hq, nq, blocks)
    ids, counts = paged_gqa.union_tables(mask, cell.G, current=own)
    if not torch.equal(counts.long(), selected.sum(-1)): raise AssertionError("union_tables lost a selected block")
    ids = ids[..., : int(counts.max())].contiguous()
    lens = torch.full((cell.B,), cell.keys, dtype=torch.int32, device=device)
    q = torch.randn(cell.B, cell.Hq, cell.chunk, cell.D, device=device, dtype=k.dtype)
    return Data(cell, q, k, v, k_pages, v_pages, selected, ids, paged_gqa.physical_pages(ids, place), counts, lens, mask)


def spot_error(d: Data, out: Tensor, dense: bool) -> float:
    "Relative error of sampled rows (first and last of the chunk, several heads) against attention in float64."
    c, worst = d.cell, 0.0
    rows = torch.cat([torch.arange(min(8, c.chunk)), torch.arange(max(c.chunk - 8, 0), c.chunk)]).to(d.q.device)
    key = torch.arange(c.keys, device=d.q.device)
    for b, h in {(0, 0), (c.B - 1, c.Hq - 1), (c.B // 2, c.Hq // 2)}:
        see = key <= c.q_start + rows[:, None]
        if not dense: see = see & d.selected[b, h // c.G].repeat_interleave(c.page)
        k, v = d.k[b, h // c.G].double(), d.v[b, h // c.G].double()
        scores = (d.q[b, h, rows].double() @ k.T / math.sqrt(c.D)).masked_fill(~see, -math.inf)
        want = scores.softmax(-1) @ v
        error = float((out[b, h, rows].double() - want).norm() / want.norm())
        worst = max(worst, error if math.isfinite(error) else math.inf)                   # max(0, nan) is 0
    return worst


def merge_two(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    "Attention over two disjoint key sets from (out, lse) of each."
    weight = torch.sigmoid(a[1].float() - b[1].float())[..., None]
    return torch.lerp(b[0].float(), a[0].float(), weight).to(a[0].dtype)


def two_parts(d: Data, attend: Callable) -> Tensor:
    """Dense attention in two calls that every backend has: the past without a mask, with the group's heads side by side as
    queries of one head, and the chunk itself with the square causal mask. `attend(q, k, v, causal) -> (out, lse)`."""
    c, s = d.cell, d.cell.q_start
    packed = d.q.view(c.B, c.Hkv, c.G * c.chunk, c.D)
    out, lse = attend(packed, d.k[:, :, :s], d.v[:, :, :s], False)
    k, v = (x[:, :, s:].repeat_interleave(c.G, 1) for x in (d.k, d.v))
    return merge_two((out.reshape(d.q.shape), lse.reshape(d.q.shape[:3])), attend(d.q, k, v, True))


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    "cuDNN's attention, the fastest dense one in PyTorch on Hopper."
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.reshape(q.shape[:3])


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    "The same on a CPU, for the dry run."
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def block_mask(d: Data, q_block: int = 128):
    "FlexAttention's BlockMask of the tables: full blocks, and those that straddle the causal edge with a mask function."
    from torch.nn.attention.flex_attention import BlockMask

    c, device = d.cell, d.q.device
    begin = c.q_start + torch.arange(0, c.chunk, q_block, device=device)
    last = torch.minimum(begin + q_block, torch.tensor(c.keys, device=device)) - 1
    block = torch.arange(c.keys // c.page, device=device)
    full = (block[None] + 1) * c.page <= begin[:, None] + 1
    partial = ~full & (block[None] * c.page <= last[:, None])
    rows = d.selected.repeat_interleave(c.G, 1)[:, :, None]
    order = lambda keep: (keep.sum(-1).int(), torch.argsort(keep.int(), dim=-1, descending=True, stable=True).int())
    (n_full, full_ids), (n_part, part_ids) = order(rows & full), order(rows & partial)
    selected, page, start, G = d.selected, c.page, c.q_start, c.G

    def see(b, h, q, kv):
        return selected[b, h // G, kv // page] & (kv <= q + start)

    return BlockMask.from_kv_blocks(n_part, part_ids, n_full, full_ids, BLOCK_SIZE=(q_block, c.page), mask_mod=see, seq_lengths=(c.chunk, c.keys), compute_q_blocks=False)


def flashinfer_tables(ids: Tensor, pages: Tensor, counts: Tensor, seq_lens: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's paged tables, each (sequence, KV head) as a sequence of its own: (indptr, page indices, tokens in the last page).

    Its causal mask counts from the end of the listed keys, which fits because a table ends with the chunk's own blocks."""
    counts, width = counts.reshape(-1), ids.shape[-1]
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
    used = torch.arange(width, device=ids.device) < counts[:, None]
    indices = pages.reshape(-1, width)[used]
    last = (seq_lens - 1) % page + 1
    return indptr.int(), indices.int(), last.repeat_interleave(len(counts) // len(seq_lens)).int()


class PagedGQA:
    "paged_gqa against SDPA (FlashAttention, cuDNN), FlexAttention and FlashInfer."
    name = "paged_gqa"
    dense = ("sdpa_flash", "sdpa_cudnn", "flashinfer_dense")
    tolerance: ClassVar = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}             # relative, of the Frobenius norm

    def __init__(self, device: str, dry: bool):
        from neurips26_lit.kernels import paged_gqa

        self.kernel, self.device, self.dry, self.compiled, self.shapes = paged_gqa, device, dry, None, set()

    # correctness
    def gate(self) -> Iterator[dict]:
        "Rows {case, dtype, error, allowed, ok} over types, pages, groups, head sizes, splits; NaN wherever nothing may be read."
        import paged

        types = ("float32",) if self.dry else ("float32", "float16", "bfloat16")
        shapes = [(2, 2, g, t, past, D, page) for g, t, past, D, page in (
            (1, 130, 333, 64, 16), (3, 257, 510, 64, 32), (4, 128, 1024, 128, 64), (7, 61, 1000, 128, 128), (8, 1, 777, 80, 64), (8, 200, 4000, 128, 128))]
        for dtype, shape, splits in product(types, shapes[:2] if self.dry else shapes, (1, 3)):
            p = paged.make(*shape, dtype=getattr(torch, dtype), density=0.4, seed=sum(shape), ragged=splits == 3, shuffle=splits == 3)
            yield self._gate_row(f"B{shape[0]} R{shape[1]} G{shape[2]} Tq{shape[3]} past {shape[4]} D{shape[5]} page {shape[6]} splits {splits}", dtype, p, splits)
        for dtype in types:
            p = paged.make(1, 4, 1, 150, 300, 64, 16, dtype=getattr(torch, dtype), density=0.4, q_block=64)
            yield self._gate_row("block-sparse, 64 queries a block", dtype, p, 1)
        yield self._gate_union()
        if not self.dry: yield self._gate_far_pages()

    def _gate_row(self, case: str, dtype: str, p, splits: int) -> dict:
        "One case: finite, within the type's tolerance, and at most twice PyTorch's own error."
        import paged

        want = p.answer()[0]
        on = lambda x: x.to(self.device)
        q = on(p.q) if p.q.is_contiguous() else on(p.q.transpose(1, 2).contiguous()).transpose(1, 2)
        tables = [on(x) for x in p.tables]
        if p.ids.shape[2] == 1:
            call = self.kernel.paged_gqa_prefill
            tables, options = [x.squeeze(2) for x in tables], {}
        else: call, options = self.kernel.block_sparse_prefill, {"q_block": p.q_block}
        out, lse = call(q, on(p.k_pages), on(p.v_pages), *tables, on(p.seq_lens), p.q_start, splits=splits, return_lse=True, **options)
        out, lse = out.cpu(), lse.cpu()
        error = float((out.double() - want).norm() / want.norm())
        why = "" if error <= self.tolerance[dtype] else f"relative error {error:.3g} > {self.tolerance[dtype]:g}"
        why = why or paged.verdict(p, out, lse)
        return {"case": case, "dtype": dtype, "error": error, "allowed": self.tolerance[dtype], "ok": not why, "why": why}

    def _gate_union(self) -> dict:
        "Tables on the device against the PyTorch reference, over 300 blocks."
        mask = torch.rand(3, 12, 5, 300, generator=torch.Generator().manual_seed(0)) < 0.01
        ids, counts = (x.cpu() for x in self.kernel.union_tables(mask.to(self.device), 3, keep_recent=2, current=4))
        want = self.kernel.union_reference(mask, 3, 2, 4)
        same = torch.equal(ids, want[0]) and torch.equal(counts, want[1])
        return {"case": "union_tables", "dtype": "bool", "error": 0.0 if same else 1.0, "allowed": 0.0, "ok": same, "why": "" if same else "tables differ"}

    def _gate_far_pages(self) -> dict:
        "Pages beyond 2**31 elements: addresses must be 64-bit."
        page, D, n = 64, 128, 2**31 // (64 * 128) + 64
        free = torch.cuda.mem_get_info()[0]
        row = {"case": "pages beyond 2**31 elements", "dtype": "bfloat16", "error": 0.0, "allowed": self.tolerance["bfloat16"], "ok": True, "why": ""}
        if free < 3 * n * page * D * 2: return row | {"why": f"not run: {free / 2**30:.0f} GiB free"}
        k, v = (torch.empty(n, page, D, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        k[-8:].normal_(), v[-8:].normal_()
        q = torch.randn(1, 4, 64, D, device=self.device, dtype=torch.bfloat16)
        int32 = lambda *x: torch.tensor(x, dtype=torch.int32, device=self.device)
        ids, pages = int32(*range(8)).view(1, 1, 8), int32(*range(n - 8, n)).view(1, 1, 8)
        out = self.kernel.paged_gqa_prefill(q, k, v, ids, pages, int32(8).view(1, 1), int32(512), 448)
        keys, values = (x[-8:].view(1, 1, 512, D).double().expand(1, 4, 512, D) for x in (k, v))
        see = torch.arange(512, device=self.device) <= 448 + torch.arange(64, device=self.device)[:, None]
        want = F.scaled_dot_product_attention(q.double(), keys, values, attn_mask=see)
        error = float((out.double() - want).norm() / want.norm())
        ok = error <= self.tolerance["bfloat16"]
        return row | {"error": error, "ok": ok, "why": "" if ok else f"relative error {error:.3g}"}

    # speed
    def cells(self) -> list[Cell]:
        "The grid, most telling cells first."
        if self.dry: return [Cell(1, 4, 2, 64, 32, chunk, keys, density, "float32") for chunk, keys, density in product((64,), (256, 512), (0.25,))]
        big = {"B": 8, "Hq": 32, "Hkv": 8, "D": 128}
        grid = [Cell(**big, page=128, chunk=chunk, keys=keys, density=density) for chunk in (1024, 2048, 512) for keys in (131072, 65536, 32768) for density in (0.25, 0.1, 0.5)]
        return [*grid[:9], *(Cell(**big, page=64, chunk=1024, keys=keys, density=0.25) for keys in (131072, 32768)), *grid[9:]]

    def pool_key(self, cell: Cell) -> tuple:
        return cell.B, cell.Hkv, cell.D, cell.page, cell.keys, cell.dtype

    def pool(self, cell: Cell) -> tuple:
        return make_pool(cell, self.device)

    def data(self, cell: Cell, pool: tuple) -> Data:
        d = make_data(cell, pool, self.device)
        d.keep["place"] = pool[-1]
        return d

    def error(self, d: Data, out: Tensor, method: str) -> float:
        return spot_error(d, out, method in self.dense)

    def seconds(self, cell: Cell, repeats: int) -> float:
        "A careful guess: dense attention at a quarter of the peak for three methods, and set-up."
        if self.dry: return 0.1
        return 2.0 + 3 * (repeats + 4) * 4.0 * cell.D * cell.B * cell.Hq * cell.chunk * cell.keys / 200e12

    def methods(self, d: Data, seconds_left: float) -> dict[str, Callable | Skip]:
        "Name -> call, or the reason why there is none."
        make = {
            "ours": lambda: self.ours(d), "sdpa_flash": lambda: self.flash(d), "sdpa_cudnn": lambda: self.cudnn(d), "flex": lambda: self.flex(d, seconds_left),
            "flashinfer": lambda: self.flashinfer(d, dense=False), "flashinfer_dense": lambda: self.flashinfer(d, dense=True),
        }
        found: dict[str, Callable | Skip] = {}
        for name, build in make.items():
            try: found[name] = build()
            except Skip as e: found[name] = e
            except Exception as e: found[name] = Skip(f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}")  # noqa: BLE001 - any failure of a peer is a row with its reason
        return found

    def ours(self, d: Data) -> Callable:
        return lambda: self.kernel.paged_gqa_prefill(d.q, d.k_pages, d.v_pages, d.ids, d.pages, d.counts, d.seq_lens, d.cell.q_start)

    def flash(self, d: Data) -> Callable:
        if self.device == "cpu":
            see = torch.arange(d.cell.keys) <= d.cell.q_start + torch.arange(d.cell.chunk)[:, None]
            return lambda: F.scaled_dot_product_attention(d.q, d.k, d.v, attn_mask=see, enable_gqa=True)
        return lambda: torch.ops.aten._scaled_dot_product_flash_attention(d.q, d.k, d.v, 0.0, True)[0]   # causal from the lower right

    def cudnn(self, d: Data) -> Callable:
        return lambda: two_parts(d, cpu_flash if self.device == "cpu" else cudnn)

    def flex(self, d: Data, seconds_left: float) -> Callable:
        from torch.nn.attention.flex_attention import flex_attention

        shape = (d.cell.chunk, d.cell.keys, d.cell.page)
        if not self.dry and shape not in self.shapes and seconds_left < 75: raise Skip(f"{seconds_left:.0f} s left, not enough to compile FlexAttention for a new shape")
        if self.compiled is None:
            torch._dynamo.config.recompile_limit = 64
            self.compiled = flex_attention if self.dry else torch.compile(flex_attention, dynamic=False)
        self.shapes.add(shape)
        mask = block_mask(d)
        return lambda: self.compiled(d.q, d.k, d.v, block_mask=mask, enable_gqa=True)

    def flashinfer(self, d: Data, dense: bool) -> Callable:
        if importlib.util.find_spec("flashinfer") is None: raise Skip("flashinfer is not installed")
        import flashinfer

        c = d.cell
        if dense:
            pages = d.keep["place"]
            ids = torch.arange(pages.shape[-1], dtype=torch.int32, device=self.device).expand(pages.shape)
            counts = torch.full(pages.shape[:2], pages.shape[-1], dtype=torch.int32, device=self.device)
        else: ids, pages, counts = d.ids, d.pages, d.counts
        indptr, indices, last = flashinfer_tables(ids, pages, counts, d.seq_lens, c.page)
        rows = c.B * c.Hkv
        q_indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * c.chunk
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 * 2**20, dtype=torch.uint8, device=self.device), "NHD")
        wrapper.plan(q_indptr, indptr, indices, last, c.G, 1, c.D, c.page, causal=True, q_data_type=d.q.dtype, kv_data_type=d.k.dtype)
        q = d.q.view(rows, c.G, c.chunk, c.D).transpose(1, 2).reshape(rows * c.chunk, c.G, c.D)
        kv = (d.k_pages.unsqueeze(2), d.v_pages.unsqueeze(2))
        return lambda: wrapper.run(q, kv).view(rows, c.chunk, c.G, c.D).transpose(1, 2).reshape(d.q.shape)

    def work(self, d: Data, method: str) -> tuple[float, float]:
        "(FLOPs, least bytes) of a method: what its function needs, counted exactly under the causal mask."
        c = d.cell
        triangle = c.Hq * c.chunk * (c.chunk + 1) // 2 * c.B
        rows = 2 * d.q.numel() * d.q.element_size()
        if method in self.dense: keys, tokens = c.B * c.Hq * c.chunk * c.q_start, c.B * c.Hkv * c.keys
        else:
            past = int(d.counts.sum()) * c.page - c.B * c.Hkv * c.chunk
            keys, tokens = c.G * c.chunk * past, int(d.counts.sum()) * c.page
        return 4.0 * c.D * (keys + triangle), rows + 2.0 * c.D * tokens * d.q.element_size()

    def plot(self, record: dict, axes) -> None:
        "Time against the number of keys, and the speed-up of ours over the fastest dense method."
        left, right = axes
        rows = [r for r in record["rows"] if r["ms"]]
        chunk, density, page = rows[0]["chunk"], rows[0]["density"], rows[0]["page"]
        for method in dict.fromkeys(r["method"] for r in rows):
            mine = sorted((r["keys"], r["ms"]) for r in rows if (r["method"], r["chunk"], r["density"], r["page"]) == (method, chunk, density, page))
            if mine: left.plot(*zip(*mine), marker="o", label=method)
        left.set(yscale="log", xlabel="keys", ylabel="ms", title=f"Chunk {chunk}, density {density:g}")
        left.legend(fontsize=7)
        for d in sorted({r["density"] for r in rows}):
            points = []
            for keys in sorted({r["keys"] for r in rows}):
                here = {r["method"]: r["ms"] for r in rows if (r["keys"], r["density"], r["chunk"], r["page"]) == (keys, d, chunk, page)}
                dense = [here[m] for m in self.dense if m in here]
                if dense and "ours" in here: points.append((keys, min(dense) / here["ours"]))
            if points: right.plot(*zip(*points), marker="o", label=f"density {d:g}")
        for ax in axes:
            ticks = sorted({r["keys"] for r in rows})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
        right.axhline(1, lw=0.8, ls=":", color="gray")
        right.set(xlabel="keys", ylabel="speed-up over the fastest dense", title=f"{record['name']} on {record['gpu']}")
        right.legend(fontsize=7)


SUITES = {"paged_gqa": PagedGQA, "monarch_attention": MonarchAttention}


# --- the run ---------------------------------------------------------------------------------------------------------------
def installed(package: str) -> str | None:
    try: return version(package)
    except PackageNotFoundError: return None


def commit() -> tuple[str, bool]:
    "(short hash, whether files differ from it)."
    git = lambda *a: subprocess.run(["git", *a], check=False, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return git("rev-parse", "--short=12", "HEAD") or "unknown", bool(git("status", "--porcelain", "kernels", "ci"))


def facts(device: str) -> dict:
    "What a number depends on."
    revision, dirty = commit()
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none (dry run on the CPU)"
    return {"gpu": gpu, "commit": revision + ("+changes" if dirty else ""), "torch": torch.__version__, "triton": installed("triton"), "cuda": torch.version.cuda, "flashinfer": installed("flashinfer-python")}


def write(path: Path, record: dict) -> None:
    "Whole or not at all."
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".bench", delete=False) as file: json.dump(record, file, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def run_cell(suite, d, stamp: dict, peak: bench.Peaks, repeats: int, seconds_left: float) -> list[dict]:
    "Check every method's output, then time those that are right, in turns. A wrong or missing one is a row with a reason."
    calls, rows, allowed = {}, [], suite.tolerance[d.cell.dtype]
    for name, call in suite.methods(d, seconds_left).items():
        row = {"method": name, **d.cell.label(), "ms": None, "tflops": None, "gbs": None, "roofline": None, "speedup": None, "low": None, "high": None, "n": 0, "reason": "", **stamp}
        try:
            if isinstance(call, Skip): raise call
            error = suite.error(d, call(), name)
            if error > allowed: raise Skip(f"wrong answer: relative error {error:.3g} > {allowed:g}")
            calls[name] = call
        except Skip as e: row["reason"] = str(e)
        except Exception as e: row["reason"] = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"  # noqa: BLE001 - any failure of a peer is a row with its reason
        rows.append(row)
    if "ours" not in calls: return rows
    table = bench.compare(calls, (), repeats=repeats, device=suite.device, seed=zlib.crc32(repr(d.cell).encode())).set_index("method")
    for row in rows:
        if row["method"] not in table.index: continue
        flops, moved = suite.work(d, row["method"])
        t, ratio = table.loc[row["method"]], bench.roofline(flops, moved, peak)
        seconds = t["median_ms"] / 1e3
        row |= {"ms": round(t["median_ms"], 4), "tflops": round(flops / seconds / 1e12, 2), "gbs": round(moved / seconds / 1e9, 1), "roofline": round(ratio.fraction(seconds), 3),
                "speedup": round(t["ratio"], 3), "low": round(t["ratio_low"], 3), "high": round(t["ratio_high"], 3), "n": int(t["n"])}
    return rows


def left_out(cell, stamp: dict, reason: str) -> dict:
    return {"method": "all", **cell.label(), "ms": None, "tflops": None, "gbs": None, "roofline": None, "speedup": None, "low": None, "high": None, "n": 0, "reason": reason, **stamp}


def plot(suite, record: dict, path: Path) -> None:
    "Two panels, drawn by the suite."
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from neurips26_lit.core.figures import house_style

    house_style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    suite.plot(record, axes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(name: str, out: Path, minutes: float, dry: bool, repeats: int) -> int:
    "One kernel: gate, grid, file, plot. Returns the exit status."
    start, device = time.monotonic(), "cpu" if dry else "cuda"
    left = lambda: 60 * minutes - (time.monotonic() - start)
    torch.manual_seed(0)
    suite, about = SUITES[name](device, dry), facts(device)
    slug = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower().replace("nvidia", "")).strip("-")
    path = out / f"{name}.bench.{slug}.json"
    record = {"name": name, **about, "dry_run": dry, "complete": False, "seconds": 0.0, "gate_passed": False, "gate": [], "rows": []}
    for row in suite.gate():
        record["gate"].append(row)
        if not row["ok"]: print(f"gpu_bench: {name}: {row['case']} {row['dtype']}: {row['why']}", file=sys.stderr)
    bad = sum(not row["ok"] for row in record["gate"])
    record["gate_passed"] = not bad
    print(f"{name}: {len(record['gate']) - bad} of {len(record['gate'])} correctness cases pass ({time.monotonic() - start:.0f} s)", flush=True)
    if bad:
        write(path, record | {"complete": True, "seconds": round(time.monotonic() - start, 1)})
        print(f"gpu_bench: {name}: wrong answers, so no speed is reported", file=sys.stderr)
        return 1
    peak = bench.peaks(device, "float32" if dry else "bfloat16")
    stamp, pool, key = {k: about[k] for k in ("gpu", "commit", "torch", "triton")}, None, None
    try:
        for cell in suite.cells():
            if left() < (need := suite.seconds(cell, repeats)): record["rows"].append(left_out(cell, stamp, f"time limit: {left():.0f} s left, about {need:.0f} s needed"))
            else:
                if suite.pool_key(cell) != key:
                    pool = None
                    gc.collect()
                    pool, key = suite.pool(cell), suite.pool_key(cell)
                rows = run_cell(suite, suite.data(cell, pool), stamp, peak, repeats, left())
                record["rows"] += rows
                print("  " + ", ".join(f"{k} {v}" for k, v in cell.label().items()) + ": " + ", ".join(f"{r['method']} {r['ms']:.3g} ms" for r in rows if r["ms"]), flush=True)
            write(path, record | {"seconds": round(time.monotonic() - start, 1)})
        record["complete"] = True
    except KeyboardInterrupt: print("gpu_bench: interrupted; writing what there is", file=sys.stderr)
    write(path, record | {"seconds": round(time.monotonic() - start, 1)})
    wrong = [r for r in record["rows"] if r["method"] == "ours" and not r["ms"]]
    if any(r["ms"] for r in record["rows"]): plot(suite, record, path.with_suffix(".png"))
    print(f"{name}: {sum(bool(r['ms']) for r in record['rows'])} rows timed, {sum(not r['ms'] for r in record['rows'])} left out, {time.monotonic() - start:.0f} s -> {path}")
    if wrong: print(f"gpu_bench: {name}: {wrong[0]['reason']}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_bench", description="Correctness, then speed, of the hand-written kernels on this machine's GPU.")
    parser.add_argument("names", nargs="*", metavar="KERNEL", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--out", type=Path, help="folder of the results; kernels/ by default, a new temporary one for a dry run")
    parser.add_argument("--minutes", type=float, default=6, help="time limit of each kernel")
    parser.add_argument("--repeats", type=int, default=10, help="rounds, at least 5")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args(arguments)
    if unknown := [n for n in options.names if n not in SUITES]:
        print(f"gpu_bench: no benchmark of {unknown[0]!r}; expected {', '.join(SUITES)}", file=sys.stderr)
        return 2
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_bench: needs gpu: PyTorch sees no CUDA device (--dry-run shows the path on the CPU)", file=sys.stderr)
        return 3
    out = options.out or (Path(tempfile.mkdtemp(prefix="gpu_bench.")) if options.dry_run else ROOT / "kernels")
    out.mkdir(parents=True, exist_ok=True)
    return max(run(name, out, options.minutes, options.dry_run, options.repeats) for name in options.names or SUITES)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # compiled code, whatever the shell says; Triton is imported later
    sys.exit(main())
