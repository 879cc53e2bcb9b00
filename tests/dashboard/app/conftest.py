"""The browser that walks the app, the app itself, and a window at it, from which nothing else may be asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .screen import CHROMIUM, PATIENCE_MS, Screen, Server, started

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium to walk with: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright to walk with")
    with api.sync_playwright() as playwright:
        # as root, and without a device for pictures
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=PATIENCE_MS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("dashboard")) as made:
        yield made


@pytest.fixture
def screen(browser: Browser, server: Server) -> Iterator[Screen]:
    made = Screen(browser, server)
    yield made
    foreign = [url for url in made.asked if not url.startswith((server.url, "data:", "blob:"))]
    made.context.close()
    assert foreign == []
