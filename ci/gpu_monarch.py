"""monarch_attention on a GPU: the gate and the grid that ci/gpu_bench.py runs.

The peers compute dense attention over the same tokens, which is what the paper compares with; their answers differ from
ours by design. FlexAttention computes block-sparse attention at Monarch's density, over random blocks, as a sparse rival would.
So each is checked against its own float64 reference, and the eager PyTorch reference of the kernel is timed beside it to
show what the fusion brings. A cell times the forward pass, or forward and backward together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Cell:
    "One point of the grid: `queries` frames attend to `frames` frames of rows x columns tokens."
    queries: int
    frames: int
    rows: int
    columns: int
    heads: int
    D: int
    backward: bool
    dtype: str = "bfloat16"
    B: int = 1

    def label(self) -> dict:
        return {"queries": self.queries, "frames": self.frames, "rows": self.rows, "columns": self.columns, "heads": self.heads,
                "pass": "forward + backward" if self.backward else "forward", "dtype": self.dtype}


@dataclass
class Data:
    "Tensors of a cell: tiles [B, frames, rows, columns, H, D]; the same memory as [B, H, tokens, D] for the dense peers."
    cell: Cell
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    blocks: Tensor       # Bool [query blocks, key blocks]: what the sparse rival reads, at Monarch's density

    def dense(self, x: Tensor) -> Tensor:
        return x.flatten(1, 3).transpose(1, 2)


def relative(got: Tensor, want: Tensor) -> float:
    "Relative error in the Frobenius norm; infinite when anything isn't finite."
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if math.isfinite(error) else math.inf


def gradients(attend: Callable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    "(out, dq, dk, dv) of an attention."
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, grad))


BLOCK = 128


def random_blocks(n_queries: int, n_keys: int, density: float, device: str) -> Tensor:
    "Bool [query blocks, key blocks] with the same number of key blocks, at random, for every query block."
    rows, columns = -(-n_queries // BLOCK), -(-n_keys // BLOCK)
    best = torch.rand(rows, columns, device=device).topk(max(1, round(density * columns)), -1).indices
    return torch.zeros(rows, columns, dtype=torch.bool, device=device).scatter_(-1, best, True)


def block_mask(blocks: Tensor, n_queries: int, n_keys: int):
    "FlexAttention's BlockMask of them: every block is full, but for a last one that isn't whole."
    from torch.nn.attention.flex_attention import BlockMask

    whole = torch.ones_like(blocks)
    if n_keys % BLOCK: whole[:, -1] = False
    order = lambda keep: (keep.sum(-1).int()[None, None], torch.argsort(keep.int(), dim=-1, descending=True, stable=True).int()[None, None])
    (n_full, full), (n_part, part) = order(blocks & whole), order(blocks & ~whole)
    return BlockMask.from_kv_blocks(n_part, part, n_full, full, BLOCK_SIZE=BLOCK, mask_mod=lambda b, h, q, kv: blocks[q // BLOCK, kv // BLOCK], seq_lengths=(n_queries, n_keys))


def dense_rows(d: Data, head: int, rows: Tensor, see: Tensor | None = None) -> tuple[Tensor, Tensor]:
    "Attention of some rows of a head in float64, under a Bool mask [rows, keys], and their dq, which needs no other row."
    q, k, v, g = (d.dense(x)[0, head].double() for x in (d.q, d.k, d.v, d.grad))
    q, g, scale = q[rows], g[rows], 1 / math.sqrt(q.shape[-1])
    scores = scale * q @ k.T
    p = (scores if see is None else scores.masked_fill(~see, -math.inf)).softmax(-1)
    out = p @ v
    return out, scale * (p * (g @ v.T - (g * out).sum(-1, keepdim=True))) @ k


class MonarchAttention:
    "monarch_attention against dense SDPA (FlashAttention, cuDNN), FlexAttention at equal density, and its own PyTorch reference."
    name = "monarch_attention"
    dense = ("sdpa_flash", "sdpa_cudnn")
    tolerance: ClassVar = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}             # relative, of the Frobenius norm

    def __init__(self, device: str, dry: bool):
        from neurips26_lit.kernels import monarch_attention

        self.kernel, self.device, self.dry, self.compiled = monarch_attention, device, dry, None

    # correctness
    def gate(self) -> Iterator[dict]:
        "Rows {case, dtype, error, allowed, ok, why}: forward and gradients over types, shapes and causality, with NaN beside every tensor."
        types = ("float32",) if self.dry else ("float32", "float16", "bfloat16")
        shapes = [(1, 2, 3, 4, 5, 2, 16, 0), (2, 4, 4, 3, 7, 1, 40, 2), (1, 3, 7, 30, 52, 2, 128, 0), (1, 6, 6, 16, 33, 2, 64, 3)]
        for dtype, shape in product(types, shapes[:2] if self.dry else shapes): yield from self._gate_rows(dtype, shape)

    def _gate_rows(self, dtype: str, shape: tuple[int, ...]) -> Iterator[dict]:
        B, A, frames, b1, b2, H, D, causal = shape
        g = torch.Generator().manual_seed(sum(shape))
        q, k, v, grad = (torch.randn(B, n, b1, b2, H, D, generator=g).to(getattr(torch, dtype)) for n in (A, frames, frames, A))
        wide = gradients(lambda *x: self.kernel.monarch_attention_tiles(*x, causal=causal), *(x.double().cpu() for x in (q, k, v, grad)))
        padded = lambda x: F.pad(x, (0, 8), value=math.nan).to(self.device)[..., :D]
        ours = gradients(lambda *x: self.kernel.monarch_attention_tiles(*x, causal=causal), *map(padded, (q, k, v)), grad.to(self.device))
        for what, got, want in zip(("out", "dq", "dk", "dv"), ours, wide):
            error, allowed = relative(got.cpu(), want), self.tolerance[dtype]
            yield {"case": f"{what}, {A} of {frames} tiles of {b1} x {b2}, D{D}, causal {causal}", "dtype": dtype, "error": error, "allowed": allowed, "ok": error <= allowed,
                   "why": "" if error <= allowed else f"relative error {error:.3g} > {allowed:g}"}

    # speed
    def cells(self) -> list[Cell]:
        "The paper's frames (30 x 52 tokens, 21 latent frames, chunks of 3) on the heads of a 1.3B model, most telling first."
        if self.dry: return [Cell(2, 3, 4, 6, 2, 16, backward, "float32") for backward in (False, True)]
        return [Cell(a, f, 30, 52, 12, 128, backward) for a, f, backward in ((3, 21, False), (21, 21, False), (21, 21, True), (3, 9, False), (9, 9, True))]

    def pool_key(self, cell: Cell) -> tuple:
        return (cell,)

    def pool(self, cell: Cell) -> tuple:
        make = lambda n: torch.randn(cell.B, n, cell.rows, cell.columns, cell.heads, cell.D, device=self.device, dtype=getattr(torch, cell.dtype))
        return make(cell.queries), make(cell.frames), make(cell.frames), make(cell.queries)

    def data(self, cell: Cell, pool: tuple) -> Data:
        place = cell.rows * cell.columns
        return Data(cell, *pool, random_blocks(cell.queries * place, cell.frames * place, 1 / cell.rows + 1 / cell.columns, self.device))

    def _call(self, d: Data, attend: Callable) -> Callable:
        "Forward, or forward and backward, in tiles."
        if d.cell.backward: return lambda: gradients(attend, d.q, d.k, d.v, d.grad)[:2]
        return lambda: (attend(d.q, d.k, d.v),)

    def _flat(self, d: Data, attention: Callable) -> Callable:
        "A peer's attention on [B, H, tokens, D], views of the same memory; out comes back in tiles."
        return self._call(d, lambda q, k, v: attention(d.dense(q), d.dense(k), d.dense(v)).transpose(1, 2).unflatten(1, q.shape[1:4]))

    def _sdpa(self, d: Data, backend: str) -> Callable:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attention(q, k, v):
            with sdpa_kernel([getattr(SDPBackend, backend)] if self.device == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]): return F.scaled_dot_product_attention(q, k, v)

        return self._flat(d, attention)

    def _flex(self, d: Data) -> Callable:
        from torch.nn.attention.flex_attention import flex_attention

        if self.compiled is None: self.compiled = flex_attention if self.dry else torch.compile(flex_attention, dynamic=False)
        mask = block_mask(d.blocks, *(d.dense(x).shape[2] for x in (d.q, d.k)))
        return self._flat(d, lambda q, k, v: self.compiled(q, k, v, block_mask=mask))

    def methods(self, d: Data, seconds_left: float) -> dict[str, Callable]:
        "Name -> call that returns (out,) or (out, dq) in tiles."
        found = {"ours": self._call(d, self.kernel.monarch_attention_tiles), "sdpa_flash": self._sdpa(d, "FLASH_ATTENTION"), "sdpa_cudnn": self._sdpa(d, "CUDNN_ATTENTION"), "flex": self._flex(d)}
        scale = 1 / math.sqrt(d.cell.D)
        if not d.cell.backward: found["reference, eager"] = lambda: (self.kernel.forward_reference(d.q, d.k, d.v, scale, 0)[0],)
        return found

    def error(self, d: Data, got: tuple[Tensor, ...], method: str) -> float:
        "Largest relative error of out and dq: sampled rows for the peers, a whole head for Monarch."
        head, worst = d.cell.heads - 1, 0.0
        if method in (*self.dense, "flex"):
            n = d.dense(d.q).shape[2]
            rows = torch.cat([torch.arange(min(16, n)), torch.arange(max(n - 16, 0), n)]).to(self.device)
            see = d.blocks[rows // BLOCK].repeat_interleave(BLOCK, 1)[:, : d.dense(d.k).shape[2]] if method == "flex" else None
            wants = dense_rows(d, head, rows, see)
            pairs = [(d.dense(x)[0, head][rows], want) for x, want in zip(got, wants)]
        else:
            one = [x[..., head : head + 1, :].double() for x in (d.q, d.k, d.v, d.grad)]
            attend = lambda q, k, v: self.kernel.forward_reference(q, k, v, 1 / math.sqrt(d.cell.D), 0)[0]
            wants = gradients(self._double, *one) if d.cell.backward else (attend(*one[:3]),)
            pairs = [(x[..., head : head + 1, :], want) for x, want in zip(got, wants)]
        for x, want in pairs: worst = max(worst, relative(x, want))
        return worst

    def _double(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        "Monarch attention in float64 by materialised factors, a query tile at a time: an independent route with autograd."
        scale, out = 1 / math.sqrt(q.shape[-1]), []
        for tile in q.unbind(1):
            logits = scale * torch.einsum("bkjhd,bfklhd->bhfkjl", tile, k)
            R = logits.softmax(-1)
            pooled_k, pooled_v = (torch.einsum("bhfkjl,bfklhd->bhfkjd", R, x) for x in (k, v))
            c = torch.special.entr(R).sum(-1)
            rows = scale * torch.einsum("bijhd,bhfkjd->bhjifk", tile, pooled_k) + c.permute(0, 1, 4, 2, 3)[:, :, :, None]
            L = rows.flatten(-2).softmax(-1).view_as(rows)
            out.append(torch.einsum("bhjifk,bhfkjd->bijhd", L, pooled_v))
        return torch.stack(out, 1)

    def seconds(self, cell: Cell, repeats: int) -> float:
        "A careful guess: dense attention at a quarter of the peak for three methods, set-up, and a compilation of FlexAttention."
        if self.dry: return 0.1
        return 20.0 + 3 * (repeats + 4) * self._dense_flops(cell) / 200e12

    def _dense_flops(self, c: Cell) -> float:
        return 4.0 * c.D * c.B * c.heads * c.queries * c.frames * (c.rows * c.columns) ** 2 * (3.5 if c.backward else 1)

    def work(self, d: Data, method: str) -> tuple[float, float]:
        "(FLOPs, least bytes) of a method; the backward pass of dense attention is 2.5 forward passes."
        c = d.cell
        moved = 2.0 * (d.q.numel() + d.k.numel()) * d.q.element_size() * (2 if c.backward else 1)
        if method in self.dense: return self._dense_flops(c), moved
        if method == "flex": return self._dense_flops(c) * float(d.blocks.float().mean()), moved
        shape = tuple(d.q.shape)
        return float(sum(self.kernel.monarch_flops(shape, c.frames, backward=b) for b in ((False, True) if c.backward else (False,)))), moved

    def plot(self, record: dict, axes) -> None:
        "Times of every cell on the left, speed-up over the fastest dense method on the right."
        left, right = axes
        rows = [r for r in record["rows"] if r["ms"]]
        name = lambda r: f"{r['queries']} of {r['frames']}\n{'fwd + bwd' if '+' in r['pass'] else 'fwd'}"
        cells = list(dict.fromkeys(name(r) for r in rows))
        methods = list(dict.fromkeys(r["method"] for r in rows))
        for i, method in enumerate(methods):
            mine = {name(r): r["ms"] for r in rows if r["method"] == method}
            left.bar([cells.index(c) + 0.8 * (i - (len(methods) - 1) / 2) / len(methods) for c in mine], mine.values(), 0.8 / len(methods), label=method)
        left.set(yscale="log", ylabel="ms", xlabel="query frames of key frames", title=f"{rows[0]['rows']} x {rows[0]['columns']} tokens a frame")
        left.legend(fontsize=7)
        for c in cells:
            here = {r["method"]: r["ms"] for r in rows if name(r) == c}
            if "ours" in here and set(here) & set(self.dense): right.bar(cells.index(c), min(here[m] for m in self.dense if m in here) / here["ours"], 0.6, color="C0")
        right.axhline(1, lw=0.8, ls=":", color="gray")
        right.set(ylabel="speed-up over the fastest dense", title=f"{record['name']} on {record['gpu']}")
        for ax in axes: ax.set_xticks(range(len(cells)), cells)
