"""Least squares of positive parameters in relative error, by Levenberg and Marquardt's method in logarithms.

::

    r_i = log(predicted_i / measured_i)       a factor of 2 too long weighs as much as one too short
    x_j = log(parameter_j)                    steps are factors, and nothing turns negative

Deterministic: starts, steps and limits are given, and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_STEPS = 200
DELTA = 1e-6
"""Of a logarithm, for a derivative."""
HUBER = 2.0
"""Residuals above so many times their median count by size, not by square: a burst of another process's load."""
ROUNDS = 5
"""Of weighing residuals anew."""


class Solution(NamedTuple):
    """Fitted parameters, and how far each may be off."""

    values: Floats
    spread: Floats
    """Of each logarithm, one standard error; infinite where the points do not tell."""
    residuals: Floats


def fit_logarithms(
    predict: Callable[[Floats], Floats], measured: Floats, start: Floats, low: Floats, high: Floats
) -> Solution:
    """Minimise the residuals over values within *low* and *high*. O(steps * parameters * points)."""
    x, bounds = np.log(start), (np.log(low), np.log(high))
    logs = np.log(measured)
    weights = np.ones_like(measured)

    def residuals(at: Floats) -> Floats:
        return np.log(predict(np.exp(at))) - logs

    for _ in range(ROUNDS):
        x = _descend(residuals, weights, x, bounds)
        apart = np.abs(residuals(x))
        limit = HUBER * max(float(np.median(apart)), 1e-12)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(apart, 1e-300)))
    found = residuals(x)
    return Solution(np.exp(x), _spread(residuals, weights, x, bounds), found)


def _jacobian(residuals: Callable[[Floats], Floats], x: Floats, at: Floats) -> Floats:
    columns = []
    for j in range(len(x)):
        moved = x.copy()
        moved[j] += DELTA
        columns.append((residuals(moved) - at) / DELTA)
    return np.stack(columns, axis=1)


def _descend(
    residuals: Callable[[Floats], Floats], weights: Floats, x: Floats, bounds: tuple[Floats, Floats]
) -> Floats:
    damping, at = 1e-2, residuals(x)
    cost = float(((weights * at) ** 2).sum())
    for _ in range(MAX_STEPS):
        jacobian = weights[:, None] * _jacobian(residuals, x, at)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ (weights * at)
        better = False
        while damping < 1e12:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            tried = np.clip(x + np.clip(step, -3.0, 3.0), *bounds)
            there = residuals(tried)
            lower = float(((weights * there) ** 2).sum())
            if lower < cost:
                better = True
                break
            damping *= 4
        if not better:
            break
        settled = cost - lower < 1e-12 * cost
        x, at, cost, damping = tried, there, lower, damping / 4
        if settled:
            break
    return x


def _spread(residuals: Callable[[Floats], Floats], weights: Floats, x: Floats, bounds: tuple[Floats, Floats]) -> Floats:
    """Standard errors by the curvature at the minimum; of a parameter at its bound nothing is known."""
    at = residuals(x)
    jacobian = weights[:, None] * _jacobian(residuals, x, at)
    freedom = max(1, len(at) - len(x))
    variance = float(((weights * at) ** 2).sum()) / freedom
    told = (np.diag(jacobian.T @ jacobian) > 1e-9) & (x > bounds[0]) & (x < bounds[1])
    spread = np.full(len(x), np.inf)
    if told.any():
        kept = jacobian[:, told]
        spread[told] = np.sqrt(np.maximum(0.0, variance * np.diag(np.linalg.pinv(kept.T @ kept))))
    return spread
