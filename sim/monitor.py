"""The KV monitor: how full the KV memory is and how much of it is reused, and the moments at which a limit is passed.

Pure functions of a timeline. Their resolution is its rows: both sides of every change of the batch, and one a
``results.interval_s`` between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from hbmtwin.sim.sections import ResultsSection

USED = ("kv_tokens", "kv_padding", "kv_state", "kv_parked", "kv_unfilled", "growth_copy")
"""Columns of a timeline that are KV in use: what running and parked sequences hold, filled or not, and the old copies
of their growing buffers. Cached blocks that nobody refers to are not: they go to whoever asks, as in vLLM's usage."""


class Limit(NamedTuple):
    """A threshold on one series of the monitor, and the side of it that is wrong."""

    metric: Literal["used_bytes", "usage", "hit_rate"]
    kind: Literal["above", "below"]
    threshold: float


def kv_monitor(timeline: pd.DataFrame, kv_budget_bytes: int) -> pd.DataFrame:
    """The series ``used_bytes``, ``usage`` and ``hit_rate``, one row for each of the timeline.

    Usage is the share of *kv_budget_bytes* in use. The hit rate is that of all admissions so far: prompt tokens found
    in memory over prompt tokens looked for, each request once; NaN before the first. O(rows).
    """
    used = sum((timeline[name] for name in USED), start=pd.Series(0, index=timeline.index))
    queried = timeline["queried_tokens"]
    return pd.DataFrame(
        {
            "time_ns": timeline["time_ns"],
            "used_bytes": used,
            "usage": used / max(1, kv_budget_bytes),
            "hit_rate": timeline["hit_tokens"] / queried.where(queried > 0),
        }
    )


def limits_of(results: ResultsSection) -> tuple[Limit, ...]:
    """The limits that a scenario sets: too many bytes, too full, too little reuse."""
    found = []
    if results.alert_kv_used_bytes is not None:
        found.append(Limit("used_bytes", "above", results.alert_kv_used_bytes))
    if results.alert_kv_usage is not None:
        found.append(Limit("usage", "above", results.alert_kv_usage))
    if results.alert_hit_rate is not None:
        found.append(Limit("hit_rate", "below", results.alert_hit_rate))
    return tuple(found)


def alerts(monitor: pd.DataFrame, limits: Sequence[Limit]) -> list[dict[str, Any]]:
    """Every stay of a series on the wrong side of its limit, in order of time.

    An alert begins with the first row beyond the limit (equal is not beyond) and is cleared by the first that is not,
    without hysteresis. ``value`` is the series at its beginning, ``worst`` the farthest it went, ``cleared_s`` None
    where it lasts to the end. O(rows).
    """
    found = [alert for limit in limits for alert in _alerts(monitor, limit)]
    return sorted(found, key=lambda alert: float(alert["time_s"]))  # stable: of one moment in the order of the limits


def _alerts(monitor: pd.DataFrame, limit: Limit) -> Iterator[dict[str, Any]]:
    time_s, series = (monitor["time_ns"] / 1e9).to_numpy(), monitor[limit.metric].to_numpy()
    above = limit.kind == "above"
    beyond = series > limit.threshold if above else series < limit.threshold  # NaN is neither
    edges = np.flatnonzero(np.diff(np.concatenate([[False], beyond, [False]]).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2):
        there = series[begin:end]
        yield {
            "time_s": time_s[begin].item(),
            "metric": limit.metric,
            "kind": limit.kind,
            "threshold": limit.threshold,
            "value": there[0].item(),
            "worst": (there.max() if above else there.min()).item(),
            "cleared_s": time_s[end].item() if end < len(series) else None,
        }
