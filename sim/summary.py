"""The summary of a run, computed from its tables: what ``run --json`` prints, less the wall time.

Means over time weigh each interval between two timeline rows by its length and take the middle of its two ends:
memory grows evenly between rows, and rows stand on both sides of every jump.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hbmtwin.sim.monitor import kv_monitor

Floats = npt.NDArray[np.float64]


def time_weighted_mean(time_ns: Floats, values: Floats, where: npt.NDArray[np.bool_] | None = None) -> float | None:
    """Mean of *values* over time by the trapezoid rule, over the intervals at both ends of which *where* holds.

    None if no time passes there. O(rows).
    """
    lengths = np.diff(time_ns)
    middles = (values[1:] + values[:-1]) / 2
    if where is not None:
        both = where[1:] & where[:-1]
        lengths, middles = lengths[both], middles[both]
    total = float(lengths.sum())
    return float((lengths * middles).sum() / total) if total > 0 else None


def percentiles(seconds: Floats) -> dict[str, float | None]:
    """p50, p90 and p99 with linear interpolation, as vLLM's benchmark prints them; None where there is no value."""
    if not len(seconds):
        return {"p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def memory_means(timeline: pd.DataFrame, kv_budget_bytes: int) -> dict[str, float | None]:
    """Utilisation and fragmentation as means over time.

    ``kv_utilization`` is bytes of tokens and states over bytes of the buffers or blocks that sequences hold, padding
    among them, while any is held; ``kv_usage`` is that of the KV monitor; internal fragmentation is unfilled and
    rounding, external the holes, both over reserved.
    """
    t = timeline.astype("float64")
    time = t["time_ns"].to_numpy()
    tokens = (t["kv_tokens"] + t["kv_state"] + t["kv_parked"]).to_numpy()
    held = tokens + (t["kv_padding"] + t["kv_unfilled"]).to_numpy()
    internal = (t["kv_unfilled"] + t["rounding"]).to_numpy()
    external = t["external"].to_numpy()
    outside = (t["tenants"] + t["static"] + t["driver_free"]).to_numpy()
    reserved = t.drop(
        columns=["time_ns", "running", "waiting", "parked", "preemptions", "hit_tokens", "queried_tokens"]
    ).sum(axis=1)
    reserved_bytes = reserved.to_numpy() - outside
    busy = held > 0
    ratio = np.divide(tokens, held, out=np.zeros_like(held), where=busy)
    return {
        "kv_utilization_mean": time_weighted_mean(time, ratio, busy),
        "kv_usage_mean": time_weighted_mean(time, kv_monitor(timeline, kv_budget_bytes)["usage"].to_numpy()),
        "internal_fragmentation_mean": time_weighted_mean(time, internal / reserved_bytes),
        "external_fragmentation_mean": time_weighted_mean(time, external / reserved_bytes),
    }


def latencies(requests: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """TTFT, TPOT, end-to-end and queue time of completed requests, in seconds.

    TTFT runs from arrival to the first token; TPOT is (e2e - ttft) / (output tokens - 1), none for one token.
    """
    done = requests[requests["status"] == "completed"]
    arrival = done["arrival_ns"].to_numpy(dtype="float64")
    first = done["first_token_ns"].to_numpy(dtype="float64")
    end = done["end_ns"].to_numpy(dtype="float64")
    later_tokens = done["output_tokens"].to_numpy(dtype="float64") - 1
    several = later_tokens > 0
    return {
        "ttft_s": percentiles((first - arrival) / 1e9),
        "tpot_s": percentiles((end - first)[several] / later_tokens[several] / 1e9),
        "e2e_s": percentiles((end - arrival) / 1e9),
        "queue_s": percentiles((done["scheduled_ns"].to_numpy(dtype="float64") - arrival) / 1e9),
    }


def dropped(requests: pd.DataFrame) -> dict[str, int]:
    """Tokens that retention had dropped when their turn ended, and the turns that lost any."""
    tokens = requests["dropped_tokens"]
    return {"dropped_tokens": int(tokens.sum()), "turns_with_dropped_tokens": int((tokens > 0).sum())}


def request_counts(requests: pd.DataFrame, total: int | None) -> dict[str, Any]:
    """How requests ended, rejected ones by reason; they sum to *total*, where the source knows it.

    Later turns of a conversation that ended early were never made: they have no row, and count as unfinished.
    """
    status = requests["status"].value_counts()
    rejected = requests.loc[requests["status"] == "rejected", "reason"].value_counts().sort_index()
    return {
        "requests_total": len(requests) if total is None else total,
        "requests_completed": int(status.get("completed", 0)),
        "requests_rejected": {str(reason): int(count) for reason, count in rejected.items()},
        "requests_failed": int(status.get("failed", 0)),
        "requests_unfinished": int(status.get("unfinished", 0)) + (0 if total is None else total - len(requests)),
    }
