"""A leap of many steps must leave exactly the rows that single steps leave, under every preset and any pressure."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario


def scenarios(preset: str) -> st.SearchStrategy[Scenario]:
    """Small traffic on a device whose KV share runs from one longest request to plenty."""

    def build(
        seed: int,
        utilization: int,
        rate: float,
        prompts: int,
        outputs: int,
        turns: int,
        seqs: int,
        batched: int,
        interval_ms: int,
        keep: bool,
        oom: str,
        chunked: bool,
        threshold: int,
        by_priority: bool,
    ) -> Scenario:
        return Scenario.load(
            preset=preset,
            seed=seed,
            overrides=[
                "engine.max_model_len=512",
                f"engine.gpu_memory_utilization={utilization / 1000}",
                "workload.num_prompts=12",
                f"workload.request_rate={rate}",
                f'workload.prompt_tokens={{distribution="uniform",low=1,high={prompts}}}',
                f'workload.output_tokens={{distribution="uniform",low=1,high={outputs}}}',
                "workload.system_prompt_tokens=3",
                f"session.turns={turns}",
                "session.think_time_s=0.5",
                f"session.between_turns={'keep' if keep else 'drop'}",
                f"scheduler.max_num_seqs={seqs}",
                f"scheduler.max_num_batched_tokens={batched}",
                f"scheduler.enable_chunked_prefill={'true' if chunked else 'false'}",
                f"scheduler.long_prefill_token_threshold={threshold}",
                f"scheduler.scheduling_policy={'priority' if by_priority else 'fcfs'}",
                "workload.priorities=[1, 2, 3]",
                f"results.interval_s={interval_ms / 1000}",
                "kv_cache.tensors=merged",
                f"memory.oom={oom}",
            ],
        )

    return st.builds(
        build,
        seed=st.integers(0, 2**32),
        utilization=st.integers(460, 600),
        rate=st.sampled_from([0.5, 5.0, 50.0]),
        prompts=st.integers(1, 250),
        outputs=st.integers(1, 200),
        turns=st.integers(1, 3),
        seqs=st.sampled_from([1, 3, 256]),
        batched=st.sampled_from([16, 100, 2048]),
        interval_ms=st.sampled_from([1, 70, 1000, 100_000]),
        keep=st.booleans(),
        oom=st.sampled_from(["preempt", "reject", "stop"]) if preset == "paged" else st.just("stop"),
        chunked=st.sampled_from([True, True, False]),
        threshold=st.sampled_from([0, 0, 40]),
        by_priority=st.booleans(),
    )


def differences(leaps: Result, steps: Result) -> list[str]:
    """Names of the tables and the summary that differ."""
    names = [n for n in ("timeline", "requests", "checkpoints") if not getattr(leaps, n).equals(getattr(steps, n))]
    return names if leaps.summary == steps.summary else [*names, "summary"]


@pytest.mark.parametrize("preset", ["paged", "doubling", "caching", "pooled"])
def test_every_stored_row_is_equal(preset: str) -> None:
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(scenarios(preset))
    def equal(scenario: Scenario) -> None:
        assert differences(Twin(scenario).run(), Twin(scenario).run(step_mode=True)) == []

    equal()


def pressed() -> Scenario:
    """Sixteen users on a pool in which five long conversations fit."""
    return Scenario.load(
        preset="paged",
        overrides=[
            "engine.max_model_len=2048",
            "engine.gpu_memory_utilization=0.6",
            "workload.users=16",
            "workload.num_prompts=32",
            "workload.prompt_tokens=500",
            "workload.output_tokens=700",
            "session.turns=1",
            "kv_cache.block_size=16",
        ],
    )


def test_leaps_pass_block_boundaries_and_preemptions_alike() -> None:
    scenario = pressed()
    leaps, steps = Twin(scenario).run(), Twin(scenario).run(step_mode=True)
    assert leaps.summary["preemptions"] > 10
    assert differences(leaps, steps) == []


def test_a_horizon_that_promises_one_step_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PagedPolicy.horizon
    monkeypatch.setattr(PagedPolicy, "horizon", lambda self, d, limit: min(limit, honest(self, d, limit) + 1))
    with pytest.raises(ValueError, match="over the horizon"):
        Twin(pressed()).run()


def test_a_leap_that_is_not_cut_by_an_arrival_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.load(
        overrides=["workload.num_prompts=6", "workload.request_rate=2", "workload.output_tokens=200", "session.turns=1"]
    )
    steps = Twin(scenario).run(step_mode=True)
    assert differences(Twin(scenario).run(), steps) == []
    monkeypatch.setattr("simpy.Environment.peek", lambda env: float("inf"))
    assert "requests" in differences(Twin(scenario).run(), steps)
