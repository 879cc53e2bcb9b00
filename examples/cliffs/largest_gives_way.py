"""A scheduler that live-locks: when a block is short, whoever holds most gives way.

It looks like a good idea, as that frees most at once. But whoever holds most is the one that is about to be ready: long
prompts, computed in chunks side by side where only one of them fits, undo one another for ever. vLLM lets the last
admitted give way, so that the first one always goes on; that keeps its servers, however slow, from standing still.
"""

from __future__ import annotations

from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.sim.scheduler import Entry, QueueScheduler, SchedulerConfig, schedulers
from hbmtwin.sim.vllm import VllmScheduler


@schedulers.register("largest_gives_way")
class LargestGivesWay(VllmScheduler):
    """vLLM's scheduler in all but one thing: who holds most KV gives way."""

    name: ClassVar[str] = "largest_gives_way"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._by_priority = True  # one that was scheduled before it gives way leaves the plan, as with priorities

    def _preempt(self, kv: KVPolicy) -> Entry:
        victim = max(self._running, key=lambda entry: entry.sequence.num_computed_tokens)
        self._running.remove(victim)
        self._running.append(victim)
        return QueueScheduler._preempt(self, kv)
