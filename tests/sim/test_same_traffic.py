"""Traffic is the same whatever serves it: open arrivals, and lengths and think times in a closed loop.

Held under every preset of policies, and for every named workload: what one key says moves no other draw.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from hbmtwin.sim.catalog.workload_table import workload_presets
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import PRESETS, Scenario
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.records import Request

from .legal_scenarios import TINY

POLICIES: dict[str, dict[str, Any]] = {
    **PRESETS,
    "radix": {"kv_cache.policy": "radix", "scheduler.policy": "sglang", "kv_cache.enable_prefix_caching": True},
    "v0": {"kv_cache.policy": "paged", "kv_cache.version": "v0", "scheduler.policy": "vllm_v0"},
}
LENGTHS = {
    "workload.prompt_tokens": {"distribution": "lognormal", "mean": 30, "sigma": 0.8, "max": 60},
    "workload.output_tokens": {"distribution": "zipf", "alpha": 0.6, "max": 30},
    "workload.system_prompt_tokens": 8,
    "workload.prefix_tokens": 16,
    "workload.prefix_count": 3,
    "workload.num_prompts": 90,
    "session.turns": {"distribution": "uniform", "low": 1, "high": 3},
    "session.think_time_s": {"distribution": "lognormal", "mean": 0.2, "sigma": 1.0},
}
OPEN: dict[str, dict[str, Any]] = {
    "weibull": {"workload.request_rate": 40.0, "workload.arrival_pattern": "weibull", "workload.cv": 2.0},
    "ramp": {
        "workload.ramp_up_strategy": "exponential",
        "workload.ramp_up_start_rps": 5.0,
        "workload.ramp_up_end_rps": 500.0,
    },
    "curve": {"workload.request_rate": 40.0, "workload.rate_curve": [[0, 1], [0.5, 4], [1, 1]]},
    "clients": {"workload.clients": [{"request_rate": 30.0}, {"request_rate": 9.0, "cv": 3.0, "turns": 1}]},
    "built in": {},
}
SAID = ["session", "turn", "tenant", "prompt_tokens", "output_tokens"]


def served(keys: dict[str, Any], policy: str) -> pd.DataFrame:
    """Requests of a run in which all are served, by id."""
    base = {"model.name": str(TINY / "plain.json"), "device.name": "a100-80gb", "engine.max_model_len": 1024}
    scenario = Scenario.of(base | LENGTHS | keys | POLICIES[policy])
    table = Twin(scenario).run().requests
    assert (table["status"] == "completed").all()
    return table.sort_values("id").reset_index(drop=True)


def thought(table: pd.DataFrame) -> pd.DataFrame:
    """What was said in each turn, and the wait before it."""
    told = table.sort_values(["session", "turn"])[[*SAID, "arrival_ns", "end_ns"]].reset_index(drop=True)
    waits = told["arrival_ns"] - told["end_ns"].shift(1, fill_value=0)
    told["think_ns"] = waits.where(told["turn"] > 0, -1)
    return told


@pytest.mark.parametrize("traffic", OPEN)
def test_open_traffic_is_the_same_under_every_policy(traffic: str) -> None:
    tables = [served(OPEN[traffic], policy) for policy in POLICIES]
    firsts = [table[table["turn"] == 0][[*SAID, "id", "arrival_ns"]].reset_index(drop=True) for table in tables]
    for table, first in zip(tables, firsts, strict=True):
        pd.testing.assert_frame_equal(first, firsts[0])
        pd.testing.assert_frame_equal(table[[*SAID, "id"]], tables[0][[*SAID, "id"]])
        columns = [*SAID, "think_ns"]
        pd.testing.assert_frame_equal(thought(table)[columns], thought(tables[0])[columns])
    ends = {tuple(table["end_ns"]) for table in tables}
    assert len(ends) > 1  # or policies would not matter, and this would show nothing


def test_lengths_and_think_times_of_a_closed_loop_are_the_same_under_every_policy() -> None:
    tables = [served({"workload.users": 12}, policy) for policy in POLICIES]
    for table in tables:
        pd.testing.assert_frame_equal(table[["id", *SAID]], tables[0][["id", *SAID]])
        columns = [*SAID, "think_ns"]
        pd.testing.assert_frame_equal(thought(table)[columns], thought(tables[0])[columns])
    assert len({tuple(table["end_ns"]) for table in tables}) > 1


def test_a_limit_of_concurrency_moves_when_requests_are_sent_and_nothing_that_is_said() -> None:
    keys = OPEN["weibull"]
    free, limited = served(keys, "paged"), served(keys | {"workload.max_concurrency": 3}, "paged")
    pd.testing.assert_frame_equal(free[["id", *SAID]], limited[["id", *SAID]])
    late = (limited["arrival_ns"] - free["arrival_ns"])[free["turn"] == 0]
    assert (late.min(), late.max() > 0) == (0, True)


def opened(keys: dict[str, Any]) -> list[Request]:
    """First turns of open traffic."""
    return list(source_of(Scenario.of({"workload.num_prompts": 200, "session.turns": 1} | keys)).open())


@pytest.mark.parametrize("name", [*workload_presets(), None])
def test_other_lengths_do_not_move_arrivals_and_other_arrivals_do_not_move_lengths(name: str | None) -> None:
    preset = {"workload.preset": name}
    plain = opened(preset)
    for key in ("prompt_tokens", "first_prompt_tokens", "output_tokens", "prefix_tokens"):
        changed = opened(preset | {f"workload.{key}": {"distribution": "uniform", "low": 3, "high": 9}})
        assert [(r.id, r.session, r.arrival_ns) for r in changed] == [(r.id, r.session, r.arrival_ns) for r in plain]
        assert changed != plain or key == "prompt_tokens"  # of later turns only, where a preset says first ones
    for arrivals in OPEN.values():
        if "workload.clients" in arrivals:
            continue  # their sessions have numbers of their own
        moved = opened(preset | arrivals)
        assert [r._replace(arrival_ns=0) for r in moved] == [r._replace(arrival_ns=0) for r in plain]
