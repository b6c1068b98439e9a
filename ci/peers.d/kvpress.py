"""kvpress against compact_attention's samples: answer likelihood after evicting keys, at stated shares of KV read.

    python kvpress.py samples FILE   in the project's environment: write the samples as token ids
    python kvpress.py answers FILE   in the peer's environment: answer them, write peer.kvpress.json beside the paper

Protocol: question in the window. The prompt ends with the question and is prefilled whole and densely; the press then drops
keys and values once, per layer and KV head; the gold answer is read token by token over what is left. So the share
read concerns the answer's tokens, not the prefill, and the answer's first token is predicted before anything is dropped.
"""
import hashlib
import json
import math
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]  # this file is named like the package it drives

TARGET = ROOT / "nbs/efficient_inference/compact_attention/peer.kvpress.json"
TASKS, LENGTH, N, SEED = ("niah_single_1", "niah_single_2"), 1024, 8, 0  # as in 91_accuracy at `small`
CHUNKS = (256, 1024)  # ChunkPress's length; 1024 holds the whole prompt
WINDOWS = (16, 64)  # SnapKV's observation window; 64 is the package's default
KEPT = (0.25, 0.5, 0.75)  # share of the prompt's keys and values that stays
TOLERANCE = 1e-3  # nats a token: dense here against dense there


def digest(ids): return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def write_samples(file: Path) -> None:
    "The same samples as the notebooks draw, and their dense likelihood in the project's environment."
    import torch

    from neurips26_lit.core.models import SHIPPED, converted, load_lm
    from neurips26_lit.efficient_inference.prefill import chunked_prefill
    from neurips26_lit.efficient_inference.ruler import answer_nll, gold_ids, sample_ids, suite

    model, tokenizer = load_lm()
    rows = []
    for i, sample in enumerate(suite(TASKS, (LENGTH,), N, tokenizer=tokenizer, seed=SEED)):
        ids, gold = sample_ids(tokenizer, sample), gold_ids(tokenizer, sample)
        nll = answer_nll(model, tokenizer, sample, state=chunked_prefill(model, ids, 256, None))
        rows.append({"id": f"{sample.task}/{LENGTH}/{1000 * SEED + i % N}", "task": sample.task, "seed": 1000 * SEED + i % N, "ids": ids[0].tolist(), "gold": gold[0].tolist(), "dense_ours": nll})
        print(f"samples {i + 1}/{len(TASKS) * N}: {rows[-1]['id']} dense answer NLL {nll:.4f}", flush=True)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__.split("+")[0], "transformers": version("transformers"), SHIPPED["smollm2"].package: version(SHIPPED["smollm2"].package)}
    file.write_text(json.dumps({"model": str(converted("smollm2")), "versions": versions, "samples": rows}))


def copy_of(keys, values):
    "A cache with one layer's keys and values each."
    from transformers import DynamicCache
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)): cache.update(k.clone(), v.clone(), layer)
    return cache


def read_answer(model, logits, cache, gold, start):
    "Mean negative log-likelihood of the gold tokens, read one by one; the first new position is `start`."
    import torch
    total = 0.0
    for i, token in enumerate(gold):
        total -= float(logits.float().log_softmax(-1)[token])
        if i + 1 < len(gold):
            at = torch.tensor([start + i])
            logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=at[None], cache_position=at, use_cache=True).logits[0, -1]
    return total / len(gold)


