"""When sessions arrive, whatever the server does: a renewal process, and bursts over it.

Session *i* arrives one gap after session *i* - 1. Gaps are exponential (a Poisson process) or, with a ``burstiness``
other than 1, gamma with that shape, as in ``vllm bench serve``. Real traffic is more: near Poisson within minutes
while its mean moves 2-3 times over minutes, so that arrival counts of a minute vary far more than Poisson's.
:class:`Bursts` adds that by running the clock of the process faster and slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hbmtwin.workloads import draws, inverse
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose
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

    Below 1, *burstiness* clusters arrivals, above 1 it evens them out: gaps have a coefficient of variation of
    1 / sqrt(burstiness).
    """

    request_rate: float
    burstiness: float = 1.0
    bursts: Bursts | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise WorkloadError(f"request_rate must be above 0 a second (inf: all at once), not {self.request_rate}")
        if not 0.01 <= self.burstiness <= 1e6:
            raise WorkloadError(f"burstiness is from 0.01 to 1e6 (1 is Poisson), not {self.burstiness}")
        if self.bursts is not None and math.isinf(self.request_rate):
            raise WorkloadError("bursts need a finite request_rate")

    def times_ns(self, seed: int, sessions: int) -> Iterator[IntArray]:
        """Arrival times of sessions 0, 1, ... in order, a chunk at a time. O(sessions) in all.

        Raise WorkloadError when they would leave the clock's range, some 146 years.
        """
        last, last_bent = 0, 0
        for first in range(0, sessions, CHUNK):
            ids = np.arange(first, min(first + CHUNK, sessions), dtype=np.int64)
            if math.isinf(self.request_rate):
                yield np.zeros(len(ids), dtype=np.int64)
                continue
            with np.errstate(over="ignore"):  # infinity is too long as well
                gaps_ns = np.rint(self._gaps(seed, ids) / self.request_rate * 1e9)
                too_long = last + float(gaps_ns.sum()) > _LAST_NS
            if too_long:
                raise WorkloadError(
                    f"{sessions} sessions at a request_rate of {self.request_rate} take over 146 years: raise "
                    "workload.request_rate, or take fewer workload.num_prompts"
                )
            times = last + np.cumsum(gaps_ns.astype(np.int64))
            last = int(times[-1])
            if self.bursts is not None:
                # Rounding to a nanosecond could swap two neighbours at a change of rate.
                times = np.maximum(np.maximum.accumulate(self.bursts.bend(times, seed)), last_bent)
                last_bent = int(times[-1])
            yield times

    def _gaps(self, seed: int, sessions: IntArray) -> FloatArray:
        """Gaps with mean 1 before each session."""
        if self.burstiness == 1.0:
            return -inverse.logs(draws.uniforms(seed, Purpose.ARRIVAL, sessions, 0))
        return _gammas(self.burstiness, seed, sessions) / self.burstiness


def _gammas(shape: float, seed: int, sessions: IntArray) -> FloatArray:
    """One gamma variate a session, by the squeeze of Marsaglia and Tsang (ACM TOMS 26, 2000), without the squeeze.

    The inverse CDF has no closed form, so a session may need several tries, keyed by the number of the try; more
    than nine in ten succeed at once.
    """
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    result = np.empty(len(sessions))
    left = np.arange(len(sessions))
    attempt = 0
    while len(left):
        z = inverse.normals(draws.uniforms(seed, Purpose.ARRIVAL, sessions[left], attempt))
        u = draws.uniforms(seed, Purpose.ARRIVAL_REJECTION, sessions[left], attempt)
        v = np.maximum(1 + c * z, 1e-9)
        v = v * v * v
        accepted = (1 + c * z > 0) & (inverse.logs(u) < z * z / 2 + d - d * v + d * inverse.logs(v))
        result[left[accepted]] = d * v[accepted]
        left = left[~accepted]
        attempt += 1
    if shape < 1:
        # A gamma of shape k is one of shape k + 1 times u^(1/k). The floor keeps exp in range: it is far below 1 ns.
        boost = inverse.logs(draws.uniforms(seed, Purpose.ARRIVAL_BOOST, sessions, 0)) / shape
        result = result * inverse.exps(np.maximum(boost, -600.0))
    return result
