"""The documentation as a site, in a real browser: search from a folder and over HTTP, on a phone and on a screen."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, needs_chromium

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("over", ["a folder", "HTTP"])
def test_search_finds_a_page(browser, site: Path, served: str, over: str) -> None:
    start = site.as_uri() if over == "a folder" else served
    page, complaints = browser.new_page(viewport={"width": 1280, "height": 900}), []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith((start, "data:", "blob:")) or elsewhere.append(request.url)
    )
    page.goto(f"{start}/index.html")
    query, results = page.locator('[data-md-component="search-query"]'), page.locator(".md-search-result__item a")
    query.focus()  # from a folder the index is loaded when it is first needed
    page.locator(".md-search-result__meta", has_text="Type to start").wait_for(state="attached", timeout=15_000)
    query.press_sequentially("line certificate")
    results.first.wait_for(state="attached", timeout=15_000)
    found = results.evaluate_all("all => all.map(a => a.href)")
    assert any("line-certificate.html" in link for link in found)
    assert complaints == [] and elsewhere == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(browser, site: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=False)
    every = (width, scheme) == (390, "light")
    wide = []
    for path in sorted(site.glob("*.html")) if every else [site / "index.html", site / "mathematics.html"]:
        page.goto(path.as_uri())
        if page.evaluate("(main => main.scrollWidth > main.clientWidth)(document.querySelector('.md-main'))"):
            wide.append(path.name)
    assert wide == []
    page.close()
