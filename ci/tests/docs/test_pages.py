"""Pages are made from data and code: what they say is compared with what an independent route gives."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from neurips26_lit.core import docs
from neurips26_lit.core.docs import DocsError


def cell(source: str, kind: str = "code", **more) -> dict:
    made = {"cell_type": kind, "id": f"c{abs(hash(source)) % 10**8}", "metadata": {}, "source": source, **more}
    return made if kind == "markdown" else {"outputs": [], "execution_count": None, **made}


def write(path: Path, *cells: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    path.write_text(json.dumps({"cells": list(cells), "metadata": meta, "nbformat": 4, "nbformat_minor": 5}))


@pytest.fixture
def toy(tmp_path, monkeypatch, root) -> Path:
    "A small checkout with one built and one planned paper."
    checkout = tmp_path / "toy"
    (checkout / "nbs" / "toys" / "demo").mkdir(parents=True)
    for name in ("settings.ini", "_quarto.yml"): shutil.copy(root / name, checkout / name)
    shutil.copytree(root / "nbs" / "assets", checkout / "nbs" / "assets")
    (checkout / "nbs" / "images").mkdir()
    (checkout / "kernels").mkdir()
    (checkout / "neurips26_lit" / "toys").mkdir(parents=True)
    nbs = checkout / "nbs"
    (nbs / "toys" / "area.yml").write_text("name: toys\ntitle: Toys\nblurb: Small things.\norder: 1\n")
    demo = {"slug": "demo", "area": "toys", "title": "A demo & more", "summary": "It says little.", "keywords": ["toy"], "status": "built", "claims": [
        {"id": "right", "says": "One is less than two.", "paper_value": 1, "at": "everywhere", "kind": "direction", "check": {"small": "high < 2"}},
        {"id": "wrong", "says": "Three is less than two.", "paper_value": "1.9", "kind": "direction", "check": {"small": "high < 2"}, "analysis": "Three is more."},
        {"id": "large", "says": "It scales.", "kind": "value", "check": {"small": {"needs": "gpu"}}}]}
    (nbs / "toys" / "demo" / "paper.yml").write_text(yaml.safe_dump(demo))
    rows = [{"id": "right", "value": 1.0, "low": 0.5, "high": 1.5, "n": 7, "verdict": "fails", "note": ""}, {"id": "wrong", "value": 3.0, "low": 2.5, "high": 3.5, "n": 7, "verdict": "holds", "note": ""}]
    (nbs / "toys" / "demo" / "claims.small.json").write_text(json.dumps({"paper": "demo", "scale": "small", "seed": 0, "claims": rows}))
    (nbs / "toys" / "later").mkdir()
    (nbs / "toys" / "later" / "paper.yml").write_text(yaml.safe_dump({"slug": "later", "area": "toys", "title": "Not yet", "summary": "Soon.", "keywords": ["wait"], "status": "planned"}))
    write(nbs / "index.ipynb", cell("# Home\n\n> The toy home.", "markdown"), cell("See [the demo](toys/demo/00_overview.ipynb) and [Evidence](evidence.qmd).", "markdown"), cell("## Catalogue", "markdown"),
          cell("#| exec_doc\n#| include: false\nfrom neurips26_lit.core.docs import catalogue"), cell("#| exec_doc\n#| echo: false\ncatalogue()"))
    write(nbs / "core" / "00_architecture.ipynb", cell("# Built\n\n> So.", "markdown"))
    write(nbs / "toys" / "index.ipynb", cell("# Toys\n\n> Small.", "markdown"), cell("#| exec_doc\n#| echo: false\nfrom neurips26_lit.core.docs import area_papers\narea_papers('toys')"))
    write(nbs / "toys" / "demo" / "00_overview.ipynb", cell("# Demo: the overview\n\n> One sentence.", "markdown"), cell("An equation $x < \\sqrt{2}$.", "markdown"))
    monkeypatch.setenv("NEURIPS26_HOME", str(checkout))
    return checkout


class Ids(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.ids = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids |= {value for name, value in attrs if name == "id"}


# ---- the API reference

@pytest.mark.parametrize("module", ["core.ledger", "core.catalog", "core.stats", "core.scale", "core.docs", "core.structure"])
def test_signatures_are_the_interpreters(root, module):
    "Parameters and defaults read from the text are those that Python itself reports."
    live = importlib.import_module(f"neurips26_lit.{module}")
    functions = 0
    for symbol in docs.module_symbols(root / "neurips26_lit" / f"{module.replace('.', '/')}.py"):
        object_ = getattr(live, symbol.name)
        if symbol.kind != "function": continue
        functions += 1
        parameters = inspect.signature(object_).parameters
        assert [n.lstrip("*") for n, *_ in symbol.rows if n != "returns"] == list(parameters)
        assert {n.lstrip("*"): d != "" for n, _, d, _ in symbol.rows if n != "returns"} == {n: p.default is not inspect.Parameter.empty for n, p in parameters.items()}
    assert functions >= 2


def test_sidebar_tells_notebooks_apart(toy, root):
    for i, name in enumerate(("Measured: speed", "Measured: accuracy", "The table: a union")): write(toy / "nbs" / "toys" / "demo" / f"9{i}_x.ipynb", cell(f"# {name}\n\n> So.", "markdown"))
    (area,) = [e for e in docs.sidebar(toy) if e.get("section") == "Toys"]
    assert area["href"] == "toys/index.ipynb" and [e["text"] for e in area["contents"][0]["contents"]] == ["Overview", "Measured: speed", "Measured: accuracy", "The table"]


def test_every_exported_symbol_has_an_entry(root, site):
    "`__all__` of each module, read by executing that one line, against the anchors of its page."
    seen = 0
    for file in sorted((root / "neurips26_lit").rglob("*.py")):
        text = file.read_text()
        if file.name.startswith("_") or "__all__ = [" not in text: continue
        scope: dict = {}
        exec(text[text.index("__all__ = ["):text.index("]", text.index("__all__ = [")) + 1], scope)
        if not scope["__all__"]: continue
        name = ".".join(file.relative_to(root / "neurips26_lit").with_suffix("").parts)
        page = (site / "api" / f"{name}.html").read_text()
        missing = {n for n in set(scope["__all__"]) - Ids(page).ids if f'.html#{n}">' not in page}  # a name passed on links to its own module
        assert not missing, (name, missing)
        seen += 1
    assert seen >= 8


def test_shapes_are_on_the_page(site):
    page = (site / "api" / "efficient_inference.attention.html").read_text()
    assert "Float[Tensor, &#x27;B Hq Tq D&#x27;]" in page


# ---- catalogue, evidence, README

def test_catalogue_lists_every_paper_yml(root, site):
    files = sorted((root / "nbs").glob("*/*/paper.yml"))
    home = (site / "index.html").read_text()
    assert home.count('<li class="entry"') == len(files) >= 76
    for file in files:
        area = Ids((site / file.parent.parent.name / "index.html").read_text()).ids
        assert file.parent.name in area


def test_evidence_computes_its_verdicts(toy):
    "The recorded file has the two verdicts swapped: the page goes by the numbers."
    page = docs.evidence_page()
    rows = page.split("<tr>")[2:]
    assert "holds" in rows[0] and "fails" not in rows[0] and "1 [0.5, 1.5]" in rows[0] and "n = 7" in rows[0] and "everywhere" in rows[0]
    assert ">fails<" in rows[1] and "Three is more." in rows[1]
    assert "needs gpu" in rows[2] and "A demo &" in page


def test_kernels_page(toy):
    "The largest need per architecture is found, a benchmark shows its facts once, and a red gate shows no speed."
    folder = toy / "kernels"
    (folder / "square.py").write_text('"""Squares a vector.\\n\\nMore."""\ndef square(x): ...\n')
    rows = [{"kernel": "k", "config": c, "arch": a, "registers": r, "shared": s, "spills": p} for c, a, r, s, p in (("one", 80, 40, 128, 0), ("two", 80, 60, 64, 8), ("one", 90, 33, 256, 0))]
    (folder / "square.resources.json").write_text(json.dumps({"name": "square", "rows": rows}))
    bench = {"name": "square", "gpu": "Toy GPU", "commit": "abc", "gate": [{"ok": True}, {"ok": True}], "gate_passed": True, "rows": [{"gpu": "Toy GPU", "commit": "abc", "method": "ours", "ms": 1.25}]}
    (folder / "square.bench.toy.json").write_text(json.dumps(bench))
    page = docs.kernels_page(folder)
    assert "Squares a vector." in page and "More." not in page
    assert "<td>sm_80</td><td>2</td><td>60</td><td>128</td><td>8</td>" in page and "<td>sm_90</td><td>1</td><td>33</td><td>256</td><td>0</td>" in page
    assert "2 of 2 correctness cases pass." in page and "<td>ours</td><td>1.25</td>" in page and "commit abc" in page
    (folder / "square.bench.toy.json").write_text(json.dumps({**bench, "gate_passed": False, "gate": [{"ok": True}, {"ok": False}]}))
    page = docs.kernels_page(folder)
    assert "1 of 2 correctness cases pass, so no speed is reported" in page and "1.25" not in page


def test_planned_papers_link_to_their_row(toy):
    html = docs.catalogue().as_html
    assert 'href="toys/index.ipynb#later"' in html and 'href="toys/demo/00_overview.ipynb"' in html
    assert 'id="later"' in docs.area_papers("toys").as_html
    with pytest.raises(DocsError, match="unknown area 'nope'"): docs.area_papers("nope")


def test_readme_follows_the_home_notebook(toy):
    assert not docs.readme_is_current(toy)
    text = docs.make_readme(toy).read_text()
    assert docs.readme_is_current(toy)
    assert "[the demo](nbs/toys/demo/00_overview.ipynb) and Evidence." in text and "| [Toys](nbs/toys/index.ipynb) | 2 | [A demo & more](nbs/toys/demo/00_overview.ipynb) |" in text
    (toy / "nbs" / "index.ipynb").write_text((toy / "nbs" / "index.ipynb").read_text().replace("The toy home", "Another home"))
    assert not docs.readme_is_current(toy)


# ---- building

def test_toy_site(toy):
    lesson = toy / "nbs" / "toys" / "demo" / "01_method.ipynb"
    widget = {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "VBox(children=(SLIDER"}}
    write(lesson, cell("# The method\n\n> Short.", "markdown"), cell("#| default_exp toys.demo.method"), cell("#| hide\nsecret = 1"), cell("#| export\ndef double(\n    x: int,  # a number\n) -> int:  # twice\n    'Twice.'\n    return 2 * x"),
          cell("2 + 2", outputs=[{"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": {"text/plain": "4"}}, widget, {"output_type": "stream", "name": "stderr", "text": "100%|####|"}]), cell("x = 1  #| hide_line\ny = 2"))
    module = toy / "neurips26_lit" / "toys" / "demo" / "method.py"
    module.parent.mkdir(parents=True)
    module.write_text("# AUTOGENERATED! DO NOT EDIT! File to edit: ../../../nbs/toys/demo/01_method.ipynb.\n__all__ = ['double']\ndef double(\n    x: int,  # a number\n) -> int:  # twice\n    'Twice.'\n    return 2 * x\n")
    built = docs.build_docs()
    page = (built.folder / "toys" / "demo" / "01_method.html").read_text()
    for gone in ("secret", "default_exp", "SLIDER", "####", "hide_line", "#|"): assert gone not in page, gone
    assert 'id="def-double"' in page and "a number" in page and "api/toys.demo.method.html#double" in page
    overview = (built.folder / "toys" / "demo" / "00_overview.html").read_text()
    assert "<math" in overview and "katex" not in overview
    home = (built.folder / "index.html").read_text()
    assert 'href="toys/demo/00_overview.html"' in home and 'href="toys/index.html#later"' in home
    assert not list((toy / "_proc").iterdir())


@pytest.mark.parametrize("bad, message", [
    (cell("[gone](99_gone.ipynb)", "markdown"), "broken link 99_gone.ipynb"),
    (cell("[gone](../index.ipynb#nowhere)", "markdown"), "there is no such anchor"),
    (cell("![gone](gone.png)", "markdown"), "gone.png"),
    (cell("$\\frac{1$", "markdown"), "equation"),
    (cell("import math\n#| export\nx = 1"), "directive '#| export' is left"),
    (cell("#| exec_doc\n1 / 0"), "ZeroDivisionError"),
    (cell("```mermaid\ngraph LR\n```", "markdown"), "mermaid"),
    (cell("```{=html}\n<img src='https://elsewhere.example/x.png'>\n```", "markdown"), "loads https://elsewhere.example/x.png")])
def test_a_mistake_is_named_and_the_last_site_stays(toy, bad, message):
    good = docs.build_docs().folder
    before = {p.relative_to(good): p.stat().st_mtime_ns for p in good.rglob("*")}
    write(toy / "nbs" / "toys" / "demo" / "01_bad.ipynb", cell("# Bad\n\n> It is.", "markdown"), bad)
    with pytest.raises(DocsError) as error: docs.build_docs()
    assert message in str(error.value) and "01_bad" in str(error.value)
    assert {p.relative_to(good): p.stat().st_mtime_ns for p in good.rglob("*")} == before


@pytest.mark.parametrize("said, status", [("WARNING (main.lua): cannot resolve x", 0), ("it broke", 1)])
def test_quarto_is_used_when_installed_and_its_warnings_are_errors(toy, tmp_path, monkeypatch, said, status):
    "A stand-in for quarto: what it says decides."
    program = tmp_path / "bin" / "quarto"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\necho \"$@\" > {tmp_path}/called\ncp \"$2/_quarto.yml\" {tmp_path}/config.yml\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(DocsError, match=said.replace("(", "\\(").replace(")", "\\)")): docs.build_docs()
    assert (tmp_path / "called").read_text().startswith("render ") and "--no-execute" in (tmp_path / "called").read_text()
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    assert config["format"]["html"]["html-math-method"] == "mathml"
    assert config["website"]["sidebar"]["contents"][0] == {"text": "Home", "href": "index.ipynb"}


def test_out_is_never_a_folder_of_something_else(toy):
    (toy / "_docs").mkdir()
    (toy / "_docs" / "mine.txt").write_text("x")
    with pytest.raises(DocsError, match="isn't a built site"): docs.build_docs()
    assert (toy / "_docs" / "mine.txt").exists()
    with pytest.raises(DocsError, match="expected quarto or smalldocs"): docs.build_docs("elsewhere", renderer="latex")
