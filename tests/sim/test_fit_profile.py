"""``fit`` on a scenario with a calibration profile: the memory that was measured counts as it does in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.profile import Coefficient, Profile
from hbmtwin.sim import catalog
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.options import FitError
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

MIB, GIB = 1 << 20, 1 << 30
DEVICE = "a100-80gb"
MEMORY = {"context_bytes": 1 * GIB, "activation_bytes": 700 * MIB, "non_torch_bytes": 300 * MIB, "graph_bytes": 5 * MIB}
STEP = Coefficient(1e6, 1e6, 1e6, 3.0, 12, "M")
KEYS: dict[str, Any] = {"model.name": "qwen2.5-7b", "device.name": DEVICE}


def scenario_file(folder: Path, memory: dict[str, int], device: str = DEVICE, **keys: Any) -> Path:
    profile = Profile(
        name="bench-7", device=device, made="m", source="s", coefficients={"step_overhead_ns": STEP}, memory=memory
    )
    (folder / "p.json").write_text(profile.to_json(), encoding="utf-8")
    scenario = Scenario.of(KEYS | {"calibration.profile": str(folder / "p.json")} | keys)
    (folder / "s.toml").write_text(scenario.to_toml(), encoding="utf-8")
    return folder / "s.toml"


@pytest.mark.parametrize(
    "memory", [MEMORY, {"context_bytes": 3 * GIB}, {"activation_bytes": 4 * GIB}, {"non_torch_bytes": 0}, {}]
)
@pytest.mark.parametrize("keys", [{}, {"engine.tensor_parallel_size": 2}, {"memory.activation_bytes": 2 * GIB}])
def test_fit_is_what_run_plans_with_and_places(memory: dict[str, int], keys: dict[str, Any], tmp_path: Path) -> None:
    file = scenario_file(tmp_path, memory, **keys)
    twin, found = Twin(Scenario.load(file)), fit(scenario=file)
    assert found.budget.lines == twin.budget.lines
    assert (found.budget.num_blocks, found.budget.kv_bytes) == (twin.budget.num_blocks, twin.budget.kv_bytes)
    assert found.question.device == twin.device


def test_its_bytes_are_told_as_its_own_and_a_scenario_key_goes_before(tmp_path: Path) -> None:
    record = fit(scenario=scenario_file(tmp_path, MEMORY)).to_dict()
    assert record["arguments"]["activation_bytes"] == {"value": 700 * MIB, "origin": "profile"}
    assert {line["item"]: line["bytes"] for line in record["breakdown"]}["activations"] == 700 * MIB
    file = scenario_file(tmp_path, MEMORY, **{"memory.activation_bytes": 2 * GIB})
    assert fit(scenario=file).to_dict()["arguments"]["activation_bytes"] == {"value": 2 * GIB, "origin": "scenario"}
    assert fit(scenario=file, activation_bytes=GIB).budget.activation_bytes == GIB


def test_it_counts_for_its_own_device_only(tmp_path: Path) -> None:
    file = scenario_file(tmp_path, MEMORY)
    other = fit(scenario=file, device="h100-80gb")
    assert other.question.device == catalog.device("h100-80gb")
    assert other.budget == fit(scenario=scenario_file(tmp_path, {}), device="h100-80gb").budget
    told = "calibration.profile bench-7 was measured on a100-80gb: none of it is used for h100-80gb"
    assert [warning.text() for warning in other.warnings][:1] == [told]


def test_the_same_device_by_any_of_its_names_keeps_it(tmp_path: Path) -> None:
    file = scenario_file(tmp_path, MEMORY)
    named = fit(scenario=file, device="A100-80GB")
    assert named.budget == fit(scenario=file).budget
    assert named.to_dict()["arguments"]["device"] == {"value": DEVICE, "origin": "given"}


def test_a_profile_of_another_device_is_refused_as_run_refuses_it(tmp_path: Path) -> None:
    file = scenario_file(tmp_path, MEMORY, device="h200")
    with pytest.raises(FitError, match=r"calibration\.profile: profile bench-7 was made on h200, not on a100-80gb"):
        fit(scenario=file)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = scenario_file(tmp_path, MEMORY)
    (tmp_path / "p.json").unlink()
    with pytest.raises(FitError, match=r"calibration\.profile: .*p\.json: cannot be read"):
        fit(scenario=file)
