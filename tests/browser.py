"""A browser for tests of pages: Chromium, where it is installed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(_NAMES)} is on the path")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser, and close it."""
    # Chromium's sandbox does not start for the superuser, as whom containers often run.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()
