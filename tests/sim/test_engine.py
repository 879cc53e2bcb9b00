"""The engine in time: when tokens come, what an arrival cuts, what waits, who is answered, and what a death leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import BatchShape
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.engine_config import Progress
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Plan
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.workloads.records import Request, Status, user_stream

MS = 1_000_000


class TenMs:
    """10 ms a step, 1 ms a driver call, 1 ns a copied KiB."""

    basis = "for tests"

    def steps(self, b: BatchShape) -> StepTimes:
        return StepTimes(0, ticks(10 * MS))

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        return driver_calls * MS + copied_bytes // 1024


class Given:
    """A source of requests given one by one; *followers* maps the id of a request to the one that follows it."""

    def __init__(self, *requests: Request, followers: dict[int, Request] | None = None) -> None:
        self.requests = requests
        self.followers = followers or {}
        self.total_requests: int | None = len(requests) + len(self.followers)
        self.ends: list[tuple[int, int, Status]] = []

    def open(self) -> Iterator[Request]:
        return iter(self.requests)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        self.ends.append((r.id, end_ns, status))
        return self.followers.get(r.id)


def request(
    id: int,
    arrival_ms: float,
    prompt: int,
    output: int,
    *,
    session: int | None = None,
    turn: int = 0,
    more: bool = False,
) -> Request:
    session = id if session is None else session
    return Request(
        id=id,
        session=session,
        turn=turn,
        arrival_ns=int(arrival_ms * MS),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        spans=((user_stream(session, 0), 0, prompt),),
        has_next=more,
    )


def run(source: Given, *overrides: str, preset: str = "paged", cost: Any = None, **how: Any) -> Result:
    overrides = ("engine.max_model_len=2048", "engine.gpu_memory_utilization=0.6", "results.steps=true", *overrides)
    scenario = Scenario.load(preset=preset, overrides=overrides)
    return Twin(scenario, source=source, cost=cost or TenMs()).run(**how)


def rows(result: Result, *columns: str) -> list[tuple[Any, ...]]:
    return list(result.requests.sort_values("id")[list(columns)].itertuples(index=False, name=None))


def leaps(result: Result) -> list[tuple[float, float, int, list[int]]]:
    """Start and duration in ms, steps, and tokens of the first, of each event."""
    assert result.steps is not None
    return [
        (start / MS, duration / MS, repeat, list(new))
        for start, duration, repeat, new in result.steps[["start_ns", "duration_ns", "repeat", "new_tokens"]].values
    ]


# -- time ----------------------------------------------------------------------------------------------------------


def test_the_first_token_comes_with_the_prompt_and_the_rest_in_one_leap() -> None:
    result = run(Given(request(0, 0, 100, 8)))
    assert leaps(result) == [(0, 10, 1, [100]), (10, 70, 7, [1])]
    assert rows(result, "arrival_ns", "scheduled_ns", "first_token_ns", "end_ns", "output_tokens") == [
        (0, 0, 10 * MS, 80 * MS, 8)
    ]


def test_a_prompt_in_chunks_gives_its_first_token_with_the_last_chunk() -> None:
    result = run(Given(request(0, 0, 250, 2)), "scheduler.max_num_batched_tokens=100")
    assert leaps(result) == [(0, 10, 1, [100]), (10, 10, 1, [100]), (20, 10, 1, [50]), (30, 10, 1, [1])]
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns") == [(0, 30 * MS, 40 * MS)]


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize(
    ("arrival_ms", "scheduled_ms"),
    [(35, 40), (40, 40), (40.000001, 50), (30.000001, 40), (10, 10), (0, 0)],
)
def test_an_arrival_is_seen_by_the_first_step_that_starts_then_or_later(
    arrival_ms: float, scheduled_ms: int, step_mode: bool
) -> None:
    result = run(Given(request(0, 0, 10, 9), request(1, arrival_ms, 10, 2)), step_mode=step_mode)
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns")[1] == (
        scheduled_ms * MS,
        (scheduled_ms + 10) * MS,
        (scheduled_ms + 20) * MS,
    )
    assert rows(result, "end_ns")[0] == (90 * MS,)


def test_an_arrival_cuts_a_leap_at_the_smallest_number_of_steps_that_reaches_it() -> None:
    result = run(Given(request(0, 0, 10, 9), request(1, 35, 10, 2)))
    assert leaps(result) == [
        (0, 10, 1, [10]),
        (10, 30, 3, [1]),
        (40, 10, 1, [1, 10]),
        (50, 10, 1, [1, 1]),
        (60, 30, 3, [1]),
    ]


def test_the_server_sleeps_between_requests() -> None:
    result = run(Given(request(0, 0, 10, 2), request(1, 500, 10, 2)))
    assert leaps(result) == [(0, 10, 1, [10]), (10, 10, 1, [1]), (500, 10, 1, [10]), (510, 10, 1, [1])]
    idle = result.timeline[result.timeline["time_ns"].isin([20 * MS, 500 * MS])]
    assert list(idle["running"]) == [1, 0, 0]
    assert list(idle["time_ns"] // MS) == [20, 20, 500]
    assert result.summary["makespan_s"] == 0.52


def test_arrivals_of_one_instant_share_a_step() -> None:
    result = run(Given(*(request(i, 70, 10, 1) for i in range(3))))
    assert leaps(result) == [(70, 10, 1, [10, 10, 10])]


def test_a_turn_that_only_waits_for_its_predecessor_is_seen_by_the_next_step() -> None:
    """It arrives exactly at a step's end, as any other arrival of that instant would."""
    source = Given(request(0, 0, 10, 2), request(1, 0, 10, 5), followers={0: request(2, 20, 10, 1)})
    result = run(source)
    assert leaps(result)[:3] == [(0, 10, 1, [10, 10]), (10, 10, 1, [1, 1]), (20, 10, 1, [1, 10])]
    assert rows(result, "arrival_ns", "scheduled_ns")[2] == (20 * MS, 20 * MS)


