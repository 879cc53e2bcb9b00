"""Continuous batching: sequences join and leave a running batch at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from hbmtwin.allocators.contract import FindsSharedBoundaries, KVPolicy
from hbmtwin.allocators.records import Refused, Release
from hbmtwin.sim.aligned_chunks import aligned_chunk
from hbmtwin.sim.scheduler import Admitted, Entry, Finished, Plan, QueueScheduler, SchedulerConfig, schedulers


@schedulers.register("vllm")
class VllmScheduler(QueueScheduler):
    """First come first served, decodes before prefills, prompts in chunks, the last admitted preempted first.

    The order is vLLM v1's: running sequences in order of admission, then, in a step without preemption, the queue
    until its head does not fit. A request that would pass ``max_model_len`` is rejected when it is queued, and one
    that is refused although nothing else runs is rejected as well: it could never run.
    """

    name: ClassVar[str] = "vllm"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._waiting: deque[Entry] = deque()
        self._boundaries: FindsSharedBoundaries | None = None
        """The policy of the present step, where chunks end at states and it knows boundaries."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    def _enqueue(self, entry: Entry) -> None:
        self._waiting.append(entry)

    def _requeue(self, entry: Entry) -> None:
        self._waiting.appendleft(entry)

    def _queued(self) -> Iterable[Entry]:
        return self._waiting

    def schedule(self, kv: KVPolicy) -> Plan:
        """Running sequences first, then the queue. O(running + admitted) calls of the policy."""
        plan = Plan(rejected=self._rejected)
        self._rejected = []
        if self.config.state_block_size:
            self._boundaries = kv if isinstance(kv, FindsSharedBoundaries) else None
        budget = self._schedule_running(plan, kv)
        if plan.exhausted is None and not plan.preempted:
            self._admit(plan, kv, budget)
        return plan

    def _schedule_running(self, plan: Plan, kv: KVPolicy) -> int:
        running, scheduled, decoding = self._running, plan.scheduled, plan.decoding
        aligned = self.config.state_block_size > 0
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(running) and budget > 0:
            s = running[index].sequence
            left = s.num_tokens - s.num_computed_tokens
            new = left if left < budget else budget
            if aligned and not (new := self._chunk(running[index], s.num_computed_tokens, new)):
                index += 1  # its turn comes when a step has room for a whole block
                continue
            while isinstance(refused := kv.reserve(s, new, others_running=len(running) > 1), Refused):
                if self.config.oom != "preempt":
                    plan.exhausted = (s, refused)
                    return 0
                victim = self._preempt(kv).sequence
                plan.preempted.append(victim)
                if victim is s:
                    return 0
            scheduled.append((s, new))
            if left == 1:
                decoding.append(s)
            budget -= new
            index += 1
        return budget

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        waiting, running = self._waiting, self._running
        while waiting and budget > 0 and len(running) < self._most_running:
            entry = waiting[0]
            s = entry.sequence
            hit = kv.lookup(s)
            new = min(s.num_tokens - hit, budget)
            if self.config.state_block_size and not (new := self._chunk(entry, hit, new)):
                return
            answer = kv.reserve(s, new, hit=hit, admitting=True, others_running=bool(running))
            if isinstance(answer, Refused):
                if running:
                    return  # the head of the queue blocks it, as in vLLM
                waiting.popleft()
                del self._entries[s.id]
                kv.release(s, Release.DROP)  # it holds nothing, but the cache may keep keys for it
                plan.rejected.append((entry.request, "kv_capacity"))
                continue
            waiting.popleft()
            running.append(entry)
            s.num_computed_tokens = hit
            self._running_tokens += hit
            plan.admitted.append(Admitted(entry.request, s, hit))
            plan.scheduled.append((s, new))
            if s.num_tokens - hit == 1:
                plan.decoding.append(s)
            budget -= new

    def _chunk(self, entry: Entry, start: int, new: int) -> int:
        """How many of *new* tokens behind *start* a step computes where chunks end at states."""
        s = entry.sequence
        return aligned_chunk(
            start,
            new,
            num_tokens=s.num_tokens,
            prompt_tokens=entry.request.prompt_tokens,
            block_size=self.config.state_block_size,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            shared_boundary=self._boundaries.shared_boundary(s) if self._boundaries is not None else 0,
        )

    def steady_steps(self, p: Plan) -> int:
        """Steps until the first sequence ends; 0 in a step with a prompt, a first token or a preemption."""
        if p.preempted or len(p.decoding) < len(p.scheduled):
            return 0
        left = len(p.scheduled) and 2**62
        for s in p.decoding:
            entry = self._entries[s.id]
            if s.num_tokens == entry.request.prompt_tokens:
                return 0  # its first token comes with this step, and its time is a result
            left = min(left, entry.final_tokens - s.num_tokens - 1)
        return left

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Count *k* steps; those that sampled their last token leave. O(scheduled)."""
        ended: list[Entry] = []
        for s, new in p.scheduled:
            computed = new + k - 1
            s.num_computed_tokens += computed
            self._running_tokens += computed
            if s.num_computed_tokens + 1 - k == s.num_tokens:
                s.num_tokens += k
                entry = self._entries[s.id]
                if s.num_tokens >= entry.final_tokens:
                    ended.append(entry)
        return self._finish(ended)
