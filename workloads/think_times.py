"""How long a client waits between the end of one turn and the next, as keyed draws in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hbmtwin.workloads import inverse
from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.lengths import log_sigma
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.tables import Table, naming

_LONGEST_S = 10**8
"""Three years: longer waits are a mistake in the unit."""


class ThinkTime(Protocol):
    """A distribution of waits."""

    def at(self, u: float) -> int:
        """The wait in nanoseconds at quantile *u*, strictly between 0 and 1."""
        ...

    def at_many(self, u: FloatArray) -> IntArray:
        """:meth:`at` of each element, exactly."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantTime:
    """Always *seconds*."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds)

    def at(self, u: float) -> int:
        """*seconds*, in nanoseconds."""
        return round(self.seconds * 1e9)

    def at_many(self, u: FloatArray) -> IntArray:
        """The same for each."""
        return np.full(u.shape, self.at(0.5), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ExponentialTime:
    """Exponential with mean *mean_s*: a wait without memory, as queueing theory has it."""

    mean_s: float

    def __post_init__(self) -> None:
        _check(self.mean_s)

    def at(self, u: float) -> int:
        """-mean log u, in nanoseconds."""
        return round(-self.mean_s * inverse.log(u) * 1e9)

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        return np.rint(-self.mean_s * inverse.logs(u) * 1e9).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LogNormalTime:
    """Log-normal with arithmetic mean *mean_s* and *sigma*, the standard deviation of the logarithm: people."""

    mean_s: float
    sigma: float

    def __post_init__(self) -> None:
        _check(self.mean_s)
        if not 0 <= self.sigma <= 5:
            raise WorkloadError(f"sigma of a think time is from 0 to 5, not {self.sigma}")

    def at(self, u: float) -> int:
        """mean exp(sigma z - sigma^2 / 2), z the normal quantile; in nanoseconds."""
        return round(self.mean_s * inverse.exp(self.sigma * inverse.normal(u) - self.sigma * self.sigma / 2) * 1e9)

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        x = inverse.exps(self.sigma * inverse.normals(u) - self.sigma * self.sigma / 2)
        return np.rint(self.mean_s * x * 1e9).astype(np.int64)


def think_time_from(spec: object, name: str) -> ThinkTime:
    """Build the think time that a scenario states under the key *name*.

    *spec* is a number of seconds, or a table whose ``distribution`` says which: ``constant`` (seconds),
    ``exponential`` (mean) or ``lognormal`` (mean; one of sigma, median, stddev), all in seconds. Raise WorkloadError.
    """
    if not isinstance(spec, Mapping):
        spec = {"distribution": "constant", "seconds": spec}
    table = Table(spec, name, _KEYS)
    with naming(name):
        match table.distribution:
            case "constant":
                return ConstantTime(table.number("seconds"))
            case "exponential":
                return ExponentialTime(table.number("mean"))
            case _:
                return LogNormalTime(table.number("mean"), log_sigma(table))


_KEYS = {
    "constant": ("seconds",),
    "exponential": ("mean",),
    "lognormal": ("mean", "sigma", "median", "stddev"),
}


def _check(seconds: float) -> None:
    if not 0 <= seconds <= _LONGEST_S:
        raise WorkloadError(f"a think time is from 0 to {_LONGEST_S} seconds, not {seconds}")
