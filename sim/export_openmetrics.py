"""A run as OpenMetrics text: vLLM's metrics under our prefix, at the moments at which a scraper would have come.

::

    # TYPE hbmtwin:num_requests_running gauge
    hbmtwin:num_requests_running{model_name="llama-2-7b",engine="0"} 3 12.000000000    value, simulated seconds
    ...
    # EOF

A scrape comes each ``results.interval_s`` of simulated time, and at the end. Names, labels and buckets are vLLM's
(``vllm/v1/metrics/loggers.py``), so that a panel for ``vllm:`` is one for ``hbmtwin:``; ``kv_cache_usage_perc`` is a
ratio from 0 to 1 there as well. What vLLM does not have (bytes by kind, ends by status) has names of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from hbmtwin.sim.books import Row
from hbmtwin.sim.result import Result, ResultError
from hbmtwin.sim.token_gaps import pads_batches, token_gaps

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PREFIX = "hbmtwin:"
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SCRAPES = 4096
"""Scrapes of a histogram that are numbers at once."""
MOST_SCRAPES = 1_000_000
"""Of an export: about 15 GB of text."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """Values with the moments at which they became known, in order of time; each counts *weight* times."""

    time_ns: Ints
    seconds: Floats
    weight: Ints

    @classmethod
    def of(cls, time_ns: Ints, seconds: Floats, weight: Ints | None = None) -> _Observed:
        order = np.argsort(time_ns, kind="stable")
        count = np.ones(len(order), dtype=np.int64) if weight is None else weight[order]
        return cls(time_ns[order], seconds[order], count)


def openmetrics(result: Result) -> Iterator[str]:
    """The text, line by line. Raise ResultError for too many scrapes. O(scrapes x series + requests log requests)."""
    labels = f'model_name="{_escaped(result.scenario.model.name)}",engine="0"'
    scrapes = _scrapes(result)
    yield from _of_timeline(result, labels, scrapes)
    yield from _of_requests(result.requests, labels, scrapes)
    for name, text, buckets, observed in _latencies(result):
        yield from _head(name, "histogram", text, "seconds")
        yield from _histogram(name, labels, buckets, observed, scrapes)
    yield "# EOF\n"


def _scrapes(result: Result) -> Ints:
    """Every interval from 0 on, and the end."""
    interval = max(1, round(result.scenario.results.interval_s * 1e9))
    end = max(
        int(result.timeline["time_ns"].max()), int(result.requests["end_ns"].max()) if len(result.requests) else 0
    )
    count = -(-end // interval) + 1
    if count > MOST_SCRAPES:
        raise ResultError(
            f"openmetrics: {count:,} scrapes, one each results.interval_s = {interval / 1e9:g}, are more than "
            f"{MOST_SCRAPES:,}: run it again with a longer results.interval_s, or export csv"
        )
    return np.append(np.arange(0, end, interval, dtype=np.int64), end)


def _of_timeline(result: Result, labels: str, scrapes: Ints) -> Iterator[str]:
    line = result.timeline
    row = np.searchsorted(line["time_ns"].to_numpy(), scrapes, side="right") - 1
    gauges = {
        "kv_cache_usage_perc": ("KV in use, of what the device has for it, 0 to 1", result.kv_monitor["usage"]),
        "num_requests_running": ("Sequences in the batch", line["running"]),
        "num_requests_waiting": ("Requests in the queue, preempted ones among them", line["waiting"]),
    }
    for name, (text, values) in gauges.items():
        yield from _head(name, "gauge", text)
        yield from _series(f"{PREFIX}{name}{{{labels}}}", values.to_numpy()[row], scrapes)
    counters = {"num_preemptions": ("Sequences that lost their KV", "preemptions")}
    if result.summary["prefix_cache"] is not None:
        counters["prefix_cache_queries"] = ("Prompt tokens looked for at admission", "queried_tokens")
        counters["prefix_cache_hits"] = ("Of those, tokens found", "hit_tokens")
    for name, (text, column) in counters.items():
        yield from _head(name, "counter", text)
        yield from _series(f"{PREFIX}{name}_total{{{labels}}}", line[column].to_numpy()[row], scrapes)
    yield from _head("memory_bytes", "gauge", "Bytes of the device by what they are; they sum to its capacity", "bytes")
    for kind in Row._fields:
        if line[kind].any():
            yield from _series(f'{PREFIX}memory_bytes{{{labels},kind="{kind}"}}', line[kind].to_numpy()[row], scrapes)


def _of_requests(requests: pd.DataFrame, labels: str, scrapes: Ints) -> Iterator[str]:
    begun = requests[requests["first_token_ns"] >= 0]
    tokens = {
        "prompt_tokens": ("Prompt tokens, at the first token of a request", begun, "first_token_ns"),
        "generation_tokens": ("Output tokens, at the end of a request", requests[requests["end_ns"] >= 0], "end_ns"),
    }
    for name, (text, frame, moment) in tokens.items():
        column = "prompt_tokens" if name == "prompt_tokens" else "output_tokens"
        counted = frame.sort_values(moment, kind="stable")
        sums = np.append(0, np.cumsum(counted[column].to_numpy()))
        until = np.searchsorted(counted[moment].to_numpy(), scrapes, side="right")
        yield from _head(name, "counter", text)
        yield from _series(f"{PREFIX}{name}_total{{{labels}}}", sums[until], scrapes)
    yield from _head("requests", "counter", "Requests that ended, by how")
    for status in ("completed", "rejected", "failed"):
        ends = np.sort(requests.loc[requests["status"] == status, "end_ns"].to_numpy())
        counts = np.searchsorted(ends, scrapes, side="right")
        yield from _series(f'{PREFIX}requests_total{{{labels},status="{status}"}}', counts, scrapes)


def _latencies(result: Result) -> Iterator[tuple[str, str, tuple[float, ...], _Observed]]:
    requests = result.requests
    begun, done = requests[requests["first_token_ns"] >= 0], requests[requests["status"] == "completed"]
    several = done[done["output_tokens"] > 1]

    def between(frame: pd.DataFrame, start: str, stop: str) -> Floats:
        seconds: Floats = (frame[stop] - frame[start]).to_numpy(dtype="float64") / 1e9
        return seconds

    def at(frame: pd.DataFrame, moment: str) -> Ints:
        return frame[moment].to_numpy(dtype=np.int64)

    ttft = _Observed.of(at(begun, "first_token_ns"), between(begun, "arrival_ns", "first_token_ns"))
    yield "time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS, ttft
    if result.steps is not None:
        gaps = token_gaps(requests, result.steps, padded=pads_batches(result.scenario))
        itl = _Observed.of(gaps.time_ns, gaps.gap_ns / 1e9, gaps.count)
        yield "inter_token_latency_seconds", "Between two tokens of a completed request", TOKEN_BUCKETS, itl
    per_token = between(several, "first_token_ns", "end_ns") / (several["output_tokens"].to_numpy() - 1)
    tpot = _Observed.of(at(several, "end_ns"), per_token)
    yield "request_time_per_output_token_seconds", "(e2e - TTFT) / (output tokens - 1)", TOKEN_BUCKETS, tpot
    e2e = _Observed.of(at(done, "end_ns"), between(done, "arrival_ns", "end_ns"))
    yield "e2e_request_latency_seconds", "From arrival to the last token", REQUEST_BUCKETS, e2e
    queue = _Observed.of(at(done, "end_ns"), between(done, "arrival_ns", "scheduled_ns"))
    yield "request_queue_time_seconds", "From arrival to the first step", REQUEST_BUCKETS, queue


def _histogram(name: str, labels: str, buckets: tuple[float, ...], observed: _Observed, scrapes: Ints) -> Iterator[str]:
    place = np.searchsorted(np.array(buckets), observed.seconds, side="left")  # equal to a bound is within it
    members = [np.flatnonzero(place == bucket) for bucket in range(len(buckets) + 1)]
    times = [observed.time_ns[m] for m in members]
    counts = [np.append(0, np.cumsum(observed.weight[m])) for m in members]
    sums = np.append(0.0, np.cumsum(observed.seconds * observed.weight))
    names = [f'{PREFIX}{name}_bucket{{{labels},le="{bound}"}}' for bound in (*buckets, "+Inf")]
    for begin in range(0, len(scrapes), SCRAPES):
        chunk = scrapes[begin : begin + SCRAPES]
        table = np.stack([c[np.searchsorted(t, chunk, side="right")] for t, c in zip(times, counts, strict=True)])
        below = np.cumsum(table, axis=0).T.tolist()
        total = sums[np.searchsorted(observed.time_ns, chunk, side="right")].tolist()
        for time_ns, row, seconds in zip(chunk.tolist(), below, total, strict=True):
            stamp = _stamp(time_ns)
            for series, count in zip(names, row, strict=True):
                yield f"{series} {count} {stamp}\n"
            yield f"{PREFIX}{name}_count{{{labels}}} {row[-1]} {stamp}\n"
            yield f"{PREFIX}{name}_sum{{{labels}}} {seconds!r} {stamp}\n"


def _head(name: str, kind: str, text: str, unit: str = "") -> Iterator[str]:
    yield f"# TYPE {PREFIX}{name} {kind}\n"
    if unit:
        yield f"# UNIT {PREFIX}{name} {unit}\n"
    yield f"# HELP {PREFIX}{name} {text}.\n"


def _series(series: str, values: npt.NDArray[np.generic], scrapes: Ints) -> Iterator[str]:
    for value, time_ns in zip(values.tolist(), scrapes.tolist(), strict=True):
        yield f"{series} {value!r} {_stamp(time_ns)}\n"


def _stamp(time_ns: int) -> str:
    return f"{time_ns // 10**9}.{time_ns % 10**9:09d}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
