"""How results come to stdout: as JSON for programs, or as tables for people."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def json_text(value: object) -> str:
    """Indented; what JSON has no word for is refused, so that every reader can read it."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def stdout() -> Console:
    """Tables on stdout: as wide as COLUMNS or the terminal says; a pipe gets 140, the same in every log."""
    from rich.console import Console

    return Console(width=shutil.get_terminal_size((140, 24)).columns, highlight=False, soft_wrap=False)
