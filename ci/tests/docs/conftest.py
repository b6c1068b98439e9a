"""The built site, a server for it, and a browser. Everything is made once."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import threading
from pathlib import Path

import pytest

from neurips26_lit.core.docs import build_docs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    "The site of this checkout, built as `neurips26 docs` builds it."
    return build_docs(tmp_path_factory.mktemp("site") / "docs").folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): ...


@pytest.fixture(scope="session")
def address(site) -> str:
    "Where the site is served."
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    "A headless Chromium with a profile of its own."
    if CHROMIUM is None: pytest.skip("chromium is not installed; `apt-get install chromium` or ci/system")
    if importlib.util.find_spec("playwright") is None: pytest.skip("the package playwright is not installed; ci/setup installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Watch:
    "A page together with what went wrong on it and what it asked for."

    def __init__(self, page, allowed: str):
        self.page, self.errors, self.outside = page, [], []
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("request", lambda r: self.outside.append(r.url) if not r.url.startswith((allowed, "data:", "blob:")) else None)
        page.on("response", lambda r: self.errors.append(f"{r.status} {r.url}") if r.status >= 400 and not r.url.endswith("/favicon.ico") else None)

    def check(self) -> None:
        assert not self.errors, self.errors
        assert not self.outside, self.outside


@pytest.fixture
def open_page(chromium):
    "Open a page of a given width and colour scheme, watched."
    contexts = []

    def open_(url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Watch:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        watch = Watch(context.new_page(), "/".join(url.split("/")[:3]))
        watch.page.goto(url)
        watch.page.wait_for_load_state("networkidle")
        return watch

    yield open_
    for context in contexts: context.close()
