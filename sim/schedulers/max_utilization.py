"""TensorRT-LLM's MAX_UTILIZATION: as many as have room for their next step, and who came last is paused for them.

::

    all requests by arrival   A running   B paused   C running   D new
    each needs, for one step  1 block     its whole  1 block     its whole
                                          prompt                 prompt
    one does not fit          the last started one of those behind it, itself included, is paused: its blocks are free,
                              and the walk ends before it; if there is none, the walk stops
    here                      B does not fit: C is paused, B goes on, and D waits
    its whole prompt          also where the cache has a part of it: what is found is not subtracted

Who is paused keeps its place by arrival, so it comes back before those that came later, and may pause them; all that
it had is computed anew (from general knowledge; the rest is ``capacityScheduler.cpp``'s, read and not run). As there,
one beyond ``max_num_seqs`` does not fit either. Blocks for two steps at once (the look-ahead of micro batches) are left
out. How a step is cut at ``max_num_batched_tokens`` (by arrival, prompts in chunks) is not TensorRT-LLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.records import Refused, Release
from hbmtwin.sim.scheduler import Admitted, Entry, Plan, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.guaranteed_no_evict import blocks_of, in_chunks, pool_of
from hbmtwin.sim.schedulers.vllm import VllmScheduler


@schedulers.register("max_utilization")
class MaxUtilizationScheduler(VllmScheduler):
    """Continuous batching by arrival: who started last is paused when one before it has no room. TensorRT-LLM's.

    It needs the policy ``paged``, and raises TypeError for another. One that does not fit although nobody runs is
    rejected (``kv_capacity``).
    """

    name: ClassVar[str] = "max_utilization"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(in_chunks(config))
        self._room = 0
        """Blocks that were free when the walk began, or came free in it, less what those that fit were counted with:
        all blocks of a prompt, also those that it finds in the cache."""
        self._owed = 0
        """Blocks of those that fit which the last plan has not taken: the rest of prompts, and who was over budget."""
        self._passed_over = False

    # -- the requests by arrival: those that do not run wait ---------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, paused ones included."""
        return len(self._entries) - len(self._running)

    def _enqueue(self, entry: Entry) -> None:
        """It has its place among the entries."""

    def _requeue(self, entry: Entry) -> None:
        """It has kept its place among the entries."""

    def _queued(self) -> Iterable[Entry]:
        running = {entry.sequence.id for entry in self._running}
        return [entry for entry in self._entries.values() if entry.sequence.id not in running]

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, kv: KVPolicy) -> Plan:
        """Walk the requests by arrival until one does not fit. O(requests that fit) calls of the policy."""
        pool = pool_of(kv, self.name)
        plan = Plan(self._rejected)
        self._rejected = []
        self._room, self._owed, self._passed_over = pool.free_blocks, 0, False
        started = {entry.sequence.id for entry in self._running}
        walk = list(self._entries.values())
        place, end, fitting, budget = 0, len(walk), 0, self.config.max_num_batched_tokens
        while place < end:
            entry = walk[place]
            runs = entry.sequence.id in started
            hit = 0 if runs else pool.lookup(entry.sequence)
            if not runs and pool.is_computing(entry.sequence, hit):
                self._passed_over = True
                place += 1
                continue
            new = self._fit(plan, pool, entry, hit, budget) if fitting < self._most_running else -1
            if new >= 0:
                budget -= new
                fitting += 1
                place += 1
                continue
            last = next((n for n in reversed(range(place, end)) if walk[n].sequence.id in started), -1)
            if last >= 0:
                self._pause(plan, pool, walk[last])
                end = last
            elif not self._running:
                self._reject(plan, pool, entry)
                place += 1
            else:
                break
        return plan

    def _fit(self, plan: Plan, pool: PagedPolicy, entry: Entry, hit: int, budget: int) -> int:
        """Plan as many of its tokens as there is budget for; return how many, -1 if its next step does not fit."""
        s, size = entry.sequence, pool.config.block_size
        tokens = s.num_computed_tokens + hit
        runs = s.num_computed_tokens > 0
        whole, held = blocks_of(s.num_tokens, size), blocks_of(s.num_computed_tokens, size)
        needed = whole - held
        if needed > self._room:
            return -1
        new = min(s.num_tokens - tokens, budget)
        if new:
            others = bool(self._running) and self._running != [entry]
            if isinstance(pool.reserve(s, new, hit=hit, admitting=not runs, others_running=others), Refused):
                return -1
            plan.scheduled.append((s, new))
            if s.num_tokens - tokens == 1:
                plan.decoding.append(s)
            if not runs:
                self._running.append(entry)
                s.num_computed_tokens = hit
                self.running_tokens += hit
                plan.admitted.append(Admitted(entry.request, s, hit))
            held = blocks_of(tokens + new, size)
        self._room -= needed
        self._owed += whole - held
        return new

    def _pause(self, plan: Plan, pool: PagedPolicy, entry: Entry) -> None:
        self._running.remove(entry)
        free = pool.free_blocks
        pool.release(entry.sequence, Release.PREEMPT)
        self._room += pool.free_blocks - free
        entry.sequence.lost_tokens = entry.held_tokens
        self._back_to_queue(entry)
        plan.preempted.append(entry.sequence)

    def _reject(self, plan: Plan, pool: PagedPolicy, entry: Entry) -> None:
        del self._entries[entry.sequence.id]
        pool.release(entry.sequence, Release.DROP)
        plan.rejected.append((entry.request, "kv_capacity"))

    def steady_steps(self, p: Plan) -> int:
        """As with continuous batching; 0 where somebody was admitted, or passed over, or fitted and has not got its
        blocks: the next walk counts anew."""
        return 0 if p.admitted or self._passed_over or self._owed else super().steady_steps(p)
