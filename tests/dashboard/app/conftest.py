"""The browser that walks the app."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .screen import CHROMIUM, PATIENCE_MS

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
