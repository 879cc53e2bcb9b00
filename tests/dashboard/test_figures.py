"""Figures: what they draw sums to the device, and no extreme is lost on the way to the screen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.api import PRESETS, Result, Scenario, run
from hbmtwin.dashboard.figures import GIB, kv_monitor_over_time, kv_utilization, latency_by_turn, memory_over_time, thin
from hbmtwin.dashboard.palette import MEMORY, policy_colours
from hbmtwin.sim.books import Row

CROWD = (
    *("workload.num_prompts=60", "workload.request_rate=8", "session.turns=3", "session.think_time_s=2"),
    *("workload.prompt_tokens=400", "workload.output_tokens=150"),
)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: run(Scenario.load(preset=name, overrides=CROWD)) for name in ("doubling", "paged")}


def test_the_bands_are_every_byte_column_of_the_timeline_each_once() -> None:
    columns = [column for layer in MEMORY.values() for column in layer.columns]
    assert sorted(columns) == sorted(Row._fields)


def test_no_two_meanings_share_a_colour() -> None:
    lines = policy_colours([*PRESETS, "one", "two", "three", "four"])
    colours = [layer.colour for layer in MEMORY.values()] + list(lines.values())
    assert len(set(colours)) == len(colours)


def test_a_preset_keeps_its_colour_and_variants_take_the_others() -> None:
    whole = policy_colours(PRESETS)
    some = policy_colours(["mine", "paged", "yours"])
    assert some["paged"] == whole["paged"]
    assert len(set(some.values())) == 3
    assert not {some["mine"], some["yours"]} & set(whole.values())
    assert len(policy_colours([f"v{i}" for i in range(20)])) == 20


def test_each_column_of_the_memory_picture_sums_to_the_capacity(results: dict[str, Result]) -> None:
    figure = memory_over_time(results)
    bands = [trace for trace in figure.data if trace.stackgroup]
    for axis, result in zip(("x", "x2"), results.values(), strict=True):
        drawn = [np.asarray(trace.y, dtype=float) for trace in bands if (trace.xaxis or "x") == axis]
        capacity_gib = result.summary["capacity_bytes"] / GIB
        np.testing.assert_allclose(np.sum(drawn, axis=0), capacity_gib, rtol=1e-6)


def test_a_death_is_marked_where_it_happened(results: dict[str, Result]) -> None:
    overrides = ["workload.num_prompts=60", "workload.request_rate=inf", "workload.prompt_tokens=1500"]
    dead = run(Scenario.load(preset="caching", overrides=[*overrides, "kv_cache.tensors=merged"]))
    assert dead.oom is not None
    alive = {"paged": results["paged"]}
    lines = [shape.x0 for shape in memory_over_time({"caching": dead, **alive}).layout.shapes if shape.type == "line"]
    assert lines == [dead.oom["time_s"]]
    assert not memory_over_time(alive).layout.shapes


def test_a_panel_has_its_name_above_a_verdict_short_enough_for_half_a_narrow_page(results: dict[str, Result]) -> None:
    titles = [note.text for note in memory_over_time(results).layout.annotations if "<b>" in note.text]
    assert [title.split("<br>")[0] for title in titles] == ["<b>doubling</b>", "<b>paged</b>"]
    assert all(len(title.split("<br>")[1]) <= 45 for title in titles)


def test_preemptions_are_marked_at_the_rows_that_count_them() -> None:
    tight = ["workload.num_prompts=30", "workload.request_rate=inf", "workload.prompt_tokens=1000"]
    result = run(Scenario.load(overrides=[*tight, "workload.output_tokens=500", "session.turns=1"]))
    assert result.summary["preemptions"] > 0
    marks = next(t for t in memory_over_time({"paged": result}).data if t.name == "Preemption")
    counted = result.timeline.set_index("time_ns")["preemptions"]
    rises = counted.index[counted.diff().fillna(0) > 0]
    assert list(marks.x) == list(rises / 1e9)


def test_utilisation_is_tokens_over_what_sequences_hold(results: dict[str, Result]) -> None:
    line = results["doubling"].timeline
    trace = kv_utilization(results).data[0]
    tokens = line["kv_tokens"] + line["kv_parked"]
    expected = 100 * tokens / (tokens + line["kv_unfilled"])  # nothing held: not a number, a gap in the line
    for time_s, percent in zip(trace.x, trace.y, strict=True):
        there = expected[line["time_ns"] / 1e9 == time_s].to_numpy()
        assert np.isclose(there, percent, rtol=1e-5, equal_nan=True).any()


def test_padding_is_held_and_no_token(results: dict[str, Result]) -> None:
    padded = results["doubling"].timeline.assign(kv_padding=results["doubling"].timeline["kv_tokens"])
    percent = kv_utilization({"static": replace(results["doubling"], timeline=padded)}).data[0].y
    assert np.nanmax(percent) <= 50.0 < np.nanmax(kv_utilization(results).data[0].y)


def test_the_monitor_shows_usage_and_the_hit_rate_only_where_there_is_one(results: dict[str, Result]) -> None:
    figure = kv_monitor_over_time(results)
    assert [trace.name for trace in figure.data] == ["doubling", "paged"]
    for trace, result in zip(figure.data, results.values(), strict=True):
        series = 100 * result.kv_monitor["usage"]
        assert np.nanmax(trace.y) == pytest.approx(series.max(), rel=1e-6)
    kept = run(Scenario.load(preset="doubling", overrides=[*CROWD, "session.between_turns=keep"]))
    figure = kv_monitor_over_time({**results, "kept": kept})
    assert [trace.name for trace in figure.data] == [name for name in (*results, "kept") for _ in range(2)]
    rate = figure.data[-1]
    assert (rate.yaxis, rate.showlegend) == ("y2", False)
    assert rate.y[-1] == pytest.approx(100 * kept.kv_monitor["hit_rate"].iloc[-1])


def test_limits_of_alerts_are_lines_and_bring_the_hit_rate_in() -> None:
    limits = ["results.alert_kv_usage=0.8", "results.alert_hit_rate=0.9", "results.alert_kv_used_bytes=1GiB"]
    result = run(Scenario.load(overrides=[*CROWD, *limits]))
    figure = kv_monitor_over_time({"paged": result})
    share = 100 * GIB / result.summary["kv_budget_bytes"]
    lines = {(shape.yref, shape.y0) for shape in figure.layout.shapes}
    assert lines == {("y", round(share, 1)), ("y", 80.0), ("y2", 90.0)}
    assert {note.text for note in figure.layout.annotations} == {
        "alert above 1.00 GiB",
        "alert above 80.0 %",
        "alert below 90.0 %",
    }


def test_latency_stands_against_the_turn_and_the_median_is_the_requests_own(results: dict[str, Result]) -> None:
    figure = latency_by_turn(results)
    median = next(t for t in figure.data if t.name == "paged")
    assert list(median.x) == [1, 2, 3]
    done = results["paged"].requests.query("status == 'completed' and turn == 2")
    tpot_ms = (done["end_ns"] - done["first_token_ns"]) / (done["output_tokens"] - 1) / 1e6
    assert median.y[2] == pytest.approx(tpot_ms.median())


def test_without_later_turns_latency_stands_against_the_context() -> None:
    result = run(Scenario.load(overrides=[*CROWD, "session.turns=1"]))
    figure = latency_by_turn({"paged": result})
    assert "context (tokens)" in figure.layout.xaxis.title.text
    assert sum(figure.data[-1].customdata) == result.summary["requests_completed"]


@given(st.data())
def test_thinning_keeps_the_ends_and_every_extreme_of_a_slice(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 200))
    time = np.cumsum(data.draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows)))
    signal = pd.Series(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)), dtype="float64")
    frame = pd.DataFrame({"time_ns": time, "signal": signal})
    columns = data.draw(st.integers(1, 20))
    drawn = thin(frame, [signal], columns)
    assert set(drawn.index) <= set(frame.index)
    assert drawn.index.is_monotonic_increasing
    assert {0, rows - 1} <= set(drawn.index)
    assert len(drawn) <= max(columns, 4 * (columns + 1))
    width = max(1, -(-(int(time[-1]) - int(time[0]) + 1) // columns))
    for _, part in frame.groupby((frame["time_ns"] - time[0]) // width):
        seen = drawn.loc[drawn.index.isin(part.index), "signal"]
        assert (seen.min(), seen.max()) == (part["signal"].min(), part["signal"].max())
