"""A paper runs, its claims are merged, and afterwards only what changed runs again."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from checkout import PARAMETERS, Checkout, count, notebook, record

CLAIMS = """[{id: small_gap, says: the gap is small, kind: value, paper_value: 0.1, unit: points, at: a big model, check: {small: 'high < 0.5'}},
  {id: faster, says: it is faster, kind: direction, check: {small: 'low > 1'}}]"""


@pytest.fixture
def toy(checkout: Checkout) -> Checkout:
    "A paper of four notebooks, one of which imports a module that imports another."
    checkout.module("toys.deep", "def depth(): return 3\n")
    checkout.module("toys.toy.method", "from ..deep import depth\ndef twice(x): return 2 * x + depth()\n")
    checkout.paper("toy", claims=CLAIMS, notebooks={
        "00_overview": notebook(count("00"), "1 + 1"),
        "01_method": notebook(count("01"), "from neurips26_lit.toys.toy.method import twice\ntwice(4)"),
        "90_reproduce": notebook(PARAMETERS, count("90"), record("small_gap", 0.2, 0.1, 0.3), "print(scale, seed, device, os.environ['OMP_NUM_THREADS'], os.environ['NEURIPS26_NOTEBOOK'])"),
        "91_more": notebook(PARAMETERS, count("91"), record("faster", 1.1, 0.8, 1.4))})
    return checkout


def test_a_paper_runs_and_only_changes_run_again(toy: Checkout):
    first = toy.run("reproduce", "toy", "--cores", "2", "--seed", "3")
    assert first.code == 0, first.err
    assert "executed 4 of 4, skipped 0" in first.out and sorted(toy.ran) == ["00", "01", "90", "91"]
    assert "0.2 [0.1, 0.3]" in first.out and "0.1 points (a big model)" in first.out and "not judged" in first.out
    for name in ("00_overview", "01_method", "90_reproduce", "91_more"):
        assert f"toy/{name}: started" in first.out and re.search(rf"toy/{name}: finished after [\d.]+ s, \d+ MB", first.out)

    folder = toy.runs("toy")
    claims = json.loads((folder / "claims.json").read_text())
    assert claims["paper"] == "toy" and claims["seed"] == 3 and [c["value"] for c in claims["claims"]] == [0.2, 1.1]
    merged = json.loads((folder / "run.json").read_text())
    assert set(merged["notebooks"]) == toy.outputs("toy") == {"00_overview", "01_method", "90_reproduce", "91_more"}
    row = merged["notebooks"]["90_reproduce"]
    assert row["parameters"] == {"scale": "smoke", "seed": 3, "device": "cpu"} and row["seconds"] > 0 and row["peak_mb"] > 20 and row["exception"] is None
    assert {"commit", "dirty", "locks", "versions", "started"} <= set(row) and len(row["locks"]) == 16
    assert "smoke 3 cpu 1 90_reproduce" in (folder / "90_reproduce.ipynb").read_text()
    assert (folder / "run.d" / "90_reproduce.benchmark.tsv").exists()

    # nothing changed; then everything was touched, prose and outputs edited, a comment added to a module
    toy.forget()
    again = toy.run("reproduce", "toy", "--seed", "3")
    assert again.code == 0 and "executed 0 of 4, skipped 4" in again.out and again.out.count("unchanged since") == 4
    for file in (toy.root / "nbs").rglob("*"): os.utime(file)
    path = toy.root / "nbs" / "toys" / "toy" / "01_method.ipynb"
    nb = json.loads(path.read_text())
    nb["cells"][0]["source"] = "# Another title"
    nb["cells"][1]["source"] += "\n"
    nb["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "old\n"}]
    path.write_text(json.dumps(nb))
    deep = toy.root / "neurips26_lit" / "toys" / "deep.py"
    deep.write_text("# a comment\ndef depth():\n    return 3\n")
    assert "executed 0 of 4, skipped 4" in toy.run("reproduce", "toy", "--seed", "3").out and toy.ran == []

    # a module two imports away changed, and one notebook's code
    deep.write_text("def depth(): return 5\n")
    path = toy.root / "nbs" / "toys" / "toy" / "91_more.ipynb"
    path.write_text(path.read_text().replace("1.1, 0.8", "1.6, 1.2").replace("1.4, n", "2.0, n"))
    changed = toy.run("reproduce", "toy", "--seed", "3")
    assert changed.code == 0 and "executed 2 of 4, skipped 2" in changed.out and sorted(toy.ran) == ["01", "91"]
    assert "13" in (folder / "01_method.ipynb").read_text()
    assert [c["value"] for c in json.loads((folder / "claims.json").read_text())["claims"]] == [0.2, 1.6]

    # another seed concerns only notebooks with parameters; the engine alone, without the command line, agrees
    toy.forget()
    command = [sys.executable, "-m", "snakemake", "-s", "ci/Snakefile", "--directory", "runs", "--profile", "ci/profiles/local", "--cores", "2", "--config", "targets=toy", "seed=4"]
    direct = subprocess.run(command, cwd=toy.root, env=toy.env, capture_output=True, text=True, timeout=240, check=False)
    assert direct.returncode == 0, direct.stderr
    assert sorted(toy.ran) == ["90", "91"]
    assert "executed 0 of 4, skipped 4" in toy.run("reproduce", "toy", "--seed", "4").out

    # a damaged result is not a result
    whole = (folder / "01_method.ipynb").read_bytes()
    (folder / "01_method.ipynb").write_bytes(whole[: len(whole) // 2])
    toy.forget()
    assert "executed 1 of 4" in toy.run("reproduce", "toy", "--seed", "4").out and toy.ran == ["01"]
    assert toy.record("toy", "01_method")["state"] == "done"

    # report: the numbers of the run, with the verdict under today's checks
    rows = json.loads(toy.run("report", "toy", "--json").out)
    assert [(r["id"], r["scale"], r["value"], r["low"], r["high"], r["n"], r["verdict"], r["paper_value"]) for r in rows] == [
        ("small_gap", "smoke", 0.2, 0.1, 0.3, 5, "not judged", 0.1), ("faster", "smoke", 1.6, 1.2, 2.0, 5, "not judged", None)]
    yml = toy.root / "nbs" / "toys" / "toy" / "paper.yml"
    yml.write_text(yml.read_text().replace("{small: 'low > 1'}", "{small: 'low > 1', paper: {needs: gpu}}"))
    page = toy.run("report", "--html").out
    assert page.startswith("<!doctype html>") and "1.6 [1.2, 2]" in page and "0.1 points (a big model)" in page
    assert "1.6 [1.2, 2]" in toy.run("report").out


def test_training_notebooks_come_first_and_shared_notebooks_are_targets(checkout: Checkout):
    checkout.paper("toy", {"80_train": notebook(PARAMETERS, count("80"), "import time; time.sleep(1)"), "90_reproduce": notebook(PARAMETERS, count("90")),
                           "01_method": notebook(count("01"))})
    checkout.write("toys/01_shared", notebook(count("shared")))
    checkout.write("core/01_base", notebook(count("core")))
    checkout.write("index", notebook(count("home")))
    checkout.paper("later", {}, status="planned")
    result = checkout.run("reproduce", "--all", "--cores", "3")
    assert result.code == 0, result.err
    assert "executed 6 of 6, skipped 0" in result.out and sorted(checkout.ran) == ["01", "80", "90", "core", "home", "shared"]
    assert checkout.ran.index("80") < checkout.ran.index("90")
    assert (checkout.root / "runs" / "smoke" / "index.ipynb").exists() and (checkout.root / "runs" / "smoke" / "toys" / "01_shared.ipynb").exists()

    # the measuring notebook is stale with its training, and waits for it; a training that fails is the reason in its row
    path = checkout.root / "nbs" / "toys" / "toy" / "80_train.ipynb"
    path.write_text(path.read_text().replace("time.sleep(1)", "1 / 0"))
    checkout.forget()
    result = checkout.run("reproduce", "toy", "core", "--cores", "3")
    assert result.code == 1 and checkout.ran == ["80"]
    assert "executed 0 of 4, skipped 3, failed 1" in result.out and "needs 80_train, which failed" in result.out
    assert result.error.startswith("FAILED toy/80_train, cell 4, line 1: ZeroDivisionError: division by zero")


def test_a_notebook_edited_while_it_runs(checkout: Checkout):
    "What ran counts for the table of this run; the next run sees that it is stale."
    edit = "path = pathlib.Path(os.environ['NEURIPS26_HOME']) / 'nbs/toys/toy/90_reproduce.ipynb'\npath.write_text(path.read_text().replace('0.6, 0.5', '0.7, 0.5'))"
    checkout.paper("toy", {"90_reproduce": notebook(PARAMETERS, count("90"), record("it", 0.6, 0.5, 0.8), edit)})
    first = checkout.run("reproduce", "toy")
    assert first.code == 0 and "executed 1 of 1" in first.out and "0.6 [0.5, 0.8]" in first.out
    second = checkout.run("reproduce", "toy")
    assert second.code == 0 and "executed 1 of 1" in second.out and "0.7 [0.5, 0.8]" in second.out
    assert "executed 0 of 1" in checkout.run("reproduce", "toy").out


def test_a_terminal_gets_live_bars(checkout: Checkout):
    checkout.write("core/01_base", notebook("for i in range(9): print('epoch', i)\nimport time; time.sleep(2.5)", "2 + 2"))
    main, sub = pty.openpty()
    process = checkout.start("reproduce", "core", stdout=sub, stderr=sub)
    os.close(sub)
    seen = b""
    while True:
        try: part = os.read(main, 4096)
        except OSError: break
        if not part: break
        seen += part
    os.close(main)
    assert process.wait(20) == 0
    text = seen.decode()
    assert "\x1b[" in text and "━" in text and "core/01_base" in text and "2/3" in text.replace("\x1b[0m", "") and "epoch 8" in text
    assert "executed 1 of 1" in text


def test_start_is_fast_and_light(checkout: Checkout):
    checkout.paper("toy", {"01_a": notebook("1")})
    code = "import sys\nfrom neurips26_lit.core.cli import main\ntry: main({})\nexcept SystemExit: pass\nassert not {{'torch', 'pandas', 'matplotlib', 'snakemake', 'papermill'}} & set(sys.modules), sorted(sys.modules)"
    for arguments in (["list"], ["show", "toy"], ["report"]):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], cwd=checkout.root, env=checkout.env, capture_output=True, text=True, check=False)
        after = os.times()
        assert done.returncode == 0, done.stderr
        assert "toy" in done.stdout
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        assert cpu < 2, f"{arguments} took {cpu:.1f} s of CPU time"


def test_list_filters(checkout: Checkout):
    checkout.paper("toy", {"01_a": notebook("1")}, more="keywords: [marbles]\n")
    checkout.paper("later", {}, status="planned")
    assert "2 papers, 1 built" in checkout.run("list").out
    assert "1 papers, 0 built" in checkout.run("list", "--status", "planned").out
    assert "toy" in checkout.run("list", "--keyword", "Marbles").out
