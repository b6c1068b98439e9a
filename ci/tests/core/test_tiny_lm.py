"""core.tiny_lm against transformers' Llama, against itself in pieces, and the training cache under damage and races."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neurips26_lit.core import tiny_lm as T
from neurips26_lit.core.models import cached_forward, capture, collect, head_slices, patch

torch.set_num_threads(1)
SHARED = os.environ.get("NEURIPS26_CACHE")
SMALL = T.TinyConfig(vocab=50, dim=32, layers=2, heads=4, kv_heads=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv("NEURIPS26_CACHE", str(tmp_path / "cache"))


def ids_for(cfg, n=2, t=24, seed=0): return torch.randint(0, cfg.vocab, (n, t), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the network

CONFIGS = [SMALL, T.TinyConfig(vocab=99, dim=96, layers=4, heads=6, kv_heads=2, theta=5e5, init_std=0.1), T.TinyConfig(heads=2, kv_heads=1, tied=True, eps=1e-3),
           T.TinyConfig(dim=48, heads=3, kv_heads=3, ffn=40, layers=1)]


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@torch.no_grad()
def test_logits_are_llamas(cfg):
    lm, ids = T.TinyLM(cfg, seed=3).eval(), ids_for(cfg, 3, 70)
    for name, p in lm.named_parameters():                                       # norms away from one, else a missing gain would not show
        if p.ndim == 1: p.mul_(torch.linspace(0.5, 1.5, p.numel()))
    llama = T.to_llama(lm)
    assert (lm(ids).logits - llama(ids).logits).abs().max() <= 1e-5
    mask = torch.ones_like(ids); mask[0, :9] = 0; mask[1, :1] = 0                  # left padding, as a tokeniser makes it
    where = (mask.cumsum(1) - 1).clamp(min=0)
    ours, theirs = lm(ids, attention_mask=mask, position_ids=where).logits, llama(ids, attention_mask=mask, position_ids=where).logits
    assert (ours - theirs)[mask.bool()].abs().max() <= 1e-5
    assert sum(p.numel() for p in llama.parameters()) == lm.n_params


def test_gradients_are_llamas():
    lm, ids = T.TinyLM(SMALL, seed=1), ids_for(SMALL)
    llama = T.to_llama(lm)
    T.lm_loss(lm(ids).logits, ids).backward()
    theirs = llama(ids, labels=ids); theirs.loss.backward()
    grads = dict(llama.named_parameters())
    for name, p in lm.named_parameters(): assert torch.allclose(p.grad, grads[name].grad, atol=1e-6), name


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 100))
@torch.no_grad()
def test_any_split_through_the_cache_is_the_full_pass(sizes, seed):
    lm, ids = T.TinyLM(SMALL, seed=seed).double().eval(), ids_for(SMALL, 2, sum(sizes), seed)
    full, cache = lm(ids).logits, T.KVCache()
    pieces = [lm(piece, cache=cache).logits for piece in ids.split(sizes, 1)]
    assert torch.allclose(torch.cat(pieces, 1), full, atol=1e-12) and cache.get_seq_length() == sum(sizes)


@torch.no_grad()
def test_a_transformers_cache_and_the_shared_wrapper_work():
    from transformers import DynamicCache
    lm, ids = T.TinyLM(SMALL).double().eval(), ids_for(SMALL)
    full = lm(ids).logits
    for cache in (DynamicCache(), T.KVCache()):
        first = cached_forward(lm, ids[:, :10], cache, start=0)
        rest = cached_forward(lm, ids[:, 10:], cache, start=10, last_only=True)
        assert torch.allclose(first, full[:, :10], atol=1e-12) and torch.allclose(rest[:, 0], full[:, -1], atol=1e-12)


@torch.no_grad()
def test_padding_with_a_cache():
    lm, ids = T.TinyLM(SMALL).double().eval(), ids_for(SMALL, 1, 12)
    full = lm(ids).logits
    padded, mask, cache = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0)), T.KVCache()
    where = (mask.cumsum(1) - 1).clamp(min=0)
    a = lm(padded[:, :9], attention_mask=mask[:, :9], position_ids=where[:, :9], cache=cache).logits
    b = lm(padded[:, 9:], attention_mask=mask, position_ids=where[:, 9:], cache=cache).logits
    assert torch.allclose(torch.cat([a, b], 1)[:, 4:], full, atol=1e-12) and torch.isfinite(a).all()


@torch.no_grad()
def test_no_token_sees_the_future():
    lm, ids = T.TinyLM(SMALL).eval(), ids_for(SMALL)
    other = ids.clone(); other[:, 15] = (other[:, 15] + 1) % SMALL.vocab
    change = (lm(ids).logits - lm(other).logits).abs().amax((0, 2))
    assert change[:15].max() == 0 and (change[15:] > 0).all()


def test_rotary_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    def scores(shift):
        angles = T.rope_angles(torch.arange(10)[None] + shift, 16, 1e4)
        return T.rotate(q, *angles) @ T.rotate(k, *angles).mT
    assert torch.allclose(scores(0), scores(77), atol=1e-4) and not torch.allclose(scores(0), q @ k.mT, atol=1e-2)


@torch.no_grad()
def test_sites_of_core_models():
    lm, ids = T.TinyLM(SMALL, seed=2).eval(), ids_for(SMALL)
    plain = lm(ids).logits
    sites = ["embed", "resid_pre.1", "attn_out.1", "head_out.1", "attn_pattern.1", "mlp_in.1", "mlp_out.1", "resid_post.1", "final_norm"]
    with capture(lm, sites) as got: tapped = lm(ids).logits
    assert head_slices(lm) == (2, 4, 8) and torch.allclose(tapped, plain, atol=1e-5)
    layer = lm.model.layers[1]
    assert torch.allclose(got["head_out.1"].flatten(-2) @ layer.self_attn.o_proj.weight.T, got["attn_out.1"], atol=1e-5)
    assert torch.allclose(got["resid_pre.1"] + got["attn_out.1"] + got["mlp_out.1"], got["resid_post.1"], atol=1e-5)
    assert torch.allclose(layer.mlp(got["mlp_in.1"]), got["mlp_out.1"], atol=1e-5) and torch.allclose(lm.lm_head(got["final_norm"]), plain, atol=1e-5)
    with patch(lm, {"resid_pre.0": lambda x: x}): assert torch.equal(lm(ids).logits, plain)
    kept = collect(lm, ids, "resid_post.0", positions="last")["resid_post.0"]
    assert kept.shape == (2, 1, 32) and torch.allclose(kept[:, 0], got["resid_pre.1"][:, -1], atol=1e-5)


@torch.no_grad()
def test_patterns_under_a_cache_have_the_right_shape():
    lm, ids = T.TinyLM(SMALL).eval(), ids_for(SMALL)
    with capture(lm, "attn_pattern.0") as whole: full = lm(ids).logits
    cache = T.KVCache(); lm(ids[:, :20], cache=cache)
    with capture(lm, "attn_pattern.0") as part: last = lm(ids[:, 20:], cache=cache).logits
    assert part["attn_pattern.0"].shape == (2, 4, 4, 24) and torch.allclose(part["attn_pattern.0"], whole["attn_pattern.0"][:, :, 20:], atol=1e-5) and torch.allclose(last, full[:, 20:], atol=1e-5)


def test_own_mixer_and_mlp():
    class Half(T.SwiGLU):
        def forward(self, x): return 0.5 * super().forward(x)
    a, b = T.TinyLM(SMALL, seed=1), T.TinyLM(SMALL, seed=1, mlp=Half)
    with torch.no_grad():
        for layer in b.model.layers: layer.mlp.down_proj.weight.mul_(2)
        assert torch.allclose(a(ids_for(SMALL)).logits, b(ids_for(SMALL)).logits, atol=1e-6)


def test_embeddings_instead_of_ids():
    lm, ids = T.TinyLM(SMALL), ids_for(SMALL)
    assert torch.equal(lm(ids).logits, lm(inputs_embeds=lm.model.embed_tokens(ids)).logits)


def test_same_seed_same_weights():
    a, b, c = (T.TinyLM(SMALL, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize("kw, message", [(dict(dim=30), "dim, heads"), (dict(dim=12, heads=4), "dim, heads"), (dict(kv_heads=3), "kv_heads"), (dict(layers=0), "positive")])
def test_bad_shapes(kw, message):
    with pytest.raises(ValueError, match=message): T.TinyConfig(**kw)


def test_bad_input():
    lm = T.TinyLM(SMALL)
    for ids, message in ((torch.tensor([1, 2]), "input_ids"), (torch.tensor([[50]]), r"0\.\.49, got 50"), (torch.zeros(1, 3), "input_ids"), (torch.zeros(1, 0, dtype=torch.long), "T >= 1")):
        with pytest.raises(ValueError, match=message): lm(ids)
    with pytest.raises(ValueError, match="exactly one"): lm()
    with pytest.raises(ValueError, match="attention_mask: expected 5 columns"): lm(torch.zeros(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 4))


# ---------------------------------------------------------------- loss and training

def test_loss_by_hand():
    logits, ids = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])
    assert T.lm_loss(logits, ids).item() == pytest.approx(math.log(4))
    logits[0, 0, 1] = 100.0                                                       # sure of token 1, right
    assert T.lm_loss(logits, ids).item() == pytest.approx(math.log(4) / 2) and T.lm_loss(logits, ids, torch.tensor([[9.0, 1.0, 0.0]])).item() == pytest.approx(0, abs=1e-6)
    assert T.lm_loss(logits, ids, torch.tensor([[0.0, 1.0, 3.0]])).item() == pytest.approx(0.75 * math.log(4))
    with pytest.raises(ValueError, match="no token counts"): T.lm_loss(logits, ids, torch.tensor([[1.0, 0, 0]]))


def test_learning_rate():
    rates = [T.learning_rate(s, 100, 2.0, 10) for s in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0 and rates[100] == pytest.approx(0.2) and all(a >= b for a, b in zip(rates[10:], rates[11:]))


STREAM = torch.arange(3000) % 7


def test_training_learns_and_is_repeatable():
    a, b = (T.train_lm(SMALL, STREAM, seed=0, steps=60, batch=8, length=20, lr=1e-2, cache=False) for _ in range(2))
    assert torch.equal(a.losses, b.losses) and a.losses[-1] < 0.3 < 1.5 < a.losses[0] and not a.from_cache and not a.model.training
    assert T.window_nll(a.model, STREAM, length=20).mean() < 0.3
    assert not torch.equal(a.losses, T.train_lm(SMALL, STREAM, seed=1, steps=60, batch=8, length=20, lr=1e-2, cache=False).losses)


def test_real_text_beats_counts():
    from neurips26_lit.core.data import python_docs
    text = torch.tensor(list("\n".join(python_docs()[0].values()).encode()))
    train, test = text[:-20_000], text[-20_000:]
    counts = torch.bincount(train, minlength=256) + 1.0
    unigram = -(counts / counts.sum()).log()[test].mean()
    run = T.train_lm(T.TinyConfig(dim=48, heads=4, kv_heads=2), train, seed=0, steps=60, batch=12, length=64, lr=8e-3)
    assert T.window_nll(run.model, test, length=64).mean() < unigram - 0.3


def test_window_nll_is_the_loss_of_each_window():
    lm = T.TinyLM(SMALL).eval()
    found = T.window_nll(lm, STREAM[:107], length=25, batch=3)
    with torch.no_grad(): expected = [T.lm_loss(lm(STREAM[None, i:i + 25]).logits, STREAM[None, i:i + 25]).item() for i in range(0, 100, 25)]
    assert np.allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="do not fill a window"): T.window_nll(lm, STREAM[:10], length=25)


def test_divergence_and_bad_arguments():
    bad = lambda step, g: (STREAM[None, :20], torch.full((1, 20), float("nan")))
    with pytest.raises((RuntimeError, ValueError)): T.train_lm(SMALL, bad, seed=0, steps=2, cache=False)
    with pytest.raises(RuntimeError, match="loss is .* lower lr"): T.train_lm(SMALL, STREAM, seed=0, steps=40, length=20, lr=1e30, warmup=1, cache=False)
    with pytest.raises(ValueError, match="data_key"): T.train_lm(SMALL, bad, seed=0, steps=2)
    with pytest.raises(ValueError, match="at least 128 tokens"): T.train_lm(SMALL, STREAM[:50], seed=0)
    with pytest.raises(ValueError, match="steps"): T.train_lm(SMALL, STREAM, seed=0, steps=0)


# ---------------------------------------------------------------- the cache

def quick(**kw): return T.train_lm(kw.pop("cfg", SMALL), kw.pop("data", STREAM), **{"seed": 0, "steps": 3, "batch": 2, "length": 20, **kw})


def test_second_run_reads_the_first():
    a, b = quick(), quick()
    assert not a.from_cache and b.from_cache and a.seconds == b.seconds and torch.equal(a.losses, b.losses)
    assert all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))


def test_any_change_trains_again():
    base = quick()
    for change in (dict(seed=1), dict(steps=4), dict(batch=3), dict(length=21), dict(lr=1e-3), dict(warmup=1), dict(weight_decay=0.5), dict(data=STREAM.flip(0)), dict(cfg=T.TinyConfig(vocab=50, dim=32, theta=99.0)), dict(init=base.model)):
        assert not quick(**change).from_cache, change
    assert quick().from_cache


def test_changed_code_trains_again(monkeypatch):
    quick()
    def lm_loss(logits, ids, weight=None): return logits.square().mean()
    monkeypatch.setattr(T, "lm_loss", lm_loss)
    assert not quick().from_cache


def test_functions_are_keyed_by_name_and_source():
    one = lambda step, g: STREAM[None, step:step + 20]
    two = lambda step, g: STREAM[None, step + 1:step + 21]
    assert not quick(data=one, data_key="a").from_cache and quick(data=one, data_key="a").from_cache
    assert not quick(data=one, data_key="b").from_cache and not quick(data=two, data_key="a").from_cache


def test_a_damaged_file_is_made_again(tmp_path):
    a = quick()
    (file,) = (tmp_path / "cache").glob("tiny_lm-*.pt")
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"not a file"):
        file.write_bytes(broken)
        with pytest.warns(UserWarning, match="damaged"): b = quick()
        assert not b.from_cache and torch.equal(a.losses, b.losses) and quick().from_cache


def test_no_half_written_file_is_left(tmp_path, monkeypatch):
    def full_disk(result, f): f.write(b"half"); raise OSError(28, "No space left on device")
    monkeypatch.setattr(T.torch, "save", full_disk)
    with pytest.warns(UserWarning, match="No space left on device.*NEURIPS26_CACHE"): run = quick()
    assert len(run.losses) == 3 and [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_two_processes_train_once(tmp_path):
    code = ("import torch; from neurips26_lit.core import tiny_lm as T; s = torch.arange(3000) % 7; c = T.TinyConfig(vocab=50, dim=32);"
            "print(T.train_lm(c, s, seed=0, steps=8, batch=2, length=20, progress=False).from_cache)")
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(p.communicate(timeout=300)[0].strip() for p in both)
    assert said == ["False", "True"] and len(list((tmp_path / "cache").glob("tiny_lm-*.pt"))) == 1


def test_cache_key():
    assert T.cache_key({"a": 1, "b": SMALL}) == T.cache_key({"b": SMALL, "a": 1}) != T.cache_key({"a": 1, "b": T.TinyConfig(vocab=51, dim=32)})
    with pytest.raises(ValueError, match="cannot describe a Tensor"): T.cache_key({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="no source code"): T.code_hash(len)


# ---------------------------------------------------------------- generation

@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_full_passes():
    lm = T.TinyLM(SMALL, seed=5).eval()
    out = T.generate(lm, ids_for(SMALL, 3, 5), max_new=12, temperature=0)
    for i in range(5, 17): assert torch.equal(lm(out[:, :i]).logits[:, -1].argmax(-1), out[:, i])


@torch.no_grad()
def test_sampling_follows_the_models_distribution():
    lm = T.TinyLM(T.TinyConfig(vocab=5, dim=16, heads=2, kv_heads=1, init_std=0.5), seed=1).eval()
    prompt = torch.tensor([[1, 2]]).expand(4000, 2)
    seen = torch.bincount(T.generate(lm, prompt, max_new=1, temperature=0.7, generator=torch.Generator().manual_seed(0))[:, 2], minlength=5) / 4000
    assert (seen - (lm(prompt[:1]).logits[0, -1] / 0.7).softmax(-1)).abs().max() < 0.03
    with pytest.raises(ValueError, match="generator"): T.generate(lm, prompt[:1], max_new=1)


def test_rows_stop_at_eos():
    lm = T.TinyLM(SMALL, seed=5).eval()
    prompt = ids_for(SMALL, 4, 5)
    eos = int(T.generate(lm, prompt, max_new=1, temperature=0)[0, -1])
    out = T.generate(lm, prompt, max_new=9, temperature=0, eos=eos)
    assert (out[0, 5:] == eos).all() and out.shape[1] <= 14
    assert T.generate(lm, prompt[:1], max_new=9, temperature=0, eos=eos).shape[1] == 6


# ---------------------------------------------------------------- recall

@settings(max_examples=25, deadline=None)
@given(st.integers(2, 20), st.integers(1, 12), st.integers(0, 999))
def test_recall_batches_can_be_answered_by_looking_back(quarter, pairs, seed):
    pairs = min(pairs, quarter)
    b = T.recall_batch(5, 4 * quarter, pairs, torch.Generator().manual_seed(seed))
    for row, asked, source, weight in zip(b.ids.tolist(), b.asked.tolist(), b.source.tolist(), b.weight.tolist()):
        told = {row[i]: row[i + 1] for i in range(0, 2 * quarter, 2) if 1 <= row[i] <= T.N_KEYS}
        assert len(told) == pairs and sorted(told) == sorted(row[a] for a in asked)
        for a, s in zip(asked, source): assert row[a + 1] == told[row[a]] == row[s] and weight[a + 1] == 1 and s < a
        assert sum(w == 1 for w in weight) == pairs and 0 not in row and max(row) < T.RECALL_VOCAB


def test_repeat_batches_repeat():
    ids, weight = T.repeat_batch(40, 48, torch.Generator().manual_seed(0))
    for row, w in zip(ids.tolist(), weight.tolist()):
        r = int(48 - sum(w)) - 1
        assert 4 <= r <= 24 and all(row[i] == row[i - r] for i in range(r, 48)) and len(set(row[:r])) == r


def test_bad_recall_arguments():
    g = torch.Generator()
    for args in ((2, 30, 4, g), (2, 32, 9, g), (2, 400, 21, g), (2, 32, 0, g)):
        with pytest.raises(ValueError, match="length, pairs"): T.recall_batch(*args)


def test_gates_name_what_failed():
    good = T.RecallReport(0.95, torch.tensor([[0.0, 0.8]]), ((0, 1),), 0.05, 0.9)
    T._require(good)
    for change, message in ((dict(accuracy=0.89), "accuracy"), (dict(attention=torch.tensor([[0.3, 0.1]])), "attention of the best head"), (dict(without=0.31), "without look-up heads"), (dict(moved=0.5), "moved attention")):
        with pytest.raises(RuntimeError, match=f"gate '.*{message}.*' failed"): T._require(good._replace(**change))


def test_an_untrained_model_does_not_pass():
    report = T.recall_report(T.TinyLM(T.RECALL_SIZES["smoke"].cfg), length=32, pairs=4, n=64)
    assert report.accuracy < 0.2 and report.attention.max() < 0.2 and report.attention.shape == (2, 4)
    with pytest.raises(RuntimeError, match="accuracy"): T._require(report)


@pytest.mark.slow
def test_recall_lm_is_trained_and_verified(monkeypatch):
    if SHARED: monkeypatch.setenv("NEURIPS26_CACHE", SHARED)                      # share the cache with the notebook: half a minute of training, once
    else: monkeypatch.delenv("NEURIPS26_CACHE")
    found = T.recall_lm(0, progress=False)
    r = found.report
    assert r.accuracy > 0.9 and r.without < 0.3 and r.moved > 0.6 and all(layer > 0 for layer, _ in r.heads)      # the first layer can't look things up
    fresh = T.recall_batch(200, found.sizes.length, 6, torch.Generator().manual_seed(77))
    with torch.no_grad(): guess = found.model(fresh.ids).logits.argmax(-1).gather(1, fresh.asked)
    assert (guess == fresh.ids.gather(1, fresh.source)).float().mean() > 0.9
    ids, weight = T.repeat_batch(100, found.sizes.length, torch.Generator().manual_seed(78))
    with torch.no_grad(): right = found.model(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    assert right[weight[:, 1:].bool()].float().mean() > 0.85                     # stage one is not forgotten
    with pytest.raises(ValueError, match="unknown scale"): T.recall_lm(0, "huge")
