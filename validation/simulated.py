"""Our side of a comparison: an operation trace on the simulated allocator, written down in the real one's tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hbmtwin.allocators.caching import CachingAllocator, CachingConfig, ConfError
from hbmtwin.allocators.caching.sizes import Flavour
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.sim.replay import replay
from hbmtwin.validation.emulated.records import (
    ACTIONS,
    BLOCK,
    BLOCK_STATES,
    ENTRY,
    OUTCOMES,
    RESULT,
    SEGMENT,
    NpuSettings,
    RealError,
    RealRun,
    Table,
)
from hbmtwin.workloads.formats.memory_trace import MemoryOp

DONE, OOM, ERROR = range(len(OUTCOMES))
_ACTIONS = {action: code for code, action in enumerate(ACTIONS)}
_STATES = {state: code for code, state in enumerate(BLOCK_STATES)}


def simulate(
    ops: Sequence[MemoryOp],
    settings: NpuSettings,
    *,
    flavour: Flavour = "torch_npu",
    release: str | None = None,
    driver: HbmDriver | None = None,
    events_complete_at_once: bool = False,
    allocator: type[CachingAllocator] = CachingAllocator,
) -> RealRun:
    """Do *ops* in order and tell what came of each, in the tables of a real run.

    Without a *driver* it gets an empty one of the size that *settings* say. Statistics and entries are taken after
    every operation, segments and blocks after the last. With *events_complete_at_once* every event is complete after
    the operation that recorded it. Raise UnsafeState where the real one breaks its own memory.
    """
    if driver is None:
        driver = HbmDriver(settings.capacity_bytes, tenants_bytes=settings.tenants_bytes)
    try:
        side = allocator(
            driver,
            CachingConfig(
                flavour=flavour,
                release=release,
                alloc_conf=settings.alloc_conf,
                soc=settings.soc,
                cann=settings.cann,
            ),
        )
    except ConfError as refused:
        return RealRun(setup_error=_described(refused))
    entries: list[tuple[int, ...]] = []
    index = 0

    def note(action: str, address: int, size: int, stream: int, pool: int) -> None:
        entries.append((index, _ACTIONS[action], address, size, stream, pool))

    side.trace_observer = note
    first = side.stats()
    stats = np.empty((len(ops), len(first)), np.int64)
    results = np.full(len(ops), -1, RESULT)
    errors: dict[int, RealError] = {}
    for result in replay(ops, side, driver):
        row = results[index]
        row["address"] = -1 if result.address is None else result.address
        row["outcome"] = OOM if result.oom else ERROR if result.error else DONE
        row["driver_bytes"] = driver.used_bytes
        if result.oom:
            errors[index] = RealError("OutOfMemoryError", result.error)
        elif result.error:
            errors[index] = RealError(*result.error.split(": ", 1))
        stats[index] = list(side.stats().values())
        index += 1
        if events_complete_at_once:
            side.complete_events()
    segments, blocks = _snapshot(side, len(ops) - 1)
    return RealRun(
        stat_names=tuple(first),
        initial_stats=np.array(list(first.values()), np.int64),
        stats=stats,
        results=results,
        errors=errors,
        segments=segments,
        blocks=blocks,
        entries=np.array(entries, ENTRY),
    )


def _described(refused: Exception) -> RealError:
    return RealError("ValueError" if isinstance(refused, ValueError) else "RuntimeError", str(refused))


def _snapshot(side: CachingAllocator, operation: int) -> tuple[Table, Table]:
    """The rows of SEGMENT and BLOCK for torch's list of segments; workspaces stand behind all others there."""
    segments, blocks = [], []
    of_tensors = sum(1 for _ in side.walk())
    for i, s in enumerate(side.memory_snapshot()):
        sizes = (s["total_size"], s["allocated_size"], s["active_size"], s["requested_size"])
        is_large = s["segment_type"] == "large"
        pool = s["segment_pool_id"][1]
        kinds = (is_large, s["is_expandable"], i >= of_tensors)
        segments.append((operation, s["address"], *sizes, s["stream"], pool, *kinds))
        for b in s["blocks"]:
            state = _STATES[b["state"]]
            blocks.append((operation, s["address"], b["address"], b["size"], b["requested_size"], state))
    return np.array(segments, SEGMENT), np.array(blocks, BLOCK)
