"""Whole runs with static batches: when requests are answered, what the padding row says, leaps against single steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import BatchShape
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.books import BooksDoNotClose, Row
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.schedulers.static_batch import StaticBatchScheduler
from hbmtwin.workloads.records import Request, Status, user_stream

MS = 1_000_000
TOKEN_BYTES = 2**19
"""Llama-2-7B: 32 layers of K and V, 32 heads of 128, two bytes each."""
BATCHINGS = ["padded", "sorted", "buckets", "variable"]


class TenMs:
    """10 ms a step, nothing else."""

    basis = "for tests"

    def steps(self, b: BatchShape) -> StepTimes:
        return StepTimes(0, ticks(10 * MS))

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        return 0


class Given:
    """A source of requests given as (arrival in ms, prompt, output)."""

    def __init__(self, *given: tuple[int, int, int]) -> None:
        self.requests = [
            Request(id, id, 0, at * MS, prompt, output, output, ((user_stream(id, 0), 0, prompt),))
            for id, (at, prompt, output) in enumerate(given)
        ]
        self.total_requests: int | None = len(given)

    def open(self) -> Iterator[Request]:
        return iter(self.requests)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        return None


def scenario(*overrides: str, batching: str = "padded", preset: str = "doubling") -> Scenario:
    return Scenario.load(
        preset=preset,
        overrides=[
            "scheduler.policy=static_batch",
            f"scheduler.batching={batching}",
            "engine.max_model_len=1024",
            *overrides,
        ],
    )


def run(source: Given, *overrides: str, step_mode: bool = False, **how: str) -> Result:
    return Twin(scenario(*overrides, **how), source=source, cost=TenMs()).run(step_mode=step_mode)


def slots(result: Result) -> list[tuple[int, int, int]]:
    """Time in ms, tokens, and slots of padding, row by row."""
    columns = result.timeline[["time_ns", "kv_tokens", "kv_padding"]].values.tolist()
    return [(time // MS, tokens // TOKEN_BYTES, padding // TOKEN_BYTES) for time, tokens, padding in columns]


# -- time and padding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_mode", [False, True])
def test_padding_is_a_row_of_its_own_and_answers_come_when_the_batch_ends(step_mode: bool) -> None:
    """A is 200 slots shorter, and ends with its third token: three of its own after the prompt, then four pads."""
    source = Given((0, 100, 3), (0, 300, 8), (35, 50, 1))
    result = run(source, "results.interval_s=0.01", step_mode=step_mode)
    assert slots(result) == [
        (0, 0, 0),
        (10, 400, 200),
        (20, 402, 200),
        (30, 404, 200),
        (40, 406, 200),
        (50, 407, 201),
        (60, 408, 202),
        (70, 409, 203),
        (80, 410, 204),
        (80, 0, 0),
        (90, 50, 0),
        (90, 0, 0),
    ]
    requests = result.requests.sort_values("id")
    assert list(requests["scheduled_ns"] // MS) == [0, 0, 80]
    assert list(requests["first_token_ns"] // MS) == [10, 10, 90]
    assert list(requests["end_ns"] // MS) == [80, 80, 90]
    assert list(requests["output_tokens"]) == [3, 8, 1]


def test_variable_lengths_are_answered_one_by_one() -> None:
    result = run(Given((0, 100, 3), (0, 300, 8), (35, 50, 1)), batching="variable")
    assert list(result.requests.sort_values("id")["end_ns"] // MS) == [30, 80, 90]
    assert set(result.timeline["kv_padding"]) == {0}


def test_a_death_says_how_many_slots_are_padding() -> None:
    """Three buffers of 512 tokens and the first of 1024 leave no room for the second, when all of them double."""
    source = Given((0, 100, 500), (0, 500, 500), (0, 500, 500))
    result = run(source, "engine.gpu_memory_utilization=0.49", "engine.max_model_len=2048")
    assert result.oom is not None
    assert slots(result)[-1][2] == 400
    assert set(result.requests["status"]) == {"failed"}
    assert list(result.requests.sort_values("id")["output_tokens"]) == [13, 13, 13]


def test_the_same_prompts_take_less_padding_sorted_and_in_buckets() -> None:
    """Claims B5 and C7 in bytes: prompts of 50 and 500 tokens in turn, four a batch, twenty tokens of output."""
    source = [(0, prompt, 20) for prompt in [50, 500] * 8]
    peaks = {
        batching: run(Given(*source), "scheduler.max_num_seqs=4", batching=batching).timeline["kv_padding"].max()
        for batching in BATCHINGS
    }
    assert peaks == {"padded": 2 * 450 * TOKEN_BYTES, "sorted": 0, "buckets": 0, "variable": 0}


# -- leaps -----------------------------------------------------------------------------------------------------------


@st.composite
def scenarios(draw: Any, preset: str, scheduler: str) -> Scenario:
    """Small traffic on a device whose KV share runs from hardly one request to plenty."""
    batching = draw(st.sampled_from(BATCHINGS))
    keep = draw(st.booleans()) and (batching == "variable" or scheduler == "vllm")
    return Scenario.load(
        preset=preset,
        seed=draw(st.integers(0, 2**32)),
        overrides=[
            f"scheduler.policy={scheduler}",
            f"scheduler.batching={batching}",
            f"scheduler.bucket_tokens={draw(st.sampled_from([1, 40, 256]))}",
            f"scheduler.max_num_seqs={draw(st.sampled_from([1, 3, 256]))}",
            f"scheduler.max_num_batched_tokens={draw(st.sampled_from([100, 2048]))}",
            "engine.max_model_len=512",
            f"engine.gpu_memory_utilization={draw(st.sampled_from([0.46, 0.465, 0.5]))}",
            "workload.num_prompts=15",
            f"workload.request_rate={draw(st.sampled_from(['inf', 2.0, 50.0]))}",
            f'workload.prompt_tokens={{distribution="uniform",low=1,high={draw(st.sampled_from([150, 250]))}}}',
            f'workload.output_tokens={{distribution="uniform",low=1,high={draw(st.sampled_from([100, 200]))}}}',
            "workload.system_prompt_tokens=3",
            f"session.turns={draw(st.integers(1, 2))}",
            "session.think_time_s=0.5",
            f"session.between_turns={'keep' if keep else 'drop'}",
            f"results.interval_s={draw(st.sampled_from([1, 70, 1000, 100_000])) / 1000}",
            f"memory.admission={draw(st.sampled_from(['none', 'reserve']))}",
            f"memory.oom={draw(st.sampled_from(['stop', 'reject', 'preempt'] if preset == 'doubling' else ['stop']))}",
            "kv_cache.tensors=merged",
        ],
    )


def differences(leaps: Result, steps: Result) -> list[str]:
    """Names of the tables and the summary that differ."""
    names = [n for n in ("timeline", "requests", "checkpoints") if not getattr(leaps, n).equals(getattr(steps, n))]
    return names if leaps.summary == steps.summary else [*names, "summary"]


@pytest.mark.parametrize("scheduler", ["static_batch", "vllm"])
@pytest.mark.parametrize("preset", ["doubling", "caching"])
def test_every_stored_row_is_equal(preset: str, scheduler: str) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(scenarios(preset, scheduler))
    def equal(drawn: Scenario) -> None:
        leaps, steps = Twin(drawn).run(), Twin(drawn).run(step_mode=True)
        assert differences(leaps, steps) == []
        assert set(leaps.timeline[list(Row._fields)].sum(axis=1)) == {leaps.summary["capacity_bytes"]}
        seen["padded"] += int(leaps.timeline["kv_padding"].max() > 0)
        seen["pressed"] += leaps.oom is not None or "out_of_memory" in leaps.summary["requests_rejected"]

    equal()
    assert seen["pressed"]
    assert (seen["padded"] > 5) == (scheduler == "static_batch")


@pytest.mark.parametrize(
    ("scheduler", "batching"), [("vllm", "padded"), ("static_batch", "padded"), ("static_batch", "variable")]
)
@pytest.mark.parametrize("oom", ["preempt", "reject"])
def test_steps_that_failed_leave_equal_rows_and_every_request_is_answered(
    scheduler: str, batching: str, oom: str
) -> None:
    """A burst of 24 requests where buffers for some five have room."""
    pressed = scenario(
        f"scheduler.policy={scheduler}",
        f"memory.oom={oom}",
        "engine.gpu_memory_utilization=0.47",
        "engine.max_model_len=512",
        "workload.num_prompts=24",
        "workload.request_rate=inf",
        "workload.prompt_tokens={distribution='uniform',low=1,high=200}",
        "workload.output_tokens={distribution='uniform',low=1,high=300}",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
        batching=batching,
    )
    leaps, steps = Twin(pressed).run(), Twin(pressed).run(step_mode=True)
    assert differences(leaps, steps) == []
    assert leaps.oom is None
    rejected = leaps.summary["requests_rejected"].get("out_of_memory", 0)
    assert leaps.summary["requests_completed"] + rejected == 24
    assert (leaps.summary["preemptions"] > 5, rejected > 5) == (oom == "preempt", oom == "reject")


def ended_early(batching: str) -> Scenario:
    return scenario(
        "workload.num_prompts=24",
        "workload.request_rate=inf",
        "workload.prompt_tokens={distribution='uniform',low=1,high=300}",
        "workload.output_tokens={distribution='uniform',low=1,high=300}",
        "scheduler.max_num_seqs=8",
        "session.turns=1",
        "workload.system_prompt_tokens=0",
        "results.interval_s=0.05",
        batching=batching,
    )


@pytest.mark.parametrize("batching", BATCHINGS)
def test_leaps_pass_ends_within_a_batch_alike(batching: str) -> None:
    leaps, steps = Twin(ended_early(batching)).run(), Twin(ended_early(batching)).run(step_mode=True)
    assert (leaps.timeline["kv_padding"].max() > 100 * TOKEN_BYTES) == (batching != "variable")
    assert differences(leaps, steps) == []


HONEST = StaticBatchScheduler.steady_steps


def one_step_too_many(self: StaticBatchScheduler, p: Any) -> int:
    steady = HONEST(self, p)
    return steady and steady + 1


def over_the_ends_within_a_batch(self: StaticBatchScheduler, p: Any) -> int:
    ends = [e.padding + e.final_tokens - e.sequence.num_tokens - 1 for e in self._running]
    return 0 if p.admitted else max(ends)


@pytest.mark.parametrize("planted", [one_step_too_many, over_the_ends_within_a_batch])
def test_a_leap_that_reaches_too_far_is_an_error_of_the_books(monkeypatch: pytest.MonkeyPatch, planted: Any) -> None:
    monkeypatch.setattr(StaticBatchScheduler, "steady_steps", planted)
    with pytest.raises(BooksDoNotClose):
        Twin(ended_early("padded")).run()


def test_a_leap_past_the_end_of_a_variable_length_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Twin(ended_early("variable")).run(step_mode=True)
    monkeypatch.setattr(StaticBatchScheduler, "steady_steps", one_step_too_many)
    assert "requests" in differences(Twin(ended_early("variable")).run(), steps)


def test_padding_that_is_not_counted_is_an_error_of_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = property(lambda self: 0, lambda self, tokens: None)
    monkeypatch.setattr(StaticBatchScheduler, "padding_tokens", nothing, raising=False)
    with pytest.raises(BooksDoNotClose):
        Twin(ended_early("padded")).run()
