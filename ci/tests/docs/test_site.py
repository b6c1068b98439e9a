"""The site in a real browser: nothing fails, nothing comes from elsewhere, nothing is too wide."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def catalogue(root) -> list[dict]:
    return [{**yaml.safe_load(f.read_text()), "overview": (f.parent / "00_overview.ipynb").exists()} for f in sorted((root / "nbs").glob("*/*/paper.yml"))]


def shown(page) -> int:
    return page.locator(".entry:visible").count()


def test_home(open_page, address, catalogue):
    watch = open_page(f"{address}/index.html")
    page = watch.page
    assert page.locator("h1.title").inner_text() == "neurips26_lit"
    drawing = page.locator("svg.drawing").first.bounding_box()
    assert drawing["width"] > 500 and drawing["height"] > 150
    assert page.locator("svg.drawing circle").count() == len(catalogue)
    assert "./ci/reproduce compact_attention" in page.inner_text("main") and "./ci/test" in page.inner_text("main")
    watch.check()


def test_catalogue_filters(open_page, address, catalogue):
    watch = open_page(f"{address}/index.html#catalogue")
    page = watch.page
    assert shown(page) == len(catalogue)
    areas = Counter(p["area"] for p in catalogue)
    page.select_option('[data-filter="area"]', "graphs")
    assert shown(page) == areas["graphs"] and f"{areas['graphs']} of {len(catalogue)}" in page.inner_text(".catalogue-count")
    page.click(".catalogue-reset")
    keyword, n = Counter(k for p in catalogue for k in p["keywords"]).most_common(1)[0]
    page.select_option('[data-filter="keyword"]', keyword)
    assert shown(page) == n > 1
    page.select_option('[data-filter="status"]', "built")
    assert shown(page) == sum(p["status"] == "built" and keyword in p["keywords"] for p in catalogue)
    page.click(".catalogue-reset")
    page.fill('[data-filter="text"]', "PageRank sparse")
    assert shown(page) == 1 and page.locator(".entry:visible a").first.get_attribute("href").endswith("graphs/index.html#l1_pagerank")
    page.fill('[data-filter="text"]', "no such words here")
    assert shown(page) == 0 and page.locator(".catalogue-none").is_visible()
    page.click(".catalogue-reset")
    chip = page.locator(".entry:visible .keyword").first
    wanted = chip.get_attribute("data-keyword")
    chip.click()
    assert shown(page) == sum(wanted in p["keywords"] for p in catalogue)
    watch.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_clean_and_fits_a_phone(open_page, address, site, scheme):
    "All pages at 390 pixels: no error on the console, no request to elsewhere, no sideways scrolling."
    watch = open_page(f"{address}/index.html", width=390, height=844, scheme=scheme)
    pages = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html"))
    if scheme == "dark": pages = [p for p in pages if p in ("index.html", "evidence.html", "kernels.html") or p.endswith("00_overview.html") or p.endswith("/index.html")]
    wide = []
    for name in pages:
        watch.page.goto(f"{address}/{name}", wait_until="load")
        over = watch.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if over > 0: wide.append((name, over))
    assert not wide
    watch.check()


def test_dark_and_light(open_page, address):
    light = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
    watch = open_page(f"{address}/evidence.html", scheme="dark")
    assert watch.page.evaluate(light) < 150
    watch.page.click(".quarto-color-scheme-toggle")
    watch.page.wait_for_function(f"{light} > 650")
    watch.page.reload()
    assert watch.page.evaluate(light) > 650  # the choice is kept
    watch.check()


@pytest.mark.parametrize("where", ["served", "from disk"])
def test_search(open_page, address, site, where):
    watch = open_page(f"{address}/core/index.html" if where == "served" else (site / "core" / "index.html").as_uri())
    page = watch.page
    page.fill(".smalldocs-search input", "grouped-query attention")
    page.wait_for_selector(".search-result")
    page.locator(".search-result").first.click()
    page.wait_for_load_state("load")
    assert "attention" in page.inner_text("main").lower() and "core/index.html" not in page.url
    watch.check()


def test_equations_are_drawn_without_a_script(open_page, address):
    watch = open_page(f"{address}/efficient_inference/index.html")
    page = watch.page
    box = page.locator("math[display=block]").first.bounding_box()
    assert box["height"] > 30 and box["width"] > 150
    assert page.evaluate("document.fonts.check('16px \"Site Math\"') && [...document.fonts].some(f => f.family.includes('Site Math') && f.status === 'loaded')")
    assert page.locator("text=/\\\\frac/").count() == 0
    watch.check()


def test_figures_load(open_page, address, site):
    pages = [p.relative_to(site).as_posix() for p in site.rglob("*.html") if "<img" in p.read_text()]
    if not pages: pytest.skip("no notebook carries a figure yet")
    watch = open_page(f"{address}/index.html")
    for name in pages:
        watch.page.goto(f"{address}/{name}", wait_until="load")
        assert not watch.page.evaluate("[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src.slice(0, 80))"), name
    watch.check()
