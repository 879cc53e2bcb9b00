"""Mistakes for our asynchronous scheduler to make on purpose: a comparison that meets one of them must say so."""

from __future__ import annotations

from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.sim.scheduler import Entry, Finished, Plan
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler


class KeysAtOnce(AsyncVllmScheduler):
    """Gives a block its key before its last token is known."""

    def _planned(self, kv: KVPolicy) -> Plan:
        self._sampled.clear()
        return super()._planned(kv)


class KeysOfAGroupAtOnce(AsyncVllmScheduler):
    """Lets blocks of sequences that decode together have their keys when they are full."""

    def schedule(self, kv: KVPolicy) -> Plan:
        """The policy is told that every token is known."""
        plan = super().schedule(kv)
        assert self._keys is not None
        self._keys.unsampled = None
        return plan


class GivesBackAtOnce(AsyncVllmScheduler):
    """Lets windows give back what the step under way still reads."""

    def schedule(self, kv: KVPolicy) -> Plan:
        """The policy is told of nothing under way."""
        plan = super().schedule(kv)
        assert self._keys is not None
        self._keys.under_way = {}
        return plan


class KeysForgotten(AsyncVllmScheduler):
    """Gives the last full block of an answer no key when it ends."""

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Nobody's tokens are known."""
        self._sampled.clear()
        return super().commit(p, k)


class EndsUnforeseen(AsyncVllmScheduler):
    """Plans a further token for those that have all that they may get."""

    def _count(self, p: Plan, k: int) -> None:
        super()._count(p, k)
        for entry in self._ending:
            entry.sequence.num_tokens = entry.final_tokens


class EndsForeseen(AsyncVllmScheduler):
    """Knows when an answer ends by itself."""

    def _count(self, p: Plan, k: int) -> None:
        super()._count(p, k)
        for entry in self._ending:
            entry.sequence.num_tokens = entry.final_tokens - 1


class PlacesAtOnce(AsyncVllmScheduler):
    """Does not count those that end among those that run."""

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        self._most_running += len(self._ending)
        super()._admit(plan, kv, budget)
        self._most_running -= len(self._ending)


class PreemptedAreLost(AsyncVllmScheduler):
    """Keeps those that were preempted in the queue, though their last token was under way."""

    def _discard(self) -> None:
        super()._discard()
        for s in self._ahead.preempted:
            ended = next((entry for entry in self._ending if entry.sequence is s), None)
            if ended is not None:
                self._entries[s.id] = ended
                self._requeue(ended)


class TokensOfPreemptedAreLost(AsyncVllmScheduler):
    """Takes the token that was under way from those that are preempted."""

    lost: ClassVar[int] = 1

    def _preempt(self, kv: KVPolicy) -> Entry:
        entry = super()._preempt(kv)
        s = entry.sequence
        if s.id in self._sampled and entry not in self._ending and s.num_tokens - 1 > entry.request.prompt_tokens:
            s.num_tokens -= self.lost
        return entry


PLANTED_AHEAD: dict[str, type[AsyncVllmScheduler]] = {
    "keys-at-once": KeysAtOnce,
    "group-keys-at-once": KeysOfAGroupAtOnce,
    "gives-back-at-once": GivesBackAtOnce,
    "keys-forgotten": KeysForgotten,
    "ends-unforeseen": EndsUnforeseen,
    "ends-foreseen": EndsForeseen,
    "places-at-once": PlacesAtOnce,
    "preempted-stay": PreemptedAreLost,
    "preempted-lose": TokensOfPreemptedAreLost,
}
