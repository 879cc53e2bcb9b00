"""Keyed draws made for many sessions at once, before they are asked for.

::

    sessions     0 .. 1023     1024 .. 2047
    turn 0       2 1 4 ...     3 1 ...            one array a cell, made when it was asked for 16 times
    turn 1       5 ...         16 single draws

A single draw costs some 5 us, one of an array 0.15 us, and they have the same bits: which way a number was made shows
nowhere.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose

SESSIONS = 1024
"""Of one array: it costs about as much as 30 single draws."""
ASKED = 16
"""Single draws before an array is made, so that turns which hardly any session reaches cost no more than before."""
ARRAYS = 256
"""Kept at a time, 2 MiB; the oldest goes first."""


class Distribution(Protocol):
    """What makes a whole number of a uniform one."""

    def at(self, u: float) -> int:
        """The number at quantile *u*, strictly between 0 and 1."""
        ...

    def at_many(self, u: FloatArray) -> IntArray:
        """:meth:`at` of each element, exactly."""
        ...


class DrawnAhead:
    """The draws of one purpose. Keeps a bounded number of arrays."""

    def __init__(self, distribution: Distribution, seed: int, purpose: Purpose) -> None:
        self._distribution = distribution
        self._seed = seed
        self._purpose = purpose
        self._drawn: dict[tuple[int, int], array[int]] = {}
        self._asked: dict[tuple[int, int], int] = {}

    def at(self, session: int, turn: int) -> int:
        """The number of one key. O(1)."""
        drawn = self._drawn.get((session // SESSIONS, turn))
        return self._draw(session, turn) if drawn is None else drawn[session % SESSIONS]

    def _draw(self, session: int, turn: int) -> int:
        cell = session // SESSIONS, turn
        asked = self._asked.pop(cell, 0) + 1
        if asked <= ASKED:
            self._asked[cell] = asked
            if len(self._asked) > ARRAYS:
                del self._asked[next(iter(self._asked))]
            return self._distribution.at(draws.uniform(self._seed, self._purpose, session, turn))
        sessions = np.arange(cell[0] * SESSIONS, (cell[0] + 1) * SESSIONS, dtype=np.int64)
        many = self._distribution.at_many(draws.uniforms(self._seed, self._purpose, sessions, turn))
        drawn = self._drawn[cell] = array("q", many.astype(np.int64).tobytes())
        if len(self._drawn) > ARRAYS:
            del self._drawn[next(iter(self._drawn))]
        return drawn[session % SESSIONS]
