"""Continuous batching: which sequences compute how many tokens in the next step.

The contract (:class:`Scheduler`), its records, and the first policy. Only a scheduler writes the counts of a
:class:`~hbmtwin.allocators.records.KVSequence`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, NamedTuple, Protocol

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import KVSequence, Refused, Release
from hbmtwin.allocators.registry import Registry
from hbmtwin.workloads.records import Request, output_stream


class Fail(Enum):
    """What happens to a sequence for which memory ran out in mid-step."""

    REJECT = "reject"
    PREEMPT = "preempt"


class Admitted(NamedTuple):
    """A sequence that began to run in this step, with the tokens that it found in memory."""

    request: Request
    sequence: KVSequence
    hit: int


class Finished(NamedTuple):
    """A request whose last token was sampled; its memory is still held."""

    request: Request
    sequence: KVSequence
    output_tokens: int


class Failed(NamedTuple):
    """Who gave way to a step that could not be carried out; undone admissions are in neither list."""

    rejected: list[tuple[Request, KVSequence]]
    preempted: list[tuple[Request, KVSequence]]


@dataclass(slots=True)
class Plan:
    """One step: what is computed, in running order, and what changed on the way."""

    scheduled: list[tuple[KVSequence, int]] = field(default_factory=list)
    decoding: list[KVSequence] = field(default_factory=list)
    """Those of ``scheduled`` that compute exactly their last token."""
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[KVSequence] = field(default_factory=list)
    rejected: list[tuple[Request, str]] = field(default_factory=list)
    exhausted: tuple[KVSequence, Refused] | None = None
    """A running sequence that cannot go on, where the server does not preempt; nothing else is to be computed."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """vLLM's words. ``oom`` is the scenario's ``memory.oom``."""

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    oom: Literal["stop", "reject", "preempt"] = "preempt"
    batching: Literal["padded", "sorted", "buckets", "variable"] = "padded"
    """Of ``static_batch``: which requests share a batch, and whether they are padded to its longest."""
    bucket_tokens: int = 256
    """Width of a bucket of prompt lengths."""


class Scheduler(Protocol):
    """Decides each step. The engine calls ``schedule``, carries the plan out ``k`` times, then ``commit``."""

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to answer."""
        ...

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV is in memory, over running sequences, at the last commit."""
        ...

    @property
    def padding_tokens(self) -> int:
        """Slots that running sequences fill with padding, at the last commit; not part of ``running_tokens``."""
        ...

    def add(self, r: Request, now_ns: int) -> None:
        """Queue a request."""
        ...

    def schedule(self, kv: KVPolicy) -> Plan:
        """Plan the next step and reserve its memory. O(running + admitted)."""
        ...

    def steady_steps(self, p: Plan) -> int:
        """How many further steps would have the same plan if nothing arrived."""
        ...

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Account *k* steps of a plan; return the requests that ended with them."""
        ...

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """Undo a plan that could not be carried out, then drop its *owner* or preempt the last admitted."""
        ...

    def unfinished(self) -> Iterator[tuple[Request, KVSequence]]:
        """Requests that are running or waiting."""
        ...


schedulers: Registry[Scheduler] = Registry("hbmtwin.schedulers", "scheduler")


@dataclass(slots=True, eq=False)
class _Entry:
    request: Request
    sequence: KVSequence
    final_tokens: int
    """``num_tokens`` at which it ends: the truth, which only ``commit`` may look at."""


