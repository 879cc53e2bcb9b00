"""Whether a server starts: the cures that a refusal names must do, and slips of a unit must not run for hours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hbmtwin.sim import legality
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

KEYS = {name: f"engine.{name}" for name in ("max_model_len", "gpu_memory_utilization", "tensor_parallel_size")}


@pytest.mark.parametrize("block_size", [16, 128, 100_000])
@pytest.mark.parametrize("utilization", [0.45, 0.6, 0.9])
@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("llama-2-7b", "ascend-910b4"),
        ("llama-3.1-8b", "ascend-910b4"),
        ("llama-2-70b", "ascend-910b2"),
        ("llama-2-70b", "a100-80gb"),
    ],
)
def test_every_cure_that_is_named_starts(model: str, device: str, utilization: float, block_size: int) -> None:
    settings = [
        f"model.name={model}",
        f"device.name={device}",
        f"engine.gpu_memory_utilization={utilization}",
        f"kv_cache.block_size={block_size}",
    ]
    try:
        Twin(Scenario.load(overrides=settings))
    except DoesNotFit as refusal:
        named = re.search("would start: (.*)", str(refusal))
        cures = named.group(1).split("; ") if named else []
        for cure in cures:
            name, _, value = cure.rpartition(" ")
            if name in KEYS:  # "max_num_batched_tokens X with max_num_seqs Y" names two
                Twin(Scenario.load(overrides=[*settings, f"{KEYS[name]}={value}"]))


@pytest.mark.parametrize(
    "setting",
    [
        "device.memory_bytes=1e30",
        "device.memory_bytes=100TiB",
        "device.other_tenant_bytes=100TiB",
        "workload.num_prompts=9223372036854775808",
        "workload.users=100000000",
        "workload.time_scale=inf",
    ],
)
def test_a_number_beyond_reason_is_refused_by_its_key(setting: str) -> None:
    with pytest.raises(ScenarioError, match=f"^{setting.partition('=')[0]}: input should be less than or equal to"):
        Scenario.load(overrides=[setting])


def test_a_number_or_a_table_gets_one_line() -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(overrides=['workload.prompt_tokens="long"', "session.think_time_s=-1"])
    assert str(caught.value).splitlines() == [
        "workload.prompt_tokens: write a number, or a table such as { distribution = ... }, not 'long'",
        "session.think_time_s: input should be greater than or equal to 0, not -1",
    ]


def test_a_key_of_the_file_that_gives_way_to_a_preset_is_told(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text('[kv_cache]\npreset = "caching"\ntensors = "merged"\n')
    scenario = Scenario.load(path)
    assert scenario.kv_cache.tensors == "per_layer"
    assert legality.notes(scenario) == (
        "kv_cache.tensors = 'merged' of the file gives way to the preset 'caching' ('per_layer'); "
        "use --set kv_cache.tensors=...",
    )
    assert legality.notes(Scenario.load(path, overrides=["kv_cache.tensors=merged"])) == ()
    assert legality.notes(Scenario.load(path, preset="doubling")) == ()


def test_a_scenario_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 7\n")
    assert Scenario.load(path).seed == 7
