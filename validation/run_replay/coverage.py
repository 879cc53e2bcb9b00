"""Whether a run's own tables still have every row that the run wrote: what is empty or cut off witnesses nothing.

::

    requests      as many of each end as the summary counts; their last end and their tokens are its own
    timeline      a row at each end of a request, at the death, behind the last step, and at the first step end behind
                  each tick of results.interval_s
    checkpoints   a map at exactly the moments that the rows of the timeline make due (:mod:`hbmtwin.sim.recorder`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hbmtwin.sim.recorder import MAX_MAPS
from hbmtwin.sim.scenario import Scenario

Ints = NDArray[np.int64]


class Lost(NamedTuple):
    """What a table lacks."""

    table: str
    words: str


def lost_rows(
    scenario: Scenario,
    summary: Mapping[str, Any],
    requests: pd.DataFrame,
    timeline: pd.DataFrame,
    checkpoints: pd.DataFrame,
    step_ends: Ints,
) -> Iterator[Lost]:
    """What is missing, the first thing of each table. *step_ends* are those that are replayed. O(rows)."""
    if words := _of_requests(summary, requests):
        yield Lost("requests", words)
    interval_ns = max(1, round(scenario.results.interval_s * 1e9))
    times = timeline["time_ns"].to_numpy(dtype=np.int64)
    if words := _of_timeline(interval_ns, summary, requests, times, step_ends):
        yield Lost("timeline", words)
        return  # whose rows tell where maps must be
    there = checkpoints["time_ns"].to_numpy(dtype=np.int64)
    due = map_moments(times.tolist(), interval_ns, round(scenario.results.checkpoint_s * 1e9), _death_ns(summary))
    if len(gone := np.setdiff1d(due, there)):
        yield Lost("checkpoints", f"no address map at {gone[0] / 1e9:.6f} s, where the run made one: rows are missing")


def _of_requests(summary: Mapping[str, Any], requests: pd.DataFrame) -> str:
    count = requests["status"].value_counts()
    ended = sum(int(n) for status, n in count.items() if status != "unfinished")
    for what, told, there in (
        ("completed", summary["requests_completed"], int(count.get("completed", 0))),
        ("failed", summary["requests_failed"], int(count.get("failed", 0))),
        ("ended", summary["requests_total"] - summary["requests_unfinished"], ended),
    ):
        if told != there:
            return f"{there} requests {what}, and summary.json says {told}: rows are missing"
    tokens = int(requests["output_tokens"].sum())
    if tokens != (told := summary["simulated_output_tokens"]):
        return f"{tokens} output tokens, and summary.json says {told}: rows are missing"
    return ""


def _of_timeline(
    interval_ns: int, summary: Mapping[str, Any], requests: pd.DataFrame, times: Ints, step_ends: Ints
) -> str:
    ended = requests["end_ns"][requests["status"].isin(("completed", "failed"))].to_numpy(dtype=np.int64)
    death = _death_ns(summary)
    wanted = np.unique(np.concatenate([ended, step_ends[-1:], [] if death is None else [death]])).astype(np.int64)
    if not len(times):
        return "it holds no row"
    if len(gone := np.setdiff1d(ended if death is None else np.append(ended, death), times)):
        return f"no row at {gone.min() / 1e9:.6f} s, where a request ended or the run died: rows are missing"
    if (apart := np.diff(times) < 0).any():
        return f"row {int(np.flatnonzero(apart)[0]) + 1} lies before the one in front of it"
    if times[-1] < wanted.max(initial=0):
        return f"its last row is at {times[-1] / 1e9:.6f} s, and steps end until {wanted.max() / 1e9:.6f} s"
    if not len(step_ends):
        return ""
    # Behind each row the next one stands at the first step end after the tick, at the latest.
    ends = np.sort(step_ends)
    due = np.searchsorted(ends, (times // interval_ns + 1) * interval_ns, "left")
    late = np.flatnonzero((due[:-1] < len(ends)) & (times[1:] > ends[np.minimum(due[:-1], len(ends) - 1)]))
    if times[0] > ends[0]:
        return f"its first row is at {times[0] / 1e9:.6f} s, behind the first step: rows are missing"
    if len(late):
        return f"no row at {ends[due[late[0]]] / 1e9:.6f} s, where results.interval_s makes one due: rows are missing"
    return ""


def _death_ns(summary: Mapping[str, Any]) -> int | None:
    return None if summary["oom"] is None else round(summary["oom"]["time_s"] * 1e9)


def map_moments(times: list[int], interval_ns: int, checkpoint_ns: int, death_ns: int | None) -> Ints:
    """When a run with these rows kept its address maps: at each that was due, and at its death; every second one was
    dropped whenever there were too many, unless their spacing was given. O(rows)."""
    kept: list[int] = []
    spacing, due = checkpoint_ns or interval_ns, 0
    for time_ns in times:
        if time_ns < due:
            continue
        if not kept or kept[-1] != time_ns:
            kept.append(time_ns)
        if checkpoint_ns == 0 and len(kept) > MAX_MAPS:
            del kept[1::2]
            spacing *= 2
        due = (time_ns // spacing + 1) * spacing
    if death_ns is not None:
        kept.append(death_ns)
    return np.unique(np.array(kept, np.int64))
