"""What a run wrote about its own memory, held to what the real allocator held at the same moments.

::

    timeline      bytes by kind at step ends    each row must be met, in order, by a state between its operations
    checkpoints   segments and blocks           at the number of operations that each of them names
    summary       peaks, retries, the death     at the end; its means over time are those of the timeline

None of these is made from the operation trace, so that a trace which lost an operation speaks against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.summary import memory_means
from hbmtwin.validation.emulated.records import RealRun
from hbmtwin.validation.run_replay.source import RecordedRun

Ints = NDArray[np.int64]

_REQUESTED = (
    *("weights", "activations", "kv_tokens", "kv_padding", "kv_state", "kv_parked", "kv_unfilled", "growth_copy"),
    "kv_cached",
)


class Check(NamedTuple):
    """One thing that was held to another."""

    name: str
    compared: int
    differing: int
    first: str
    """The first difference in words; empty where there is none."""


class Held(NamedTuple):
    """Bytes after each row of the trace."""

    driver: Ints
    """Taken from the driver, a region among it."""
    workspace: Ints
    reserved: Ints
    allocated: Ints
    requested: Ints
    region_allocated: Ints
    region_requested: Ints
    region_largest_free: Ints


def witnesses(
    run: RecordedRun, held: Held, real: RealRun, memory: ServerMemory, *, same_driver: bool
) -> Iterator[Check]:
    """Every witness there is. The text of the death names the driver's free bytes: it is one over the *same_driver*.

    O(rows of the trace and of the run's tables).
    """
    yield _timeline(run, held, memory)
    yield _means(run)
    yield _maps(run, held, memory)
    if run.is_whole:
        yield _summary(run, held, real, memory, same_driver=same_driver)


def _timeline(run: RecordedRun, held: Held, memory: ServerMemory) -> Check:
    line, rows = run.timeline, run.rows
    total = memory.driver.capacity_bytes
    # A region's largest free run stands in the books as free room of the pool; only KV that grows has none beside it.
    in_region, grows = memory.arena is not memory.general, memory.block_bytes is None
    in_pool, largest = line["kv_pool_free"].to_numpy(), held.region_largest_free * in_region
    asked = np.stack(
        [
            (total - line["tenants"] - line["static"] - line["driver_free"]).to_numpy(),
            line["rounding"].to_numpy(),
            line[list(_REQUESTED)].sum(axis=1).to_numpy() + (0 if grows else in_pool),
            in_pool * grows,
        ],
        axis=1,
    )
    there = np.stack(
        [
            held.driver,
            held.allocated - held.requested + held.region_allocated - held.region_requested,
            held.requested + held.region_requested + held.workspace + (0 if grows else largest),
            largest * grows,
        ],
        axis=1,
    )
    times = line["time_ns"].to_numpy()
    lows = np.maximum(np.searchsorted(rows.time_ns, times, "left") - 1, 0)
    highs = np.searchsorted(rows.time_ns, times, "right")
    at, differing, compared, first = 0, 0, 0, ""
    for i in range(len(line)):
        if highs[i] >= len(rows) and not run.is_whole:
            break
        compared += there.shape[1]
        low = max(at, int(lows[i]))
        met = np.flatnonzero((there[low : highs[i]] == asked[i]).all(axis=1))
        if len(met):
            at = low + int(met[0])
            continue
        differing += 1
        if not first:
            last = there[min(int(highs[i]), len(rows)) - 1]
            names = ("bytes of the driver", "rounding", "requested", "the largest free run")
            told = ", ".join(f"{n} {a} and not {b}" for n, a, b in zip(names, last, asked[i], strict=True) if a != b)
            first = f"at {times[i] / 1e9:.3f} s: {told or 'only behind the moment of the row before'}"
    return Check("the run's books at step ends", compared, differing, first)


def _means(run: RecordedRun) -> Check:
    """A row that was lost or edited, and no state of the allocator speaks against, moves what the run summed up."""
    wrong = []
    found = memory_means(run.timeline, run.summary["kv_budget_bytes"])
    for name, there in found.items():
        told = run.summary.get(name)
        if told is None or there is None:
            same = told is there
        else:
            same = isinstance(told, int | float) and isclose(told, there, rel_tol=1e-9, abs_tol=1e-12)
        if not same:
            wrong.append(f"{name}: the run says {told}, and the rows of its timeline come to {there}")
    return Check("the means of the run's books", len(found), len(wrong), "; ".join(wrong))


def _maps(run: RecordedRun, held: Held, memory: ServerMemory) -> Check:
    """Segments and blocks of torch's allocator in each address map, summed."""
    table = run.checkpoints
    pool = f"{memory.general.name}/"
    compared = differing = 0
    first = ""
    segments = table[(table["level"] == "segment") & table["state"].str.startswith(pool)]
    inside = _BlocksOf(run, memory)
    moments = dict.fromkeys(zip(segments["time_ns"].tolist(), segments["op_index"].tolist(), strict=True))
    for time_ns, op_index in moments:
        if not 0 < op_index <= len(run.rows):
            continue
        row = op_index - 1
        of_map = segments[(segments["time_ns"] == time_ns) & (segments["op_index"] == op_index)]
        allocated, requested = inside.sums(time_ns, op_index)
        told = (int(of_map["size"].sum()), allocated, requested)
        there = (int(held.reserved[row]), int(held.allocated[row]), int(held.requested[row]))
        compared += len(told)
        if told != there:
            differing += 1
            first = first or (
                f"after operation {op_index}: reserved, allocated and requested are {told} in the run's map, measured "
                f"{there}"
            )
    return Check("the run's address maps", compared, differing, first)


class _BlocksOf:
    """Sums over the blocks in use of torch's allocator; blocks of a region lie within its addresses."""

    def __init__(self, run: RecordedRun, memory: ServerMemory) -> None:
        table = run.checkpoints
        self._blocks = table[(table["level"] == "block") & (table["state"] == "active_allocated")]
        self._region: tuple[int, int] | None = None
        if memory.arena is not memory.general:
            (segment,) = memory.arena.walk()
            self._region = (segment.address, segment.address + segment.size)

    def sums(self, time_ns: int, op_index: int) -> tuple[int, int]:
        blocks = self._blocks
        of_map = blocks[(blocks["time_ns"] == time_ns) & (blocks["op_index"] == op_index)]
        if self._region is not None:
            low, high = self._region
            of_map = of_map[(of_map["address"] < low) | (of_map["address"] >= high)]
        return int(of_map["size"].sum()), int(of_map["requested"].sum())


def _summary(run: RecordedRun, held: Held, real: RealRun, memory: ServerMemory, *, same_driver: bool) -> Check:
    """Peaks and retries at the end, and the text of the death."""
    last = dict(zip(real.stat_names, real.stats[-1].tolist(), strict=True)) if len(real.stats) else {}
    in_region = memory.arena is not memory.general
    region = memory.arena.stats()["reserved_bytes.all.peak"] if in_region else 0
    region_peak = int(held.region_requested.max(initial=0)) if in_region else 0
    summary = run.summary
    pairs = [
        ("peak_reserved_bytes", summary["peak_reserved_bytes"], last.get("reserved_bytes.all.peak", 0) + region),
        (
            "peak_requested_bytes",
            summary["peak_requested_bytes"],
            last.get("requested_bytes.all.peak", 0) + region_peak,
        ),
        ("num_alloc_retries", summary["num_alloc_retries"], last.get("num_alloc_retries", 0)),
    ]
    oom = summary["oom"]
    if oom is not None and oom["torch_message"] and same_driver:
        texts = [error.text for error in real.errors.values() if error.kind == "OutOfMemoryError"]
        pairs.append(("the text of the death", oom["torch_message"], texts[-1] if texts else "no death"))
    wrong = [(name, told, there) for name, told, there in pairs if told != there]
    first = "; ".join(f"{name}: the run says {told}, measured {there}" for name, told, there in wrong)
    return Check("the run's peaks, retries and death", len(pairs), len(wrong), first)
