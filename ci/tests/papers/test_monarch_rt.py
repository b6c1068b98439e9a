"""monarch_rt: factors, attention, rivals and the chunked video model, each against an independent route, and mutations that must be noticed."""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from neurips26_lit.core.catalog import paper
from neurips26_lit.core.video_flow import rope_angles, rotate, surgical_clips
from neurips26_lit.efficient_inference.monarch_rt import attend, factor, rivals, video
from neurips26_lit.efficient_inference.monarch_rt.attend import MonarchCache, monarch_attention
from neurips26_lit.efficient_inference.monarch_rt.factor import Tiling, from_tiles, monarch_factors, monarch_matrix, to_tiles

torch.set_num_threads(1)
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(grid_q, grid_k=None, B=1, H=2, d=6, spread=1.5, seed=0, dtype=F64):
    g = rng(seed)
    return [(spread * torch.randn(B, math.prod(n), H, d, generator=g, dtype=F64)).to(dtype) for n in (grid_q, grid_k or grid_q, grid_k or grid_q)]


def sdpa(q, k, v, scale=None):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)


def by_index(q, k, v, grid_q, grid_k, tiling):
    "One iteration, token by token, from raster coordinates: no tiles, no einsum."
    out, scale = torch.zeros_like(q), 1 / math.sqrt(q.shape[-1])
    b1h, b2 = grid_q[1] // tiling.h_reduce, grid_q[2] // tiling.w_reduce
    token = lambda grid, f, r, c: (f * grid[1] + r) * grid[2] + c
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for f, r, c in np.ndindex(*grid_q):
                f0, r0 = f // tiling.f_tied * tiling.f_tied, r // b1h * b1h                                # first frame and row of the query's tile
                query, logits, values = q[b, token(grid_q, f, r, c), h] * scale, [], []
                for kf in range(grid_k[0]):
                    for kr in range(grid_k[1]):
                        speaker = q[b, token(grid_q, f0 + kf % tiling.f_tied, r0 + kr % b1h, c), h] * scale   # the query of the same row in the tile, same column
                        for part in range(tiling.w_reduce):
                            row = [token(grid_k, kf, kr, part * b2 + l) for l in range(b2)]
                            R = (k[b, row, h] @ speaker).softmax(0)
                            logits.append(query @ (R @ k[b, row, h]) - (R * R.log()).sum())
                            values.append(R @ v[b, row, h])
                out[b, token(grid_q, f, r, c), h] = torch.stack(logits).softmax(0) @ torch.stack(values)
    return out


TILINGS = [Tiling(), Tiling(2, 1, 1), Tiling(1, 2, 1), Tiling(1, 1, 2), Tiling(2, 2, 3), Tiling(1, 4, 6)]


# --- oracles 1 to 12 -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tiling", [Tiling(1, 4, 1), Tiling(1, 1, 6), Tiling(1, 4, 6), Tiling(2, 1, 6)])
def test_1_height_or_width_one_is_dense(tiling):
    q, k, v = qkv((2, 4, 6), (4, 4, 6), spread=4.0)
    assert (monarch_attention(q, k, v, (2, 4, 6), (4, 4, 6), tiling) - sdpa(q, k, v)).abs().max() <= 1e-10


def test_2_separable_logits_and_pure_position_are_exact():
    g, b1, b2 = rng(1), 4, 6
    row = lambda: torch.randn(1, 3, b1, 1, 1, 4, generator=g, dtype=F64).expand(-1, -1, -1, b2, -1, -1)
    column = lambda: torch.randn(1, 3, 1, b2, 1, 4, generator=g, dtype=F64).expand(-1, -1, b1, -1, -1, -1)
    q, k = (2 * torch.cat([row(), column()], -1).reshape(1, -1, 1, 8) for _ in range(2))
    v = torch.randn(1, 72, 1, 8, generator=g, dtype=F64)
    assert (monarch_attention(q, k, v, (3, 4, 6), (3, 4, 6)) - sdpa(q, k, v)).abs().max() <= 1e-10
    constant = 3 * torch.randn(1, 1, 1, 24, generator=g, dtype=F64).expand(1, 72, 1, 24)
    q = rotate(constant, rope_angles((3, 4, 6), 24).double())
    v = torch.randn(1, 72, 1, 24, generator=g, dtype=F64)
    for tiling in (Tiling(), Tiling(1, 2, 1), Tiling(1, 1, 3)):
        assert (monarch_attention(q, q, v, (3, 4, 6), (3, 4, 6), tiling) - sdpa(q, q, v)).abs().max() <= 1e-10
    noisy = q + 0.5 * torch.randn(q.shape, generator=g, dtype=F64)
    assert (monarch_attention(noisy, noisy, v, (3, 4, 6), (3, 4, 6)) - sdpa(noisy, noisy, v)).abs().max() > 1e-3


