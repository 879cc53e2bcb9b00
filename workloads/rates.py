"""Rates that change: a curve over time that repeats, and a ramp over requests.

::

    RateCurve   factor                      the clock of a steady process runs faster and slower:
                  2 |      ____             an arrival moves to where the same share of the curve's
                  1 |_____/    \\__          area has passed, which keeps gaps random within it
                    0   1 h  2 h  3 h = 0

    Ramp        rate of request i of n:  start + (end - start) p   or   start (end / start)^p,  p = i / (n - 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from hbmtwin.workloads import inverse
from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.records import WorkloadError

Strategy = Literal["linear", "exponential"]
_SHORTEST_S, _LONGEST_S = 1e-3, 1e9
_LAST_NS = 2**62


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Factors on a rate at times, straight lines between; after the last time it starts anew.

    *points* are (seconds, factor). Two at the same time are a jump, so stages of constant rate can be said as well; a
    factor of 0 is silence. Raise WorkloadError unless times rise from 0 and some factor is above 0.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        p = self.points
        if len(p) < 2 or p[0][0] != 0:
            raise WorkloadError("a rate curve has two points or more, [seconds, factor], the first at 0 s")
        if not (all(a[0] <= b[0] for a, b in pairwise(p)) and _SHORTEST_S <= p[-1][0] <= _LONGEST_S):
            raise WorkloadError("times of a rate curve do not fall, and the last is from 1e-3 to 1e9 s")
        if not all(0 <= factor <= 1e9 for _, factor in p):
            raise WorkloadError("factors of a rate curve are from 0 to 1e9")
        if not self.period_s * 1e-6 <= self.areas_s[-1]:
            raise WorkloadError("the mean factor of a rate curve must be 1e-6 or more: else it is silent for ever")

    @property
    def period_s(self) -> float:
        """After which it repeats."""
        return self.points[-1][0]

    @property
    def mean_factor(self) -> float:
        """Over a period."""
        return self.areas_s[-1] / self.period_s

    @property
    def areas_s(self) -> tuple[float, ...]:
        """Integral of the factor up to each point: how far the steady clock is there."""
        areas = [0.0]
        for (t, factor), (t_next, factor_next) in pairwise(self.points):
            areas.append(areas[-1] + (t_next - t) * (factor + factor_next) / 2)
        return tuple(areas)

    def bend(self, times_ns: IntArray) -> IntArray:
        """Move arrivals of a steady process, in order, to where the same area has passed. O(times log points).

        Raise WorkloadError when they would leave the clock's range.
        """
        areas, t = np.array(self.areas_s), np.array([seconds for seconds, _ in self.points])
        factors = np.array([factor for _, factor in self.points])
        area_ns, period_ns = round(areas[-1] * 1e9), round(self.period_s * 1e9)
        cycle = times_ns // area_ns
        if len(cycle) and float(cycle[-1] + 1) * period_ns > _LAST_NS:
            raise WorkloadError("arrivals under this rate curve take over 146 years: raise its factors or the rate")
        rest = (times_ns - cycle * area_ns) / 1e9
        busy = np.flatnonzero(np.diff(areas) > 0)
        piece = busy[np.clip(np.searchsorted(areas[busy], rest, side="right") - 1, 0, len(busy) - 1)]
        within = np.minimum(rest - areas[piece], areas[piece + 1] - areas[piece])
        slope = (factors[piece + 1] - factors[piece]) / (t[piece + 1] - t[piece])
        # The time x with f x + slope x^2 / 2 = within, written so that nothing cancels.
        root = np.sqrt(np.maximum(factors[piece] * factors[piece] + 2 * slope * within, 0.0))
        below = factors[piece] + root
        passed = np.where(below > 0, 2 * within / np.where(below > 0, below, 1.0), 0.0)
        moved: IntArray = cycle * period_ns + np.rint((t[piece] + passed) * 1e9).astype(np.int64)
        return moved


@dataclass(frozen=True, slots=True)
class Ramp:
    """Requests a second from *start_rps* to *end_rps*, by the index of the request, as ``vllm bench serve`` has it."""

    strategy: Strategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        for name, rate in (("start", self.start_rps), ("end", self.end_rps)):
            if not 0 < rate < math.inf:
                raise WorkloadError(f"a ramp's {name} rate is above 0 a second and finite, not {rate}")

    def rates(self, ids: IntArray, total: int) -> FloatArray:
        """The rate before each request of *total*."""
        progress = ids / max(total - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        ratio = self.end_rps / self.start_rps
        if 0 < ratio < math.inf:
            return self.start_rps * inverse.exps(inverse.log(ratio) * progress)
        start, end = inverse.log(self.start_rps), inverse.log(self.end_rps)  # no float is their ratio
        return inverse.exps(start + (end - start) * progress)


def rate_curve_from(points: Sequence[Sequence[float]]) -> RateCurve:
    """A curve from ``[[seconds, factor], ...]``. Raise WorkloadError."""
    if any(len(point) != 2 for point in points):
        raise WorkloadError("each point of a rate curve is [seconds, factor]")
    return RateCurve(tuple((float(seconds), float(factor)) for seconds, factor in points))
