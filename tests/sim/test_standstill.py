"""A server that gets nowhere stops with its cause; one that is slow does not, however little it gets done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import KVSequence
from hbmtwin.sim import standstill
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Plan, QueueScheduler, Unfinished
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.sim.standstill import LiveLockWatch, Standstill
from hbmtwin.workloads.records import Request

from .legal_scenarios import legal_scenarios

# -- the watch, by hand ------------------------------------------------------------------------------------------------


class Crowd:
    """As much of a scheduler as the watch looks at: sequences, the first of which run."""

    def __init__(self, running: int, *sequences: tuple[int, int, int, int]) -> None:
        self.num_running = running
        self.sequences = [
            KVSequence(id, id, 0, tokens, 999, num_computed_tokens=computed, lost_tokens=lost)
            for id, tokens, computed, lost in sequences
        ]

    def unfinished(self) -> Iterator[Unfinished]:
        for s in self.sequences:
            yield Unfinished(Request(s.id, s.id, 0, 0, 10, 10, 10, ()), s, 0)


def plan_of(**fields: Any) -> Plan:
    plan = Plan([])
    for name, value in fields.items():
        setattr(plan, name, value)
    return plan


def told(watch: Any, crowd: Crowd, now_ns: int, plan: Plan | None = None) -> Any:
    return watch.gave_way(plan_of() if plan is None else plan, 1, crowd, now_ns)


A_RUNS = Crowd(1, (1, 60, 32, 0), (2, 50, 0, 40))
B_RUNS = Crowd(1, (2, 50, 40, 40), (1, 60, 0, 32))
WAITING = (3, 70, 0, 0)
"""One that never ran."""


def test_a_state_that_comes_back_three_times_is_a_live_lock() -> None:
    watch = LiveLockWatch()
    answers = [told(watch, crowd, 10 * n) for n, crowd in enumerate([A_RUNS, B_RUNS] * 4)]
    assert answers[:6] == [None] * 6
    assert answers[6] == Standstill("live_lock", 60, 0, 7, (1, 2), 1998)


def test_those_who_never_ran_have_no_part_in_it() -> None:
    watch = LiveLockWatch()
    for n in range(3):
        came = [WAITING] * n
        assert told(watch, Crowd(1, (1, 60, 32, 0), (2, 50, 0, 40), *came), n) is None
    found = told(watch, A_RUNS, 3)
    assert found is not None
    assert found.requests == (1, 2)


def test_a_token_in_between_begins_the_count_anew() -> None:
    watch = LiveLockWatch()
    for n in range(3):
        assert told(watch, A_RUNS, n) is None
    assert told(watch, Crowd(1, (1, 61, 32, 0), (2, 50, 0, 40)), 3) is None
    for n in range(4, 7):  # 60 tokens again is no state that can follow on 61, but it is another one
        assert told(watch, A_RUNS, n) is None
    found = told(watch, A_RUNS, 7)
    assert found is not None
    assert (found.since_ns, found.preemptions) == (4, 4)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(
            scheduled=[(KVSequence(5, 5, 0, 9, 20, num_computed_tokens=8), 1)], decoding=[KVSequence(5, 5, 0, 9, 20)]
        ),
        plan_of(scheduled=[(KVSequence(5, 5, 0, 9, 20, num_computed_tokens=4), 5)]),
        plan_of(forked=[KVSequence(5, 5, 0, 9, 20)]),
    ],
    ids=["decode", "last chunk", "fork"],
)
def test_a_step_that_samples_is_progress(plan: Plan) -> None:
    watch = LiveLockWatch()
    for n in range(3):
        assert told(watch, A_RUNS, n) is None
    assert told(watch, A_RUNS, 3, plan) is None
    assert told(watch, A_RUNS, 4) is None


def test_a_chunk_that_is_not_the_last_is_none() -> None:
    watch = LiveLockWatch()
    chunk = plan_of(scheduled=[(KVSequence(5, 5, 0, 9, 20, num_computed_tokens=4), 4)])
    answers = [told(watch, A_RUNS, n, chunk) for n in range(4)]
    assert [a is None for a in answers] == [True, True, True, False]


# -- whole runs --------------------------------------------------------------------------------------------------------


class LargestGivesWay(VllmScheduler):
    """Who holds most gives way: it frees most, and undoes whoever is about to be ready."""

    def _victim(self) -> int:
        return max(range(len(self._running)), key=lambda place: self._running[place].sequence.num_computed_tokens)


def long_prompts(*overrides: str) -> Scenario:
    """Three prompts of 1,500 tokens in chunks of 128, for a pool of 2,048; any may begin whose first chunk fits."""
    return Scenario.load(
        preset="paged",
        overrides=[
            "engine.max_model_len=2048",
            "kv_cache.version=0.18",
            "kv_cache.options={num_blocks=17}",
            "kv_cache.enable_prefix_caching=false",
            "scheduler.long_prefill_token_threshold=128",
            "workload.num_prompts=3",
            "workload.request_rate=inf",
            "workload.prompt_tokens=1500",
            "workload.output_tokens=3",
            "workload.system_prompt_tokens=0",
            "session.turns=1",
            *overrides,
        ],
    )


class Endless(AssertionError):
    """More steps than a run of this size can have."""


Simulate = Callable[..., Result]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Run a scenario for at most 8,000 plans."""

    def run(scenario: Scenario, scheduler: type[VllmScheduler] | None = None, *, step_mode: bool = False) -> Result:
        twin = Twin(scenario)
        if scheduler is not None:
            assert isinstance(twin.scheduler, VllmScheduler)
            twin.scheduler = scheduler(twin.scheduler.config)
        schedule, steps = twin.scheduler.schedule, iter(range(8_000))

        def counted(kv: KVPolicy) -> Plan:
            if next(steps, None) is None:
                raise Endless
            return schedule(kv)

        monkeypatch.setattr(twin.scheduler, "schedule", counted)
        return twin.run(step_mode=step_mode)

    return run


