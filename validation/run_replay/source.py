"""A finished run as it lies on disk, read for a replay: what was asked for, in order, and what the run says it held.

::

    summary.json         version, capacity, the death               scenario.toml     the plan is made again from it
    steps.parquet        batch and duration of each step            read as a stream, up to a limit; numbered without a
                                                                    gap, and every completed request ends with a step
    memory_trace.parquet every operation of every allocator         read as a stream, up to a limit
    timeline.parquet     the run's own books, at step ends          witnesses: they were written by the run itself,
    checkpoints.parquet  segments and blocks at some operations     not by anything that is replayed; they must have
    requests.parquet     how each request ended                     every row of the steps that are replayed

Nothing is trusted: what is missing, damaged or of another release is told with the command that makes it anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hbmtwin.sim.recorder import TIMELINE_COLUMNS
from hbmtwin.sim.result import SUMMARY_KEYS, ResultError
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.validation.run_replay.coverage import lost_rows
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace

MAX_OPERATIONS = 300_000
"""Operations that are replayed unless told otherwise: each leaves 126 numbers on both sides, some 2.2 kB together."""
MAX_DEVICE_OPERATIONS = 50_000
"""On a device, which is waited for and asked for its segments after each: some hundreds a second."""
MAX_STEPS = 200_000
"""Rows of the table of steps that are read: a row holds a number a sequence, twice."""
STEP_COLUMNS = ("step", "start_ns", "duration_ns", "repeat", "new_tokens", "context_tokens", "step_ends_ns")
TRACE_COLUMNS = ("op", "id", "size", "step", "time_ns", "tag", "allocator")
_LISTS = ("new_tokens", "context_tokens", "step_ends_ns")
_TEXTS = ("op", "tag", "allocator", "level", "state", "status")
_NUMBERS = (
    *("peak_reserved_bytes", "peak_requested_bytes", "num_alloc_retries", "simulated_output_tokens"),
    *("requests_total", "requests_completed", "requests_failed", "requests_unfinished"),
)
_OOM_KEYS = ("allocator", "asked_bytes", "tag", "torch_message", "time_s")
_CHECKPOINT_COLUMNS = ("time_ns", "op_index", "level", "address", "size", "requested", "state")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRows:
    """The operations of all allocators, in order; one value a row in each."""

    op: NDArray[np.object_]
    id: Ints
    size: Ints
    step: Ints
    time_ns: Ints
    tag: NDArray[np.object_]
    allocator: NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True)
class RecordedRun:
    """One result directory."""

    directory: Path
    scenario: Scenario
    summary: dict[str, Any]
    timeline: pd.DataFrame
    checkpoints: pd.DataFrame
    steps: pd.DataFrame
    """The first :data:`MAX_STEPS` of them."""
    total_steps: int
    """Rows of the file."""
    rows: TraceRows
    """Empty where no trace was asked for."""
    total_operations: int
    """Of the file; :attr:`rows` may be fewer."""
    ops: dict[str, tuple[MemoryOp, ...]]
    """By allocator, those of :attr:`rows`."""
    last_step: int
    """Stamp of the last operation of the file, whether it is among :attr:`rows` or not; -1 without a trace."""

    @property
    def is_whole(self) -> bool:
        """Every operation of the run is in :attr:`rows`."""
        return len(self.rows) == self.total_operations


def load_run(directory: Path, *, trace: bool = True, max_operations: int = MAX_OPERATIONS) -> RecordedRun:
    """Read a result directory; without *trace* only what kernels need. O(operations read).

    Raise ResultError with the cure, WorkloadError for an operation that cannot be.
    """
    summary, scenario = _summary(directory), _scenario(directory)
    for name, wanted in (("steps", True), ("memory_trace", trace)):
        if wanted and not (directory / f"{name}.parquet").exists():
            raise ResultError(
                f"{directory}: holds no {name}.parquet, so there is nothing to replay; {_again(directory)}"
            )
    steps, total_steps = _steps(directory)
    requests = _table(directory, "requests", ("end_ns", "output_tokens", "status"))
    step_ends = np.array([e for row in steps["step_ends_ns"] for e in row], np.int64)
    _check_ends(directory, requests, step_ends, all_read=len(steps) == total_steps)
    timeline = _table(directory, "timeline", TIMELINE_COLUMNS)
    checkpoints = _table(directory, "checkpoints", _CHECKPOINT_COLUMNS)
    for table, what in lost_rows(scenario, summary, requests, timeline, checkpoints, step_ends):
        raise ResultError(f"{directory / table}.parquet: is damaged ({what}); {_again(directory)}")
    rows, total, last_step = _no_rows(), 0, -1
    ops: dict[str, tuple[MemoryOp, ...]] = {}
    if trace:
        rows, total = _rows(directory, max_operations)
        last_step = _last_step(directory)
        path = directory / "memory_trace.parquet"
        if not total:
            raise ResultError(f"{path}: holds no operation, so there is nothing to replay; {_again(directory)}")
        for name in dict.fromkeys(rows.allocator.tolist()):
            count = int(np.count_nonzero(rows.allocator == name))
            ops[name] = tuple(islice(read_memory_trace(path, allocator=name), count))
    return RecordedRun(
        directory, scenario, summary, timeline, checkpoints, steps, total_steps, rows, total, ops, last_step
    )


def _again(directory: Path) -> str:
    scenario = directory / "scenario.toml"
    wanted = "--set results.steps=true --set results.memory_trace=true"
    return f"run it again with both tables: hbmtwin run {scenario} {wanted} --out {directory}"


def _summary(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "is not there"
        raise ResultError(f"{directory}: {what}; give the --out directory of an earlier `hbmtwin run`")
    path = directory / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ResultError(
            f"{directory}: not a result directory, it holds no summary.json; give the --out directory of an earlier "
            "`hbmtwin run` (of `hbmtwin compare`: one of the directories inside)"
        ) from None
    except RecursionError:
        raise ResultError(f"{path}: is damaged (nested too deeply); {_again(directory)}") from None
    except ValueError as error:
        raise ResultError(f"{path}: is damaged ({error}); {_again(directory)}") from None
    if not isinstance(summary, dict) or (missing := _missing(summary)):
        what = f"lacks {', '.join(missing)}" if isinstance(summary, dict) else "is no summary of a run"
        raise ResultError(f"{path}: {what}: written by an older release, or damaged; {_again(directory)}")
    here = version("hbmtwin")
    if summary["version"] != here:
        raise ResultError(
            f"{directory}: was written by hbmtwin {summary['version']}, and this is {here}: its plan may follow other "
            f"rules; {_again(directory)}"
        )
    return summary


def _missing(summary: dict[str, Any]) -> list[str]:
    """What a replay reads of a summary, and is not there as it should be."""
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    missing += [key for key in _NUMBERS if not isinstance(summary.get(key), int)]
    oom = summary.get("oom")
    if oom is not None:
        missing += [f"oom.{key}" for key in _OOM_KEYS if not isinstance(oom, dict) or key not in oom]
        if not missing and not (isinstance(oom["time_s"], int | float) and isfinite(oom["time_s"])):
            missing.append("oom.time_s")
    return missing


def _scenario(directory: Path) -> Scenario:
    path = directory / "scenario.toml"
    if not path.exists():
        raise ResultError(f"{directory}: holds no scenario.toml, from which the plan is made again; run it again")
    try:
        return Scenario.load(path)
    except ScenarioError as error:
        raise ResultError(f"{path}: is damaged, or of another release ({error}); run it again") from None


def _table(directory: Path, name: str, columns: tuple[str, ...]) -> pd.DataFrame:
    frame: pd.DataFrame = _first_rows(directory, name, columns, 1 << 62)[0].to_pandas()
    return frame


def _steps(directory: Path) -> tuple[pd.DataFrame, int]:
    table, total = _first_rows(directory, "steps", STEP_COLUMNS, MAX_STEPS)
    frame: pd.DataFrame = table.to_pandas()
    if frame["new_tokens"].map(len).ne(frame["context_tokens"].map(len)).any():
        path = directory / "steps.parquet"
        raise ResultError(f"{path}: is damaged (a step has new tokens without context_tokens); {_again(directory)}")
    for column, least in (("new_tokens", 1), ("context_tokens", 0), ("repeat", 1), ("duration_ns", 0)):
        values = frame[column].explode() if column.endswith("_tokens") else frame[column]
        if values.dropna().lt(least).any():  # a step without sequences explodes to a hole
            path = directory / "steps.parquet"
            raise ResultError(f"{path}: is damaged (a {column} is below {least}); {_again(directory)}")
    if wrong := _gap(frame):
        raise ResultError(f"{directory / 'steps.parquet'}: is damaged ({wrong}); {_again(directory)}")
    return frame, total


def _gap(frame: pd.DataFrame) -> str:
    """Where the steps are not one behind the other; empty where they are. O(rows)."""
    numbers, repeats = (frame[name].to_numpy(dtype=np.int64) for name in ("step", "repeat"))
    wanted = np.concatenate([[0], np.cumsum(repeats)])
    if len(apart := np.flatnonzero(numbers != wanted[:-1])):
        return f"step {wanted[apart[0]]} is missing"
    ends = frame["step_ends_ns"]
    last = [int(e[-1]) if len(e) else -1 for e in ends]
    told = (frame["start_ns"] + frame["duration_ns"]).to_numpy(dtype=np.int64)
    apart = np.flatnonzero((ends.map(len).to_numpy() != repeats) | (told != np.array(last, np.int64)))
    return f"step {numbers[apart[0]]} has other ends than its duration and repeat say" if len(apart) else ""


def _check_ends(directory: Path, requests: pd.DataFrame, ends: Ints, *, all_read: bool) -> None:
    """A completed request ends when a step does: rows that were cut off the table are missed. Raise ResultError."""
    ended = requests["end_ns"][requests["status"] == "completed"].to_numpy(dtype=np.int64)
    if not all_read:
        ended = ended[ended <= (ends[-1] if len(ends) else -1)]
    lost = ended[~np.isin(ended, ends)]
    if len(lost):
        raise ResultError(
            f"{directory / 'steps.parquet'}: is damaged (a request was completed at {lost.min() / 1e9:.6f} s, where no "
            f"step ends: rows are missing); {_again(directory)}"
        )


def _first_rows(directory: Path, name: str, columns: tuple[str, ...], most: int) -> tuple[pa.Table, int]:
    """At most so many rows of a table, read batch by batch, and how many it has."""
    path = directory / f"{name}.parquet"
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if missing := [column for column in columns if column not in schema.names]:
                what = f"lacks {', '.join(missing)}: written by an older release, or damaged"
                raise ResultError(f"{path}: {what}; {_again(directory)}")
            batches, left = [], most
            for batch in file.iter_batches(columns=list(columns)):
                batches.append(batch.slice(0, left))
                left -= batch.num_rows
                if left <= 0:
                    break
            wanted = pa.schema([schema.field(column) for column in columns])
            table = pa.Table.from_batches([b.select(list(columns)) for b in batches], wanted)
            _check_columns(table)
            return table, file.metadata.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise ResultError(f"{path}: {what}; {_again(directory)}") from None


def _check_columns(table: pa.Table) -> None:
    """Raise ValueError for a column of another kind than a run writes, or with holes."""
    if not table.num_rows:
        return
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = field.type
        if field.name in _LISTS:
            right = pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)
            holes = column.null_count or (right and column.combine_chunks().flatten().null_count)
        elif field.name in _TEXTS:
            right, holes = pa.types.is_string(kind) or pa.types.is_large_string(kind), column.null_count
        else:
            right, holes = pa.types.is_integer(kind), column.null_count
        if not right or holes:
            what = "has empty cells" if right else f"is of type {kind}"
            raise ValueError(f"column {field.name} {what}")


def _rows(directory: Path, most: int) -> tuple[TraceRows, int]:
    table, total = _first_rows(directory, "memory_trace", TRACE_COLUMNS, most)
    columns = {name: table.column(name).to_pandas() for name in TRACE_COLUMNS}
    numbers = {name: columns[name].to_numpy().astype(np.int64) for name in ("id", "size", "step", "time_ns")}
    texts = {name: columns[name].to_numpy(dtype=object) for name in ("op", "tag", "allocator")}
    return TraceRows(**numbers, **texts), total


def _last_step(directory: Path) -> int:
    """Of a trace that was read in part, too: its last row group has it."""
    with pq.ParquetFile(directory / "memory_trace.parquet") as file:
        groups = file.metadata.num_row_groups
        if not groups:
            return -1
        steps = file.read_row_group(groups - 1, columns=["step"]).column("step").to_numpy()
    return int(steps[-1]) if len(steps) else -1


def _no_rows() -> TraceRows:
    numbers, texts = np.empty(0, np.int64), np.empty(0, object)
    return TraceRows(texts, numbers, numbers, numbers, numbers, texts, texts)
