"""The figures of a summary, by hand: trapezoids, percentiles, and None where there is nothing to say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hbmtwin.sim.books import Row
from hbmtwin.sim.recorder import COUNT_COLUMNS, REQUEST_COLUMNS
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.summary import area_below, dropped, latencies, mean_of, memory_means, percentiles, request_counts

NO_VALUE = {"p50": None, "p90": None, "p99": None}


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype="float64")


# -- means over time -----------------------------------------------------------------------------------------------


def test_a_mean_over_time_is_the_area_below_the_line() -> None:
    """0 to 10 in 2 s, a drop to 4 at once, 4 for 8 s: (2 * 5 + 8 * 4) / 10."""
    assert mean_of([area_below(array(0, 2, 2, 10), array(0, 10, 4, 4))]) == pytest.approx(4.2)


def test_intervals_that_do_not_count_are_left_out() -> None:
    where = np.array([True, True, False, True, True])
    assert mean_of([area_below(array(0, 1, 2, 3, 7), array(1, 3, 99, 5, 5), where)]) == pytest.approx((2 + 4 * 5) / 5)


def test_where_no_time_passes_there_is_no_mean() -> None:
    assert mean_of([area_below(array(3), array(9))]) is None
    assert mean_of([area_below(array(3, 3), array(9, 1))]) is None
    assert mean_of([area_below(array(0, 1), array(9, 1), np.array([True, False]))]) is None


def timeline(*rows: dict[str, int]) -> pd.DataFrame:
    """Rows of a device of 1,000 bytes; what is not given is 0, and the driver has the rest."""
    names = ["time_ns", *Row._fields, *COUNT_COLUMNS]
    frame = pd.DataFrame([{name: row.get(name, 0) for name in names} for row in rows], dtype="int64")
    frame["driver_free"] = 1000 - frame[list(Row._fields)].sum(axis=1)
    return frame


def test_utilisation_and_fragmentation() -> None:
    """Two seconds in which sequences hold 200 bytes, then two without any; weights 300, tenants and static outside."""
    fixed = {"weights": 300, "tenants": 50, "static": 150}
    means = memory_means(
        timeline(
            {"time_ns": 0, "kv_tokens": 100, "kv_unfilled": 100, "external": 100, "rounding": 0, **fixed},
            {"time_ns": 2, "kv_tokens": 120, "kv_parked": 40, "kv_unfilled": 40, "external": 100, **fixed},
            {"time_ns": 2, "external": 300, **fixed},
            {"time_ns": 4, "external": 240, "rounding": 60, "running": 7, "hit_tokens": 9, **fixed},
        ),
        kv_budget_bytes=400,
    )
    assert means["kv_utilization_mean"] == pytest.approx((0.5 + 0.8) / 2)
    assert means["kv_usage_mean"] == pytest.approx((0.5 * 2 + 0 * 2) / 4)
    assert means["internal_fragmentation_mean"] == pytest.approx(((100 + 40) / 2 / 600 * 2 + 60 / 2 / 600 * 2) / 4)
    assert means["external_fragmentation_mean"] == pytest.approx((100 / 600 * 2 + 270 / 600 * 2) / 4)


def test_padding_is_held_but_no_token_and_old_copies_are_usage() -> None:
    rows = [{"time_ns": t, "kv_tokens": 60, "kv_padding": 40, "kv_unfilled": 100, "growth_copy": 50} for t in (0, 1)]
    means = memory_means(timeline(*rows), 500)
    assert means["kv_utilization_mean"] == pytest.approx(0.3)
    assert means["kv_usage_mean"] == pytest.approx(0.5)
    assert means["internal_fragmentation_mean"] == pytest.approx(100 / 250)


def test_states_are_in_use_as_a_whole() -> None:
    rows = [{"time_ns": t, "kv_tokens": 60, "kv_state": 90, "kv_unfilled": 50} for t in (0, 1)]
    means = memory_means(timeline(*rows), 500)
    assert means["kv_utilization_mean"] == pytest.approx(0.75)
    assert means["kv_usage_mean"] == pytest.approx(0.4)
    assert means["internal_fragmentation_mean"] == pytest.approx(0.25)


def test_reserved_is_what_allocators_hold_pools_and_caches_included() -> None:
    """100 of weights, 300 of a free pool, 100 of cached blocks: the hole of 50 is a tenth of 500 and more."""
    rows = [{"time_ns": t, "weights": 100, "kv_pool_free": 300, "kv_cached": 50, "external": 50} for t in (0, 1)]
    assert memory_means(timeline(*rows), 400)["external_fragmentation_mean"] == pytest.approx(0.1)
    assert memory_means(timeline(*rows), 400)["kv_utilization_mean"] is None


# -- latencies -----------------------------------------------------------------------------------------------------


def requests(*rows: tuple[int, int, int, int, int, str, str]) -> pd.DataFrame:
    """``(arrival, scheduled, first token, end)`` in seconds, output tokens, status, reason."""
    frame = pd.DataFrame(0, index=range(len(rows)), columns=list(REQUEST_COLUMNS), dtype="int64")
    for place, name in enumerate(("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")):
        frame[name] = pd.Series([row[place] * 10**9 if row[place] >= 0 else -1 for row in rows], dtype="int64")
    frame["output_tokens"] = pd.Series([row[4] for row in rows], dtype="int64")
    frame["status"] = pd.Series([row[5] for row in rows], dtype="str")
    frame["reason"] = pd.Series([row[6] for row in rows], dtype="str")
    return frame


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentiles(array(4, 1, 3, 2, 0)) == pytest.approx({"p50": 2, "p90": 3.6, "p99": 3.96})
    assert percentiles(array(7)) == {"p50": 7, "p90": 7, "p99": 7}
    assert percentiles(array()) == NO_VALUE


def test_latencies_of_completed_requests() -> None:
    found = latencies(
        requests(
            (10, 11, 13, 33, 11, "completed", ""),
            (0, 0, 5, 5, 1, "completed", ""),  # one token: no time per output token
            (0, 1, 2, 90, 9, "rejected", "out_of_memory"),
            (0, 1, 2, 90, 9, "failed", "server_died"),
            (0, -1, -1, -1, 0, "unfinished", "not_submitted"),
        )
    )
    assert found["ttft_s"]["p50"] == (3 + 5) / 2
    assert found["tpot_s"] == {"p50": 2, "p90": 2, "p99": 2}
    assert found["e2e_s"]["p50"] == (23 + 5) / 2
    assert found["queue_s"]["p50"] == 0.5


def test_one_token_each_leaves_no_time_per_output_token() -> None:
    found = latencies(requests((0, 0, 5, 5, 1, "completed", "")))
    assert found["tpot_s"] == NO_VALUE
    assert found["ttft_s"]["p99"] == 5


def test_counts_by_end_and_by_reason() -> None:
    frame = requests(
        (0, 0, 1, 1, 1, "completed", ""),
        (0, -1, -1, 1, 0, "rejected", "max_model_len"),
        (0, -1, -1, 1, 0, "rejected", "kv_capacity"),
        (0, -1, -1, 1, 0, "rejected", "max_model_len"),
        (0, 0, 1, 1, 1, "failed", "server_died"),
    )
    counts = {
        "requests_total": 5,
        "requests_completed": 1,
        "requests_rejected": {"kv_capacity": 1, "max_model_len": 2},
        "requests_failed": 1,
        "requests_unfinished": 0,
    }
    assert request_counts(frame, None) == request_counts(frame, 5) == counts
    # Four later turns of conversations that were given up have no row.
    assert request_counts(frame, 9) == counts | {"requests_total": 9, "requests_unfinished": 4}


def test_dropped_tokens_and_the_turns_that_lost_any() -> None:
    frame = requests(*[(0, 0, 1, 1, 1, "completed", "")] * 4)
    assert dropped(frame) == {"dropped_tokens": 0, "turns_with_dropped_tokens": 0}
    frame["dropped_tokens"] = [0, 900, 0, 100]
    assert dropped(frame) == {"dropped_tokens": 1000, "turns_with_dropped_tokens": 2}


def test_every_column_and_every_number_is_defined() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    series = ["used_bytes", "usage", "hit_rate", "worst", "cleared_s", "dropped_tokens", "turns_with_dropped_tokens"]
    assert {
        *Row._fields,
        *COUNT_COLUMNS,
        *REQUEST_COLUMNS,
        *series,
        *memory_means(timeline({"weights": 9}, {"time_ns": 1, "weights": 9}), 1),
    } <= found


# -- whole summaries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["caching", "paged"])
def test_a_run_in_which_nothing_completes_has_a_summary_in_plain_json(preset: str) -> None:
    scenario = Scenario.load(
        preset=preset,
        overrides=[
            "engine.max_model_len=64",
            "workload.num_prompts=3",
            "workload.prompt_tokens=100",
            "workload.request_rate=inf",
            "session.turns=1",
        ],
    )
    summary = Twin(scenario).run().summary
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["requests_rejected"] == {"max_model_len": 3}
    assert (summary["requests_completed"], summary["makespan_s"], summary["simulated_output_tokens"]) == (0, 0, 0)
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s"):
        assert summary[name] == NO_VALUE
    assert summary["kv_utilization_mean"] is None


def test_a_summary_has_what_the_command_line_promises() -> None:
    scenario = Scenario.load(overrides=["workload.num_prompts=5", "workload.output_tokens=3", "session.turns=1"])
    summary = Twin(scenario).run().summary
    promised = """
        requests_completed requests_rejected requests_failed requests_unfinished preemptions oom peak_reserved_bytes
        peak_requested_bytes kv_utilization_mean internal_fragmentation_mean external_fragmentation_mean ttft_s tpot_s
        e2e_s makespan_s simulated_output_tokens basis
    """
    assert set(promised.split()) <= set(summary)
    assert "wall_s" not in summary
    assert summary["simulated_output_tokens"] == 15
    assert summary["basis"] == "default, uncalibrated"
    assert 0 < summary["kv_utilization_mean"] < 1
    assert summary["peak_requested_bytes"] < summary["peak_reserved_bytes"] < summary["capacity_bytes"]
