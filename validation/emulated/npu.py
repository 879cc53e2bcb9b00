"""The real torch_npu on the emulated driver, from the outside: a context that replays operation traces."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from hbmtwin.validation.emulated.build import build_emulator
from hbmtwin.validation.emulated.job import AT, ERRORS, OUTPUT, RESULTS, START, STATS, TABLES, TIMING, Job, Row
from hbmtwin.validation.emulated.process import Worker, WorkerDied, tail
from hbmtwin.validation.emulated.records import Crash, NpuSettings, RawTiming, RealError, RealRun
from hbmtwin.workloads.formats.memory_trace import OPERATIONS, MemoryOp

CREATED_STREAMS = 32
"""torch_npu's pool of streams; the next one would be the first again."""
RAW_OPERATIONS = ("malloc", "free", "empty_cache")


class EmulatedNpu:
    """Worker processes that have torch and torch_npu imported; each replay runs in a fresh child of one.

    The keywords are the fields of :class:`NpuSettings`: the settings of every replay that brings none of its own.
    Entering compiles the emulated driver if need be and imports, which takes seconds; so does the first replay with
    another CANN version. Both raise EmulatorUnavailable where the machine, the wheels or a compiler are missing, or the
    wheels cannot be imported.
    """

    def __init__(self, settings: NpuSettings | None = None, **fields: Any) -> None:
        self.settings = NpuSettings(**fields) if settings is None else settings
        self._open = ExitStack()
        self._workers: dict[str, Worker] = {}
        """By CANN version."""

    def __enter__(self) -> Self:
        self._build = build_emulator()
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="hbmtwin-npu-")))
        try:
            self._worker(self.settings.cann)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._workers.clear()
        self._open.close()

    def replay(
        self,
        ops: Iterable[MemoryOp],
        settings: NpuSettings | None = None,
        *,
        entries: bool = False,
        snapshot_every: int = 0,
    ) -> RealRun:
        """Do *ops* in order on a fresh device and tell what came of each.

        *entries* collects the real trace's entries of each operation; *snapshot_every* takes segments and blocks after
        every so many operations, besides those after the last. An exception of an operation, OutOfMemory or not, is
        part of the result, and so is the child's death. Raise WorkerDied if we ourselves failed.
        """
        job = Job("replay", settings or self.settings, _rows(ops), entries, snapshot_every)
        with self._done(job) as (folder, code):
            return _read_run(folder, len(job.rows), code)

    def time_raw(self, ops: Iterable[MemoryOp], settings: NpuSettings | None = None) -> RawTiming:
        """The bare allocator's speed on mallocs, frees and empty_cache, by raw pointers and with nothing read.

        Raise ValueError on other operations, WorkerDied when the child did not finish.
        """
        job = Job("time", settings or self.settings, _rows(ops))
        for op, *_ in job.rows:
            if op not in RAW_OPERATIONS:
                raise ValueError(f"{op} cannot be timed with raw pointers; leave {', '.join(RAW_OPERATIONS)} only")
        with self._done(job) as (folder, code):
            timing = _read_json(folder / TIMING)
            if not timing:
                why = _read_json(folder / START).get("setup_error") or tail(folder / OUTPUT)
                raise WorkerDied(f"timing ended with {code}: {why}")
            return RawTiming(operations=len(job.rows), **timing)

    @contextmanager
    def _done(self, job: Job) -> Iterator[tuple[Path, int]]:
        """The folder of a job that was done, and how its child ended."""
        worker = self._worker(job.settings.cann)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            folder = Path(scratch)
            job.write(folder)
            code = worker.do(folder)
            if code > 0:
                raise WorkerDied(f"the child ended with {code}: {tail(folder / OUTPUT)}")
            yield folder, code

    def _worker(self, cann: str) -> Worker:
        if cann not in self._workers:
            worker = Worker(self._build, cann, self._folder / f"worker-{len(self._workers)}.txt")
            self._open.callback(worker.close)
            self._workers[cann] = worker
        return self._workers[cann]


def _rows(ops: Iterable[MemoryOp]) -> list[Row]:
    """Raise ValueError on an operation or a stream that there is not."""
    rows: list[Row] = []
    for op in ops:
        if op.op not in OPERATIONS:
            raise ValueError(f"no operation is called {op.op!r}; there are {', '.join(OPERATIONS)}")
        if op.stream is not None and not 0 <= op.stream <= CREATED_STREAMS:
            raise ValueError(f"stream {op.stream} is none: torch_npu has {CREATED_STREAMS} besides the default one, 0")
        rows.append((op.op, op.id, op.size, op.stream, op.arg))
    return rows


def _read_run(folder: Path, operations: int, code: int) -> RealRun:
    start = _read_json(folder / START)
    at = int.from_bytes((folder / AT).read_bytes(), "little", signed=True)
    crash = None if code == 0 else Crash(at, -code, tail(folder / OUTPUT))
    if "stat_names" not in start:
        refused = start.get("setup_error")
        return RealRun(crash=crash, setup_error=None if refused is None else RealError(*refused))
    finished = operations if crash is None else max(0, at)
    errors = [json.loads(line) for line in (folder / ERRORS).read_text().splitlines()]
    stats = np.load(folder / STATS)[: 1 + finished]
    names: list[str] = start["stat_names"]
    by_name = sorted(range(len(names)), key=names.__getitem__)
    run = RealRun(
        stat_names=tuple(names[i] for i in by_name),
        initial_stats=stats[0, by_name],
        stats=stats[1:, by_name],
        results=np.load(folder / RESULTS)[:finished],
        errors={i: RealError(kind, text) for i, kind, text in errors},
        crash=crash,
    )
    return run if crash else replace(run, **np.load(folder / TABLES))


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if the child did not come to write it."""
    return json.loads(path.read_text()) if path.exists() else {}
