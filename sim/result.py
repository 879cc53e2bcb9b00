"""What a run leaves behind: a summary and columns, in memory and as a directory.

``summary.json``, ``scenario.toml``, ``timeline.parquet``, ``kv_monitor.parquet`` (for other tools: ours read the
timeline again), ``requests.parquet``, ``checkpoints.parquet``, and on demand ``steps.parquet``,
``memory_trace.parquet`` and ``cache_events.parquet``. No wall time stands in any of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from hbmtwin.sim.monitor import kv_monitor
from hbmtwin.sim.recorder import REQUEST_COLUMNS, TIMELINE_COLUMNS
from hbmtwin.sim.scenario import Scenario

TABLES = ("timeline", "requests", "checkpoints", "steps", "memory_trace", "cache_events")
SUMMARY_KEYS = (
    *("basis", "capacity_bytes", "goodput", "itl_s", "kv_block_bytes", "kv_budget_bytes", "notes", "oom"),
    *("prefix_cache", "seed", "version"),
)
"""What reports and exports read of a summary; older releases did not write all of it."""
COLUMNS = {"timeline": TIMELINE_COLUMNS, "requests": (*REQUEST_COLUMNS, "status", "reason")}
"""Of tables that every run has."""
MONITOR_FILE = "kv_monitor.parquet"
CSV_FILES = tuple(f"{name}.csv" for name in (*TABLES, "kv_monitor"))
"""What an export as CSV writes into a directory of its own."""
REPORT_FILES = ("report.html", "plotly.min.js")
FILES = frozenset(
    ("summary.json", "scenario.toml", MONITOR_FILE, *REPORT_FILES, *CSV_FILES, *(f"{name}.parquet" for name in TABLES))
)
STEPS_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("step", "start_ns", "duration_ns", "repeat")]
    + [(name, pa.list_(pa.int64())) for name in ("seq_ids", "new_tokens", "context_tokens", "preempted")]
    + [("step_ends_ns", pa.list_(pa.int64()))]
)
"""Said outright: a run without a preemption, or without a step, has nothing to guess the types from."""


class ResultError(RuntimeError):
    """A result directory that cannot be read or written: what, where, and the cure."""


@dataclass(frozen=True)
class Result:
    """One finished run. Columns of its tables that have one value throughout may be read-only: copy before writing."""

    scenario: Scenario
    summary: dict[str, Any]
    timeline: pd.DataFrame
    requests: pd.DataFrame
    checkpoints: pd.DataFrame
    steps: pd.DataFrame | None = None
    memory_trace: pd.DataFrame | None = None
    cache_events: pd.DataFrame | None = None

    @property
    def oom(self) -> dict[str, Any] | None:
        """The record of the death, if it died."""
        record: dict[str, Any] | None = self.summary["oom"]
        return record

    @property
    def kv_monitor(self) -> pd.DataFrame:
        """The series of :func:`hbmtwin.sim.monitor.kv_monitor`."""
        return kv_monitor(self.timeline, self.summary["kv_budget_bytes"])

    def save(self, directory: Path) -> None:
        """Write the result directory by one rename; an older result there is replaced. Raise ResultError."""
        write_directory(directory, self.write_into)

    def write_into(self, directory: Path) -> None:
        """Write the files of the result into an existing directory."""
        text = json.dumps(self.summary, indent=2, ensure_ascii=False, allow_nan=False)
        (directory / "summary.json").write_text(text + "\n", encoding="utf-8")
        (directory / "scenario.toml").write_text(self.scenario.to_toml(), encoding="utf-8")
        self.kv_monitor.to_parquet(directory / MONITOR_FILE, index=False)
        for name in TABLES:
            frame = getattr(self, name)
            if frame is not None:
                schema = STEPS_SCHEMA if name == "steps" else None
                frame.to_parquet(directory / f"{name}.parquet", index=False, schema=schema)

    @classmethod
    def load(cls, directory: Path) -> Result:
        """Read a result directory. Raise ResultError."""
        try:
            summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
            scenario = Scenario.load(directory / "scenario.toml")
            frames = {
                name: pd.read_parquet(path) for name in TABLES if (path := directory / f"{name}.parquet").exists()
            }
            missing = [key for key in SUMMARY_KEYS if key not in summary]
            if missing:
                raise ValueError(
                    f"summary.json lacks {', '.join(missing)}: written by an older release, or damaged; run it again"
                )
            for name, columns in COLUMNS.items():
                if name in frames and (gone := [column for column in columns if column not in frames[name]]):
                    raise ValueError(
                        f"{name}.parquet lacks {', '.join(gone)}: written by an older release, or damaged; run it again"
                    )
            return cls(scenario=scenario, summary=summary, **frames)
        except (OSError, ValueError, TypeError) as error:
            raise ResultError(f"{directory}: not a result directory of hbmtwin: {error}") from None


def write_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Let *write* fill a new directory beside *directory*, then rename it into place: all of it lands, or nothing.

    An older directory of that name is replaced only if it is empty or one of ours: it holds a ``summary.json``, a
    ``report.html`` or a ``timeline.csv``, and nothing that we do not write. Raise ResultError.
    """
    check_replaceable(directory)
    staging: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        write(staging)
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)  # mkdtemp makes private directories
        if directory.exists():
            retired = staging.with_name(staging.name + ".old")
            directory.rename(retired)
            try:
                staging.rename(directory)
            except BaseException:
                retired.rename(directory)
                raise
            shutil.rmtree(retired)
        else:
            staging.rename(directory)
        staging = None
    except OSError as error:
        raise ResultError(f"{directory}: cannot be written: {error}") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(directory: Path) -> None:
    """Say whether :func:`write_directory` would replace what is there. Raise ResultError if it would not."""
    if directory.exists() and not _is_ours(directory):
        raise ResultError(f"{directory}: exists and is not a result of hbmtwin; choose another --out or remove it")


def _is_ours(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    entries = list(directory.iterdir())
    marked = not entries or any(p.name in ("summary.json", "report.html", CSV_FILES[0]) for p in entries)
    return marked and all(p.name in FILES or _is_ours(p) for p in entries)
