import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from neurips26_lit.core import catalog
from neurips26_lit.core.catalog import CatalogError, Check, Claim, Paper, areas, paper, papers, read_paper

GOOD = "slug: demo\narea: toys\ntitle: A demo\nsummary: A demo.\n"


def write(folder: Path, text: str, slug: str = "demo") -> Path:
    path = folder / "toys" / slug / "paper.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_paper_has_its_facts():
    found = papers()
    assert len(found) == 76 and len({p.slug for p in found}) == 76
    assert set(areas()) == {p.area for p in found} and len(areas()) == 9
    for p in found:
        assert p.title and 100 < len(p.summary) < 700 and 3 <= len(p.keywords) <= 8, p.slug
        assert (p.status != "planned") == bool(p.notebooks()), p.slug


@pytest.mark.parametrize("text, place", [
    (GOOD + "titel: x\n", "paper.yml:5: titel: unknown key"),
    (GOOD + "claims:\n  - {id: a, says: a, kind: exact}\n  - {id: a, says: b, kind: exact}\n", "paper.yml:7: claims.1.id: duplicate claim id 'a'"),
    (GOOD + "claims:\n  - {id: a, says: a, kind: sure}\n", "paper.yml:6: claims.0.kind"),
    (GOOD + "claims:\n  - id: a\n    says: a\n    kind: value\n    check:\n      small: value >< 3\n", "paper.yml:9: claims.0.check: check 'value >< 3'"),
    (GOOD + "claims:\n  - {id: a, says: a, kind: value, check: {smoke: value > 3}}\n", "smoke never judges"),
    (GOOD + "claims:\n  - {id: a, says: a, kind: value, check: {tiny: value > 3}}\n", "unknown scale 'tiny'"),
    (GOOD + "title: Again\n", "paper.yml:5"),
    (GOOD + "systems: [unclosed\n", "paper.yml:"),
    ("- a list\n", "expected a mapping"),
    ("", "expected a mapping"),
    (GOOD.replace("demo", "other", 1), "'other' stands in a folder named 'demo'"),
    (GOOD + "status: built\n", "a built paper states its claims"),
    (GOOD.replace("summary: A demo.\n", ""), "summary: Field required"),
])
def test_a_mistake_names_file_and_line(tmp_path, text, place):
    with pytest.raises(CatalogError) as e: read_paper(write(tmp_path, text))
    assert place in str(e.value) and "paper.yml:" in str(e.value)


def test_unknown_names_offer_close_ones():
    with pytest.raises(CatalogError, match="did you mean compact_attention"): paper("compact_atention")
    p = Paper(slug="p", area="a", title="t", summary="s", claims=[Claim(id="one", says="x", kind="exact")])
    with pytest.raises(CatalogError, match="unknown claim 'two'"): p.claim("two")


@pytest.mark.parametrize("text", ["value", "value <", "value < nan", "3 < value", "low >= 1 and high < 2", "", None, 3, {"needs": "gpus"}, {"needs": "model"}, {"need": "gpu"}])
def test_a_check_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError): Check.parse(text)


def test_an_edited_file_is_seen_at_once(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    path = write(tmp_path / "nbs", GOOD)
    monkeypatch.setenv("NEURIPS26_HOME", str(tmp_path))
    assert paper("demo").title == "A demo"
    path.write_text(GOOD.replace("A demo\n", "Another demo\n", 1))
    assert paper("demo").title == "Another demo"


def test_no_checkout_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURIPS26_HOME", str(tmp_path))
    with pytest.raises(CatalogError, match="run this inside a clone"): catalog.home()


def test_import_is_light(root):
    code = "import time; t = time.perf_counter(); import neurips26_lit; t = time.perf_counter() - t; import sys; print(t, 'torch' in sys.modules)"
    seconds, torch = min(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True).stdout.split() for _ in range(3))
    assert float(seconds) <= 0.3 and torch == "False"
    code = "import neurips26_lit.core.cli, sys; print([m for m in ('torch', 'pandas', 'matplotlib', 'snakemake', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True).stdout.strip() == "[]"


def test_the_wheel_carries_kernels_and_catalogue(root, tmp_path):
    source = tmp_path / "source"  # building in a copy leaves no build/ in the checkout
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
    for f in filter(None, files):
        if not (root / f).is_file(): continue
        (source / f).parent.mkdir(parents=True, exist_ok=True)
        (source / f).write_bytes((root / f).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = ("import neurips26_lit.kernels.paged_gqa, neurips26_lit.core.catalog as c; assert c._checkout() is None; print(len(c.papers()), len(c.areas()), neurips26_lit.__file__)")
    env = {k: v for k, v in os.environ.items() if k not in ("NEURIPS26_HOME", "TRITON_INTERPRET")} | {"PYTHONPATH": str(site)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split()[:2] == ["76", "9"] and str(site) in out.stdout
