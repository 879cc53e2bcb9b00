"""Integer time: coefficients in ticks of 2^-20 ns, and exact sums of floors.

A coefficient becomes an integer once, when a device or a profile is loaded. From there on all is integer arithmetic,
so that a leap of a million decode steps costs the same nanoseconds as a million single steps, on every machine.
"""

from __future__ import annotations

FRACTION_BITS = 20
TICKS_PER_NS = 1 << FRACTION_BITS
"""One tick is about 10^-15 s: a coefficient of 1 ns keeps six digits."""


def ticks(ns: float) -> int:
    """The nearest number of ticks. Raise ValueError when *ns* is negative or no finite number."""
    if not 0 <= ns < float("inf"):
        raise ValueError(f"a time must be a finite number from 0, not {ns} ns")
    return round(ns * TICKS_PER_NS)


def floor_sum(n: int, modulus: int, slope: int, start: int) -> int:
    """Sum of ``(start + slope * i) // modulus`` over ``i`` in ``range(n)``; *slope* and *start* at least 0.

    Counts lattice points under a line the way Euclid's algorithm reduces its slope: whole parts are summed in closed
    form, then the axes are exchanged. O(log modulus).
    """
    total = 0
    while n > 0:
        total += (slope // modulus) * (n * (n - 1) // 2) + (start // modulus) * n
        slope %= modulus
        start %= modulus
        top = start + slope * n
        if top < modulus:
            break
        n, start = divmod(top, modulus)
        modulus, slope = slope, modulus
    return total
