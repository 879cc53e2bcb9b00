"""The KV monitor: what counts as used, the hit rate so far, and every stay beyond a limit."""

from __future__ import annotations

import json
import math
from typing import Literal

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.sim.books import Row
from hbmtwin.sim.monitor import USED, Limit, alerts, kv_monitor
from hbmtwin.sim.recorder import COUNT_COLUMNS
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario

SECOND = 10**9


def timeline(*rows: dict[str, int]) -> pd.DataFrame:
    """Rows in which what is not given is 0."""
    names = ["time_ns", *Row._fields, *COUNT_COLUMNS]
    return pd.DataFrame([{name: row.get(name, 0) for name in names} for row in rows], dtype="int64")


def usage_of(*values: float) -> pd.DataFrame:
    """A monitor, one row a second."""
    return pd.DataFrame({"time_ns": [i * SECOND for i in range(len(values))], "usage": list(values)})


def stays(monitor: pd.DataFrame, limit: Limit) -> list[tuple[float, float | None]]:
    return [(alert["time_s"], alert["cleared_s"]) for alert in alerts(monitor, [limit])]


# -- the series ----------------------------------------------------------------------------------------------------


def test_used_is_what_sequences_hold_with_padding_and_old_copies_and_nothing_else() -> None:
    powers = {name: 2**place for place, name in enumerate(Row._fields)}
    (row,) = kv_monitor(timeline(powers), 1000).itertuples()
    names = ("kv_tokens", "kv_padding", "kv_state", "kv_parked", "kv_unfilled", "growth_copy")
    expected = sum(powers[n] for n in names)
    assert row.used_bytes == expected
    assert row.usage == expected / 1000


@pytest.mark.parametrize("left_out", USED)
def test_a_column_that_is_forgotten_would_show(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above with a planted bug."""
    monkeypatch.setattr("hbmtwin.sim.monitor.USED", tuple(name for name in USED if name != left_out))
    with pytest.raises(AssertionError):
        test_used_is_what_sequences_hold_with_padding_and_old_copies_and_nothing_else()


def test_the_hit_rate_is_that_of_all_admissions_so_far_and_nothing_before_the_first() -> None:
    found = kv_monitor(
        timeline(
            {},
            {"time_ns": 1, "queried_tokens": 200},
            {"time_ns": 2, "queried_tokens": 500, "hit_tokens": 180},
            {"time_ns": 2, "queried_tokens": 1000, "hit_tokens": 950},
        ),
        1000,
    )
    assert math.isnan(found["hit_rate"][0])
    assert list(found["hit_rate"][1:]) == [0.0, 0.36, 0.95]
    assert list(found["time_ns"]) == [0, 1, 2, 2]


def test_without_a_budget_usage_is_no_division_by_zero() -> None:
    assert list(kv_monitor(timeline({}), 0)["usage"]) == [0.0]


# -- alerts --------------------------------------------------------------------------------------------------------


def test_an_alert_begins_beyond_the_limit_and_ends_when_the_series_comes_back() -> None:
    monitor = usage_of(0.5, 0.9, 0.91, 0.97, 0.95, 0.9, 0.5, 0.99)
    assert alerts(monitor, [Limit("usage", "above", 0.9)]) == [
        {
            "time_s": 2.0,
            "metric": "usage",
            "kind": "above",
            "threshold": 0.9,
            "value": 0.91,
            "worst": 0.97,
            "cleared_s": 5.0,
        },
        {
            "time_s": 7.0,
            "metric": "usage",
            "kind": "above",
            "threshold": 0.9,
            "value": 0.99,
            "worst": 0.99,
            "cleared_s": None,
        },
    ]


def test_below_is_the_other_side_and_no_value_is_no_alert() -> None:
    monitor = usage_of(math.nan, 0.2, 0.1, 0.4, 0.3).rename(columns={"usage": "hit_rate"})
    (first, second) = alerts(monitor, [Limit("hit_rate", "below", 0.35)])
    assert (first["time_s"], first["cleared_s"], first["value"], first["worst"]) == (1.0, 3.0, 0.2, 0.1)
    assert (second["time_s"], second["cleared_s"]) == (4.0, None)


def test_both_sides_of_a_jump_at_one_moment_count() -> None:
    """A sequence ends: full before, empty after, at the same nanosecond."""
    monitor = pd.DataFrame({"time_ns": [0, SECOND, SECOND, 2 * SECOND], "usage": [0.5, 0.95, 0.1, 0.1]})
    assert stays(monitor, Limit("usage", "above", 0.9)) == [(1.0, 1.0)]


def test_alerts_of_several_limits_stand_in_order_of_time() -> None:
    monitor = usage_of(0.1, 0.8, 0.95, 0.1)
    monitor["used_bytes"] = [100, 800, 950, 100]
    found = alerts(monitor, [Limit("used_bytes", "above", 900), Limit("usage", "above", 0.7)])
    assert [(a["metric"], a["time_s"]) for a in found] == [("usage", 1.0), ("used_bytes", 2.0)]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert type(found[1]["value"]) is int


def test_without_limits_there_are_no_alerts() -> None:
    assert alerts(usage_of(0.1, 0.99), []) == []


@given(st.lists(st.sampled_from([0.1, 0.5, 0.6, math.nan]), max_size=30), st.sampled_from(["above", "below"]))
def test_each_moment_beyond_the_limit_lies_in_exactly_one_alert(
    values: list[float], kind: Literal["above", "below"]
) -> None:
    limit = Limit("usage", kind, 0.5)
    covered: list[int] = []
    for begin, cleared in stays(usage_of(*values), limit):
        covered += range(int(begin), len(values) if cleared is None else int(cleared))
    assert covered == [i for i, v in enumerate(values) if (v > 0.5 if kind == "above" else v < 0.5)]


@pytest.mark.parametrize("policy", ["paged", "radix"])
def test_usage_is_a_share_of_the_pool_that_num_blocks_asks_for(policy: str) -> None:
    """vLLM's ``num_gpu_blocks_override``: eight blocks of ten are full, whatever else the device has."""
    keys = {
        "kv_cache.policy": policy,
        "kv_cache.block_size": 16,
        "kv_cache.options": {"num_blocks": 10},
        "engine.max_model_len": 128,
        "workload.num_prompts": 1,
        "workload.request_rate": 1.0,
        "workload.prompt_tokens": 120,
        "workload.output_tokens": 8,
        "workload.system_prompt_tokens": 0,
        "session.turns": 1,
    }
    found = run(Scenario.of(keys))
    assert found.summary["kv_budget_bytes"] == 10 * found.summary["kv_block_bytes"]
    assert found.kv_monitor["usage"].max() == 0.8
