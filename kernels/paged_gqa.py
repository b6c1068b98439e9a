"""Grouped-query prefill attention over paged keys and values, reading only the pages that a block table names.

One chunk of `Tq` queries of a sequence attends to some of the pages that hold the sequence's keys and values. A page
holds `page` consecutive tokens of one KV head (head-major pool), so each KV head may read pages of its own choice, in
place. Table row `r` serves the `G = Hq // R` query heads `r*G ... r*G + G-1`.

    paged_gqa_prefill     one table per (sequence, table row), for the whole chunk
    block_sparse_prefill  one table per (sequence, query head, query block): the same kernel body, peer and baseline
    union_tables          boolean block mask -> ascending tables, by union over query blocks and heads
    physical_pages        logical block ids -> pages of the pool

Shapes and types
    q        [B, Hq, Tq, D]     float16, bfloat16 or float32 (float64 on the CPU); any strides
    k_pages  [P, page, D]       same type; D contiguous
    v_pages  [P, page, D]
    ids      [B, R, n]          int32, logical block ids, ascending by convention (order doesn't change the result), -1 padded
    pages    [B, R, n]          int32, where block ids[b, r, i] lies in the pool
    counts   [B, R]             int32, entries in use; at least 1
    seq_lens [B]                int32, tokens stored, the chunk included
    out      [B, Hq, Tq, D]     type of q;  lse [B, Hq, Tq] float32, natural logarithm

Query row t has position `q_start + t` and sees key j when j <= q_start + t, j < seq_lens[b] and a table entry holds j.
A row that sees nothing gets out = 0, lse = -inf.

Work      4 * Hq * Tq * D FLOPs for each key read per table row (two matrix products; `prefill_flops`).
Traffic   at least q and out once and each selected page once; at most each selected page once per query tile
          (`prefill_bytes` gives both bounds; the tiles of one row run side by side, so most re-reads hit L2).
Tile      BLOCK_M rows pack G heads x BLOCK_M // G tokens, so that a page is loaded once for the group and not once per
          head; G need not divide BLOCK_M. BLOCK_N = min(page, limit) keys. Accumulation in float32.
Source    online softmax in base 2 and split-KV with a log-sum-exp merge as in FlashAttention (arXiv 2205.14135,
          2307.08691) and its decoding variant; pages as in PagedAttention (arXiv 2309.06180); tables per KV group and
          their union as in CompactAttention (arXiv 2605.16839).

Without a GPU the operators run the PyTorch reference below; with TRITON_INTERPRET=1 set before the import they run the
Triton code in Triton's interpreter. Importing this file needs neither a GPU nor Triton.
"""
from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installations: the reference is all there is
    triton = tl = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def _jit(**options):
    "`triton.jit`, or the plain function where Triton is not installed."
    return triton.jit(**options) if triton is not None else (lambda fn: fn)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch reference
# ---------------------------------------------------------------------------------------------------------------------
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    "Attention of q [M, D] over k, v [N, D] under a Bool mask [M, N]: (out [M, D], lse [M]); rows that see nothing: 0, -inf."
    if q.device.type == "cpu":
        bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)[None, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None, None], k[None, None], v[None, None], attn_mask=bias, scale=scale
        )
        out, lse = out[0, 0], lse[0, 0]
    else:
        scores = (q @ k.T).to(torch.promote_types(q.dtype, torch.float32)) * scale
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1)
        out = ((scores - lse[:, None]).exp().to(v.dtype) @ v)
    if mask is not None:  # a row without a visible key has no softmax
        seen = mask.any(-1)
        out, lse = torch.where(seen[:, None], out, 0.0), torch.where(seen, lse, -math.inf)
    return out, lse


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    "Attention over a union of disjoint key sets from the attentions over its parts: weights exp(lse_i - lse)."
    if len(outs) == 1:
        return outs[0], lses[0]
    parts = torch.stack(lses)
    lse = torch.logsumexp(parts, 0)
    weights = torch.where(parts == -math.inf, 0.0, (parts - lse).exp())
    return torch.einsum("s...,s...d->...d", weights, torch.stack(outs).to(weights.dtype)).to(outs[0].dtype), lse


def prefill_reference(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, ids: Tensor, pages: Tensor, counts: Tensor, seq_lens: Tensor,
    q_start: int, q_block: int, scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with tables [B, R, nq, n]: table (b, r, i) serves query rows i*q_block ... of the heads of row r.

    For each table: gather the named pages (no other page is touched), attend without a mask to the blocks that every
    row sees, with the token-level causal mask to the few that straddle it, and merge the two."""
    (B, Hq, Tq, D), (_, R, nq, n), page = q.shape, ids.shape, k_pages.shape[1]
    G = Hq // R
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    first = q_start + torch.arange(nq, device=q.device) * q_block                       # position of each query block
    last = torch.minimum(first + q_block, first.new_tensor(q_start + Tq)) - 1
    full = torch.minimum(first[None] + 1, seq_lens[:, None])[:, None, :, None]          # keys below are seen by all rows
    seen = torch.minimum(last[None] + 1, seq_lens[:, None])[:, None, :, None]           # keys at or above by none
    used = torch.arange(n, device=q.device) < counts[..., None]
    past = used & ((ids + 1) * page <= full)
    now = used & ~past & (ids * page < seen)
    offsets = torch.arange(page, device=q.device)
    for b, r, i in product(range(B), range(R), range(nq)):
        heads, rows = slice(r * G, r * G + G), slice(i * q_block, min(i * q_block + q_block, Tq))
        tile = q[b, heads, rows]
        tokens = tile.shape[1]
        tile = tile.reshape(G * tokens, D)
        outs, lses = [], []
        for part in (past[b, r, i], now[b, r, i]):
            physical = pages[b, r, i][part]
            if len(physical) == 0:
                continue
            k, v, mask = k_pages[physical].reshape(-1, D), v_pages[physical].reshape(-1, D), None
            if part.data_ptr() == now[b, r, i].data_ptr():
                key = (ids[b, r, i][part][:, None] * page + offsets).reshape(-1)
                stored = key < seq_lens[b]
                k, v = torch.where(stored[:, None], k, 0), torch.where(stored[:, None], v, 0)  # unwritten slots: any bits
                position = q_start + rows.start + torch.arange(tokens, device=q.device)
                mask = ((key <= position[:, None]) & stored).repeat(G, 1)
            o, l = attend(tile, k, v, mask, scale)
            outs.append(o), lses.append(l)
        if outs:
            o, l = merge(outs, lses)
        else:
            o, l = q.new_zeros(tile.shape), lse.new_full(tile.shape[:1], -math.inf)
        out[b, heads, rows], lse[b, heads, rows] = o.view(G, tokens, D), l.view(G, tokens)
    return out, lse


def union_reference(mask: Tensor, subgroup: int, keep_recent: int, current: int) -> tuple[Tensor, Tensor]:
    "(ids [B, Hq // subgroup, nk] ascending and -1 padded, counts): blocks that any head or query block selected, or forced."
    B, Hq, _, nk = mask.shape
    keep = mask.view(B, Hq // subgroup, -1, nk).any(2)
    keep[..., max(nk - current - keep_recent, 0):] = True
    order = torch.where(keep, torch.arange(nk, device=mask.device), nk).sort(-1).values
    return torch.where(order < nk, order, -1).int(), keep.sum(-1).int()
