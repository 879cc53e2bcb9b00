"""Prompts first, and in steps of their own: MindIE by default, and vLLM before it cut prompts into chunks.

::

    a step                                 budget: max_num_batched_tokens, and max_num_seqs at once
    1 whole prompts from the queue's head  until one does not fit; if there is one, the step is over
    2 else a token of everyone who runs    while one has no room, the last admitted gives way, to the queue's front

In MindIE's words ``max_num_batched_tokens`` is ``maxPrefillTokens`` and ``max_num_seqs`` is ``maxBatchSize``; its
``maxPrefillBatchSize`` and the weighing of ``supportSelectBatch`` have no counterpart here. MindIE's scheduler was not
read: that prefill goes first and alone is in its manual, that the last admitted is computed anew from the front of the
queue is vLLM's rule, taken over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy, SeenByWaiting
from hbmtwin.sim.scheduler import Plan, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler


@schedulers.register("prefill_first")
class PrefillFirstScheduler(VllmScheduler):
    """Whole prompts before decodes and never with them: MindIE by default, and older servers.

    A new prompt interrupts all decodes for a step, so time per output token grows with the arrivals. Who gives way
    comes back as soon as its tokens fit, which may be in the very next step.
    """

    name: ClassVar[str] = "prefill_first"

    def __init__(self, config: SchedulerConfig) -> None:
        whole = replace(config, enable_chunked_prefill=False, long_prefill_token_threshold=0, scheduling_policy="fcfs")
        super().__init__(whole)
        self._room_came = False
        """Whether decodes of the last plan gave something back, behind the look at the queue."""

    def schedule(self, kv: KVPolicy) -> Plan:
        """Prompts, or a token of everyone. O(running + admitted) calls of the policy."""
        plan = Plan(self._rejected)
        self._rejected = []
        self._admit(plan, kv, self.config.max_num_batched_tokens)
        if not plan.admitted:
            decoding = [entry.sequence for entry in self._running] if self._waiting else []
            self._room_came = isinstance(kv, SeenByWaiting) and bool(decoding) and not kv.steps_unseen(decoding, 1)
            self._schedule_running(plan, kv)
        return plan

    def steady_steps(self, p: Plan) -> int:
        """As with continuous batching; 0 with a prompt. Who did not fit in this step fits in none that is alike, unless
        layers with a window gave blocks back behind the look at the queue: the next step looks again."""
        return 0 if p.admitted or self._room_came else super().steady_steps(p)
