"""The documentation as a site: no warning, all of the library in its reference, nothing from elsewhere."""

import asyncio
import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hetpipe
from browser import CHROMIUM, Tab, browser_tab
from places import ROOT

pytestmark = pytest.mark.slow
LOOKED_AT = ("index", "getting-started", "bounds", "other-systems", "api", "cli")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


class Loaded(HTMLParser):
    """What a page loads by itself: links that a reader may follow are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (name == "src" or (tag == "link" and name == "href")) and value:
                self.addresses.append(value)


def test_every_name_that_the_package_gives_is_in_the_reference(site: Path):
    text = (site / "api.html").read_text(encoding="utf-8")
    shown = re.findall(r'<h3[^>]* id="hetpipe\.(\w+)"', text)
    assert sorted(shown) == sorted(hetpipe.__all__)


def test_pages_load_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses and [one for one in loaded.addresses if "//" in one] == [], page.name
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8") and "@import" not in sheet.read_text()


def test_what_lies_outside_of_docs_is_reached(site: Path):
    for name in ("CONTRIBUTING.html", "CHANGELOG.html", "LICENSE", "examples/benchmarks/planner/growth.png"):
        assert (site / "project" / name).is_file(), name
    text = (site / "index.html").read_text(encoding="utf-8")
    for place in ("project/CONTRIBUTING.html", "project/notebooks/00_quickstart.ipynb"):
        assert f'href="{place}"' in text
    back = (site / "project" / "CONTRIBUTING.html").read_text(encoding="utf-8")
    assert 'href="../design.html"' in back


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Serve the site on loopback."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of questions."""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 400])
def test_pages_fit_a_wide_and_a_narrow_window(address: str, width: int):
    async def look(tab: Tab) -> None:
        for page in LOOKED_AT:
            await tab.open(f"{address}/{page}.html", width=width)
            assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth"), page
        assert [one for one in tab.asked if not one.startswith((address, "data:", "blob:"))] == []
        assert tab.errors == []

    async def run() -> None:
        async with browser_tab() as tab:
            await look(tab)

    asyncio.run(run())
