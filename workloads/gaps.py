"""Gaps between arrivals, as multiples of their mean: the families that benchmarks and trace studies name.

::

    pattern    gap with mean 1              CV                                   called so by
    constant   1                            0                                    GuideLLM, AIPerf; vLLM: burstiness inf
    poisson    -log u                       1                                    everybody
    gamma      Gamma(shape k) / k           1 / sqrt(k)                          vLLM's burstiness k; BurstGPT
    weibull    (-log u)^(1/c) / G(1 + 1/c)  sqrt(G(1 + 2/c) / G(1 + 1/c)^2 - 1)  ServeGen, per window

G is the gamma function. Shape 1 is Poisson in both families, less is burstier. Gaps are keyed by session, and
have the same bits on every machine: only the functions of :mod:`hbmtwin.workloads.inverse` are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from hbmtwin.workloads import draws, inverse
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose
from hbmtwin.workloads.records import WorkloadError

Pattern = Literal["constant", "poisson", "gamma", "weibull"]
MIN_GAMMA_SHAPE, MIN_WEIBULL_SHAPE, MAX_SHAPE = 0.01, 0.05, 1e6
"""Gamma gaps have a CV of up to 10, Weibull gaps one of up to 3.7e5: below lies a mistake, or a gap under a ns."""
_MAX_WEIBULL_CV = 1e5


class Gaps(Protocol):
    """A family with its shape."""

    def drawn(self, seed: int, sessions: IntArray) -> FloatArray:
        """The gap before each session; their mean is 1."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantGaps:
    """Every gap alike."""

    def drawn(self, seed: int, sessions: IntArray) -> FloatArray:
        """1 for each."""
        return np.ones(len(sessions))


@dataclass(frozen=True, slots=True)
class PoissonGaps:
    """Exponential gaps: arrivals without memory."""

    def drawn(self, seed: int, sessions: IntArray) -> FloatArray:
        """-log u for each."""
        return -inverse.logs(draws.uniforms(seed, Purpose.ARRIVAL, sessions, 0))


@dataclass(frozen=True, slots=True)
class GammaGaps:
    """Gamma gaps of a *shape*, which vLLM calls burstiness."""

    shape: float

    def drawn(self, seed: int, sessions: IntArray) -> FloatArray:
        """A gamma variate over its mean, for each."""
        return _gammas(self.shape, seed, sessions) / self.shape


@dataclass(frozen=True, slots=True)
class WeibullGaps:
    """Weibull gaps of a *shape*."""

    shape: float

    def drawn(self, seed: int, sessions: IntArray) -> FloatArray:
        """(-log u)^(1 / shape) over its mean, for each."""
        waits = -inverse.logs(draws.uniforms(seed, Purpose.ARRIVAL, sessions, 0))
        powers = inverse.logs(waits) / self.shape - inverse.log_gamma(1 + 1 / self.shape)
        # The floor keeps exp in range: it is far below 1 ns.
        return inverse.exps(np.maximum(powers, -600.0))


def gaps_of(pattern: Pattern, burstiness: float) -> Gaps:
    """The family *pattern* with the shape *burstiness*; infinite: constant gaps. Raise WorkloadError."""
    if pattern in ("constant", "poisson"):
        if burstiness != 1:
            raise WorkloadError(f"{pattern} gaps have no burstiness; leave it 1, or take gamma or weibull")
        return ConstantGaps() if pattern == "constant" else PoissonGaps()
    lowest = MIN_GAMMA_SHAPE if pattern == "gamma" else MIN_WEIBULL_SHAPE
    if not (lowest <= burstiness <= MAX_SHAPE or burstiness == math.inf):
        raise WorkloadError(f"burstiness is from {lowest} to 1e6 (1 is Poisson), or inf, not {burstiness}")
    if burstiness == 1:
        return PoissonGaps()
    if burstiness == math.inf:
        return ConstantGaps()
    return GammaGaps(burstiness) if pattern == "gamma" else WeibullGaps(burstiness)


def burstiness_of(pattern: Pattern, cv: float) -> float:
    """The burstiness whose gaps have the coefficient of variation *cv*. Raise WorkloadError where there is none."""
    if pattern in ("constant", "poisson"):
        raise WorkloadError(f"{pattern} gaps have a CV of {0 if pattern == 'constant' else 1}; take gamma or weibull")
    highest = 10 if pattern == "gamma" else _MAX_WEIBULL_CV
    if not 0 <= cv <= highest:
        raise WorkloadError(f"cv of {pattern} gaps is from 0 to {highest:g} (1 is Poisson), not {cv}")
    if cv < 1 / math.sqrt(MAX_SHAPE):
        return math.inf
    return 1 / (cv * cv) if pattern == "gamma" else _weibull_shape(cv)


def weibull_cv(shape: float) -> float:
    """Coefficient of variation of a Weibull distribution. O(1)."""
    power = inverse.log_gamma(1 + 2 / shape) - 2 * inverse.log_gamma(1 + 1 / shape)
    return math.sqrt(max(inverse.exp(power) - 1, 0.0))


def _weibull_shape(cv: float) -> float:
    """By halving: the CV falls from 3.7e5 at the least shape to nearly 0, and has no inverse in closed form."""
    if cv == 1:
        return 1.0
    low, high = MIN_WEIBULL_SHAPE, 2e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        if weibull_cv(middle) > cv:
            low = middle
        else:
            high = middle
    return high


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
