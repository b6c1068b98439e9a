"""CompactAttention: the sheet's twelve oracles, each by a route that shares no code with what it tests, and mutants that must be caught."""
import inspect
import itertools
import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from neurips26_lit.efficient_inference.attention import block_mass, gqa_attention
from neurips26_lit.efficient_inference.compact_attention import attend, policies, select, tables
from neurips26_lit.efficient_inference.paged_kv import PagedKV
from neurips26_lit.efficient_inference.prefill import Dense, chunked_prefill


def tensors(seed, B=2, Hq=6, Hkv=2, Tq=24, Tk=88, D=16, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    make = lambda h, t: (scale * torch.randn(B, h, t, D, generator=g)).to(dtype)
    return make(Hq, Tq), make(Hkv, Tk), make(Hkv, Tk)


def random_mask(seed, B, Hq, nq, nk, p=0.2, q_block=0):
    "Causal block mask."
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(B, Hq, nq, nk, generator=g) < p) & torch.ones(nq, nk, dtype=torch.bool).tril(q_block)


def visible_tokens(blocks, block, q_start, Tq, Tk):
    "Bool [Tq, Tk] from a list of blocks, token by token."
    seen = torch.zeros(Tq, Tk, dtype=torch.bool)
    for r, j in itertools.product(range(Tq), range(Tk)): seen[r, j] = j // block in blocks and j <= q_start + r
    return seen


def peer_attention(q, k, v, visible):
    "torch's own attention in float64; visible [B, Hq, Tq, Tk]."
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible, enable_gqa=True)


