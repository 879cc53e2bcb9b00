"""A logarithmic axis that has ticks however short it is.

::

    1   10   100   1,000   10,000        1   2   5   10   20   50        30   40   50   60   80

Plotly's own ticks of a short axis are a lone "5", which says nothing of its decade, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, log10
from typing import Any


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """An axis that holds all values above 0, with ticks at decades, at 1, 2 and 5 of fewer, or at digits of one.

    O(values).
    """
    above = [value for value in values if value > 0]
    low, high = (log10(min(above)), log10(max(above))) if above else (0.0, 1.0)
    digits = (1,) if high - low > 3 else (1, 2, 5) if high - low > 0.8 else (1, 2, 3, 4, 5, 6, 8)
    ticks = [digit * 10.0**decade for decade in range(floor(low) - 1, ceil(high) + 1) for digit in digits]
    margin = max(0.05, 0.06 * (high - low))
    return {
        "type": "log",
        "range": [low - margin, high + margin],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" if tick < 1 else f"{tick:,.0f}" for tick in ticks],
    }
