"""core.bench on a made-up clock, where the true ratio is known, and on the real one where only the order is."""

import gc
import math
import subprocess
import sys

import numpy as np
import pytest

from neurips26_lit.core import bench as B


class Machine:
    "One unit of work takes 1 ms, times a drift, plus an interruption every `every` calls."

    def __init__(self, drift=0.0, every=0):
        self.now, self.drift, self.every, self.count = 0.0, drift, every, 0

    def work(self, units):
        self.count += 1
        stolen = 50 if self.every and self.count % self.every == 0 else 0
        self.now += 1e-3 * (units + stolen) * (1 + self.drift * self.now)

    def compare(self, repeats=60, **units):
        fns = {name: (lambda u=u: self.work(u)) for name, u in units.items()}
        return B.compare(fns, repeats=repeats, min_ms=0, timer=B._cpu_timer(lambda: self.now))


def test_import_leaves_torch_out():
    subprocess.run([sys.executable, "-c", "import sys, neurips26_lit.core.bench; assert 'torch' not in sys.modules"], check=True)


def test_steady_machine_gives_the_exact_ratio():
    table = Machine().compare(a=2, b=1, c=5)
    assert table.method.tolist() == ["a", "b", "c"] and np.allclose(table.ratio, [1, 0.5, 2.5]) and np.allclose(table.median_ms, [2, 1, 5])
    assert np.allclose(table.ratio_low, table.ratio_high) and (table.n == 60).all()


def test_drift_cancels_in_turns():
    table = Machine(drift=20.0).compare(a=1, b=1)
    first = np.array(table.attrs["seconds"]["a"])
    assert first[-1] / first[0] > 3                                           # the machine really slowed down
    assert table.ratio_low[1] <= 1 <= table.ratio_high[1] and abs(table.ratio[1] - 1) < 0.05


def test_interruptions_do_not_move_the_median():
    table = Machine(every=7).compare(a=3, b=1)
    assert np.isclose(table.ratio[1], 1 / 3) and table.ratio_high[1] < 0.5


def test_order_is_shuffled_and_seeded():
    def order(seed):
        seen = []
        B.compare({n: (lambda n=n: seen.append(n)) for n in "abc"}, repeats=30, seed=seed, min_ms=0)
        return seen[3 + 6:]                                                    # after the gate and two warm-up rounds
    rounds = ["".join(order(0)[i:i + 3]) for i in range(0, 90, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) >= 4
    assert order(0) == order(0) != order(1)


def test_speedup_is_the_inverse_and_chains():
    table = Machine(drift=5.0).compare(dense=8, sparse=2, other=4)
    ab, ba = B.speedup(table, "dense", "sparse"), B.speedup(table, "sparse", "dense")
    assert np.isclose(ab.value, 1 / ba.value) and np.isclose(ab.low, 1 / ba.high) and np.isclose(ab.high, 1 / ba.low)
    assert ab.value == pytest.approx(4, rel=0.05) and B.speedup(table, "other", "sparse").value == pytest.approx(2, rel=0.05)


def test_short_calls_are_repeated_until_measurable():
    machine = Machine()
    table = B.compare({"short": lambda: machine.work(0.01), "long": lambda: machine.work(3)}, repeats=5, min_ms=1, timer=B._cpu_timer(lambda: machine.now))
    assert table.calls.tolist() == [100, 1] and np.isclose(table.ratio[1], 300)


def test_real_clock_sees_which_is_slower():
    fns = {"once": lambda n: sum(range(n)), "ten times": lambda n: [sum(range(n)) for _ in range(10)]}
    table = B.compare(fns, (30_000,), repeats=15)
    assert table.ratio[1] > 2 and B.speedup(table, "ten times", "once").low > 1.2  # how much slower depends on what else runs; that it is slower doesn't


def test_wrong_or_failing_functions_are_not_timed():
    x = np.array([3.0, 1.0])
    with pytest.raises(ValueError, match="wrong: differs from right by 2"): B.compare({"right": np.sort, "wrong": np.asarray}, (x,), repeats=5, tol=1e-9)
    with pytest.raises(ValueError, match="nan: differs"): B.compare({"right": np.sort, "nan": lambda v: v * np.nan}, (x,), repeats=5, tol=1e9)
    with pytest.raises(ValueError, match="short: differs"): B.compare({"right": np.sort, "short": lambda v: v[:1]}, (x,), repeats=5, tol=1e9)
    with pytest.raises(RuntimeError, match="broken: failed before timing: ZeroDivisionError"): B.compare({"ok": np.sort, "broken": lambda v: 1 / 0}, (x,), repeats=5)
    B.compare({"right": np.sort, "same": lambda v: np.sort(v) + 1e-12}, (x,), repeats=5, tol=1e-9)


def test_garbage_collection_is_back_on_after_a_failure():
    calls = iter(range(6))
    with pytest.raises(StopIteration): B.compare({"a": lambda: next(calls)}, repeats=50, min_ms=0)
    assert gc.isenabled()


@pytest.mark.parametrize("kw, message", [
    (dict(fns={}, repeats=9), "fns: empty"), (dict(fns={"a": int}, repeats=4), "repeats: 4"),
    (dict(fns={"a": int}, repeats=9, device="tpu"), "device: 'tpu'")])
def test_bad_input(kw, message):
    with pytest.raises(ValueError, match=message): B.compare(**kw)


def test_cuda_without_a_gpu_is_one_clear_line():
    import torch
    if torch.cuda.is_available(): pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match="PyTorch sees no CUDA device; use device='cpu'"): B.compare({"a": int}, repeats=9, device="cuda")


