"""The scheduler ``vllm`` over ``paged`` against a second model, step by step, in steps and in leaps.

Compared after every step: scheduled tokens, who runs and who waits in what order, who was preempted and rejected, the
counts and block ids of everybody, and the free queue. Pools are small, prompts of whole blocks come again and longer.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, Release
from hbmtwin.sim.scheduler import Entry, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.vllm import VllmScheduler, _take_back
from hbmtwin.workloads.records import Request, Span, output_stream

from .naive_vllm import Asked, NaiveVllm, Rules

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


class Comparison:
    """Both servers, and the traffic that they get."""

    def __init__(
        self,
        rules: Rules,
        seed: int,
        scheduler: type[VllmScheduler] = VllmScheduler,
        naive: type[NaiveVllm] = NaiveVllm,
    ) -> None:
        self.rules, self.draw = rules, random.Random(seed)
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        config = PagedConfig(
            num_blocks=rules.num_blocks,
            block_size=rules.block_size,
            max_model_len=rules.longest,
            watermark=rules.watermark,
            enable_prefix_caching=rules.caching,
        )
        self.kv = PagedPolicy(TINY, arena, config)
        self.ours = scheduler(
            SchedulerConfig(
                max_model_len=rules.longest,
                max_num_seqs=rules.seqs,
                max_num_batched_tokens=rules.budget,
                enable_chunked_prefill=rules.chunked,
                long_prefill_token_threshold=rules.threshold,
                scheduling_policy="priority" if rules.by_priority else "fcfs",
            )
        )
        self.naive = naive(rules)
        self.prompts: list[tuple[tuple[Span, ...], int]] = []
        self.next_id = 0
        self.counts: Counter[str] = Counter()

    def prompt(self) -> tuple[tuple[Span, ...], int]:
        """Spans and length: new, or one of the last ones again, or extended; often of whole blocks."""
        draw, size, most = self.draw, self.rules.block_size, self.rules.longest - 1
        kind = draw.choice(("new", "repeat", "extend"))
        if kind == "new" or not self.prompts:
            length = min(
                most, draw.choice((size * draw.randint(1, 4), draw.randint(1, most // 2), draw.randint(1, most)))
            )
            return ((f"user {self.next_id}", 0, length),), length
        spans, length = draw.choice(self.prompts[-6:])
        more = min(draw.choice((1, size, 2 * size)), most - length)
        if kind == "repeat" or more < 1:
            return spans, length
        return (*spans, (f"more {draw.randint(0, 1)}", 0, more)), length + more

    def add(self, now: int) -> None:
        spans, length = self.prompt()
        self.prompts.append((spans, length))
        id, self.next_id = self.next_id, self.next_id + 1
        output = self.draw.choice((1, 5, 20, self.rules.longest))
        output = min(output, self.rules.longest - length)
        priority = self.draw.choice((0, 0, 1, 5))
        told = self.draw.randint(output, self.rules.longest - length)
        self.ours.add(Request(id, id, 0, now, length, output, told, spans, priority=priority), now)
        stream = (output_stream(id, 0), 0, output)
        tokens = [(str(name), start + i) for name, start, count in (*spans, stream) for i in range(count)]
        self.naive.add(Asked(id, tokens, length, priority, now, told))

    def run(self, steps: int) -> Counter[str]:
        now = 0
        while self.counts["steps"] < steps:
            while len(self.naive.queue) < 5 and self.draw.random() < 0.3:
                self.add(now)
            now += self.draw.randint(0, 1)
            self.go()
        self.kv.check()
        return self.counts

    def go(self) -> None:
        """One step, or the steps of a leap."""
        plan = self.ours.schedule(self.kv)
        self.kv.end_step()
        k = 1
        if self.draw.random() < 0.5 and (steady := self.ours.steady_steps(plan)):
            k += self.draw.randint(0, self.kv.horizon(plan.decodes, steady))
        scheduled = [(s.id, new) for s, new in plan.everyone()]
        assert list(plan.decodes) == [s for s, new in plan.everyone() if s.num_tokens - s.num_computed_tokens == 1]
        self.kv.advance(plan.decodes, k - 1)
        for f in self.ours.commit(plan, k):
            self.kv.release(f.sequence, Release.FINISH)
        for step in range(k):
            told = self.naive.step()
            assert told.scheduled == scheduled
            assert told.preempted == ([] if step else [s.id for s in plan.preempted])
            assert told.rejected == ([] if step else [r.id for r, _ in plan.rejected])
        self.compare()
        self.counts["steps"] += k
        self.counts["leaps"] += k > 1
        self.counts["preempted"] += len(plan.preempted)
        self.counts["chunks"] += sum(new > 1 for s, new in plan.everyone() if s.num_computed_tokens < s.num_tokens - 1)
        self.counts["hits"] = self.naive.hits

    def compare(self) -> None:
        naive, kv, sequences = self.naive, self.kv, [u.sequence for u in self.ours.unfinished()]
        assert [s.id for s in sequences] == naive.running + naive.queue
        assert self.ours.num_running == len(naive.running)
        for s in sequences:
            r = naive.asked[s.id]
            assert (s.num_tokens, s.num_computed_tokens) == (r.total, r.computed)
            assert list(kv.block_ids(s)) == naive.tables.get(s.id, [])
        assert list(kv._free) == naive.free
        assert self.ours.running_tokens == sum(naive.asked[id].computed for id in naive.running)


PLAIN = Rules(num_blocks=24, block_size=4, longest=48, seqs=8, budget=16)
SHAPES = {
    "plain": PLAIN,
    "few tokens a step": replace(PLAIN, budget=5),
    "many tokens a step, two run": replace(PLAIN, budget=64, seqs=2, num_blocks=14),
    "bounded chunks": replace(PLAIN, threshold=3),
    "bounded chunks, few tokens a step": replace(PLAIN, threshold=4, budget=10),
    "bounded chunks, watermark": replace(PLAIN, threshold=7, budget=24, watermark=0.1, num_blocks=40),
    "whole prompts": replace(PLAIN, chunked=False, budget=48),
    "whole prompts in bounded chunks": replace(PLAIN, chunked=False, budget=48, threshold=10),
    "a token a block": replace(PLAIN, block_size=1, num_blocks=90),
}
RULES = {
    f"{name}, {'priority' if by_priority else 'fcfs'}, {'cache' if caching else 'no cache'}": replace(
        shape, by_priority=by_priority, caching=caching
    )
    for name, shape in SHAPES.items()
    for by_priority in (False, True)
    for caching in (False, True)
}
STEPS = 2000
"""Of each of the 36: 72,000 in all."""


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_every_step_is_that_of_the_second_model(rules: Rules) -> None:
    counts = Comparison(rules, seed=7).run(STEPS)
    assert counts["preempted"] >= 30
    assert counts["leaps"] >= 20
    assert counts["chunks"] >= 100 or rules.budget >= rules.longest
    assert (counts["hits"] >= 100) == rules.caching


# Planted bugs


class TheFirstGivesWay(VllmScheduler):
    def _victim(self) -> int:
        return 0


class TheYoungestGivesWay(VllmScheduler):
    """By arrival alone."""

    def _victim(self) -> int:
        return max(range(len(self._running)), key=lambda place: self._running[place].request.arrival_ns)


class AdmitsAfterPreempting(VllmScheduler):
    def schedule(self, kv: KVPolicy) -> Plan:
        plan = super().schedule(kv)
        if plan.preempted:
            self._admit(plan, kv, self.config.max_num_batched_tokens - plan.tokens)
        return plan


class PreemptsToTheBack(VllmScheduler):
    def _requeue(self, entry: Entry) -> None:
        self._waiting.append(entry)


class IgnoresTheThreshold(VllmScheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, long_prefill_token_threshold=0))


class CutsBeforeTheLastToken(VllmScheduler):
    """At max_model_len - C - 2."""

    def _schedule_running(self, plan: Plan, kv: KVPolicy) -> int:
        honest = self.config
        self.config = replace(honest, max_model_len=honest.max_model_len - 1)
        budget = super()._schedule_running(plan, kv)
        self.config = honest
        return budget


class CutsWholePrompts(VllmScheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, enable_chunked_prefill=True))


class LooksPastTheHead(VllmScheduler):
    def schedule(self, kv: KVPolicy) -> Plan:
        plan = super().schedule(kv)
        if len(self._waiting) > 1 and not plan.admitted and not plan.preempted:
            self._waiting.rotate(-1)
        return plan


class LeapsOneStepTooFar(VllmScheduler):
    def steady_steps(self, p: Plan) -> int:
        honest = super().steady_steps(p)
        return honest and honest + 1


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (TheFirstGivesWay, "plain, fcfs, no cache"),
        (TheYoungestGivesWay, "plain, priority, no cache"),
        (AdmitsAfterPreempting, "plain, fcfs, cache"),
        (AdmitsAfterPreempting, "plain, priority, no cache"),
        (PreemptsToTheBack, "plain, fcfs, cache"),
        (IgnoresTheThreshold, "bounded chunks, fcfs, no cache"),
        (CutsBeforeTheLastToken, "plain, fcfs, no cache"),
        (CutsWholePrompts, "whole prompts, fcfs, no cache"),
        (LooksPastTheHead, "plain, fcfs, no cache"),
        (LeapsOneStepTooFar, "plain, fcfs, no cache"),
    ],
)
def test_a_planted_bug_is_noticed(broken: type[VllmScheduler], name: str) -> None:
    with pytest.raises((AssertionError, KeyError)):  # one that is computed and does not run: KeyError
        Comparison(RULES[name], seed=7, scheduler=broken).run(STEPS)


class Withheld(int):
    """Tokens that leave the budget as it is, whose sequence is taken out of the plan all the same."""

    def __radd__(self, budget: int) -> int:
        return budget


def test_tokens_of_a_victim_that_are_not_given_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.sim.schedulers.vllm._take_back", lambda plan, s: Withheld(_take_back(plan, s)))
    with pytest.raises(AssertionError):
        Comparison(RULES["few tokens a step, priority, no cache"], seed=7).run(STEPS)
