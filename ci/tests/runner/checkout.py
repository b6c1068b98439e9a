"""A small checkout of its own: the real runner, command line and Snakefile on toy notebooks, in a folder of the test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLI = [sys.executable, "-c", "from neurips26_lit.core.cli import main; main()"]
PARAMETERS = ("scale = 'smoke'\nseed = 0\ndevice = 'cpu'", "parameters")


def notebook(*cells: str | tuple[str, str]) -> dict:
    "A notebook of code cells; a pair is a cell with a tag."
    made = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# A toy"}]
    for i, cell in enumerate(cells):
        source, tags = (cell, []) if isinstance(cell, str) else (cell[0], [cell[1]])
        made.append({"cell_type": "code", "id": f"cell{i}", "metadata": {"tags": tags} if tags else {}, "source": source, "outputs": [], "execution_count": None})
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def count(name: str) -> str:
    "Code that leaves one line in a file each time the notebook runs."
    return f"import os, pathlib\nwith open(pathlib.Path(os.environ['NEURIPS26_HOME']) / 'ran.txt', 'a') as f: f.write('{name}\\n')"


def record(claim: str, value: float, low: float, high: float) -> str:
    "Code that records one claim."
    return f"from neurips26_lit.core.ledger import Ledger\nledger = Ledger('toy', scale, seed)\nledger.record('{claim}', {value}, {low}, {high}, n=5)\nledger.table()"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        "The one line that an error is."
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, f"expected one line of error, got:\n{self.err}\n{self.out}"
        return lines[0]


class Checkout:
    "A folder with settings.ini, nbs/, ci/ and a copy of the library."

    def __init__(self, root: Path):
        self.root = root
        (root / "nbs").mkdir(parents=True)
        (root / "ci").mkdir()
        (root / "requirements").mkdir()
        (root / "settings.ini").write_text("[DEFAULT]\nlib_name = neurips26_lit\n")
        (root / "requirements" / "core.lock").write_text("numpy==2\n")
        shutil.copy(ROOT / "ci" / "Snakefile", root / "ci")
        shutil.copytree(ROOT / "ci" / "profiles", root / "ci" / "profiles")
        package = root / "neurips26_lit"
        package.mkdir()
        shutil.copy(ROOT / "neurips26_lit" / "__init__.py", package)
        shutil.copytree(ROOT / "neurips26_lit" / "core", package / "core", ignore=shutil.ignore_patterns("__pycache__"))
        self.area("toys")

    def area(self, name: str) -> None:
        folder = self.root / "nbs" / name
        folder.mkdir()
        (folder / "area.yml").write_text(f"name: {name}\ntitle: Toys\nblurb: Things to play with.\norder: 1\n")

    def paper(self, slug: str, notebooks: dict[str, dict], *, claims: str = "", resources: str = "", status: str = "built", more: str = "") -> Path:
        "A paper with its notebooks; claims and resources as YAML flow text."
        folder = self.root / "nbs" / "toys" / slug
        folder.mkdir(parents=True)
        claims = claims or ("[]" if status == "planned" else "[{id: it, says: it is so, kind: bound, check: {smoke: 'value < 1'}}]")
        (folder / "paper.yml").write_text(f"slug: {slug}\narea: toys\ntitle: A toy named {slug}\nsummary: A toy.\nstatus: {status}\nclaims: {claims}\nresources: {resources or '{}'}\n{more}")
        for name, nb in notebooks.items(): self.write(f"toys/{slug}/{name}", nb)
        return folder

    def write(self, name: str, nb: dict) -> Path:
        path = self.root / "nbs" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(nb, indent=1) + "\n")
        return path

    def module(self, name: str, text: str) -> Path:
        "A module as if nbdev had exported it."
        path = self.root / "neurips26_lit" / Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.parents:
            if folder == self.root / "neurips26_lit": break
            (folder / "__init__.py").touch()
        path.write_text(text)
        return path

    @property
    def env(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NEURIPS26_", "SNAKEMAKE_"))}
        return clean | {"PYTHONPATH": str(self.root), "HOME": str(self.root / "home"), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *arguments: str, **how) -> subprocess.Popen:
        return subprocess.Popen([*CLI, *arguments], cwd=self.root, env=self.env, text=True, stdin=subprocess.DEVNULL, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how})

    def run(self, *arguments: str, timeout: float = 240) -> Result:
        "Run the command line in a process of its own."
        process = self.start(*arguments)
        try: out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            raise AssertionError(f"{arguments} took more than {timeout} s\n{out}\n{err}") from None
        return Result(process.returncode, out, err)

    def run_each(self, commands) -> list[Result]:
        "Run command lines that end at once, one after another in one process."
        code = """import contextlib, io, json, sys
from neurips26_lit.core.cli import main
found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: main(arguments)
        except SystemExit as e: found.append([e.code, out.getvalue(), err.getvalue()])
print(json.dumps(found))"""
        done = subprocess.run([sys.executable, "-c", code], cwd=self.root, env=self.env, text=True, capture_output=True, input=json.dumps([list(c) for c in commands]), check=False)
        assert done.returncode == 0, done.stderr
        return [Result(*row) for row in json.loads(done.stdout)]

    @property
    def ran(self) -> list[str]:
        "Which notebooks ran, in order, since the file was last removed."
        file = self.root / "ran.txt"
        return file.read_text().split() if file.exists() else []

    def forget(self) -> None:
        (self.root / "ran.txt").unlink(missing_ok=True)

    def runs(self, slug: str, scale: str = "smoke") -> Path:
        return self.root / "runs" / scale / "toys" / slug

    def outputs(self, slug: str) -> set[str]:
        "Notebooks with a whole, executed result."
        found = set()
        for file in self.runs(slug).glob("*.ipynb"):
            json.loads(file.read_text())  # never half a file
            found.add(file.stem)
        return found

    def record(self, slug: str, name: str) -> dict:
        return json.loads((self.runs(slug) / "run.d" / f"{name}.json").read_text())


def wait_for(condition, seconds: float = 120, what: str = "") -> None:
    "Wait until the condition holds."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain: {what}"
        time.sleep(0.1)


def processes_in(root: Path) -> list[str]:
    "Living processes that belong to a checkout, known by their environment."
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try: environment, command, state = (proc / "environ").read_bytes(), (proc / "cmdline").read_bytes(), (proc / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError: continue
        if f"PYTHONPATH={root}".encode() + b"\0" in environment and state != "Z": found.append(f"{proc.name} {command.replace(bytes(1), b' ').decode()[:120]}")
    return found
