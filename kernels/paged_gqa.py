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
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from neurips26_lit.core.kernels import KernelSpec, capability, interpreting, jit, loads_16_bytes, need
from neurips26_lit.core.kernels import empty as _empty  # a test puts memory full of NaN in its place

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installations: the reference is all there is
    triton = tl = None

INTERPRET = interpreting()
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


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


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    "Attention over a union of disjoint key sets from the (out, lse) over each: weights exp(lse_i - lse)."
    if len(parts) == 1:
        return parts[0]
    outs, lses = (torch.stack(x) for x in zip(*parts))
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -math.inf, 0.0, (lses - lse).exp())
    return torch.einsum("s...,s...d->...d", weights, outs.to(weights.dtype)).to(outs.dtype), lse


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
    now = used & ~past & (ids * page < seen)                                            # blocks that need the causal mask
    offsets = torch.arange(page, device=q.device)
    for b, r, i in product(range(B), range(R), range(nq)):
        heads, rows = slice(r * G, r * G + G), slice(i * q_block, min(i * q_block + q_block, Tq))
        tokens = rows.stop - rows.start
        tile = q[b, heads, rows].reshape(G * tokens, D)
        parts = []
        if len(physical := pages[b, r, i][past[b, r, i]]):
            parts.append(attend(tile, k_pages[physical].view(-1, D), v_pages[physical].view(-1, D), None, scale))
        if len(physical := pages[b, r, i][now[b, r, i]]):
            key = (ids[b, r, i][now[b, r, i]][:, None] * page + offsets).view(-1)
            stored = key < seq_lens[b]
            k, v = (torch.where(stored[:, None], x[physical].view(-1, D), 0) for x in (k_pages, v_pages))
            position = q_start + rows.start + torch.arange(tokens, device=q.device)
            mask = ((key <= position[:, None]) & stored).repeat(G, 1)
            parts.append(attend(tile, k, v, mask, scale))
        whole, norm = merge(parts) if parts else (q.new_zeros(tile.shape), lse.new_full(tile.shape[:1], -math.inf))
        out[b, heads, rows], lse[b, heads, rows] = whole.view(G, tokens, D), norm.view(G, tokens)
    return out, lse


