"""A run that is stopped in the middle keeps what is finished, leaves nothing half-written, and goes on from there."""

import fcntl
import os
import signal

import pytest
from checkout import PARAMETERS, Checkout, count, notebook, processes_in, wait_for


@pytest.fixture
def slow(checkout: Checkout) -> Checkout:
    "A quick notebook, and two that come after it, one at a time, and wait for a file before they end."
    pause = "import time\nwhile not (pathlib.Path(os.environ['NEURIPS26_HOME']) / 'go').exists(): time.sleep(0.1)"
    checkout.paper("toy", {"80_first": notebook(PARAMETERS, count("first")), "90_next": notebook(PARAMETERS, count("next"), pause), "91_next": notebook(PARAMETERS, count("next"), pause)})
    return checkout


def _in_the_second(slow: Checkout):
    "Start a run and wait until its second notebook is being executed."
    process = slow.start("reproduce", "toy", "--cores", "1")
    wait_for(lambda: slow.ran == ["first", "next"], what="the second notebook to start")
    return process, next(name for name in ("90_next", "91_next") if (slow.runs("toy") / "run.d" / f"{name}.json").exists())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_interrupted_and_started_again(slow: Checkout, number: signal.Signals):
    process, running = _in_the_second(slow)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 130 and err.strip() == "interrupted: finished notebooks are kept; run the same command to go on"
        assert "executed 1 of 3, skipped 2" in out and out.count("the run was interrupted") == 2
    else: assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not processes_in(slow.root), 30, f"everything to end: {processes_in(slow.root)}")
    assert slow.outputs("toy") == {"80_first"} and slow.record("toy", running)["state"] in ("stopped", "running")

    (slow.root / "go").touch()
    slow.forget()
    again = slow.run("reproduce", "toy", "--cores", "2")
    assert again.code == 0, again.err
    assert "executed 2 of 3, skipped 1" in again.out and slow.ran == ["next", "next"]
    assert slow.outputs("toy") == {"80_first", "90_next", "91_next"}


def test_a_notebook_process_killed_from_outside(slow: Checkout):
    process, running = _in_the_second(slow)
    os.kill(slow.record("toy", running)["pid"], signal.SIGKILL)
    (slow.root / "go").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "executed 2 of 3, skipped 0, failed 1" in out
    assert err.strip() == f"FAILED toy/{running}: its process was killed from outside (out of memory, or ended by the cluster): run it again with fewer --cores or more memory"
    wait_for(lambda: not processes_in(slow.root), 30, "its kernel to end")
    assert slow.outputs("toy") == {"80_first", "90_next", "91_next"} - {running}


def test_a_result_that_a_stopped_engine_deleted_comes_back(checkout: Checkout):
    checkout.paper("toy", {"01_a": notebook(count("a"))})
    assert checkout.run("reproduce", "toy").code == 0
    output, second = checkout.runs("toy") / "01_a.ipynb", checkout.runs("toy") / "run.d" / "01_a.ipynb"
    assert not second.exists()  # a run that was summed up leaves no second name
    output.rename(second)
    assert "executed 0 of 1, skipped 1" in checkout.run("reproduce", "toy").out
    assert output.exists() and not second.exists() and checkout.ran == ["a"]
    second.write_text(output.read_text() + "\n")  # another file under the second name doesn't count
    output.unlink()
    assert "executed 1 of 1" in checkout.run("reproduce", "toy").out
    assert output.exists() and not second.exists() and checkout.ran == ["a", "a"]


def test_two_runs_in_one_folder(checkout: Checkout):
    checkout.paper("toy", {"01_a": notebook("1")})
    folder = checkout.runs("toy") / "run.d"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write("4321")
        f.flush()
        result = checkout.run("reproduce", "toy")
    assert result.code == 1 and result.error == "error: another run (process 4321) is working in runs/smoke/toys/toy: wait until it ends, or choose another folder with --out"
