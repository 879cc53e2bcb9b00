"""A run as a trace for ui.perfetto.dev and chrome://tracing: the JSON of Chrome's trace event format.

::

    process "requests"   lane 1   |request 0                                  ||request 7 ...   X: a slice
                                  |waiting |prefill |decode |preempted |decode |                X: its states, inside
                         lane 2   |request 1 ...
    process "server"     steps    |steps|steps      |                                           X: where they are kept
                         counters requests, KV usage, KV hit rate, HBM bytes                    C: a timeline row each
                         marks    preemption, out of memory                                     i

A request takes the first lane that is free when it arrives, so there are as many as requests in the server at once.
Times are microseconds with three digits: nanoseconds, exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pandas as pd

from hbmtwin.sim.books import Row
from hbmtwin.sim.result import Result

REQUESTS, SERVER = 1, 2
"""Process ids."""
STEPS = 1
"""Thread id of the server's steps."""
CHUNK_ROWS = 20_000

Pauses = dict[int, list[tuple[int, int]]]


def perfetto(result: Result) -> Iterator[str]:
    """The file, piece by piece. O(rows of timeline, requests and steps; log lanes a request)."""
    s, summary = result.scenario, result.summary
    about = {
        "hbmtwin": summary["version"],
        "model": s.model.name,
        "device": s.device.name,
        "seed": summary["seed"],
        "basis of times": summary["basis"],
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    yield _named(REQUESTS, None, "process", "requests")
    for event in _events(result):
        yield f",\n{event}"
    yield "\n]}\n"


def _events(result: Result) -> Iterator[str]:
    yield _named(SERVER, None, "process", "server")
    yield from _requests(result.requests, _pauses(result.steps))
    if result.steps is not None:
        yield _named(SERVER, STEPS, "thread", "steps")
        yield from _steps(result.steps)
    yield from _counters(result)
    yield from _marks(result)


def states(
    arrival: int, scheduled: int, first_token: int, end: int, pauses: Iterable[tuple[int, int]]
) -> Iterator[tuple[str, int, int]]:
    """The states of a request in turn, with begin and end; -1 is a moment that never came.

    ``prefill`` until the first token, ``decode`` from there on, what is computed again among them; ``preempted``
    where the steps tell of it.
    """
    yield "waiting", arrival, end if scheduled < 0 else scheduled
    at = scheduled
    for begin, until in (*pauses, (end, end)) if scheduled >= 0 else ():
        if at < first_token < begin:
            yield "prefill", at, first_token
            at = first_token
        yield ("decode" if 0 <= first_token <= at else "prefill"), at, begin
        yield "preempted", begin, until
        at = until


def _pauses(steps: pd.DataFrame | None) -> Pauses:
    """From when to when each sequence was out of the batch because it was preempted."""
    found: Pauses = {}
    if steps is None:
        return found
    out: dict[int, int] = {}
    for start, ids, preempted in zip(steps["start_ns"], steps["seq_ids"], steps["preempted"], strict=True):
        if out:
            for i in ids:
                if (begin := out.pop(int(i), None)) is not None:
                    found.setdefault(int(i), []).append((begin, int(start)))
        for i in preempted:
            out[int(i)] = int(start)
    for i, begin in out.items():
        found.setdefault(i, []).append((begin, -1))  # to its end
    return found


def _requests(requests: pd.DataFrame, pauses: Pauses) -> Iterator[str]:
    sent = requests[requests["end_ns"] >= 0].sort_values(["arrival_ns", "id"], kind="stable")
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lanes = 0
    columns = ("id", "arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")
    who = ("session", "turn", "sample", "tenant", "priority")
    told = (*who, "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
    for chunk in _chunks(sent):
        values = zip(*(chunk[name].tolist() for name in (*columns, *told, "status", "reason")), strict=True)
        for i, arrival, scheduled, first, end, *rest in values:
            while busy and busy[0][0] <= arrival:
                heappush(free, heappop(busy)[1])
            if free:
                lane = heappop(free)
            else:
                lanes += 1
                lane = lanes
                yield _named(REQUESTS, lane, "thread", f"lane {lane}")
            heappush(busy, (end, lane))
            *numbers, status, reason = rest
            args = ",".join(f'"{name}":{value}' for name, value in zip(told, numbers, strict=True))
            args += f',"status":{json.dumps(status)}' + (f',"reason":{json.dumps(reason)}' if reason else "")
            yield _slice(f"request {i}", REQUESTS, lane, arrival, end, "request", args)
            stops = [(begin, end if until < 0 else until) for begin, until in pauses.get(i, ())]
            for name, begin, until in states(arrival, scheduled, first, end, stops):
                if until > begin:
                    yield _slice(name, REQUESTS, lane, begin, until, "state", "")


def _steps(steps: pd.DataFrame) -> Iterator[str]:
    columns = ("step", "start_ns", "duration_ns", "repeat", "seq_ids", "new_tokens", "preempted")
    for row in zip(*(steps[name] for name in columns), strict=True):
        step, start, duration, repeat, ids, new, preempted = row
        args = f'"step":{step},"repeat":{repeat},"sequences":{len(ids)},"new_tokens":{sum(map(int, new))}'
        if len(preempted):
            args += f',"preempted":{[int(i) for i in preempted]}'
        yield _slice("steps", SERVER, STEPS, int(start), int(start + duration), "step", args)


def _counters(result: Result) -> Iterator[str]:
    line, monitor = result.timeline, result.kv_monitor
    held = [name for name in Row._fields if line[name].any()]
    columns = ("time_ns", "running", "waiting", "parked", *held)
    for chunk in _chunks(line):
        seen = monitor.loc[chunk.index]
        rates = zip(seen["usage"].tolist(), seen["hit_rate"].tolist(), strict=True)
        rows = zip(*(chunk[name].tolist() for name in columns), strict=True)
        for (time_ns, running, waiting, parked, *sizes), (usage, hit_rate) in zip(rows, rates, strict=True):
            counts = f'"running":{running},"waiting":{waiting},"parked":{parked}'
            yield _counter("requests", time_ns, counts)
            yield _counter("KV usage", time_ns, f'"ratio":{usage!r}')
            if not np.isnan(hit_rate):
                yield _counter("KV hit rate", time_ns, f'"ratio":{hit_rate!r}')
            bands = ",".join(f'"{name}":{size}' for name, size in zip(held, sizes, strict=True))
            yield _counter("HBM bytes", time_ns, bands)


def _marks(result: Result) -> Iterator[str]:
    line = result.timeline
    new = line["preemptions"].diff().fillna(line["preemptions"]).astype("int64")
    for time_ns, count in zip(line.loc[new > 0, "time_ns"].tolist(), new[new > 0].tolist(), strict=True):
        yield _mark("preemption", "p", time_ns, {"preemptions": count})
    if (oom := result.oom) is not None:
        yield _mark("out of memory", "g", round(oom["time_s"] * 1e9), oom)


def _chunks(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """A frame in pieces, so that only one of them is Python objects."""
    for begin in range(0, len(frame), CHUNK_ROWS):
        yield frame.iloc[begin : begin + CHUNK_ROWS]


def _us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _slice(name: str, pid: int, tid: int, begin: int, end: int, cat: str, args: str) -> str:
    where = f'"pid":{pid},"tid":{tid},"ts":{_us(begin)},"dur":{_us(end - begin)}'
    return f'{{"ph":"X","name":"{name}","cat":"{cat}",{where},"args":{{{args}}}}}'


def _counter(name: str, time_ns: int, args: str) -> str:
    return f'{{"ph":"C","name":"{name}","pid":{SERVER},"ts":{_us(time_ns)},"args":{{{args}}}}}'


def _mark(name: str, scope: str, time_ns: int, args: dict[str, Any]) -> str:
    where = f'"pid":{SERVER},"tid":{STEPS},"ts":{_us(time_ns)}'
    return f'{{"ph":"i","s":"{scope}","name":"{name}",{where},"args":{json.dumps(args)}}}'


def _named(pid: int, tid: int | None, what: str, name: str) -> str:
    thread = "" if tid is None else f',"tid":{tid}'
    return f'{{"ph":"M","name":"{what}_name","pid":{pid}{thread},"args":{{"name":"{name}"}}}}'
