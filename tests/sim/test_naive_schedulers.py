"""``prefill_first`` and TensorRT-LLM's two schedulers over ``paged`` against second models, in steps and in leaps.

Compared as in ``test_naive_vllm``: scheduled tokens, who runs and who waits in what order, who was preempted and
rejected, the block ids of everybody, and the free queue.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.sim.scheduler import Entry, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.guaranteed_no_evict import GuaranteedNoEvictScheduler, pool_of
from hbmtwin.sim.schedulers.max_utilization import MaxUtilizationScheduler
from hbmtwin.sim.schedulers.prefill_first import PrefillFirstScheduler
from hbmtwin.sim.schedulers.vllm import VllmScheduler

from .naive_schedulers import NaiveMaxUtilization, NaiveNoEvict, NaivePrefillFirst
from .naive_vllm import NaiveVllm, Rules
from .test_naive_vllm import Comparison

PLAIN = Rules(num_blocks=24, block_size=4, longest=48, seqs=8, budget=16)
PAIRS: dict[str, tuple[type[VllmScheduler], type[NaiveVllm]]] = {
    "prefill_first": (PrefillFirstScheduler, NaivePrefillFirst),
    "guaranteed_no_evict": (GuaranteedNoEvictScheduler, NaiveNoEvict),
    "max_utilization": (MaxUtilizationScheduler, NaiveMaxUtilization),
}
SHAPES = {
    "plain": PLAIN,
    "few tokens a step": replace(PLAIN, budget=5),
    "many tokens a step, two run": replace(PLAIN, budget=64, seqs=2, num_blocks=14),
    "a token a block": replace(PLAIN, block_size=1, num_blocks=90),
}
STEPS = 1500
"""Of each shape with a cache and without: 12,000 of each scheduler."""


def rules_of(shape: str, name: str, caching: bool) -> Rules:
    rules = replace(SHAPES[shape], caching=caching)
    return replace(rules, chunked=False, budget=max(48, rules.budget)) if name == "prefill_first" else rules


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAIRS)
def test_every_step_is_that_of_the_second_model(name: str, shape: str, caching: bool) -> None:
    rules = rules_of(shape, name, caching)
    counts = Comparison(rules, 7, *PAIRS[name]).run(STEPS)
    assert (counts["preempted"] >= 40) == (name != "guaranteed_no_evict")
    assert counts["leaps"] >= 40
    assert counts["chunks"] >= 100 or rules.budget > 5
    assert (counts["hits"] >= 100) == caching


# Planted bugs


class MixesPromptsAndDecodes(PrefillFirstScheduler):
    schedule = VllmScheduler.schedule


class ComesBackLast(PrefillFirstScheduler):
    def _requeue(self, entry: Entry) -> None:
        self._waiting.append(entry)


class LooksPastTheHead(PrefillFirstScheduler):
    def schedule(self, kv: KVPolicy) -> Plan:
        plan = super().schedule(kv)
        if len(self._waiting) > 1 and not plan.admitted and not plan.preempted:
            self._waiting.rotate(-1)
        return plan


class ForgetsWhatOthersLack(GuaranteedNoEvictScheduler):
    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        self._rest = pool_of(kv, "a planted bug").free_blocks
        super()._admit(plan, kv, budget)


class CountsTheFirstChunk(GuaranteedNoEvictScheduler):
    """Not the full length: what those behind the head may take is more by the difference."""

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        self._rest += len(self._waiting) > 1
        super()._admit(plan, kv, budget)


class PausesTheFirst(MaxUtilizationScheduler):
    def _pause(self, plan: Plan, pool: PagedPolicy, entry: Entry) -> None:
        super()._pause(plan, pool, self._running[0])


class LosesItsPlace(MaxUtilizationScheduler):
    def _requeue(self, entry: Entry) -> None:
        self._entries[entry.sequence.id] = self._entries.pop(entry.sequence.id)


class SubtractsWhatIsFound(MaxUtilizationScheduler):
    def _fit(self, plan: Plan, pool: PagedPolicy, entry: Entry, hit: int, budget: int) -> int:
        self._room = pool.free_blocks - self._owed
        return super()._fit(plan, pool, entry, hit, budget)


class RunsOneMore(MaxUtilizationScheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, max_num_seqs=config.max_num_seqs + 1))


@pytest.mark.parametrize(
    ("broken", "shape", "caching"),
    [
        (MixesPromptsAndDecodes, "plain", False),
        (ComesBackLast, "plain", False),
        (LooksPastTheHead, "plain", False),
        (ForgetsWhatOthersLack, "plain", False),
        (CountsTheFirstChunk, "plain", False),
        (PausesTheFirst, "plain", False),
        (LosesItsPlace, "plain", False),
        (SubtractsWhatIsFound, "plain", True),
        (RunsOneMore, "many tokens a step, two run", False),
    ],
)
def test_a_planted_bug_is_noticed(broken: type[VllmScheduler], shape: str, caching: bool) -> None:
    naive = PAIRS[broken.name][1]
    with pytest.raises((AssertionError, KeyError)):  # one that is computed and does not run: KeyError
        Comparison(rules_of(shape, broken.name, caching), 7, broken, naive).run(STEPS)


@pytest.mark.parametrize("name", ["guaranteed_no_evict", "max_utilization"])
def test_one_that_finds_in_the_same_step_what_is_computed_in_it_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedPolicy, "is_computing", lambda self, s, hit: False)
    with pytest.raises(AssertionError):
        Comparison(rules_of("plain", name, True), 7, *PAIRS[name]).run(STEPS)
