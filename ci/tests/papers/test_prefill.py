"""Chunked prefill: equal to one forward pass whatever the chunk and the policy, in place, and bounded in memory."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from neurips26_lit.core.models import cached_forward, load_lm
from neurips26_lit.efficient_inference.prefill import (
    AttentionPolicy,
    Dense,
    LiveBytes,
    PrefillState,
    chunked_prefill,
    continuation_nll,
    greedy,
    kv_cache,
    new_stats,
    visible_pairs,
)

SIZES = {"vocab_size": 83, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096}


def build(kind=LlamaForCausalLM, config=LlamaConfig, **kw):
    torch.manual_seed(0)
    net = kind(config(**SIZES, **kw)).eval()
    for p in net.parameters():
        if p.ndim > 1: torch.nn.init.normal_(p, std=0.3)
    return net


@pytest.fixture(scope="module")
def model(): return build()


@pytest.fixture(scope="module")
def ids(): return torch.randint(0, 83, (2, 61), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole(model, ids):
    with torch.no_grad(): return model(ids).logits


class Naive:
    """Softmax attention row by row, from the contract's words alone."""
    def __init__(self): self.stats = new_stats()

    def __call__(self, layer, q, k, v, *, q_start, scale):
        group, out = q.shape[1] // k.shape[1], torch.empty_like(q)
        assert k.shape[2] == q_start + q.shape[2]
        for h in range(q.shape[1]):
            for r in range(q.shape[2]):
                keys, values = k[:, h // group, :q_start + r + 1].double(), v[:, h // group, :q_start + r + 1].double()
                weights = (torch.einsum("bd,btd->bt", q[:, h, r].double(), keys) * scale).softmax(-1)
                out[:, h, r] = torch.einsum("bt,btd->bd", weights, values).float()
        return out


@pytest.mark.parametrize("chunk, policy", [*((c, p) for c in (1, 7, 16, 60, 61, 1000) for p in (None, Dense)), (7, Naive), (61, Naive)])
def test_logits_equal_one_forward_pass(model, ids, whole, chunk, policy):
    state = chunked_prefill(model, ids, chunk, policy and policy())
    assert isinstance(state, PrefillState) and state.n_tokens == 61 and state.logits.shape == (2, 83)
    assert (state.logits - whole[:, -1]).abs().max() <= 1e-4


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 40), chunk=st.integers(1, 45), batch=st.integers(1, 3), cut=st.integers(1, 12), seed=st.integers(0, 99))
def test_any_lengths(T, chunk, batch, cut, seed):
    """Prefill plus continuation equals the whole sequence, for any lengths."""
    net = test_any_lengths.net
    seq = torch.randint(0, 83, (batch, T + cut), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(): logits = net(seq).logits
    expected = F.cross_entropy(logits[:, T - 1:-1].transpose(1, 2), seq[:, T:], reduction="none").mean(1)
    for policy in (None, Dense()):
        state = chunked_prefill(net, seq[:, :T], chunk, policy)
        assert (continuation_nll(net, state, seq[:, T:], policy=policy) - expected).abs().max() <= 1e-4


test_any_lengths.net = build()


@pytest.mark.parametrize("kind, config, kw", [(Qwen3ForCausalLM, Qwen3Config, {}), (MistralForCausalLM, MistralConfig, {"sliding_window": None})])
def test_other_families(kind, config, kw, ids):
    net = build(kind, config, **kw)
    with torch.no_grad(): expected = net(ids).logits[:, -1]
    for policy in (None, Dense()): assert (chunked_prefill(net, ids, 16, policy).logits - expected).abs().max() <= 1e-4


def test_sliding_window_is_refused(ids):
    net = build(Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="full attention"): chunked_prefill(net, ids, 16, None)


def test_policy_gets_rotated_queries_and_all_keys(model, ids):
    """q, k, v equal projections of the captured layer input, rotated at absolute positions."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from neurips26_lit.core.models import capture
    calls = []

    class Spy(Dense):
        def __call__(self, layer, q, k, v, *, q_start, scale):
            if layer == 1: calls.append((q.clone(), k.clone(), v.clone(), q_start, scale))
            return super().__call__(layer, q, k, v, q_start=q_start, scale=scale)

    chunked_prefill(model, ids, 16, Spy())
    with torch.no_grad(), capture(model, "resid_pre.1") as got: model(ids)
    layer = model.model.layers[1]
    with torch.no_grad():
        x = layer.input_layernorm(got["resid_pre.1"])
        split = lambda y: y.unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = (split(getattr(layer.self_attn, name)(x)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, torch.arange(61)[None]))
    assert [c[3] for c in calls] == [0, 16, 32, 48] and all(c[4] == 8 ** -0.5 for c in calls)
    for cq, ck, cv, start, _ in calls:
        end = start + cq.shape[2]
        for a, b in ((cq, q[:, :, start:end]), (ck, k[:, :, :end]), (cv, v[:, :, :end])): assert (a - b).abs().max() <= 1e-4


def test_account(model, ids):
    """FLOPs don't depend on the chunk; bytes are the cache's size after each chunk; a prefill starts a fresh account."""
    policy = Dense()
    for chunk in (5, 16, 61):
        stats = chunked_prefill(model, ids, chunk, policy).stats
        ends = [min(s + chunk, 61) for s in range(0, 61, chunk)]
        for layer in range(3):
            assert stats["bytes"][layer] == [2 * 2 * 2 * n * 8 * 4 for n in ends] and set(stats["density"][layer]) == {1.0}
            assert sum(stats["flops"][layer]) == 4 * 8 * 2 * 6 * (61 * 62 // 2)
    assert policy.stats == stats and policy.stats is not stats
    assert sum(visible_pairs(min(7, 61 - s), s) for s in range(0, 61, 7)) == 61 * 62 // 2
    assert isinstance(policy, AttentionPolicy) and chunked_prefill(model, ids, 16, None).stats == {}


def test_cache_equals_dynamic_cache_and_never_moves(model, ids):
    ours, theirs, places = kv_cache(model, 61), DynamicCache(config=model.config), set()
    with torch.no_grad():
        for start in range(0, 61, 9):
            piece = ids[:, start:start + 9]
            assert torch.equal(cached_forward(model, piece, ours, start=start), cached_forward(model, piece, theirs, start=start))
            places |= {layer.keys.data_ptr() for layer in ours.layers}
    assert len(places) == 3 and ours.get_seq_length() == 61
    for a, b in zip(ours.layers, theirs.layers, strict=True): assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_cache_grows_and_takes_foreign_tensors(model, ids, whole):
    """Too small a buffer grows; keys put there by someone else (an eviction method) are kept."""
    cache = kv_cache(model, 4)
    with torch.no_grad():
        cached_forward(model, ids[:, :20], cache, start=0)
        for layer in cache.layers: layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        logits = cached_forward(model, ids[:, 20:], cache, start=20)
    assert (logits[:, -1] - whole[:, -1]).abs().max() <= 1e-4


def test_state_is_left_as_it_was(model, ids):
    state = chunked_prefill(model, ids, 16, None)
    keys = [layer.keys.clone() for layer in state.cache.layers]
    more = torch.randint(0, 83, (2, 90), generator=torch.Generator().manual_seed(2))
    first = continuation_nll(model, state, more)  # longer than the buffer's spare room
    greedy(model, state, 100)
    def broken(layer, q, k, v, *, q_start, scale): raise RuntimeError("broken")
    broken.stats = {}
    with pytest.raises(RuntimeError, match="broken"): continuation_nll(model, state, more, policy=broken)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(layer.keys, k) for layer, k in zip(state.cache.layers, keys, strict=True))
    assert torch.equal(continuation_nll(model, state, more), first)


def test_evicted_cache_keeps_positions(model, ids):
    """After dropping keys the next token still stands at position T: equal to the whole sequence with those keys masked."""
    state = chunked_prefill(model, ids[:, :40], 16, None)
    gone = torch.tensor([3, 4, 17])
    kept = torch.tensor([i for i in range(40) if i not in gone])
    for layer in state.cache.layers: layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    nll = continuation_nll(model, state, ids[:, 40:50])

    class Masked(Dense):  # the same drop by masking, rows after the prompt only
        def __call__(self, layer, q, k, v, *, q_start, scale):
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(q_start)
            mask[40 - q_start if q_start < 40 else 0:, gone] = False
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    logits = chunked_prefill(model, ids[:, :40], 16, None).logits
    masked = continuation_nll(model, chunked_prefill(model, ids[:, :40], 40, None), ids[:, 40:50], policy=Masked())
    assert (nll - masked).abs().max() <= 1e-4 and (state.logits - logits).abs().max() <= 1e-4
    full = continuation_nll(model, chunked_prefill(model, ids[:, :40], 40, None), ids[:, 40:50])
    assert (nll - full).abs().max() > 1e-3  # the drop is felt


def test_greedy_equals_generate(model, ids):
    state = chunked_prefill(model, ids, 16, None)
    free = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 61:]
    assert torch.equal(greedy(model, state, 15), free) and torch.equal(greedy(model, state, 15, policy=Dense()), free)
    assert greedy(model, state, 1).shape == (2, 1)
    ends = [int(free[0, 2]), int(free[1, 4])]
    out = greedy(model, state, 15, eos=ends)
    for row, ref in zip(out, free):
        stop = next(i for i, t in enumerate(ref.tolist()) if t in ends)
        assert torch.equal(row[:stop + 1], ref[:stop + 1]) and (row[stop:] == ref[stop]).all()
    assert out.shape[1] <= 15


@pytest.mark.parametrize("call, name", [
    (lambda m, x: chunked_prefill(m, x[0], 4, None), "ids"), (lambda m, x: chunked_prefill(m, x.float(), 4, None), "ids"), (lambda m, x: chunked_prefill(m, x[:, :0], 4, None), "ids"),
    (lambda m, x: chunked_prefill(m, x, 0, None), "chunk"), (lambda m, x: chunked_prefill(m, x, 4.0, None), "chunk"),
    (lambda m, x: greedy(m, chunked_prefill(m, x, 61, None), 0), "max_new"), (lambda m, x: continuation_nll(m, chunked_prefill(m, x, 61, None), x[0]), "ids")])
def test_bad_input_names_the_argument(model, ids, call, name):
    with pytest.raises(ValueError, match=name): call(model, ids)


def test_policy_with_wrong_shape_is_named(model, ids):
    class Short(Dense):
        def __call__(self, layer, q, k, v, *, q_start, scale): return q[..., :4]
    with pytest.raises(ValueError, match=r"Short returned \(2, 6, 16, 4\).*layer 0"): chunked_prefill(model, ids, 16, Short())
    assert model.config._attn_implementation == "sdpa"


def test_memory_grows_with_the_chunk_not_with_the_square(model):
    def peak(T, chunk, policy):
        with LiveBytes() as meter: chunked_prefill(model, torch.zeros(1, T, dtype=torch.long), chunk, policy)
        return meter.peak
    for policy in (None, Dense()):
        assert peak(512, 16, policy) < 2.2 * peak(256, 16, policy)
        assert peak(256, 16, policy) < peak(256, 64, policy) < peak(256, 256, policy)
    model.config._attn_implementation = "eager"  # forms T x T weights when the chunk is T
    try: assert peak(512, 512, None) > 3.5 * peak(256, 256, None) and peak(512, 16, None) < 2.2 * peak(256, 16, None)
    finally: model.config._attn_implementation = "sdpa"


def test_live_bytes():
    with LiveBytes() as meter:
        a = torch.zeros(100, 10)
        b = (a.t() + 1).relu_()
        del a
        assert meter.live == 4000
        del b
        c = torch.zeros(250)
    assert (meter.live, meter.peak) == (1000, 8000) and c.numel() == 250


def test_smollm2():
    """The real model: dense policy and own attention agree with one pass; the state serves twice."""
    net, tokenizer = load_lm()
    ids = tokenizer("One two three four five six seven eight nine ten. " * 9, return_tensors="pt").input_ids[:, :100]
    with torch.no_grad(): expected = net(ids).logits[:, -1]
    for policy in (None, Dense()):
        state = chunked_prefill(net, ids, 48, policy)
        assert (state.logits - expected).abs().max() <= 1e-3 and tokenizer.decode(greedy(net, state, 2)[0]).strip()