def test_a_turn_that_comes_later_cuts_no_leap_before_its_time() -> None:
    source = Given(request(0, 0, 10, 2), request(1, 0, 10, 30), followers={0: request(2, 105, 10, 1)})
    assert leaps(run(source)) == [
        (0, 10, 1, [10, 10]),
        (10, 10, 1, [1, 1]),
        (20, 90, 9, [1]),
        (110, 10, 1, [1, 10]),
        (120, 180, 18, [1]),
    ]


def test_loading_the_weights_is_no_step_of_the_server() -> None:
    assert leaps(run(Given(request(0, 0, 10, 1)))) == [(0, 10, 1, [10])]


def test_driver_calls_and_copies_lengthen_their_step() -> None:
    """Exact growth of one merged buffer: two segments of 52 MiB from the driver serve it in turn."""
    result = run(Given(request(0, 0, 100, 3)), "kv_cache.tensors=merged", preset="caching")
    token_kib = 512
    assert leaps(result) == [
        (0, 11, 1, [100]),
        (11, 11 + 100 * token_kib / MS, 1, [1]),
        (22 + 100 * token_kib / MS, 10 + 101 * token_kib / MS, 1, [1]),
    ]


# -- who is answered -----------------------------------------------------------------------------------------------


def test_a_request_that_is_too_long_is_rejected_at_once() -> None:
    source = Given(request(0, 0, 10, 9), request(1, 35, 2000, 49), request(2, 500, 2000, 100))
    result = run(source)
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns", "output_tokens", "status", "reason") == [
        (0, 10 * MS, 90 * MS, 9, "completed", ""),
        (-1, -1, 40 * MS, 0, "rejected", "max_model_len"),  # answered when the step that is under way ends
        (-1, -1, 500 * MS, 0, "rejected", "max_model_len"),
    ]
    assert source.ends == [
        (1, 40 * MS, Status.REJECTED),
        (0, 90 * MS, Status.COMPLETED),
        (2, 500 * MS, Status.REJECTED),
    ]
    assert result.summary["requests_rejected"] == {"max_model_len": 2}


def test_the_turn_after_a_rejected_one_comes_all_the_same_if_its_source_says_so() -> None:
    result = run(Given(request(0, 0, 2000, 100), followers={0: request(1, 0, 10, 1, session=0, turn=1)}))
    assert rows(result, "end_ns", "status") == [(0, "rejected"), (10 * MS, "completed")]


def test_a_preempted_request_keeps_its_first_token_and_counts_its_preemptions() -> None:
    """13 blocks of 16 tokens: two prompts of 96 take 12, so the second goes when the first needs its eighth."""
    result = run(
        Given(request(0, 0, 96, 40), request(1, 0, 96, 40)),
        "kv_cache.block_size=16",
        "kv_cache.options={num_blocks=14}",
        "engine.max_model_len=160",
    )
    assert rows(result, "first_token_ns", "preemptions", "output_tokens", "status") == [
        (10 * MS, 0, 40, "completed"),
        (10 * MS, 1, 40, "completed"),
    ]
    assert result.summary["preemptions"] == 1
    assert list(result.timeline["preemptions"])[-1] == 1


