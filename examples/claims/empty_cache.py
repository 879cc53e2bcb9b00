"""What ``empty_cache`` changes: a run's operations on a fresh allocator, with the call put between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from hbmtwin import HbmDriver, MemoryOp, make_allocator, replay


@dataclass(frozen=True)
class Death:
    """Where a trace runs out of memory, and what it cost until there."""

    index: int | None
    """Operation of the trace; None: it ends without."""
    driver_calls: int
    syncs: int
    stranded_bytes: int
    """Reserved and in nobody's use, on average over the operations."""


def operations(trace: pd.DataFrame) -> list[MemoryOp]:
    """The rows of ``results.memory_trace`` as a replay takes them."""
    return [MemoryOp(*row) for row in trace[list(MemoryOp._fields)].itertuples(index=False)]


def death(ops: list[MemoryOp], limit_bytes: int, *, steps: int | None = None, before: int | None = None) -> Death:
    """Replay on a caching allocator up to the first failure; ``empty_cache`` every so many *steps*, or once.

    *before* is the operation that the one call stands in front of.
    """
    driver = HbmDriver(limit_bytes)
    allocator = make_allocator("caching", driver, {"limit_bytes": limit_bytes})
    done = stranded = 0
    for result in replay(_with_calls(ops, steps, before), allocator, driver):
        if result.op == "empty_cache":
            continue
        usage = allocator.usage()
        stranded += usage.reserved - usage.allocated
        done += 1
        if result.oom:
            break
    work = allocator.take_work()
    return Death(done - 1 if result.oom else None, work.driver_calls, work.syncs, stranded // done)


def _with_calls(ops: list[MemoryOp], steps: int | None, before: int | None) -> Iterator[MemoryOp]:
    empty_cache = MemoryOp("empty_cache")
    yield ops[0]
    for index, (last, op) in enumerate(pairwise(ops), start=1):
        if index == before or (steps is not None and op.step // steps != last.step // steps):
            yield empty_cache
        yield op
