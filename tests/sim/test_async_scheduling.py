"""Steps that are planned while the one before is computed: who joins when, who is computed for nothing, and leaps.

Steps take 10 ms. That plans and block ids are vLLM's is told by ``test_naive_vllm_async`` and scripts/validate_paged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import Tag
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Plan
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.records import Request, Source, Status

from .legal_scenarios import LONGEST, differences, numbered
from .test_engine import MS, Given, TenMs, leaps, request, rows
from .test_engine import run as run_engine

ASYNC = "scheduler.async_scheduling=true"


def run(source: Given, *overrides: str, step_mode: bool = False) -> Result:
    return run_engine(source, ASYNC, *overrides, step_mode=step_mode)


def of_two(*late: Request, ends_itself: bool = False) -> Given:
    """Two requests at once, which end after 3 and 9 tokens, and others."""
    first = request(0, 0, 10, 3)
    return Given(first._replace(max_tokens=50) if ends_itself else first, request(1, 0, 10, 9), *late)


def test_alone_a_request_takes_as_long_as_without() -> None:
    result = run(Given(request(0, 0, 100, 8)))
    assert leaps(result) == [(0, 10, 1, [100]), (10, 70, 7, [1])]
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns") == [(0, 10 * MS, 80 * MS)]


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize(
    ("arrival_ms", "planned_ms"),
    [(35, 40), (40, 40), (40.000001, 50), (30.000001, 40), (10, 10)],
)
def test_who_comes_during_a_step_joins_the_one_after_the_next(
    arrival_ms: float, planned_ms: int, step_mode: bool
) -> None:
    result = run(Given(request(0, 0, 10, 9), request(1, arrival_ms, 10, 2)), step_mode=step_mode)
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns") == [
        (0, 10 * MS, 90 * MS),
        (planned_ms * MS, (planned_ms + 20) * MS, (planned_ms + 30) * MS),
    ]


def test_an_idle_server_begins_at_once() -> None:
    result = run(Given(request(0, 0, 10, 2), request(1, 25, 10, 2)))
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns")[1] == (25 * MS, 35 * MS, 45 * MS)


@pytest.mark.parametrize("step_mode", [False, True])
def test_who_ends_by_max_tokens_keeps_its_place_for_one_plan_more(step_mode: bool) -> None:
    """Request 0 ends at 30 ms; the step that begins then was planned without room for request 2."""
    result = run(of_two(request(2, 5, 10, 2)), "scheduler.max_num_seqs=2", step_mode=step_mode)
    assert rows(result, "scheduled_ns", "first_token_ns", "end_ns") == [
        (0, 10 * MS, 30 * MS),
        (0, 10 * MS, 90 * MS),
        (30 * MS, 50 * MS, 60 * MS),
    ]
    assert {(30, 1, (1,)), (40, 1, (1, 10)), (50, 1, (1, 1))} <= {
        (at, k, tuple(new)) for at, _, k, new in leaps(result)
    }


@pytest.mark.parametrize("step_mode", [False, True])
def test_an_answer_that_ends_by_itself_is_computed_once_more(step_mode: bool) -> None:
    result = run(of_two(ends_itself=True), step_mode=step_mode)
    assert rows(result, "output_tokens", "end_ns") == [(3, 30 * MS), (9, 90 * MS)]
    steps = [(start, new) for start, _, _, new in leaps(result)]
    assert (30, [1, 1]) in steps
    assert (40, [1]) in steps
    assert (20, [1, 1]) in steps or not step_mode


def test_a_server_that_computes_for_nothing_is_busy() -> None:
    ends_itself = request(0, 0, 10, 3)._replace(max_tokens=50)
    result = run(Given(ends_itself, request(1, 35, 10, 2)))
    assert leaps(result) == [(0, 10, 1, [10]), (10, 20, 2, [1]), (30, 10, 1, [1]), (40, 10, 1, [10]), (50, 10, 1, [1])]
    assert rows(result, "end_ns", "first_token_ns") == [(30 * MS, 10 * MS), (60 * MS, 50 * MS)]


def test_a_turn_that_follows_at_once_comes_as_the_next_step_begins() -> None:
    """Request 2 follows request 0, which ends at 30 ms, when a step begins: it is in the step after that one."""
    source = Given(*of_two().requests, followers={0: request(2, 0, 20, 2, session=0, turn=1)})
    assert rows(run(source), "scheduled_ns", "first_token_ns")[2] == (30 * MS, 50 * MS)


def test_who_gave_way_with_its_last_token_under_way_ends_and_computes_nothing_again() -> None:
    """Blocks of 16: five of eight are request 0's, which wants a sixth for its 81st token, planned at 10 ms, when
    request 1 has its second and last token under way; it holds the other three."""
    pool = ("kv_cache.block_size=16", 'kv_cache.options={"num_blocks" = 9}', "engine.max_model_len=128")
    result = run(Given(request(0, 0, 79, 9), request(1, 0, 47, 2)), *pool)
    assert rows(result, "preemptions", "end_ns", "output_tokens") == [(0, 90 * MS, 9), (1, 20 * MS, 2)]
    assert result.summary["recomputed_tokens"] == 0
    assert result.summary["computed_tokens"] == 79 + 8 + 47 + 1


def test_who_was_found_in_memory_is_counted_once_when_the_server_dies_in_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third step has a token of request 0 and the 16 of request 1 that the cache does not have."""
    keys = {"kv_cache.block_size": 16, "kv_cache.enable_prefix_caching": True, "engine.max_model_len": 2048}
    keys |= {"engine.gpu_memory_utilization": 0.6, "scheduler.async_scheduling": True, "kv_cache.preset": "paged"}
    twin = Twin(Scenario.of(keys), source=Given(request(0, 0, 64, 20), request(1, 5, 64, 20, session=0)), cost=TenMs())
    step, calls = twin.memory.forward.step, count(1)

    def dies(kv: KVPolicy, batch: BatchShape) -> None:
        if next(calls) == 3:
            twin.general.malloc(1 << 50, tag=Tag.ACTIVATION)
        step(kv, batch)

    monkeypatch.setattr(twin.memory.forward, "step", dies)
    result = twin.run()
    assert result.summary["oom"] is not None
    assert rows(result, "cached_tokens") == [(0,), (48,)]
    assert result.summary["computed_tokens"] == 64 + 1 + (1 + 16)


