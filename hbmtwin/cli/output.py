"""How results come to stdout, as JSON for programs or as tables for people, and into a file, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
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


def write_whole(path: Path, text: str) -> None:
    """Write a file by one rename, so that none is ever cut off; what is no file, as ``/dev/stdout``, is written to.

    Raise OSError that names *path*, and leave what was there.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):  # it may not have come to be
            partial.unlink()