def expanded(mask, group, block, q_start, Tq, Tk, forced=()):
    "Token visibility [B, Hq, Tq, Tk] of the union, by sets."
    B, H, nq, _ = mask.shape
    out = torch.zeros(B, H, Tq, Tk, dtype=torch.bool)
    for b, r in itertools.product(range(B), range(H // group)):
        blocks = {j for h in range(r * group, r * group + group) for i in range(nq) for j in range(mask.shape[3]) if mask[b, h, i, j]} | set(forced)
        out[b, r * group:r * group + group] = visible_tokens(blocks, block, q_start, Tq, Tk)
    return out


# ---- 1-3, 12: attention over tables ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("Tq, Tk", [(24, 88), (17, 81), (1, 65)])
def test_1_full_mask_is_dense(dtype, tol, Tq, Tk):
    q, k, v = tensors(0, Tq=Tq, Tk=Tk, dtype=dtype)
    start, nk = Tk - Tq, -(-Tk // 8)
    full = tables.union_tables(torch.ones(2, 6, 1, nk, dtype=torch.bool), 3)
    out = attend.paged_prefill(q, PagedKV.from_dense(k, v, 8, generator=torch.Generator().manual_seed(1)), full, q_start=start)
    causal = torch.ones(Tq, Tk, dtype=torch.bool).tril(start)
    assert (out.double() - peer_attention(q, k, v, causal)).abs().max() <= tol and out.dtype == dtype


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 2), (7, 1), (8, 1)]), st.integers(1, 4), st.integers(0, 6), st.sampled_from([4, 16]), st.floats(0, 0.6))
def test_2_any_mask_is_dense_over_the_union(seed, heads, nq, past, block, p):
    (Hq, Hkv), Tq = heads, nq * block - seed % block
    Tk, start = past * block + Tq, past * block
    q, k, v = tensors(seed, 1, Hq, Hkv, Tq, Tk, 8)
    mask = random_mask(seed, 1, Hq, nq, past + nq, p, past)
    t = tables.union_tables(mask, Hq // Hkv, current=nq)
    cache = PagedKV.from_dense(k, v, block, generator=torch.Generator().manual_seed(seed))
    out = attend.paged_prefill(q, cache, t, q_start=start)
    seen = expanded(mask, Hq // Hkv, block, start, Tq, Tk, forced=range(past, past + nq))
    assert (out.double() - peer_attention(q, k, v, seen)).abs().max() <= 1e-5
    assert (out - attend.naive_paged_prefill(q, cache, t, start)).abs().max() <= 1e-5


def test_3_order_of_pages_and_of_entries_is_free():
    q, k, v = tensors(3)
    t = tables.union_tables(random_mask(3, 2, 6, 3, 11, 0.3, 8), 3, current=3)
    outs = [attend.paged_prefill(q, PagedKV.from_dense(k, v, 8, generator=torch.Generator().manual_seed(s)), t, q_start=64) for s in range(3)]
    g, ids = torch.Generator().manual_seed(0), t.ids.clone()
    for b, r in itertools.product(range(2), range(2)):
        n = int(t.counts[b, r])
        ids[b, r, :n] = ids[b, r, :n][torch.randperm(n, generator=g)]
    assert not torch.equal(ids, t.ids)
    outs.append(attend.paged_prefill(q, PagedKV.from_dense(k, v, 8), tables.BlockTables(ids, t.counts, t.n_blocks, t.group), q_start=64))
    assert all((o - outs[0]).abs().max() <= 1e-6 for o in outs)


def test_12_every_row_sees_itself():
    q, k, v = tensors(12)
    t = tables.union_tables(torch.zeros(2, 6, 3, 11, dtype=torch.bool), 3, current=3)
    out = attend.paged_prefill(q, PagedKV.from_dense(k, v, 8), t, q_start=64)
    own = torch.zeros(24, 88, dtype=torch.bool)
    for r in range(24): own[r, 64:64 + r + 1] = True
    assert torch.isfinite(out).all() and (out.double() - peer_attention(q, k, v, own)).abs().max() <= 1e-5


def test_unselected_pages_are_not_touched():
    q, k, v = tensors(4)
    t = tables.union_tables(random_mask(4, 2, 6, 3, 11, 0.1, 8), 3, current=3)
    cache = PagedKV.from_dense(k, v, 8, generator=torch.Generator().manual_seed(4))
    clean = attend.paged_prefill(q, cache, t, q_start=64)
    named = {int(cache.block_table[b, r, j]) for b in range(2) for r in range(2) for j in t.ids[b, r, :t.counts[b, r]].tolist()}
    poison = [p for p in range(len(cache.k_pages)) if p not in named]
    cache.k_pages[poison], cache.v_pages[poison] = float("nan"), float("nan")
    assert len(poison) > 10 and torch.equal(attend.paged_prefill(q, cache, t, q_start=64), clean)
    cache.k_pages[next(iter(named))] = float("nan")                       # the test can see a page that is read
    assert not torch.isfinite(attend.paged_prefill(q, cache, t, q_start=64)).all()
    assert cache.bytes_copied == 0 and cache.bytes_read == 3 * 2 * 4 * 8 * 16 * int(t.counts.sum())


def test_scale_reaches_the_kernel():
    q, k, v = tensors(5)
    t = tables.union_tables(torch.ones(2, 6, 3, 11, dtype=torch.bool), 3)
    out = attend.paged_prefill(q, PagedKV.from_dense(k, v, 8), t, q_start=64, scale=0.9)
    ref = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(24, 88, dtype=torch.bool).tril(64), scale=0.9, enable_gqa=True)
    assert (out - ref).abs().max() <= 1e-5


# ---- 4-8: tables -----------------------------------------------------------------------------------------------------
def check_union(tables):
    "Unions by sets of Python integers, for forced blocks and subgroups."
    for seed in range(30):
        rng = np.random.default_rng(seed)
        group, kv, nq, nk = int(rng.choice([1, 2, 3, 4, 6])), int(rng.integers(1, 3)), int(rng.integers(1, 5)), int(rng.integers(4, 14))
        mask = torch.from_numpy(rng.random((2, group * kv, nq, nk)) < rng.uniform(0, 0.4))
        sub, current, recent = int(rng.choice([s for s in range(1, group + 1) if group % s == 0])), int(rng.integers(0, 3)), int(rng.integers(0, 3))
        t = tables.union_tables(mask, group, subgroup=sub, keep_recent=recent, current=current)
        for b, r in itertools.product(range(2), range(group * kv // sub)):
            want = {j for h in range(r * sub, r * sub + sub) for i in range(nq) for j in np.flatnonzero(mask[b, h, i])} | set(range(max(0, nk - current - recent), nk))
            n = int(t.counts[b, r])
            assert t.ids[b, r, :n].tolist() == sorted(want) and (t.ids[b, r, n:] == -1).all()
            assert t.to_mask()[b, r].nonzero().flatten().tolist() == sorted(want)
        assert t.n_blocks == nk and t.group == sub and t.ids.dtype == t.counts.dtype == torch.int32
        assert t.density() == pytest.approx(t.counts.double().mean().item() / nk)


def test_4_unions_commute():
    for seed in range(20):
        mask = random_mask(seed, 2, 6, 4, 15, 0.15)
        heads_first = mask.unflatten(1, (2, 3)).any(2).any(2)
        assert torch.equal(tables.union_tables(mask, 3).to_mask(), heads_first)
        shuffled = mask[:, :, torch.randperm(4)].unflatten(1, (2, 3))[:, :, torch.randperm(3)].flatten(1, 2)
        assert torch.equal(tables.union_tables(shuffled, 3).ids, tables.union_tables(mask, 3).ids)


def test_4_union_equals_loops(): check_union(tables)


def test_5_smallest_preserving():
    excess = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        mask = torch.from_numpy(rng.random((1, 6, rng.integers(1, 4), rng.integers(1, 11))) < rng.uniform(0, 0.5))
        group = int(rng.choice([1, 2, 3]))
        excess.append((tables.union_tables(mask, group).counts - tables.smallest_preserving(mask, group)).abs().max().item())
    assert max(excess) == 0 and len(excess) >= 200
    with pytest.raises(ValueError, match="at most 16"): tables.smallest_preserving(torch.ones(1, 1, 1, 17, dtype=torch.bool), 1)


def test_5_a_table_without_a_needed_block_is_not_preserving():
    mask = random_mask(1, 1, 4, 3, 9, 0.2)
    smaller = mask.clone()
    h, i, j = mask[0].nonzero()[0].tolist()
    smaller[0, :, :, j] = False
    assert tables.smallest_preserving(smaller, 4).item() == tables.smallest_preserving(mask, 4).item() - 1


def test_6_idempotent_and_monotone():
    for seed in range(30):
        mask = random_mask(seed, 2, 6, 4, 15, 0.15)
        more = mask | random_mask(seed + 100, 2, 6, 4, 15, 0.1)
        t = tables.union_tables(mask, 3)
        again = t.to_mask().repeat_interleave(3, 1)[:, :, None]
        assert torch.equal(tables.union_tables(again, 3).ids, t.ids)
        assert not (t.to_mask() & ~tables.union_tables(more, 3).to_mask()).any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.5), st.sampled_from([0.5, 1.0, 4.0]))
def test_7_mass_and_bound(seed, p, scale):
    q, k, v = tensors(seed, dtype=torch.float64, scale=scale)
    mask = random_mask(seed, 2, 6, 3, 11, p, 8) | (torch.arange(11) == 8 + torch.arange(3)[:, None])
    t = tables.union_tables(mask, 3)
    causal = torch.ones(24, 88, dtype=torch.bool).tril(64)
    weights = torch.softmax((q.double() @ k.repeat_interleave(3, 1).double().transpose(-1, -2) / 4).masked_fill(~causal, -math.inf), -1)
    by_mask = mask.repeat_interleave(8, 2).repeat_interleave(8, 3)
    by_union = t.to_mask().repeat_interleave(3, 1)[:, :, None].repeat_interleave(8, 3)
    lost_mask, lost_union = 1 - (weights * by_mask).sum(-1), 1 - (weights * by_union).sum(-1)
    assert (lost_union <= lost_mask + 1e-9).all()
    assert torch.allclose(attend.dense_mass(q, k, by_union, q_start=64).double(), 1 - lost_union, atol=1e-9)
    dense, out = weights @ v.repeat_interleave(3, 1).double(), attend.paged_prefill(q, PagedKV.from_dense(k, v, 8), t, q_start=64).double()
    slack = 2 * lost_union * v.norm(dim=-1).amax(-1).repeat_interleave(3, 1)[..., None] - (dense - out).norm(dim=-1)
    assert slack.min() >= -1e-6


def test_8_one_head_one_block_is_block_sparse():
    q, k, v = tensors(8, Hq=2, Hkv=2, Tq=8, Tk=72)
    mask = random_mask(8, 2, 2, 1, 9, 0.3, 8)
    mask[..., 8] = True
    t = tables.union_tables(mask, 1)
    assert torch.equal(t.to_mask(), mask[:, :, 0])
    a = attend.paged_prefill(q, PagedKV.from_dense(k, v, 8), t, q_start=64)
    assert (a - attend.block_sparse_prefill(q, k, v, mask, 8, q_start=64)).abs().max() <= 1e-6


@pytest.mark.parametrize("Tq, Tk", [(24, 88), (19, 83)])
def test_block_sparse_equals_torch_under_the_expanded_mask(Tq, Tk):
    q, k, v = tensors(9, Tq=Tq, Tk=Tk)
    mask = random_mask(9, 2, 6, 3, 11, 0.3, 8) | (torch.arange(11) == 8 + torch.arange(3)[:, None])
    seen = torch.zeros(2, 6, Tq, Tk, dtype=torch.bool)
    for b, h, i in itertools.product(range(2), range(6), range(3)):
        blocks = set(mask[b, h, i].nonzero().flatten().tolist())
        seen[b, h, i * 8:i * 8 + 8] = visible_tokens(blocks, 8, 64, Tq, Tk)[i * 8:i * 8 + 8]
    out = attend.block_sparse_prefill(q, k, v, mask, 8, q_start=64)
    assert (out.double() - peer_attention(q, k, v, seen)).abs().max() <= 1e-5


def check_schedule(tables):
    "Known schedules, and bounds that any longest-first schedule obeys."
    assert tables.schedule_efficiency(torch.tensor([3, 3, 2, 2, 2]), 2, overhead=0) == 12 / 14      # longest first: 3+2+2 and 3+2
    assert tables.schedule_efficiency(torch.tensor([1, 1, 4]), 2, overhead=0) == 6 / 8              # shortest first would need 5
    assert tables.schedule_efficiency(torch.tensor([10, 10]), 2) == 20 / 28
    for seed in range(50):
        w = torch.from_numpy(np.random.default_rng(seed).integers(1, 30, 40))
        e = tables.schedule_efficiency(w, 7)
        makespan = w.sum().item() / (7 * e)
        assert max((w + 4).max().item(), (w + 4).sum().item() / 7) - 1e-9 <= makespan <= (w + 4).sum().item() / 7 + (w + 4).max().item()


def test_schedule(): check_schedule(tables)


# ---- 9: selectors ----------------------------------------------------------------------------------------------------
def check_scores(select):
    "Exact limits, normalisation, causality; partial tail blocks included."
    for seed, (Tq, Tk) in enumerate([(48, 176), (37, 165)]):
        q, k, _ = tensors(seed, Tq=Tq, Tk=Tk)
        nq, nk = -(-Tq // 16), -(-Tk // 16)
        rows = torch.tensor([min(16, Tq - 16 * i) for i in range(nq)])[:, None]
        assert torch.allclose(select.xattention_scores(q, k, 16, stride=1, q_start=128) / rows, block_mass(q, k, 16, q_start=128), atol=1e-6)
        assert torch.allclose(select.flashprefill_scores(q, k, 1, q_start=128), block_mass(q, k, 1, q_start=128), atol=1e-6)
        future = torch.arange(nk) > 8 + torch.arange(nq)[:, None]
        sums = {"flashprefill": (select.flashprefill_scores(q, k, 16, q_start=128), torch.ones(nq)), "pooled": (select.pooled_scores(q, k, 16, q_start=128), torch.ones(nq)),
                "xattention": (select.xattention_scores(q, k, 16, stride=4, q_start=128), torch.tensor([-(-min(16, Tq - 16 * i) // 4) for i in range(nq)]).float()),
                "gate": (select.AttnGate(16, 6, 2, 16)(q, k, q_start=128).detach(), torch.ones(nq))}
        for name, (s, total) in sums.items():
            assert s.shape == (2, 6, nq, nk) and (s >= 0).all(), name
            assert torch.allclose(s.sum(-1), total.expand(2, 6, nq), atol=1e-5) and s[..., future].abs().max() == 0, name


def check_antidiagonals(select):
    "With one strip per block the logit is the mean over antidiagonal pairs, written out."
    q, k, _ = tensors(3, 1, 2, 1, 8, 24, 4)
    s = select.xattention_scores(q, k, 4, stride=4, q_start=16)[0, 1]
    for i in range(2):
        logits = [sum(float(q[0, 1, 4 * i + 3 - t] @ k[0, 0, 4 * j + t]) for t in range(4)) / (4 * 2.0) for j in range(4 + i + 1)]
        want = torch.softmax(torch.tensor(logits), 0)
        assert torch.allclose(s[i, : 4 + i + 1], want, atol=1e-6)


def check_flashprefill(select):
    "The sum over rows of exponentials, in numpy."
    q, k, _ = tensors(4, 1, 4, 2, 20, 84, 8)
    s = select.flashprefill_scores(q, k, 16, q_start=64)
    for h, i in itertools.product(range(4), range(2)):
        qs, ks = q[0, h, 16 * i:16 * i + 16].double().numpy(), k[0, h // 2].double().numpy()
        raw = np.array([np.exp(qs @ ks[16 * j:16 * j + 16].mean(0) / math.sqrt(8)).sum() if j <= 4 + i else 0.0 for j in range(6)])
        assert np.allclose(s[0, h, i], raw / raw.sum(), atol=1e-6)


def check_vertical_slash(select):
    "Columns and distances counted with a dictionary, rasterised row by row."
    q, k, _ = tensors(6, 1, 2, 1, 40, 104, 8, scale=2.0)
    got = select.vertical_slash_mask(q, k, 8, n_vertical=2, n_slash=3, last=16, q_start=64)[0]
    causal = torch.ones(40, 104, dtype=torch.bool).tril(64)
    for h in range(2):
        w = torch.softmax((q[0, h] @ k[0, 0].T / 8**0.5).masked_fill(~causal, -math.inf), -1)[24:].double()
        columns = sorted(range(104), key=lambda j: -w[:, j].sum())[:2]
        slash = {}
        for r, j in itertools.product(range(16), range(104)): slash[64 + 24 + r - j] = slash.get(64 + 24 + r - j, 0.0) + float(w[r, j])
        offsets = sorted(slash, key=lambda o: -slash[o])[:3]
        want = torch.zeros(5, 13, dtype=torch.bool)
        for r in range(40):
            want[r // 8, (64 + r) // 8] = True
            for j in (64 + r - o for o in offsets):
                if j >= 0: want[r // 8, j // 8] = True
        for i, j in itertools.product(range(5), columns):
            if j // 8 <= 8 + i: want[i, j // 8] = True
        assert torch.equal(got[h], want)


def check_keep(select):
    "Thresholds, by sorting plain lists."
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(1, 3, 4, 12, generator=g) ** 4 * torch.ones(4, 12).tril(8)
    masks = {"mass": select.keep_by_mass(scores, 0.8, q_block=8), "ratio": select.keep_by_ratio(scores, 0.3, sink=2, window=3, q_block=8),
             "top": select.keep_topk(scores, 3, q_block=8), "above": select.keep_above(scores, 0.2, q_block=8)}
    for h, i in itertools.product(range(3), range(4)):
        s, own = scores[0, h, i].tolist(), 8 + i
        order = sorted(range(12), key=lambda j: -s[j])
        n = next(n for n in range(13) if sum(s[j] for j in order[:n]) >= 0.8 * sum(s) - 1e-9)
        want = {"mass": {*order[:n], own}, "ratio": {j for j in range(own + 1) if s[j] >= 0.3 * max(s)} | {0, 1, own, own - 1, own - 2},
                "top": {*order[:3], own}, "above": {j for j in range(12) if s[j] > 0.2} | {own}}
        for name in masks: assert set(masks[name][0, h, i].nonzero().flatten().tolist()) == {j for j in want[name] if j <= own}, name


@pytest.mark.parametrize("check", [check_scores, check_antidiagonals, check_flashprefill, check_vertical_slash, check_keep])
def test_9_selectors(check): check(select)


def test_gate_learns_what_it_is_shown():
    torch.manual_seed(0)
    q, k, _ = tensors(2, 1, 4, 2, 32, 96, 16, scale=1.5)
    gate = select.AttnGate(16, 4, 2, 16, hidden=32)
    losses = select.distil_gate(gate, [(q, k, 64)], 150, lr=1e-2)
    assert losses[-1] < 0.3 * losses[0]
    w = torch.softmax((q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4).masked_fill(~torch.ones(32, 96, dtype=torch.bool).tril(64), -math.inf), -1)
    target = torch.stack([torch.stack([w[..., 16 * i:16 * i + 16, 16 * j:16 * j + 16].amax((-2, -1)) for j in range(6)], -1) for i in range(2)], -2)
    assert torch.allclose(select.block_max_target(q, k, 16, q_start=64), target / target.sum(-1, keepdim=True), atol=1e-6)
    with pytest.raises(ValueError, match="`batches`"): select.distil_gate(gate, [], 3)


# ---- 10: QUOKA -------------------------------------------------------------------------------------------------------
def check_quoka(attend):
    "Dense limit, equivariance, and the definition written with numpy."
    q, k, v = tensors(10, 1)
    causal = torch.ones(24, 88, dtype=torch.bool).tril(64)
    out = attend.quoka_prefill(q, k, v, query_ratio=1.0, kv_ratio=1.0, q_start=64)
    assert (out.double() - peer_attention(q, k, v, causal)).abs().max() <= 1e-5
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    kept = attend.quoka_select(q, k, query_ratio=0.25, kv_ratio=0.25, q_start=64)
    moved = attend.quoka_select(q, torch.cat([k[:, :, order], k[:, :, 64:]], 2), query_ratio=0.25, kv_ratio=0.25, q_start=64)
    assert kept.shape == (1, 2, 16) and torch.equal(order[moved].sort(-1).values, kept)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    for g in range(2):
        voters = []
        for h in range(3 * g, 3 * g + 3):
            x = q[0, h].double().numpy()
            odd = np.argsort(unit(x) @ unit(x.mean(0)))[:6]
            voters.append(unit(x[odd]))
        score = (unit(np.mean(voters, 0)) @ unit(k[0, g, :64].double().numpy()).T).max(0)
        assert kept[0, g].tolist() == sorted(np.argsort(-score)[:16].tolist())
    seen = torch.zeros(1, 6, 24, 88, dtype=torch.bool)
    for h in range(6): seen[0, h, :, kept[0, h // 3]] = True
    seen[..., 64:] = causal[:, 64:]
    out = attend.quoka_prefill(q, k, v, query_ratio=0.25, kv_ratio=0.25, q_start=64)
    assert (out.double() - peer_attention(q, k, v, seen)).abs().max() <= 1e-5


def test_10_quoka(): check_quoka(attend)


# ---- 11: policies on a model -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids(): return torch.randint(97, (2, 120), generator=torch.Generator().manual_seed(1))


def all_blocks(layer, q, k, *, q_start): return select.causal_blocks(-(-q.shape[2] // 8), -(-k.shape[2] // 8), q_start // 8).expand(q.shape[0], q.shape[1], -1, -1)


@pytest.mark.parametrize("chunk", [8, 32, 40, 120, 37])
def test_11_chunk_size_never_changes_dense(model, ids, chunk):
    with torch.no_grad(): plain = model(ids).logits[:, -1]
    assert (chunked_prefill(model, ids, chunk, Dense()).logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("make", [
    lambda: policies.CompactAttention(all_blocks, 8, n_tokens=120), lambda: policies.CompactAttention(all_blocks, 8, subgroup=1, dense_tail=0),
    lambda: policies.BlockSparse(all_blocks, 8, n_tokens=120), lambda: policies.Quoka(1.0, 1.0, 8, n_tokens=120), lambda: policies.CompactAttention(policies.oracle(8, 1.0), 8)])
@pytest.mark.parametrize("length", [120, 115])
def test_reading_everything_is_dense(model, ids, make, length):
    dense = chunked_prefill(model, ids[:, :length], 32, Dense())
    state = chunked_prefill(model, ids[:, :length], 32, make())
    assert (state.logits - dense.logits).abs().max() <= 1e-4 and policies.mean_density(state.stats) == pytest.approx(1.0, abs=2e-3)


def test_density_counts_dense_parts():
    nothing = lambda layer, q, k, *, q_start: torch.zeros(q.shape[0], q.shape[1], -(-q.shape[2] // 8), -(-k.shape[2] // 8), dtype=torch.bool)
    recording = {3: (torch.randn(1, 6, 96, 16), torch.randn(1, 2, 96, 16))}
    compact = policies.replay(policies.CompactAttention(nothing, 8, n_tokens=96), recording, 32)
    own = [(2 + i + 1) / (4 * c + i + 1) for c in (1, 2) for i in range(4)]
    assert compact == pytest.approx(np.mean([1.0] * 4 + own[:-2] + [1.0, 1.0]))
    quoka = policies.replay(policies.Quoka(0.5, 0.25, 8, n_tokens=96, dense_tail=0), recording, 32)
    assert quoka == pytest.approx(np.mean([1.0] * 4 + [(c * 32 * 0.25 / 8 + i + 1) / (4 * c + i + 1) for c in (1, 2) for i in range(4)]))


def test_replay_foretells_the_account(model, ids):
    recorder = policies.Record()
    chunked_prefill(model, ids[:1], 32, recorder)
    first = {0: recorder.recording()[0]}                       # the first layer's q and k don't depend on the policy
    for policy in (policies.CompactAttention(policies.flashprefill(8, 1.0), 8, keep_recent=0), policies.BlockSparse(policies.pooled(8, 3), 8, n_tokens=120)):
        state = chunked_prefill(model, ids[:1], 32, policy)
        layer = {"density": {0: state.stats["density"][0]}, "query_blocks": {0: state.stats["query_blocks"][0]}}
        assert policies.replay(policy, first, 32) == pytest.approx(policies.mean_density(layer), abs=1e-6) and policies.mean_density(layer) < 0.95


def test_dense_tail_rows_are_dense():
    q, k, v = tensors(11)
    nothing = lambda layer, q, k, *, q_start: torch.zeros(2, 6, 3, 11, dtype=torch.bool)
    policy = policies.CompactAttention(nothing, 8, n_tokens=88)
    policy.write(0, k[:, :, :64], v[:, :, :64], 0)
    out = policy(0, q, k, v, q_start=64, scale=0.25)
    dense = gqa_attention(q, k, v, q_start=64)
    assert (out[:, :, 8:] - dense[:, :, 8:]).abs().max() <= 1e-5 and (out[:, :, :8] - dense[:, :, :8]).abs().max() > 1e-2


def test_policy_never_reads_unselected_pages():
    q, k, v = tensors(13)
    sink = lambda layer, q, k, *, q_start: (torch.arange(11) == 0).expand(2, 6, 3, 11)
    policy = policies.CompactAttention(sink, 8)
    policy.write(0, k[:, :, :64], v[:, :, :64], 0)
    cache = policy.caches[0]
    middle = cache.block_table[:, :, 1:6].flatten().long()            # neither sink, nor recent (6, 7), nor current
    cache.k_pages[middle], cache.v_pages[middle] = float("nan"), float("nan")
    assert torch.isfinite(policy(0, q, k, v, q_start=64, scale=0.25)).all()


def test_match_density():
    level = policies.match_density(lambda x: 1 - x, 0.4, 0.1, 0.9, steps=20)
    assert level == pytest.approx(0.6, abs=1e-4) and 1 - level <= 0.4
    with pytest.raises(ValueError, match="out of reach"): policies.match_density(lambda x: x, 0.05, 0.1, 0.9)


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_errors():
    q, k, v = tensors(0)
    cache, t = PagedKV.from_dense(k, v, 8), tables.union_tables(random_mask(0, 2, 6, 3, 11, 0.3, 8), 3, current=3)
    def message(f, *args, **kw):
        with pytest.raises(ValueError) as error: f(*args, **kw)
        return str(error.value)
    wide = tables.union_tables(torch.ones(2, 6, 3, 12, dtype=torch.bool), 3)
    assert "12 blocks, the cache 11" in message(attend.paged_prefill, q, cache, wide, q_start=64)
    assert "`group` 4 must divide the 6" in message(tables.union_tables, torch.ones(1, 6, 1, 3, dtype=torch.bool), 4)
    t.ids[1, 1, 0] = 11
    assert "block 11, outside [0, 11)" in message(attend.paged_prefill, q, cache, t, q_start=64)
    t.ids[1, 1, 0] = -2
    assert "outside [0, 11)" in message(attend.paged_prefill, q, cache, t, q_start=64)
    empty = tables.union_tables(torch.zeros(2, 6, 3, 11, dtype=torch.bool), 3)
    assert "empty row" in message(attend.paged_prefill, q, cache, empty, q_start=64)
    assert message(select.first_block, 200, 200, 64) == "chunk 200 must be a multiple of block 64"
    assert "must be a multiple of block 16" in message(select.flashprefill_scores, q, k, 16, q_start=60)
    assert "`stride` 3" in message(select.xattention_scores, q, k, 8, stride=3, q_start=64)
    assert "`mask`" in message(attend.block_sparse_prefill, q, k, v, torch.ones(2, 6, 3, 10, dtype=torch.bool), 8, q_start=64)
    assert "rows of 2 heads" in message(attend.paged_prefill, q, cache, tables.union_tables(torch.ones(2, 4, 3, 11, dtype=torch.bool), 2), q_start=64)
    assert "`query_ratio`" in message(attend.quoka_select, q, k, query_ratio=0, kv_ratio=0.5, q_start=64)
    assert "gate for layer 7" in message(policies.gated({}), 7, q, k, q_start=64)


def test_policy_rejects_unaligned_chunks(model, ids):
    with pytest.raises(ValueError, match="chunk 20 must be a multiple of block 8"):
        chunked_prefill(model, ids, 20, policies.CompactAttention(all_blocks, 8, n_tokens=120))
    with pytest.raises(ValueError, match="chunk 20 must be a multiple of block 8"):
        chunked_prefill(model, ids, 20, policies.Quoka(0.5, 0.5, 8, n_tokens=120))


# ---- mutants ---------------------------------------------------------------------------------------------------------
MUTANTS = [
    (tables, "mask.any(2)", "mask[:, :, 0]", check_union), (tables, "s=subgroup).any(2)", "s=subgroup).all(2)", check_union),
    (tables, "- current - keep_recent)", "- current)", check_union), (tables, "reverse=True", "reverse=False", check_schedule),
    (tables, "int(w) + overhead", "int(w)", check_schedule),
    (select, "logits = packed @ block_means(k, block).transpose(-1, -2) * q.shape[-1] ** -0.5", "logits = packed @ block_means(k, block).transpose(-1, -2)", check_flashprefill),
    (select, "return padded.sum(-2) / real[:, None]", "return padded.mean(-2)", check_flashprefill),
    (select, "<= q_block +", "< q_block +", check_scores), (select, "strips(q).flip(3)", "strips(q)", check_antidiagonals),
    (select, "(stride * D**0.5)", "D**0.5", check_antidiagonals), (select, "before < tau", "ranked.cumsum(-1) < tau", check_keep),
    (select, "(gap < width)", "(gap <= width)", check_keep), (select, "scores >= alpha", "scores >= 2 * alpha", check_keep),
    (select, "for edge in (start, (start + block).clamp(max=q_start + Tq) - 1):", "for edge in (start,):", check_vertical_slash),
    (select, "return (mask[..., 1:] |", "return (mask[..., :-1] |", check_vertical_slash),
    (attend, "dim=-1).sort(dim=-1, stable=True)", "dim=-1).sort(dim=-1, stable=True, descending=True)", check_quoka),
    (attend, ".tril(past.shape[2])", ".tril(past.shape[2] - 1)", check_quoka), (attend, ".amax(2)", ".mean(2)", check_quoka),
]


@pytest.mark.parametrize("module, old, new, check", MUTANTS, ids=[f"{m.__name__.split('.')[-1]}: {new[:40]}" for m, _, new, _ in MUTANTS])
def test_mutants_are_caught(module, old, new, check):
    source = inspect.getsource(module)
    assert old in source
    mutant = types.ModuleType(module.__name__)
    mutant.__package__, mutant.__file__ = module.__package__, module.__file__
    exec(compile(source.replace(old, new, 1), module.__file__, "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, ValueError, RuntimeError)): check(mutant)