def ascends(module, seed=0, spread=2.0) -> bool:
    "Oracle 3: the sum climbs, the gap is the KL, each R is the best for the L before it, and after an L step the objective is a log-sum-exp over key rows."
    q, k = (x.view(1, 2, 4, 5, 1, 6) for x in qkv((2, 4, 5), H=1, spread=spread, seed=seed)[:2])
    S = torch.einsum("bnhd,bmhd->bhnm", q.flatten(1, 3), k.flatten(1, 3)) / math.sqrt(6)
    previous, before = -math.inf, None
    for iters in range(1, 9):
        L, R = module.monarch_factors(q, k, iters=iters)
        if before is not None:                                                                      # no nearby R does better
            other = (R.clamp(min=1e-300).log() + 1e-3 * torch.randn(R.shape, generator=rng(iters), dtype=F64)).softmax(-1)
            if module.objective(q, k, before, other).sum() > module.objective(q, k, before, R).sum(): return False
        before = L
        P, phi = module.monarch_matrix(L, R), module.objective(q, k, L, R)
        kl = (torch.special.xlogy(P, P) - P * S.log_softmax(-1)).sum(-1)
        if (S.logsumexp(-1) - phi - kl).abs().max() > 1e-9 or kl.min() < -1e-12: return False
        if phi.sum() < previous - 1e-9 * abs(previous) and iters > 1: return False
        previous = float(phi.sum())
        rows = torch.einsum("baijhd,bhafkjl,bfklhd->bhajifk", q / math.sqrt(6), R, k) - torch.special.xlogy(R, R).sum(-1).permute(0, 1, 2, 5, 3, 4)[:, :, :, :, None]
        if (rows.flatten(-2).logsumexp(-1).permute(0, 1, 2, 4, 3).flatten(2) - phi).abs().max() > 1e-9: return False
    return True


@pytest.mark.parametrize("seed, spread", [(0, 0.5), (1, 2.0), (2, 6.0)])
def test_3_objective_climbs_and_its_gap_is_kl(seed, spread):
    assert ascends(factor, seed, spread)


@pytest.mark.parametrize("tiling", TILINGS)
def test_4_matrix_is_an_attention_matrix(tiling):
    grid = (2, 4, 6)
    q, k, v = qkv(grid)
    tiles = [to_tiles(x, grid, tiling) for x in (q, k, v)]
    P = monarch_matrix(*monarch_factors(*tiles[:2]))
    assert P.min() >= 0 and (P.sum(-1) - 1).abs().max() <= 1e-12
    out = torch.einsum("bhnm,bmhd->bnhd", P, tiles[2].flatten(1, 3)).view(tiles[0].shape)
    assert (from_tiles(out, grid, tiling) - monarch_attention(q, k, v, grid, grid, tiling)).abs().max() <= 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_5_tiles_are_boxes_and_invert(f, h, w, a, b, c):
    grid, tiling = (f * a, h * b, w * c), Tiling(f, h, w)
    index = to_tiles(torch.arange(math.prod(grid))[None], grid, tiling)
    assert torch.equal(from_tiles(index, grid, tiling)[0], torch.arange(math.prod(grid)))
    b1, b2 = tiling.blocks(grid)
    for tile in index[0]:
        frames, rows, columns = (x.reshape(b1, b2) for x in np.unravel_index(tile.numpy(), grid))
        assert np.ptp(frames) == f - 1 and np.ptp(rows) == b - 1 and np.ptp(columns) == c - 1
        assert (columns == columns[:1]).all() and (np.diff(columns, axis=1) == 1).all() and (rows == rows[:, :1]).all() and (frames == frames[:, :1]).all()


def test_6_columns_and_key_tiles_may_be_renamed():
    q, k, v = (x.view(1, 3, 4, 5, 2, 6) for x in qkv((3, 4, 5)))
    attend_ = lambda q, k, v: monarch_attention(*(x.flatten(1, 3) for x in (q, k, v)), (3, 4, 5), (3, 4, 5)).view(q.shape)
    pi = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(attend_(*(x[:, :, :, pi] for x in (q, k, v))), attend_(q, k, v)[:, :, :, pi])
    assert torch.allclose(attend_(q, k[:, [2, 0, 1]], v[:, [2, 0, 1]]), attend_(q, k, v))
    assert not torch.allclose(attend_(q, k[:, :, [1, 0, 2, 3]], v[:, :, [1, 0, 2, 3]]), attend_(q, k, v))   # key rows may not: row k is spoken for by query row k


def test_7_a_constant_in_all_logits_changes_nothing():
    q, k, v = qkv((2, 4, 6))
    with_one = torch.cat([q, torch.ones_like(q[..., :1])], -1)
    outs = [monarch_attention(with_one, torch.cat([k, torch.full_like(k[..., :1], c)], -1), torch.cat([v, v[..., :1]], -1), (2, 4, 6), (2, 4, 6), scale=0.3) for c in (0.0, 5.0, -40.0)]
    assert all(torch.allclose(outs[0], x, atol=1e-10) for x in outs[1:])


def test_8_zero_queries_average():
    q, k, v = qkv((2, 4, 6))
    assert torch.allclose(monarch_attention(torch.zeros_like(q), k, v, (2, 4, 6), (2, 4, 6)), v.mean(1, keepdim=True).expand_as(v), atol=1e-12)


