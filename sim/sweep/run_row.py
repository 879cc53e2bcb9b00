"""One run as one flat row: how it ended, what it took, how it served.

::

    Scenario -> Twin -> Result
                 |         | summary, requests, timeline
                 | peak    v
                 +------> row: key | seed | outcome cause died_at_s error | counts | bytes | shares | seconds | death

    outcome         the run ...                                            cause
    held            ended, and rejected nothing for want of memory
    out_of_memory   died                                                   one of the allocators' causes
    standstill      would never have ended                                 live_lock, deadlock
    rejected        ended, with requests rejected for want of memory       the reason of most of them
    does_not_fit    did not start: weights or KV do not fit                does_not_fit
    illegal         did not start: the scenario's keys contradict          illegal
    failed          ended in an error                                      the error's type
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from hbmtwin.allocators.registry import UnknownPolicy
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.monitor import kv_monitor
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.summary import latency_seconds
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.what_would_hold import SHORTAGES

Value = int | float | str | bool | None
Row = dict[str, Value]

OUTCOMES = ("held", "out_of_memory", "standstill", "rejected", "does_not_fit", "illegal", "failed")
PROCESS_DIED, OTHER_RELEASE = "ProcessDied", "OtherRelease"
"""Causes of a failure that is not the run's own: its process was killed, or its machine lacks something."""
LATENCIES = ("ttft", "tpot", "e2e", "queue")
PERCENTILES = (50, 90, 95, 99)
LATENCY_COLUMNS = tuple(f"{name}_p{percent}_s" for name in LATENCIES for percent in PERCENTILES)
"""In seconds, of completed requests; with linear interpolation, as in the summary."""

ROW_COLUMNS: dict[str, type[int] | type[float] | type[str] | type[bool]] = {
    "key": str,
    "seed": int,
    **dict.fromkeys(("outcome", "cause"), str),
    "died_at_s": float,
    "error": str,
    **dict.fromkeys(("requests_total", "requests_completed", "requests_rejected", "requests_failed"), int),
    **dict.fromkeys(("requests_unfinished", "preemptions", "recomputed_tokens", "dropped_tokens"), int),
    **dict.fromkeys(("capacity_bytes", "kv_budget_bytes", "peak_reserved_bytes", "least_free_bytes"), int),
    **dict.fromkeys(("kv_usage_peak", "kv_usage_mean", "kv_utilization_mean"), float),
    **dict.fromkeys(("internal_fragmentation_mean", "external_fragmentation_mean"), float),
    **dict.fromkeys(LATENCY_COLUMNS, float),
    **dict.fromkeys(("share_met", "output_tokens_per_s", "requests_per_s", "makespan_s"), float),
    **dict.fromkeys(("most_running", "most_waiting"), int),
    **dict.fromkeys(("died_users", "died_turn", "died_operations"), int),
    **dict.fromkeys(("first_preemption_s", "recomputed_share"), float),
    "thrashing_minutes": int,
}
"""The columns of a row, in order; each may be None. ``least_free_bytes`` is what the driver had left at the least, also
within a step. ``share_met`` is the share of all requests that met the scenario's SLO (none set: None). Of a death:
sessions that were in the server, the turn of the request that asked (from 0), operations on allocators until then.
``thrashing_minutes`` are those in which at least half of what was computed had been computed before."""


def run_row(scenario: Scenario) -> Row:
    """Run a scenario. What it ends in stands in the row, errors too; only an interrupt gets out."""
    row: Row = {**dict.fromkeys(ROW_COLUMNS), "key": scenario_key(scenario), "seed": scenario.seed}
    try:
        return {**row, **_measured(scenario)}
    except DoesNotFit as error:
        return {**row, "outcome": "does_not_fit", "cause": "does_not_fit", "error": str(error)}
    except (ScenarioError, CatalogError, UnknownPolicy) as error:
        return {**row, "outcome": "illegal", "cause": "illegal", "error": str(error)}
    except Exception as error:
        return failed_row(row["key"], scenario.seed, error)


def failed_row(key: Value, seed: int, error: BaseException) -> Row:
    """The row of a run that ended in an error."""
    kind = type(error).__name__
    return _failed(key, seed, kind, f"{kind}: {error}")