def exhausted(oom: str, **how: Any) -> Result:
    return run(
        Given(request(0, 0, 96, 40), request(1, 0, 96, 40), request(2, 900, 9, 1)),
        "kv_cache.block_size=16",
        "kv_cache.options={num_blocks=14}",
        "engine.max_model_len=160",
        f"memory.oom={oom}",
        **how,
    )


def test_paged_with_reject_drops_the_one_that_cannot_go_on() -> None:
    result = exhausted("reject")
    assert rows(result, "end_ns", "output_tokens", "status", "reason") == [
        (400 * MS, 40, "completed", ""),
        (10 * MS, 1, "rejected", "out_of_memory"),
        (910 * MS, 1, "completed", ""),
    ]
    assert result.oom is None


def test_paged_with_stop_dies_with_the_record_of_the_refusal() -> None:
    result = exhausted("stop")
    assert rows(result, "end_ns", "output_tokens", "status", "reason") == [
        (10 * MS, 1, "failed", "server_died"),
        (10 * MS, 1, "failed", "server_died"),
        (-1, 0, "unfinished", "not_submitted"),
    ]
    oom = result.oom
    assert oom is not None
    block = 16 * 2**19
    assert (oom["need_bytes"], oom["largest_free_bytes"], oom["free_bytes"]) == (block, 0, 0)
    assert (oom["request"], oom["time_s"], oom["tag"]) == (1, 0.01, "kv")
    assert oom["allocator"] == "caching (not enough free blocks)"
    assert oom["owner_bytes"] == 6 * block
    assert oom["unfilled_bytes"] == block - 2**19  # of the block that request 0 was just given
    assert oom["cause"] == "shortage"  # what is rounded or free elsewhere is no help to a pool


# -- what a death leaves ---------------------------------------------------------------------------------------------


def dying(source: Given, *overrides: str) -> Result:
    """Exact growth in a KV share of about 1.1 GiB: 1,500 tokens and their copy do not fit."""
    return run(source, "kv_cache.tensors=merged", "engine.gpu_memory_utilization=0.475", *overrides, preset="caching")


def test_a_death_counts_those_inside_those_to_come_and_those_whose_turn_never_came() -> None:
    source = Given(
        request(0, 0, 10, 1),
        request(1, 0, 1500, 60, more=True),
        request(2, 12.5, 2000, 100),  # too long, and comes in the step that fails: it is not answered any more
        request(3, 5000, 10, 5),
        followers={0: request(4, 9000, 10, 1), 1: request(5, 0, 10, 1), 5: request(6, 0, 10, 1)},
    )
    result = dying(source)
    assert result.oom is not None
    status = dict(rows(result, "id", "status"))
    assert status == {
        0: "completed",
        1: "failed",
        2: "failed",
        3: "unfinished",
        4: "unfinished",
        5: "unfinished",
        6: "unfinished",
    }
    died_ns = round(result.oom["time_s"] * 1e9)
    assert list(result.timeline["time_ns"])[-1] == died_ns
    assert int(result.checkpoints["time_ns"].max()) == died_ns
    assert result.oom["request"] == 1
    assert {end for id, end in rows(result, "id", "end_ns") if status[id] == "failed"} == {died_ns}
    assert {end for id, end in rows(result, "id", "end_ns") if status[id] == "unfinished"} == {-1}


@pytest.mark.parametrize("step_mode", [False, True])
def test_every_line_of_a_trace_with_sessions_is_counted_after_a_death(tmp_path: Path, step_mode: bool) -> None:
    trace = tmp_path / "sessions.csv"
    lines = [f"{i // 3},{1500 if i == 4 else 20},{20 if i % 2 else 400},{i % 5},{i // 5}" for i in range(40)]
    trace.write_text("arrival_s,prompt_tokens,output_tokens,session,turn\n" + "\n".join(lines) + "\n")
    scenario = Scenario.load(
        preset="caching",
        overrides=[
            f"workload.trace={trace}",
            "engine.max_model_len=2048",
            "engine.gpu_memory_utilization=0.475",
            "kv_cache.tensors=merged",
        ],
    )
    result = Twin(scenario, cost=TenMs()).run(step_mode=step_mode)
    assert result.oom is not None
    assert sorted(result.requests["id"]) == list(range(40))
    s = result.summary
    assert s["requests_total"] == 40 == s["requests_completed"] + s["requests_failed"] + s["requests_unfinished"]


