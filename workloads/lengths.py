"""How many tokens a prompt or an answer has, or how many turns a session: distributions over whole numbers from 1.

Each is a frozen record that turns a uniform number into a length by its inverse CDF, so that one keyed draw makes
one length (:mod:`hbmtwin.workloads.draws`). Where there is data, use :class:`Quantiles` or :class:`Values`: real
lengths have mass points and clips, and a log-normal has neither.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from hbmtwin.workloads import draws, inverse
from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.tables import Table, naming

MAX_TOKENS = 2**40
"""No length passes this: it keeps every sum of a run far inside 64 bits."""
_ZIPF_LENGTHS = 2**20


class Length(Protocol):
    """A distribution of lengths, all of them from 1 to :data:`MAX_TOKENS`."""

    def at(self, u: float) -> int:
        """The length at quantile *u*, strictly between 0 and 1."""
        ...

    def at_many(self, u: FloatArray) -> IntArray:
        """:meth:`at` of each element, exactly."""
        ...


def tokens_many(length: Length, seed: int, purpose: str, sessions: IntArray, turn: int) -> IntArray:
    """Draw a length for each of many sessions in the same turn, by its key. O(sessions)."""
    return length.at_many(draws.uniforms(seed, purpose, sessions, turn))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always *value*. Raise WorkloadError if that is below 1."""

    value: int

    def __post_init__(self) -> None:
        _check(1 <= self.value <= MAX_TOKENS, f"a length is from 1 to 2^40, not {self.value}")

    def at(self, u: float) -> int:
        """*value*."""
        return self.value

    def at_many(self, u: FloatArray) -> IntArray:
        """*value* for each."""
        return np.full(u.shape, self.value, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each whole number from *low* to *high*, both included, equally often. Raise WorkloadError on an empty range."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check(1 <= self.low <= self.high <= MAX_TOKENS, f"1 <= low <= high is needed, not {self.low}, {self.high}")

    def at(self, u: float) -> int:
        """*low* plus the whole part of *u* times the number of values."""
        return min(self.high, self.low + int(u * (self.high - self.low + 1)))

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        steps = (u * (self.high - self.low + 1)).astype(np.int64)
        return np.minimum(self.high, self.low + steps)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with arithmetic *mean* and *sigma*, the standard deviation of the logarithm, rounded.

    Lengths outside *min* and *max* are set to them, as a service's limit does to its prompts; ``mean`` is that
    before clipping. Raise WorkloadError on a mean that is not positive, a sigma outside 0 to 10, min above max.
    """

    mean: float
    sigma: float
    min: int = 1
    max: int = MAX_TOKENS

    def __post_init__(self) -> None:
        _check(0 < self.mean <= MAX_TOKENS, f"mean is above 0 and up to 2^40, not {self.mean}")
        _check(0 <= self.sigma <= 10, f"sigma is from 0 to 10, not {self.sigma}")
        _check(1 <= self.min <= self.max <= MAX_TOKENS, f"1 <= min <= max is needed, not {self.min}, {self.max}")

    def at(self, u: float) -> int:
        """exp(log mean - sigma^2 / 2 + sigma z), z the normal quantile; clipped and rounded."""
        x = inverse.exp(self._log_median + self.sigma * inverse.normal(u))
        return round(min(max(x, self.min), self.max))

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        x = inverse.exps(self._log_median + self.sigma * inverse.normals(u))
        return np.rint(np.minimum(np.maximum(x, self.min), self.max)).astype(np.int64)

    @property
    def _log_median(self) -> float:
        return inverse.log(self.mean) - self.sigma * self.sigma / 2


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Measured lengths: *values* at *probabilities*, straight lines between, rounded.

    Below the first and above the last probability the end values stand, so no length is made up that the table
    does not vouch for. Lengths outside *min* and *max*, a service's limits, are set to them. Raise WorkloadError
    unless probabilities rise within 0 to 1 and values do not fall.
    """

    probabilities: tuple[float, ...]
    values: tuple[int, ...]
    min: int = 1
    max: int = MAX_TOKENS

    def __post_init__(self) -> None:
        p, v = self.probabilities, self.values
        _check(len(p) == len(v) >= 2, f"as many values as probabilities, two or more, not {len(v)} and {len(p)}")
        _check(p[0] >= 0 and p[-1] <= 1, "probabilities are from 0 to 1")
        _check(all(a < b for a, b in pairwise(p)), "probabilities must rise")
        _check(all(a <= b for a, b in pairwise(v)), "values must not fall")
        _check(v[0] >= 1 and v[-1] <= MAX_TOKENS, "values are from 1 to 2^40")
        _check(1 <= self.min <= self.max <= MAX_TOKENS, f"1 <= min <= max is needed, not {self.min}, {self.max}")

    def at(self, u: float) -> int:
        """The interpolated value. O(log of the table)."""
        p, v = self.probabilities, self.values
        u = min(max(u, p[0]), p[-1])
        i = min(bisect_right(p, u), len(p) - 1) - 1
        length = round(v[i] + (v[i + 1] - v[i]) * ((u - p[i]) / (p[i + 1] - p[i])))
        return min(max(length, self.min), self.max)

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        p, v = np.array(self.probabilities), np.array(self.values, dtype=np.float64)
        u = np.minimum(np.maximum(u, p[0]), p[-1])
        i = np.minimum(np.searchsorted(p, u, side="right"), len(p) - 1) - 1
        lengths: IntArray = np.rint(v[i] + (v[i + 1] - v[i]) * ((u - p[i]) / (p[i + 1] - p[i]))).astype(np.int64)
        return np.minimum(np.maximum(lengths, self.min), self.max)


@dataclass(frozen=True, slots=True)
class Values:
    """Mass points: *values*, each as often as its weight says, and nothing between them.

    Raise WorkloadError unless there are as many weights, from 0 on and one of them above.
    """

    values: tuple[int, ...]
    weights: tuple[float, ...]
    _bounds: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        v, w = self.values, self.weights
        _check(len(v) == len(w) >= 1, f"as many weights as values, one or more, not {len(w)} and {len(v)}")
        _check(min(v) >= 1 and max(v) <= MAX_TOKENS, "values are from 1 to 2^40")
        *bounds, total = accumulate(w)
        _check(min(w) >= 0 and 0 < total < math.inf, "weights are from 0 on, and one of them is above 0")
        object.__setattr__(self, "_bounds", tuple(bound / total for bound in bounds))

    def at(self, u: float) -> int:
        """The value within whose share *u* lies. O(log of the table)."""
        return self.values[bisect_right(self._bounds, u)]

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        values = np.array(self.values, dtype=np.int64)
        lengths: IntArray = values[np.searchsorted(np.array(self._bounds), u, side="right")]
        return lengths


@dataclass(frozen=True, slots=True)
class Zipf:
    """Zipf's law between *min* and *max*: length x as often as x^-alpha says, as Vidur and vLLM's benchmark have it.

    Keeps 8 bytes a length. Raise WorkloadError on an alpha outside 0 to 10, on more than a million lengths.
    """

    alpha: float
    max: int
    min: int = 1
    _bounds: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(0 <= self.alpha <= 10, f"alpha is from 0 to 10, not {self.alpha}")
        _check(1 <= self.min <= self.max <= MAX_TOKENS, f"1 <= min <= max is needed, not {self.min}, {self.max}")
        _check(self.max - self.min < _ZIPF_LENGTHS, f"from min to max are at most {_ZIPF_LENGTHS:,} lengths")
        # Over the least, so that no weight is out of exp's range before it is negligible.
        logs = inverse.logs(np.arange(self.min, self.max + 1, dtype=np.float64) / self.min)
        bounds = np.cumsum(inverse.exps(np.maximum(-self.alpha * logs, -600.0)))
        object.__setattr__(self, "_bounds", bounds[:-1] / bounds[-1])

    def at(self, u: float) -> int:
        """The length within whose share *u* lies. O(log of the lengths)."""
        return self.min + int(np.searchsorted(self._bounds, u, side="right"))

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        lengths: IntArray = self.min + np.searchsorted(self._bounds, u, side="right").astype(np.int64)
        return lengths


def length_from(spec: object, name: str) -> Length:
    """Build the distribution that a scenario states under the key *name*.

    *spec* is a whole number, or a table whose ``distribution`` says which: ``fixed`` (value), ``uniform`` (low,
    high), ``lognormal`` (mean; one of sigma, median, stddev; min, max), ``quantiles`` (probabilities, values; min,
    max), ``values`` (values, weights) or ``zipf`` (alpha, max; min).
    Raise WorkloadError that names the key and the cure.
    """
    if not isinstance(spec, Mapping):
        spec = {"distribution": "fixed", "value": spec}
    table = Table(spec, name, _KEYS)
    with naming(name):
        match table.distribution:
            case "fixed":
                return Fixed(table.whole_number("value"))
            case "uniform":
                return Uniform(table.whole_number("low"), table.whole_number("high"))
            case "lognormal":
                return LogNormal(
                    mean=table.number("mean"),
                    sigma=log_sigma(table),
                    min=table.whole_number("min", 1),
                    max=table.whole_number("max", MAX_TOKENS),
                )
            case "values":
                return Values(table.whole_numbers("values"), table.numbers("weights"))
            case "zipf":
                return Zipf(table.number("alpha"), table.whole_number("max"), table.whole_number("min", 1))
            case _:
                return Quantiles(
                    table.numbers("probabilities"),
                    table.whole_numbers("values"),
                    min=table.whole_number("min", 1),
                    max=table.whole_number("max", MAX_TOKENS),
                )


def log_sigma(table: Table) -> float:
    """Sigma of a log-normal from whichever figure a table gives beside ``mean``: sigma, median or stddev."""
    given = [key for key in ("sigma", "median", "stddev") if key in table]
    if len(given) != 1:
        raise WorkloadError(f"give exactly one of sigma, median and stddev beside mean, not {len(given)}")
    value, mean = table.number(given[0]), table.number("mean")
    if given[0] == "sigma":
        return value
    if not mean > 0:
        raise WorkloadError(f"mean is above 0, not {mean}")
    if given[0] == "median":
        if not 0 < value <= mean:
            raise WorkloadError(f"the median of a log-normal is above 0 and not above its mean {mean}, not {value}")
        return math.sqrt(2 * inverse.log(mean / value))
    return math.sqrt(inverse.log(1 + (value / mean) ** 2))


_KEYS = {
    "fixed": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("mean", "sigma", "median", "stddev", "min", "max"),
    "quantiles": ("probabilities", "values", "min", "max"),
    "values": ("values", "weights"),
    "zipf": ("alpha", "max", "min"),
}


def _check(holds: bool, cure: str) -> None:
    if not holds:
        raise WorkloadError(cure)