def compressed(model, ids, presses):
    "One dense prefill; every press's keys and values, from its own `compress`, which runs after the layer and changes nothing in it."
    import torch
    from transformers import DynamicCache
    kept = {name: ([], []) for name in presses}

    def hook(module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for name, press in presses.items():
            k, v = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)
            kept[name][0].append(k), kept[name][1].append(v)

    handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    try: logits = model(torch.tensor([ids]), past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits[0, -1]
    finally: [handle.remove() for handle in handles]
    return logits, kept


def by_context_manager(model, ids, gold, press):
    "The peer's own way of use, for the cross-check: one prefill within `press(model)`."
    import torch
    from transformers import DynamicCache
    cache = DynamicCache()
    with press(model): logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return read_answer(model, logits, cache, gold, len(ids))


def write_answers(file: Path) -> None:
    "Answer the samples with every press; refuse to write when dense attention disagrees between the environments."
    import torch
    from kvpress import ChunkPress, KeyDiffPress, SnapKVPress
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    asked = json.loads(file.read_text())
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    kinds = {**{f"SnapKV window {w}": (SnapKVPress, {"window_size": w}) for w in WINDOWS}, "KeyDiff": (KeyDiffPress, {})}
    methods, presses = {}, {}
    for (kind, (press, options)), chunk, kept in product(kinds.items(), CHUNKS, KEPT):
        name = f"{kind}/chunk {chunk}/keep {kept}"
        methods[name] = {"press": press.__name__, **options, "chunk_length": chunk, "kept": kept}
        presses[name] = ChunkPress(press=press(compression_ratio=1 - kept, **options), chunk_length=chunk)
    for press in presses.values(): press.post_init_from_model(model)
    for layer in model.model.layers: layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress's context manager does
    rows, routes = [], []
    with torch.no_grad():
        for i, sample in enumerate(asked["samples"]):
            ids, gold = sample["ids"], sample["gold"]
            logits, kept = compressed(model, ids, {**presses, "dense": ChunkPress(press=KeyDiffPress(compression_ratio=0.0))})
            nll = {name: read_answer(model, logits, copy_of(*kv), gold, len(ids)) for name, kv in kept.items()}
            for name, method in methods.items():
                method.setdefault("kv_read", []).append(sum(k.shape[2] for k in kept[name][0]) / len(kept[name][0]) / len(ids))
            if i % N == 0: routes += [abs(by_context_manager(model, ids, gold, presses[name]) - nll[name]) for name in methods if name.endswith("keep 0.5")]
            rows.append({"id": sample["id"], "task": sample["task"], "seed": sample["seed"], "n_tokens": len(ids), "ids_digest": digest(ids), "dense_ours": sample["dense_ours"], "nll": nll})
            print(f"answers {i + 1}/{len(asked['samples'])}: {sample['id']} dense {nll['dense']:.4f}", *(f"{name.split('/')[0]} {nll[name]:.2f}" for name in methods if "1024/keep 0.5" in name), flush=True)
    worst = max(abs(r["nll"]["dense"] - r["dense_ours"]) for r in rows)
    if not worst <= TOLERANCE: raise SystemExit(f"ci/peers: dense answer NLL differs by {worst:.2e} nats between the environments, more than {TOLERANCE:g}; nothing was written")
    if not max(routes) <= 1e-5: raise SystemExit(f"ci/peers: one prefill for all presses and kvpress's context manager differ by {max(routes):.2e} nats; nothing was written")
    for m in methods.values(): m["kv_read"] = round(sum(m["kv_read"]) / len(m["kv_read"]), 4)
    report = {"peer": "kvpress", "protocol": "question in the window: dense prefill of the whole prompt, one eviction per layer and KV head, then the gold answer token by token; "
                                             "kv_read is the share of the prompt's keys and values that the answer's tokens read",
              "model": "SmolLM2-135M-Instruct, float32 from Q4_1", "length": LENGTH,
              "versions": {"ours": asked["versions"], "peer": {"kvpress": version("kvpress"), "torch": torch.__version__.split("+")[0], "transformers": version("transformers")}},
              "cross_check": {"dense_difference": worst, "tolerance": TOLERANCE, "context_manager_difference": max(routes)},
              "methods": methods, "samples": rows}
    rounded = lambda x: round(x, 6) if isinstance(x, float) and math.isfinite(x) and abs(x) > 1e-3 else x
    walk = lambda x: {k: walk(v) for k, v in x.items()} if isinstance(x, dict) else [walk(v) for v in x] if isinstance(x, list) else rounded(x)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    beside = TARGET.with_suffix(".json.new")
    beside.write_text(json.dumps(walk(report), indent=1) + "\n")
    beside.replace(TARGET)
    print(f"wrote {TARGET.relative_to(ROOT)}; dense agrees to {worst:.1e} nats a token")
    for name, m in methods.items():
        gaps = [r["nll"][name] - r["nll"]["dense"] for r in rows]
        print(f"{name:36} reads {m['kv_read']:.3f} of the prompt, gap to dense {sum(gaps) / len(gaps):+.3f} nats a token")


if __name__ == "__main__":
    steps = {"samples": write_samples, "answers": write_answers}
    if len(sys.argv) != 3 or sys.argv[1] not in steps: raise SystemExit("usage: kvpress.py samples FILE | kvpress.py answers FILE")
    steps[sys.argv[1]](Path(sys.argv[2]))
