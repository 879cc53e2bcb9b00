"""A result for other tools: what each format is, and how its file comes into being.

======================  ==================================================  =========================================
format                  what                                                for
======================  ==================================================  =========================================
``perfetto``            requests, steps, counters and marks against time    ui.perfetto.dev, chrome://tracing
``openmetrics``         the metrics of vLLM as a scraper would see them     ``promtool tsdb create-blocks-from``
``csv``                 every table, in a directory                         spreadsheets, other languages
``last_operations``     CSV of the 48 operations before memory ran out      whoever asks what asked, and what was free
======================  ==================================================  =========================================

The first three are written piece by piece, never as one string, and packed where the file's name ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hbmtwin.sim.export_csv import fill
from hbmtwin.sim.export_openmetrics import openmetrics
from hbmtwin.sim.export_perfetto import perfetto
from hbmtwin.sim.last_operations import operation_lines
from hbmtwin.sim.result import CSV_FILES, FILES, Result, ResultError, write_directory

TEXTS: dict[str, Callable[[Result], Iterator[str]]] = {
    "perfetto": perfetto,
    "openmetrics": openmetrics,
    "last_operations": operation_lines,
}
EXPORT_FORMATS = (*TEXTS, "csv")


def export(result: Result, fmt: str, path: Path) -> None:
    """Write a result at *path* in one of :data:`EXPORT_FORMATS`; same result, same bytes. O(rows of its tables).

    A file there is replaced by one rename; ``csv`` makes a directory, and replaces one of its own. Raise ResultError
    if it cannot be written, ValueError for another format.
    """
    if fmt not in EXPORT_FORMATS:
        raise ValueError(f"no format is called {fmt!r} (there are {', '.join(EXPORT_FORMATS)})")
    if (reason := check_exportable(fmt, path)) is not None:
        raise ResultError(reason)
    if fmt == "csv":
        write_directory(path, partial(fill, result))
        return
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with staging.open("wb") as raw:
                if path.name.endswith(".gz"):
                    # Neither a name nor a time: the bytes depend on the result alone.
                    with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                        _write(TEXTS[fmt](result), packed)
                else:
                    _write(TEXTS[fmt](result), raw)
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from None


def check_exportable(fmt: str, path: Path) -> str | None:
    """Why nothing can be exported to *path*; None where it can. An older export of the format is replaced."""
    if fmt != "csv":
        if path.exists() and not path.is_file():
            return f"{path}: is a {'directory' if path.is_dir() else 'device'}; name a file"
        if path.name in FILES and (path.parent / "summary.json").exists():
            return f"{path}: is a file of a result of hbmtwin; name another one"
        return None
    if not path.exists() or (path.is_dir() and not {entry.name for entry in path.iterdir()} - set(CSV_FILES)):
        return None
    return f"{path}: exists and is no directory of CSV tables of hbmtwin; name a new directory"


def _write(pieces: Iterator[str], out: io.BufferedWriter | gzip.GzipFile) -> None:
    with io.TextIOWrapper(out, encoding="utf-8", newline="\n") as text:
        text.writelines(pieces)