def test_a_failed_step_costs_its_memory_work_only() -> None:
    result = dying(Given(request(0, 0, 1500, 60)))
    assert result.steps is not None
    assert result.oom is not None
    last = result.steps.iloc[-1]
    assert result.oom["time_s"] * 1e9 - (last["start_ns"] + last["duration_ns"]) < 5 * MS


# -- parking -------------------------------------------------------------------------------------------------------


def parked_after(source: Given, *overrides: str) -> list[int]:
    result = run(source, "session.between_turns=keep", "kv_cache.tensors=merged", *overrides, preset="caching")
    return [int(parked) for parked in result.timeline["parked"]]


def test_history_waits_for_a_turn_that_follows() -> None:
    follower = request(1, 300, 12, 1, session=0, turn=1)
    parked = parked_after(Given(request(0, 0, 10, 2, more=True), followers={0: follower}))
    assert max(parked) == 1
    assert parked[-1] == 0


def test_history_waits_for_a_turn_that_only_the_trace_knows_of() -> None:
    parked = parked_after(Given(request(0, 0, 10, 2, more=True), request(1, 300, 12, 1, session=0, turn=1)))
    assert max(parked) == 1
    assert parked[-1] == 0


def test_nothing_waits_if_the_next_request_opens_another_session() -> None:
    other = request(1, 300, 12, 1, session=7)
    assert max(parked_after(Given(request(0, 0, 10, 2, more=True), followers={0: other}))) == 0


def test_nothing_waits_where_histories_are_dropped() -> None:
    source = Given(request(0, 0, 10, 2, more=True), followers={0: request(1, 300, 12, 1, session=0, turn=1)})
    assert max(parked_after(source, "session.between_turns=drop")) == 0


def test_history_goes_when_its_next_turn_is_rejected() -> None:
    source = Given(
        request(0, 0, 10, 2, more=True),
        request(2, 900, 10, 1),
        followers={0: request(1, 300, 2000, 100, session=0, turn=1)},
    )
    parked = parked_after(source)
    assert max(parked) == 1
    assert parked[-1] == 0


# -- the rest ------------------------------------------------------------------------------------------------------


def test_progress_is_told_now_and_then() -> None:
    told: list[Progress] = []
    result = run(Given(*(request(i, 100 * i, 10, 2) for i in range(300))), progress=told.append)
    assert result.summary["requests_completed"] == 300
    assert [(p.completed, p.total) for p in told] == [(128, 300), (256, 300)]
    assert told[0].simulated_s == 12.72


def test_a_scheduler_that_plans_nothing_is_a_deadlock_not_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.sim.schedulers.vllm.VllmScheduler._admit", lambda *_: None)
    result = run(Given(request(0, 0, 10, 2), request(1, 70, 10, 2)))
    assert rows(result, "id", "status", "reason", "end_ns") == [
        (0, "failed", "deadlock", 70 * MS),
        (1, "failed", "deadlock", 70 * MS),
    ]
    pool_bytes = result.timeline["kv_pool_free"].iloc[0]
    assert result.summary["standstill"] == {
        "kind": "deadlock",
        "time_s": 0.07,
        "since_s": 0.07,
        "preemptions": 0,
        "num_requests": 2,
        "requests": [0, 1],
        "tokens": 24,
        "kv_bytes": 24 * 512 * 1024,
        "kv_pool_bytes": pool_bytes,
    }


def test_a_scheduler_may_wait_for_the_next_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that serves nobody alone: a batch of two begins when the second has come."""
    admit = VllmScheduler._admit

    def in_pairs(self: VllmScheduler, plan: Plan, kv: KVPolicy, budget: int) -> None:
        if self.num_waiting + self.num_running >= 2:
            admit(self, plan, kv, budget)

    monkeypatch.setattr(VllmScheduler, "_admit", in_pairs)
    result = run(Given(request(0, 0, 10, 2), request(1, 70, 10, 2)))
    assert rows(result, "status", "scheduled_ns", "end_ns") == [("completed", 70 * MS, 90 * MS)] * 2
    assert result.summary["standstill"] is None
