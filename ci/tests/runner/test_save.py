"""--save: clean, stamped outputs of a small run, or nothing."""

import base64
import io
import json

import pytest
from checkout import PARAMETERS, Checkout, notebook, record
from PIL import Image

from neurips26_lit.core.reproduce import RunError, stamped
from neurips26_lit.core.structure import check, fresh_stamps

FIGURE = """import io
from IPython.display import display, Image
from PIL import Image as Picture, ImageDraw
picture = Picture.new('RGB', (1200, 800), 'white')
for i in range(40): ImageDraw.Draw(picture).ellipse((i * 20, i * 11, i * 20 + 500, i * 11 + 300), outline=(5 * i, 200 - 3 * i, 90), width=4)
buffer = io.BytesIO(); picture.resize((600, 400)).save(buffer, 'PNG')
Image(buffer.getvalue())"""


def test_small_outputs_go_back_clean_and_stamped(checkout: Checkout):
    claims = "[{id: it, says: it is so, kind: value, check: {small: 'high < 1'}}]"
    noisy = "import sys, warnings\nprint('shown')\nprint('hidden', file=sys.stderr)\nprint(object())"
    widget = "display({'application/vnd.jupyter.widget-view+json': {'model_id': 'x'}, 'text/plain': 'Slider()'}, raw=True)"
    folder = checkout.paper("toy", {"01_method": notebook(noisy, FIGURE, widget), "90_reproduce": notebook(PARAMETERS, record("it", 0.5, 0.4, 0.6), "print(scale)")}, claims=claims)
    assert not (folder / "claims.small.json").exists()
    result = checkout.run("reproduce", "toy", "--scale", "small", "--save")
    assert result.code == 0, result.err
    assert "saved 3 files into nbs/" in result.out and "holds" in result.out
    evidence = json.loads((folder / "claims.small.json").read_text())
    assert evidence["scale"] == "small" and evidence["claims"][0]["verdict"] == "holds"

    text = (folder / "01_method.ipynb").read_text()
    nb = json.loads(text)
    assert text == json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    stamp = nb["metadata"].pop("neurips26")
    assert set(nb["metadata"]) == {"kernelspec"} and stamp["scale"] == "small" and stamp["seed"] == 0 and "python" in stamp["versions"] and len(stamp["code_hash"]) == 16
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    assert code[0]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["shown\n", "<object object>\n"]}]
    picture = base64.b64decode(code[1]["outputs"][0]["data"]["image/png"])
    assert code[2]["outputs"] == [] and all(c["execution_count"] is None and set(c["metadata"]) <= {"tags"} for c in code)
    raw = json.loads((checkout.runs("toy", "small") / "01_method.ipynb").read_text())["cells"][2]["outputs"][0]["data"]["image/png"]
    assert Image.open(io.BytesIO(picture)).mode == "P" and len(picture) < 0.6 * len(base64.b64decode(raw))
    measured = json.loads((folder / "90_reproduce.ipynb").read_text())
    assert [c["metadata"].get("tags") for c in measured["cells"] if c["metadata"].get("tags")] == [["parameters"]], "papermill's cell must not be saved"
    assert measured["cells"][-1]["outputs"][0]["text"] == ["small\n"]

    # saving changed no code: nothing is stale, and the structure check agrees
    assert "executed 0 of 2, skipped 2" in checkout.run("reproduce", "toy", "--scale", "small").out
    assert [p for p in check(checkout.root, (fresh_stamps,))] == []
    changed = folder / "01_method.ipynb"
    changed.write_text(changed.read_text().replace("print('shown')", "print('other')"))
    assert any("stale" in str(p) for p in check(checkout.root, (fresh_stamps,)))
    rows = json.loads(checkout.run("report", "toy", "--json").out)
    assert [(r["scale"], r["source"], r["verdict"]) for r in rows] == [("small", "run", "holds"), ("small", "committed", "holds")]


def test_nothing_is_saved_when_something_is_wrong(checkout: Checkout):
    good = notebook("print('good')")
    folders = [checkout.paper("toy", {"01_good": good, "02_leak": notebook("1 + 1", "import os\nprint('read from', os.getcwd() + '/x')")}),
               checkout.paper("bad", {"01_bad": notebook("1 / 0")})]
    before = {p: p.read_bytes() for folder in folders for p in folder.glob("*.ipynb")}
    found = checkout.run("reproduce", "toy", "bad", "--scale", "small", "--save")
    assert found.code == 1 and "FAILED bad/01_bad, cell 2, line 1: ZeroDivisionError" in found.error
    found = checkout.run("reproduce", "toy", "--scale", "small", "--save")
    assert found.code == 1 and f"toy/02_leak, cell 3: its output holds a path of this machine ({checkout.root})" in found.error
    assert before == {p: p.read_bytes() for p in before} and not list((checkout.root / "nbs").rglob("claims.small.json"))


def test_a_notebook_that_would_be_too_large():
    source, executed = notebook("1", "2"), notebook("1", "2")
    executed["cells"][2]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x" * 400_000}]
    with pytest.raises(RunError, match="toy: 40. KB with outputs, at most 300 allowed: draw smaller figures; the largest is cell 3 with 40. KB"): stamped(source, executed, {}, "toy")
    executed["cells"][2]["source"] = "3"
    with pytest.raises(RunError, match="the notebook changed while it ran"): stamped(source, executed, {}, "toy")
