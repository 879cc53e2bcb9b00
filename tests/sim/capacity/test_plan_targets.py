"""What can be planned: values as people say them, the keys that move with them, and traffic that has no such target."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.capacity.plan_targets import MOST_USERS, TARGETS, nice_values, target_of, with_keys
from hbmtwin.sim.scenario import Scenario, ScenarioError


def scenario(**keys: Any) -> Scenario:
    return Scenario.of({key.replace("__", "."): value for key, value in keys.items()})


def test_values_that_people_say() -> None:
    values = nice_values(1, 1000)
    assert values[:3] == (1.0, 1.02, 1.04)
    assert values[-3:] == (980.0, 990.0, 1000.0)
    assert all(1 < after / before <= 1.0251 for before, after in pairwise(values))
    whole = [value for value in values if value.is_integer()]
    assert whole[:100] == list(range(1, 101))
    assert whole[100:104] == [102, 104, 106, 108]


def test_each_user_sends_as_many_requests_at_every_load() -> None:
    target = target_of(scenario(workload__users=8, workload__num_prompts=60), "users")
    assert target.values[0] == 1
    assert target.values[-1] <= MOST_USERS
    assert target.values[target.start] == 8
    assert target.keys_of(16) == {"workload.users": 16, "workload.num_prompts": 120}
    assert target.keys_of(3) == {"workload.users": 3, "workload.num_prompts": 23}
    assert not target.assumed
    assert target.text(1) == "1 user"
    assert target.text(96) == "96 users"


def test_what_the_scenario_leaves_open_is_said() -> None:
    target = target_of(scenario(), None)
    assert target.name == "users"
    assert "10 requests" in target.assumed[0].text()


def test_a_rate_has_as_many_seconds_at_every_load() -> None:
    target = target_of(scenario(workload__request_rate=2.0, workload__num_prompts=400), None)
    assert target.name == "request_rate"
    assert target.values[target.start] == 2.0
    assert target.keys_of(4.0) == {"workload.request_rate": 4.0, "workload.num_prompts": 800}
    assert target.keys_of(0.01)["workload.num_prompts"] == 20


def test_a_trace_has_its_clock_made_faster(tmp_path: Path) -> None:
    target = target_of(scenario(workload__trace=str(tmp_path / "t.csv"), workload__time_scale=0.5), None)
    assert target.name == "request_rate"
    assert target.unit == "times the recorded rate"
    assert target.values[target.start] == 2.0  # as the scenario has it
    assert target.keys_of(2.0) == {"workload.time_scale": 0.5}  # of the recorded rate, not of the scenario's
    with pytest.raises(ScenarioError, match=r"workload.trace makes an open loop.*--target request_rate"):
        target_of(scenario(workload__trace=str(tmp_path / "t.csv")), "users")


def test_lengths_up_to_all_positions() -> None:
    target = target_of(scenario(model__name="llama-2-7b", engine__max_model_len=2048), "max_model_len")
    assert target.values[:3] == (128, 256, 384)
    assert target.values[-1] == 4096
    assert target.values[target.start] == 2048
    assert target.end


def test_devices_are_what_the_model_can_be_split_over() -> None:
    target = target_of(scenario(model__name="llama-2-70b", device__name="ascend-910b2"), "devices")
    assert target.values == (8, 4, 2, 1)
    assert target.smaller_is_better
    assert target.keys_of(4) == {"engine.tensor_parallel_size": 4}


def test_one_of_each_is_singular() -> None:
    two_stages = scenario(model__name="llama-2-70b", device__name="ascend-910b2", engine__pipeline_parallel_size=2)
    assert target_of(two_stages, "devices").text(1) == "1 device a stage"
    assert target_of(scenario(workload__request_rate=2.0), None).text(1.0) == "1 session a second"
    assert target_of(scenario(), "gpu_memory_utilization").text(0.9) == "0.9"


def test_shares_begin_where_the_server_starts() -> None:
    target = target_of(scenario(), "gpu_memory_utilization")
    assert target.values[0] <= 0.98
    assert target.values[-1] == 0.05
    assert all(a > b for a, b in pairwise(target.values))


@pytest.mark.parametrize(
    ("keys", "target", "told"),
    [
        ({}, "user", "did you mean 'users'"),
        ({"workload__users": 3}, "request_rate", "a closed loop, which has no rate"),
        ({"workload__request_rate": 3.0}, "users", "workload.request_rate makes an open loop"),
        ({"workload__clients": [{"request_rate": 1.0}]}, "request_rate", "rates of its own"),
    ],
)
def test_targets_that_traffic_does_not_have(keys: dict[str, Any], target: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        target_of(scenario(**keys), target)


def test_every_target_has_legal_values() -> None:
    for name in TARGETS:
        made = scenario(workload__request_rate=1.0) if name == "request_rate" else scenario()
        target = target_of(made, name)
        at = [with_keys(made, target.keys_of(value)) for value in (target.values[0], target.values[-1])]
        assert at[0] != at[1]


def test_a_changed_policy_has_no_presets_name() -> None:
    paged = Scenario.load(preset="paged")
    assert with_keys(paged, {"workload.users": 3}).kv_cache.preset == "paged"
    assert with_keys(paged, {"kv_cache.block_size": 16}).kv_cache.preset is None
    with pytest.raises(ScenarioError, match=r"workload\.users"):
        with_keys(paged, {"workload.users": 0})
