"""JupyterLab as a reader uses it: open a method notebook, run all cells, move the slider, see the figure change."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = Path("efficient_inference/compact_attention/01_select.ipynb")


@pytest.fixture(scope="module")
def lab(root, tmp_path_factory):
    "A JupyterLab server on a copy of the notebook without its outputs; its address."
    if importlib.util.find_spec("jupyterlab") is None: pytest.skip("JupyterLab is not installed; ci/setup installs it")
    if not (root / "nbs" / NOTEBOOK).exists(): pytest.skip(f"nbs/{NOTEBOOK} isn't there")
    home = tmp_path_factory.mktemp("lab")
    notebook = json.loads((root / "nbs" / NOTEBOOK).read_text())
    for cell in notebook["cells"]:  # nothing that the page shows later was there before
        if cell["cell_type"] == "code": cell["outputs"], cell["execution_count"] = [], None
    (home / "nbs" / NOTEBOOK).parent.mkdir(parents=True)
    (home / "nbs" / NOTEBOOK).write_text(json.dumps(notebook))
    settings = home / "settings" / "@jupyterlab"
    for name, values in {"notebook-extension/tracker": {"windowingMode": "none"}, "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"}}.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = secrets.token_hex(16)
    folders = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    env = {**os.environ, **folders, "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    env.pop("MPLBACKEND", None)  # the notebook draws inline
    log = open(home / "lab.log", "w")
    command = [sys.executable, "-m", "jupyterlab", str(home / "nbs"), "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    server = subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        for _ in range(120):
            if server.poll() is not None: pytest.fail(f"JupyterLab ended: {(home / 'lab.log').read_text()[-800:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=2).close()
                break
            except OSError: time.sleep(0.5)
        else: pytest.fail(f"JupyterLab didn't answer: {(home / 'lab.log').read_text()[-800:]}")
        yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK.as_posix()}?token={token}"
    finally:
        server.terminate()
        try: server.wait(20)
        except subprocess.TimeoutExpired: server.kill()
        log.close()


@pytest.mark.timeout(420)  # takes about 40 s on two idle cores
def test_the_slider_moves_the_figure(root, lab, chromium):
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(lab)
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
    idle = page.get_by_text("Python 3 (ipykernel) | Idle")
    idle.wait_for()  # connected: before that, Run would start a second kernel
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    cells = sum(c["cell_type"] == "code" and bool("".join(c["source"]).strip()) for c in json.loads((root / "nbs" / NOTEBOOK).read_text())["cells"])
    numbered = "[...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].filter(p => /^\\[\\d+\\]:$/.test(p.innerText.trim())).length"
    page.wait_for_function(f"{numbered} === {cells} || document.querySelector('[data-mime-type=\"application/vnd.jupyter.error\"]')", timeout=240_000)
    errors = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    assert errors.count() == 0, errors.first.inner_text()

    slider = page.locator(".widget-slider [role=slider]").first
    slider.scroll_into_view_if_needed()
    figure = "(() => { const i = document.querySelector('.jupyter-widgets .jp-OutputArea-output img'); return i && i.complete && i.naturalWidth > 0 ? i.src : null; })()"

    def move(key: str, before: str | None) -> tuple[str, str]:
        "Press a key on the slider and wait until the kernel rests and another figure stands: the first press redraws twice."
        slider.focus()
        page.keyboard.press(key)
        same, last = 0, None
        for _ in range(240):
            page.wait_for_timeout(250)
            now = page.evaluate(figure)
            same, last = (same + 1 if now == last and idle.count() else 0), now
            if now and now != before and same >= 10: return slider.get_attribute("aria-valuenow"), now
        pytest.fail(f"the figure didn't change after {key} at {slider.get_attribute('aria-valuenow')}")

    value, first = move("ArrowRight", None)
    later, second = move("ArrowRight", first)
    assert later != value and first != second
    back, third = move("ArrowLeft", second)
    assert back == value and third == first, "the same value gives the same figure"
    context.close()