@schedulers.register("continuous")
class ContinuousScheduler:
    """First come first served, decodes before prefills, prompts in chunks, the last admitted preempted first.

    The order is vLLM v1's: running sequences in order of admission, then, in a step without preemption, the queue
    until its head does not fit. A request that would pass ``max_model_len`` is rejected when it is queued, and one
    that is refused although nothing else runs is rejected as well: it could never run.
    """

    name: ClassVar[str] = "continuous"
    Config = SchedulerConfig

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._running_tokens = 0
        self._running: list[_Entry] = []
        self._waiting: deque[_Entry] = deque()
        self._rejected: list[tuple[Request, str]] = []
        self._entries: dict[int, _Entry] = {}

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits, or is to be answered."""
        return bool(self._running or self._waiting or self._rejected)

    @property
    def running_tokens(self) -> int:
        """Computed tokens of running sequences, at the last commit."""
        return self._running_tokens

    @property
    def padding_tokens(self) -> int:
        """0: sequences of different lengths share a step without padding."""
        return 0

    def add(self, r: Request, now_ns: int) -> None:
        """Queue a request, or note its rejection for the next plan. O(1)."""
        if r.prompt_tokens + r.max_tokens > self.config.max_model_len:
            self._rejected.append((r, "max_model_len"))
            return
        output = min(r.output_tokens, r.max_tokens)
        # The whole output stream stands in the spans from the start; policies cut them at num_tokens.
        spans = (*r.spans, (output_stream(r.session, r.turn), 0, output))
        sequence = KVSequence(
            id=r.id,
            session=r.session,
            turn=r.turn,
            num_tokens=r.prompt_tokens,
            max_tokens=r.prompt_tokens + r.max_tokens,
            spans=spans,
        )
        entry = _Entry(r, sequence, r.prompt_tokens + output)
        self._entries[sequence.id] = entry
        self._waiting.append(entry)

    def schedule(self, kv: KVPolicy) -> Plan:
        """Running sequences first, then the queue. O(running + admitted) calls of the policy."""
        plan = Plan(rejected=self._rejected)
        self._rejected = []
        budget = self._schedule_running(plan, kv)
        if plan.exhausted is None and not plan.preempted:
            self._admit(plan, kv, budget)
        return plan

    def _schedule_running(self, plan: Plan, kv: KVPolicy) -> int:
        running, scheduled, decoding = self._running, plan.scheduled, plan.decoding
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(running) and budget > 0:
            s = running[index].sequence
            left = s.num_tokens - s.num_computed_tokens
            new = left if left < budget else budget
            while isinstance(refused := kv.reserve(s, new, others_running=len(running) > 1), Refused):
                if self.config.oom != "preempt":
                    plan.exhausted = (s, refused)
                    return 0
                victim = running.pop()
                self._preempt(plan, kv, victim)
                if victim.sequence is s:
                    return 0
            scheduled.append((s, new))
            if left == 1:
                decoding.append(s)
            budget -= new
            index += 1
        return budget

    def _admit(self, plan: Plan, kv: KVPolicy, budget: int) -> None:
        waiting, running = self._waiting, self._running
        while waiting and budget > 0 and len(running) < self.config.max_num_seqs:
            entry = waiting[0]
            s = entry.sequence
            hit = kv.lookup(s)
            new = min(s.num_tokens - hit, budget)
            answer = kv.reserve(s, new, hit=hit, admitting=True, others_running=bool(running))
            if isinstance(answer, Refused):
                if running:
                    return  # the head of the queue blocks it, as in vLLM
                waiting.popleft()
                del self._entries[s.id]
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

    def _preempt(self, plan: Plan, kv: KVPolicy, victim: _Entry) -> None:
        s = victim.sequence
        kv.release(s, Release.PREEMPT)
        self._running_tokens -= s.num_computed_tokens
        s.num_computed_tokens = 0
        plan.preempted.append(s)
        self._waiting.appendleft(victim)

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
        finished: list[Finished] = []
        for s, new in p.scheduled:
            computed = new + k - 1
            s.num_computed_tokens += computed
            self._running_tokens += computed
            if s.num_computed_tokens + 1 - k == s.num_tokens:
                s.num_tokens += k
                if s.num_tokens >= self._entries[s.id].final_tokens:
                    entry = self._entries.pop(s.id)
                    self._running_tokens -= s.num_computed_tokens
                    finished.append(Finished(entry.request, s, s.num_tokens - entry.request.prompt_tokens))
        if finished:
            ended = {f.sequence.id for f in finished}
            self._running = [e for e in self._running if e.sequence.id not in ended]
        return finished

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """Undo the plan: its admissions go back to the front of the queue, in their order."""
        kv.abort_step()
        for admitted in reversed(p.admitted):  # back to the front of the queue, in their order
            entry = self._running.pop()
            self._running_tokens -= admitted.sequence.num_computed_tokens
            admitted.sequence.num_computed_tokens = 0
            self._waiting.appendleft(entry)
        if how is Fail.PREEMPT and self._running:  # with nobody else to preempt, the owner cannot be served
            plan = Plan()
            victim = self._running.pop()
            self._preempt(plan, kv, victim)
            return Failed([], [(victim.request, victim.sequence)])
        entry = self._entries.pop(owner)
        if entry in self._running:
            self._running.remove(entry)
        else:
            self._waiting.remove(entry)
        self._running_tokens -= entry.sequence.num_computed_tokens
        kv.release(entry.sequence, Release.DROP)
        return Failed([(entry.request, entry.sequence)], [])

    def unfinished(self) -> Iterator[tuple[Request, KVSequence]]:
        """Running requests, then waiting ones, with their sequences."""
        for entry in (*self._running, *self._waiting):
            yield entry.request, entry.sequence
