"""``workload.model`` in a scenario: a run of a learned model, its path, its seed, and what contradicts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbmtwin.sim.idle_settings import idle_reason
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads import Replay, Status, WorkloadError
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import Client, LengthWindow, Sharing, TrafficModel, Window
from hbmtwin.workloads.learned.model_file import write_model

SHARING = Sharing(
    block_size=16,
    system_prompt_tokens=32,
    follow_share=(0.8,),
    shared_part=((0.2, 0.9),),
    follow_after_s=(0.5, 4.0),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lengths = LengthWindow(0.0, Measured((0.0, 1.0), (40, 400)), (Measured((0.0, 1.0), (2, 30)),))
    client = Client(0, (Window(0.0, 2.0, "gamma", 0.5),), (lengths,), sharing=SHARING)
    model = TrafficModel("a trace", 30.0, 30.0, (client,), notes=("it is made up",))
    path = tmp_path / "model.toml"
    write_model(model, path)
    return path


def test_a_run_of_a_model_has_its_requests_and_notes(file: Path) -> None:
    (file.parent / "scenario.toml").write_text('[workload]\nmodel = "model.toml"\n')
    result = run(Scenario.load(file.parent / "scenario.toml"))
    assert result.summary["requests_total"] == result.summary["requests_completed"] == 60
    assert "workload.model: it is made up" in result.summary["notes"]


def test_seed_number_and_scale_are_the_scenario_s(file: Path) -> None:
    def times(*keys: str) -> list[int]:
        scenario = Scenario.load(overrides=[f"workload.model={file}", *keys])
        source = source_of(scenario)
        assert isinstance(source, Replay)
        return [r.arrival_ns for r in source.recorded()]

    assert times() == times("seed=0") != times("seed=1")
    assert len(times("workload.num_prompts=7")) == 7
    assert times("workload.num_prompts=7") == times()[:7]
    assert len(times("workload.rate_scale=2.5")) == 150
    assert times("workload.time_scale=2") == [2 * time_ns for time_ns in times()]


def test_a_turn_waits_for_the_one_before(file: Path) -> None:
    source = source_of(Scenario.load(overrides=[f"workload.model={file}"]))
    opened = list(source.open())
    later = 0
    ends = {r.session: 10**12 for r in opened}
    for r in opened:
        assert r.turn == 0
        following = source.next_turn(r, ends[r.session], Status.COMPLETED)
        while following is not None:
            later += 1
            assert following.session == r.session
            assert following.arrival_ns >= 10**12
            following = source.next_turn(following, following.arrival_ns, Status.COMPLETED)
    assert later > 10
    assert len(opened) + later == source.total_requests == 60


def test_what_does_not_go_with_a_model(file: Path, tmp_path: Path) -> None:
    key = f"workload.model={file}"
    for other in ("trace", "multi_turn"):
        with pytest.raises(ScenarioError, match=rf"workload.model: workload.{other} says .* give one of the two"):
            source_of(Scenario.load(overrides=[key, f"workload.{other}={file}"]))
    with pytest.raises(ScenarioError, match=r"workload.samples: sessions of .*model.toml have several turns"):
        source_of(Scenario.load(overrides=[key, "workload.samples=2"]))
    with pytest.raises(WorkloadError, match=r"workload.model: .*no.toml: no such file"):
        source_of(Scenario.load(overrides=[f"workload.model={tmp_path / 'no.toml'}"]))
    scenario = Scenario.load(overrides=[key])
    assert idle_reason(scenario, "workload.request_rate") == "is said by workload.model"
    assert idle_reason(scenario, "session.turns") == "is said by workload.model"
    assert idle_reason(scenario, "workload.trace_jitter") == "concerns a trace only"
    assert idle_reason(scenario, "workload.rate_scale") is None
    assert idle_reason(Scenario.load(), "workload.rate_scale") == "concerns a model only"
    assert idle_reason(Scenario.load(), "workload.time_scale") == "concerns a trace or a model only"
