"""Static batches: requests start together, and the next ones wait until the last of them has ended.

How naive serving code batches (Hugging Face ``generate``, early FasterTransformer). ``batching`` says who shares a
batch, and whether everyone is padded to its longest::

    padded    A |....... prompt|answer|pppppppp|   . pads before a shorter prompt, p pads behind a shorter answer:
              B |longest prompt|long answer    |   slots in memory, and computed, until the batch ends;
              C |.. some prompt|an answer|ppppp|   the call returns then, with all answers

    sorted    as padded; the queue by prompt length
    buckets   as padded; only prompts of one bucket of ``bucket_tokens``, that of the oldest waiting request
    variable  A |prompt|answer|                    kernels that take sequences of any length (cu_seqlens):
              B |longest prompt|long answer|       no pads, and who ends leaves; still nobody joins

The whole batch is prefilled in one step: ``max_num_batched_tokens`` does not concern it.

Complexity: a batch is cut in O(batch * log(queue)), a step planned and committed in O(batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import Refused, Release
from hbmtwin.sim.scheduler import (
    Admitted,
    Entry,
    Fail,
    Failed,
    Finished,
    Plan,
    QueueScheduler,
    SchedulerConfig,
    schedulers,
)

_Place = tuple[int, int, Entry]
"""Length where the queue is sorted by it, else 0; number in the queue; who waits there."""


@schedulers.register("static_batch")
class StaticBatchScheduler(QueueScheduler):
    """One batch at a time, padded to its longest or not; the next one waits until its last sequence has ended.

    A batch is cut from the queue's front when nothing runs: at most ``max_num_seqs`` requests, as many as memory is
    granted for, none with which padded prompts and the longest allowed answer would pass ``max_model_len``. One that is
    refused alone is rejected: it could never run.

    A padded sequence's ``num_tokens`` and ``max_tokens`` count its pads, before the prompt and after the end: to a KV
    policy they are tokens like others, and ``padding_tokens`` says how many they are. They are no history: nothing is
    looked up for a padded sequence, and nothing of it may be parked.

    A sequence that has all its tokens computes the last of them in the step after, and then pads, as Hugging Face
    does. Where the server may preempt, complete answers leave a padded batch before anybody is preempted; where the
    last incomplete one was rejected, the batch is over.
    """

    name: ClassVar[str] = "static_batch"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._padded = config.batching != "variable"
        self._buckets: dict[int, list[_Place]] = {}
        """Heaps of those who wait; one for all where there are no buckets."""
        self._num_waiting = 0
        self._last_place = 0
        self._first_place = 0

    # -- the queue ---------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return self._num_waiting

    def _enqueue(self, entry: Entry) -> None:
        self._last_place += 1
        self._wait(entry, self._last_place)

    def _requeue(self, entry: Entry) -> None:
        self._first_place -= 1
        self._wait(entry, self._first_place)

    def _queued(self) -> Iterable[Entry]:
        return (entry for _, _, entry in sorted(chain.from_iterable(self._buckets.values())))

    def _wait(self, entry: Entry, place: int) -> None:
        """Put one in its heap, by its own tokens without pads: of a preempted one, those generated are to come."""
        s = entry.sequence
        s.num_tokens = entry.request.prompt_tokens + entry.output_tokens
        s.max_tokens = entry.request.prompt_tokens + entry.request.max_tokens
        entry.padding = 0
        batching = self.config.batching
        bucket = (s.num_tokens - 1) // self.config.bucket_tokens if batching == "buckets" else 0
        length = s.num_tokens if batching == "sorted" else 0
        heappush(self._buckets.setdefault(bucket, []), (length, place, entry))
        self._num_waiting += 1

    def _cut(self, most: int) -> list[Entry]:
        """Take at most *most* requests out of the queue, the next batch; empty if nobody waits."""
        batch: list[Entry] = []
        if not self._buckets:
            return batch
        bucket, places = min(self._buckets.items(), key=lambda item: item[1][0][:2])
        longest = further = 0
        while places and len(batch) < most:
            s = places[0][2].sequence
            longest = max(longest, s.num_tokens)
            further = max(further, s.max_tokens - s.num_tokens)
            if self._padded and longest + further > self.config.max_model_len:
                break
            batch.append(heappop(places)[2])
        if not places:
            del self._buckets[bucket]
        self._num_waiting -= len(batch)
        return batch

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, kv: KVPolicy) -> Plan:
        """One more token of everyone in the batch, pads included, or the prompts of a new batch. O(batch) calls."""
        plan = Plan(self._rejected)
        self._rejected = []
        if self._running:
            self._go_on(plan, kv)
        else:
            self._begin(plan, kv)
        return plan

    def _go_on(self, plan: Plan, kv: KVPolicy) -> None:
        others = len(self._running) > 1
        for entry in self._running:
            s = entry.sequence
            if isinstance(refused := kv.reserve(s, 1, others_running=others), Refused):
                plan.exhausted = (s, refused)
                return
            plan.scheduled.append((s, 1))
            plan.decoding.append(s)
            plan.padding_tokens += _own_tokens_left(entry) <= 0

    def _begin(self, plan: Plan, kv: KVPolicy) -> None:
        most = self._most_running
        while batch := self._cut(most):
            if self._padded:
                _pad(batch)
            hits = self._reserve(batch, kv)
            if len(hits) == len(batch):
                self._admit(batch, hits, plan)
                return
            kv.abort_step()
            if len(batch) == 1:
                del self._entries[batch[0].sequence.id]
                kv.release(batch[0].sequence, Release.DROP)  # it holds nothing, but was looked up
                plan.rejected.append((batch[0].request, "kv_capacity"))
                most = self._most_running
                continue
            for entry in reversed(batch):
                self._requeue(entry)
            # Asked anew: the first that were granted, or more that are less long without the one that pads them all.
            most = max(1, len(hits), _shorter(batch) if self._padded else 0)

    def _reserve(self, batch: Sequence[Entry], kv: KVPolicy) -> list[int]:
        """Ask for the whole prompts; return what each finds in memory, up to the first that is refused."""
        hits: list[int] = []
        for entry in batch:
            s = entry.sequence
            hit = 0 if self._padded else kv.lookup(s)
            answer = kv.reserve(s, s.num_tokens - hit, hit=hit, admitting=True, others_running=bool(hits))
            if isinstance(answer, Refused):
                break
            hits.append(hit)
        return hits

    def _admit(self, batch: Sequence[Entry], hits: Sequence[int], plan: Plan) -> None:
        self._running += batch
        for entry, hit in zip(batch, hits, strict=True):
            s = entry.sequence
            s.num_computed_tokens = hit
            self.running_tokens += hit
            plan.admitted.append(Admitted(entry.request, s, hit))
            plan.scheduled.append((s, s.num_tokens - hit))
            plan.padding_tokens += entry.padding
            if s.num_tokens - hit == 1:
                plan.decoding.append(s)

    def steady_steps(self, p: Plan) -> int:
        """Steps until the batch, or one of a ``variable`` one, ends, or one more computes pads; 0 with prompts."""
        if p.admitted or not p.scheduled:
            return 0
        left = [_own_tokens_left(entry) for entry in self._running]
        last = (max(left) if self._padded else min(left)) - 1  # nobody computes what was sampled last
        return min(last, *(tokens for tokens in left if tokens > 0)) - 1

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Count *k* steps; return the whole batch at its end (``variable``: those that ended). O(batch)."""
        computed = sum(new for _, new in p.scheduled) + (k - 1) * len(p.scheduled)
        padding = k * p.padding_tokens
        self.running_tokens += computed - padding
        self.padding_tokens += padding
        for s, new in p.scheduled:
            s.num_computed_tokens += new + k - 1
            s.num_tokens += k
        ended = self._ended()
        return self._finish(ended) if ended and not self._waits_for_others(ended) else []

    def _ended(self) -> list[Entry]:
        """Those that have all their tokens."""
        return [entry for entry in self._running if _own_tokens_left(entry) <= 1]

    def _waits_for_others(self, ended: Sequence[Entry]) -> bool:
        return self._padded and len(ended) < len(self._running)

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """As any scheduler over a queue; but complete answers that wait for a padded batch leave first. O(batch)."""
        if how is Fail.PREEMPT and (ended := self._ended()):
            kv.abort_step()
            return Failed([], [], self._finish(ended))
        failed = super().fail(p, kv, owner, how)
        ended = self._ended()
        return failed if self._waits_for_others(ended) else failed._replace(finished=self._finish(ended))


def _own_tokens_left(entry: Entry) -> int:
    """How many tokens of its own it has not computed yet, the last one included, which only a padded batch computes."""
    return entry.padding + entry.final_tokens - entry.sequence.num_computed_tokens


def _pad(batch: Sequence[Entry]) -> None:
    """Bring all to the length of the longest prompt, and to the longest answer that is allowed."""
    sequences = [entry.sequence for entry in batch]
    longest = max(s.num_tokens for s in sequences)
    further = max(s.max_tokens - s.num_tokens for s in sequences)
    for entry, s in zip(batch, sequences, strict=True):
        entry.padding = longest - s.num_tokens
        s.num_tokens = longest
        s.max_tokens = longest + further


def _shorter(batch: Sequence[Entry]) -> int:
    """How many of the first are less long together, once padded, than the whole batch."""
    longest = further = 0
    lengths = []
    for entry in batch:
        s = entry.sequence
        longest, further = max(longest, s.num_tokens), max(further, s.max_tokens - s.num_tokens)
        lengths.append(longest + further)
    return lengths.index(lengths[-1])
