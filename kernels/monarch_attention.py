"""Attention written as a product of two Monarch factors over a tiled grid, forward and backward, without either factor in memory.

Tokens come in tiles of b1 rows x b2 columns. Query tile a, key tile f; query (i, j), key (k, l). One iteration of the
alternating maximisation that starts at L = identity in (i, k):

    column pass   R[a,f,k,j,:] = softmax_l(scale * q[a,k,j] . k[f,k,l])       the columns, seen from the query in the same row
                  pooled_k = R k,  pooled_v = R v,  c = sum_l R log R         one summary of each key row per query column
    row pass      L[a,j,i,:] = softmax_(f,k)(scale * q[a,i,j] . pooled_k[a,j,f,k] - c[a,j,f,k])
                  out[a,i,j] = sum_(f,k) L pooled_v                           ordinary attention over F * b1 summaries

Shapes and types
    q        [B, A, b1, b2, H, D]     float16, bfloat16 or float32 (float64 on the CPU); any strides, D contiguous
    k, v     [B, F, b1, b2, H, D]     same type
    out      [B, A, b1, b2, H, D]     type of q;  lse [B, H, A, b2, b1] float32, natural logarithm
    causal   0, or tiles per chunk: query tile a sees key tile f when f // causal <= a // causal; then A = F

Whole-frame tiles of a video [B, frames * h * w, H, D] are a view of it, so nothing is copied on the way in.

Work      forward 2 Nq Nk D (3 / b1 + 2 / b2) FLOPs for each head (dense: 4 Nq Nk D); backward 2 Nq Nk D (13 / b1 + 7 / b2), the logits of
          R computed three times and those of L twice. `monarch_flops` counts the tiles that causality leaves.
Memory    the pooled keys and values hold Nq * F * D numbers each, so query tiles and heads are taken in turn, as many as
          keep them within WORKSPACE bytes. The smallest unit is one tile of one head: F * b1 * b2 * D = Nk * D numbers.
Traffic   column pass: q once per key tile, K and V once per query tile, 2 Nq F D numbers out; row pass: reads them back
          (`monarch_bytes`). Both passes are bound by memory traffic on current GPUs.
Kernels   column_kernel, row_kernel; backward row_dq_kernel, row_dkv_kernel, column_dq_kernel, column_dkv_kernel. Each
          sum over programs is a loop in one program, without atomics: gradients are the same bits every time.
Source    Monarch parameterisation, its variational form and the alternating steps: MonarchAttention (arXiv 2505.18698);
          tiles aligned with space and time: MonarchRT (arXiv 2602.12271); online softmax in base 2 and recomputation in
          the backward pass: FlashAttention (arXiv 2205.14135, 2307.08691). The running negative entropy is ours.

Without a GPU the operators run the PyTorch reference below; with TRITON_INTERPRET=1 set before the import they run the
Triton code in Triton's interpreter. Importing this file needs neither a GPU nor Triton.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
WORKSPACE = 256 * 2**20       # bytes of pooled keys and values that may exist at a time


def seen_tiles(a: int, F: int, causal: int) -> int:
    "How many key tiles query tile `a` sees: the first so many."
    return min(F, (a // causal + 1) * causal) if causal else F


def slices(n: int, size: int) -> Iterator[slice]:
    "0 .. n in pieces of `size`."
    return (slice(s, min(s + size, n)) for s in range(0, n, max(1, size)))


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch reference
# ---------------------------------------------------------------------------------------------------------------------
def column_pass(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "(log R [B,H,A,F,b1,j,l], pooled_k and pooled_v [B,H,A,j,F,k,D], c [B,H,A,j,F,k]) of whole tiles."
    log_r = (torch.einsum("bakjhd,bfklhd->bhafkjl", q, k) * scale).log_softmax(-1)
    r = log_r.exp()
    pooled_k, pooled_v = (torch.einsum("bhafkjl,bfklhd->bhajfkd", r, x) for x in (k, v))
    return log_r, pooled_k, pooled_v, (r * log_r).sum(-1).permute(0, 1, 2, 5, 3, 4)


def row_logits(q: Tensor, pooled_k: Tensor, c: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    "Logits of L [B,H,A,j,i,F,k]; -inf where `hidden` [A, F] says that the tile isn't seen."
    s = torch.einsum("baijhd,bhajfkd->bhajifk", q, pooled_k) * scale - c[:, :, :, :, None]
    return s if hidden is None else s.masked_fill(hidden[:, None, None, :, None], -math.inf)


def reference_blocks(q: Tensor, k: Tensor, causal: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    "(query tiles, key tiles, hidden [A, F]) whose product of factors holds at most 4M numbers, or one pair of tiles."
    B, A, b1, b2, H, D = q.shape
    F = k.shape[1]
    pairs = max(1, 2**22 // (B * H * b1 * b2 * max(b1, b2, D)))
    step_f = min(F, pairs)
    for at in slices(A, pairs // step_f):
        last = seen_tiles(at.stop - 1, F, causal)
        for ft in slices(last, step_f):
            if not causal or ft.stop <= seen_tiles(at.start, F, causal):
                yield at, ft, None
            else:
                seen = torch.tensor([seen_tiles(a, F, causal) for a in range(at.start, at.stop)], device=q.device)
                yield at, ft, torch.arange(ft.start, ft.stop, device=q.device) >= seen[:, None]


def forward_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int) -> tuple[Tensor, Tensor]:
    "(out, lse), block by block: row statistics of a query tile are merged over its key tiles like an online softmax."
    B, A, b1, b2, H, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    total = torch.full((B, H, A, b2, b1), -math.inf, dtype=wide, device=q.device)
    out = torch.zeros((B, H, A, b2, b1, D), dtype=wide, device=q.device)
    for at, ft, hidden in reference_blocks(q, k, causal):
        qa, kf, vf = q[:, at].to(wide), k[:, ft].to(wide), v[:, ft].to(wide)
        _, pooled_k, pooled_v, c = column_pass(qa, kf, vf, scale)
        s = row_logits(qa, pooled_k, c, scale, hidden)
        lse = torch.logaddexp(total[:, :, at], s.flatten(-2).logsumexp(-1))
        weights = (s - lse[..., None, None]).exp()
        keep = (total[:, :, at] - lse).exp()[..., None]
        out[:, :, at] = out[:, :, at] * keep + torch.einsum("bhajifk,bhajfkd->bhajid", weights, pooled_v)
        total[:, :, at] = lse
    return out.permute(0, 2, 4, 3, 1, 5).to(q.dtype).contiguous(), total


def backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the explicit formulas, block by block; `delta` [B,H,A,j,i] = sum_d out * grad - gradient of lse.

    Row pass: ordinary attention over the summaries. Column pass: with gk, gv, gc the gradients of pooled_k, pooled_v, c,
    dz = R * (gk . k + gv . v - (gk . pooled_k + gv . pooled_v)) + gc * R * (log R - c)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for at, ft, hidden in reference_blocks(q, k, causal):
        qa, kf, vf, ga = (x.to(wide) for x in (q[:, at], k[:, ft], v[:, ft], grad[:, at]))
        log_r, pooled_k, pooled_v, c = column_pass(qa, kf, vf, scale)
        weights = (row_logits(qa, pooled_k, c, scale, hidden) - lse[:, :, at, ..., None, None]).exp()
        d_weights = torch.einsum("baijhd,bhajfkd->bhajifk", ga, pooled_v)
        ds = weights * (d_weights - delta[:, :, at, ..., None, None])
        dq[:, at] += scale * torch.einsum("bhajifk,bhajfkd->baijhd", ds, pooled_k)
        gk = scale * torch.einsum("bhajifk,baijhd->bhajfkd", ds, qa)
        gv = torch.einsum("bhajifk,baijhd->bhajfkd", weights, ga)
        gc = -ds.sum(4)                                                           # [B,H,A,j,F,k]
        inner = (gk * pooled_k + gv * pooled_v).sum(-1)
        over_l = lambda x: x.permute(0, 1, 2, 4, 5, 3)[..., None]                 # [B,H,A,j,F,k] -> [B,H,A,F,k,j,1]
        r = log_r.exp()
        dr = torch.einsum("bhajfkd,bfklhd->bhafkjl", gk, kf) + torch.einsum("bhajfkd,bfklhd->bhafkjl", gv, vf)
        dz = scale * r * (dr - over_l(inner) + over_l(gc) * (log_r - over_l(c)))
        dq[:, at] += torch.einsum("bhafkjl,bfklhd->bakjhd", dz, kf)
        dk[:, ft] += torch.einsum("bhafkjl,bakjhd->bfklhd", dz, qa) + torch.einsum("bhafkjl,bhajfkd->bfklhd", r, gk)
        dv[:, ft] += torch.einsum("bhafkjl,bhajfkd->bfklhd", r, gv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Triton kernels. Logits, lse and c are in base 2 inside; arrays of statistics hold natural logarithms.
# All strides arrive in units of 8 elements, so that the compiler sees multiples of 8 and loads 16 bytes at a time.
# Summaries (pooled_*, g*) are contiguous [B * H, A, b2, F, b1, D] and their statistics [B * H, A, b2, F, b1].
# ---------------------------------------------------------------------------------------------------------------------
SIZES = ["A", "F", "B1", "B2", "H", "D8", "a0", "causal", "scale"]
STRIDES = {x: [f"s{x}{axis}" for axis in "bt12h"] for x in "qkvog"}
LSE_STRIDES = ["slb", "slh", "sla"]


@jit()
def _last_seen(a, a0, F, causal):
    "Key tiles that query tile a0 + a sees."
    return tl.where(causal > 0, tl.minimum(F, ((a0 + a) // tl.maximum(causal, 1) + 1) * causal), F)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["k"], *STRIDES["v"]], do_not_specialize_on_alignment=["c", "lse"])
def column_kernel(
    q, k, v, pooled_k, pooled_v, c, lse,
    sqb, sqt, sq1, sq2, sqh, skb, skt, sk1, sk2, skh, svb, svt, sv1, sv2, svh,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_J: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "R of BLOCK_J queries of row k in tile a against row k of tile f: its summaries, c and lse. Grid (A * F * B1 * J tiles, B * H)."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(B2, BLOCK_J)
    tile = pid % tiles
    row = pid // tiles % B1
    f = pid // tiles // B1 % F
    a = pid // tiles // B1 // F
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    columns = tl.where(f < _last_seen(a, a0, F, causal), B2, 0)          # 0: hidden by causality, nothing is read or written
    j = tile * BLOCK_J + tl.arange(0, BLOCK_J)
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    j_ok = j < columns
    at_q = (b * sqb + a.to(tl.int64) * sqt + row * sq1 + h * sqh) * 8
    at_k = (b * skb + f.to(tl.int64) * skt + row * sk1 + h * skh) * 8
    at_v = (b * svb + f.to(tl.int64) * svt + row * sv1 + h * svh) * 8
    query = tl.load(q + at_q + j[:, None] * (sq2 * 8) + dim[None, :], mask=j_ok[:, None] & dim_ok[None, :], other=0.0)

    top = tl.full([BLOCK_J], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    moment = tl.zeros([BLOCK_J], tl.float32)                             # sum of p (z - top): stays small for large logits
    acc_k = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    for start in range(0, columns, BLOCK_L):
        col = start + tl.arange(0, BLOCK_L)
        ok = (col < B2)[:, None] & dim_ok[None, :]
        keys = tl.load(k + at_k + col[:, None] * (sk2 * 8) + dim[None, :], mask=ok, other=0.0)
        z = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        z = tl.where((col < B2)[None, :], z, -float("inf"))
        new_top = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(total > 0.0, top - new_top, 0.0)
        keep = tl.where(total > 0.0, tl.exp2(shift), 0.0)
        z = z - new_top[:, None]
        p = tl.exp2(z)
        moment = keep * (moment + shift * total) + tl.sum(p * tl.maximum(z, -1000.0), 1)    # 0 * -inf would be NaN
        total = total * keep + tl.sum(p, 1)
        p = p.to(keys.dtype)
        acc_k = tl.dot(p, keys, acc_k * keep[:, None], input_precision="ieee")
        values = tl.load(v + at_v + col[:, None] * (sv2 * 8) + dim[None, :], mask=ok, other=0.0)
        acc_v = tl.dot(p, values, acc_v * keep[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(j_ok, total, 1.0)
    at = (((bh.to(tl.int64) * A + a) * B2 + j) * F + f) * B1 + row
    store = j_ok[:, None] & dim_ok[None, :]
    tl.store(pooled_k + at[:, None] * D + dim[None, :], (acc_k / total[:, None]).to(pooled_k.dtype.element_ty), mask=store)
    tl.store(pooled_v + at[:, None] * D + dim[None, :], (acc_v / total[:, None]).to(pooled_v.dtype.element_ty), mask=store)
    tl.store(c + at, (moment / total - tl.log2(total)) * 0.6931471805599453, mask=j_ok)
    tl.store(lse + at, (top + tl.log2(total)) * 0.6931471805599453, mask=j_ok)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["o"], *LSE_STRIDES], do_not_specialize_on_alignment=["c", "lse"])
def row_kernel(
    q, pooled_k, pooled_v, c, out, lse,
    sqb, sqt, sq1, sq2, sqh, sob, sot, so1, so2, soh, slb, slh, sla,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "Attention of BLOCK_I queries of column j in tile a over the F * B1 summaries of (a, j). Grid (A * B2 * I tiles, B * H)."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(B1, BLOCK_I)
    i = pid % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    j = pid // tiles % B2
    a = pid // tiles // B2
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    i_ok = i < B1
    ok = i_ok[:, None] & dim_ok[None, :]
    at_q = (b * sqb + a.to(tl.int64) * sqt + j * sq2 + h * sqh) * 8
    query = tl.load(q + at_q + i[:, None] * (sq1 * 8) + dim[None, :], mask=ok, other=0.0)
    count = _last_seen(a, a0, F, causal) * B1
    first = ((bh.to(tl.int64) * A + a) * B2 + j) * F * B1

    top = tl.full([BLOCK_I], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_I], tl.float32)
    acc = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        n_ok = n < count
        load = n_ok[:, None] & dim_ok[None, :]
        keys = tl.load(pooled_k + (first + n)[:, None] * D + dim[None, :], mask=load, other=0.0)
        bias = tl.load(c + first + n, mask=n_ok, other=0.0) * 1.4426950408889634
        s = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale - bias[None, :]
        s = tl.where(n_ok[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(p, 1)
        values = tl.load(pooled_v + (first + n)[:, None] * D + dim[None, :], mask=load, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new_top

    at_o = (b * sob + a.to(tl.int64) * sot + j * so2 + h * soh) * 8
    tl.store(out + at_o + i[:, None] * (so1 * 8) + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=ok)
    at_l = b * slb + h * slh + a.to(tl.int64) * sla + j * B1
    tl.store(lse + at_l + i, (top + tl.log2(total)) * 0.6931471805599453, mask=i_ok)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["g"], *STRIDES["o"], *LSE_STRIDES],
      do_not_specialize_on_alignment=["c", "lse", "delta"])
def row_dq_kernel(
    q, grad, pooled_k, pooled_v, c, lse, delta, dq,
    sqb, sqt, sq1, sq2, sqh, sgb, sgt, sg1, sg2, sgh, sob, sot, so1, so2, soh, slb, slh, sla,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "The row pass's share of dq (float32, written, strides so*): a loop over summaries. Grid as row_kernel."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(B1, BLOCK_I)
    i = pid % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    j = pid // tiles % B2
    a = pid // tiles // B2
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    i_ok = i < B1
    ok = i_ok[:, None] & dim_ok[None, :]
    at_q = (b * sqb + a.to(tl.int64) * sqt + j * sq2 + h * sqh) * 8
    at_g = (b * sgb + a.to(tl.int64) * sgt + j * sg2 + h * sgh) * 8
    query = tl.load(q + at_q + i[:, None] * (sq1 * 8) + dim[None, :], mask=ok, other=0.0)
    g_out = tl.load(grad + at_g + i[:, None] * (sg1 * 8) + dim[None, :], mask=ok, other=0.0)
    at_l = b * slb + h * slh + a.to(tl.int64) * sla + j * B1
    norm = tl.load(lse + at_l + i, mask=i_ok, other=0.0) * 1.4426950408889634
    inner = tl.load(delta + at_l + i, mask=i_ok, other=0.0)
    count = _last_seen(a, a0, F, causal) * B1
    first = ((bh.to(tl.int64) * A + a) * B2 + j) * F * B1

    acc = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        n_ok = n < count
        load = n_ok[:, None] & dim_ok[None, :]
        keys = tl.load(pooled_k + (first + n)[:, None] * D + dim[None, :], mask=load, other=0.0)
        values = tl.load(pooled_v + (first + n)[:, None] * D + dim[None, :], mask=load, other=0.0)
        bias = tl.load(c + first + n, mask=n_ok, other=0.0) * 1.4426950408889634
        s = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634) - bias[None, :]
        p = tl.where(n_ok[None, :] & i_ok[:, None], tl.exp2(s - norm[:, None]), 0.0)
        ds = p * (tl.dot(g_out, tl.trans(values), input_precision="ieee") - inner[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")
    at_o = (b * sob + a.to(tl.int64) * sot + j * so2 + h * soh) * 8
    tl.store(dq + at_o + i[:, None] * (so1 * 8) + dim[None, :], acc * scale, mask=ok)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["g"], *LSE_STRIDES],
      do_not_specialize_on_alignment=["c", "lse", "delta", "gc", "inner"])
def row_dkv_kernel(
    q, grad, pooled_k, pooled_v, c, lse, delta, gk, gv, gc, inner,
    sqb, sqt, sq1, sq2, sqh, sgb, sgt, sg1, sg2, sgh, slb, slh, sla,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "Gradients of BLOCK_N summaries of (a, j), and inner = gk . pooled_k + gv . pooled_v. Grid (A * B2 * N tiles, B * H)."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(F * B1, BLOCK_N)
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    j = pid // tiles % B2
    a = pid // tiles // B2
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    n_ok = n < _last_seen(a, a0, F, causal) * B1
    ok = n_ok[:, None] & dim_ok[None, :]
    first = ((bh.to(tl.int64) * A + a) * B2 + j) * F * B1
    at_q = (b * sqb + a.to(tl.int64) * sqt + j * sq2 + h * sqh) * 8
    at_g = (b * sgb + a.to(tl.int64) * sgt + j * sg2 + h * sgh) * 8
    at_l = b * slb + h * slh + a.to(tl.int64) * sla + j * B1
    keys = tl.load(pooled_k + (first + n)[:, None] * D + dim[None, :], mask=ok, other=0.0)
    values = tl.load(pooled_v + (first + n)[:, None] * D + dim[None, :], mask=ok, other=0.0)
    bias = tl.load(c + first + n, mask=n_ok, other=0.0) * 1.4426950408889634

    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_c = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, B1, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        i_ok = i < B1
        load = i_ok[:, None] & dim_ok[None, :]
        query = tl.load(q + at_q + i[:, None] * (sq1 * 8) + dim[None, :], mask=load, other=0.0)
        g_out = tl.load(grad + at_g + i[:, None] * (sg1 * 8) + dim[None, :], mask=load, other=0.0)
        norm = tl.load(lse + at_l + i, mask=i_ok, other=0.0) * 1.4426950408889634
        less = tl.load(delta + at_l + i, mask=i_ok, other=0.0)
        s = tl.dot(keys, tl.trans(query), input_precision="ieee") * (scale * 1.4426950408889634) - bias[:, None]
        p = tl.where(n_ok[:, None] & i_ok[None, :], tl.exp2(s - norm[None, :]), 0.0)
        acc_v = tl.dot(p.to(query.dtype), g_out, acc_v, input_precision="ieee")
        ds = p * (tl.dot(values, tl.trans(g_out), input_precision="ieee") - less[None, :])
        acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision="ieee")
        acc_c -= tl.sum(ds, 1)
    acc_k = acc_k * scale
    at = (first + n)[:, None] * D + dim[None, :]
    tl.store(gk + at, acc_k.to(gk.dtype.element_ty), mask=ok)
    tl.store(gv + at, acc_v.to(gv.dtype.element_ty), mask=ok)
    tl.store(gc + first + n, acc_c, mask=n_ok)
    tl.store(inner + first + n, tl.sum(acc_k * keys.to(tl.float32) + acc_v * values.to(tl.float32), 1), mask=n_ok)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["k"], *STRIDES["v"], *STRIDES["o"]],
      do_not_specialize_on_alignment=["c", "lse", "gc", "inner"])
def column_dq_kernel(
    q, k, v, gk, gv, c, lse, gc, inner, dq,
    sqb, sqt, sq1, sq2, sqh, skb, skt, sk1, sk2, skh, svb, svt, sv1, sv2, svh, sob, sot, so1, so2, soh,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_J: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "The column pass's share of dq, added to the row pass's: BLOCK_J queries of row k in tile a, a loop over (f, l). Grid (A * B1 * J tiles, B * H)."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(B2, BLOCK_J)
    j = pid % tiles * BLOCK_J + tl.arange(0, BLOCK_J)
    row = pid // tiles % B1
    a = pid // tiles // B1
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    j_ok = j < B2
    ok = j_ok[:, None] & dim_ok[None, :]
    at_q = (b * sqb + a.to(tl.int64) * sqt + row * sq1 + h * sqh) * 8
    query = tl.load(q + at_q + j[:, None] * (sq2 * 8) + dim[None, :], mask=ok, other=0.0)
    steps = tl.cdiv(B2, BLOCK_L)

    acc = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    for step in range(0, _last_seen(a, a0, F, causal) * steps):
        f = step // steps
        at = (((bh.to(tl.int64) * A + a) * B2 + j) * F + f) * B1 + row
        norm = tl.load(lse + at, mask=j_ok, other=0.0)
        entropy = tl.load(c + at, mask=j_ok, other=0.0)
        g_entropy = tl.load(gc + at, mask=j_ok, other=0.0)
        less = tl.load(inner + at, mask=j_ok, other=0.0)
        g_keys = tl.load(gk + at[:, None] * D + dim[None, :], mask=ok, other=0.0)
        g_values = tl.load(gv + at[:, None] * D + dim[None, :], mask=ok, other=0.0)
        col = step % steps * BLOCK_L + tl.arange(0, BLOCK_L)
        load = (col < B2)[:, None] & dim_ok[None, :]
        at_k = (b * skb + f.to(tl.int64) * skt + row * sk1 + h * skh) * 8
        at_v = (b * svb + f.to(tl.int64) * svt + row * sv1 + h * svh) * 8
        keys = tl.load(k + at_k + col[:, None] * (sk2 * 8) + dim[None, :], mask=load, other=0.0)
        values = tl.load(v + at_v + col[:, None] * (sv2 * 8) + dim[None, :], mask=load, other=0.0)
        log_r = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale - norm[:, None]
        r = tl.where((col < B2)[None, :], tl.exp2(log_r * 1.4426950408889634), 0.0)
        dr = tl.dot(g_values, tl.trans(values), input_precision="ieee")
        dr = tl.dot(g_keys, tl.trans(keys), dr, input_precision="ieee")
        dz = r * (dr - less[:, None] + g_entropy[:, None] * (log_r - entropy[:, None]))
        acc = tl.dot(dz.to(keys.dtype), keys, acc, input_precision="ieee")
    at_o = (b * sob + a.to(tl.int64) * sot + row * so1 + h * soh) * 8
    place = dq + at_o + j[:, None] * (so2 * 8) + dim[None, :]
    tl.store(place, tl.load(place, mask=ok, other=0.0) + acc * scale, mask=ok)


@jit(do_not_specialize=[*SIZES, *STRIDES["q"], *STRIDES["k"], *STRIDES["v"], *STRIDES["o"]],
      do_not_specialize_on_alignment=["c", "lse", "gc", "inner"])
def column_dkv_kernel(
    q, k, v, gk, gv, c, lse, gc, inner, dk, dv,
    sqb, sqt, sq1, sq2, sqh, skb, skt, sk1, sk2, skh, svb, svt, sv1, sv2, svh, sob, sot, so1, so2, soh,
    A, F, B1, B2, H, D8, a0, causal, scale,
    BLOCK_J: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):
    "dk and dv (float32, added to, strides so*) of BLOCK_L keys of row k in tile f: a loop over (a, j). Grid (F * B1 * L tiles, B * H)."
    pid, bh = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(B2, BLOCK_L)
    col = pid % tiles * BLOCK_L + tl.arange(0, BLOCK_L)
    row = pid // tiles % B1
    f = pid // tiles // B1
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    D = D8 * 8
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < D
    ok = (col < B2)[:, None] & dim_ok[None, :]
    at_k = (b * skb + f.to(tl.int64) * skt + row * sk1 + h * skh) * 8
    at_v = (b * svb + f.to(tl.int64) * svt + row * sv1 + h * svh) * 8
    keys = tl.load(k + at_k + col[:, None] * (sk2 * 8) + dim[None, :], mask=ok, other=0.0)
    values = tl.load(v + at_v + col[:, None] * (sv2 * 8) + dim[None, :], mask=ok, other=0.0)
    steps = tl.cdiv(B2, BLOCK_J)
    begin = tl.where(causal > 0, tl.maximum(f // tl.maximum(causal, 1) * causal - a0, 0), 0)   # first query tile that sees f

    acc_k = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    for step in range(begin * steps, A * steps):
        a = step // steps
        j = step % steps * BLOCK_J + tl.arange(0, BLOCK_J)
        j_ok = j < B2
        load = j_ok[:, None] & dim_ok[None, :]
        at_q = (b * sqb + a.to(tl.int64) * sqt + row * sq1 + h * sqh) * 8
        query = tl.load(q + at_q + j[:, None] * (sq2 * 8) + dim[None, :], mask=load, other=0.0)
        at = (((bh.to(tl.int64) * A + a) * B2 + j) * F + f) * B1 + row
        norm = tl.load(lse + at, mask=j_ok, other=0.0)
        entropy = tl.load(c + at, mask=j_ok, other=0.0)
        g_entropy = tl.load(gc + at, mask=j_ok, other=0.0)
        less = tl.load(inner + at, mask=j_ok, other=0.0)
        g_keys = tl.load(gk + at[:, None] * D + dim[None, :], mask=load, other=0.0)
        g_values = tl.load(gv + at[:, None] * D + dim[None, :], mask=load, other=0.0)
        log_r = tl.dot(keys, tl.trans(query), input_precision="ieee") * scale - norm[None, :]
        r = tl.exp2(log_r * 1.4426950408889634)
        dr = tl.dot(values, tl.trans(g_values), input_precision="ieee")
        dr = tl.dot(keys, tl.trans(g_keys), dr, input_precision="ieee")
        dz = r * (dr - less[None, :] + g_entropy[None, :] * (log_r - entropy[None, :])) * scale
        r = r.to(query.dtype)
        acc_v = tl.dot(r, g_values, acc_v, input_precision="ieee")
        acc_k = tl.dot(r, g_keys, acc_k, input_precision="ieee")
        acc_k = tl.dot(dz.to(query.dtype), query, acc_k, input_precision="ieee")
    at_o = (b * sob + f.to(tl.int64) * sot + row * so1 + h * soh) * 8
    place = at_o + col[:, None] * (so2 * 8) + dim[None, :]
    tl.store(dk + place, tl.load(dk + place, mask=ok, other=0.0) + acc_k, mask=ok)
    tl.store(dv + place, tl.load(dv + place, mask=ok, other=0.0) + acc_v, mask=ok)


# ---------------------------------------------------------------------------------------------------------------------
# Configurations and launchers
# ---------------------------------------------------------------------------------------------------------------------
HEAD_SIZES, TYPES = (64, 128), (torch.float16, torch.bfloat16, torch.float32)
COLUMN, ROW = ("column", "column_dq", "column_dkv"), ("row", "row_dq", "row_dkv")
KERNELS = {name: globals()[f"{name}_kernel"] for name in (*COLUMN, *ROW)}


def block_d(D: int) -> int:
    "Columns of the tile that holds a head of size D: the next of 64 and 128 (the rest is masked)."
    return next(size for size in HEAD_SIZES if D <= size)


def config(name: str, arch: int, dtype: torch.dtype, D: int) -> tuple[dict, dict]:
    "(constexprs, launch options) of a kernel for an architecture (90 = sm_90): two tile sides, warps and stages."
    wide = D > 64
    if dtype == torch.float32:                             # exact products run on the ordinary cores and hold whole rows in registers
        sides = {"row": (32, 16)}.get(name, (16, 16))
        warps = 4 if name in ("column", "column_dq", "row_dq") else 8
    else:
        sides = {"column": (64, 64), "column_dq": (64, 32), "column_dkv": (32, 32 if wide and arch == 90 else 64), "row_dkv": (32, 32 if wide else 64)}.get(name, (32, 64))
        warps = 4 if name in ("row", "row_dq") else 8
    axes = ("BLOCK_J", "BLOCK_L") if name in COLUMN else ("BLOCK_I", "BLOCK_N")
    return dict(zip(axes, sides), BLOCK_D=block_d(D)), dict(num_warps=warps, num_stages=1, maxnreg=255)


def _aligned(x: Tensor) -> Tensor:
    "x itself if the kernels may load 16 bytes at a time, else a copy."
    return x if loads_16_bytes(x) else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    "Strides (batch, tile, row, column, head) of each, in units of 8 elements."
    return [s // 8 for x in tensors for s in x.stride()[:5]]


def workspace_slices(q: Tensor, k: Tensor, arrays: int, limit: int) -> Iterator[tuple[slice, slice]]:
    "(query tiles, heads) whose `arrays` arrays of summaries stay within `limit` bytes, or one tile of one head."
    B, A, b1, b2, H, D = q.shape
    unit = arrays * B * k.shape[1] * b1 * b2 * D * q.element_size()               # one query tile of one head
    heads = max(1, min(H, limit // unit))
    return product(slices(A, max(1, limit // (unit * heads))), slices(H, heads))


class _Launch:
    "The six kernels on one slice of query tiles and heads, with its summaries."

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, at: slice, hs: slice, scale: float, causal: int):
        self.q, self.k, self.v = q[:, at, :, :, hs], k[:, :, :, :, hs], v[:, :, :, :, hs]
        (self.B, self.A, self.b1, self.b2, self.H, self.D), self.F = self.q.shape, k.shape[1]
        self.scale, self.at, self.hs = scale, at, hs
        self.sizes = (self.A, self.F, self.b1, self.b2, self.H, self.D // 8, at.start, causal)
        self.pooled_k, self.pooled_v, self.c, self.lse = *self.summaries(2), *self.statistics(2)

    def summaries(self, n: int) -> list[Tensor]:
        shape = (self.B * self.H, self.A, self.b2, self.F, self.b1, self.D)
        return [_empty(shape, self.q.dtype, self.q.device) for _ in range(n)]

    def statistics(self, n: int) -> list[Tensor]:
        return [_empty((self.B * self.H, self.A, self.b2, self.F, self.b1), torch.float32, self.q.device) for _ in range(n)]

    def run(self, name: str, rows: int, inner: int, side: str, scale: float, *args) -> None:
        "Launch kernel `name` on a grid of rows * ceil(inner / its block) x B * H programs."
        constexprs, options = config(name, capability(self.q.device), self.q.dtype, self.D)
        grid = (rows * triton.cdiv(inner, constexprs[side]), self.B * self.H)
        KERNELS[name][grid](*args, *self.sizes, scale, **constexprs, **options)

    def column(self) -> None:
        q, k, v = self.q, self.k, self.v
        self.run("column", self.A * self.F * self.b1, self.b2, "BLOCK_J", self.scale * LOG2E,
                 q, k, v, self.pooled_k, self.pooled_v, self.c, self.lse, *_strides(q, k, v))

    def row(self, out: Tensor, lse: Tensor) -> None:
        self.run("row", self.A * self.b2, self.b1, "BLOCK_I", self.scale * LOG2E,
                 self.q, self.pooled_k, self.pooled_v, self.c, out, lse, *_strides(self.q, out), *lse.stride()[:3])

    def backward(self, grad: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        "After `column`: the row pass's gradients, then the column pass's."
        q, k, v, scale = self.q, self.k, self.v, self.scale
        summaries = (self.pooled_k, self.pooled_v, self.c, lse, delta)
        (gk, gv), (gc, inner) = self.summaries(2), self.statistics(2)
        self.run("row_dq", self.A * self.b2, self.b1, "BLOCK_I", scale, q, grad, *summaries, dq, *_strides(q, grad, dq), *lse.stride()[:3])
        self.run("row_dkv", self.A * self.b2, self.F * self.b1, "BLOCK_N", scale,
                 q, grad, *summaries, gk, gv, gc, inner, *_strides(q, grad), *lse.stride()[:3])
        columns = (q, k, v, gk, gv, self.c, self.lse, gc, inner)
        self.run("column_dq", self.A * self.b1, self.b2, "BLOCK_J", scale, *columns, dq, *_strides(q, k, v, dq))
        self.run("column_dkv", self.F * self.b1, self.b2, "BLOCK_L", scale, *columns, dk, dv, *_strides(q, k, v, dk))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int) -> tuple[Tensor, Tensor]:
    "(out, lse) by `column_kernel` and `row_kernel`, slice by slice."
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    B, A, b1, b2, H, D = q.shape
    out, lse = _empty((B, A, b1, b2, H, D), q.dtype, q.device), _empty((B, H, A, b2, b1), torch.float32, q.device)
    for at, hs in workspace_slices(q, k, 2, WORKSPACE):
        launch = _Launch(q, k, v, at, hs, scale, causal)
        launch.column()
        launch.row(out[:, at, :, :, hs], lse[:, hs, at])
    return out, lse


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    "(dq, dk, dv): the summaries are computed again, slice by slice; sums over slices are taken in float32, in order."
    grad, q, k, v = (_aligned(x) for x in (grad, q, k, v))
    dq = _empty(q.shape, torch.float32, q.device)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    for at, hs in workspace_slices(q, k, 4, WORKSPACE):
        launch = _Launch(q, k, v, at, hs, scale, causal)
        launch.column()
        rows = (x[:, hs, at] for x in (lse, delta))
        launch.backward(grad[:, at, :, :, hs], *rows, dq[:, at, :, :, hs], dk[:, :, :, :, hs], dv[:, :, :, :, hs])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


FLOAT_STATISTICS, GRADIENTS = ("c", "lse", "delta", "gc", "inner"), ("dq", "dk", "dv")


def specs(arch: int) -> list[KernelSpec]:
    "Every configuration that the launchers can choose on an architecture, for compilation without a GPU."
    short, found = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}, []
    for dtype, D, name in product(TYPES, HEAD_SIZES, KERNELS):
        kernel, (constexprs, options) = KERNELS[name], config(name, arch, dtype, D)
        numbers = lambda a: "fp32" if a == "scale" else "i32"
        pointer = lambda a: "*fp32" if a in (*FLOAT_STATISTICS, *GRADIENTS) else f"*{short[dtype]}"
        arguments = [a for a in kernel.arg_names if a not in constexprs]
        cut = next(n for n, a in enumerate(arguments) if a.startswith("s"))              # pointers first, then strides, sizes and scale
        types = {a: pointer(a) if n < cut else numbers(a) for n, a in enumerate(arguments)}
        sides = " ".join(f"{axis[-1]}{size}" for axis, size in constexprs.items() if axis.startswith("BLOCK"))
        found.append(KernelSpec(kernel, f"{short[dtype]} {sides}", types, constexprs, options, tuple(a for a in arguments[:cut] if a not in FLOAT_STATISTICS)))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Operators: the reference on the CPU, the kernels on a GPU or in the interpreter
# ---------------------------------------------------------------------------------------------------------------------
NAMESPACE = "neurips26"


@torch.library.custom_op(f"{NAMESPACE}::monarch_attention", mutates_args=(), device_types="cpu")
def forward_op(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int) -> tuple[Tensor, Tensor]:
    return (launch_forward if INTERPRET else forward_reference)(q, k, v, scale, causal)


@torch.library.custom_op(f"{NAMESPACE}::monarch_attention_backward", mutates_args=(), device_types="cpu")
def backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (launch_backward if INTERPRET else backward_reference)(grad, q, k, v, delta, lse, scale, causal)


forward_op.register_kernel("cuda")(launch_forward)
backward_op.register_kernel("cuda")(launch_backward)


@forward_op.register_fake
def _(q, k, v, scale, causal):
    B, A, b1, b2, H, D = q.shape
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((B, H, A, b2, b1), dtype=lse)


@backward_op.register_fake
def _(grad, q, k, v, delta, lse, scale, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, g_out, g_lse):
    q, k, v, out, lse = ctx.saved_tensors
    g_out = torch.zeros_like(out) if g_out is None else g_out
    delta = torch.einsum("baijhd,baijhd->bhaji", out.to(lse.dtype), g_out.to(lse.dtype))
    delta = (delta if g_lse is None else delta - g_lse).contiguous()
    return *backward_op(g_out.to(q.dtype), q, k, v, delta, lse, ctx.scale, ctx.causal), None, None


forward_op.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------------------------------------------------------------
# Public surface
# ---------------------------------------------------------------------------------------------------------------------
def monarch_attention_tiles(
    q: Tensor,                # [B, A, b1, b2, H, D] queries in tiles of b1 rows and b2 columns
    k: Tensor,                # [B, F, b1, b2, H, D] keys in tiles of the same size
    v: Tensor,                # [B, F, b1, b2, H, D] values
    *,
    scale: float | None = None,   # of the logits; 1/sqrt(D) by default
    causal: int = 0,              # tiles per chunk; a tile sees the tiles of its own and earlier chunks. 0: all tiles
    return_lse: bool = False,     # also return the log-sum-exp of the row pass
) -> Tensor | tuple[Tensor, Tensor]:  # out [B, A, b1, b2, H, D] (and lse [B, H, A, b2, b1])
    "One-iteration Monarch attention, differentiable in q, k and v. Raises ValueError."
    need(q.ndim == 6 and q.numel() > 0, f"q: expected a non-empty [B, A, b1, b2, H, D], got {list(q.shape)}")
    need(q.is_floating_point(), f"q: expected floats, got {q.dtype}")
    need(scale is None or math.isfinite(scale), f"scale: expected a finite number, got {scale}")
    B, A, b1, b2, H, D = q.shape
    need(k.ndim == 6 and k.numel() > 0 and k.shape == (B, k.shape[1], b1, b2, H, D),
          f"k: expected [{B}, F, {b1}, {b2}, {H}, {D}] to match q, got {list(k.shape)}")
    need(v.shape == k.shape, f"v: expected the shape of k {list(k.shape)}, got {list(v.shape)}")
    for name, x in (("k", k), ("v", v)):
        need(x.dtype == q.dtype, f"{name}: {x.dtype} differs from q's {q.dtype}")
        need(x.device == q.device, f"{name}: on {x.device}, but q is on {q.device}")
    need(causal >= 0, f"causal: expected tiles per chunk >= 0, got {causal}")
    need(causal == 0 or (A == k.shape[1] and A % causal == 0), f"causal: chunks of {causal} tiles need A = F, a multiple of it; got {A} and {k.shape[1]}")
    if INTERPRET or q.device.type == "cuda":
        need(q.dtype in TYPES, f"q: the kernel takes float16, bfloat16 and float32, got {q.dtype}")
        need(D % 8 == 0 and D <= HEAD_SIZES[-1], f"q: the kernel takes head sizes that are multiples of 8 up to 128, got {D}")
        need(B * H <= 65535, f"q: the kernel takes B * H up to 65535, got {B * H}")
    out, lse = forward_op(q, k, v, 1 / math.sqrt(D) if scale is None else float(scale), int(causal))
    return (out, lse) if return_lse else out


def seen_pairs(A: int, F: int, causal: int = 0) -> int:
    "(query tile, key tile) pairs that are computed."
    return sum(seen_tiles(a, F, causal) for a in range(A))


def monarch_flops(
    q_shape: tuple[int, ...],  # (B, A, b1, b2, H, D)
    F: int,                    # key tiles
    causal: int = 0,           # tiles per chunk
    *,
    backward: bool = False,    # of the backward pass instead
) -> int:                      # floating-point operations of the matrix products
    "Forward: 3 products of the column pass, 2 of the row pass. Backward: 13 and 7, recomputation included."
    B, A, b1, b2, H, D = q_shape
    columns, rows = (13, 7) if backward else (3, 2)
    return 2 * B * H * D * seen_pairs(A, F, causal) * (columns * b1 * b2 * b2 + rows * b1 * b1 * b2)


def monarch_bytes(
    q_shape: tuple[int, ...],  # (B, A, b1, b2, H, D)
    F: int,                    # key tiles
    itemsize: int,             # bytes per element
    causal: int = 0,           # tiles per chunk
) -> tuple[int, int]:          # (least, as launched) bytes of the forward pass
    "Least: q, k, v in and out once, with summaries kept on the chip. As launched: summaries are written and read back."
    B, A, b1, b2, H, D = q_shape
    tile = B * H * b1 * b2 * D * itemsize
    pairs = seen_pairs(A, F, causal)
    statistics = pairs * B * H * b1 * b2 * 4
    return (2 * A + 2 * F) * tile, (A + A) * tile + pairs * (3 + 2 + 2) * tile + 3 * statistics


def examples() -> list[tuple[object, tuple]]:
    "Small calls of the operators, for `torch.library.opcheck`."
    generator = torch.Generator().manual_seed(0)
    calls = []
    for dtype, causal in ((torch.float32, 0), (torch.float16, 1)):
        q, k, v, grad = (torch.randn(1, 2, 2, 3, 2, 8, generator=generator).to(dtype) for _ in range(4))
        calls.append((forward_op, (*(x.clone().requires_grad_() for x in (q, k, v)), 0.25, causal)))
        wide = torch.promote_types(dtype, torch.float32)
        delta, lse = (torch.randn(1, 2, 2, 3, 2, generator=generator).to(wide) for _ in range(2))
        calls.append((backward_op, (grad, q, k, v, delta, lse, 0.25, causal)))
    return calls


def launches() -> list[Callable[[], object]]:
    "Calls that start every kernel for each type and both widths of a head, causal or not, from whole and from strided tensors."
    calls = []
    for dtype, D, causal in product(TYPES, (8, *HEAD_SIZES), (0, 1)):
        q, k, v = (torch.zeros(1, 2, 2, 3, 2, D + 8 * causal, dtype=dtype)[..., :D] for _ in range(3))
        grad, lse = torch.zeros(1, 2, 2, 3, 2, D, dtype=dtype), torch.zeros(1, 2, 2, 3, 2)
        calls += [partial(launch_forward, q, k, v, 0.25, causal), partial(launch_backward, grad, q, k, v, lse, lse, 0.25, causal)]
    return calls
