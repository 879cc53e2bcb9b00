"""Measured lengths as a short table: the inverse of their distribution, with its mass points as steps.

::

    tokens          knots (probability, tokens)
    100 |   ____    (0, 16) (0.21, 100) (0.27, 100) (1, 600)
        |  /        6 % of all lengths are 100; between knots there are straight lines
     16 |_/__________

"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.records import WorkloadError

_MASS = 0.004
"""Share of all from which a value gets both its edges."""
_GRID = (
    *(0.0, 0.001, 0.0025, 0.005),
    *(k / 100 for k in range(1, 98)),
    *(0.975, 0.98, 0.985, 0.9875, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 1.0),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A :class:`~hbmtwin.workloads.lengths.Length`: *tokens* at *probabilities*, straight lines between, rounded.

    Two knots may share a probability, where lengths between them do not occur. Raise WorkloadError unless
    probabilities run from 0 to 1 without falling, and tokens, from 1 to 2^40, do not fall.
    """

    probabilities: tuple[float, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        p, v = self.probabilities, self.tokens
        if not len(p) == len(v) >= 2:
            raise WorkloadError(f"as many tokens as probabilities are needed, two or more, not {len(v)} and {len(p)}")
        if p[0] != 0 or p[-1] != 1 or any(not a <= b for a, b in pairwise(p)):
            raise WorkloadError("probabilities must rise from 0 to 1")
        if v[0] < 1 or v[-1] > MAX_TOKENS or any(a > b for a, b in pairwise(v)):
            raise WorkloadError("tokens are from 1 to 2^40 and must not fall")

    def at(self, u: float) -> int:
        """The interpolated length. O(log of the table)."""
        p, v = self.probabilities, self.tokens
        i = min(bisect_right(p, u), len(p) - 1) - 1
        width = p[i + 1] - p[i]
        return round(v[i] + (v[i + 1] - v[i]) * ((u - p[i]) / width)) if width else v[i + 1]

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        p, v = np.array(self.probabilities), np.array(self.tokens, dtype=np.float64)
        i = np.minimum(np.searchsorted(p, u, side="right"), len(p) - 1) - 1
        width = p[i + 1] - p[i]
        share = np.divide(u - p[i], width, out=np.ones_like(u), where=width > 0)
        lengths: IntArray = np.rint(v[i] + (v[i + 1] - v[i]) * share).astype(np.int64)
        return lengths


def measured(values: Iterable[int], weights: Iterable[float]) -> Measured:
    """The table of lengths that occur with these weights; they need not be sorted, distinct, or sum to 1.

    Kept exactly are a hundred quantiles, those up to the 1st and from the 97th per cent more finely, and both edges
    of each value that makes 0.4 % of all. O(n log n). Raise WorkloadError where no weight is positive.
    """
    lengths = np.asarray(list(values), dtype=np.int64)
    shares = np.asarray(list(weights), dtype=np.float64)
    lengths, shares = lengths[shares > 0], shares[shares > 0]
    if not len(lengths):
        raise WorkloadError("no length occurs")
    distinct, index = np.unique(lengths, return_inverse=True)
    summed: FloatArray = np.bincount(index, shares).astype(np.float64)
    edges = np.concatenate(([0.0], np.cumsum(summed) / summed.sum()))
    edges[-1] = 1.0
    at = np.minimum(np.searchsorted(edges, _GRID, side="right") - 1, len(distinct) - 1)
    knots = {(p, int(distinct[i])) for p, i in zip(_GRID, at, strict=True)}
    for i in np.flatnonzero(np.diff(edges) >= _MASS):
        knots |= {(round(float(edge), 6), int(distinct[i])) for edge in edges[i : i + 2]}
    table = sorted(knots)
    return Measured(tuple(p for p, _ in table), tuple(max(1, v) for _, v in table))
