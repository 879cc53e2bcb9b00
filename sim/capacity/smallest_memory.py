"""The smallest HBM that survives: how much device memory serves a load, for each policy and each draw of its traffic.

::

    device.memory_bytes     16   24   28   30   31 GiB        all else, gpu_memory_utilization too, as in the scenario
    load 8, seed 0           x    x    x    .    .    29.8 GiB
    load 8, seed 1           x    x    .    .    .    27.2 GiB

*Survives* is the end of :mod:`hbmtwin.sim.capacity.oom_point` that did not come: no failure, and for a policy that
preempts, in a second search, no preemption either. Found by bisection to 1/32 GiB. More memory is not always better (a
best-fit allocator may cut itself up otherwise), so larger sizes are asked for as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from hbmtwin.sim.capacity.oom_point_runs import End, Question, Runs, reached, search_runs
from hbmtwin.sim.capacity.oom_point_search import smallest_size
from hbmtwin.sim.catalog import device
from hbmtwin.sim.sweep.run_row import Row

T = TypeVar("T")

UNIT_BYTES = 1 << 25
"""1/32 GiB: how finely it is found."""
MOST_UNITS = 1 << 15
"""1 TiB: no device has as much."""
MEMORY_LOADS = 4
"""Loads for which it is looked for, at most: evenly taken from those that are given, both ends among them."""


class SmallestMemory(NamedTuple):
    """The least device memory on which one draw of one load is served without that end."""

    policy: str
    end: End
    draw: int
    load: float
    memory_bytes: int | None
    """None: not on 1 TiB either."""
    monotone: bool
    """Whether no larger memory that was asked for failed where a smaller one held; if not, it lies above all that
    failed."""


def smallest_memories(runs: Runs, ends: Mapping[str, Sequence[End]]) -> tuple[SmallestMemory, ...]:
    """The smallest memory for some of the loads, and each draw, policy and end. About 15 runs each."""
    loads = evenly(runs.load.values, MEMORY_LOADS)
    draws = range(len(runs.draws))
    names = [(p, end, load, draw) for p in ends for end in ends[p] for load in loads for draw in draws]
    first = runs.scenario(Question(next(iter(ends)), 0, loads[0])).device
    guess = -(-(first.memory_bytes or device(first.name).memory_bytes) // UNIT_BYTES)

    def held(name: tuple[str, End, float, int], row: Row) -> bool | None:
        came = reached(name[1], row)
        return None if came is None else not came

    found = search_runs(
        runs,
        {name: smallest_size(guess, MOST_UNITS) for name in names},
        lambda name, units: Question(name[0], name[3], name[2], units * UNIT_BYTES),
        held,
    )
    smallest = []
    for (policy, end, load, draw), size in found.items():
        if size is not None:
            memory_bytes = None if size.units is None else size.units * UNIT_BYTES
            smallest.append(SmallestMemory(policy, end, draw, load, memory_bytes, size.monotone))
    return tuple(smallest)


def evenly(values: Sequence[T], most: int) -> list[T]:
    """At most so many of *values*, both ends among them, evenly apart."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
