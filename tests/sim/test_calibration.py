"""A scenario's calibration profile: whose figures a run uses, what its result says, and which steps lie outside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hbmtwin.kernels.profile import Coefficient, Profile, batch_quantities
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim import catalog
from hbmtwin.sim.calibration import ValidityWatch, shipped_profile, shipped_profiles
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

from .legal_scenarios import differences, per_step

DEVICE, SLOW = "a100-80gb", 1_000_000_000
PROFILE = Profile(
    name="bench-7",
    device=DEVICE,
    made="on a Monday",
    source="12 points",
    coefficients={"step_overhead_ns": Coefficient(SLOW, SLOW, SLOW, 3.0, 12, "M")},
    memory={"context_bytes": 1 << 30, "graph_bytes": 3 << 20},
    validity={"decode_count": (1, 3), "kv_read_tokens": (0, 1200), "prefill_tokens": (1, 300)},
    cross_validated_percent=4.5,
)
KEYS = {
    "model.name": "qwen2.5-7b",
    "device.name": DEVICE,
    "workload.users": 6,
    "workload.num_prompts": 12,
    "workload.prompt_tokens": 180,
    "workload.output_tokens": 60,
    "results.steps": True,
}


def scenario(folder: Path, profile: Profile = PROFILE, **keys: Any) -> Scenario:
    file = folder / "p.json"
    file.write_text(profile.to_json(), encoding="utf-8")
    return Scenario.of(KEYS | {"calibration.profile": str(file)} | keys)


def test_a_run_takes_the_figures_and_tells_whose_they_are(tmp_path: Path) -> None:
    twin = Twin(scenario(tmp_path))
    assert twin.device.step_overhead_ns == SLOW
    assert twin.device.layer_overhead_ns == catalog.device(DEVICE).layer_overhead_ns
    assert (twin.device.context_bytes, twin.budget.graph_bytes) == (1 << 30, 3 << 20)
    summary = twin.run().summary
    assert summary["basis"] == "calibrated on a100-80gb, profile bench-7"
    told = summary["calibration"]
    assert (told["profile"], told["device"], told["made"], told["cross_validated_percent"]) == (
        *("bench-7", DEVICE, "on a Monday", 4.5),
    )
    assert summary["makespan_s"] > told["steps"] > 100


def test_without_a_profile_nothing_is_calibrated() -> None:
    summary = Twin(Scenario.of(KEYS)).run().summary
    assert (summary["basis"], summary["calibration"]) == ("default, uncalibrated", None)


def naive(result: Result) -> tuple[int, int, dict[str, list[int]]]:
    """From the table of steps, one by one: all, outside, and by quantity how many, the lowest and the highest."""
    rows, found, outside = per_step(result.steps) or [], {}, 0
    for *_, new_tokens, contexts, _ in rows:
        decodes = [c + 1 for n, c in zip(new_tokens, contexts, strict=True) if n == 1]
        has = {
            "decode_count": len(decodes),
            "kv_read_tokens": sum(decodes),
            "prefill_tokens": sum(n for n in new_tokens if n > 1),
        }
        bad = {k: v for k, v in has.items() if v and not PROFILE.validity[k][0] <= v <= PROFILE.validity[k][1]}
        outside += bool(bad)
        for k, v in bad.items():
            old = found.get(k, [0, v, v])
            found[k] = [old[0] + 1, min(old[1], v), max(old[2], v)]
    return len(rows), outside, found


def test_steps_outside_are_counted_as_they_are_one_by_one_with_leaps_and_without(tmp_path: Path) -> None:
    s = scenario(tmp_path)
    leaps = Twin(s).run()
    assert differences(leaps, Twin(s).run(step_mode=True)) == []
    told = leaps.summary["calibration"]
    found = {k: [v["steps"], v["lowest"], v["highest"]] for k, v in told["outside"].items()}
    assert (told["steps"], told["steps_outside"], found) == naive(leaps)
    assert 0 < told["steps_outside"] < told["steps"]
    assert set(found) == {"decode_count", "kv_read_tokens", "prefill_tokens"}
    (note,) = [n for n in leaps.summary["notes"] if n.startswith("calibration.profile")]
    assert f"{told['steps_outside']:,} of {told['steps']:,} steps lie outside of what was measured" in note
    assert "decode_count 4 to 6" in note
    assert "(measured 1 to 3)" in note


def test_a_model_outside_of_what_was_measured_is_told(tmp_path: Path) -> None:
    other = replace(PROFILE, validity={"hidden_size": (512, 1024), "head_dim": (128, 128)})
    summary = Twin(scenario(tmp_path, other)).run().summary
    assert summary["calibration"]["model_outside"] == {"hidden_size": {"is": 3584, "measured": [512, 1024]}}
    (note,) = [n for n in summary["notes"] if n.startswith("calibration.profile")]
    assert "hidden_size 3584 (measured 512 to 1,024)" in note


def test_leaps_are_counted_as_their_steps_are() -> None:
    random, model = Random(3), catalog.model("qwen2.5-7b")
    for _ in range(300):
        low = random.randint(0, 60)
        spans = {"kv_read_tokens": (low, low + random.randint(0, 60)), "decode_count": (1, 4)}
        profile = replace(PROFILE, validity=spans)
        read, growth, k = random.randint(1, 120), random.choice([0, 1, 3]), random.randint(1, 40)
        batch = BatchShape((), random.randint(1, 5), read, growth)
        at_once, one_by_one = ValidityWatch(profile, model), ValidityWatch(profile, model)
        at_once.count(batch, k)
        for i in range(k):
            one_by_one.count(batch._replace(kv_read_tokens=read + growth * i), 1)
        assert batch_quantities(batch)["kv_read_tokens"] == read
        assert at_once.summary() == one_by_one.summary()


def test_another_device_and_what_cannot_be_read_are_refused_by_key(tmp_path: Path) -> None:
    def said(s: Scenario) -> str:
        with pytest.raises(ScenarioError) as caught:
            Twin(s)
        return str(caught.value)

    text = said(scenario(tmp_path, **{"device.name": "h200"}))
    assert text.startswith("calibration.profile: profile bench-7 was made on a100-80gb, not on h200")
    assert said(Scenario.of(KEYS | {"calibration.profile": "no/such.json"})).startswith(
        "calibration.profile: no/such.json: cannot be read"
    )
    (tmp_path / "bad.json").write_text('{"format": 1, "colour": 2}')
    bad = str(tmp_path / "bad.json")
    assert said(Scenario.of(KEYS | {"calibration.profile": bad})).startswith(f"calibration.profile: {bad}: name: missi")
    assert "no profile 'mine' comes along" in said(Scenario.of(KEYS | {"calibration.profile": "mine"}))


def test_a_profile_is_found_beside_its_scenario_and_saved_by_its_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('[calibration]\nprofile = "p.json"\n')
    loaded = Scenario.load(tmp_path / "s.toml")
    assert loaded.calibration.profile == str(tmp_path / "p.json")
    assert f'profile = "{tmp_path / "p.json"}"' in loaded.to_toml()
    (tmp_path / "t.toml").write_text('[calibration]\nprofile = "cpu"\n')
    assert Scenario.load(tmp_path / "t.toml").calibration.profile == "cpu"


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_profile_that_comes_along_can_be_read(name: str) -> None:
    profile = shipped_profile(name)
    assert profile.name == name
    assert json.loads(profile.to_json())["format"] == 1


def test_ranks_and_their_messages_are_held_to_what_was_measured() -> None:
    """qwen2.5-7b sends 3584 * 2 bytes a token: 7,168 of one, 28,672 of four, 43,008 of six."""
    model = catalog.model("qwen2.5-7b")
    latency = Coefficient(5000, 4000, 6000, 3.0, 12, "H")
    profile = replace(
        PROFILE,
        coefficients={"allreduce_ns.2": latency, "allreduce_ns.8": latency},
        validity={"tensor_parallel_size": (1, 8), "allreduce_bytes": (10_000, 30_000)},
    )
    watches = {ranks: ValidityWatch(profile, model, ranks) for ranks in (1, 2, 4, 16)}
    for watch in watches.values():
        watch.count(BatchShape((), 1, 50, 1), 3)
        watch.count(BatchShape((), 4, 50, 4), 5)
        watch.count(BatchShape(((5, 0),), 1, 50, 1), 1)
    assert watches[1].summary()["outside"] == {}
    assert watches[2].summary()["outside"] == {
        "allreduce_bytes": {"steps": 4, "lowest": 7168, "highest": 43008, "measured": [10_000, 30_000]}
    }
    assert watches[16].summary()["model_outside"] == {"tensor_parallel_size": {"is": 16, "measured": [1, 8]}}
    of_two = replace(profile, validity={"tensor_parallel_size": (2, 2)})  # as of an engine's log
    assert [n for n in (1, 2, 4) if ValidityWatch(of_two, model, n).summary()["model_outside"]] == [1, 4]
    said = "all-reduces were measured of 2, 8 ranks; the latency of 4 is the catalog's"
    assert [ranks for ranks, watch in watches.items() if any(said in note for note in watch.notes())] == [4]
    device = replace(profile, device=DEVICE).applied_to(catalog.device(DEVICE))
    own = catalog.device(DEVICE).allreduce_ns
    assert device.allreduce_ns == {**own, 2: 5000, 8: 5000}
    assert device.sources["allreduce_ns"].startswith("calibrated for 2, 8 ranks: profile bench-7; others: ")
