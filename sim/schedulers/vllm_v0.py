"""The scheduler of vLLM's old engine (v0), without chunked prefill: prompts first, and a step of prompts alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.paged_v0 import AllocStatus, PagedV0Policy
from hbmtwin.allocators.records import Granted, KVSequence, Refused, Release
from hbmtwin.sim.scheduler import Admitted, Entry, Finished, Plan, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler


@schedulers.register("vllm_v0")
class VllmV0Scheduler(VllmScheduler):
    """Prompts before decodes and never with them, swapped requests before new ones: vLLM before its v1 engine.

    A step is, in v0's order (``core/scheduler.py`` without chunked prefill, read and not run):

    1. unless somebody is swapped out, whole prompts from the head of the queue, within ``max_num_batched_tokens`` and
       ``max_num_seqs``, until one does not fit; if there is one, the step is over;
    2. a token of everyone who runs, from the front; on shortage those at the back give way, at last the one itself;
    3. if nobody gave way, those who are swapped out come back, first out first in, and compute a token.

    Samples of one prompt (same session and turn, queued one after the other) go through all this together: the first
    computes the prompt, the others are its forks. Who gives way is computed anew, at the front of the queue, or swapped
    out where several samples run (``preemption_mode``).

    Rejected are prompts over the token budget (``max_num_batched_tokens``), more samples than ``max_num_seqs``, what
    can never fit beside the watermark (``kv_capacity``), and what should be swapped out when the host has no room for
    it (``swap_space``): v0's engine ends there with an error about the lack of CPU swap space.

    It needs the policy ``paged_v0``, whose words it speaks, and raises TypeError for another; ValueError for samples
    with ``preemption_mode = "recompute"``, where v0 stops at an assertion.
    """

    name: ClassVar[str] = "vllm_v0"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, scheduling_policy="fcfs"))
        self._swapped: deque[Entry] = deque()
        self._queue_may_go_on = False
        """Whether the last plan emptied the swapped queue or freed blocks: the next may begin with prompts."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones and those swapped out included."""
        return len(self._waiting) + len(self._swapped)

    def _enqueue(self, entry: Entry) -> None:
        if entry.sequence.sample and self.config.preemption_mode == "recompute":
            raise ValueError("v0 recomputes single sequences only: preempt samples by swapping, or automatically")
        super()._enqueue(entry)

    def _queued(self) -> Iterable[Entry]:
        return chain(self._swapped, self._waiting)

    def schedule(self, kv: KVPolicy) -> Plan:
        """Prompts, or a token of everyone. O(running + admitted) calls of the policy."""
        if not isinstance(kv, PagedV0Policy):
            raise TypeError(f"the scheduler vllm_v0 needs the policy paged_v0, not {type(kv).__name__}")
        plan = Plan(self._rejected)
        self._rejected = []
        self._queue_may_go_on = False
        if not self._swapped:
            self._admit_prompts(plan, kv)
        if not plan.admitted and self._decode(plan, kv):
            self._swap_in(plan, kv)
        return plan

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _admit_prompts(self, plan: Plan, kv: PagedV0Policy) -> None:
        config, running = self.config, self._running
        budget = config.max_num_batched_tokens
        while self._waiting:
            samples = _samples(self._waiting)
            s = samples[0].sequence
            why = ""
            if s.num_tokens > config.max_num_batched_tokens:
                why = "max_num_batched_tokens"
            elif len(samples) > config.max_num_seqs:
                why = "max_num_seqs"
            elif (status := kv.can_allocate(s)) is AllocStatus.LATER:
                return
            elif status is AllocStatus.NEVER:
                why = "kv_capacity"
            if why:
                self._reject(plan, kv, _take(self._waiting, samples), why)
                continue
            hit = kv.lookup(s)
            new = s.num_tokens - hit
            if new > budget or len(running) + len(samples) > config.max_num_seqs:
                return
            _granted(kv.reserve(s, new, hit=hit, admitting=True, others_running=bool(running)))
            plan.scheduled.append((s, new))
            if new == 1:
                plan.decoding.append(s)
            self._run(plan, samples[0], hit)
            for entry in samples[1:]:
                _granted(kv.fork(s, entry.sequence))
                plan.forked.append(entry.sequence)
                self._run(plan, entry, s.num_tokens)
            _take(self._waiting, samples)
            budget -= new

    def _run(self, plan: Plan, entry: Entry, hit: int) -> None:
        self._running.append(entry)
        entry.sequence.num_computed_tokens = hit
        self.running_tokens += hit
        plan.admitted.append(Admitted(entry.request, entry.sequence, hit))

    def _reject(self, plan: Plan, kv: PagedV0Policy, entries: Iterable[Entry], why: str) -> None:
        for entry in entries:
            del self._entries[entry.sequence.id]
            kv.release(entry.sequence, Release.DROP)
            plan.rejected.append((entry.request, why))

    # -- decodes -----------------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan, kv: PagedV0Policy) -> bool:
        """A token of everyone; False if somebody had to give way, or if the server is to stop there."""
        running, nobody_gave_way = self._running, True
        index = 0
        while index < len(running):
            samples = _samples(running, index)
            sequences = [entry.sequence for entry in samples]
            while (refused := self._append(plan, kv, sequences)) is not None:
                if self.config.oom != "preempt":
                    plan.exhausted = (sequences[0], refused)
                    return False
                nobody_gave_way = False
                if self._give_way(plan, kv) is samples[0]:
                    return False
            index += len(samples)
        return nobody_gave_way

    def _append(self, plan: Plan, kv: PagedV0Policy, sequences: Sequence[KVSequence]) -> Refused | None:
        """Room for a token of each sample, if there is room for all."""
        if len(sequences) > 1 and (refused := kv.append_refusal(sequences)) is not None:
            return refused
        for s in sequences:
            answer = kv.reserve(s, 1, others_running=len(self._running) > 1)
            if isinstance(answer, Refused):
                return answer
            plan.scheduled.append((s, 1))
            plan.decoding.append(s)
        return None

    def _give_way(self, plan: Plan, kv: PagedV0Policy) -> Entry:
        """Preempt the samples at the back of the running ones; return the first of them."""
        last = _key(self._running[-1])
        count = sum(1 for _ in takewhile(lambda entry: _key(entry) == last, reversed(self._running)))
        victims = self._running[-count:]
        del self._running[-count:]
        mode = self.config.preemption_mode
        if mode == "recompute" or (mode == "auto" and count == 1):
            for entry in reversed(victims):
                kv.release(entry.sequence, Release.PREEMPT)
                entry.sequence.lost_tokens = entry.held_tokens
                self._back_to_queue(entry)
        elif kv.can_swap_out([entry.sequence for entry in victims]):
            for entry in victims:
                _granted(kv.swap_out(entry.sequence))
                self._uncount(entry)
                self._swapped.append(entry)
        else:
            for entry in victims:
                self._uncount(entry)
            plan.dropped += [entry.sequence for entry in victims]
            self._reject(plan, kv, victims, "swap_space")
            self._queue_may_go_on = True
            return victims[0]
        plan.preempted += [entry.sequence for entry in victims]
        return victims[0]

    def _swap_in(self, plan: Plan, kv: PagedV0Policy) -> None:
        """Bring back who fits, first out first in, each with a token to compute."""
        config, running = self.config, self._running
        while self._swapped:
            samples = _samples(self._swapped)
            sequences = [entry.sequence for entry in samples]
            status = kv.can_swap_in(sequences)
            if status is AllocStatus.NEVER:
                plan.dropped += sequences
                self._reject(plan, kv, _take(self._swapped, samples), "kv_capacity")
                self._queue_may_go_on = True
                continue
            # Alone they come back even with more samples than the budget has tokens, or nobody ever would.
            over = len(running) + len(samples) > min(config.max_num_seqs, config.max_num_batched_tokens)
            if status is AllocStatus.LATER or (over and running):
                return
            for entry in _take(self._swapped, samples):
                _granted(kv.swap_in(entry.sequence))
                running.append(entry)
                self.running_tokens += entry.sequence.num_computed_tokens
            for s in sequences:
                _granted(kv.reserve(s, 1, admitting=True, others_running=True))
                plan.scheduled.append((s, 1))
                plan.decoding.append(s)
            self._queue_may_go_on = True

    # -- in leaps ----------------------------------------------------------------------------------------------------

    def steady_steps(self, p: Plan) -> int:
        """As with continuous batching; 0 with a prompt, and where the next step may begin with one."""
        return 0 if p.admitted or self._queue_may_go_on else super().steady_steps(p)

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Count *k* steps; forks get the first token of the prompt that they share. O(scheduled)."""
        finished = super().commit(p, k)
        for s in p.forked:
            s.num_tokens += 1
        ended = [e for s in p.forked if s.num_tokens >= (e := self._entries[s.id]).final_tokens]
        return finished + self._finish(ended)


def _granted(answer: Granted | Refused) -> None:
    """Raise RuntimeError if the policy refuses what it said would fit."""
    if isinstance(answer, Refused):
        raise RuntimeError(f"paged_v0 broke its word: {answer.reason}")


def _key(entry: Entry) -> tuple[int, int]:
    return entry.request.session, entry.request.turn


def _samples(entries: Sequence[Entry], start: int = 0) -> list[Entry]:
    """The entry at *start* and those behind it that answer the same prompt."""
    first = _key(entries[start])
    samples = [entries[start]]
    for index in range(start + 1, len(entries)):
        if _key(entries[index]) != first:
            break
        samples.append(entries[index])
    return samples


def _take(entries: deque[Entry], samples: Sequence[Entry]) -> list[Entry]:
    """Take samples off the front of a queue."""
    return [entries.popleft() for _ in samples]