def died_row(key: Value, seed: int) -> Row:
    """The row of a run that took its process with it, time and again."""
    return _failed(key, seed, PROCESS_DIED, "its process died, also when it ran alone: killed, or out of host memory")


def elsewhere_row(key: Value, seed: int) -> Row:
    """The row of a run on a machine where it would have been another."""
    text = (
        "the worker has another release of hbmtwin, or not the same files (traces, profiles, models): install the same "
        "release on every node, and put files where every node finds them under the same path"
    )
    return _failed(key, seed, OTHER_RELEASE, text)


def _failed(key: Value, seed: int, cause: str, text: str) -> Row:
    return {**dict.fromkeys(ROW_COLUMNS), "key": key, "seed": seed, "outcome": "failed", "cause": cause, "error": text}


def _measured(scenario: Scenario) -> Row:
    twin = Twin(scenario)
    result = twin.run()
    s, timeline, driver = result.summary, result.timeline, twin.driver
    makespan_s, goodput = s["makespan_s"], s["goodput"]
    return {
        **_end(result, twin.recorder.op_index),
        **{name: s[name] for name in ("requests_total", "requests_completed", "requests_failed")},
        "requests_rejected": sum(s["requests_rejected"].values()),
        **{name: s[name] for name in ("requests_unfinished", "preemptions", "recomputed_tokens")},
        **{name: s[name] for name in ("dropped_tokens", "capacity_bytes", "kv_budget_bytes", "peak_reserved_bytes")},
        "least_free_bytes": max(0, driver.capacity_bytes - driver.tenants_bytes - driver.peak_used_bytes),
        "kv_usage_peak": float(kv_monitor(timeline, s["kv_budget_bytes"])["usage"].max()),
        **{name: s[name] for name in ("kv_usage_mean", "kv_utilization_mean")},
        **{name: s[name] for name in ("internal_fragmentation_mean", "external_fragmentation_mean")},
        **_latencies(result),
        "share_met": None if goodput is None else goodput["share_met"],
        "output_tokens_per_s": s["simulated_output_tokens"] / makespan_s if makespan_s else None,
        "requests_per_s": s["requests_completed"] / makespan_s if makespan_s else None,
        "makespan_s": makespan_s,
        "most_running": int(timeline["running"].max()),
        "most_waiting": int(timeline["waiting"].max()),
        "first_preemption_s": _first_preemption_s(timeline),
        "recomputed_share": s["recomputed_share"],
        "thrashing_minutes": 0 if s["thrashing"] is None else s["thrashing"]["minutes"],
    }


def _first_preemption_s(timeline: pd.DataFrame) -> float | None:
    """When somebody had to give way first; rows stand where the batch changes."""
    after = timeline.loc[timeline["preemptions"] > 0, "time_ns"]
    return int(after.iloc[0]) / 1e9 if len(after) else None


def _latencies(result: Result) -> Row:
    found: Row = {}
    for name, seconds in latency_seconds(result.requests):
        values: Any = np.percentile(seconds, PERCENTILES).tolist() if len(seconds) else [None] * len(PERCENTILES)
        for percent, value in zip(PERCENTILES, values, strict=True):
            found[f"{name.removesuffix('_s')}_p{percent}_s"] = value
    return found


def _end(result: Result, operations: int) -> Row:
    """How a run ended, and what was in the server where it died. O(requests)."""
    s, oom, standstill = result.summary, result.oom, result.summary["standstill"]
    if oom is None and standstill is None:
        reasons = {reason: s["requests_rejected"][reason] for reason in SHORTAGES if reason in s["requests_rejected"]}
        if reasons:
            return {"outcome": "rejected", "cause": max(reasons, key=lambda reason: reasons[reason])}
        return {"outcome": "held"}
    cut_off = result.requests[result.requests["status"] == "failed"]
    death: Row = {
        "died_at_s": (oom or standstill)["time_s"],
        "died_users": int(cut_off["session"].nunique() + result.timeline["parked"].iloc[-1]),
        "died_operations": operations,
    }
    if oom is None:
        return {"outcome": "standstill", "cause": standstill["kind"], **death}
    asked = result.requests.loc[result.requests["id"] == oom["request"], "turn"]
    turn = int(asked.iloc[0]) if len(asked) else None
    return {"outcome": "out_of_memory", "cause": oom["cause"], "died_turn": turn, **death}
