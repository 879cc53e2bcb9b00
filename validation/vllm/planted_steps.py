"""Mistakes for our scheduler to make on purpose: a comparison that meets one of them must say so."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.sim.scheduler import Entry, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.priority_queue import order
from hbmtwin.sim.schedulers.vllm import VllmScheduler


class FirstGivesWay(VllmScheduler):
    """Preempts who has run longest."""

    def _victim(self) -> int:
        return 0


class LastOfEquals(VllmScheduler):
    """By priority, of those that came in one instant preempts the one that runs last."""

    def _victim(self) -> int:
        if self.config.scheduling_policy == "fcfs":
            return super()._victim()
        return max(reversed(range(len(self._running))), key=lambda place: order(self._running[place]))


class AdmitsAfterPreemption(VllmScheduler):
    """Goes on with the queue in a step that preempted."""

    def schedule(self, kv: KVPolicy) -> Plan:
        """And the queue, with the budget that is left."""
        plan = super().schedule(kv)
        if plan.preempted:
            self._admit(plan, kv, self.config.max_num_batched_tokens - plan.tokens)
        return plan


class PreemptedToTheEnd(VllmScheduler):
    """Puts a preempted one behind those that wait."""

    def _requeue(self, entry: Entry) -> None:
        deque.append(self._waiting, entry)


class PreemptedToTheFront(VllmScheduler):
    """By priority, puts a preempted one before those that go first."""

    def _requeue(self, entry: Entry) -> None:
        deque.appendleft(self._waiting, entry)


class BudgetOfItsOwn(VllmScheduler):
    """Gives newcomers the budget of a step in which nothing runs."""

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        super()._admit(plan, kv, self.config.max_num_batched_tokens)


class OneTooMany(VllmScheduler):
    """Lets one more run than may."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, max_num_seqs=config.max_num_seqs + 1))


class ThresholdForRunningOnly(VllmScheduler):
    """Does not cut the first chunk of a long prompt."""

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        kept, self._longest_chunk = self._longest_chunk, self.config.max_model_len
        super()._admit(plan, kv, budget)
        self._longest_chunk = kept


class AlwaysChunks(VllmScheduler):
    """Cuts prompts where they should be whole."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, enable_chunked_prefill=True))


class EndsAnywhere(VllmScheduler):
    """Lets chunks end inside the blocks of a Mamba group."""

    def _chunk(self, entry: Entry, start: int, new: int) -> int:
        return new


class PassesSharedBoundaries(VllmScheduler):
    """Does not end a chunk where a prompt parts from others."""

    def _chunk(self, entry: Entry, start: int, new: int) -> int:
        self._boundaries = None
        return super()._chunk(entry, start, new)


PLANTED_STEPS: dict[str, type[VllmScheduler]] = {
    "victim": FirstGivesWay,
    "last-of-equals": LastOfEquals,
    "admit-after-preemption": AdmitsAfterPreemption,
    "queue-end": PreemptedToTheEnd,
    "queue-front": PreemptedToTheFront,
    "budget": BudgetOfItsOwn,
    "one-too-many": OneTooMany,
    "threshold": ThresholdForRunningOnly,
    "always-chunks": AlwaysChunks,
    "chunk-stops": EndsAnywhere,
    "shared-boundary": PassesSharedBoundaries,
}