def test_prompts_that_undo_one_another_are_a_live_lock(simulate: Simulate) -> None:
    result = simulate(long_prompts(), LargestGivesWay)
    found = result.summary["standstill"]
    assert found["kind"] == "live_lock"
    assert (found["requests"], found["num_requests"], found["tokens"]) == ([0, 1, 2], 3, 3 * 1503)
    assert (found["kv_bytes"], found["kv_pool_bytes"]) == (4509 * 512 << 10, 17 * 128 * 512 << 10)
    assert found["preemptions"] == result.summary["preemptions"] > 6
    assert found["since_s"] < found["time_s"]
    requests = result.requests
    assert set(zip(requests["status"], requests["reason"], strict=True)) == {("failed", "live_lock")}
    assert set(requests["end_ns"]) == {round(found["time_s"] * 1e9)} == {result.timeline["time_ns"].iloc[-1]}
    assert result.summary["requests_failed"] == 3
    assert result.summary["recomputed_share"] > 0.5


def test_leaps_and_steps_find_the_same_live_lock(simulate: Simulate) -> None:
    scenario = long_prompts("workload.num_prompts=5", "workload.request_rate=2", "workload.output_tokens=40")
    leaps, steps = (simulate(scenario, LargestGivesWay, step_mode=mode) for mode in (False, True))
    assert leaps.summary["standstill"] is not None
    assert leaps.summary == steps.summary
    assert leaps.requests.equals(steps.requests)
    assert leaps.timeline.equals(steps.timeline)


def test_the_rest_of_the_traffic_is_counted_with_its_reason(simulate: Simulate) -> None:
    """Twelve requests, two a second: the third to the fifth lock, and the others never come."""
    arriving = ("workload.num_prompts=12", "workload.request_rate=2")
    s = simulate(long_prompts(*arriving), LargestGivesWay).summary
    assert (s["requests_completed"], s["requests_failed"], s["requests_unfinished"]) == (2, 3, 7)
    assert s["unfinished_because"] == {"the run ended before they were sent": 7}
    assert s["standstill"]["requests"] == [2, 3, 4]
    s = simulate(long_prompts(*arriving, "session.turns=2", "session.think_time_s=1"), LargestGivesWay).summary
    assert (s["requests_completed"], s["requests_rejected"]) == (2, {"max_model_len": 2})
    assert (s["requests_failed"], s["requests_unfinished"]) == (3, 5)
    assert s["unfinished_because"] == {
        "the run ended before they were sent": 1,
        "what they were to follow was rejected, or in the server when the run ended": 4,
    }


THRASHING = ("workload.num_prompts=12", "workload.output_tokens=400", "workload.prompt_tokens=1200")


def test_a_server_that_gets_on_is_not_stopped_however_much_it_computes_again(simulate: Simulate) -> None:
    s = simulate(long_prompts(*THRASHING)).summary
    assert (s["requests_completed"], s["standstill"]) == (12, None)
    assert s["preemptions"] > 100
    assert s["recomputed_share"] > 0.5
    assert s["thrashing"]["worst_share"] > 0.5


# -- no scheduler of the package stands still --------------------------------------------------------------------------


def test_nothing_legal_stands_still() -> None:
    short = []

    @settings(max_examples=45, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(legal_scenarios())
    def ends(scenario: Scenario) -> None:
        s = Twin(scenario).run().summary
        assert s["standstill"] is None
        answered = s["requests_completed"] + sum(s["requests_rejected"].values())
        assert answered + s["requests_failed"] + s["requests_unfinished"] == s["requests_total"]
        assert sum(s["unfinished_because"].values()) == s["requests_unfinished"]
        assert s["oom"] is not None or not s["requests_failed"]
        short.append(s["preemptions"] > 0)

    ends()
    assert sum(short) >= 10


# -- planted bugs ------------------------------------------------------------------------------------------------------


def test_a_watch_that_never_fires_is_noticed(monkeypatch: pytest.MonkeyPatch, simulate: Simulate) -> None:
    monkeypatch.setattr(standstill, "RECURRENCES", 10**9)
    with pytest.raises(Endless):
        simulate(long_prompts(), LargestGivesWay)


def test_a_watch_that_fires_on_preemptions_in_a_row_is_noticed(
    monkeypatch: pytest.MonkeyPatch, simulate: Simulate
) -> None:
    """Its three mistakes: tokens sampled in the step, tokens sampled between steps, and who holds how much."""
    monkeypatch.setattr(standstill, "_samples", lambda plan: False)
    honest = LiveLockWatch.gave_way

    def blind(watch: LiveLockWatch, plan: Plan | None, count: int, crowd: QueueScheduler, now_ns: int) -> object:
        return honest(watch, plan, count, Blind(crowd), now_ns)

    monkeypatch.setattr(LiveLockWatch, "gave_way", blind)
    with pytest.raises(AssertionError):
        test_a_server_that_gets_on_is_not_stopped_however_much_it_computes_again(simulate)


class Blind(Crowd):
    """A scheduler of which only the ids are seen."""

    def __init__(self, crowd: QueueScheduler) -> None:
        super().__init__(0, *sorted((u.sequence.id, 1, 1, 1) for u in crowd.unfinished()))
