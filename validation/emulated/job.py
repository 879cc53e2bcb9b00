"""A job is a folder that the client makes and a child of the worker fills with the files named here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hbmtwin.validation.emulated.records import NpuSettings

JOB = "job.json"
"""What is asked."""
START = "start.json"
"""Before the first operation: names of the statistics, or the error of the set-up."""
AT = "at.bin"
"""Index of the operation under way, in shared memory."""
RESULTS = "results.npy"
"""RESULT, filled as operations are done, so that it outlives a crash; so does the next."""
STATS = "stats.npy"
"""A row before the first operation and one after each."""
ERRORS = "errors.jsonl"
"""A line per exception: operation, kind, text."""
TABLES = "tables.npz"
"""The other tables, at the end of a replay."""
TIMING = "timing.json"
"""The end of a timing."""
OUTPUT = "output.txt"
"""What the child printed."""

Row = tuple[str, int | str | None, int, int | None, str]
"""``op, id, size, stream, arg`` of a MemoryOp."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the client asks for."""

    kind: Literal["replay", "time"]
    settings: NpuSettings
    rows: list[Row]
    entries: bool = False
    snapshot_every: int = 0

    def write(self, folder: Path) -> None:
        """To JOB in *folder*."""
        (folder / JOB).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """From JOB in *folder*."""
        job: dict[str, Any] = json.loads((folder / JOB).read_text())
        variables = tuple((name, text) for name, text in job["settings"].pop("environment"))
        return cls(**job | {"settings": NpuSettings(**job["settings"], environment=variables)})

    @property
    def num_streams(self) -> int:
        """The default stream and all up to the highest index that a row names. O(rows)."""
        named = [stream or 0 for _, _, _, stream, _ in self.rows]
        current = [int(arg) for op, _, _, _, arg in self.rows if op == "erase_stream"]
        return 1 + max(named + current, default=0)
