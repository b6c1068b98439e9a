"""Runs the steps of the test run one after another and closes with one summary.

Every step runs even when an earlier one failed, so that one run shows all that is wrong. The exit status is that of the
whole run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
RUNS = ROOT / "runs" / "smoke"
PYTEST = [str(BIN / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
CLI = str(BIN / "neurips26")

# name: (what it shows, command, extra environment)
STEPS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "structure": ("tree, exports, stamps, evidence", [CLI, "check"], {}),
    "lint": ("ruff over the hand-written code", [str(BIN / "ruff"), "check", "--quiet", "ci", "kernels", "setup.py"], {}),
    "library": ("core and papers", [*PYTEST, "ci/tests/core", "ci/tests/papers"], {}),
    "kernels": ("Triton kernels in the interpreter, compiled resources", [*PYTEST, "ci/tests/kernels"], {"TRITON_INTERPRET": "1"}),
    "runner": ("reproduce: resume, limits, errors", [*PYTEST, "ci/tests/runner"], {}),
    "slurm": ("a paper through a real single-node SLURM", [*PYTEST, "-rs", "ci/tests/slurm"], {}),
    "notebooks": ("every notebook at smoke", [CLI, "reproduce", "--all", "--scale", "smoke", "--cores", "2"], {}),
    "docs": ("the site, without warnings or broken links", [CLI, "docs"], {}),
    "browser": ("the site and JupyterLab in a browser", [*PYTEST, "-rs", "ci/tests/docs"], {}),
}
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed)\b")


def run(name: str) -> dict:
    "Run one step, pass its output on, and read pytest's closing counts from it."
    what, command, extra = STEPS[name]
    print(f"\n=== {name}: {what}", flush=True)
    start = time.monotonic()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **extra}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
    counts: dict[str, int] = {}
    for line in process.stdout:
        print(line, end="", flush=True)
        if " in " in line and (found := COUNTS.findall(line)):
            counts = {kind.rstrip("s") if kind == "errors" else kind: int(n) for n, kind in found}
    code = process.wait()
    return {"step": name, "code": code, "seconds": time.monotonic() - start, **counts}


def notebooks() -> list[dict]:
    "What each notebook took in the smoke run, from the run records."
    rows = []
    for file in RUNS.rglob("run.json"):
        record = json.loads(file.read_text())
        rows += [{"notebook": f"{file.parent.relative_to(RUNS)}/{stem}", **row} for stem, row in record.get("notebooks", {}).items()]
    return sorted(rows, key=lambda r: -(r.get("seconds") or 0))


def summary(results: list[dict]) -> int:
    print("\n" + "=" * 100 + "\nSUMMARY")
    rows = notebooks()
    if rows and any(r["step"] == "notebooks" for r in results):
        print("\nTen slowest notebooks at smoke:")
        for r in rows[:10]: print(f"  {r['seconds'] or 0:7.1f} s  {r.get('peak_mb') or 0:7.0f} MB  {r['notebook']}")
    verdicts: dict[str, dict[str, int]] = {}
    for file in sorted((ROOT / "nbs").glob("*/*/claims.small.json")):
        counted = verdicts.setdefault(file.parent.name, {})
        for row in json.loads(file.read_text())["claims"]: counted[row["verdict"]] = counted.get(row["verdict"], 0) + 1
    if verdicts: print("\nCommitted evidence at small:")
    for slug, counted in verdicts.items(): print(f"  {slug}: " + ", ".join(f"{n} {v}" for v, n in sorted(counted.items())))
    for file in sorted((ROOT / "kernels").glob("*.resources.json")):
        print(f"\nKernel {file.name.split('.')[0]}: most registers, shared memory and spilled bytes over all configurations")
        worst: dict[str, list[int]] = {}
        for row in json.loads(file.read_text())["rows"]:
            seen = worst.setdefault(str(row["arch"]), [0, 0, 0])
            worst[str(row["arch"])] = [max(a, b) for a, b in zip(seen, (row["registers"], row["shared"], row["spills"]))]
        for arch, (registers, shared, spills) in worst.items(): print(f"  sm_{arch}: {registers} registers, {shared} B shared, {spills} B spilled")
    print("\nSteps:")
    for r in results:
        tests = ", ".join(f"{r[k]} {k}" for k in ("passed", "failed", "error", "skipped") if r.get(k))
        print(f"  {'ok  ' if r['code'] == 0 else 'FAIL'}  {r['seconds']:7.1f} s  {r['step']:10s} {tests}")
    total = {k: sum(r.get(k, 0) for r in results) for k in ("passed", "failed", "error", "skipped")}
    plain = [r for r in results if "passed" not in r]  # steps that aren't pytest count as one check each
    passed = total["passed"] + sum(r["code"] == 0 for r in plain)
    failed = total["failed"] + total["error"] + sum(r["code"] != 0 for r in plain)
    print(f"\nTook {sum(r['seconds'] for r in results) / 60:.1f} minutes.")
    print(f"{passed} passed, {failed} failed, {total['skipped']} skipped")
    return 1 if any(r["code"] for r in results) else 0


def main(arguments: list[str]) -> int:
    if any(a in ("--list", "-h", "--help") for a in arguments):
        print("Steps of ci/test:\n" + "\n".join(f"  {name:10s} {what}" for name, (what, *_) in STEPS.items()))
        return 0
    unknown = [a for a in arguments if a not in STEPS]
    if unknown:
        print(f"ci/test: unknown step {unknown[0]!r}: expected {', '.join(STEPS)}", file=sys.stderr)
        return 2
    return summary([run(name) for name in (arguments or STEPS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