@pytest.mark.parametrize("causal", [None, 1])
def test_9_gradients(causal):
    small = [x.requires_grad_() for x in qkv((2, 2, 3), H=1, d=3)]
    assert torch.autograd.gradcheck(lambda q, k, v: monarch_attention(q, k, v, (2, 2, 3), (2, 2, 3), causal_chunk=causal), small)
    weight = torch.randn(1, 48, 2, 6, generator=rng(3), dtype=F64)
    tiling, grid, grads = Tiling(1, 2, 1), (2, 4, 6), []

    def stored(q, k, v):
        a, b = (to_tiles(x, grid, tiling) for x in (q, k))
        P = monarch_matrix(*monarch_factors(a, b))
        return from_tiles(torch.einsum("bhnm,bmhd->bnhd", P, to_tiles(v, grid, tiling).flatten(1, 3)).view(a.shape), grid, tiling)
    for f in (stored, lambda q, k, v: monarch_attention(q, k, v, grid, grid, tiling)):
        inputs = [x.requires_grad_() for x in qkv(grid)]
        (f(*inputs) * weight).sum().backward()
        grads.append([x.grad for x in inputs])
    assert all((a - b).abs().max() <= 1e-8 for a, b in zip(*grads))


def test_10_pieces_give_the_whole(monkeypatch):
    from neurips26_lit.kernels import monarch_attention as kernel
    q, k, v = (to_tiles(x, (4, 3, 5), Tiling()) for x in qkv((4, 3, 5)))
    whole = kernel.forward_reference(q, k, v, 0.4, 0)
    for at, ft in ((1, 1), (2, 3), (3, 2)):
        pieces = [(slice(a, min(a + at, 4)), slice(f, min(f + ft, 4)), None) for a in range(0, 4, at) for f in range(0, 4, ft)]
        monkeypatch.setattr(kernel, "reference_blocks", lambda *args: iter(pieces))
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(kernel.forward_reference(q, k, v, 0.4, 0), whole))
    monkeypatch.undo()
    for iters in (1, 3):
        assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(monarch_factors(q, k, iters=iters, q_chunk=3), monarch_factors(q, k, iters=iters)))


@pytest.mark.parametrize("chunk, tiling", [(1, Tiling()), (2, Tiling(2, 1, 1)), (2, Tiling(1, 2, 3)), (4, Tiling())])
def test_11_causal_is_a_loop_over_prefixes(chunk, tiling):
    grid = (4, 4, 6)
    q, k, v = qkv(grid, B=2)
    causal, cache = monarch_attention(q, k, v, grid, grid, tiling, causal_chunk=chunk), MonarchCache((chunk, 4, 6), tiling)
    for s in range(0, 4, chunk):
        now, seen = slice(s * 24, (s + chunk) * 24), slice(0, (s + chunk) * 24)
        want = monarch_attention(q[:, now], k[:, seen], v[:, seen], (chunk, 4, 6), (s + chunk, 4, 6), tiling)
        assert (causal[:, now] - want).abs().max() <= 1e-6 and (cache.attend(q[:, now], k[:, now], v[:, now]) - want).abs().max() <= 1e-6


def test_12_density():
    assert Tiling().density((21, 30, 52)) == 1 / 30 + 1 / 52
    L, R = monarch_factors(*(torch.zeros(1, 2, 4, 6, 1, 3) for _ in range(2)))
    assert (L.numel() + R.numel()) / 48**2 == pytest.approx(Tiling().density((2, 4, 6)))           # numbers in the factors over numbers in the matrix


@pytest.mark.parametrize("tiling", TILINGS)
def test_attention_token_by_token(tiling):
    q, k, v = qkv((2, 4, 6), (4, 4, 6), H=1, d=4)
    assert (monarch_attention(q, k, v, (2, 4, 6), (4, 4, 6), tiling) - by_index(q, k, v, (2, 4, 6), (4, 4, 6), tiling)).abs().max() <= 1e-10


def test_large_logits_stay_finite_for_many_turns():
    q, k = (x.view(1, 2, 4, 5, 1, 6) for x in qkv((2, 4, 5), H=1, spread=40.0)[:2])
    for iters in (1, 2, 10): assert all(x.isfinite().all() for x in monarch_factors(q, k, iters=iters))


# --- rivals ------------------------------------------------------------------------------------------------------------------
def test_topk_keeps_the_largest():
    q, k, v = qkv((2, 4, 6))
    S = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(6)
    kth = S.sort(-1, descending=True).values[..., 11:12]
    want = torch.einsum("bhnm,bmhd->bnhd", S.masked_fill(S < kth, -math.inf).softmax(-1), v)
    assert torch.allclose(rivals.oracle_topk(q, k, v, 0.25), want)


