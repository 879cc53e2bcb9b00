"""When sessions arrive, whatever the server does: a renewal process, and rates that change under it.

::

    gaps of a family, over the rate   ->  cumulated  ->  bursts bend the clock  ->  so does a rate curve
    (or over the ramp's rate at i)        (rescaled)

Session *i* arrives one gap after session *i* - 1. Real traffic is near Poisson within minutes while its mean moves
2-3 times over minutes, so that arrival counts of a minute vary far more than Poisson's: :class:`Bursts` adds that,
and a :class:`~hbmtwin.workloads.rates.RateCurve` what a day does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import IntArray, Purpose
from hbmtwin.workloads.gaps import Pattern, gaps_of
from hbmtwin.workloads.plural import counted
from hbmtwin.workloads.rates import Ramp, RateCurve
from hbmtwin.workloads.records import WorkloadError

CHUNK = 8192
"""Sessions drawn at a time: enough to make arrays worth it, little enough to be no memory."""
_LAST_NS = 2**62


@dataclass(frozen=True, slots=True)
class Bursts:
    """In each cycle of *every_s* seconds, *length_s* seconds at *factor* times the mean rate, at a random moment.

    The rest of the cycle is so much calmer that the mean over every cycle stays what it was. Raise WorkloadError if
    that cannot be.
    """

    every_s: float
    length_s: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.length_s < self.every_s < math.inf:
            raise WorkloadError(f"a burst of {self.length_s} s does not fit in a cycle of {self.every_s} s")
        if not (self.factor >= 1 and self.calm_factor > 0):
            raise WorkloadError(
                f"bursts of {self.length_s} s in {self.every_s} s can be 1 to just under "
                f"{self.every_s / self.length_s:g} times the mean rate, not {self.factor}"
            )

    @property
    def calm_factor(self) -> float:
        """Rate between bursts, as a multiple of the mean."""
        return (self.every_s - self.length_s * self.factor) / (self.every_s - self.length_s)

    def bend(self, times_ns: IntArray, seed: int) -> IntArray:
        """Move arrivals of a process with a steady rate to where the same share of this rate has passed."""
        cycle = times_ns // round(self.every_s * 1e9)
        passed_s = times_ns / 1e9 - cycle * self.every_s
        # One draw a cycle; arrivals of one chunk share few cycles, yet a draw each is cheaper than finding them.
        burst_s = draws.uniforms(seed, Purpose.BURST, cycle, 0) * (self.every_s - self.length_s)
        before = burst_s * self.calm_factor
        within = before + self.length_s * self.factor
        bent = np.where(
            passed_s < before,
            passed_s / self.calm_factor,
            np.where(
                passed_s < within,
                burst_s + (passed_s - before) / self.factor,
                burst_s + self.length_s + (passed_s - within) / self.calm_factor,
            ),
        )
        moved: IntArray = np.rint((cycle * self.every_s + bent) * 1e9).astype(np.int64)
        return moved


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Sessions at *request_rate* a second; infinite means all at time 0. Raise WorkloadError on bad figures.

    Gaps are of the family *pattern* with the shape *burstiness* (:mod:`hbmtwin.workloads.gaps`); *bursts*, and over
    them *curve*, run the clock faster and slower. A *ramp* takes the place of ``request_rate``, which must then be
    infinite, as on vLLM's command line.
    """

    request_rate: float
    burstiness: float = 1.0
    bursts: Bursts | None = None
    pattern: Pattern = "gamma"
    curve: RateCurve | None = None
    ramp: Ramp | None = None
    rescale_gaps: bool = False
    """Stretch the gaps so that the last session arrives at sessions / request_rate, as ``vllm bench serve`` does
    without a ramp: the span of a run then has no randomness."""
    key: str = "workload.request_rate"
    """What a user calls the rate, for errors."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise WorkloadError(f"request_rate must be above 0 a second (inf: all at once), not {self.request_rate}")
        gaps_of(self.pattern, self.burstiness)
        if self.ramp is not None and not (math.isinf(self.request_rate) and self.bursts is None and self.curve is None):
            raise WorkloadError("a ramp goes without request_rate, bursts and rate_curve: it is the rate itself")
        if self.ramp is None and math.isinf(self.request_rate):
            if self.bursts is not None:
                raise WorkloadError("bursts need a finite request_rate")
            if self.curve is not None:
                raise WorkloadError("a rate_curve needs a finite request_rate, which it multiplies")
        if self.rescale_gaps and not (self.ramp is None and self.bursts is None and self.curve is None):
            raise WorkloadError("rescale_gaps goes without ramp, bursts and rate_curve: their span is not N / rate")

    def times_ns(self, seed: int, sessions: int, *, chunk: int = CHUNK) -> Iterator[IntArray]:
        """Arrival times of sessions 0, 1, ... in order, *chunk* at a time. O(sessions) in all.

        Raise WorkloadError when they would leave the clock's range, some 146 years.
        """
        if not self.rescale_gaps or math.isinf(self.request_rate):
            yield from self._times_ns(seed, sessions, chunk)
            return
        total_ns = 0
        for times in self._times_ns(seed, sessions, CHUNK):  # drawn twice, so that none need be kept
            total_ns = int(times[-1])
        factor = sessions / self.request_rate * 1e9 / total_ns if total_ns else 1.0
        for times in self._times_ns(seed, sessions, chunk):
            yield np.rint(times * factor).astype(np.int64)

    def _too_slow(self) -> str:
        """Which rate lets the last of them arrive beyond the clock, and the cure."""
        if self.ramp is None:
            key, pace = self.key, f"at a request_rate of {self.request_rate}"
        else:
            start, end = self.ramp.start_rps, self.ramp.end_rps
            key = f"workload.ramp_up_{'start' if start <= end else 'end'}_rps"
            pace = f"on a ramp from {start:g} to {end:g} a second"
        return f"{pace} take over 146 years: raise {key}, or take fewer workload.num_prompts"

    def _times_ns(self, seed: int, sessions: int, chunk: int) -> Iterator[IntArray]:
        gaps, last, last_bent = gaps_of(self.pattern, self.burstiness), 0, 0
        for first in range(0, sessions, chunk):
            ids = np.arange(first, min(first + chunk, sessions), dtype=np.int64)
            rate = self.request_rate if self.ramp is None else self.ramp.rates(ids, sessions)
            if self.ramp is None and math.isinf(self.request_rate):
                yield np.zeros(len(ids), dtype=np.int64)
                continue
            with np.errstate(over="ignore"):  # infinity is too long as well
                gaps_ns = np.rint(gaps.drawn(seed, ids) / rate * 1e9)
                too_long = last + float(gaps_ns.sum()) > _LAST_NS
            if too_long:
                raise WorkloadError(f"{counted(sessions, 'session')} {self._too_slow()}")
            times = last + np.cumsum(gaps_ns.astype(np.int64))
            last = int(times[-1])
            if self.bursts is not None or self.curve is not None:
                bent = times if self.bursts is None else self.bursts.bend(times, seed)
                # Rounding to a nanosecond could swap two neighbours at a change of rate.
                bent = np.maximum.accumulate(bent)
                bent = bent if self.curve is None else np.maximum.accumulate(self.curve.bend(bent))
                times = np.maximum(bent, last_bent)
                last_bent = int(times[-1])
            yield times
