"""docs/devices.md is what the catalog and the capability table say today."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_what_the_script_writes() -> None:
    written = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    page: str = runpy.run_path(str(ROOT / "scripts" / "devices_page"))["page"]()
    assert written == page, "run scripts/devices_page > docs/devices.md"


def test_it_is_in_the_navigation() -> None:
    assert "devices.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
