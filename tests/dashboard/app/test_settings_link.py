"""A scenario as the settings in which it differs: what was said comes back, whatever it was."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hbmtwin.dashboard.app.settings_link import command, settings_of
from hbmtwin.sim.catalog import workload_presets
from hbmtwin.sim.scenario import PRESETS, Scenario

from ...sim.legal_scenarios import numbered


@pytest.mark.parametrize("seed", range(120))
def test_any_legal_scenario_comes_back_from_its_settings(seed: int) -> None:
    scenario = Scenario.of(numbered(seed))
    assert Scenario.load(overrides=settings_of(scenario)).model_dump() == scenario.model_dump()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_kv_preset_is_told_by_its_name_alone(preset: str) -> None:
    told = () if preset == "paged" else (f"kv_cache.preset={preset}",)
    assert settings_of(Scenario.load(preset=preset)) == told


@pytest.mark.parametrize("preset", workload_presets())
def test_traffic_by_name_is_told_by_its_name_alone(preset: str) -> None:
    scenario = Scenario.load(overrides=[f"workload.preset={preset}"])
    assert settings_of(scenario) == (f"workload.preset={preset}",)
    assert Scenario.load(overrides=settings_of(scenario)).model_dump() == scenario.model_dump()


def test_a_policy_of_its_own_keys_is_not_taken_for_a_preset() -> None:
    scenario = Scenario.load(overrides=["kv_cache.policy=paged"])
    assert scenario.kv_cache.preset is None
    assert settings_of(scenario) == ("kv_cache.policy=paged",)
    assert Scenario.load(overrides=settings_of(scenario)).kv_cache.preset is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workload.trace", "true"),
        ("workload.trace", "1e5"),
        ("workload.trace", 'it\'s a "file" # of mine.csv'),
        ("workload.trace", " spaces "),
        ("model.name", "[models]"),
    ],
)
def test_a_name_that_reads_as_something_else_is_quoted(key: str, value: str, tmp_path: Path) -> None:
    scenario = Scenario.of({key: value} | {"workload.num_prompts": 3})
    back = Scenario.load(overrides=settings_of(scenario))
    name = getattr(getattr(back, key.partition(".")[0]), key.partition(".")[2])
    assert Path(name).name == value or name == value


def test_the_command_line_survives_a_shell() -> None:
    settings = settings_of(
        Scenario.load(overrides=["workload.prompt_tokens={distribution='lognormal', mean=9.0, sigma=1.0}"])
    )
    words = shlex.split(command("run", settings))
    assert words[:3] == ["hbmtwin", "run", "--set"]
    assert Scenario.load(overrides=words[3::2]).workload.prompt_tokens == {
        "distribution": "lognormal",
        "mean": 9.0,
        "sigma": 1.0,
    }
