"""How far a prediction lies from what was measured, step by step: one row a quantity.

``error = |predicted - measured| / measured``; where nothing was measured and nothing predicted it is 0, and where only
something was predicted the step counts in no percentage, but in the number of steps that differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class ErrorRow(NamedTuple):
    """The errors of one quantity over all steps sampled."""

    quantity: str
    steps: int
    differing: int
    """Steps in which both are not equal."""
    mape_percent: float | None
    """Mean absolute percentage error; None without a step."""
    p50_percent: float | None
    p95_percent: float | None
    worst_step: int
    """Number of the step with the largest error, the earliest of equals; -1: no step differs."""
    worst_predicted: int
    worst_measured: int


def error_row(quantity: str, steps: npt.ArrayLike, predicted: npt.ArrayLike, measured: npt.ArrayLike) -> ErrorRow:
    """Compare two series, step by step; where one is shorter, as far as it goes. O(steps log steps)."""
    a, b = np.asarray(predicted, dtype=np.int64), np.asarray(measured, dtype=np.int64)
    n = min(len(a), len(b))
    a, b, numbers = a[:n], b[:n], np.asarray(steps, dtype=np.int64)[:n]
    apart = np.abs(a - b)
    differing = int(np.count_nonzero(apart))
    known = (b != 0) | (apart == 0)
    percent = 100.0 * apart[known] / np.where(b[known] == 0, 1, np.abs(b[known]))
    worst = -1
    if differing:
        relative = np.where(b == 0, np.where(apart == 0, 0.0, np.inf), apart / np.where(b == 0, 1, np.abs(b)))
        worst = int(relative.argmax())
    return ErrorRow(
        quantity=quantity,
        steps=n,
        differing=differing,
        mape_percent=float(percent.mean()) if len(percent) else None,
        p50_percent=float(np.percentile(percent, 50)) if len(percent) else None,
        p95_percent=float(np.percentile(percent, 95)) if len(percent) else None,
        worst_step=int(numbers[worst]) if differing else -1,
        worst_predicted=int(a[worst]) if differing else 0,
        worst_measured=int(b[worst]) if differing else 0,
    )
