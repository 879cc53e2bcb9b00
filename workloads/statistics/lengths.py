"""How long prompts and answers are, exactly, from how often each length occurs; and how the two go together.

    length   16  41  54  85  ...          one count for each different length, so quantiles are exact
    count     9  31  77  40  ...          and memory is that of the different lengths, however many requests

Pairs of lengths may be as many as requests. Their ranks are exact up to MAX_PAIRS different pairs; then lengths enter
the joint count by their leading bits, as few as it takes, and those that become equal are ties of Spearman's formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

QUANTILES: Final = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999)
MAX_PAIRS: Final = 2**16
"""Different pairs of lengths that are counted apart."""
MASS_SHARE: Final = 0.01
"""Share of the requests that one length needs to be a mass point."""
LEAST_MASS: Final = 10
"""Requests that it needs at least: fewer are chance."""
_MASS_RATIO = 3.0
_FIRST_BITS = 10  # one less already tells lengths apart that differ by 1 in 256
_MASS_NEIGHBOURS = 0.05


@dataclass(frozen=True, slots=True)
class MassPoint:
    """A length that far more requests have than have the lengths around it."""

    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """How long prompts, or answers, are."""

    mean: float
    cv: float
    """Standard deviation / mean."""
    least: int
    most: int
    quantiles: tuple[float, ...]
    """At QUANTILES; straight lines between two lengths, as numpy's default."""
    mass_points: tuple[MassPoint, ...]
    """The heaviest first: of ten requests and 1 % at least, and of three times as many as the lengths around each."""
    values: tuple[int, ...]
    """The different lengths, rising."""
    counts: tuple[int, ...]
    """How many requests have each."""


def length_statistics(counted: Mapping[int, int]) -> LengthStatistics:
    """Of lengths that occur so many times each; at least one. O(different lengths log different lengths)."""
    values = sorted(counted)
    counts = [counted[value] for value in values]
    n = sum(counts)
    total = sum(value * count for value, count in zip(values, counts, strict=True))
    squares = sum(value * value * count for value, count in zip(values, counts, strict=True))
    return LengthStatistics(
        mean=total / n,
        cv=sqrt((n * squares - total * total) / (total * total)) if total else 0.0,
        least=values[0],
        most=values[-1],
        quantiles=_quantiles(values, counts),
        mass_points=_mass_points(values, counts),
        values=tuple(values),
        counts=tuple(counts),
    )


def _quantiles(values: Sequence[int], counts: Sequence[int]) -> tuple[float, ...]:
    up_to = np.cumsum(counts)
    place = np.array(QUANTILES) * (int(up_to[-1]) - 1)
    below = np.floor(place).astype(np.int64)
    of = np.array(values, dtype=np.float64)
    low, high = (of[np.searchsorted(up_to, rank, side="right")] for rank in (below, np.ceil(place).astype(np.int64)))
    return tuple(float(q) for q in low + (place - below) * (high - low))


def _mass_points(values: Sequence[int], counts: Sequence[int]) -> tuple[MassPoint, ...]:
    n = sum(counts)
    lengths, up_to = np.array(values), np.concatenate([[0], np.cumsum(counts)])
    found = []
    for value, count in zip(values, counts, strict=True):
        if count < max(LEAST_MASS, MASS_SHARE * n):
            continue
        reach = max(5, round(_MASS_NEIGHBOURS * value))
        least = max(values[0], value - reach)
        most = min(values[-1], value + reach)
        start, stop = np.searchsorted(lengths, [least, most + 1])
        around = int(up_to[stop] - up_to[start]) - count
        if count * (most - least) >= _MASS_RATIO * around:
            found.append(MassPoint(value, count / n))
    return tuple(sorted(found, key=lambda point: (-point.share, point.tokens)))


class PairMeter:
    """Takes pairs of lengths, and tells how the two go together. O(1) a pair; memory MAX_PAIRS counts at most."""

    def __init__(self, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._bits: int | None = None
        self._pairs: dict[tuple[int, int], int] = {}
        self._sums = [0] * 6

    def add(self, x: int, y: int) -> None:
        """One more pair of lengths."""
        n, sx, sy, sxx, syy, sxy = self._sums
        self._sums = [n + 1, sx + x, sy + y, sxx + x * x, syy + y * y, sxy + x * y]
        pair = (x, y) if self._bits is None else (_leading(x, self._bits), _leading(y, self._bits))
        self._pairs[pair] = self._pairs.get(pair, 0) + 1
        while len(self._pairs) > self._max_pairs:
            self._coarsen()

    def _coarsen(self) -> None:
        longest = max(max(x.bit_length(), y.bit_length()) for x, y in self._pairs)
        self._bits = min(longest, _FIRST_BITS if self._bits is None else self._bits) - 1
        merged: dict[tuple[int, int], int] = {}
        for (x, y), count in self._pairs.items():
            pair = (_leading(x, self._bits), _leading(y, self._bits))
            merged[pair] = merged.get(pair, 0) + count
        self._pairs = merged

    @property
    def exact(self) -> bool:
        """Whether ranks are those of the lengths themselves."""
        return self._bits is None

    def pearson(self) -> float | None:
        """Pearson's correlation; None where one of the two is always the same."""
        n, sx, sy, sxx, syy, sxy = self._sums
        spread = (n * sxx - sx * sx) * (n * syy - sy * sy)
        return (n * sxy - sx * sy) / sqrt(spread) if spread else None

    def spearman(self) -> float | None:
        """Pearson's of the ranks, the mean rank for equal lengths; None where one of the two is always the same."""
        if not self._pairs:
            return None
        count = np.array(list(self._pairs.values()), dtype=np.float64)
        x, y = (_centred_ranks(np.array(side), count) for side in zip(*self._pairs, strict=True))
        spread = float(np.sum(count * x * x) * np.sum(count * y * y))
        return float(np.sum(count * x * y)) / sqrt(spread) if spread else None


def _leading(length: int, bits: int) -> int:
    """*length* with zeros behind its first *bits* bits."""
    low = max(0, length.bit_length() - bits)
    return length >> low << low


def _centred_ranks(lengths: npt.NDArray[np.int64], count: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean rank of each length less the mean of all ranks, where each stands for so many requests."""
    _, place = np.unique(lengths, return_inverse=True)
    held = np.bincount(place, weights=count)
    ranks: npt.NDArray[np.float64] = (np.cumsum(held) - held / 2 - held.sum() / 2)[place]
    return ranks
