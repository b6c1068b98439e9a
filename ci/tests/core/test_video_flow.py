"""core.video_flow: the flow, its sampler, clips and the model, each against an independent route."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from neurips26_lit.core import video_flow as vf

torch.set_num_threads(1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awake(model: nn.Module, seed: int = 0) -> nn.Module:
    "Random values in place of the zero layers, so that every part matters."
    for p in model.parameters():
        if p.abs().max() == 0: p.data.copy_(0.3 * torch.randn(p.shape, generator=rng(seed)))
    return model


# --- the flow ----------------------------------------------------------------------------------------------------------
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 5), t=st.floats(0, 0.99), seed=st.integers(0, 1000))
def test_exact_velocity_is_the_conditional_mean(n, t, seed):
    "By Monte Carlo-free Bayes: weights of the bank from normal densities of numpy."
    bank, x = torch.randn(n, 3, generator=rng(seed), dtype=torch.float64), torch.randn(2, 3, generator=rng(seed + 1), dtype=torch.float64)
    density = np.array([[math.prod(math.exp(-((a - t * b) ** 2) / (2 * (1 - t) ** 2) + 0.0) for a, b in zip(row, item)) for item in bank.tolist()] for row in x.tolist()])
    if density.sum(1).min() < 1e-200: return
    mean = (density / density.sum(1, keepdims=True)) @ bank.numpy()
    np.testing.assert_allclose(vf.exact_velocity(x, t, bank).numpy(), (mean - x.numpy()) / (1 - t), rtol=1e-6, atol=1e-8)


def test_sampler_ends_on_the_bank_and_counts_calls():
    bank = torch.randn(6, 1, 2, 3, 3, generator=rng(), dtype=torch.float64)
    noise = torch.randn(5, 1, 2, 3, 3, generator=rng(1), dtype=torch.float64)
    end, trace = vf.sample(lambda x, t, cond: vf.exact_velocity(x, t, bank), noise, torch.linspace(0, 1, 201))
    assert (end[:, None] - bank).flatten(2).abs().amax(-1).amin(1).max() <= 1e-3 and trace.calls == 200


def test_sampler_of_a_constant_field_is_one_addition():
    noise, v = torch.randn(2, 1, 2, 3, 3, generator=rng()), torch.randn(2, 1, 2, 3, 3, generator=rng(1))
    for ts in ([0.0, 1.0], [0.0, 0.1, 0.7, 1.0]):
        assert torch.allclose(vf.sample(lambda x, t, cond: v, noise, torch.tensor(ts))[0], noise + v, atol=1e-6)


def test_first_frame_stays_on_its_path():
    frame, noise, seen = torch.rand(1, 2, 4, 4), torch.randn(1, 2, 3, 4, 4), []
    def model(x, t, cond):
        seen.append((float(t[0]), x[:, :, 0].clone()))
        return torch.zeros_like(x)
    end, _ = vf.sample(model, noise, torch.linspace(0, 1, 5), first_frame=frame)
    assert torch.equal(end[:, :, 0], frame) and all(torch.allclose(x, (1 - t) * noise[:, :, 0] + t * frame, atol=1e-6) for t, x in seen)


def test_cache_is_asked_and_told():
    log = []
    class Cache:
        def reset(self, n, prompt): log.append(("reset", n))
        def should_compute(self, i, x, t): return i % 3 == 0
        def observe(self, i, x, t, v): self.v = v; log.append(("observe", i))
        def reuse(self, x, t): log.append("reuse"); return self.v
    _, trace = vf.sample(lambda x, t, cond: torch.ones_like(x), torch.zeros(1, 1, 1, 2, 2), torch.linspace(0, 1, 7), cache=Cache())
    assert log == [("reset", 6), ("observe", 0), "reuse", "reuse", ("observe", 3), "reuse", "reuse"] and trace.computed == [True, False, False] * 2


# --- clips -------------------------------------------------------------------------------------------------------------
def test_only_the_region_of_a_local_clip_differs_from_the_still(monkeypatch):
    g = rng(3)
    monkeypatch.setattr(vf, "_textures", lambda: (torch.rand(3, 80, 80, generator=rng()),))
    monkeypatch.setattr(vf, "_crop", lambda texture, size, generator, side=None: texture[:, :size, :size])
    clips = vf.surgical_clips(6, frames=5, size=32, generator=g)
    still = vf._textures()[0][:, :32, :32]
    changed = (clips.video - still).abs().amax(2) > 1e-5
    assert not (changed & ~clips.roi).any() and (changed & clips.roi).sum() > 0.9 * clips.roi.sum()
    share = clips.roi.float().mean((1, 2, 3))
    assert 0.04 <= share.min() and share.max() <= 0.10
    assert (clips.roi[:, 1:] != clips.roi[:, :-1]).flatten(2).any(-1).all()                       # the tool moves in every frame


@pytest.mark.parametrize("size", [16, 32, 48])
def test_controls(size):
    still, pan = (vf.surgical_clips(3, frames=4, size=size, kind=kind, generator=rng(1)) for kind in ("static", "global"))
    assert (still.video == still.video[:, :1]).all() and not still.roi.any() and not pan.roi.any()
    assert (pan.video[:, 1:] - pan.video[:, :-1]).abs().amax((2, 3, 4)).min() > 1e-3
    assert still.latents().min() >= -1 and still.latents().max() <= 1 and still.latents().shape == (3, 3, 4, size, size)


def test_clips_repeat_with_their_generator():
    a, b, c = (vf.surgical_clips(2, frames=3, generator=rng(seed)).video for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_real_clips():
    clips = vf.real_clips("ultrasound", 7, 24)
    frames = vf._frames("ultrasound", 24)
    assert clips.video.shape == (4, 7, 3, 24, 24) and torch.equal(clips.video.flatten(0, 1), frames[:28]) and clips.kind == "real" and "pydicom" in clips.provenance
    part = clips[1:3]
    assert len(part) == 2 and torch.equal(part.video, clips.video[1:3]) and torch.equal(clips[[3, 0]].video, clips.video[[3, 0]])
    both = vf.join(clips, vf.surgical_clips(1, frames=7, size=24, generator=rng()))
    assert len(both) == 5 and both.kind == "real" and len(both.caption) == 5


# --- the model ---------------------------------------------------------------------------------------------------------
def test_rotation_is_complex_multiplication():
    angles = vf.rope_angles((2, 3, 5), 20, first=4)
    x = torch.randn(2, 30, 3, 20, generator=rng(), dtype=torch.float64)
    z = torch.view_as_complex(x.unflatten(-1, (10, 2)).contiguous()) * torch.exp(1j * angles.double())[None, :, None]
    assert torch.allclose(vf.rotate(x, angles), torch.view_as_real(z).flatten(-2))
    f, r, c = np.unravel_index(17, (2, 3, 5))
    want = [(f + 4) * 100 ** -(m / 4) for m in range(4)] + [r * 100 ** -(m / 3) for m in range(3)] + [c * 100 ** -(m / 3) for m in range(3)]
    np.testing.assert_allclose(angles[17], want, rtol=1e-5)


def test_model_is_its_equations():
    "A second implementation, token by token, of a one-block model."
    torch.manual_seed(0)
    model = awake(vf.VideoDiT((2, 2, 2), dim=12, depth=1, heads=2, text_dim=None, patch=2, channels=1)).double()
    x, t = torch.randn(1, 1, 2, 4, 4, generator=rng(), dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    block, tokens = model.blocks[0], []
    for f, r, c in np.ndindex(2, 2, 2): tokens.append(model.embed(x[0, :, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(-1)))
    angle = [1000 * 0.3 * math.exp(-math.log(1e4) * i / 32) for i in range(32)]
    c = model.time(torch.tensor([math.cos(a) for a in angle] + [math.sin(a) for a in angle], dtype=torch.float64))
    silu = c * torch.sigmoid(c)
    s1, m1, g1, s2, m2, g2 = block.modulation(silu).split(12)
    ln = lambda y: (y - y.mean()) / (y.var(unbiased=False) + 1e-5).sqrt()
    rms = lambda y, w: y / (y.square().mean() + 1e-6).sqrt() * w
    qkv = [block.qkv(ln(y) * (1 + m1) + s1).view(3, 2, 6) for y in tokens]
    angles = vf.rope_angles((2, 2, 2), 6).double()
    turn = lambda y, a: torch.stack([y[::2] * a.cos() - y[1::2] * a.sin(), y[::2] * a.sin() + y[1::2] * a.cos()], -1).flatten()
    out = torch.zeros(1, 1, 2, 4, 4, dtype=torch.float64)
    for n, (f, r, col) in enumerate(np.ndindex(2, 2, 2)):
        heads = []
        for h in range(2):
            q = turn(rms(qkv[n][0, h], block.q_norm.weight), angles[n])
            z = torch.stack([q @ turn(rms(y[1, h], block.k_norm.weight), angles[m]) for m, y in enumerate(qkv)]) / math.sqrt(6)
            heads.append(sum(p * y[2, h] for p, y in zip(z.softmax(0), qkv)))
        y = tokens[n] + g1 * block.proj(torch.cat(heads))
        y = y + g2 * block.ffn.down(nn.functional.gelu(block.ffn.up(ln(y) * (1 + m2) + s2)))
        shift, scale = model.final(silu).split(12)
        out[0, :, f, 2 * r : 2 * r + 2, 2 * col : 2 * col + 2] = model.head(ln(y) * (1 + scale) + shift).view(1, 2, 2)
    assert torch.allclose(model(x, t), out, atol=1e-9)


def test_feed_forward_factory_and_aux():
    class Layer(nn.Module):
        def __init__(self, layer, dim):
            super().__init__()
            self.layer, self.w = layer, nn.Linear(dim, dim)
        def forward(self, x, t):
            self.seen = (tuple(x.shape), tuple(t.shape))
            return self.w(x), torch.tensor(float(self.layer + 1))
    torch.manual_seed(0)
    model = vf.VideoDiT((2, 4, 4), dim=24, depth=3, heads=2, text_dim=None, ffn=Layer)
    clips = vf.surgical_clips(4, frames=2, size=16, generator=rng())
    plain, more = (vf.train_velocity(model, clips, 1, generator=rng(2), aux_weight=w, lr=0.0)[0] for w in (0.0, 1.0))
    assert more - plain == pytest.approx(6.0, abs=1e-5)
    assert [b.ffn.layer for b in model.blocks] == [0, 1, 2] and model.blocks[0].ffn.seen == ((4, 32, 24), (4,))


def test_text_conditions_the_model_and_is_refused_without_it():
    torch.manual_seed(0)
    model = awake(vf.VideoDiT((2, 4, 4), dim=24, depth=1, heads=2, text_dim=8))
    x, t = torch.randn(2, 3, 2, 16, 16, generator=rng()), torch.tensor([0.1, 0.9])
    assert not torch.allclose(model(x, t, torch.randn(2, 8, generator=rng())), model(x, t))
    with pytest.raises(ValueError, match="cond"): vf.VideoDiT((2, 4, 4), dim=24, depth=1, heads=2, text_dim=None)(x, t, torch.zeros(2, 8))


def test_training_lowers_the_error_and_repeats():
    clips = vf.surgical_clips(6, frames=2, size=16, generator=rng())
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(vf.train_velocity(vf.VideoDiT((2, 4, 4), dim=24, depth=1, heads=2, text_dim=None), clips, 40, generator=rng(1)))
    assert runs[0] == runs[1] and np.mean(runs[0][-8:]) < 0.85 * np.mean(runs[0][:3])


def test_first_frame_is_left_out_of_the_loss():
    data, noise = torch.randn(2, 3, 4, 16, 16, generator=rng()), torch.randn(2, 3, 4, 16, 16, generator=rng(1))
    zero = lambda x, t, cond: torch.zeros_like(x)
    want = (data - noise)[:, :, 1:].square().mean()
    assert torch.allclose(vf.velocity_loss(zero, data, noise, torch.rand(2), first_frame=True), want)


@pytest.mark.parametrize("call, message", [
    (lambda: vf.surgical_clips(1, size=8, generator=rng()), "size"), (lambda: vf.surgical_clips(1, kind="x", generator=rng()), "kind"),
    (lambda: vf.real_clips("x", 2, 16), "source"), (lambda: vf.real_clips("ultrasound", 31, 16), "frames"), (lambda: vf.rope_angles((1, 1, 1), 5), "d"),
    (lambda: vf.VideoDiT((1, 4, 4), dim=10, heads=4), "dim"), (lambda: vf.exact_velocity(torch.zeros(1, 2), 1.0, torch.zeros(1, 2)), "t"),
    (lambda: vf.exact_velocity(torch.zeros(1, 2), 0.5, torch.zeros(1, 3)), "bank"), (lambda: vf.sample(None, torch.zeros(1), torch.tensor([1.0, 0.0])), "ts"),
    (lambda: vf.VideoDiT((1, 4, 4), dim=24, heads=2, text_dim=None)(torch.zeros(1, 3, 1, 20, 16), torch.zeros(1)), "x"),
    (lambda: vf.surgical_clips(0, generator=rng()), "n"), (lambda: vf.surgical_clips(1, frames=0, generator=rng()), "frames"), (lambda: vf.real_clips("ultrasound", 0, 16), "frames"), (lambda: vf.real_clips("ultrasound", 2, 0), "size"),
    (lambda: vf.rope_angles((0, 1, 1), 6), "grid"), (lambda: vf.rotate(torch.zeros(1, 2, 1, 6), torch.zeros(3, 3)), "angles"), (lambda: vf.VideoDiT((1, 4)), "grid"), (lambda: vf.VideoDiT((1, 4, 4), heads=0), "dim"),
    (lambda: vf.VideoDiT((1, 4, 4), dim=24, heads=2, text_dim=None)(torch.zeros(2, 3, 1, 16, 16), torch.zeros(3)), "t"), (lambda: vf.VideoDiT((1, 4, 4), dim=24, heads=2, text_dim=8)(torch.zeros(2, 3, 1, 16, 16), torch.zeros(2), torch.zeros(3, 8)), "cond"),
    (lambda: vf.exact_velocity(torch.zeros(2, 2), torch.zeros(3), torch.zeros(1, 2)), "t"), (lambda: vf.exact_velocity(torch.zeros(2, 2), math.nan, torch.zeros(1, 2)), "t"), (lambda: vf.exact_velocity(torch.zeros(2, 2), 0.5, torch.zeros(0, 2)), "bank"),
    (lambda: vf.sample(None, torch.zeros(1, 1, 1, 2, 2), torch.tensor([0.0, 1.0]), first_frame=torch.zeros(1, 1, 3, 3)), "first_frame"), (lambda: vf.fit(nn.Linear(1, 1), None, -1), "steps"),
    (lambda: vf.train_velocity(nn.Linear(1, 1), vf.surgical_clips(1, size=16, generator=rng()), 1, generator=rng(), batch=0), "batch"), (lambda: vf.join(), "parts"),
    (lambda: vf.join(vf.real_clips("ultrasound", 2, 16), vf.real_clips("ultrasound", 3, 16)), "parts")])
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=rf"`{message}`"): call()
