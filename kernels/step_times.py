"""The times of equal steps in a row, worked out once for a batch.

::

    ticks                     . rising: start + rise * i
    floor  _________________.'
                         .'
                      .'
    step   0 ...       flat ...       each one rounded down to ns on its own
"""

from __future__ import annotations

from math import sqrt

from hbmtwin.kernels.fixed_point import FRACTION_BITS, TICKS_PER_NS, floor_sum


class StepTimes:
    """Step *i*, from 0, lasts ``max(floor, start + rise * i) // TICKS_PER_NS`` nanoseconds: none is shorter than the
    one before it."""

    __slots__ = ("_flat", "_rise", "_start", "first_ns")

    def __init__(self, floor_ticks: int, start_ticks: int, rise_ticks: int = 0) -> None:
        """Raise ValueError when a step would last no nanosecond, or less and less."""
        flat, first = 1, start_ticks
        if start_ticks < floor_ticks:
            first = floor_ticks
            if rise_ticks:
                flat = -((start_ticks - floor_ticks) // rise_ticks)
            else:
                start_ticks = floor_ticks
        if first < TICKS_PER_NS or rise_ticks < 0:
            raise ValueError(f"a step lasts at least 1 ns and its time never falls, not {first} + {rise_ticks} i ticks")
        self.first_ns = first >> FRACTION_BITS
        """Of one step."""
        self._flat = flat
        """So many steps last as long as the first, which is one of them."""
        self._start = start_ticks + rise_ticks * flat
        """The line where it takes over."""
        self._rise = rise_ticks

    def total_ns(self, k: int) -> int:
        """Exactly the sum of the first *k* steps; 0 for k = 0. O(log k). Raise ValueError when *k* is negative."""
        rising = k - self._flat
        if rising > 0:
            return self._flat * self.first_ns + floor_sum(rising, TICKS_PER_NS, self._rise, self._start)
        if k < 0:
            raise ValueError(f"a leap has at least 0 steps, not {k}")
        return k * self.first_ns

    def reaching(self, dt_ns: int) -> tuple[int, int]:
        """The smallest k >= 1 with ``total_ns(k) >= dt_ns``, and that total. O(log k) nearly always.

        The sums of steps that never get shorter are convex. So from any guess a step of Newton's method lands at the
        answer or behind it, and comes closer from there until the last step is the one that reaches. The guess is
        where the line would without the rounding: off by one at most unless steps last few nanoseconds.
        """
        first_ns, flat, rise, start = self.first_ns, self._flat, self._rise, self._start
        left = dt_ns - flat * first_ns
        if left <= 0 or not rise:
            k = -(-dt_ns // first_ns) if dt_ns > first_ns else 1
            return k, k * first_ns
        ahead = 2.0 * (left << FRACTION_BITS)
        slope = start - 0.5 * rise
        k = int(ahead / (slope + sqrt(slope * slope + rise * ahead))) + 1
        total = floor_sum(k, TICKS_PER_NS, rise, start)
        while True:
            if total < left:
                k += -((total - left) // ((start + rise * k) >> FRACTION_BITS))
            else:
                over = (total - left) // ((start + rise * (k - 1)) >> FRACTION_BITS)
                if not over:
                    return flat + k, flat * first_ns + total
                k -= over
            total = floor_sum(k, TICKS_PER_NS, rise, start)
