"""The real tree passes (its own step in ci/test shows that); here each kind of mistake is planted into a copy of it."""

import json
import shutil

import pytest

from neurips26_lit.core import structure
from neurips26_lit.core.structure import check, code_hash

LIGHT = (structure.one_module_one_notebook, structure.parameters_cells, structure.notebook_form, structure.fresh_stamps, structure.paper_files)


@pytest.fixture
def tree(root, tmp_path):
    for folder in ("nbs", "neurips26_lit", "kernels"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(root / "settings.ini", tmp_path)
    return tmp_path


def edit(path, change):
    nb = json.loads(path.read_text())
    change(nb)
    path.write_text(json.dumps(nb))


def new(tree, look, before=()):
    return [str(p) for p in check(tree, (look,)) if str(p) not in before]


def test_a_second_notebook_for_one_module(tree):
    shutil.copy(tree / "nbs/core/02_scale.ipynb", tree / "nbs/core/99_again.ipynb")
    assert any("default_exp core.scale is also exported" in p for p in new(tree, structure.one_module_one_notebook))


def test_a_module_without_a_notebook(tree):
    (tree / "nbs/core/02_scale.ipynb").unlink()
    assert any("scale.py: no notebook has default_exp core.scale" in p for p in new(tree, structure.one_module_one_notebook))


def test_a_hand_edited_module(tree):
    file = tree / "neurips26_lit/core/scale.py"
    file.write_text(file.read_text().replace("unknown scale", "odd scale"))
    (problem,) = new(tree, structure.export_in_sync)
    assert problem.startswith("neurips26_lit/core/scale.py: differs from nbs/core/02_scale.ipynb") and "odd scale" in problem


def test_a_lost_tag(tree):
    path = tree / "nbs/efficient_inference/compact_attention/90_reproduce.ipynb"
    edit(path, lambda nb: [c["metadata"].pop("tags", None) for c in nb["cells"]])
    assert any("90_reproduce.ipynb: expected exactly one cell tagged `parameters`, found 0" in p for p in new(tree, structure.parameters_cells))


def test_stale_outputs(tree):
    path = tree / "nbs/core/02_scale.ipynb"
    assert not any("02_scale" in p for p in new(tree, structure.fresh_stamps))
    edit(path, lambda nb: next(c for c in nb["cells"] if c["cell_type"] == "markdown").update(source="# Another title"))
    assert not any("02_scale" in p for p in new(tree, structure.fresh_stamps)), "prose may change"
    edit(path, lambda nb: next(c for c in nb["cells"] if c["cell_type"] == "code").update(source="x = 2"))
    assert any("02_scale.ipynb: outputs are stale" in p for p in new(tree, structure.fresh_stamps))


def test_an_unstamped_notebook(tree):
    edit(tree / "nbs/core/02_scale.ipynb", lambda nb: nb["metadata"].pop("neurips26"))
    assert any("02_scale.ipynb: outputs are not stamped" in p for p in new(tree, structure.fresh_stamps))


def test_a_machine_path_an_error_and_a_broken_file(tree):
    where = "/" + "home/somebody/data.csv"
    edit(tree / "nbs/core/02_scale.ipynb", lambda nb: nb["cells"][0].update(source=f"# Title\n{where}"))
    edit(tree / "nbs/core/03_ledger.ipynb", lambda nb: next(c for c in nb["cells"] if c["cell_type"] == "code").update(outputs=[{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]))
    (tree / "nbs/core/05_figures.ipynb").write_text('{"cells": [')
    found = new(tree, structure.notebook_form)
    assert any("02_scale.ipynb:1: holds a machine's path" in p for p in found)
    assert any("03_ledger.ipynb" in p and "holds an error output" in p for p in found)
    assert any("05_figures.ipynb:1: not valid JSON" in p for p in found)


def test_a_forged_verdict(tree):
    file = tree / "nbs/efficient_inference/compact_attention/claims.small.json"
    data = json.loads(file.read_text())
    row = next(r for r in data["claims"] if r["verdict"] == "holds")
    row["verdict"] = "fails"
    file.write_text(json.dumps(data))
    assert any(f"claim {row['id']!r} says 'fails' but its numbers give 'holds'" in p for p in new(tree, structure.paper_files))


def test_an_exact_claim_that_fails(tree):
    file = tree / "nbs/efficient_inference/compact_attention/claims.small.json"
    data = json.loads(file.read_text())
    next(r for r in data["claims"] if r["id"] == "preserves").update(value=1.0, verdict="fails")
    file.write_text(json.dumps(data))
    assert any("exact claim 'preserves' fails" in p for p in new(tree, structure.paper_files))


def test_hash_ignores_prose_and_injected_cells():
    code = {"cell_type": "code", "source": ["a = 1\n", "b = 2"], "metadata": {}}
    base = code_hash({"cells": [code]})
    assert base == code_hash({"cells": [{"cell_type": "markdown", "source": "x", "metadata": {}}, dict(code, source="a = 1\nb = 2\n")]})
    assert base == code_hash({"cells": [dict(code, source="scale = 1", metadata={"tags": ["injected-parameters"]}), code]})
    assert base != code_hash({"cells": [dict(code, source="a = 1\nb = 3")]})
