"""Latency and bandwidth of all-reduces, from their times by size and ranks.

::

    time = latency of that many ranks + 2 (ranks - 1) / ranks * bytes / bandwidth      one bandwidth for all

as the cost model has it (:mod:`hbmtwin.kernels.roofline`). Eager calls of a device tell the bandwidth only: what a
small one takes is what the host needs to launch it, and an engine replays those in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hbmtwin.validation.bench.records import COLLECTIVES, Bench, BenchError, Point, held_out
from hbmtwin.validation.least_squares import fit_logarithms

Floats = npt.NDArray[np.float64]

MIN_SIZES = 4
"""Of each number of ranks."""
LATENCY_NS, BYTES_PER_NS = (3e4, 1.0, 1e10), (1e1, 1e-4, 1e6)
"""Where the search begins, and its bounds."""
HOST = "all_reduce: latencies of {points} eager calls, which are the host's: no graph was captured; the catalog's stay"


class Links(NamedTuple):
    """Latency by ranks and the common bandwidth, with their spread in logarithms."""

    latency_ns: dict[int, float]
    latency_spread: dict[int, float]
    bytes_per_ns: float
    bytes_spread: float

    def times_ns(self, points: Sequence[Point]) -> list[float]:
        """Of each point's case."""
        return [self.latency_ns[_ranks(p)] + _sent(p) / self.bytes_per_ns for p in points]


class LinkFit(NamedTuple):
    """What was fitted to which points, and predictions of points held back."""

    links: Links
    points: list[Point]
    held_back: list[tuple[Point, float]]
    keeps_latency: bool
    """Whether the latency is that of the device."""

    def of_ranks(self, ranks: int) -> list[Point]:
        """Its points of so many."""
        return [p for p in self.points if _ranks(p) == ranks]

    def validity(self) -> dict[str, tuple[float, float]]:
        """Ranks and bytes that were measured; one rank sends nothing, and a smaller message takes the latency."""
        named = [p.case.named() for p in self.points]
        return {
            "tensor_parallel_size": (1, max(n["ranks"] for n in named)),
            "allreduce_bytes": (0, max(n["bytes"] for n in named)),
        }


def fit_links(bench: Bench, folds: int) -> tuple[LinkFit | None, tuple[str, ...]]:
    """The fit to the benchmark's all-reduces, None where it has none; and what was left out.

    In graphs, where there are any such points. Raise BenchError for fewer than four sizes of a number of ranks.
    """
    by_op = {op: [p for p in bench.points if p.case.op == op] for op in COLLECTIVES}
    eager, graphed = by_op["all_reduce"], by_op["all_reduce_in_graph"]
    points = graphed or eager
    if not points:
        return None, ()
    for ranks in sorted({_ranks(p) for p in points}):
        sizes = {p.case.named()["bytes"] for p in points if _ranks(p) == ranks}
        if len(sizes) < MIN_SIZES:
            raise BenchError(
                f"all_reduce: {len(sizes)} sizes of {ranks} ranks, at least {MIN_SIZES} are needed; run a larger grid "
                "of hbmtwin bench collectives"
            )
    device = bench.backend != "cpu"
    left_out: tuple[str, ...] = ()
    if graphed and eager:
        left_out = (f"all_reduce: {len(eager)} points of eager calls, since an engine replays graphs",)
    elif device and not graphed:
        left_out = (HOST.format(points=len(eager)),)
    held_back = []
    for fold in range(folds):
        kept, held = held_out(points, folds, fold)
        held = [p for p in held if _ranks(p) in {_ranks(k) for k in kept}]
        held_back += list(zip(held, _fit(kept).times_ns(held), strict=True)) if held else []
    return LinkFit(_fit(points), points, held_back, bool(graphed) or not device), left_out


def _ranks(p: Point) -> int:
    return p.case.named()["ranks"]


def _sent(p: Point) -> float:
    n = p.case.named()
    return 2 * (n["ranks"] - 1) / n["ranks"] * n["bytes"]


def _fit(points: Sequence[Point]) -> Links:
    groups = sorted({_ranks(p) for p in points})
    which = np.array([groups.index(_ranks(p)) for p in points])
    sent = np.array([_sent(p) for p in points], np.float64)
    measured = np.array([p.median_ns for p in points], np.float64)

    def predicted(x: Floats) -> Floats:
        times: Floats = x[which] + sent / x[-1]
        return times

    start, low, high = (np.array([*[LATENCY_NS[i]] * len(groups), BYTES_PER_NS[i]], np.float64) for i in range(3))
    solved = fit_logarithms(predicted, measured, start, low, high)
    values, spread = solved.values.tolist(), solved.spread.tolist()
    return Links(
        dict(zip(groups, values[:-1], strict=True)),
        dict(zip(groups, spread[:-1], strict=True)),
        values[-1],
        spread[-1],
    )
