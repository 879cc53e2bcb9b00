"""Opens a trace of requests, in whichever known format its header names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hbmtwin.workloads.azure import AZURE
from hbmtwin.workloads.csv_requests import REQUESTS_CSV
from hbmtwin.workloads.csv_rows import rows
from hbmtwin.workloads.replay import Replay

FORMATS = (REQUESTS_CSV, AZURE)
"""A new CSV format is one more of these."""


def open_trace(
    path: str | Path, *, time_scale: float = 1.0, num_prompts: int | None = None, max_tokens: int | None = None
) -> Replay:
    """A replay of a CSV, plain or gzip: ours, or Azure's. Reads it through once. Raise WorkloadError."""
    path = Path(path)
    read = partial(rows, path, FORMATS)
    return Replay(path, read, time_scale=time_scale, num_prompts=num_prompts, max_tokens=max_tokens)
