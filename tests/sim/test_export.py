"""Exports: read back by readers written from the formats' own pages, and held against the tables they came from."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hbmtwin.sim.books import Row
from hbmtwin.sim.export import EXPORT_FORMATS, check_exportable, export
from hbmtwin.sim.export_openmetrics import _histogram, _Observed, openmetrics
from hbmtwin.sim.export_perfetto import perfetto, states
from hbmtwin.sim.result import Result, ResultError
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.token_gaps import token_gaps

TRAFFIC = (
    *("engine.max_model_len=512", "workload.system_prompt_tokens=20", "workload.request_rate=30"),
    *("workload.num_prompts=40", "session.turns=1", "results.interval_s=0.3", "results.steps=true"),
    "workload.prompt_tokens={distribution='uniform',low=1,high=500}",
    "workload.output_tokens={distribution='uniform',low=1,high=90}",
)


@pytest.fixture(scope="module")
def pressed() -> Result:
    """Preemptions, rejections, a prefix cache, steps."""
    overrides = ["kv_cache.block_size=16", "kv_cache.options={num_blocks=60}", "kv_cache.enable_prefix_caching=true"]
    result = Twin(Scenario.load(overrides=[*TRAFFIC, *overrides])).run()
    assert result.summary["preemptions"] > 5
    assert result.summary["requests_rejected"]["max_model_len"] > 1
    return result


@pytest.fixture(scope="module")
def dead() -> Result:
    overrides = ["workload.request_rate=inf", "engine.gpu_memory_utilization=0.47", "results.steps=false"]
    result = Twin(Scenario.load(preset="doubling", overrides=[*TRAFFIC, *overrides])).run()
    assert result.oom is not None
    return result


# -- Perfetto --------------------------------------------------------------------------------------------------------


def trace_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("".join(perfetto(result)))
    return found


def ns(event: dict[str, Any], key: str = "ts") -> int:
    return round(event[key] * 1000)


@pytest.mark.parametrize("name", ["pressed", "dead"])
def test_every_event_is_of_the_trace_event_format(name: str, request: pytest.FixtureRequest) -> None:
    trace = trace_of(request.getfixturevalue(name))
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "i": {"name", "pid", "tid", "ts", "s", "args"},
    }
    for event in trace["traceEvents"]:
        assert needed[event["ph"]] <= set(event)
        assert all(event.get(key, 0) >= 0 for key in ("ts", "dur"))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_slices_of_one_track_are_nested_or_apart(pressed: Result) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace_of(pressed)["traceEvents"]:
        if event["ph"] == "X":
            span = ns(event), ns(event) + ns(event, "dur")
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert len(tracks) > 3
    for spans in tracks.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_requests_and_their_states_are_those_of_the_table(pressed: Result) -> None:
    events = [e for e in trace_of(pressed)["traceEvents"] if e["ph"] == "X"]
    slices = {e["name"]: e for e in events if e["cat"] == "request"}
    assert len(slices) == len(pressed.requests)
    held = Counter[str]()
    for event in events:
        if event["cat"] == "state":
            held[event["name"]] += ns(event, "dur")
    r = pressed.requests
    for row in r.itertuples():
        event = slices[f"request {row.id}"]
        assert (ns(event), ns(event) + ns(event, "dur")) == (row.arrival_ns, row.end_ns)
        told = {
            key: getattr(row, key)
            for key in ("session", "tenant", "priority", "prompt_tokens", "output_tokens", "preemptions", "status")
        }
        assert told.items() <= event["args"].items()
    ran = r[r["scheduled_ns"] >= 0]
    never = r[r["scheduled_ns"] < 0]
    waited = (ran["scheduled_ns"] - ran["arrival_ns"]).sum() + (never["end_ns"] - never["arrival_ns"]).sum()
    assert held["waiting"] == waited
    assert held.total() == (r["end_ns"] - r["arrival_ns"]).sum()
    assert held["preempted"] > 0
    assert sum(e["name"] == "preempted" for e in events) == pressed.summary["preemptions"]


def test_as_many_lanes_as_requests_at_once(pressed: Result) -> None:
    r = pressed.requests
    most = max(((r["arrival_ns"] <= t) & (r["end_ns"] > t)).sum() for t in r["arrival_ns"])
    lanes = {e["tid"] for e in trace_of(pressed)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1}
    assert lanes == set(range(1, most + 1))


def test_counters_are_the_timeline(pressed: Result) -> None:
    counters: dict[str, list[dict[str, Any]]] = {}
    for event in trace_of(pressed)["traceEvents"]:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event)
    line, monitor = pressed.timeline, pressed.kv_monitor
    assert [ns(e) for e in counters["requests"]] == list(line["time_ns"])
    assert [e["args"]["running"] for e in counters["requests"]] == list(line["running"])
    assert [e["args"]["waiting"] for e in counters["requests"]] == list(line["waiting"])
    assert [e["args"]["ratio"] for e in counters["KV usage"]] == list(monitor["usage"])
    assert [e["args"]["ratio"] for e in counters["KV hit rate"]] == list(monitor["hit_rate"].dropna())
    assert {sum(e["args"].values()) for e in counters["HBM bytes"]} == {pressed.summary["capacity_bytes"]}


def test_steps_and_marks(pressed: Result, dead: Result) -> None:
    events = trace_of(pressed)["traceEvents"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert pressed.steps is not None
    assert [(ns(e), ns(e, "dur"), e["args"]["repeat"]) for e in steps] == [
        tuple(row) for row in pressed.steps[["start_ns", "duration_ns", "repeat"]].values
    ]
    marks = [e for e in events if e["ph"] == "i"]
    assert {e["name"] for e in marks} == {"preemption"}
    assert sum(e["args"]["preemptions"] for e in marks) == pressed.summary["preemptions"]
    dying = [e for e in trace_of(dead)["traceEvents"] if e["ph"] == "i"]
    assert dead.oom is not None
    assert [(e["name"], e["s"], e["args"]["cause"]) for e in dying] == [("out of memory", "g", dead.oom["cause"])]
    assert not any(e.get("cat") == "step" for e in trace_of(dead)["traceEvents"])


@pytest.mark.parametrize(
    ("moments", "pauses", "expected"),
    [
        ((0, -1, -1, 9), [], [("waiting", 0, 9)]),
        ((0, 2, 5, 9), [], [("waiting", 0, 2), ("prefill", 2, 5), ("decode", 5, 9)]),
        ((0, 2, 9, 9), [], [("waiting", 0, 2), ("prefill", 2, 9)]),
        ((0, 2, -1, 9), [], [("waiting", 0, 2), ("prefill", 2, 9)]),
        (
            (0, 1, 6, 9),
            [(2, 4), (7, 8)],
            [
                *[("waiting", 0, 1), ("prefill", 1, 2), ("preempted", 2, 4), ("prefill", 4, 6), ("decode", 6, 7)],
                *[("preempted", 7, 8), ("decode", 8, 9)],
            ],
        ),
        ((0, 1, 3, 9), [(5, 9)], [("waiting", 0, 1), ("prefill", 1, 3), ("decode", 3, 5), ("preempted", 5, 9)]),
    ],
)
def test_states_by_hand(
    moments: tuple[int, int, int, int], pauses: list[tuple[int, int]], expected: list[tuple[str, int, int]]
) -> None:
    assert [state for state in states(*moments, pauses) if state[2] > state[1]] == expected


# -- OpenMetrics -----------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)\{((?:\w+="[^"]*",?)*)\} (\S+) (\d+\.\d{9})')
KINDS = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_count", "_sum"}}

Points = dict[tuple[str, str], list[tuple[float, float]]]


def read(text: str) -> tuple[dict[str, str], Points]:
    """Types of families, and the points of each series; every rule of the exposition that can be seen is held."""
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    assert text.endswith("\n")
    types: dict[str, str] = {}
    points: Points = {}
    family = ""
    for line in lines[:-1]:
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in types, "each family is typed once, and its lines stand together"
                types[name] = rest
                family = name
            assert name == family
            assert word in ("TYPE", "UNIT", "HELP")
            assert word != "UNIT" or name.endswith(f"_{rest}")
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        name, labels, value, stamp = match.groups()
        assert name.removeprefix(family) in KINDS[types[family]]
        series = points.setdefault((name, labels), [])
        assert not series or series[-1][0] < float(stamp), "time goes on"
        series.append((float(stamp), float(value)))
    return types, points


def test_the_text_reads_back_as_vllms_metrics(pressed: Result) -> None:
    types, points = read("".join(openmetrics(pressed)))
    vllm = """
        kv_cache_usage_perc num_requests_running num_requests_waiting num_preemptions prefix_cache_queries
        prefix_cache_hits prompt_tokens generation_tokens time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    """
    assert {f"hbmtwin:{name}" for name in vllm.split()} | {"hbmtwin:memory_bytes", "hbmtwin:requests"} == set(types)
    plain = 'model_name="llama-2-7b",engine="0"'
    last = {name: series[-1][1] for (name, labels), series in points.items() if labels == plain}
    r, end = pressed.requests, pressed.timeline.iloc[-1]
    assert last["hbmtwin:num_preemptions_total"] == pressed.summary["preemptions"]
    assert last["hbmtwin:prefix_cache_hits_total"] == end["hit_tokens"] > 0
    assert last["hbmtwin:prefix_cache_queries_total"] == end["queried_tokens"]
    assert last["hbmtwin:generation_tokens_total"] == r["output_tokens"].sum()
    done = r[r["status"] == "completed"]
    assert last["hbmtwin:e2e_request_latency_seconds_count"] == len(done)
    e2e = (done["end_ns"] - done["arrival_ns"]).sum() / 1e9
    assert last["hbmtwin:e2e_request_latency_seconds_sum"] == pytest.approx(e2e)
    assert last["hbmtwin:inter_token_latency_seconds_count"] == (done["output_tokens"] - 1).sum()
    ends = {labels.split('status="')[1]: s[-1][1] for (n, labels), s in points.items() if n == "hbmtwin:requests_total"}
    assert ends == {'completed"': len(done), 'rejected"': len(r) - len(done), 'failed"': 0}


def test_a_scrape_sees_what_the_timeline_says_at_that_moment(pressed: Result) -> None:
    _, points = read("".join(openmetrics(pressed)))
    plain = 'model_name="llama-2-7b",engine="0"'
    line = pressed.timeline
    running = points["hbmtwin:num_requests_running", plain]
    usage = points["hbmtwin:kv_cache_usage_perc", plain]
    assert [round(t, 9) for t, _ in running[:3]] == [0, 0.3, 0.6]
    assert running[-1][0] == pytest.approx(pressed.requests["end_ns"].max() / 1e9)
    for (stamp, value), (_, used) in zip(running, usage, strict=True):
        row = line[line["time_ns"] <= round(stamp * 1e9)].index[-1]
        assert value == line.loc[row, "running"]
        assert used == pressed.kv_monitor.loc[row, "usage"]
    memory = [[v for _, v in series] for (name, _), series in points.items() if name == "hbmtwin:memory_bytes"]
    assert set(np.sum(memory, axis=0)) == {pressed.summary["capacity_bytes"]}
    assert len(memory) == sum(line[name].any() for name in Row._fields)


def test_histograms_are_monotone_in_bucket_and_time_and_count_by_hand(pressed: Result) -> None:
    _, points = read("".join(openmetrics(pressed)))
    buckets: dict[str, list[tuple[float, list[float]]]] = {}
    for (name, labels), series in points.items():
        if name.endswith("_bucket"):
            bound = float(labels.split('le="')[1].rstrip('"'))
            buckets.setdefault(name, []).append((bound, [value for _, value in series]))
    assert len(buckets) == 5
    for name, rows in buckets.items():
        table = np.array([values for _, values in rows])
        assert [bound for bound, _ in rows] == sorted(bound for bound, _ in rows)
        assert rows[-1][0] == math.inf
        assert (np.diff(table, axis=0) >= 0).all()
        assert (np.diff(table, axis=1) >= 0).all()
        plain = 'model_name="llama-2-7b",engine="0"'
        assert [v for _, v in points[name.replace("_bucket", "_count"), plain]] == rows[-1][1]
    r = pressed.requests[pressed.requests["first_token_ns"] >= 0]
    ttft = (r["first_token_ns"] - r["arrival_ns"]) / 1e9
    for bound, values in buckets["hbmtwin:time_to_first_token_seconds_bucket"]:
        assert values[-1] == (ttft <= bound).sum()
    assert pressed.steps is not None
    gaps = token_gaps(pressed.requests, pressed.steps)
    for bound, values in buckets["hbmtwin:inter_token_latency_seconds_bucket"]:
        assert values[-1] == gaps.count[gaps.gap_ns / 1e9 <= bound].sum()


def test_a_histogram_by_hand() -> None:
    seen = _Observed.of(np.array([30, 10, 20]), np.array([9.0, 1.0, 1.5]), np.array([1, 2, 1]))
    lines = list(_histogram("x_seconds", 'a="b"', (1.0, 2.0), seen, np.array([5, 20, 40])))
    assert [line.split(" ")[1] for line in lines] == [
        *("0", "0", "0", "0", "0.0"),
        *("2", "3", "3", "3", "3.5"),
        *("2", "3", "4", "4", "12.5"),
    ]
    assert lines[5] == 'hbmtwin:x_seconds_bucket{a="b",le="1.0"} 2 0.000000020\n'


def test_without_steps_or_a_prefix_cache_their_families_are_left_out(dead: Result) -> None:
    types, _ = read("".join(openmetrics(dead)))
    absent = {"hbmtwin:inter_token_latency_seconds", "hbmtwin:prefix_cache_hits", "hbmtwin:prefix_cache_queries"}
    assert not absent & set(types)


# -- CSV and files -----------------------------------------------------------------------------------------------------


def test_csv_reads_back_as_the_tables(pressed: Result, tmp_path: Path) -> None:
    export(pressed, "csv", tmp_path / "csv")
    names = {path.stem for path in (tmp_path / "csv").iterdir()}
    assert names == {"timeline", "kv_monitor", "requests", "checkpoints", "steps"}
    for name in names - {"steps"}:
        found = pd.read_csv(tmp_path / "csv" / f"{name}.csv", keep_default_na=False, na_values={"hit_rate": [""]})
        pd.testing.assert_frame_equal(found, getattr(pressed, name), check_dtype=False)
    steps = pd.read_csv(tmp_path / "csv" / "steps.csv", keep_default_na=False, dtype=str)
    assert pressed.steps is not None
    for name in ("seq_ids", "preempted", "step_ends_ns"):
        assert [[int(x) for x in text.split()] for text in steps[name]] == [list(x) for x in pressed.steps[name]]


@pytest.mark.parametrize("fmt", EXPORT_FORMATS)
def test_the_same_result_makes_the_same_bytes_also_when_it_was_stored(
    fmt: str, pressed: Result, dead: Result, tmp_path: Path
) -> None:
    if fmt == "last_operations":  # of a run that died
        pressed = dead
    pressed.save(tmp_path / "result")
    stored = Result.load(tmp_path / "result")
    written = []
    for name, result in (("one.gz", pressed), ("two.gz", stored)):
        export(result, fmt, tmp_path / name)
        export(result, fmt, tmp_path / name)  # a second time: it is replaced
        path = tmp_path / name
        written.append({p.name: p.read_bytes() for p in path.iterdir()} if fmt == "csv" else path.read_bytes())
    assert written[0] == written[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.gz", "result", "two.gz"], "nothing else is left"


def test_neither_a_device_nor_a_file_of_a_result_is_written_over(pressed: Result, tmp_path: Path) -> None:
    pressed.save(tmp_path / "r")
    for path, why in ((Path("/dev/null"), "is a device"), (tmp_path / "r" / "summary.json", "is a file of a result")):
        with pytest.raises(ResultError, match=why):
            export(pressed, "openmetrics", path)


def test_a_name_that_ends_in_gz_is_packed(pressed: Result, tmp_path: Path) -> None:
    export(pressed, "perfetto", tmp_path / "deep" / "trace.json.gz")
    export(pressed, "perfetto", tmp_path / "trace.json")
    packed = (tmp_path / "deep" / "trace.json.gz").read_bytes()
    assert packed[:2] == b"\x1f\x8b"
    assert packed[3:8] == bytes(5), "neither a name nor a time in its head"
    assert gzip.decompress(packed) == (tmp_path / "trace.json").read_bytes()


def test_an_export_that_breaks_leaves_what_was_there(pressed: Result, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("old")
    broken = replace(pressed, requests=pressed.requests.drop(columns="turn"))
    with pytest.raises(KeyError):
        export(broken, "perfetto", tmp_path / "trace.json")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("trace.json", "old")]


def test_what_is_not_ours_is_not_replaced(pressed: Result, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResultError, match="no directory of CSV tables"):
        export(pressed, "csv", tmp_path)
    with pytest.raises(ResultError, match="no directory of CSV tables"):
        export(pressed, "csv", tmp_path / "notes.txt")
    with pytest.raises(ResultError, match="is a directory"):
        export(pressed, "perfetto", tmp_path)
    with pytest.raises(ResultError, match="cannot be written"):
        export(pressed, "openmetrics", tmp_path / "notes.txt" / "metrics.txt")
    with pytest.raises(ValueError, match="no format is called 'tikz'"):
        export(pressed, "tikz", tmp_path / "x")
    pressed.save(tmp_path / "result")
    assert check_exportable("csv", tmp_path / "result") is not None, "a result is no export"
    assert [p.name for p in tmp_path.glob("*.txt")] == ["notes.txt"]


def test_a_run_in_which_nothing_ran_can_be_exported(tmp_path: Path) -> None:
    overrides = ["engine.max_model_len=64", "workload.num_prompts=2", "workload.prompt_tokens=100", "session.turns=1"]
    result = Twin(Scenario.load(overrides=[*overrides, "results.steps=true"])).run()
    assert [e for e in trace_of(result)["traceEvents"] if e.get("cat") == "state"] == []
    types, points = read("".join(openmetrics(result)))
    assert types["hbmtwin:inter_token_latency_seconds"] == "histogram"
    assert {s[-1][1] for (name, _), s in points.items() if name.endswith("_bucket")} == {0}
    export(result, "csv", tmp_path / "csv")
    assert (tmp_path / "csv" / "steps.csv").read_text().count("\n") == 1


def test_an_export_that_no_disk_would_hold_is_refused_at_once(tmp_path: Path) -> None:
    overrides = ["workload.num_prompts=2", "session.turns=1", "results.interval_s=1e-9"]
    result = Twin(Scenario.load(overrides=overrides)).run()
    with pytest.raises(
        ResultError, match=r"^openmetrics: \d{1,3}(,\d{3}){3,} scrapes, one each results.interval_s = 1e-09"
    ):
        export(result, "openmetrics", tmp_path / "metrics.txt")
    assert list(tmp_path.iterdir()) == []