def test_cuda_events_time_a_matmul():
    import torch
    if not torch.cuda.is_available(): pytest.skip("no CUDA device")
    a = torch.randn(2048, 2048, device="cuda")
    table = B.compare({"one": torch.matmul, "three": lambda x, y: [x @ y for _ in range(3)]}, (a, a), repeats=9, device="cuda")
    assert 2 < table.ratio[1] < 4
    assert 0.01 < B.roofline(2 * 2048**3, 3 * 2048**2 * 4, "cuda", dtype="tf32").fraction(table.median_ms[0] / 1e3) < 1.1


# ---------------------------------------------------------------- roofline

def test_roofline_by_hand():
    toy = B.Peaks("toy", 100.0, 10.0, "float32", "made up")
    compute, memory = B.roofline(1000, 50, toy), B.roofline(1000, 200, toy)
    assert (compute.seconds, compute.limit, compute.intensity) == (10, "compute", 20) and (memory.seconds, memory.limit) == (20, "memory")
    assert memory.fraction(40) == 0.5 and toy.ridge == 10 and B.roofline(7, 0, toy).intensity == math.inf
    for bad in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="flops, bytes"): B.roofline(*bad, toy)


@pytest.mark.parametrize("name, bandwidth", [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2e12), ("NVIDIA A100-SXM4-80GB", 2.039e12),
                                              ("NVIDIA A100-SXM4-40GB", 1.555e12), ("NVIDIA L4", 0.3e12), ("NVIDIA L40S", 0.864e12), ("NVIDIA GeForce RTX 4090", 1.008e12)])
def test_known_devices_by_the_names_the_driver_reports(name, bandwidth):
    assert B.known_peaks(name).bytes == bandwidth and B.known_peaks(name, "float16") == B.Peaks(name, B.known_peaks(name).flops, bandwidth, "float16", "data sheet")


def test_unknown_devices_are_not_guessed():
    assert B.known_peaks("NVIDIA L400") is None and B.known_peaks("NVIDIA H200", "int8") is None


def test_cpu_peaks_are_measured_and_plausible():
    p = B.peaks("cpu")
    assert 1e9 < p.flops < 2e13 and 2e8 < p.bytes < 2e12 and p.source.startswith("measured") and B.peaks("cpu") is not None
    with pytest.raises(ValueError, match="dtype"): B.peaks("cpu", "tf32")
