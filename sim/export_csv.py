"""Every table of a result as CSV: one file a table, the columns of the Parquet files, lists with blanks between."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from hbmtwin.sim.result import CSV_FILES, STEPS_SCHEMA, Result

CHUNK_ROWS = 20_000
"""Rows that are text at once."""
LISTS = tuple(STEPS_SCHEMA.names[4:])


def fill(result: Result, directory: Path) -> None:
    """Write every table that the result has into an existing directory. Raise OSError."""
    for name in CSV_FILES:
        frame = getattr(result, name.removesuffix(".csv"))
        if frame is not None:
            _write(frame, directory / name)


def _write(frame: pd.DataFrame, path: Path) -> None:
    lists = [name for name in LISTS if name in frame.columns]
    with path.open("w", encoding="utf-8", newline="") as out:
        for begin in range(0, max(1, len(frame)), CHUNK_ROWS):
            chunk = frame.iloc[begin : begin + CHUNK_ROWS]
            chunk = chunk.assign(**{name: [" ".join(map(str, row)) for row in chunk[name]] for name in lists})
            chunk.to_csv(out, index=False, header=begin == 0, lineterminator="\n")
