"""Finished sweeps, OOM points and plans: those of the directories that `hbmtwin dashboard DIR` named, and of this app.

::

    DIR/sweep.json + runs.parquet      a sweep           DIR/plan.json       plans
    DIR/summary.json with "load"       OOM points        DIR/validate_run.json    a validated run
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.dashboard.app import jobs

Kind = Literal["sweep", "oom-point", "plan", "validate"]
FILES: Mapping[str, Kind] = {
    "sweep.json": "sweep",
    "plan.json": "plan",
    "validate_run.json": "validate",
    "summary.json": "oom-point",
}
NEEDED: Mapping[Kind, frozenset[str]] = {
    "sweep": frozenset(("grid", "runs", "outcomes")),
    "plan": frozenset(("plans", "left_out")),
    "validate": frozenset(),
    "oom-point": frozenset(("model", "device", "load", "policies", "smallest_memory")),
}
"""Keys without which a file is of another kind, or of another release."""
MOST_BYTES = 64 << 20
"""Of a JSON file that is read: a validated run of a hundred thousand steps has 10 MB."""


class Finished(NamedTuple):
    """A directory of one kind, and what its JSON file says."""

    name: str
    directory: Path
    told: dict[str, Any]


def of_kind(kind: Kind) -> list[Finished]:
    """All of that kind, those that were named first; what cannot be read is left out. O(files)."""
    return [found for directory in _directories() if (found := read(directory, kind)) is not None]


def read(directory: Path, kind: Kind) -> Finished | None:
    """What a directory holds of that kind."""
    for name, own in FILES.items():
        path = directory / name
        if own != kind or not path.is_file() or path.stat().st_size > MOST_BYTES:
            continue
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(told, dict) and told.keys() >= NEEDED[kind]:
            return Finished(directory.name, directory, told)
    return None


def rows_of(finished: Finished) -> list[dict[str, Any]]:
    """The rows of a sweep; none if they cannot be read."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(finished.directory / "runs.parquet").to_pylist()
    except (OSError, pa.ArrowException):
        return []
    return rows


def _directories() -> Iterator[Path]:
    for named in map(Path, sys.argv[1:]):
        if named.is_dir():
            yield named
            yield from sorted(path for path in named.iterdir() if path.is_dir())
    yield from jobs.shared().kept.named(("sweep-", "oom-point-", "plan-"))
