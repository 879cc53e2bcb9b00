"""Several runs that belong together: each is the run that it would be alone, and all see the same traffic."""

from __future__ import annotations

import pytest

from hbmtwin.sim import experiment
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.experiment import compare, differences, in_processes
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run
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


def test_a_variant_is_the_scenario_with_its_settings_after_the_presets() -> None:
    told: list[str] = []
    variants = {"small": ["kv_cache.block_size=16", "engine.max_model_len=256"], "plain": []}
    results = compare(None, ["doubling"], variants=variants, overrides=SETS, seed=5, jobs=2, finished=told.append)
    assert list(results) == told == ["doubling", "small", "plain"]
    for name, settings in variants.items():
        assert same(results[name], run(Scenario.load(overrides=[*SETS, *settings], seed=5))), name


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (["kv_cache.policy=contiguous", "memory.oom=reject"], ScenarioError, "memory.oom: 'reject' is illegal"),
        (["model.name=llama-2-70b"], DoesNotFit, "no memory is left for KV"),
    ],
)
def test_a_variant_that_cannot_run_is_named_before_the_first_run(
    settings: list[str], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "in_processes", None)
    with pytest.raises(kind, match=said) as error:
        compare(None, ["paged"], variants={"fine": [], "wrong": settings}, jobs=1)
    assert error.value.__notes__ == ["variant 'wrong'"]


def test_two_runs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="there is a run called 'paged' already"):
        compare(None, ["paged"], variants={"paged": []})


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_goes_wrong_in_a_process_is_raised_here(jobs: int) -> None:
    scenarios = [Scenario(), Scenario.load(overrides=["model.name=llama-2-70b"])]
    with pytest.raises(DoesNotFit, match="no memory is left for KV"):
        in_processes(run, scenarios, jobs=jobs)
    assert in_processes(run, []) == []


# -- in what they differ ---------------------------------------------------------------------------------------------


def told(*variants: list[str]) -> dict[str, dict[str, object]]:
    return differences({str(place): Scenario.load(overrides=sets) for place, sets in enumerate(variants)})


def test_what_differs_is_told_key_by_key_in_the_order_of_the_file() -> None:
    assert told(["kv_cache.block_size=16"], ["seed=3", "kv_cache.block_size=32"]) == {
        "seed": {"0": 0, "1": 3},
        "kv_cache.block_size": {"0": 16, "1": 32},
    }
    assert told(["seed=3"], ["seed=3"]) == told([], []) == {}


def test_a_key_that_a_policy_does_not_know_has_no_value_there() -> None:
    static = ["kv_cache.policy=contiguous", "kv_cache.growth=static"]
    assert told(static, []) == {
        "memory.oom": {"0": "stop", "1": "preempt"},
        "kv_cache.policy": {"0": "contiguous", "1": "paged"},
        "kv_cache.growth": {"0": "static"},  # not the default; tensors and copy_scope are
    }


def test_settings_of_a_growth_rule_concern_it_alone() -> None:
    kv = ["kv_cache.policy=contiguous", "kv_cache.initial_tokens=512"]
    growths = ("exact", "doubling", "hybrid")
    table = told(*([*kv, f"kv_cache.growth={growth}", "kv_cache.decode_growth=doubling"] for growth in growths))
    assert table["kv_cache.growth"] == {"0": "exact", "1": "doubling", "2": "hybrid"}
    assert table["kv_cache.initial_tokens"] == {"1": 512, "2": 512}


def test_settings_of_an_allocator_and_of_static_batches_concern_them_alone() -> None:
    table = told(["kv_cache.preset=pooled", "memory.fit=worst"], ["kv_cache.preset=caching"])
    assert table == {"memory.kv_arena": {"0": "pooled", "1": "caching"}, "memory.fit": {"0": "worst"}}
    static = ["kv_cache.preset=caching", "scheduler.policy=static_batch"]
    table = told([*static, "scheduler.batching=sorted"], static, ["kv_cache.preset=caching"])
    assert table["scheduler.batching"] == {"0": "sorted", "1": "padded"}
    assert "scheduler.bucket_tokens" not in table


def test_the_presets_name_is_no_difference_but_its_keys_are() -> None:
    table = told(["kv_cache.preset=caching"], ["kv_cache.preset=pooled"])
    assert table == {"memory.kv_arena": {"0": "caching", "1": "pooled"}}
