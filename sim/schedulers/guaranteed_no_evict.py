"""TensorRT-LLM's GUARANTEED_NO_EVICT: whoever runs can run to its end, and nobody is ever paused.

::

    free blocks   | still lacking: what each running one needs up to prompt + max_new_tokens | rest |
    admitted      from the queue's head while its own prompt + max_new_tokens <= rest; the first that does not fit
                  stops; one whose next block is just being computed is passed over, and finds it later

Cached blocks that nobody refers to are free; blocks that a request will find are not subtracted from its need. The
rules are ``capacityScheduler.cpp``'s and ``scheduledBlocksManager.cpp``'s, read and not run. How a step is cut at
``max_num_batched_tokens`` (running requests first, prompts in chunks) is vLLM's, not TensorRT-LLM's micro batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.records import KVSequence, Refused
from hbmtwin.sim.scheduler import Admitted, Plan, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler


@schedulers.register("guaranteed_no_evict")
class GuaranteedNoEvictScheduler(VllmScheduler):
    """Continuous batching that admits by full length, so that nobody is preempted: TensorRT-LLM's default.

    It needs the policy ``paged``, and raises TypeError for another. One whose full length is more than the pool is
    rejected (``kv_capacity``).
    """

    name: ClassVar[str] = "guaranteed_no_evict"
    makes_groups: ClassVar[bool] = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(in_chunks(config))
        self._rest = 0
        """Free blocks that running sequences will not need."""
        self._passed_over = False

    def schedule(self, kv: KVPolicy) -> Plan:
        """Running sequences first, then the queue. O(running + admitted) calls of the policy."""
        pool = pool_of(kv, self.name)
        if self._waiting:
            size = pool.config.block_size
            both = ((e.sequence.max_tokens, e.sequence.num_computed_tokens) for e in self._running)
            lacking = sum(blocks_of(full, size) - blocks_of(held, size) for full, held in both)
            self._rest = pool.free_blocks - lacking
        self._passed_over = False
        return super().schedule(kv)

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        pool, waiting, running = pool_of(kv, self.name), self._waiting, self._running
        place = 0
        while place < len(waiting) and budget > 0 and len(running) < self._most_running:
            entry = waiting[place]
            s = entry.sequence
            hit = pool.lookup(s)
            if pool.is_computing(s, hit):
                self._passed_over = True
                place += 1
                continue
            full, new = blocks_of(s.max_tokens, pool.config.block_size), min(s.num_tokens - hit, budget)
            fits = full <= self._rest
            if not fits or _refused(pool, s, new, hit, bool(running)):
                if running:
                    return
                self._reject_head(plan, kv, "kv_capacity")
                continue
            self._rest -= full
            del waiting[place]
            running.append(entry)
            s.num_computed_tokens = hit
            self.running_tokens += hit
            plan.admitted.append(Admitted(entry.request, s, hit))
            plan.scheduled.append((s, new))
            if s.num_tokens - hit == 1:
                plan.decoding.append(s)
            budget -= new

    def steady_steps(self, p: Plan) -> int:
        """As with continuous batching: the rest stays as it is while running sequences take what they lacked. 0 where
        somebody was passed over."""
        return 0 if self._passed_over else super().steady_steps(p)


def in_chunks(config: SchedulerConfig) -> SchedulerConfig:
    """The settings without those that are vLLM's alone."""
    return replace(config, enable_chunked_prefill=True, long_prefill_token_threshold=0, scheduling_policy="fcfs")


def pool_of(kv: KVPolicy, name: str) -> PagedPolicy:
    """The policy, if it is the one whose blocks TensorRT-LLM's schedulers can count. Raise TypeError."""
    if not isinstance(kv, PagedPolicy):
        raise TypeError(f"the scheduler {name} needs the policy paged, not {type(kv).__name__}")
    return kv


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks of so many tokens, the last one perhaps partly filled."""
    return -(-tokens // block_size)


def _refused(pool: PagedPolicy, s: KVSequence, new: int, hit: int, others_running: bool) -> bool:
    """Whether the pool's own gates (watermark, ``memory.admission``) refuse; the blocks are taken if not."""
    return isinstance(pool.reserve(s, new, hit=hit, admitting=True, others_running=others_running), Refused)