@pytest.mark.parametrize("density", [0.25, 0.5])
def test_block_rivals_keep_what_they_say(density):
    grid, n = (4, 4, 4), 64
    q, k = (x[:, :, :1] for x in qkv(grid, d=n)[:2])
    eye = torch.eye(n, dtype=F64)[None, :, None]
    kept = lambda f, *args, **kw: float((f(q, k, eye, *args, **kw) > 1e-300).double().mean())
    assert kept(rivals.oracle_topk, density) == density and kept(rivals.oracle_block_topk, 8, density) == density
    assert abs(kept(rivals.xattention, 8, density) - density) < 0.03
    assert all(kept(rivals.spatial_temporal, grid, name, density=density) == density for name in ("spatial", "temporal", "oracle"))
    P = sdpa(q, k, eye)[0, :, 0].unflatten(0, (8, 8)).unflatten(2, (8, 8)).sum((1, 3))
    mine = rivals.oracle_block_topk(q, k, eye, 8, density)[0, :, 0].unflatten(0, (8, 8)).unflatten(2, (8, 8)).sum((1, 3)) > 0
    assert all(set(row.nonzero().flatten().tolist()) == set(p.topk(int(8 * density)).indices.tolist()) for row, p in zip(mine, P))


def test_antidiagonals_by_hand():
    q, k = (x[:, :32, :1] for x in qkv((2, 4, 6), seed=7)[:2])
    z = q[0, :, 0] @ k[0, :, 0].T / math.sqrt(6)
    strides = torch.stack([torch.stack([sum(z[4 * n + i, 4 * m + 3 - i] for i in range(4)) / 4 for m in range(8)]) for n in range(8)]).softmax(-1)
    assert torch.allclose(rivals.antidiagonal_scores(q, k, 8, 4)[0, 0], strides.view(4, 2, 4, 2).sum((1, 3)) / 2)


def test_windows_and_the_better_pattern():
    grid, n = (4, 4, 4), 64
    q, k = (x[:, :, :1] for x in qkv(grid, d=n)[:2])
    eye = torch.eye(n, dtype=F64)[None, :, None]
    box = rivals.sliding_tile(q, k, eye, grid, (2, 2, 2), tile=(1, 2, 2))[0, :, 0] > 1e-300
    assert (box.sum(-1) == 8).all() and box[63].nonzero().flatten().tolist() == [f * 16 + r * 4 + c for f in (2, 3) for r in (2, 3) for c in (2, 3)]
    near = rivals.spatial_temporal(q, k, eye, grid, "spatial", density=0.5)[0, :, 0] > 1e-300
    assert near[:16].sum(-1).tolist() == [32] * 16 and near[63].nonzero().flatten().tolist() == list(range(32, 64))
    q, k, v = qkv(grid, H=4)
    wrong = [(rivals.spatial_temporal(q, k, v, grid, kind) - sdpa(q, k, v)).square().sum((1, 3)) for kind in ("spatial", "temporal", "oracle")]
    assert torch.allclose(wrong[2], torch.minimum(*wrong[:2])) and (wrong[0] != wrong[1]).all()


def test_planted_heads_have_what_was_planted():
    grid = (3, 4, 5)
    q, k, _ = rivals.planted_video_qkv(grid, positional=1.0, semantic=0.0, noise=0.0, generator=rng())
    S = (q[0, :, 0] @ k[0, :, 0].T).reshape(*grid, *grid)
    assert torch.allclose(S[0, 0, 0, 1, 2, 3], S[1, 1, 1, 2, 3, 4], atol=1e-4) and torch.allclose(S[0, 0, 0, 0, 0, 0], torch.tensor(24.0))
    assert S[0, 0, 0, 1, 2, 3].item() == pytest.approx(sum(math.cos(n * 100 ** -(m / 8)) for n in (1, 2, 3) for m in range(8)), abs=1e-4)
    q, k, v = rivals.planted_video_qkv((16, 16, 16), positional=0.0, semantic=0.0, noise=0.7, generator=rng())
    assert abs(float(q.std()) - 0.7) < 0.01 and abs(float((q * k).mean())) < 0.01 and abs(float(v.std()) - 1) < 0.01 and q.shape == v.shape == (1, 4096, 1, 64)


