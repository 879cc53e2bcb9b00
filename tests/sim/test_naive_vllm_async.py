"""Asynchronous scheduling over ``paged`` against a second model in vLLM's own order, in steps and in leaps.

Compared after every plan and every outcome: scheduled tokens, who runs and who waits in what order, who was preempted
and rejected, who ended, tokens, the block ids of everybody, and the free queue. Most answers end before ``max_tokens``.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import Release
from hbmtwin.sim.scheduler import Plan
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler
from hbmtwin.validation.vllm.planted_async import PLANTED_AHEAD

from .naive_vllm import Rules, Told
from .naive_vllm_async import NaiveAsyncVllm
from .test_naive_vllm import RULES, Comparison

STEPS = 1200
"""Of each of the 36: 43,200 in all."""


class Ahead(Comparison):
    """Both servers with a batch that is computed and, behind it, one that is planned."""

    ours: AsyncVllmScheduler
    naive: NaiveAsyncVllm

    def __init__(self, rules: Rules, seed: int, scheduler: type[AsyncVllmScheduler] = AsyncVllmScheduler) -> None:
        super().__init__(rules, seed, scheduler, NaiveAsyncVllm)
        self.now = 0
        """When the step that is computed began, an even number; at odd ones requests come within it."""
        self.under_way = Plan([])

    def run(self, steps: int) -> Counter[str]:
        while self.counts["steps"] < steps:
            self.go()
        self.kv.check()
        return self.counts

    def arrive(self, now: int) -> None:
        while len(self.naive.queue) < 5 and self.draw.random() < 0.2:
            self.add(now)

    def go(self) -> None:
        """One step, or the steps of a leap, and the plan behind them."""
        plan = self.under_way
        if not self.naive.batches:
            self.arrive(self.now)
            plan = self.ours.schedule(self.kv)
            self.compare_plans(plan, self.naive.plan())
            if not plan.everyone():
                return
        k = 1
        if self.draw.random() < 0.5 and (steady := self.ours.steady_steps(plan)):
            k += self.draw.randint(0, self.kv.horizon(plan.decodes, steady))
        self.kv.advance(plan.decodes, k - 1)
        scheduled = [(s.id, new) for s, new in plan.everyone()]
        for _ in range(k - 1):
            told = self.naive.plan()
            assert (told.scheduled, told.preempted, told.rejected) == (scheduled, [], [])
            assert self.naive.outcome() == []
        told = self.naive.plan()
        self.arrive(self.now + 1)
        following = self.ours.schedule_ahead(plan, k, self.kv, self.now)
        self.compare_plans(following, told)
        finished = self.ours.commit(plan, k)
        for f in finished:
            self.kv.release(f.sequence, Release.FINISH)
        assert [f.sequence.id for f in finished] == self.naive.outcome()
        self.compare_states()
        for u in self.ours.unfinished():
            assert u.sequence.num_tokens == self.naive.asked[u.sequence.id].total
        self.now += 2
        self.arrive(self.now)
        self.under_way = following
        self.counts["steps"] += k
        self.counts["leaps"] += k > 1
        self.counts["ended"] += len(finished)
        self.counts["ended while waiting"] += sum(f.sequence in following.preempted for f in finished)
        self.counts["discarded"] += len(following.discarded)

    def compare_plans(self, ours: Plan, told: Told) -> None:
        self.kv.end_step()
        assert [(s.id, new) for s, new in ours.everyone()] == told.scheduled
        assert [s.id for s in ours.preempted] == told.preempted
        assert [r.id for r, _ in ours.rejected] == told.rejected
        self.compare_states()
        self.counts["preempted"] += len(told.preempted)
        self.counts["hits"] = self.naive.hits

    def compare_states(self) -> None:
        naive, ours = self.naive, self.ours
        there = [u.sequence for u in ours.unfinished()]
        running, waiting = there[: ours.num_running], [s.id for s in there[ours.num_running :]]
        assert [s.id for s in running] == naive.running
        assert sorted(waiting) == sorted(naive.queue)
        if not self.rules.by_priority:  # else who came within the step is put in its place with the next plan
            assert waiting == naive.queue
        assert [list(self.kv.block_ids(s)) for s in running] == [naive.tables[id] for id in naive.running]
        assert list(self.kv.free_queue()) == naive.free
        assert ours.running_tokens == sum(naive.asked[id].computed for id in naive.running)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_every_plan_and_outcome_is_that_of_the_second_model(rules: Rules) -> None:
    counts = Ahead(rules, seed=7).run(STEPS)
    assert counts["preempted"] >= 15
    assert counts["leaps"] >= 10
    assert counts["discarded"] >= 20
    assert (counts["hits"] >= 50) == rules.caching


def test_who_gave_way_may_have_had_its_last_token() -> None:
    assert Ahead(RULES["few tokens a step, priority, cache"], seed=7).run(3 * STEPS)["ended while waiting"] >= 3


# Planted bugs


class SeesEverybody(AsyncVllmScheduler):
    """Plans with those that come while the step before is computed."""

    def schedule_ahead(self, p: Plan, k: int, kv: KVPolicy, now_ns: int) -> Plan:
        return super().schedule_ahead(p, k, kv, now_ns + 1)


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


class LeapsWithTheDiscarded(AsyncVllmScheduler):
    """Computes for those that have ended as long as it leaps."""

    def steady_steps(self, p: Plan) -> int:
        discarded, p.discarded = p.discarded, ()
        p.decoding, kept = [s for s in p.decoding if s not in discarded], p.decoding
        p.scheduled, scheduled = [(s, new) for s, new in p.scheduled if s not in discarded], p.scheduled
        steady = super().steady_steps(p)
        p.discarded, p.decoding, p.scheduled = discarded, kept, scheduled
        return steady


LEAPS = (SeesEverybody, LeapsPastWhoCame, LeapsPastWhoEnded, LeapsWithTheDiscarded)


SHOWN_BY = ("plain, fcfs, cache", "plain, priority, cache", "many tokens a step, two run, fcfs, no cache")


ONE_GROUP = [broken for name, broken in PLANTED_AHEAD.items() if name != "gives-back-at-once"]


@pytest.mark.parametrize("broken", [*ONE_GROUP, *LEAPS])
def test_a_planted_bug_is_noticed(broken: type[AsyncVllmScheduler]) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        sum((Ahead(RULES[name], seed=7, scheduler=broken).run(STEPS) for name in SHOWN_BY), Counter())
