"""vLLM's scheduler: sequences join and leave a running batch at every step.

::

    a step                            budget: max_num_batched_tokens
    1 running ones, in order          what each lacks, cut by long_prefill_token_threshold, by what is left of the
                                      budget, and before max_model_len; while one has no room, somebody gives way
    2 the queue, from its head        the same for newcomers, until one does not fit; not if somebody gave way

    who gives way    fcfs: the last admitted, to the front of the queue
                     priority: the largest (priority, arrival), to where the queue's order puts it

Those in front that only decode are a group, where the KV policy can give it room at once: planning it is one call, and
counting its steps another. It is broken up whenever one of them may not get its token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import ClassVar

from hbmtwin.allocators.contract import FindsSharedBoundaries, KVPolicy, ReservesTogether
from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.records import KVSequence, Refused, Release
from hbmtwin.sim.scheduler import (
    Admitted,
    Entry,
    Fail,
    Failed,
    Finished,
    Plan,
    QueueScheduler,
    SchedulerConfig,
    Unfinished,
    schedulers,
)
from hbmtwin.sim.schedulers.aligned_chunks import aligned_chunk
from hbmtwin.sim.schedulers.priority_queue import PriorityQueue, order


@schedulers.register("vllm")
class VllmScheduler(QueueScheduler):
    """Decodes before prefills, prompts in chunks, first come first served or by priority: vLLM's since its v1 engine.

    It is ``vllm/v1/core/sched/scheduler.py`` of 0.27, without drafts and adapters; with ``async_scheduling``
    :class:`~hbmtwin.sim.schedulers.vllm_async.AsyncVllmScheduler` takes its place. A request that would pass
    ``max_model_len`` is rejected when it is queued. One that could never run is rejected at the head of the queue,
    where vLLM would wait for ever: refused by the KV policy (``kv_capacity``), or, where prompts are not cut into
    chunks, over the budget (``max_num_batched_tokens``). At once, but with a pool of blocks when nobody runs: one
    longest request fits there by the check of the start, and a prefix cache may yet find more of a prompt.
    """

    name: ClassVar[str] = "vllm"
    makes_groups: ClassVar[bool] = True
    """Whether its plans may have a group; it is not among ``_running``, which policies on top look into."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._by_priority = config.scheduling_policy == "priority"
        self._last_gives_way = not self._by_priority and type(self)._victim is VllmScheduler._victim
        """Else one that was scheduled in this step may give way, and leaves the plan."""
        self._waiting: deque[Entry] = PriorityQueue() if self._by_priority else deque()
        self._longest_chunk = config.long_prefill_token_threshold or config.max_model_len
        self._boundaries: FindsSharedBoundaries | None = None
        """The policy of the present step, where chunks end at states and it knows boundaries."""
        self._group = DecodeGroup()
        self._together: ReservesTogether | None = None
        """The policy, where it can give a group room at once."""
        self._kv: KVPolicy | None = None

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self._group.members) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits, or is to be answered."""
        return bool(self._group.members or self._running or self.num_waiting or self._rejected)

    def _enqueue(self, entry: Entry) -> None:
        self._waiting.append(entry)

    def _requeue(self, entry: Entry) -> None:
        self._waiting.appendleft(entry)

    def _queued(self) -> Iterable[Entry]:
        return self._waiting

    def schedule(self, kv: KVPolicy) -> Plan:
        """Running sequences first, then the queue. O(running + admitted) calls of the policy."""
        plan = Plan(self._rejected)
        self._rejected = []
        if kv is not self._kv:
            self._kv, self._together = kv, None
            if self.makes_groups and isinstance(kv, ReservesTogether):
                self._together = kv
        if self.config.state_block_size:
            self._boundaries = kv if isinstance(kv, FindsSharedBoundaries) else None
        budget = self._schedule_running(plan, kv)
        if self._waiting and plan.exhausted is None and not plan.preempted:
            self._admit(plan, kv, budget)
        return plan

    def _schedule_running(self, plan: Plan, kv: KVPolicy) -> int:
        budget = self.config.max_num_batched_tokens
        if self._group.members:
            assert self._together is not None
            if self._together.reserve_together(self._group):
                plan.group = self._group
                budget -= len(self._group.members)
            else:
                self._break_up()
        return self._schedule_singly(plan, kv, budget) if self._running else budget

    def _schedule_singly(self, plan: Plan, kv: KVPolicy, budget: int) -> int:
        running, scheduled, decoding = self._running, plan.scheduled, plan.decoding
        aligned = self.config.state_block_size > 0
        longest_chunk, last = self._longest_chunk, self.config.max_model_len - 1
        others = self.num_running > 1
        index = 0
        while index < len(running) and budget > 0:
            s = running[index].sequence
            computed = s.num_computed_tokens
            left = s.num_tokens - computed
            new = left if left < longest_chunk else longest_chunk
            if new > budget:
                new = budget
            if new > last - computed:
                new = last - computed
            if new > 0 and aligned:
                new = self._chunk(running[index], computed, new)
            if new <= 0:
                index += 1  # at the end of the model, or its turn comes when a step has room for a whole block
                continue
            while isinstance(refused := kv.reserve(s, new, others_running=others), Refused):
                if self.config.oom != "preempt":
                    plan.exhausted = (s, refused)
                    return 0
                if not self._last_gives_way and plan.group is not None:  # anybody may, also one of the group
                    index += len(plan.group)
                    scheduled[:0] = plan.everyone()[: len(plan.group)]
                    decoding[:0] = plan.group
                    plan.group = None
                    self._break_up()
                victim = self._preempt(kv).sequence
                plan.preempted.append(victim)
                if victim is s:
                    return 0
                if not self._last_gives_way and (returned := _take_back(plan, victim)):
                    budget += returned
                    index -= 1  # as in vLLM only for one that was scheduled: behind one passed over, another is as well
                others = self.num_running > 1
            scheduled.append((s, new))
            if left == 1:
                decoding.append(s)
            budget -= new
            index += 1
        return budget

    def _victim(self) -> int:
        """Who gives way next. O(1) in order of arrival, O(running) by priority; of equals vLLM takes the first."""
        if not self._by_priority:
            return -1
        return self._running.index(max(self._running, key=order))

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        config, waiting, running, grouped = self.config, self._waiting, self._running, len(self._group.members)
        while waiting and budget > 0 and grouped + len(running) < self._most_running:
            entry = waiting[0]
            s = entry.sequence
            hit = kv.lookup(s)
            new = s.num_tokens - hit
            if new > self._longest_chunk:
                new = self._longest_chunk
            if new > budget:
                if not config.enable_chunked_prefill:
                    cache_may_find_more = (grouped or running) and "prefix_cache" in kv.offers
                    if cache_may_find_more or new <= config.max_num_batched_tokens:
                        return
                    self._reject_head(plan, kv, "max_num_batched_tokens")
                    continue
                new = budget
            if config.state_block_size and not (new := self._chunk(entry, hit, new)):
                return
            answer = kv.reserve(s, new, hit=hit, admitting=True, others_running=bool(grouped or running))
            if isinstance(answer, Refused):
                if (grouped or running) and not answer.never:
                    return  # the head of the queue blocks it, as in vLLM
                self._reject_head(plan, kv, "kv_capacity")
                continue
            waiting.popleft()
            running.append(entry)
            s.num_computed_tokens = hit
            self.running_tokens += hit
            plan.admitted.append(Admitted(entry.request, s, hit))
            plan.scheduled.append((s, new))
            if s.num_tokens - hit == 1:
                plan.decoding.append(s)
            budget -= new

    def _reject_head(self, plan: Plan, kv: KVPolicy, why: str) -> None:
        entry = self._waiting.popleft()
        del self._entries[entry.sequence.id]
        kv.release(entry.sequence, Release.DROP)  # it holds nothing, but the cache may keep keys for it
        plan.rejected.append((entry.request, why))

    def _chunk(self, entry: Entry, start: int, new: int) -> int:
        """How many of *new* tokens behind *start* a step computes where chunks end at states."""
        s = entry.sequence
        return aligned_chunk(
            start,
            new,
            num_tokens=s.num_tokens,
            prompt_tokens=entry.request.prompt_tokens,
            block_size=self.config.state_block_size,
            max_num_batched_tokens=min(self.config.max_num_batched_tokens, self._longest_chunk),
            shared_boundary=self._boundaries.shared_boundary(s) if self._boundaries is not None else 0,
        )

    def steady_steps(self, p: Plan) -> int:
        """Steps until the first sequence ends; 0 in a step with a prompt, a first token or a preemption."""
        if p.preempted or len(p.decoding) < len(p.scheduled):
            return 0
        left = len(p.scheduled) and 2**62 if p.group is None else p.group.steps_left - 1
        for s in p.decoding:
            entry = self._entries[s.id]
            if s.num_tokens == entry.request.prompt_tokens:
                return 0  # its first token comes with this step, and its time is a result
            left = min(left, entry.final_tokens - s.num_tokens - 1)
        return left

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Count *k* steps; those that sampled their last token leave. O(scheduled one by one)."""
        ended: list[Entry] = []
        if p.group is not None:
            self.running_tokens += k * len(p.group.members)
            if gone := p.group.go(k):
                ended = [self._entries[s.id] for s in gone]
        for s, new in p.scheduled:
            computed = new + k - 1
            s.num_computed_tokens += computed
            self.running_tokens += computed
            if s.num_computed_tokens + 1 - k == s.num_tokens:
                s.num_tokens += k
                entry = self._entries[s.id]
                if s.num_tokens >= entry.final_tokens:
                    ended.append(entry)
        finished = self._finish(ended) if ended else []
        if self._together is not None and self._running:
            self._join()
        return finished

    # -- the group ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Take those in that stand in front, have their first token, and all but their last one computed."""
        group, running, joining = self._group, self._running, 0
        room = self.config.max_num_batched_tokens - len(group.members)
        while joining < len(running) and joining < room:
            entry = running[joining]
            s = entry.sequence
            if s.num_computed_tokens + 1 != s.num_tokens or s.num_tokens == entry.request.prompt_tokens:
                break
            group.join(s, entry.final_tokens)
            joining += 1
        del running[:joining]

    def _break_up(self) -> None:
        """Whoever is in the group is planned by itself again, and its counts are right. O(members)."""
        group, self._group = self._group, DecodeGroup()
        group.fold()
        self._running[:0] = [self._entries[s.id] for s in group]

    def unfinished(self) -> Iterator[Unfinished]:
        """Running requests, then waiting ones."""
        self._group.fold()
        for s in self._group:
            entry = self._entries[s.id]
            yield Unfinished(entry.request, s, entry.output_tokens)
        yield from super().unfinished()

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """Undo the plan, and let somebody give way. O(running)."""
        self._break_up()
        return super().fail(p, kv, owner, how)


def _take_back(plan: Plan, s: KVSequence) -> int:
    """Take a sequence out of a plan; return the tokens that it was to compute, 0 if it is not in it. O(scheduled)."""
    for index, (other, new) in enumerate(plan.scheduled):
        if other is s:
            del plan.scheduled[index]
            plan.decoding[:] = [d for d in plan.decoding if d is not s]
            return new
    return 0
