"""OOM points as curves with bands: shares of draws, at growing loads and at growing places within a run.

::

    share
      1 |                         ____--       exact binomial bounds (Clopper-Pearson, 95 %) around
        |                   ____--              ended draws / draws, at each load for itself
      0 |______________-----
        +-------------------------------> load (or, of the runs at the critical loads: users, turn, time, operations)

A draw that does not fail stays in the denominator: a curve that ends below 1 says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hbmtwin.sim.capacity.confidence import clopper_pearson
from hbmtwin.sim.capacity.oom_point import CriticalLoad, OomPoint
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.capacity.smallest_memory import SmallestMemory
from hbmtwin.sim.sweep.run_row import Row

CONFIDENCE = 0.95
PLACES = {
    "users": "died_users",
    "turn": "died_turn",
    "time_s": "died_at_s",
    "operations": "died_operations",
}
"""Where within a run, and the columns that say so."""


class Share(NamedTuple):
    """Draws of *n* that have come to an end at *at* or before, with the bounds on the probability behind them."""

    at: float
    ended: int
    n: int
    share: float
    low: float
    high: float


class Middle(NamedTuple):
    """The smallest memories of the draws at one load: middle and ends; None: more than was tried."""

    load: float
    n: int
    least_bytes: int | None
    median_bytes: int | None
    most_bytes: int | None


def share(count: int, n: int, at: float = 0.0) -> Share:
    """A share with its bounds."""
    low, high = clopper_pearson(count, n, CONFIDENCE)
    return Share(at, count, n, count / n, low, high)


def by_load(point: OomPoint, policy: str, end: End) -> list[Share]:
    """The share that has ended at each load; empty if every draw ended in an error. O(loads x draws)."""
    ended = point.of(policy, end)
    return [
        share(sum(c.load is not None and c.load <= load for c in ended), len(ended), load)
        for load in (point.load.values if ended else ())
    ]


def by_place(critical: Sequence[CriticalLoad], column: str) -> list[Share]:
    """Of the runs at the critical loads: the share of all draws that had died at each value of *column*, or before.

    A death that has no such place (the server did not start, or nobody's turn asked) counts from the first on.
    """
    values = [_place(c.row, column) for c in critical if c.row is not None]
    known = sorted({value for value in values if value is not None})
    return [share(sum(v is None or v <= at for v in values), len(critical), at) for at in known]


def causes(critical: Iterable[CriticalLoad]) -> dict[str, int]:
    """What the runs at the critical loads died of, the most frequent first."""
    return dict(Counter(str(c.row["cause"]) for c in critical if c.row is not None).most_common())


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that a share *q* of them does not pass; None for none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-q * len(ordered) // 1) - 1)] if ordered else None


def memory_by_load(smallest: Iterable[SmallestMemory], policy: str, end: End) -> list[Middle]:
    """Least, middle and most of the draws at each load; of an even number, the upper of the two middles."""
    loads: dict[float, list[int | None]] = {}
    for s in smallest:
        if (s.policy, s.end) == (policy, end):
            loads.setdefault(s.load, []).append(s.memory_bytes)
    middles = []
    for load, sizes in sorted(loads.items()):
        ordered = sorted(sizes, key=lambda size: (size is None, size or 0))
        middles.append(Middle(load, len(ordered), ordered[0], ordered[len(ordered) // 2], ordered[-1]))
    return middles


def _place(row: Row, column: str) -> Any:
    return row[column]
