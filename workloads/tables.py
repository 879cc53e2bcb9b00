"""A distribution as a scenario states it: a small table such as ``{distribution = "lognormal", mean = 1155, ...}``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.suggest import did_you_mean


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the scenario's key before the message of a WorkloadError from inside."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{name}: {error}") from None


class Table:
    """One such table, checked: its distribution is one of *keys*, and each of its keys belongs to that one.

    Raise WorkloadError that names the key *name* and the nearest word.
    """

    def __init__(self, spec: Mapping[str, object], name: str, keys: Mapping[str, tuple[str, ...]]) -> None:
        distribution = spec.get("distribution")
        if not isinstance(distribution, str):
            raise WorkloadError(f"{name}: the table needs a distribution: one of {', '.join(keys)}")
        if distribution not in keys:
            raise WorkloadError(f"{name}: no distribution {distribution!r}; {did_you_mean(distribution, keys)}")
        for key in spec:
            if key != "distribution" and key not in keys[distribution]:
                hint = did_you_mean(key, keys[distribution])
                raise WorkloadError(f"{name}: {distribution} has no {key!r}; {hint}")
        self.distribution = distribution
        self._spec = spec

    def __contains__(self, key: str) -> bool:
        return key in self._spec

    def whole_number(self, key: str, default: int | None = None) -> int:
        """The int under *key*. Raise WorkloadError if it is missing without a default, or no int."""
        return _whole_number(key, self._get(key, default))

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """The list of ints under *key*. Raise WorkloadError if it is missing or something else."""
        return tuple(_whole_number(key, item) for item in self._list(key))

    def number(self, key: str) -> float:
        """The float or int under *key*. Raise WorkloadError if it is missing or no number."""
        return _number(key, self._get(key, None))

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of numbers under *key*. Raise WorkloadError if it is missing or something else."""
        return tuple(_number(key, item) for item in self._list(key))

    def _list(self, key: str) -> Iterable[object]:
        value = self._get(key, None)
        if not isinstance(value, list | tuple):
            raise WorkloadError(f"{key} must be a list of numbers, not {value!r}")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self._spec.get(key, default)
        if value is None:
            raise WorkloadError(f"{self.distribution} needs {key!r}")
        return value


def _whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WorkloadError(f"{key} must be a whole number, not {value!r}")
    return value


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WorkloadError(f"{key} must be a number, not {value!r}")
    return float(value)
