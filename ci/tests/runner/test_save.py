"""--save: clean, stamped outputs of a small run, or nothing."""

import json
from pathlib import Path

from checkout import PARAMETERS, Checkout, notebook, record

FIGURE = """import base64, io, random
from IPython.display import display, HTML, Image
from PIL import Image as Picture
picture = Picture.new('RGB', (300, 200))
picture.putdata([(x % 256, (x // 300) % 256, (x * 7) % 256) for x in range(60000)])
buffer = io.BytesIO(); picture.save(buffer, 'PNG')
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
    picture = code[1]["outputs"][0]["data"]["image/png"]
    assert code[2]["outputs"] == [] and all(c["execution_count"] is None and set(c["metadata"]) <= {"tags"} for c in code)
    import base64
    import io

    from PIL import Image

    assert Image.open(io.BytesIO(base64.b64decode(picture))).mode == "P"
    measured = json.loads((folder / "90_reproduce.ipynb").read_text())
    assert [c["metadata"].get("tags") for c in measured["cells"] if c["metadata"].get("tags")] == [["parameters"]], "papermill's cell must not be saved"
    assert "small\n" in str(measured["cells"][-1]["outputs"][0]["text"]) or measured["cells"][-1]["outputs"][0]["text"] == ["small\n"]

    # saving changed no code: nothing is stale, and the structure check agrees
    assert "executed 0 of 2, skipped 2" in checkout.run("reproduce", "toy", "--scale", "small").out
    import sys

    from neurips26_lit.core.structure import check, fresh_stamps

    assert [p for p in check(checkout.root, (fresh_stamps,))] == []
    changed = folder / "01_method.ipynb"
    changed.write_text(changed.read_text().replace("shown", "shown again", 1))
    assert any("stale" in str(p) for p in check(checkout.root, (fresh_stamps,))) and sys.version
    rows = json.loads(checkout.run("report", "toy", "--json").out)
    assert [(r["scale"], r["source"], r["verdict"]) for r in rows] == [("small", "run", "holds"), ("small", "committed", "holds")]


def test_nothing_is_saved_when_something_is_wrong(checkout: Checkout):
    leak = notebook("1 + 1", "import os\nprint('read from', os.getcwd() + '/x')")
    wide = notebook("import random", "for i in range(400): print(random.Random(i).randbytes(500).hex())")
    good = notebook("print('good')")
    folder = checkout.paper("toy", {"01_good": good, "02_leak": leak})
    other = checkout.paper("wide", {"01_good": good, "02_wide": wide})
    third = checkout.paper("bad", {"01_good": good, "02_bad": notebook("1 / 0")})
    before = {p: p.read_bytes() for f in (folder, other, third) for p in f.glob("*.ipynb")}
    found = {slug: checkout.run("reproduce", slug, "--scale", "small", "--save") for slug in ("toy", "wide", "bad")}
    assert found["toy"].code == 1 and f"toy/02_leak, cell 3: its output holds a path of this machine ({checkout.root})" in found["toy"].error
    assert found["wide"].code == 1 and "wide/02_wide: " in found["wide"].error and "KB with outputs, at most 300 allowed" in found["wide"].error and "the largest is cell 3" in found["wide"].error
    assert found["bad"].code == 1 and "ZeroDivisionError" in found["bad"].error
    assert before == {p: p.read_bytes() for p in before} and not list(Path(checkout.root / "nbs").rglob("claims.small.json"))
