"""Distributions of vLLM's multi-turn benchmark: whole numbers from 0, as its JSON states them.

::

    {"distribution": "constant",  "value": 500}
    {"distribution": "uniform",   "min": 12, "max": 18}                        both included
    {"distribution": "lognormal", "average": 1000, "median_ratio": 0.85, "max": 5000}
    {"distribution": "lognormal", "mean": 6, "sigma": 0.5, "max": 5000}        of the logarithm, as numpy's
    {"distribution": "zipf",      "alpha": 1.2, "max": 1000}
    {"distribution": "poisson",   "alpha": 40, "max": 100}

What passes ``max`` is set to it. Source: ``benchmarks/multi_turn/bench_dataset.py`` of vLLM. It scales a log-normal of
an ``average`` so that the sample has it; here the distribution has it, before ``max``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hbmtwin.workloads import inverse
from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.tables import Table, naming

MEDIAN_RATIO = 0.85
"""Median by average, where a log-normal has no other."""
_LARGEST_TABLE = 10**6
_ZETA_TERMS = 1000
"""Summed one by one; what is beyond is an integral with two corrections, exact to 1e-12."""


class Count(Protocol):
    """A distribution of whole numbers from 0."""

    def at(self, u: float) -> int:
        """The number at quantile *u*, strictly between 0 and 1."""
        ...


@dataclass(frozen=True, slots=True)
class UniformCount:
    """Each whole number from *low* to *high*, both included, equally often."""

    low: int
    high: int

    def at(self, u: float) -> int:
        """*low* plus the whole part of *u* times the number of values."""
        return min(self.high, self.low + int(u * (self.high - self.low + 1)))


@dataclass(frozen=True, slots=True)
class LogNormalCount:
    """exp(mu + sigma z), z the normal quantile; at most *max*, rounded."""

    mu: float
    sigma: float
    max: int

    def at(self, u: float) -> int:
        """The rounded value."""
        exponent = min(self.mu + self.sigma * inverse.normal(u), inverse.log(self.max))
        return min(self.max, round(inverse.exp(max(exponent, -600.0))))


@dataclass(frozen=True, slots=True)
class CumulativeCount:
    """*first*, *first* + 1, ... up to the shares *bounds* of all draws; above the last of them, the next number."""

    first: int
    bounds: tuple[float, ...]

    def at(self, u: float) -> int:
        """The number within whose share *u* lies. O(log of the numbers)."""
        return self.first + bisect_right(self.bounds, u)


def count_from(spec: object, name: str) -> Count:
    """Build the distribution that the benchmark's JSON states under *name*. Raise WorkloadError with the cure."""
    if not isinstance(spec, Mapping):
        raise WorkloadError(f'{name}: write a table such as {{"distribution": "constant", "value": 100}}, not {spec!r}')
    table = Table(spec, name, _KEYS)
    with naming(name):
        largest = table.whole_number("max", MAX_TOKENS) if table.distribution not in ("constant", "uniform") else 0
        match table.distribution:
            case "constant":
                value = _from_zero("value", table.whole_number("value"))
                return UniformCount(value, value)
            case "uniform":
                low, high = table.whole_number("min"), table.whole_number("max")
                if not 0 < low <= high <= MAX_TOKENS:
                    raise WorkloadError(f"0 < min <= max is needed, not {low}, {high}")
                return UniformCount(low, high)
            case "lognormal":
                return _log_normal(table, _from_zero("max", largest))
            case "zipf":
                return _zipf(table.number("alpha"), largest)
            case _:
                return _poisson(table.number("alpha"), _from_zero("max", largest))


def _from_zero(key: str, value: int) -> int:
    if not 0 <= value <= MAX_TOKENS:
        raise WorkloadError(f"{key} is from 0 to 2^40, not {value}")
    return value


def _log_normal(table: Table, largest: int) -> LogNormalCount:
    largest = largest or MAX_TOKENS  # as the benchmark: no max, and one of 0, are no limit
    if "average" in table:
        if "mean" in table or "sigma" in table:
            raise WorkloadError("give average (and median_ratio), or mean and sigma of the logarithm, not both")
        average, ratio = (
            table.number("average"),
            table.number("median_ratio") if "median_ratio" in table else MEDIAN_RATIO,
        )
        if not (1 <= average <= MAX_TOKENS and 0 < ratio < 1):
            raise WorkloadError(f"average is 1 or more and median_ratio between 0 and 1, not {average} and {ratio}")
        return LogNormalCount(inverse.log(average * ratio), math.sqrt(-2 * inverse.log(ratio)), largest)
    mean, sigma = table.number("mean"), table.number("sigma")
    if not (0 < mean <= 27 and 0 <= sigma <= 10):
        raise WorkloadError(
            f"mean of the logarithm is above 0 and up to 27, sigma from 0 to 10, not {mean} and {sigma}"
        )
    return LogNormalCount(mean, sigma, largest)


def _zipf(alpha: float, largest: int) -> CumulativeCount:
    """Zipf's law over all whole numbers from 1, what passes *largest* set to it."""
    if not 1 < alpha <= 100:
        raise WorkloadError(f"alpha of a Zipf distribution is above 1 and up to 100, not {alpha}")
    if not 1 <= largest <= _LARGEST_TABLE:
        raise WorkloadError(f"max is needed, from 1 to {_LARGEST_TABLE:,}: a Zipf distribution has no largest value")
    numbers = np.arange(1, max(largest, _ZETA_TERMS) + 1, dtype=np.float64)
    weights = inverse.exps(np.maximum(-alpha * inverse.logs(numbers), -600.0))
    n = _ZETA_TERMS
    beyond = inverse.exp(-(alpha - 1) * inverse.log(n)) if alpha < 80 else 0.0
    zeta = float(weights[:n].sum()) + beyond * (1 / (alpha - 1) - 1 / (2 * n) + alpha / (12 * n * n))
    return CumulativeCount(1, tuple((np.cumsum(weights[: largest - 1]) / zeta).tolist()))


def _poisson(alpha: float, largest: int) -> CumulativeCount:
    if not 0 < alpha <= _LARGEST_TABLE:
        raise WorkloadError(f"alpha of a Poisson distribution is above 0 and up to {_LARGEST_TABLE:,}, not {alpha}")
    spread = 10 * math.sqrt(alpha) + 20  # beyond lies less than a draw can tell
    first, last = max(0, math.floor(alpha - spread)), math.ceil(alpha + spread)
    log_alpha = inverse.log(alpha)
    shares = [inverse.exp(max(k * log_alpha - alpha - inverse.log_gamma(k + 1.0), -600.0)) for k in range(first, last)]
    bounds = np.cumsum(shares)
    largest = largest or MAX_TOKENS
    kept = min(len(bounds), max(0, largest - first))
    return CumulativeCount(min(first, largest), tuple(np.minimum(bounds[:kept], 1.0).tolist()))


_KEYS = {
    "constant": ("value",),
    "uniform": ("min", "max"),
    "lognormal": ("average", "median_ratio", "mean", "sigma", "max"),
    "zipf": ("alpha", "max"),
    "poisson": ("alpha", "max"),
}
