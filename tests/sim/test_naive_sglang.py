"""The scheduler ``sglang`` over ``radix`` against a second model of both, step by step, in steps and in leaps.

Compared after every step: scheduled tokens, who runs and who waits in what order, who was retracted and rejected, the
counts and pages of everybody, the free list, and the ratio.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.records import KVLayout, KVSequence, Release
from hbmtwin.sim.scheduler import Plan, SchedulerConfig
from hbmtwin.sim.schedulers.sglang import SglangScheduler
from hbmtwin.workloads.records import Request, Span, output_stream

from ..allocators.naive_radix import NaivePool
from .naive_sglang import Asked, NaiveSglang

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


@dataclass(frozen=True)
class Rules:
    page: int = 4
    pages: int = 40
    longest: int = 64
    seqs: int = 8
    chunk: int = 32
    tree: bool = True
    conservativeness: float = 0.1
    """Little: with more, hardly anybody is retracted."""


class Comparison:
    """Both servers, and the traffic that they get."""

    def __init__(self, rules: Rules, seed: int, scheduler: type[SglangScheduler] = SglangScheduler) -> None:
        self.rules, self.draw = rules, random.Random(seed)
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        config = RadixConfig(
            num_blocks=rules.pages,
            max_model_len=rules.longest,
            block_size=rules.page,
            enable_prefix_caching=rules.tree,
        )
        self.kv = RadixPolicy(TINY, arena, config)
        self.ours = scheduler(
            SchedulerConfig(
                max_model_len=rules.longest,
                max_num_seqs=rules.seqs,
                max_num_batched_tokens=rules.chunk,
                schedule_conservativeness=rules.conservativeness,
            )
        )
        self.naive = NaiveSglang(NaivePool(config), rules.seqs, rules.chunk, rules.conservativeness)
        self.prompts: list[tuple[tuple[Span, ...], int]] = []
        self.next_id = 0
        self.counts: Counter[str] = Counter()

    def prompt(self) -> tuple[tuple[Span, ...], int]:
        """New, or one of the last ones again, or extended; often of whole pages."""
        draw, page, most = self.draw, self.rules.page, self.rules.longest - 1
        kind = draw.choice(("new", "repeat", "extend"))
        if kind == "new" or not self.prompts:
            length = min(most, draw.choice((page * draw.randint(1, 4), draw.randint(1, most // 3), 2)))
            return ((f"user {self.next_id}", 0, length),), length
        spans, length = draw.choice(self.prompts[-6:])
        more = min(draw.choice((1, page, 2 * page)), most - length)
        if kind == "repeat" or more < 1:
            return spans, length
        return (*spans, (f"more {draw.randint(0, 1)}", 0, more)), length + more

    def add(self) -> None:
        spans, length = self.prompt()
        self.prompts.append((spans, length))
        id, self.next_id = self.next_id, self.next_id + 1
        output = min(self.draw.choice((1, 20, self.rules.longest, self.rules.longest)), self.rules.longest - length)
        most = self.draw.choice((output, self.draw.randint(output, self.rules.longest - length)))
        self.ours.add(Request(id, id, 0, 0, length, output, most, spans), 0)
        whole = (*spans, (output_stream(id, 0), 0, output))
        s = KVSequence(id=id, session=id, turn=0, num_tokens=length, max_tokens=length + most, spans=whole)
        self.naive.add(Asked(s, length, output, most))

    def run(self, steps: int) -> Counter[str]:
        while self.counts["steps"] < steps:
            idle = not (self.naive.running or self.naive.queue)  # then the ratio is as at the start
            for _ in range(self.draw.randint(3, 14) if idle else self.draw.random() < 0.03):
                self.add()
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
        self.counts["retracted"] += len(plan.preempted)
        self.counts["rejected"] += len(plan.rejected)
        self.counts["half-way"] += self.naive.half_way is not None
        self.counts["refused"] += self.naive.full
        self.counts["hits"] = self.naive.hits

    def compare(self) -> None:
        naive, sequences = self.naive, [u.sequence for u in self.ours.unfinished()]
        assert [s.id for s in sequences] == naive.running + naive.queue
        assert self.ours.num_running == len(naive.running)
        for s in sequences:
            r = naive.asked[s.id]
            assert (s.num_tokens, s.num_computed_tokens) == (r.s.num_tokens, r.s.num_computed_tokens)
            held = naive.pool.pages(r.s) if s.id in naive.pool.requests else []
            assert list(self.kv.block_ids(s)) == held
        ended, free = self.kv._ended, list(self.kv._free)
        assert (ended + free if self.rules.page > 1 else free + ended) == naive.pool.order()
        assert self.ours.new_token_ratio.value == pytest.approx(naive.ratio(), abs=1e-12)


PLAIN = Rules()
SHAPES = {
    "plain": PLAIN,
    "small chunks": replace(PLAIN, chunk=8),
    "a token a page": replace(PLAIN, page=1, pages=150, chunk=20),
    "a big pool": replace(PLAIN, pages=70, seqs=32, longest=96, conservativeness=0.0),
    "two run": replace(PLAIN, seqs=2, pages=26, conservativeness=0.0),
    "a small pool": replace(PLAIN, pages=14),
    "much is kept": replace(PLAIN, conservativeness=1.0, pages=60),
}
STEPS = 2500
"""Of each shape with a tree and without: 35,000 in all."""


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "no tree"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_that_of_the_second_model(shape: str, tree: bool) -> None:
    counts = Comparison(replace(SHAPES[shape], tree=tree), 7).run(STEPS)
    assert counts["retracted"] >= 5 or shape in ("a small pool", "much is kept")
    assert counts["leaps"] >= 100
    assert counts["refused"] >= 100
    assert counts["half-way"] >= 100 or shape != "small chunks"
    assert counts["rejected"] >= 20 or shape != "a small pool"
    assert (counts["hits"] >= 100) == tree


# Planted bugs


class CountsRunningOnesInFull(SglangScheduler):
    def _promised(self) -> float:
        return super()._promised() / (self.new_token_ratio.value or 1e-9)


class AsksOnAfterARefusal(SglangScheduler):
    def schedule(self, kv: KVPolicy) -> Plan:
        self._full = False
        return super().schedule(kv)


class ComesBackFirst(SglangScheduler):
    def _retract(self, plan: Plan, kv: RadixPolicy) -> None:
        before = len(self._waiting)
        super()._retract(plan, kv)
        self._waiting.rotate(len(self._waiting) - before)


class RetractsTheFirstOfEquals(SglangScheduler):
    def _retract(self, plan: Plan, kv: RadixPolicy) -> None:
        self._running.reverse()
        super()._retract(plan, kv)
        self._running.reverse()


class KeepsTheRatio(SglangScheduler):
    def _retract(self, plan: Plan, kv: RadixPolicy) -> None:
        before = self.new_token_ratio.value
        super()._retract(plan, kv)
        self.new_token_ratio.reset(before)


class NeverRests(SglangScheduler):
    def _note_idle(self) -> None:
        """The ratio stays what it is."""


class LeapsOneStepTooFar(SglangScheduler):
    def steady_steps(self, p: Plan) -> int:
        honest = super().steady_steps(p)
        return honest and honest + 1


class CutsInsideAPage(SglangScheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, max_num_batched_tokens=config.max_num_batched_tokens + 4))


@pytest.mark.parametrize(
    ("broken", "shape"),
    [
        (CountsRunningOnesInFull, "plain"),
        (AsksOnAfterARefusal, "plain"),
        (ComesBackFirst, "plain"),
        (RetractsTheFirstOfEquals, "a token a page"),
        (KeepsTheRatio, "plain"),
        (NeverRests, "plain"),
        (LeapsOneStepTooFar, "plain"),
        (CutsInsideAPage, "small chunks"),
    ],
)
def test_a_planted_bug_is_noticed(broken: type[SglangScheduler], shape: str) -> None:
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
        Comparison(SHAPES[shape], 7, broken).run(STEPS)


def test_a_page_that_is_not_kept_for_a_newcomer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer is one page too many where the sum is met exactly."""
    honest = RadixPolicy.available_tokens
    monkeypatch.setattr(RadixPolicy, "available_tokens", lambda self, s=None, hit=0: honest(self, s, hit) + 4 * bool(s))
    with pytest.raises(AssertionError):
        Comparison(PLAIN, 7).run(STEPS)
