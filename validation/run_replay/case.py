"""What of a run is done again: its plan, made once more by this release, and the operations of torch's allocator.

::

    scenario --ServerPlan, ServerMemory--> cap, region beside it, operations before the region
    trace    --rows of "caching"---------> [cap] op op ... [bytes of the region] op op ...        one case

A region, as ``pooled`` has, is no operation of torch's allocator: the driver is told of its bytes where it can be, else
the cap is lowered by them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.allocators.caching import CachingAllocator
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.allocator import Case
from hbmtwin.validation.emulated import NpuSettings
from hbmtwin.validation.run_replay.source import RecordedRun
from hbmtwin.workloads.formats.memory_trace import MemoryOp

Ints = NDArray[np.int64]


class NotReplayable(Exception):
    """A run whose memory no real allocator can be asked to do again; the text says why, and what can be replayed."""


class Setup(NamedTuple):
    """The run's plan, made again by this release."""

    plan: ServerPlan
    memory: ServerMemory
    cap_bytes: int
    """The most that torch's allocator may take."""
    region_bytes: int
    """Of an arena that lies beside it; 0: there is none."""
    before_region: int
    """Operations of torch's allocator until then."""


def set_up(run: RecordedRun, backend: str) -> Setup:
    """Make the plan again, and its memory up to the first step.

    Raise NotReplayable, and what a scenario raises that cannot be planned.
    """
    scenario = run.scenario
    _check_kind(scenario)
    results = scenario.results.model_copy(update={"memory_trace": True})
    plan = ServerPlan(scenario.model_copy(update={"results": results}))
    vendors = {"emulated": ("ascend",), "npu": ("ascend",), "cuda": ("nvidia",)}
    if plan.device.vendor not in vendors[backend]:
        other = "cuda" if backend != "cuda" else "emulated or npu"
        raise NotReplayable(
            f"the run is of {plan.device.name}, whose allocator has other rules than the one of --backend {backend}: "
            f"use --backend {other}, or simulate a device of that kind"
        )
    memory = ServerMemory(plan)
    general = memory.general
    assert isinstance(general, CachingAllocator)
    limit, fraction = memory.limit_bytes, general.conf.per_process_memory_fraction
    cap = min(limit, int(fraction * memory.driver.capacity_bytes)) if fraction < 1 else limit
    region = 0
    if memory.arena is not general:
        (segment,) = memory.arena.walk()
        region = segment.size
    trace = memory.recorder.memory_trace()
    assert trace is not None
    return Setup(plan, memory, cap, region, int((trace["allocator"] == general.name).sum()))


def _check_kind(scenario: Scenario) -> None:
    memory = scenario.memory
    if memory.general != "caching":
        raise NotReplayable(
            f"memory.general = {memory.general!r}: no binary of this allocator exists, only of 'caching'; validate a "
            "run with memory.general = 'caching'"
        )
    if memory.kv_arena != "caching" and "region" not in device_allocators.get(memory.kv_arena).features:
        raise NotReplayable(
            f"memory.kv_arena = {memory.kv_arena!r} takes driver memory as it goes, which no binary does beside "
            "torch's allocator; validate a run whose KV lies in 'caching' or in one region, such as 'pooled'"
        )


def fraction_of(limit: int, total: int) -> float:
    """What caps a process at exactly *limit* bytes: torch multiplies, and cuts the result off."""
    found = limit / total
    while int(found * total) < limit:
        found = math.nextafter(found, 1.0)
    return found


def case_of(run: RecordedRun, setup: Setup, *, told: bool) -> tuple[Case, Ints]:
    """The operations of torch's allocator under the run's cap; and of each row of the trace the last of them so far.

    A region is there once what precedes it is done: the driver is *told* of its bytes, or the cap is lowered by them.
    """
    memory, cap = setup.memory, setup.cap_bytes
    total = memory.driver.capacity_bytes
    beside = memory.static_bytes + memory.driver.tenants_bytes
    ops = list(run.ops.get("caching", ()))
    extra_at = len(ops) + 1
    if setup.region_bytes:
        extra_at = min(setup.before_region, len(ops))
        region = setup.region_bytes
        less = MemoryOp("set_fraction", arg=repr(fraction_of(min(cap, total - beside - region), total)))
        ops.insert(extra_at, MemoryOp("other_memory", size=beside + region) if told else less)
    first = [MemoryOp("set_fraction", arg=repr(fraction_of(cap, total)))] if cap < total else []
    settings = NpuSettings(total, tenants_bytes=beside, alloc_conf=run.scenario.memory.alloc_conf)
    done = np.cumsum(run.rows.allocator == "caching")
    index_of = done - 1 + len(first) + (done > extra_at)
    return Case(str(run.directory), [*first, *ops], settings), index_of.astype(np.int64)
