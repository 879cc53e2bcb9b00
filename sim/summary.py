"""The summary of a run, computed from its tables: what ``run --json`` prints, less the wall time.

Means over time weigh each interval between two timeline rows by its length and take the middle of its two ends:
memory grows evenly between rows, and rows stand on both sides of every jump. A timeline is read a piece at a time, and
a table of requests a column at a time: a copy of a whole table would be the largest thing that a run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import fsum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from hbmtwin.sim.books import Row
from hbmtwin.sim.monitor import kv_monitor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESERVED = tuple(name for name in Row._fields if name not in ("tenants", "static", "driver_free"))
"""Byte columns of a timeline that lie in what allocators have reserved."""


PIECE_ROWS = 1 << 15
"""Rows of a timeline that are looked at together."""


class Area(NamedTuple):
    """What lies below a line, and how long it is."""

    length: float
    area: float


def area_below(time_ns: Floats, values: Floats, where: npt.NDArray[np.bool_] | None = None) -> Area:
    """The area by the trapezoid rule, over the intervals at both ends of which *where* holds. O(rows)."""
    lengths = np.diff(time_ns)
    middles = (values[1:] + values[:-1]) / 2
    if where is not None:
        both = where[1:] & where[:-1]
        lengths, middles = lengths[both], middles[both]
    return Area(float(lengths.sum()), float((lengths * middles).sum()))


def mean_of(areas: Iterable[Area]) -> float | None:
    """Mean over time of a line that was measured in pieces, None if no time passes."""
    lengths, sums = zip(*areas, strict=True)
    total = fsum(lengths)
    return fsum(sums) / total if total > 0 else None


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
    pieces = [_areas(piece, kv_budget_bytes) for piece in _pieces(timeline)]
    return {f"{name}_mean": mean_of(areas[name] for areas in pieces) for name in pieces[0]}


def _pieces(timeline: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Rows in order; each piece begins with the last row of the one before, so that no interval is lost."""
    starts = range(0, max(1, len(timeline) - 1), PIECE_ROWS)
    for start in starts:
        yield timeline.iloc[start : start + PIECE_ROWS + 1]


def _areas(timeline: pd.DataFrame, kv_budget_bytes: int) -> dict[str, Area]:
    t = {name: column.to_numpy(dtype="float64") for name, column in timeline.items()}
    time, external = t["time_ns"], t["external"]
    tokens = t["kv_tokens"] + t["kv_state"] + t["kv_parked"]
    held = tokens + t["kv_padding"] + t["kv_unfilled"]
    internal = t["kv_unfilled"] + t["rounding"]
    reserved = np.sum([t[name] for name in RESERVED], axis=0)
    busy = held > 0
    ratio = np.divide(tokens, held, out=np.zeros_like(held), where=busy)
    usage = kv_monitor(timeline, kv_budget_bytes)["usage"].to_numpy()
    return {
        "kv_utilization": area_below(time, ratio, busy),
        "kv_usage": area_below(time, usage),
        "internal_fragmentation": area_below(time, internal / reserved),
        "external_fragmentation": area_below(time, external / reserved),
    }


def latencies(requests: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """TTFT, TPOT, end-to-end and queue time of completed requests, in seconds: p50, p90 and p99 of each."""
    return {name: percentiles(seconds) for name, seconds in latency_seconds(requests)}


def latency_seconds(requests: pd.DataFrame) -> Iterator[tuple[str, Floats]]:
    """The latencies of each completed request, one kind after another.

    TTFT runs from arrival to the first token; TPOT is (e2e - ttft) / (output tokens - 1), none for one token.
    """
    completed = (requests["status"] == "completed").to_numpy(dtype=bool)

    def of(name: str) -> Ints:
        return requests[name].to_numpy(dtype=np.int64)[completed]

    yield "ttft_s", (of("first_token_ns") - of("arrival_ns")) / 1e9
    several = of("output_tokens") > 1
    decoding_ns, later_tokens = (of("end_ns") - of("first_token_ns"))[several], of("output_tokens")[several] - 1
    yield "tpot_s", decoding_ns / later_tokens / 1e9
    yield "e2e_s", (of("end_ns") - of("arrival_ns")) / 1e9
    yield "queue_s", (of("scheduled_ns") - of("arrival_ns")) / 1e9


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
