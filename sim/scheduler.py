"""Schedulers: which sequences compute how many tokens in the next step.

The contract (:class:`Scheduler`), its records, and what the policies share. Only a scheduler writes the counts of a
:class:`~hbmtwin.allocators.records.KVSequence`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.decode_group import DecodeGroup
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
    """A request whose answer is complete; its memory is still held."""

    request: Request
    sequence: KVSequence
    output_tokens: int


class Unfinished(NamedTuple):
    """A request without an answer yet, and the output tokens that it has got so far."""

    request: Request
    sequence: KVSequence
    output_tokens: int


class Failed(NamedTuple):
    """Who gave way to a step that could not be carried out; undone admissions are in none of the lists."""

    rejected: list[Unfinished]
    """Their memory is given back."""
    preempted: list[Unfinished]
    """They wait again, and keep what they have generated."""
    finished: list[Finished]
    """Requests of a padded batch that waited for its longest; their memory is still held."""


class Plan:
    """One step: what is computed, in running order, and what changed on the way. Made at every step end."""

    __slots__ = (
        "admitted",
        "decoding",
        "discarded",
        "dropped",
        "exhausted",
        "forked",
        "group",
        "padding_tokens",
        "preempted",
        "rejected",
        "scheduled",
    )

    def __init__(self, rejected: list[tuple[Request, str]]) -> None:
        self.group: DecodeGroup | None = None
        """Those in front that compute exactly their last token, all of them together; never an empty one."""
        self.scheduled: list[tuple[KVSequence, int]] = []
        """Those behind the group, one by one."""
        self.decoding: list[KVSequence] = []
        """Those of ``scheduled`` that compute exactly their last token."""
        self.padding_tokens = 0
        """How many of the tokens that each step of the plan computes are padding."""
        self.forked: list[KVSequence] = []
        """Newcomers that share the prompt of one of ``scheduled``, and get their first token with it; they compute
        none."""
        self.admitted: list[Admitted] = []
        self.preempted: list[KVSequence] = []
        self.rejected = rejected
        self.discarded: Sequence[KVSequence] = ()
        """Those of ``scheduled`` that had ended before the step began, which was planned before: what it computes for
        them is thrown away."""
        self.dropped: list[KVSequence] = []
        """Those of the rejected that ran, or were swapped out."""
        self.exhausted: tuple[KVSequence, Refused] | None = None
        """A running sequence that cannot go on, and for which nobody was preempted; nothing else is to be computed."""

    @property
    def decodes(self) -> Sequence[KVSequence]:
        """All that compute exactly their last token, in running order; the same object as long as it is the same plan
        or group. O(1) unless there are such in the group and behind it."""
        if self.group is None:
            return self.decoding
        return [*self.group, *self.decoding] if self.decoding else self.group

    @property
    def tokens(self) -> int:
        """Tokens that a step computes. O(scheduled)."""
        new = sum([new for _, new in self.scheduled]) if self.scheduled else 0
        return new if self.group is None else new + len(self.group.members)

    def everyone(self) -> list[tuple[KVSequence, int]]:
        """All that compute in a step, with the number of their tokens, in running order. O(sequences)."""
        if self.group is None:
            return self.scheduled
        self.group.fold()
        return [*((s, 1) for s in self.group), *self.scheduled]


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
    state_block_size: int = 0
    """Of ``vllm``: above 0, chunks of a prompt end where :mod:`hbmtwin.sim.schedulers.aligned_chunks` says."""
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    """Of ``vllm_v0``: ``auto`` swaps out a prompt with several samples that run, and recomputes one with a single."""
    enable_chunked_prefill: bool = True
    """Of ``vllm``: without it a prompt that a step has no budget for waits for one that has."""
    long_prefill_token_threshold: int = 0
    """Of ``vllm``: the most tokens that a request computes in a step; 0: no such bound."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Of ``vllm``: who is admitted first, and who gives way."""
    async_scheduling: bool = False
    """Of ``vllm``: plan a step while the one before it is computed."""
    schedule_conservativeness: float = 1.0
    """Of ``sglang``: a factor on how much room is kept for what running requests may generate."""


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
        """Undo a plan that memory could not carry for its sequence *owner*, and say who gives way."""
        ...

    def unfinished(self) -> Iterator[Unfinished]:
        """Requests that are running or waiting."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """A scheduler that plans a step before it has the tokens of the one before. ``running_tokens`` then has the slots
    of what is planned; ``schedule`` is asked only where nothing is computed, ``commit`` behind ``schedule_ahead``."""

    @property
    def ending(self) -> bool:
        """Whether somebody ends with the step behind which the last plan was made."""
        ...

    def schedule_ahead(self, p: Plan, k: int, kv: KVPolicy, now_ns: int) -> Plan:
        """Plan the step behind *k* steps of *p*, with what was known as the last of these began, at *now_ns*; who ends
        with them still runs. Nothing may be scheduled in it. O(those that are not in the group + admitted)."""
        ...


_OURS = ("vllm", "guaranteed_no_evict", "max_utilization", "prefill_first", "sglang", "static_batch", "vllm_v0")
schedulers: Registry[Scheduler] = Registry(
    "hbmtwin.schedulers", "scheduler", lambda: [f"hbmtwin.sim.schedulers.{module}" for module in _OURS]
)


@dataclass(slots=True, eq=False)
class Entry:
    """A request in a scheduler's hands."""

    request: Request
    sequence: KVSequence
    final_tokens: int
    """Prompt and output: the truth, which only ``commit`` and ``steady_steps`` may look at."""
    padding: int = 0
    """Slots of padding that stand before its prompt, while it runs in a padded batch."""

    @property
    def held_tokens(self) -> int:
        """Tokens of its own whose KV is in memory, padding not counted."""
        held = self.sequence.num_computed_tokens
        if not self.padding and held <= self.final_tokens:
            return held
        return min(max(0, held - self.padding), self.final_tokens)

    @property
    def output_tokens(self) -> int:
        """What it has got so far, padding not counted."""
        tokens = self.sequence.num_tokens - self.padding
        return (tokens if tokens < self.final_tokens else self.final_tokens) - self.request.prompt_tokens


