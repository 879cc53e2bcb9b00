"""Several runs that belong together: each is the run that it would be alone, and all see the same traffic."""

from __future__ import annotations

import pytest

from hbmtwin.sim import experiment
from hbmtwin.sim.experiment import compare
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import DoesNotFit, run
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError

SETS = [
    "engine.max_model_len=512",
    "engine.gpu_memory_utilization=0.5",
    "workload.request_rate=10",
    "workload.num_prompts=8",
    "workload.prompt_tokens={distribution='uniform',low=1,high=200}",
    "workload.output_tokens={distribution='uniform',low=1,high=30}",
    "session.turns=1",
    "kv_cache.tensors=merged",
]


def same(a: Result, b: Result) -> bool:
    tables = ("timeline", "requests", "checkpoints")
    return a.summary == b.summary and all(getattr(a, name).equals(getattr(b, name)) for name in tables)


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_result_is_that_of_the_run_alone_in_the_order_asked_for(jobs: int) -> None:
    order = ["paged", "caching", "doubling"]
    told: list[str] = []
    results = compare(None, order, overrides=SETS, seed=5, jobs=jobs, finished=told.append)
    assert list(results) == told == order
    for preset, result in results.items():
        assert same(result, run(Scenario.load(preset=preset, overrides=SETS, seed=5))), preset


def test_all_presets_see_the_same_traffic() -> None:
    results = compare(None, list(PRESETS), overrides=SETS, jobs=1)
    columns = ["id", "session", "turn", "arrival_ns", "prompt_tokens"]
    tables = [r.requests.sort_values("id")[columns].reset_index(drop=True) for r in results.values()]
    assert all(table.equals(tables[0]) for table in tables)
    assert len(tables[0]) == 8
    assert len({r.summary["capacity_bytes"] for r in results.values()}) == 1


@pytest.mark.parametrize(
    ("policies", "sets", "said"),
    [
        (["paged", "pagd"], SETS, "no preset is called 'pagd'"),
        (["paged", "caching"], [*SETS, "seed=x"], "seed: "),
        (["paged", "caching"], [*SETS, "kv_cache.preset=paged"], "leave it out of --set"),
    ],
)
def test_every_scenario_is_read_before_the_first_run(
    policies: list[str], sets: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(scenario: Scenario) -> Result:
        raise AssertionError("a run has begun")

    monkeypatch.setattr(experiment, "run", never)
    with pytest.raises(ScenarioError, match=said):
        compare(None, policies, overrides=sets, jobs=1)


def test_a_preset_that_does_not_fit_says_so_from_its_own_process() -> None:
    with pytest.raises(DoesNotFit, match="no memory is left for KV"):
        compare(None, ["paged", "caching"], overrides=["model.name=llama-2-70b"], jobs=2)
