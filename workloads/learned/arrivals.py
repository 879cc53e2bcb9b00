"""When one client's requests arrive in one window: gaps of the fitted family, stretched to fill the window.

::

    gaps drawn     |-|--|-----|-|---|--|        n + 1 of them
    stretched      0 .    .       . .     .  1  n arrivals in the window, whose length their sum becomes
    minutes bent   0    .   .          ..    .  each minute runs at its own pace

The number of arrivals is the window's rate times its length, so that a window's rate is the learned one exactly.
Source of the rule: ServeGen (Xiang et al., 2025), whose script stretches n gaps; one more leaves the last arrival off
the window's end.
"""

from __future__ import annotations

import math

import numpy as np

from hbmtwin.workloads import draws, inverse
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose
from hbmtwin.workloads.gaps import GammaGaps, PoissonGaps, WeibullGaps
from hbmtwin.workloads.learned.model import Window
from hbmtwin.workloads.records import WorkloadError

MAX_REQUESTS = 2**25
"""Of one client in one window."""
_INDEX_BITS, _WINDOW_BITS = 26, 18
_MINUTE_S = 60.0
_PLAIN_SHAPE = 0.05
"""Least shape at which a gamma gap is far from the least float."""


def window_key(client: int, index: int) -> int:
    """What the draws of a window are keyed by; the gaps within count on from it."""
    return client << (_WINDOW_BITS + _INDEX_BITS) | (index % (1 << _WINDOW_BITS)) << _INDEX_BITS


def window_lap(index: int) -> int:
    """How often the keys of windows have begun anew: a rate so low that no window of a lap has a request needs it."""
    return index >> _WINDOW_BITS


def requests_in(window: Window, length_s: float, scale: float, *, seed: int, key: int, lap: int = 0) -> int:
    """How many requests a window has: its rate times its length, a fraction rounded up as often as it is large.

    *key* is its :func:`window_key`, *lap* its :func:`window_lap`. Raise WorkloadError when they are more than 2^25.
    """
    expected = window.request_rate * length_s * scale
    if expected > MAX_REQUESTS:
        raise WorkloadError(
            f"{expected:,.0f} requests of one client in one window are more than {MAX_REQUESTS:,}; lower rate_scale"
        )
    whole = math.floor(expected + 0.5)
    if whole and abs(expected - whole) < 0.01:  # files give rates to a few digits: such a fraction is their rounding
        return whole
    below = math.floor(expected)
    return below + int(draws.uniform(seed, Purpose.WINDOW_REQUESTS, key, lap) < expected - below)


def arrivals_in(window: Window, count: int, length_s: float, minute_cv: float, *, seed: int, key: int) -> FloatArray:
    """Seconds from the window's start, in order, strictly within it but for rounding. O(count)."""
    gaps = _gaps(window, seed, np.arange(key, key + count + 1, dtype=np.int64))
    passed = np.cumsum(gaps)
    share: FloatArray = passed[:-1] / passed[-1]
    if minute_cv and length_s > _MINUTE_S:
        edges = np.append(np.arange(0.0, length_s, _MINUTE_S), length_s)
        # Gaps have the lower half of the window's keys, minutes the upper one.
        minutes = np.arange(len(edges) - 1, dtype=np.int64) + (key + MAX_REQUESTS + 1)
        done = np.cumsum(_paces(1 / minute_cv**2, seed, minutes) * np.diff(edges))
        bent: FloatArray = np.interp(share, np.append(0.0, done / done[-1]), edges)
        return bent
    return share * length_s


def _gaps(window: Window, seed: int, keys: IntArray) -> FloatArray:
    """Gaps of the window's family; their scale does not matter."""
    if window.shape == 1:
        return PoissonGaps().drawn(seed, keys)
    if window.family == "weibull":
        return WeibullGaps(window.shape).drawn(seed, keys)
    return _paces(window.shape, seed, keys)


def _paces(shape: float, seed: int, keys: IntArray) -> FloatArray:
    """Gamma variates up to a common factor, which is such that the largest of them is no underflow."""
    if shape >= _PLAIN_SHAPE:
        return GammaGaps(shape).drawn(seed, keys)
    # A gamma of shape k is one of shape k + 1 times u^(1/k): so small that only ratios can be told.
    powers = inverse.logs(draws.uniforms(seed, Purpose.ARRIVAL_BOOST, keys, 0)) / shape
    powers += inverse.logs(GammaGaps(shape + 1).drawn(seed, keys))
    return inverse.exps(np.maximum(powers - powers.max(), -600.0))