class QueueScheduler(ABC):
    """What schedulers over one queue share: their requests, the counts, and the end of a step that failed.

    A policy on top keeps the queue (:meth:`_enqueue` and its sisters) and plans and commits steps.
    """

    Config = SchedulerConfig

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._running: list[Entry] = []
        self._entries: dict[int, Entry] = {}
        self._rejected: list[tuple[Request, str]] = []
        self.running_tokens = 0
        """Computed tokens of running sequences, at the last commit. Only schedulers write these two."""
        self.padding_tokens = 0
        """Computed slots of running sequences that hold padding, at the last commit."""
        self._most_running = config.max_num_seqs
        """Fewer than ``max_num_seqs`` from a failed step until a sequence ends."""

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self._running)

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits, or is to be answered."""
        return bool(self._running or self.num_waiting or self._rejected)

    def add(self, r: Request, now_ns: int) -> None:
        """Queue a request, or note its rejection for the next plan."""
        id, session, turn, _, prompt, output, max_tokens, spans, _, _, sample, _ = r
        if prompt + max_tokens > self.config.max_model_len:
            self._rejected.append((r, "max_model_len"))
            return
        if output > max_tokens:
            output = max_tokens
        # The whole output stream stands in the spans from the start; policies cut them at num_tokens.
        spans = (*spans, (output_stream(session, turn, sample), 0, output))
        sequence = KVSequence(id, session, turn, prompt, prompt + max_tokens, sample, 0, spans)
        entry = self._entries[id] = Entry(r, sequence, prompt + output)
        self._enqueue(entry)

    def unfinished(self) -> Iterator[Unfinished]:
        """Running requests, then waiting ones."""
        for entry in (*self._running, *self._queued()):
            yield Unfinished(entry.request, entry.sequence, entry.output_tokens)

    @abstractmethod
    def _enqueue(self, entry: Entry) -> None:
        """Put a new request behind all others."""

    @abstractmethod
    def _requeue(self, entry: Entry) -> None:
        """Put a request that ran before all others."""

    @abstractmethod
    def _queued(self) -> Iterable[Entry]:
        """Waiting requests, first one first."""

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _finish(self, ended: Sequence[Entry]) -> list[Finished]:
        """Take those that ended out of the running ones; whoever waits may come again. O(running)."""
        if not ended:
            return []
        finished: list[Finished] = []
        for entry in ended:
            self._uncount(entry)
            del self._entries[entry.sequence.id]
            finished.append(Finished(entry.request, entry.sequence, entry.output_tokens))
        if self._running:
            gone = {entry.sequence.id for entry in ended}
            self._running = [e for e in self._running if e.sequence.id not in gone]
        self._most_running = self.config.max_num_seqs
        return finished

    def _back_to_queue(self, entry: Entry) -> None:
        """One that is not among the running ones any more waits again, and will be computed anew."""
        self._uncount(entry)
        entry.sequence.num_computed_tokens = 0
        self._requeue(entry)

    def _victim(self) -> int:
        """Who gives way next, as a place among the running ones: the last admitted. A policy on top may choose."""
        return -1

    def _preempt(self, kv: KVPolicy) -> Entry:
        """Preempt the :meth:`_victim`."""
        victim = self._running.pop(self._victim())
        kv.release(victim.sequence, Release.PREEMPT)
        victim.sequence.lost_tokens = victim.held_tokens
        self._back_to_queue(victim)
        return victim

    def _uncount(self, entry: Entry) -> None:
        tokens = entry.held_tokens
        self.running_tokens -= tokens
        self.padding_tokens -= entry.sequence.num_computed_tokens - tokens

    # -- a step that failed ------------------------------------------------------------------------------------------

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """Undo the plan, and let somebody give way: newcomers first. O(running).

        Sequences admitted in this step, if others had a part in it, wait again in their order, and that is all.
        Else the *owner* is rejected, or the last admitted preempted; one that is alone can never run: it is rejected.

        Contiguous policies grant every admission: who was undone would come again and fail again. So until a sequence
        has ended nobody is admitted beside those that run; where nobody runs, nine tenths of the newcomers come again,
        one less at least (the factor of ``find_executable_batch_size`` in accelerate, which halved in early releases).
        """
        kv.abort_step()
        newcomers, running = len(p.admitted), self._running
        if newcomers and len(running) > 1:
            for _ in range(newcomers):
                self._back_to_queue(running.pop())
            self._most_running = len(running) or newcomers * 9 // 10
            return Failed([], [], [])
        if how is Fail.PREEMPT and len(running) > 1:
            victim = self._preempt(kv)
            self._most_running = len(running)
            return Failed([], [Unfinished(victim.request, victim.sequence, victim.output_tokens)], [])
        entry = self._entries[owner]
        request, sequence, output_tokens = self._finish([entry])[0]
        kv.release(sequence, Release.DROP)
        return Failed([Unfinished(request, sequence, output_tokens)], [], [])
