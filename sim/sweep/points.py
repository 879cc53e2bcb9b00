"""What the runs of a point come to, over its seeds, and which points nothing beats.

::

    runs of (paged, 120)    held held held out_of_memory ...           17 of 20
                             |
    survival                0.85, and with 95 % confidence between 0.62 and 0.97 (Clopper-Pearson)
    ttft_p99_s ... of those that held: median, and between which two of them the true median lies with 95 % confidence
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

from hbmtwin.sim.capacity.confidence import clopper_pearson
from hbmtwin.sim.sweep.run_row import LATENCY_COLUMNS

CONFIDENCE = 0.95
MEASURED = (*LATENCY_COLUMNS, "requests_per_s", "output_tokens_per_s", "share_met", "kv_usage_peak", "least_free_bytes")
"""Columns of which a point has a middle."""
STARTED_NOT = ("illegal", "does_not_fit", "failed")
"""Outcomes that say nothing of how traffic is survived."""


class Spread(NamedTuple):
    """A middle, and a band that holds the true one with 95 % confidence, or all runs where they are too few."""

    median: float
    low: float
    high: float


class PointSummary(NamedTuple):
    """One combination over its seeds."""

    settings: dict[str, Any]
    runs: int
    """Those that started and did not fail."""
    held: int
    survival: Spread | None
    """Share of the runs that held; None where none started."""
    outcomes: dict[str, int]
    """Of all its runs; those that died by cause."""
    measured: dict[str, Spread]
    """Of the runs that held: what a run measures that died covers only what it lived through."""


def point_summaries(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[PointSummary]:
    """The summaries of a sweep's rows, in their order. O(rows log seeds)."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [_summary(dict(zip(keys, values, strict=True)), own) for values, own in grouped.items()]


def _summary(settings: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> PointSummary:
    started = [row for row in rows if row["outcome"] not in STARTED_NOT]
    held = [row for row in started if row["outcome"] == "held"]
    survival = None
    if started:
        survival = Spread(len(held) / len(started), *clopper_pearson(len(held), len(started), CONFIDENCE))
    ends = Counter(str(row["cause"] if row["outcome"] != "held" else "held") for row in rows)
    columns = {name: [row[name] for row in held if row[name] is not None] for name in MEASURED}
    return PointSummary(
        settings,
        len(started),
        len(held),
        survival,
        dict(sorted(ends.items(), key=lambda item: (-item[1], item[0]))),
        {name: spread(values) for name, values in columns.items() if values},
    )


def spread(values: Sequence[float]) -> Spread:
    """The median and its band: the k-th smallest and largest, where the true median lies between them in 95 of 100
    samples whatever the distribution; both ends where six are not there. O(n log n)."""
    ordered = sorted(values)
    n = len(ordered)
    outside, rank = 0.0, 0  # the chance that the true median lies below the rank-th smallest
    while rank < n // 2 and 2 * (outside + comb(n, rank) / 2**n) <= 1 - CONFIDENCE:
        outside += comb(n, rank) / 2**n
        rank += 1
    rank = max(rank, 1)
    return Spread(float(median(ordered)), float(ordered[rank - 1]), float(ordered[n - rank]))


def capacity_of(point: PointSummary) -> float | None:
    """What a point serves: ``workload.users`` where the grid varies them, else completed requests a second."""
    users = point.settings.get("workload.users")
    if isinstance(users, int):
        return float(users)
    served = point.measured.get("requests_per_s")
    return None if served is None else served.median


def pareto(points: Sequence[PointSummary], latency: str) -> list[PointSummary]:
    """Points that held with every seed and that no other such point beats: as many served, and as fast. By capacity.

    O(n log n).
    """
    found = [
        (capacity, point.measured[latency].median, point)
        for point in points
        if point.runs and point.held == point.runs and latency in point.measured
        if (capacity := capacity_of(point)) is not None
    ]
    front: list[PointSummary] = []
    best = float("inf")
    for _, seconds, point in sorted(found, key=lambda item: (-item[0], item[1])):
        if seconds < best:
            best = seconds
            front.append(point)
    return front[::-1]
