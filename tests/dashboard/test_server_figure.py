"""The figure of the server: counts of the timeline as they are, and queue times by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from hbmtwin.api import Result, Scenario, run
from hbmtwin.dashboard.palette import policy_colours
from hbmtwin.dashboard.server_figure import queue_bands, server_over_time

CROWD = (
    "workload.num_prompts=60",
    "workload.request_rate=8",
    "session.turns=1",
    "workload.output_tokens=100",
    "workload.prompt_tokens=200",
)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    few = [*CROWD, "kv_cache.options={num_blocks=24}", "engine.max_model_len=1024"]
    return {
        "paged": run(Scenario.load(overrides=[*CROWD, "workload.request_rate=1"])),
        "few": run(Scenario.load(overrides=few)),
    }


def test_queue_time_by_hand() -> None:
    """Four slices of 2.5 s: two requests in the first, none in the second, one in the third, two in the last."""
    seconds = [(0, 1), (2, 5), (6, 6), (9, 10), (10, 14), (3, -1)]
    frame = pd.DataFrame(seconds, columns=["arrival_ns", "scheduled_ns"]) * 10**9
    bands = queue_bands(frame, slices=4)
    assert list(bands["time_s"]) == pytest.approx([1, 6, 9.5])
    assert list(bands["count"]) == [2, 1, 2]
    assert list(bands["p50"]) == pytest.approx([2, 0, 2.5])
    assert list(bands["p90"]) == pytest.approx([2.8, 0, 3.7])


def test_panels_are_the_counts_of_the_timeline(results: dict[str, Result]) -> None:
    figure = server_over_time(results)
    assert results["few"].summary["preemptions"] > 0
    axes = sorted({trace.yaxis or "y" for trace in figure.data})
    assert axes == ["y", "y2", "y3", "y4"]
    for axis, column in zip(axes[:3], ("running", "waiting", "preemptions"), strict=True):
        for trace in [t for t in figure.data if (t.yaxis or "y") == axis]:
            line = results[trace.name].timeline
            assert max(trace.y) == line[column].max()
            assert trace.y[-1] == line[column].iloc[-1]
            assert trace.line.color == policy_colours(results)[trace.name]


def test_a_panel_of_preemptions_only_where_there_were_any(results: dict[str, Result]) -> None:
    figure = server_over_time({"paged": results["paged"]})
    assert {trace.yaxis or "y" for trace in figure.data} == {"y", "y2", "y3"}


def test_each_run_stands_in_the_legend_once(results: dict[str, Result]) -> None:
    assert [t.name for t in server_over_time(results).data if t.showlegend] == ["paged", "few"]


def test_nothing_scheduled_is_an_empty_panel() -> None:
    rejected = [*CROWD, "engine.max_model_len=64", "workload.prompt_tokens=100"]
    figure = server_over_time({"none": run(Scenario.load(overrides=rejected))})
    assert all(len(trace.x) == 0 for trace in figure.data if trace.yaxis == "y3")
