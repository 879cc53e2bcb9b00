"""Opens a trace of requests, in whichever known format the names of its columns say."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from hbmtwin.workloads.formats.agent_sessions import AGENTS
from hbmtwin.workloads.formats.azure import AZURE
from hbmtwin.workloads.formats.bailian import BAILIAN
from hbmtwin.workloads.formats.burstgpt import BURSTGPT
from hbmtwin.workloads.formats.format import Format, Settings
from hbmtwin.workloads.formats.mooncake import MOONCAKE
from hbmtwin.workloads.formats.plain_lengths import CUSTOM, LENGTHS, SERVED, VIDUR
from hbmtwin.workloads.formats.reader import TraceReader
from hbmtwin.workloads.formats.replay import Replay
from hbmtwin.workloads.formats.requests import REQUESTS
from hbmtwin.workloads.formats.splitwise import SPLITWISE
from hbmtwin.workloads.formats.weka import WEKA
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.suggest import did_you_mean

FORMATS: Final[tuple[Format, ...]] = (
    REQUESTS,
    AZURE,
    MOONCAKE,
    BURSTGPT,
    BAILIAN,
    WEKA,
    VIDUR,
    SPLITWISE,
    LENGTHS,
    SERVED,
    AGENTS,
    CUSTOM,
)
"""All formats that can be read; a new one is one more of these. Where two fit alike, the first is taken."""


class TimelessTrace(WorkloadError):
    """A file with lengths and no times: what :func:`trace_lengths` reads, and no traffic."""


def open_trace(
    path: str | Path,
    *,
    format: str | None = None,
    time_scale: float = 1.0,
    num_prompts: int | None = None,
    skip: int = 0,
    max_tokens: int | None = None,
    block_size: int | None = None,
    jitter: bool = False,
    skip_bad_lines: bool = False,
    keep_failed: bool = False,
    seed: int = 0,
) -> Replay:
    """A replay of a trace: CSV, JSON lines or Parquet, plain or gzip, in one of :data:`FORMATS`. Reads it through once.

    *format* names it where its columns would say another; *block_size* is the tokens that a ``hash_id`` stands for;
    *jitter* spreads requests over the tick they share, by draws of *seed*; *skip_bad_lines* leaves out and counts lines
    that are no request; *keep_failed* sends failed calls too. For the rest see :class:`Replay`. Raise WorkloadError,
    TimelessTrace where the file has lengths only.
    """
    path = Path(path)
    reader = _reader(path, format, block_size, jitter, skip_bad_lines, keep_failed, seed)
    replay = Replay(path, reader.rows, time_scale=time_scale, num_prompts=num_prompts, max_tokens=max_tokens, skip=skip)
    if not reader.has_times and reader.format is not None:
        raise TimelessTrace(
            f"{path}: {reader.format.title} with lengths and no times, so it cannot be replayed; add a column "
            f"{reader.format.time!r}, or learn from it: hbmtwin workload learn --request-rate"
        )
    replay.notes = reader.notes()
    if reader.format is not None and reader.format.block_size:
        replay.block_size = block_size or reader.format.block_size
    return replay


def trace_lengths(
    path: str | Path,
    *,
    format: str | None = None,
    num_prompts: int | None = None,
    skip_bad_lines: bool = False,
) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of each line, also of a file that has no times. Raise WorkloadError."""
    reader = _reader(Path(path), format, None, False, skip_bad_lines, False, 0)
    with closing(reader.rows()) as rows:
        for row in islice(rows, num_prompts):
            yield row.prompt_tokens, row.output_tokens


def _reader(
    path: Path,
    name: str | None,
    block_size: int | None,
    jitter: bool,
    skip_bad_lines: bool,
    keep_failed: bool,
    seed: int,
) -> TraceReader:
    _check_readable_twice(path)
    by_name = {format.name: format for format in FORMATS}
    if name is not None and name not in by_name:
        raise WorkloadError(f"no trace format {name!r}; {did_you_mean(name, by_name)}")
    if block_size is not None and block_size < 1:
        raise WorkloadError(f"an id of a trace stands for at least 1 token, not {block_size}")
    return TraceReader(
        path,
        FORMATS,
        Settings(block_size, keep_failed),
        format=None if name is None else by_name[name],
        jitter=jitter,
        skip_bad_lines=skip_bad_lines,
        seed=seed,
    )


def _check_readable_twice(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever opens it says what is wrong
    except ValueError as error:
        raise WorkloadError(f"{str(path)!r}: no file has such a name ({error}); check the path") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise WorkloadError(f"{path}: this is no regular file, and a trace is read more than once; write it to a file")
