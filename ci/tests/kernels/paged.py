"""Random problems for paged attention, with a float64 answer that shares no code with the kernel.

The answer is dense: softmax over all keys under a token-level mask, from the keys before they were cut into pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NAN = float("nan")


@dataclass(repr=False)
class Problem:
    "Arguments of the kernel, and the dense data that they were made from."
    q: Tensor            # [B, Hq, Tq, D]
    k_pages: Tensor      # [P, page, D], NaN wherever no selected token lies
    v_pages: Tensor
    ids: Tensor          # int32 [B, R, nq, n]
    pages: Tensor
    counts: Tensor
    seq_lens: Tensor
    q_start: int
    q_block: int
    k: Tensor            # [B, R, Tk, D]
    v: Tensor
    see: Tensor          # Bool [B, Hq, Tq, Tk]
    made: str = ""       # the call that makes it again

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.pages, self.counts

    def __repr__(self) -> str:
        return f"{self.made}"

    def scores(self) -> Tensor:
        "Scaled scores in float64, before the mask."
        k = self.k.double().repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        return self.q.double() @ k.transpose(-1, -2) / math.sqrt(self.q.shape[-1])

    def answer(self) -> tuple[Tensor, Tensor]:
        "(out, lse) in float64."
        scores = self.scores().masked_fill(~self.see, -math.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ self.v.double().repeat_interleave(self.q.shape[1] // self.v.shape[1], 1), scores.logsumexp(-1)

    def torch_error(self) -> float:
        "Largest error of PyTorch's own attention in the same type."
        k, v = (x.repeat_interleave(self.q.shape[1] // x.shape[1], 1) for x in (self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(self.q, k, v, attn_mask=self.see)
        seen = self.see.any(-1, keepdim=True)
        return float((out.double() - self.answer()[0]).where(seen, 0.0).abs().max())


def make(
    B: int, R: int, G: int, Tq: int, past: int, D: int, page: int, *, dtype: torch.dtype = torch.float32, density: float = 0.5, seed: int = 0,
    q_block: int | None = None, scale: float = 1.0, shuffle: bool = False, strided: bool = False, ragged: bool = False,
) -> Problem:
    "B sequences of past + Tq tokens, R table rows of G heads. `scale` multiplies q, `shuffle` permutes table entries."
    made = "make(" + ", ".join(f"{name}={value!r}" for name, value in locals().items()) + ")"
    rng = torch.Generator().manual_seed(seed)
    Tk, Hq = past + Tq, R * G
    blocks, q_block = -(-Tk // page), q_block or Tq
    nq = -(-Tq // q_block)
    q = scale * torch.randn(B, Tq, Hq, D, generator=rng).to(dtype).transpose(1, 2)
    q = q if strided else q.contiguous()
    k, v = (torch.randn(B, R, Tk, D, generator=rng).to(dtype) for _ in range(2))
    seq_lens = torch.randint(max(1, past), Tk + 1, (B,), generator=rng) if ragged else torch.full((B,), Tk)
    inside = torch.arange(blocks) * page < seq_lens[:, None]
    chosen = (torch.rand(B, R, nq, blocks, generator=rng) < density) & inside[:, None, None]
    chosen[..., 0] |= ~chosen.any(-1)
    P = B * R * blocks + 2
    place = torch.randperm(P, generator=rng)[: B * R * blocks].view(B, R, blocks).int()
    k_pages, v_pages = (torch.full((P, page, D), NAN, dtype=dtype) for _ in range(2))
    for b in range(B):
        for r in range(R):
            for i in chosen[b, r].any(0).nonzero().flatten().tolist():
                cut = slice(i * page, min((i + 1) * page, int(seq_lens[b])))
                k_pages[place[b, r, i], : cut.stop - cut.start], v_pages[place[b, r, i], : cut.stop - cut.start] = k[b, r, cut], v[b, r, cut]
    counts = chosen.sum(-1).int()
    ids, pages = torch.full((B, R, nq, int(counts.max()) + 1), -1, dtype=torch.int32), torch.full((B, R, nq, int(counts.max()) + 1), -1, dtype=torch.int32)
    for b, r, i in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        found = chosen[b, r, i].nonzero().flatten()
        found = found[torch.randperm(len(found), generator=rng)] if shuffle else found
        ids[b, r, i, : len(found)], pages[b, r, i, : len(found)] = found.int(), place[b, r, found]
    token = chosen.repeat_interleave(page, -1)[..., :Tk].repeat_interleave(q_block, 2)[:, :, :Tq].repeat_interleave(G, 1)
    causal = torch.arange(Tk) <= past + torch.arange(Tq)[:, None]
    see = token & causal & (torch.arange(Tk) < seq_lens[:, None])[:, None, None]
    return Problem(q, k_pages, v_pages, ids, pages, counts, seq_lens.int(), past, q_block, k, v, see, made)


def verdict(p: Problem, out: Tensor, lse: Tensor) -> str:
    """What is wrong with a result; empty if nothing: all written and finite, error at most twice PyTorch's own + rounding.

    Rounding: one unit of the output's type, and what one unit of a float32 score does to a softmax weight."""
    want, want_lse = p.answer()
    unit = torch.finfo(p.q.dtype).eps + torch.finfo(torch.float32).eps * float(p.scores().abs().max())
    if out.shape != p.q.shape or out.dtype != p.q.dtype: return f"shape {list(out.shape)} or type {out.dtype}"
    if not out.isfinite().all(): return f"{int((~out.isfinite()).sum())} entries of out aren't finite"
    error, allowed = float((out.double() - want).abs().max()), 2 * p.torch_error() + unit * float(want.abs().max())
    if error > allowed: return f"error {error:.3g} > {allowed:.3g}"
    empty = ~p.see.any(-1)
    if not (out[empty] == 0).all() or not (lse[empty] == -math.inf).all(): return "a row that sees nothing must have out = 0, lse = -inf"
    gap = (lse.double() - want_lse)[~empty].abs()
    limit = 2e-3 if p.q.dtype == torch.float16 else 2e-5                   # relative to the magnitude of the scores
    if gap.numel() and not float((gap / want_lse[~empty].abs().clamp(min=1.0)).max()) <= limit: return f"lse is off by {float(gap.max()):.3g}"
    return ""
