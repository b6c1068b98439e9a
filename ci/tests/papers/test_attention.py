"""Grouped-query attention, the reference of the area: against loops in float64, PyTorch's own attention, and identities."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from neurips26_lit.efficient_inference.attention import attention_error, attention_weights, block_mass, gqa_attention, merge_attention


def draw(seed, B, Hq, Hkv, Tq, Tk, D, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    make = lambda h, t: (scale * torch.randn(B, h, t, D, generator=g, dtype=torch.float64)).to(dtype)
    return make(Hq, Tq), make(Hkv, Tk), make(Hkv, Tk)


def loops(q, k, v, q_start=None, mask=None, scale=None):
    "Plain Python: exp and sums of floats, no tensor softmax."
    B, Hq, Tq, D = q.shape
    G, out, lse = Hq // k.shape[1], torch.zeros_like(q), torch.full((B, Hq, Tq), -math.inf, dtype=q.dtype)
    for b, h, r in itertools.product(range(B), range(Hq), range(Tq)):
        seen = [j for j in range(k.shape[2]) if (q_start is None or j <= q_start + r) and (mask is None or bool(mask[b, h, r, j]))]
        logits = [sum(x * y for x, y in zip(q[b, h, r].tolist(), k[b, h // G, j].tolist())) * (scale or D**-0.5) for j in seen]
        if not seen: continue
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        lse[b, h, r] = top + math.log(sum(weights))
        for w, j in zip(weights, seen): out[b, h, r] += w / sum(weights) * v[b, h // G, j]
    return out, lse


shapes = st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3), (7, 1)]), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 4, 5]))


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 10**6), st.one_of(st.none(), st.integers(-3, 9)), st.booleans())
def test_equals_loops(shape, seed, q_start, masked):
    B, (Hq, Hkv), Tq, Tk, D = shape
    q, k, v = draw(seed, B, Hq, Hkv, Tq, Tk, D, scale=3.0)
    mask = torch.rand(B, Hq, Tq, Tk, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    out, lse = gqa_attention(q, k, v, q_start=q_start, mask=mask, return_lse=True)
    ref, ref_lse = loops(q, k, v, q_start, mask)
    assert torch.allclose(out, ref, atol=1e-12) and torch.allclose(lse, ref_lse, atol=1e-12)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("q_start", [None, 0, 24])
def test_equals_sdpa(dtype, tol, q_start):
    q, k, v = draw(1, 2, 6, 2, 13, 37, 32, dtype)
    mask = None if q_start is None else torch.arange(37) <= q_start + torch.arange(13)[:, None]
    peer = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert (gqa_attention(q, k, v, q_start=q_start) - peer).abs().max() <= tol
    assert gqa_attention(q, k, v, q_start=q_start).dtype == dtype


def test_scale_and_large_logits():
    q, k, v = draw(2, 1, 4, 2, 3, 8, 16, torch.float32, scale=40.0)
    out, lse = gqa_attention(q, k, v, scale=0.7, return_lse=True)
    ref, ref_lse = loops(q.double(), k.double(), v.double(), scale=0.7)
    assert torch.allclose(out.double(), ref, atol=1e-3) and torch.allclose(lse.double(), ref_lse, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_merge_over_any_partition(seed, owner):
    q, k, v = draw(seed, 1, 6, 2, 4, 12, 8)
    whole, whole_lse = gqa_attention(q, k, v, q_start=8, return_lse=True)
    parts = [gqa_attention(q, k, v, q_start=8, mask=(torch.tensor(owner) == p).expand(4, 12), return_lse=True) for p in range(5)]
    out, lse = merge_attention(torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]))
    assert (out - whole).abs().max() <= 1e-12 and (lse - whole_lse).abs().max() <= 1e-12


def test_merge_of_nothing_is_nothing():
    out, lse = merge_attention(torch.zeros(3, 1, 2, 4, 8), torch.full((3, 1, 2, 4), -math.inf))
    assert out.abs().max() == 0 and (lse == -math.inf).all()


@pytest.mark.parametrize("block", [1, 4, 7, 40])
def test_block_mass(block):
    q, k, _ = draw(3, 2, 4, 2, 10, 26, 8)
    mass = block_mass(q, k, block, q_start=16)
    assert mass.shape == (2, 4, -(-10 // block), -(-26 // block))
    assert torch.allclose(mass.sum(-1), torch.ones_like(mass[..., 0]), atol=1e-12)
    peer = F.softmax((q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5).masked_fill(torch.arange(26) > 16 + torch.arange(10)[:, None], -math.inf), -1)
    for i, j in itertools.product(range(mass.shape[2]), range(mass.shape[3])):
        part = peer[:, :, i * block:(i + 1) * block, j * block:(j + 1) * block].sum(-1).mean(-1)
        assert torch.allclose(mass[:, :, i, j], part, atol=1e-12)


def test_weights_of_empty_rows_are_zero():
    q, k, _ = draw(4, 1, 2, 1, 3, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    assert attention_weights(q, k, mask=mask).sum(-1)[0, 0].tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_error_measure():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(attention_error(x, x), torch.zeros(2, 3))
    assert torch.allclose(attention_error(1.5 * x, x), torch.full((2, 3), 0.5))
    with pytest.raises(ValueError, match="`out`"): attention_error(x[:1], x)


@pytest.mark.parametrize("change, words", [
    (lambda q, k, v: (q[:, :5], k, v), ["`q` has 5 heads", "`k` has 2"]), (lambda q, k, v: (q[..., :7], k, v), ["`q`", "`k`"]),
    (lambda q, k, v: (q, k, v[:, :, :3]), ["`v`"]), (lambda q, k, v: (q[0], k, v), ["`q` must be [B, heads, tokens, D]"])])
def test_errors_name_the_argument(change, words):
    with pytest.raises(ValueError) as error: gqa_attention(*change(*draw(5, 1, 6, 2, 4, 6, 8)))
    assert all(w in str(error.value) for w in words)