def test_windows_keep_what_two_batches_under_way_may_read() -> None:
    """In each of six groups of Gemma 3's windows a request holds ceil((511 + 2 x 2048) / 16) + 1 blocks at most."""
    keys = {"model.name": "gemma-3-1b", "device.name": "a100-80gb", "engine.max_model_len": 32768}
    plans = [ServerPlan(Scenario.of(keys | {"scheduler.async_scheduling": ahead})) for ahead in (False, True)]
    assert [plan.in_flight_tokens for plan in plans] == [2048, 4096]
    windows = [max(g.window for g in plan.pool.grouping.groups) for plan in plans if plan.pool.grouping is not None]
    assert windows == [512, 512]
    assert [plan.pool.max_num_batched_tokens for plan in plans] == [2048, 4096]
    assert plans[1].budget.request_blocks - plans[0].budget.request_blocks == 6 * 2048 // 16


# -- leaps -----------------------------------------------------------------------------------------------------------


class EndsEarly:
    """The traffic of a scenario, most of whose answers end before they have all that they may."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.total_requests = source.total_requests

    def open(self) -> Iterator[Request]:
        return map(self.early, self.source.open())

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        following = self.source.next_turn(r, end_ns, status)
        return None if following is None else self.early(following)

    def early(self, r: Request) -> Request:
        room = max(r.max_tokens, min(LONGEST - r.prompt_tokens, r.output_tokens + r.id % 3 * 40))
        return r._replace(max_tokens=room)


def early_ends(scenario: Scenario, *, step_mode: bool) -> tuple[Twin, Result]:
    twin = Twin(scenario, source=EndsEarly(source_of(scenario)))
    return twin, twin.run(step_mode=step_mode)


def planned_ahead(seed: int, kind: str = "paged") -> Scenario:
    keys = numbered(seed, kind=kind, scheduler="vllm")
    if kind != "paged":  # its windows hold twice as much of a chunk as those that the pool was made for
        keys["scheduler.max_num_batched_tokens"] = keys["scheduler.max_num_batched_tokens"] // 2 or 1
    keys |= {"engine.pipeline_parallel_size": 1, "engine.layer_partition": None, "memory.oom": "preempt"}
    if seed % 4:  # else the forward pass is run as well, and leaps are rare
        keys |= {"memory.activations": "none", "results.cache_events": False, "results.memory_trace": False}
    return Scenario.of(keys | {"scheduler.async_scheduling": True, "results.steps": True})


@settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 100_000), st.sampled_from(("paged", "paged", "windows", "states")))
def test_every_stored_row_is_equal_in_steps_and_in_leaps(seed: int, kind: str) -> None:
    scenario = planned_ahead(seed, kind)
    twin, leaping = early_ends(scenario, step_mode=False)
    assert isinstance(twin.scheduler, AsyncVllmScheduler)
    assert differences(leaping, early_ends(scenario, step_mode=True)[1]) == []


def test_leaps_are_taken_and_answers_end_early() -> None:
    leaps = saved = early = 0
    for seed in (1, 2, 3, 5, 6, 7, 9, 10, 11):
        twin, result = early_ends(planned_ahead(seed), step_mode=False)
        assert result.steps is not None
        leaps += int((result.steps["repeat"] > 1).sum())
        saved += int((result.steps["repeat"] - 1).sum())
        early += sum(r.max_tokens > r.output_tokens for r in twin.source.open())
    assert leaps >= 100
    assert saved >= 5 * leaps
    assert early >= 50


class LeapsPastWhoCame(AsyncVllmScheduler):
    """Goes on with a plan that does not know of those that came."""

    def steady_steps(self, p: Plan) -> int:
        arrived, self._arrived = self._arrived, deque()
        steady = super().steady_steps(p)
        self._arrived = arrived
        return steady


class LeapsPastWhoEnded(AsyncVllmScheduler):
    """Goes on with a plan that was made while others held their places and blocks."""

    def steady_steps(self, p: Plan) -> int:
        ending, self._ending = self._ending, []
        steady = super().steady_steps(p)
        self._ending = ending
        return steady


@pytest.mark.parametrize("broken", [LeapsPastWhoCame, LeapsPastWhoEnded])
def test_a_planted_bug_is_noticed(broken: type[AsyncVllmScheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (14, 23, 26, 75):
        scenario = planned_ahead(seed)
        steps = early_ends(scenario, step_mode=True)[1]
        with monkeypatch.context() as patch:
            patch.setattr("hbmtwin.sim.run.AsyncVllmScheduler", broken)
            if differences(early_ends(scenario, step_mode=False)[1], steps):
                return
    pytest.fail("no scenario shows it")
