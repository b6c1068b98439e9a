"""The same command, with --profile slurm, runs every notebook as a job of a real SLURM and gives the same claims."""

import json
import os
import re
import signal

import pytest
from checkout import PARAMETERS, Checkout, count, notebook, processes_in, record, wait_for

pytestmark = pytest.mark.slurm

CLAIMS = "[{id: it, says: it is so, kind: value, check: {small: 'high < 1'}}, {id: more, says: there is more, kind: direction, check: {small: 'low > 0'}}]"
DRAW = "import random\nx = random.Random(seed).random() / 10"
WHERE = "print('job', os.environ.get('SLURM_JOB_ID'), 'threads', os.environ['OMP_NUM_THREADS'])"


def _paper(checkout: Checkout) -> None:
    weights = "(pathlib.Path(os.environ['NEURIPS26_RUN_DIR']) / 'weights.txt')"
    checkout.paper("toy", claims=CLAIMS, notebooks={
        "80_train": notebook(PARAMETERS, count("80"), DRAW, f"{weights}.write_text(str(x))"),
        "90_reproduce": notebook(PARAMETERS, count("90"), WHERE, f"x = float({weights}.read_text())", record("it", "x", "x - 0.1", "x + 0.1")),
        "91_more": notebook(PARAMETERS, count("91"), DRAW, record("more", "x", "x / 2", "2 * x"))})


def test_a_paper_on_slurm_gives_the_claims_of_a_local_run(checkout: Checkout, cluster, monkeypatch):
    for name, value in cluster.env.items(): monkeypatch.setenv(name, value)
    _paper(checkout)
    local = checkout.run("reproduce", "toy", "--seed", "5", "--cores", "2", "--out", "local")
    assert local.code == 0, local.err
    checkout.forget()
    there = checkout.run("reproduce", "toy", "--seed", "5", "--cores", "2", "--profile", "slurm", "--out", "there")
    assert there.code == 0, there.err
    assert "executed 3 of 3, skipped 0" in there.out and checkout.ran[0] == "80" and sorted(checkout.ran) == ["80", "90", "91"]
    ours, theirs = (checkout.root / out / "smoke" / "toys" / "toy" for out in ("local", "there"))
    claims = [json.loads((folder / "claims.json").read_text()) for folder in (ours, theirs)]
    assert claims[0] == claims[1] and all(row["value"] is not None for row in claims[0]["claims"])
    assert "job None threads 1" in (ours / "90_reproduce.ipynb").read_text()
    assert re.search(r"job \d+ threads 1", (theirs / "90_reproduce.ipynb").read_text())
    assert cluster.command("squeue", "--states=all", "--noheader", "--format=%T %m %C").splitlines() == ["COMPLETED 3000M 1"] * 3
    assert "executed 0 of 3, skipped 3" in checkout.run("reproduce", "toy", "--seed", "5", "--cores", "2", "--profile", "slurm", "--out", "there").out


def test_failure_and_interruption_on_slurm(checkout: Checkout, cluster, monkeypatch):
    for name, value in cluster.env.items(): monkeypatch.setenv(name, value)
    wait = "import time\nwhile not (pathlib.Path(os.environ['NEURIPS26_HOME']) / 'go').exists(): time.sleep(0.1)"
    checkout.paper("toy", {"01_good": notebook(count("good")), "02_bad": notebook(count("bad"), "1 / 0"), "03_waits": notebook(count("waits"), wait)})
    process = checkout.start("reproduce", "toy", "--cores", "2", "--profile", "slurm")
    wait_for(lambda: "waits" in checkout.ran and checkout.outputs("toy") == {"01_good"} and (checkout.runs("toy") / "failed" / "02_bad.ipynb").exists(), 90, "two jobs to end")
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "executed 1 of 3" in out, (out, err)
    wait_for(lambda: not processes_in(checkout.root), 30, f"the jobs to end: {processes_in(checkout.root)}")
    wait_for(lambda: not cluster.command("squeue", "--noheader"), 30, "the queue to be empty")

    (checkout.root / "go").touch()
    checkout.forget()
    again = checkout.run("reproduce", "toy", "--cores", "2", "--profile", "slurm")
    assert again.code == 1 and "executed 1 of 3, skipped 1, failed 1" in again.out
    assert again.error.startswith("FAILED toy/02_bad, cell 3, line 1: ZeroDivisionError")
    assert "good" not in checkout.ran and checkout.outputs("toy") == {"01_good", "03_waits"}
