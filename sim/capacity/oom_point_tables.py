"""OOM points as JSON and as tables: what is printed, stored and drawn.

::

    summary.json              all but the runs: curves, causes, places, smallest memories
    critical_loads            a line each policy, end and draw: load (none: not up to the largest), cause, places
    smallest_memory           a line each policy, end, load and draw: bytes
    runs                      a line each run that was asked for: what was asked, then the row of the run
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from hbmtwin.sim.capacity.oom_point import OomPoint
from hbmtwin.sim.capacity.oom_point_curves import (
    CONFIDENCE,
    PLACES,
    by_load,
    by_place,
    causes,
    memory_by_load,
    quantile,
)
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.result import ResultError
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS

_TYPES: dict[type, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_ASKED = {"policy": str, "draw": str, "load": float, "memory_bytes": int}
_FOUND = {"policy": str, "end": str, "draw": str, "load": float, "monotone": bool}
_PLACES = {"died_users": int, "died_turn": int, "died_at_s": float, "died_operations": int, "first_preemption_s": float}
SCHEMAS: dict[str, dict[str, type]] = {
    "critical_loads": {**_FOUND, "outcome": str, "cause": str, **_PLACES, "key": str},
    "smallest_memory": {**_FOUND, "memory_bytes": int},
    "runs": {**_ASKED, **ROW_COLUMNS},
}
"""Columns of the tables and their types."""


def to_dict(point: OomPoint) -> dict[str, Any]:
    """Everything but the single runs, as JSON has it. O(policies x loads x draws)."""
    s = point.scenario
    return {
        "model": s.model.name,
        "device": s.device.name,
        "load": {"key": point.load.word, "values": list(point.load.values)},
        "draws": [draw.name for draw in point.draws],
        "varies": point.varies,
        "confidence": CONFIDENCE,
        "policies": {p: {end: _end(point, p, end) for end in ends} for p, ends in point.ends.items()},
        "left_out": point.left_out,
        "variants": {name: list(settings) for name, settings in point.variants.items()},
        "smallest_memory": {p: {end: _memory(point, p, end) for end in ends} for p, ends in point.ends.items()}
        if point.smallest
        else None,
        "runs": len({row["key"] for row in point.runs}),
        "runs_in_error": [{"key": row["key"], "error": row["error"]} for row in point.broken],
        "version": version("hbmtwin"),
    }


def _end(point: OomPoint, policy: str, end: End) -> dict[str, Any]:
    critical = point.of(policy, end)
    loads = [c.load for c in critical if c.load is not None]
    rows = [c.row for c in critical if c.row is not None]
    return {
        "draws": len(critical),
        "ended": len(loads),
        "first_load": min(loads, default=None),
        "half_load": half_load(point, policy, end),
        "last_load": max(loads, default=None),
        "monotone": all(c.monotone for c in critical),
        "causes": causes(critical),
        "places": {
            name: {
                f"p{round(100 * q)}": quantile([float(v) for r in rows if (v := r[c]) is not None], q)
                for q in (0.1, 0.5, 0.9)
            }
            for name, c in PLACES.items()
        },
        "curve": [s._asdict() for s in by_load(point, policy, end)],
        "place_curves": {name: [s._asdict() for s in by_place(critical, column)] for name, column in PLACES.items()},
    }


def half_load(point: OomPoint, policy: str, end: End) -> float | None:
    """The smallest load at which at least half of the draws have ended; None if fewer do."""
    return next((s.at for s in by_load(point, policy, end) if 2 * s.ended >= s.n), None)


def _memory(point: OomPoint, policy: str, end: End) -> dict[str, Any]:
    return {
        "monotone": all(s.monotone for s in point.smallest if (s.policy, s.end) == (policy, end)),
        "curve": [m._asdict() for m in memory_by_load(point.smallest, policy, end)],
    }


def tables(point: OomPoint) -> dict[str, pa.Table]:
    """The tables by name; the same answers are the same tables."""
    names = [draw.name for draw in point.draws]
    critical = [{**(c.row or {}), **c._asdict(), "draw": names[c.draw]} for c in point.critical]
    smallest = [{**s._asdict(), "draw": names[s.draw]} for s in point.smallest]
    made = {"critical_loads": _table("critical_loads", critical), "runs": _table("runs", point.runs)}
    return made | ({"smallest_memory": _table("smallest_memory", smallest)} if smallest else {})


def _table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    columns = SCHEMAS[name]
    schema = pa.schema([(column, _TYPES[kind]) for column, kind in columns.items()])
    cells = [
        {c: float(row[c]) if kind is float and row.get(c) is not None else row.get(c) for c, kind in columns.items()}
        for row in rows
    ]
    return pa.Table.from_pylist(cells, schema=schema)


def write_tables(point: OomPoint, directory: Path, beside: Mapping[str, Any] | None = None) -> None:
    """Write ``summary.json``, with *beside* in it, and each table as Parquet and CSV, each by one rename.

    Raise ResultError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**to_dict(point), **(beside or {})}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(directory / "summary.json", text.encode())
    for name, table in tables(point).items():
        for suffix, write in (("parquet", pq.write_table), ("csv", pa_csv.write_csv)):
            sink = pa.BufferOutputStream()
            write(table, sink)
            write_file(directory / f"{name}.{suffix}", sink.getvalue().to_pybytes())


def write_file(path: Path, data: bytes) -> None:
    """Write a file by one rename. Raise ResultError, and leave what was there."""
    staging = path.with_name(f".{path.name}.partial")
    try:
        staging.write_bytes(data)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None