def union_reference(mask: Tensor, subgroup: int, keep_recent: int, current: int) -> tuple[Tensor, Tensor]:
    "(ids [B, Hq // subgroup, nk] ascending and -1 padded, counts): blocks that any head or query block selected, or forced."
    B, Hq, _, nk = mask.shape
    keep = mask.reshape(B, Hq // subgroup, -1, nk).any(2)
    keep[..., max(nk - current - keep_recent, 0):] = True
    order = torch.where(keep, torch.arange(nk, device=mask.device), nk).sort(-1).values
    return torch.where(order < nk, order, -1).int(), keep.sum(-1).int()


# ---------------------------------------------------------------------------------------------------------------------
# Triton kernels
# ---------------------------------------------------------------------------------------------------------------------
@jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qt", "stride_kp", "stride_kn", "stride_vp", "stride_vn",
        "stride_tb", "stride_tr", "stride_tq", "B", "R", "NQ", "G", "Tq", "D8", "S", "q_start", "q_block", "log_steps", "scale",
    ],
    do_not_specialize_on_alignment=["ids", "pages", "counts", "seq_lens", "lse"],
)
def prefill_kernel(
    q, k, v, ids, pages, counts, seq_lens, out, lse,
    stride_qb, stride_qh, stride_qt, stride_kp, stride_kn, stride_vp, stride_vn, stride_tb, stride_tr, stride_tq,
    B, R, NQ, G, Tq, D8, S, q_start, q_block, log_steps, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_M rows (G heads x BLOCK_M // G tokens) of one query block, against split `s` of its table.

    Grid (query tiles, R, S * B). out [S, B, Hq, Tq, D] and lse [S, B, Hq, Tq] are contiguous; `scale` includes log2(e);
    a page is read in 2**log_steps steps of BLOCK_N keys; strides of q, k, v and the head size count units of 8 elements."""
    tile, r, b, s = tl.program_id(0), tl.program_id(1), tl.program_id(2) % B, tl.program_id(2) // B
    # Seeing "times 8", the compiler knows the alignment and loads 16 bytes at a time.
    stride_qb, stride_qh, stride_qt = stride_qb.to(tl.int64) * 8, stride_qh.to(tl.int64) * 8, stride_qt.to(tl.int64) * 8
    stride_kp, stride_kn, stride_vp, stride_vn = stride_kp.to(tl.int64) * 8, stride_kn * 8, stride_vp.to(tl.int64) * 8, stride_vn * 8
    D, PAGE = D8 * 8, BLOCK_N << log_steps

    # Which rows: query block, its tile, then (token, head) with the head fastest.
    tokens = BLOCK_M // G
    tiles = tl.cdiv(q_block, tokens)
    block = tile // tiles
    begin = block * q_block + (tile % tiles) * tokens
    end = tl.minimum(tl.minimum(begin + tokens, (block + 1) * q_block), Tq)
    row = tl.arange(0, BLOCK_M)
    token = begin + row // G
    head = r * G + row % G
    row_ok = token < end
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    key = tl.arange(0, BLOCK_N)
    query_at = q + b * stride_qb + head[:, None] * stride_qh + token[:, None] * stride_qt + dim[None, :]
    query = tl.load(query_at, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)

    # Which entries: drop the table's tail that no row of this tile can see, then take split s of the rest.
    table = b.to(tl.int64) * stride_tb + r.to(tl.int64) * stride_tr + block.to(tl.int64) * stride_tq
    count = tl.load(counts + (b * R + r).to(tl.int64) * NQ + block)
    seq_len = tl.load(seq_lens + b)
    visible = tl.minimum(q_start + end, seq_len)           # keys at or above are seen by no row
    full = tl.minimum(q_start + begin + 1, seq_len)        # keys below are seen by every row
    used = 0
    for at in range(0, count, 128):
        slot = at + tl.arange(0, 128)
        start = tl.load(ids + table + slot, mask=slot < count, other=0) * PAGE
        used = tl.maximum(used, tl.max(tl.where((slot < count) & (start < visible), slot + 1, 0), 0))
    share = tl.cdiv(used, S)
    low = tl.minimum(s * share, used)
    high = tl.minimum(low + share, used)

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)    # running maximum, total and output of the online softmax
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in range(low << log_steps, high << log_steps):
        slot = step >> log_steps
        first = (step - (slot << log_steps)) * BLOCK_N     # token within the page
        start = tl.load(ids + table + slot) * PAGE + first
        page = tl.load(pages + table + slot)
        key_ok = key < seq_len - start                     # slots of the last page that hold no token yet
        kv_ok = key_ok[:, None] & dim_ok[None, :]
        within = (first + key)[:, None]
        keys = tl.load(k + page * stride_kp + within * stride_kn + dim[None, :], mask=kv_ok, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if start + BLOCK_N > full:                         # only blocks that straddle the causal edge or the end
            see = (start + key[None, :] <= q_start + token[:, None]) & key_ok[None, :]
            scores = tl.where(see, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        values = tl.load(v + page * stride_vp + within * stride_vn + dim[None, :], mask=kv_ok, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new_top

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    Hq = R * G
    at = ((s * B + b).to(tl.int64) * Hq + head) * Tq + token
    tl.store(lse + at, tl.where(empty, -float("inf"), (top + tl.log2(total)) * 0.6931471805599453), mask=row_ok)
    tl.store(out + at[:, None] * D + dim[None, :], acc.to(out.dtype.element_ty), mask=row_ok[:, None] & dim_ok[None, :])


@jit(do_not_specialize=["rows", "D8", "S"], do_not_specialize_on_alignment=["lses", "lse"])
def merge_kernel(
    parts, lses, out, lse, rows, D8, S, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    "Merge S attentions over disjoint keys: parts [S, rows, D], lses [S, rows] -> out [rows, D], lse [rows]. Grid (row tiles,)."
    D = D8 * 8
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = row < rows
    dim = tl.arange(0, BLOCK_D)
    ok = row_ok[:, None] & (dim < D)[None, :]
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for s in range(S):
        at = s * rows.to(tl.int64) + row
        value = tl.load(lses + at, mask=row_ok, other=-float("inf"))
        part = tl.load(parts + at[:, None] * D + dim[None, :], mask=ok, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, value)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        keep, weight = tl.exp(top - base), tl.exp(value - base)
        total = total * keep + weight
        acc = acc * keep[:, None] + part * weight[:, None]
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, -float("inf"), top + tl.log(total)), mask=row_ok)
    tl.store(out + row[:, None] * D + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=ok)


@jit(
    do_not_specialize=["stride_mb", "stride_mh", "stride_mq", "R", "subgroup", "nq", "nk", "forced"],
    do_not_specialize_on_alignment=["mask", "ids", "counts"],
)
def union_kernel(
    mask, ids, counts, stride_mb, stride_mh, stride_mq, R, subgroup, nq, nk, forced,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One table row per program, grid (B * R,): OR the mask over `subgroup` heads and nq query blocks, then compact the ids.

    mask uint8 [B, Hq, nq, nk] -> ids [B, R, nk], counts [B, R]; blocks from `forced` on are always kept."""
    pid = tl.program_id(0)
    b, r = (pid // R).to(tl.int64), pid % R
    lane = tl.arange(0, BLOCK_R)
    count = 0
    for start in range(0, nk, BLOCK_K):
        block = start + tl.arange(0, BLOCK_K)
        block_ok = block < nk
        keep = ((block >= forced) & block_ok).to(tl.int32)
        for first in range(0, subgroup * nq, BLOCK_R):
            row = first + lane
            row_ok = row < subgroup * nq
            head = (r * subgroup + row // nq).to(tl.int64)
            at = b * stride_mb + head * stride_mh + (row % nq).to(tl.int64) * stride_mq
            bits = tl.load(mask + at[:, None] + block[None, :], mask=row_ok[:, None] & block_ok[None, :], other=0)
            keep = tl.maximum(keep, tl.max(bits.to(tl.int32), 0))
        place = count + tl.cumsum(keep, 0) - 1             # compaction: an id goes where the kept ids before it end
        tl.store(ids + pid.to(tl.int64) * nk + place, block, mask=keep > 0)
        count += tl.sum(keep, 0)
    for start in range(0, nk, BLOCK_K):
        slot = start + tl.arange(0, BLOCK_K)
        tl.store(ids + pid.to(tl.int64) * nk + slot, -1, mask=(slot >= count) & (slot < nk))
    tl.store(counts + pid, count)


# ---------------------------------------------------------------------------------------------------------------------
# Configurations and launchers
# ---------------------------------------------------------------------------------------------------------------------
PAGES, HEAD_SIZES, TYPES = (16, 32, 64, 128), (64, 128), (torch.float16, torch.bfloat16, torch.float32)
UNION, MERGE_ROWS = {"BLOCK_R": 32, "BLOCK_K": 128}, 16


def block_d(D: int) -> int:
    "Columns of the tile that holds a head of size D: the next of 64 and 128 (the rest is masked)."
    return next(size for size in HEAD_SIZES if D <= size)


def config(arch: int, dtype: torch.dtype, page: int, D: int, rows: int) -> tuple[dict, dict]:
    "(constexprs, launch options) of `prefill_kernel` for an architecture (90 = sm_90) and `rows` = heads x tokens of a query block."
    small = arch in (86, 89, 120)                          # 99 KiB of shared memory per block instead of 163 or 227
    if dtype == torch.float32:                             # exact products run on the ordinary cores
        shape, options = {"BLOCK_M": 64, "BLOCK_N": 16}, {"num_warps": 8, "num_stages": 1}
    else:                                                  # five stages hold three buffers: page ids are loaded ahead of pages
        widest = 32 if small and D > 64 else 64
        shape = {"BLOCK_M": 64 if rows <= 64 else 128, "BLOCK_N": min(page, widest)}
        options = {"num_warps": 4 if rows <= 64 else 8, "num_stages": 5}
    return {**shape, "BLOCK_D": block_d(D)}, {**options, "maxnreg": 255}  # without the cap some tiles trade spills for occupancy


def launch_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, ids: Tensor, pages: Tensor, counts: Tensor, seq_lens: Tensor,
    q_start: int, q_block: int, scale: float, splits: int,
) -> tuple[Tensor, Tensor]:
    "Run `prefill_kernel`, and `merge_kernel` when the tables are split: (out, lse)."
    (B, Hq, Tq, D), (_, R, nq, _), page = q.shape, ids.shape, k_pages.shape[1]
    G = Hq // R
    constexprs, options = config(capability(q.device), q.dtype, page, D, G * min(q_block, Tq))
    q = q if loads_16_bytes(q) else q.contiguous()
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not loads_16_bytes(x):
            raise ValueError(f"{name}: the kernel reads pages in place, so D must be contiguous, other strides multiples of 8")
    ids, pages, counts, seq_lens = ids.contiguous(), pages.contiguous(), counts.contiguous(), seq_lens.contiguous()
    partial = q.dtype if splits == 1 else torch.float32
    out, lse = _empty((splits, B, Hq, Tq, D), partial, q.device), _empty((splits, B, Hq, Tq), torch.float32, q.device)
    tiles = nq * triton.cdiv(q_block, constexprs["BLOCK_M"] // G)
    prefill_kernel[(tiles, R, splits * B)](
        q, k_pages, v_pages, ids, pages, counts, seq_lens, out, lse,
        *(s // 8 for s in (*q.stride()[:3], *k_pages.stride()[:2], *v_pages.stride()[:2])), *ids.stride()[:3],
        B, R, nq, G, Tq, D // 8, splits, q_start, q_block, (page // constexprs["BLOCK_N"]).bit_length() - 1, scale * LOG2E, **constexprs, **options,
    )
    if splits == 1:
        return out[0], lse[0]
    merged, total = _empty(q.shape, q.dtype, q.device), _empty(q.shape[:3], torch.float32, q.device)
    rows = B * Hq * Tq
    merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
        out, lse, merged, total, rows, D // 8, splits,
        BLOCK_R=MERGE_ROWS, BLOCK_D=constexprs["BLOCK_D"], num_warps=4,
    )
    return merged, total


def launch_union(mask: Tensor, subgroup: int, keep_recent: int, current: int) -> tuple[Tensor, Tensor]:
    "Run `union_kernel`: (ids, counts)."
    B, Hq, nq, nk = mask.shape
    R = Hq // subgroup
    mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
    ids, counts = _empty((B, R, nk), torch.int32, mask.device), _empty((B, R), torch.int32, mask.device)
    union_kernel[(B * R,)](
        mask, ids, counts, *mask.stride()[:3], R, subgroup, nq, nk, max(nk - current - keep_recent, 0), **UNION, num_warps=4
    )
    return ids, counts


def auto_splits(q: Tensor, R: int, nq: int, n: int, q_block: int, page: int) -> int:
    "Splits of each table so that about two programs fall on every multiprocessor; 1 when the query tiles already fill them."
    if q.device.type != "cuda":
        return 1
    G = q.shape[1] // R
    block_m = config(capability(q.device), q.dtype, page, q.shape[-1], G * min(q_block, q.shape[2]))[0]["BLOCK_M"]
    programs = q.shape[0] * R * nq * math.ceil(q_block / (block_m // G))
    wanted = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    return 1 if programs >= wanted else max(1, min(math.ceil(wanted / programs), n, 16))


def specs(arch: int) -> list[KernelSpec]:
    "Every configuration that the launchers can choose on an architecture, for compilation without a GPU."
    short, found = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}, {}

    def add(kernel, label: str, pointers: dict[str, str], constexprs: dict, options: dict, aligned: tuple[str, ...]) -> None:
        numbers = {a: "fp32" if a == "scale" else "i32" for a in kernel.arg_names if a not in pointers and a not in constexprs}
        found[kernel.__name__, label] = KernelSpec(kernel, label, {**pointers, **numbers}, constexprs, options, aligned)

    tables = {"ids": "*i32", "pages": "*i32", "counts": "*i32", "seq_lens": "*i32", "lse": "*fp32"}
    for dtype, page, D, rows in product(TYPES, PAGES, HEAD_SIZES, (64, 128)):
        constexprs, options = config(arch, dtype, page, D, rows)
        for out in {short[dtype], "fp32"}:                 # fp32: the parts of a split table
            label = f"{short[dtype]} -> {out} M{constexprs['BLOCK_M']} N{constexprs['BLOCK_N']} D{D}"
            pointers = {**dict.fromkeys(("q", "k", "v"), f"*{short[dtype]}"), "out": f"*{out}", **tables}
            add(prefill_kernel, label, pointers, constexprs, options, ("q", "k", "v", "out"))
    for dtype, D in product(TYPES, HEAD_SIZES):
        pointers = {"parts": "*fp32", "lses": "*fp32", "out": f"*{short[dtype]}", "lse": "*fp32"}
        add(merge_kernel, f"{short[dtype]} D{D}", pointers, {"BLOCK_R": MERGE_ROWS, "BLOCK_D": D}, {"num_warps": 4}, ("parts", "out"))
    add(union_kernel, "bool", {"mask": "*u8", "ids": "*i32", "counts": "*i32"}, UNION, {"num_warps": 4}, ())
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Operators: the reference on the CPU, the kernels on a GPU or in the interpreter
# ---------------------------------------------------------------------------------------------------------------------
NAMESPACE = "neurips26"


@torch.library.custom_op(f"{NAMESPACE}::paged_prefill", mutates_args=(), device_types="cpu")
def paged_prefill_op(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, ids: Tensor, pages: Tensor, counts: Tensor, seq_lens: Tensor,
    q_start: int, q_block: int, scale: float, splits: int,
) -> tuple[Tensor, Tensor]:
    if INTERPRET:
        return launch_prefill(q, k_pages, v_pages, ids, pages, counts, seq_lens, q_start, q_block, scale, splits)
    return prefill_reference(q, k_pages, v_pages, ids, pages, counts, seq_lens, q_start, q_block, scale)


paged_prefill_op.register_kernel("cuda")(launch_prefill)


@paged_prefill_op.register_fake
def _(q, k_pages, v_pages, ids, pages, counts, seq_lens, q_start, q_block, scale, splits):
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=lse)


@torch.library.custom_op(f"{NAMESPACE}::union_tables", mutates_args=(), device_types="cpu")
def union_tables_op(mask: Tensor, subgroup: int, keep_recent: int, current: int) -> tuple[Tensor, Tensor]:
    return (launch_union if INTERPRET else union_reference)(mask, subgroup, keep_recent, current)


union_tables_op.register_kernel("cuda")(launch_union)


@union_tables_op.register_fake
def _(mask, subgroup, keep_recent, current):
    B, Hq, _, nk = mask.shape
    return mask.new_empty((B, Hq // subgroup, nk), dtype=torch.int32), mask.new_empty((B, Hq // subgroup), dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------------------------
# Public surface
# ---------------------------------------------------------------------------------------------------------------------
def _check_tensors(q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: dict[str, Tensor], seq_lens: Tensor) -> None:
    "Ranks, types, devices and head sizes."
    need(q.ndim == 4 and q.numel() > 0, f"q: expected a non-empty [B, Hq, Tq, D], got {list(q.shape)}")
    need(k_pages.ndim == 3, f"k_pages: expected [P, page, D], got {list(k_pages.shape)}")
    need(v_pages.shape == k_pages.shape, f"v_pages: expected the shape of k_pages {list(k_pages.shape)}, got {list(v_pages.shape)}")
    need(k_pages.shape[-1] == q.shape[-1], f"k_pages: head size {k_pages.shape[-1]} differs from q's {q.shape[-1]}")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        need(x.dtype == q.dtype, f"{name}: {x.dtype} differs from q's {q.dtype}")
    for name, x in {**tables, "seq_lens": seq_lens}.items():
        need(x.dtype == torch.int32, f"{name}: expected int32, got {x.dtype}")
    for name, x in {"k_pages": k_pages, "v_pages": v_pages, **tables, "seq_lens": seq_lens}.items():
        need(x.device == q.device, f"{name}: on {x.device}, but q is on {q.device}")
    need(seq_lens.shape == q.shape[:1], f"seq_lens: expected [{q.shape[0]}], got {list(seq_lens.shape)}")
    if INTERPRET or q.device.type == "cuda":
        D, page = q.shape[-1], k_pages.shape[1]
        need(q.dtype in TYPES, f"q: the kernel takes float16, bfloat16 and float32, got {q.dtype}")
        need(D % 8 == 0 and D <= HEAD_SIZES[-1], f"q: the kernel takes head sizes that are multiples of 8 up to 128, got {D}")
        need(page in PAGES, f"k_pages: the kernel takes pages of {PAGES} tokens, got {page}")


def _check_tables(q: Tensor, tables: dict[str, Tensor], n_pages: int, page: int, seq_lens: Tensor, q_start: int) -> None:
    "Shapes of the tables and, where it costs no synchronisation (CPU), their entries."
    ids, pages, counts = tables["ids"], tables["pages"], tables["counts"]
    need(ids.shape[0] == q.shape[0], f"ids: {ids.shape[0]} sequences, but q has {q.shape[0]}")
    need(q.shape[1] % ids.shape[1] == 0, f"ids: {ids.shape[1]} table rows don't divide q's {q.shape[1]} heads")
    need(pages.shape == ids.shape, f"pages: expected the shape of ids {list(ids.shape)}, got {list(pages.shape)}")
    need(counts.shape == ids.shape[:-1], f"counts: expected {list(ids.shape[:-1])}, got {list(counts.shape)}")
    need(q_start >= 0, f"q_start: expected a position >= 0, got {q_start}")
    group, most = q.shape[1] // ids.shape[1], 64 if q.dtype == torch.float32 else 128
    need(group <= most, f"ids: {group} query heads per table row, at most {most} fit a tile")
    if q.device.type != "cpu":
        return
    empty = (counts < 1).nonzero()
    need(len(empty) == 0, f"counts: empty table row at {tuple(empty[0].tolist()) if len(empty) else ''}")
    need(bool((counts <= ids.shape[-1]).all()), f"counts: more entries than the table's width {ids.shape[-1]}")
    need(bool((seq_lens >= 1).all()), "seq_lens: expected at least 1 stored token per sequence")
    used = torch.arange(ids.shape[-1]) < counts[..., None]
    blocks = ((seq_lens + page - 1) // page).view(-1, *[1] * (ids.ndim - 1))
    need(bool(((ids >= 0) & (ids < blocks) | ~used).all()), f"ids: a table id lies outside [0, {int(blocks.max())})")
    need(bool(((pages >= 0) & (pages < n_pages) | ~used).all()), f"pages: a page lies outside the pool of {n_pages} pages")
    ordered = torch.where(used, ids, -1 - torch.arange(ids.shape[-1], dtype=torch.int32)).sort(-1).values
    need(bool((ordered.diff(dim=-1) != 0).all()), "ids: a block occurs twice in a table row")


def paged_gqa_prefill(
    q: Tensor,                # [B, Hq, Tq, D] queries of the chunk, rotated
    k_pages: Tensor,          # [P, page, D] pool of key pages, one KV head each
    v_pages: Tensor,          # [P, page, D] pool of value pages
    ids: Tensor,              # int32 [B, R, n] logical blocks to read, -1 padded; row r serves heads r*G ... r*G + G-1
    pages: Tensor,            # int32 [B, R, n] physical page of each entry
    counts: Tensor,           # int32 [B, R] entries in use, at least 1
    seq_lens: Tensor,         # int32 [B] tokens stored
    q_start: int,             # position of the chunk's first query
    *,
    scale: float | None = None,   # of the scores; 1/sqrt(D) by default
    return_lse: bool = False,     # also return the log-sum-exp of each row
    splits: int | None = None,    # parts of each table that run in parallel; None: as many as fill the GPU
) -> Tensor | tuple[Tensor, Tensor]:  # out [B, Hq, Tq, D] (and lse [B, Hq, Tq])
    "Causal attention of one chunk over the blocks of its tables, one table per (sequence, table row). Raises ValueError."
    need(ids.ndim == 3, f"ids: expected [B, R, n], got {list(ids.shape)}")
    need(pages.ndim == 3, f"pages: expected [B, R, n], got {list(pages.shape)}")
    need(counts.ndim == 2, f"counts: expected [B, R], got {list(counts.shape)}")
    tables = {"ids": ids.unsqueeze(2), "pages": pages.unsqueeze(2), "counts": counts.unsqueeze(2)}
    return _prefill(q, k_pages, v_pages, tables, seq_lens, q_start, q.shape[2], scale, return_lse, splits)


def block_sparse_prefill(
    q: Tensor,                # [B, Hq, Tq, D]
    k_pages: Tensor,          # [P, page, D]
    v_pages: Tensor,          # [P, page, D]
    ids: Tensor,              # int32 [B, Hq, nq, n] logical blocks that query block i of head h reads, -1 padded
    pages: Tensor,            # int32 [B, Hq, nq, n] physical page of each entry
    counts: Tensor,           # int32 [B, Hq, nq] entries in use, at least 1
    seq_lens: Tensor,         # int32 [B] tokens stored
    q_start: int,             # position of the chunk's first query
    *,
    q_block: int,             # queries per query block; nq = ceil(Tq / q_block)
    scale: float | None = None,   # of the scores; 1/sqrt(D) by default
    return_lse: bool = False,     # also return the log-sum-exp of each row
    splits: int | None = None,    # parts of each table that run in parallel; None: as many as fill the GPU
) -> Tensor | tuple[Tensor, Tensor]:  # out [B, Hq, Tq, D] (and lse [B, Hq, Tq])
    "The same with a table per (sequence, query head, query block): the block-sparse execution that unions replace."
    need(ids.ndim == 4, f"ids: expected [B, Hq, nq, n], got {list(ids.shape)}")
    need(q_block >= 1, f"q_block: expected at least 1 query, got {q_block}")
    nq = -(-q.shape[2] // q_block)
    need(ids.shape[2] == nq, f"ids: {ids.shape[2]} query blocks, but {q.shape[2]} queries in blocks of {q_block} make {nq}")
    tables = {"ids": ids, "pages": pages, "counts": counts}
    return _prefill(q, k_pages, v_pages, tables, seq_lens, q_start, q_block, scale, return_lse, splits)


def _prefill(q, k_pages, v_pages, tables, seq_lens, q_start, q_block, scale, return_lse, splits):
    _check_tensors(q, k_pages, v_pages, tables, seq_lens)
    _check_tables(q, tables, k_pages.shape[0], k_pages.shape[1], seq_lens, q_start)
    need(splits is None or splits >= 1, f"splits: expected at least 1, got {splits}")
    ids = tables["ids"]
    if splits is None:
        splits = auto_splits(q, ids.shape[1], ids.shape[2], ids.shape[3], q_block, k_pages.shape[1])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    out, lse = paged_prefill_op(q, k_pages, v_pages, ids, tables["pages"], tables["counts"], seq_lens, int(q_start), q_block, scale, splits)
    return (out, lse) if return_lse else out


def union_tables(
    mask: Tensor,             # Bool [B, Hq, nq, nk] selected (query block, key block) pairs per query head
    subgroup: int,            # query heads that share a table; divides Hq
    *,
    keep_recent: int = 0,     # blocks just before the chunk's own that are always read
    current: int = 0,         # trailing blocks that hold the chunk itself, always read
) -> tuple[Tensor, Tensor]:   # ids int32 [B, Hq // subgroup, nk] ascending, -1 padded; counts int32 [B, Hq // subgroup]
    "Smallest tables that keep every selected block: union over query blocks, then over the heads of a subgroup."
    need(mask.ndim == 4 and mask.dtype == torch.bool, f"mask: expected Bool [B, Hq, nq, nk], got {mask.dtype} {list(mask.shape)}")
    need(subgroup >= 1 and mask.shape[1] % subgroup == 0, f"subgroup: {subgroup} doesn't divide {mask.shape[1]} heads")
    need(keep_recent >= 0, f"keep_recent: expected >= 0, got {keep_recent}")
    need(current >= 0, f"current: expected >= 0, got {current}")
    return union_tables_op(mask, subgroup, keep_recent, current)


def physical_pages(
    ids: Tensor,              # int32 [B, R, ..., n] logical blocks, -1 padded
    block_table: Tensor,      # int32 [B, Hkv, N] page of each logical block, -1 where absent; Hkv divides R
) -> Tensor:                  # int32, shape of ids: the page of each entry, -1 where ids is -1
    "Look the pages of a table up; table rows of one KV head are neighbours."
    B, R = ids.shape[:2]
    need(block_table.ndim == 3 and block_table.shape[0] == B, f"block_table: expected [{B}, Hkv, N], got {list(block_table.shape)}")
    need(R % block_table.shape[1] == 0, f"block_table: {block_table.shape[1]} KV heads don't divide {R} table rows")
    rows = block_table.repeat_interleave(R // block_table.shape[1], 1)
    found = rows.gather(2, ids.clamp(min=0).flatten(2).long()).view(ids.shape)
    return torch.where(ids < 0, -1, found).int()


def prefill_flops(
    counts: Tensor,           # entries per table, [B, R] or [B, Hq, nq]
    heads: int,               # query heads that a table serves
    tokens: int,              # query tokens that a table serves
    page: int,                # tokens per page
    D: int,                   # head size
) -> int:                     # floating-point operations of the two matrix products
    "4 D operations for every (query row, key of a selected page); exact when pages and tiles are full."
    return 4 * D * page * heads * tokens * int(counts.sum())


def prefill_bytes(
    counts: Tensor,           # entries per table, [B, R] or [B, Hq, nq]
    q_shape: tuple[int, int, int, int],  # (B, Hq, Tq, D)
    page: int,                # tokens per page
    itemsize: int,            # bytes per element
    tiles: int = 1,           # query tiles that read a table
) -> tuple[int, int]:         # (least, most) bytes between HBM and chip
    "q and out once, and every selected page once (least: re-reads hit L2) or once per query tile (most)."
    rows, pages = 2 * math.prod(q_shape) * itemsize, 2 * page * q_shape[-1] * itemsize * int(counts.sum())
    return rows + pages, rows + pages * tiles


def examples() -> list[tuple[object, tuple]]:
    "Small calls of the operators, for `torch.library.opcheck`."
    generator = torch.Generator().manual_seed(0)
    calls = []
    for dtype, q_block in ((torch.float32, 5), (torch.float16, 5), (torch.float32, 2)):
        q = torch.randn(2, 4, 5, 16, generator=generator).to(dtype)
        k, v = (torch.randn(12, 16, 16, generator=generator).to(dtype) for _ in range(2))
        nq = -(-5 // q_block)
        pages = torch.randperm(12, generator=generator)[:8].view(2, 2, 1, 2).expand(2, 2, nq, 2).int().contiguous()
        ids = torch.tensor([0, 1], dtype=torch.int32).expand(2, 2, nq, 2).contiguous()
        counts, lens = torch.full((2, 2, nq), 2, dtype=torch.int32), torch.tensor([32, 31], dtype=torch.int32)
        calls.append((paged_prefill_op, (q, k, v, ids, pages, counts, lens, 26, q_block, 0.25, 1)))
    mask = torch.rand(2, 4, 3, 9, generator=generator) < 0.3
    return [*calls, (union_tables_op, (mask, 2, 1, 1))]


def launches() -> list[Callable[[], object]]:
    "Calls that start every kernel, whole and split, for each type; shapes and values as in `examples`."
    calls = []
    for op, arguments in examples():
        if op is union_tables_op: calls.append(partial(launch_union, *arguments))
        else: calls += [partial(launch_prefill, *arguments[:-1], splits) for splits in (1, 2)]
    return calls