def test_memory_of_attention_is_linear_in_a_fresh_process():
    "Peak memory of a forward and backward pass over 24,576 tokens is a third of what one score matrix takes, 2.4 GB."
    code = """
import resource, torch
torch.set_num_threads(1)
from neurips26_lit.efficient_inference.monarch_rt.attend import monarch_attention
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
q, k, v = (torch.randn(1, 96 * 256, 1, 8, requires_grad=True) for _ in range(3))
monarch_attention(q, k, v, (96, 16, 16), (96, 16, 16)).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert float(ran.stdout) < 800, ran.stdout + ran.stderr


# --- the video model -----------------------------------------------------------------------------------------------------------
def dit(seed=0):
    torch.manual_seed(seed)
    model = video.ChunkDiT((4, 4, 4), dim=24, depth=2, heads=2, text_dim=None)
    for p in model.parameters():
        if p.abs().max() == 0: p.data.copy_(0.3 * torch.randn(p.shape, generator=rng(seed)))
    return model


@pytest.mark.parametrize("attn", [video.dense_attn(), video.monarch_attn(), video.monarch_attn(Tiling(1, 2, 1)), video.topk_attn(0.5)])
def test_cached_rollout_is_the_uncached(attn):
    model, noise = dit(), torch.randn(2, 3, 4, 16, 16, generator=rng(1))
    with torch.no_grad():
        x = noise[:, :, :0]
        for start in (0, 2):
            new = noise[:, :, start : start + 2]
            for i in range(3): new = new + model(torch.cat([x, new], 2), torch.cat([torch.ones(2, start), torch.full((2, 2), i / 3)], 1), chunk=2, attn=attn)[:, :, start:] / 3
            x = torch.cat([x, new], 2)
    assert torch.allclose(video.ar_rollout(model, noise, chunk=2, steps=3, attn=attn), x, atol=1e-4)


def test_given_chunks_are_kept_and_the_future_is_not_seen():
    model, noise, first = dit(), torch.randn(1, 3, 4, 16, 16, generator=rng(2)), torch.randn(1, 3, 2, 16, 16, generator=rng(3))
    out = video.ar_rollout(model, noise, first=first)
    assert torch.equal(out[:, :, :2], first)
    other = noise.clone(); other[:, :, 2:] += 1
    assert torch.equal(video.ar_rollout(model, noise)[:, :, :2], video.ar_rollout(model, other)[:, :, :2])


def test_loss_is_on_the_drawn_chunk_after_a_clean_past():
    seen = []
    def zero(x, t, chunk, attn): seen.append((x, t)); return torch.zeros_like(x)
    data, noise = torch.randn(2, 1, 6, 4, 4, generator=rng()), torch.randn(2, 1, 2, 4, 4, generator=rng(1))
    loss, (x, t) = video.chunk_loss(zero, data, noise, torch.tensor([0.0, 0.75]), 1, chunk=2), seen[0]
    assert torch.allclose(loss, (data[:, :, 2:4] - noise).square().mean()) and t.tolist() == [[1, 1, 0, 0], [1, 1, 0.75, 0.75]]
    assert torch.equal(x[:, :, :2], data[:, :, :2]) and torch.allclose(x[1, :, 2:], 0.25 * noise[1] + 0.75 * data[1, :, 2:4])


def test_finetuning_repeats_and_lowers_the_loss():
    clips, losses = surgical_clips(6, frames=4, size=16, generator=rng()), []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(video.finetune(video.ChunkDiT((4, 4, 4), dim=24, depth=1, heads=2, text_dim=None), clips, 40, attn=video.monarch_attn(), generator=rng(1)))
    assert losses[0] == losses[1] and np.mean(losses[0][-8:]) < 0.9 * np.mean(losses[0][:4])


# --- errors --------------------------------------------------------------------------------------------------------------------
Q, K, V = qkv((2, 4, 6))


@pytest.mark.parametrize("call, message", [
    (lambda: Tiling(1, 3, 1).blocks((4, 16, 16)), "h_reduce=3 doesn't divide height 16"), (lambda: Tiling(3, 1, 1).density((4, 16, 16)), "f_tied=3 doesn't divide frames 4"),
    (lambda: Tiling(1, 1, 5).tiles((4, 16, 16)), "w_reduce=5 doesn't divide width 16"), (lambda: Tiling(0, 1, 1), "f_tied"),
    (lambda: to_tiles(Q, (2, 4, 5), Tiling()), "48 tokens"), (lambda: from_tiles(torch.zeros(1, 2, 4, 5, 1, 1), (2, 4, 6), Tiling()), "tiles"),
    (lambda: monarch_factors(torch.zeros(1, 2, 4, 6, 1, 3), torch.zeros(1, 2, 4, 5, 1, 3)), "`k`"), (lambda: Tiling().flops((2, 4, 6), (2, 4, 5), 8), "grid_k"),
    (lambda: monarch_attention(Q, K, V, (2, 4, 5), (2, 4, 6)), "`q`"), (lambda: monarch_attention(Q, K, V[:, 1:], (2, 4, 6), (2, 4, 6)), "`v`"),
    (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), iters=0), "iters"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), iters=2, causal_chunk=1), "iters=2"),
    (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), Tiling(2, 1, 1), causal_chunk=1), "causal_chunk=1"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), causal_chunk=0), "causal_chunk=0"),
    (lambda: rivals.oracle_topk(Q, K, V, 1.5), "density"), (lambda: rivals.monarch_untiled(Q, K, V, 7), "block"), (lambda: rivals.sliding_tile(Q, K, V, (2, 4, 6), (2, 3, 6)), "window"),
    (lambda: rivals.spatial_temporal(Q, K, V, (2, 4, 6), "x"), "kind"), (lambda: rivals.xattention(Q, K, V, 7, 0.5), "block"),
    (lambda: video.ar_rollout(dit(), torch.zeros(1, 3, 3, 16, 16)), "chunk"), (lambda: dit()(torch.zeros(1, 3, 4, 16, 16), torch.zeros(1), chunk=2), "`t`")])
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError) as error: call()
    assert message in str(error.value)


TILES = [to_tiles(x, (2, 4, 6), Tiling()) for x in (Q, K, V)]
NOISE = torch.randn(1, 3, 4, 16, 16, generator=rng(9))
RIVALS = {
    "oracle_topk": lambda q, k, v: rivals.oracle_topk(q, k, v, 0.5), "oracle_block_topk": lambda q, k, v: rivals.oracle_block_topk(q, k, v, 8, 0.5),
    "xattention": lambda q, k, v: rivals.xattention(q, k, v, 8, 0.5), "sliding_tile": lambda q, k, v: rivals.sliding_tile(q, k, v, (2, 4, 6), (1, 2, 2)),
    "spatial_temporal": lambda q, k, v: rivals.spatial_temporal(q, k, v, (2, 4, 6), "oracle"), "monarch_untiled": lambda q, k, v: rivals.monarch_untiled(q, k, v, 8),
    "monarch_attention": lambda q, k, v: monarch_attention(q, k, v, (2, 4, 6), (2, 4, 6)), "two turns": lambda q, k, v: monarch_attention(q, k, v, (2, 4, 6), (2, 4, 6), iters=2)}
MISFITS = {
    "other heads": ("k", (Q, K[:, :, :1], V[:, :, :1])), "other head size": ("k", (Q, K[..., :3], V[..., :3])), "other batch": ("k", (Q, torch.cat([K, K]), torch.cat([V, V]))), "fewer values": ("v", (Q, K, V[:, 1:])),
    "type of k": ("k", (Q, K.float(), V.float())), "type of v": ("v", (Q, K, V.float())), "whole numbers": ("q", (Q.long(), K.long(), V.long())), "no batch": ("q", (Q[0], K[0], V[0])), "empty": ("q", (Q[:0], K[:0], V[:0]))}


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("misfit", MISFITS)
def test_tensors_that_do_not_fit_are_refused_by_name(method, misfit):
    name, inputs = MISFITS[misfit]
    with pytest.raises(ValueError, match=f"`{name}`"): RIVALS[method](*inputs)


def two_clips(cache):
    dit()(NOISE[:, :, :2], torch.ones(1, 2), chunk=2, cache=cache, keep=True)
    dit()(NOISE[:, :, :2].expand(2, -1, -1, -1, -1), torch.ones(2, 2), chunk=2, cache=cache)


def fewer_heads(cache):
    cache.attend(Q, K, V)
    cache.attend(Q[:, :, :1], K[:, :, :1], V[:, :, :1])


@pytest.mark.parametrize("call, message", [
    (lambda: Tiling(1.0), "f_tied"), (lambda: Tiling(1, None), "h_reduce"), (lambda: Tiling(1, 1, True), "w_reduce"), (lambda: Tiling().density((2, 0, 6)), "grid"), (lambda: Tiling().tiles((2, 4)), "grid"), (lambda: Tiling().tiles(7), "grid"),
    (lambda: Tiling().flops((2, 4, 6), (2, 4, 6), 0), "d:"), (lambda: to_tiles(torch.zeros(48), (2, 4, 6), Tiling()), "`x`"),
    (lambda: monarch_factors(TILES[0], TILES[1].float()), "`k`"), (lambda: monarch_factors(TILES[0][:, :0], TILES[1]), "`q`"), (lambda: monarch_factors(TILES[0], TILES[1][:, :0]), "`k`"), (lambda: monarch_factors(*TILES[:2], iters=1.5), "iters"),
    (lambda: monarch_factors(*TILES[:2], q_chunk=0), "q_chunk"), (lambda: monarch_factors(*TILES[:2], scale=math.nan), "scale"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), scale=math.inf), "scale"),
    (lambda: monarch_matrix(*(x[..., :1] for x in monarch_factors(*TILES[:2]))), "`L`"), (lambda: monarch_matrix(monarch_factors(*TILES[:2])[0], monarch_factors(*TILES[:2])[1][..., :1]), "`R`"),
    (lambda: factor.objective(TILES[0], TILES[1][:, :1], *monarch_factors(*TILES[:2])), "`k`"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), (1, 1, 1)), "tiling"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 24)), "grid_k"),
    (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), iters=True), "iters"), (lambda: monarch_attention(Q, K, V, (2, 4, 6), (2, 4, 6), causal_chunk=1.5), "causal_chunk"), (lambda: fewer_heads(MonarchCache((2, 4, 6))), "`k_new`"), (lambda: MonarchCache((2, 0, 1)), "grid"),
    (lambda: rivals.oracle_topk(Q, K, V, math.nan), "density"), (lambda: rivals.oracle_block_topk(Q, K, V, 0, 0.5), "block"), (lambda: rivals.monarch_untiled(Q, K, V, 0), "block"), (lambda: rivals.xattention(Q, K, V, 8, 0.5, stride=0), "stride"),
    (lambda: rivals.antidiagonal_scores(Q, K, 7, 5), "block"), (lambda: rivals.sliding_tile(Q, K, V, (2, 4, 6), (1, 2, 2), tile=(0, 1, 1)), "tile"), (lambda: rivals.sliding_tile(Q, K, V, (2, 4, 5), (1, 2, 2)), "grid"), (lambda: rivals.spatial_temporal(Q, K, V, (1, 4, 6), "spatial"), "grid"),
    (lambda: rivals.planted_video_qkv((2, 0, 2), positional=1, semantic=1, noise=0, generator=rng()), "grid"), (lambda: rivals.planted_video_qkv((2, 2, 2), positional=1, semantic=1, noise=-1, generator=rng()), "noise"), (lambda: rivals.planted_video_qkv((2, 2, 2), positional=1, semantic=1, noise=0, topics=0, generator=rng()), "topics"),
    (lambda: video.ar_rollout(dit(), NOISE, steps=0), "steps"), (lambda: video.ar_rollout(dit(), NOISE, chunk=0), "chunk"), (lambda: video.ar_rollout(dit(), NOISE[:, :, :2], first=NOISE), "`first`"), (lambda: video.ar_rollout(dit(), NOISE, first=NOISE[:, :, :2].expand(2, -1, -1, -1, -1)), "`first`"),
    (lambda: dit()(NOISE, torch.ones(1, 4), chunk=2, keep=True), "keep"), (lambda: two_clips(video.ChunkCache()), "cache"), (lambda: video.chunk_loss(dit(), NOISE, NOISE[:, :, :2], torch.ones(1), 2, chunk=2), "which"), (lambda: video.chunk_loss(dit(), NOISE, NOISE, torch.ones(1), 0, chunk=2), "`noise`"),
    (lambda: video.chunk_loss(dit(), NOISE, NOISE[:, :, :2], torch.ones(2), 0, chunk=2), "`t`"), (lambda: video.train_chunks(dit(), surgical_clips(2, frames=4, size=16, generator=rng()), 1, batch=0, generator=rng()), "batch"), (lambda: video.rollout_drift(NOISE, NOISE[:, :, :2], chunk=2), "`x`"), (lambda: video.rollout_drift(NOISE, NOISE, chunk=3), "chunk")])
def test_more_errors_name_the_argument(call, message):
    with pytest.raises(ValueError) as error: call()
    assert message in str(error.value) and len(str(error.value)) < 220


def test_a_single_token_returns_its_value():
    q, k, v = (x[:, :1] for x in (Q, K, V))
    assert torch.allclose(monarch_attention(q, k, v, (1, 1, 1), (1, 1, 1)), v) and torch.allclose(rivals.oracle_topk(q, k, v, 0.1), v)


def test_a_nan_stays_in_its_tile_and_column():
    q = Q.clone()
    q[0, 5] = math.nan                                                                                  # frame 0, row 0, column 5
    bad = monarch_attention(q, K, V, (2, 4, 6), (2, 4, 6)).isnan().flatten(2).any(-1)[0].nonzero().flatten()
    assert bad.tolist() == [5, 11, 17, 23]                                                                # it speaks for key row 0 of every query of its column


@pytest.mark.parametrize("method", RIVALS)
def test_strides_change_nothing(method):
    strided = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (Q, K, V)]
    assert not strided[0].is_contiguous() and torch.allclose(RIVALS[method](*strided), RIVALS[method](Q, K, V), atol=1e-12)


@pytest.mark.parametrize("method, dtype, allowed", [*((name, torch.float32, 1e-5) for name in RIVALS),                # in low precision a choice of keys flips with rounding
                                                   *((name, *x) for name in ("monarch_attention", "two turns", "monarch_untiled") for x in ((torch.float16, 5e-3), (torch.bfloat16, 4e-2)))])
def test_other_types(method, dtype, allowed):
    inputs = [x.to(dtype) for x in (Q, K, V)]
    out = RIVALS[method](*inputs)
    assert out.dtype == dtype and (out.double() - RIVALS[method](*(x.double() for x in inputs))).abs().max() <= allowed * (1 + V.abs().max())


def test_gradient_of_topk_is_that_of_attention_over_the_kept_keys():
    "Fine-tuning through the rival must be fine-tuning of the rival."
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    weight = torch.randn(Q.shape, generator=rng(4), dtype=F64)
    (rivals.oracle_topk(q, k, v, 0.25) * weight).sum().backward()
    a, b, c = (x.clone().requires_grad_() for x in (Q, K, V))
    S = torch.einsum("bnhd,bmhd->bhnm", a, b) / math.sqrt(6)
    kept = S >= S.detach().sort(-1, descending=True).values[..., 11:12]
    (torch.einsum("bhnm,bmhd->bnhd", S.masked_fill(~kept, -math.inf).softmax(-1), c) * weight).sum().backward()
    assert all((x.grad - y.grad).abs().max() <= 1e-10 for x, y in zip((q, k, v), (a, b, c)))


def test_claims_of_the_sheet_are_stated():
    p = paper("monarch_rt")
    assert {c.id for c in p.claims} >= {"exact_limits", "separable_exact", "ascent", "beats_topk", "alignment", "tiling", "no_quality_loss", "density", "few_step", "regime", "kernel", "realtime"}
    assert p.status in ("draft", "built") and p.kernels == ["monarch_attention"] and all(c.check["smoke"] for c in p.claims if c.kind == "exact")


# --- mutations -----------------------------------------------------------------------------------------------------------------
COPIES = itertools.count()


def copy_of(module, edits, tmp_path):
    "A module with text replaced."
    text = Path(module.__file__).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    file = tmp_path / "mutant.py"
    file.write_text(text)
    name = f"{module.__package__}.mutant_{next(COPIES)}"                                                # inside the package, for its relative imports
    spec = importlib.util.spec_from_file_location(name, file)
    changed = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def factors_are_right(module) -> bool:
    "Oracles 2, 3 and the token-by-token version, through a factor module."
    if not ascends(module): return False
    grid, tiling = (2, 4, 6), module.Tiling(1, 2, 1)
    q, k, v = qkv(grid, H=1, d=4)
    try: tiles = [module.to_tiles(x, grid, tiling) for x in (q, k, v)]
    except Exception: return False
    out = torch.einsum("bhnm,bmhd->bnhd", module.monarch_matrix(*module.monarch_factors(*tiles[:2])), tiles[2].flatten(1, 3)).view(tiles[0].shape)
    return bool((module.from_tiles(out, grid, tiling) - by_index(q, k, v, grid, grid, tiling)).abs().max() <= 1e-10)


MUTATIONS = {
    "softmax of L per key tile": ('.flatten(-2).softmax(-1).unflatten(-1, (k.shape[1], k.shape[2]))', ".softmax(-1) / k.shape[1]"),
    "sign of the entropy": ("pooled_k) + entropy)", "pooled_k) - entropy)"),
    "mean query not divided": ("""L, q) / rearrange(L.sum(4), "b h a j f k -> b h a f k j 1").clamp(min=1e-30)""", "L, q)"),
    "scale forgotten": ("    q = q * _scale(q, scale)\n", ""),
    "start from a neighbour's row": ('mean_q = rearrange(q, "b a k j h d', 'mean_q = rearrange(q.roll(1, 2), "b a k j h d'),
    "rows and frames of a tile swapped": ('b (a c e) (f i) j ...', 'b (a c e) (i f) j ...'),
    "entropy missing from the objective": ('entropy(R, -1), "b h', '0 * entropy(R, -1), "b h'),
}


def test_unchanged_copy_passes(tmp_path):
    assert factors_are_right(copy_of(factor, [], tmp_path))


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutation_is_noticed(what, tmp_path):
    mutant = copy_of(factor, [MUTATIONS[what]], tmp_path)
    if "swapped" in what:                                                                             # shows only where a tile holds several frames
        grid, tiling = (2, 4, 6), mutant.Tiling(2, 1, 1)
        q, k, v = qkv(grid, H=1, d=4)
        a, b, c = (mutant.to_tiles(x, grid, tiling) for x in (q, k, v))
        out = mutant.from_tiles(torch.einsum("bhnm,bmhd->bnhd", mutant.monarch_matrix(*mutant.monarch_factors(a, b)), c.flatten(1, 3)).view(a.shape), grid, tiling)
        box = mutant.to_tiles(torch.arange(48)[None], grid, tiling)[0, 0]
        assert not torch.equal(box, to_tiles(torch.arange(48)[None], grid, Tiling(2, 1, 1))[0, 0]) and torch.allclose(out, by_index(q, k, v, grid, grid, Tiling(2, 1, 1)))
    else: assert not factors_are_right(mutant)


ATTEND = {
    "cache keeps what it should only look at": ("if keep: self.k, self.v", "self.k, self.v"),
    "cache forgets the past": ("torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)", "k, v"),
    "a chunk of tiles too many": ("return chunk // tiling.f_tied * tiling.h_reduce * tiling.w_reduce", "return 2 * (chunk // tiling.f_tied) * tiling.h_reduce * tiling.w_reduce"),
}


def cache_is_right(module) -> bool:
    grid = (4, 4, 6)
    q, k, v = qkv(grid)
    causal, cache = module.monarch_attention(q, k, v, grid, grid, Tiling(), causal_chunk=1), module.MonarchCache((1, 4, 6))
    for s in range(4):
        now, seen = slice(s * 24, (s + 1) * 24), slice(0, (s + 1) * 24)
        want = monarch_attention(q[:, now], k[:, seen], v[:, seen], (1, 4, 6), (s + 1, 4, 6))
        cache.attend(q[:, now], k[:, now] + 1, v[:, now] - 1, keep=False)
        if (causal[:, now] - want).abs().max() > 1e-6 or (cache.attend(q[:, now], k[:, now], v[:, now]) - want).abs().max() > 1e-6: return False
    return True


def test_unchanged_attend_passes(tmp_path):
    assert cache_is_right(copy_of(attend, [], tmp_path))


@pytest.mark.parametrize("what", ATTEND)
def test_attend_mutation_is_noticed(what, tmp_path):
    assert not cache_is_right(copy_of(attend, [ATTEND[what]], tmp_path))
