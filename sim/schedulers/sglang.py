"""SGLang's scheduler: a step of prefills if any can be admitted, else of decodes; room is promised by an estimate.

::

    slots of the pool   | running sequences | free, or in the tree and evictable: available                    |
    promised of them    ratio x what each running one may still generate, at most 4096 tokens
                        + a page, and 4096 tokens or max_new, for each one admitted in this step

    a step              1 the prompt that is half-way, and whole prompts from the queue's head while
                          its tokens + min(max_new left, 4096) + a page < available - promised,
                          cut at whole pages where max_num_batched_tokens (chunked_prefill_size) ends
                        2 if there are none, a token of everyone else; who has no room is retracted

    new_token_ratio     init --(init - min) / 600 a decode step--> min; idle: init again; after a retraction as much
                        as those that stay have generated of what they may, 20 tokens more each

Who is retracted: the one with the fewest generated tokens, among equals the longest prompt, to the END of the queue.
The rules are those of ``schedule_policy.py``, ``schedule_batch.py`` and ``scheduler.py`` of SGLang 0.5.23, read and not
run. Of the policies that order the queue there is fcfs. ``max_prefill_tokens`` is left out: with chunks, the chunk's
size bounds a step. What SGLang does for ``ignore_eos`` without a tree is left out as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.radix import RadixPolicy
from hbmtwin.allocators.records import Refused, Release
from hbmtwin.sim.scheduler import Admitted, Entry, Fail, Failed, Finished, Plan, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler

CLIP_MAX_NEW_TOKENS = 4096
"""More than this nobody is expected to generate: ``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``."""
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """The share of what running requests may still generate that is kept free for them.

    The decode steps since the last change are counted, not subtracted one by one: a leap of k leaves what k steps do.
    """

    def __init__(self, conservativeness: float) -> None:
        self.init = min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0)
        self.min = min(MIN_NEW_TOKEN_RATIO_FACTOR * self.init, 1.0)
        self._decay = (self.init - self.min) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.reset(self.init)

    @property
    def value(self) -> float:
        """The ratio now."""
        return max(self._base - self._decay * self._steps, self.min) if self._steps else self._base

    def reset(self, value: float) -> None:
        """Start from *value* again."""
        self._base, self._steps = value, 0

    def fall(self, steps: int) -> None:
        """Count decode steps without a retraction."""
        self._steps += steps


@schedulers.register("sglang")
class SglangScheduler(VllmScheduler):
    """Prefills before decodes, admitted by an estimate of what running ones still need, who is short is retracted.

    It needs the policy ``radix``, with or without its tree, and raises TypeError for another. A request whose tokens,
    expected ones included, can never be available is rejected at the head of the queue (``kv_capacity``; SGLang
    shortens its ``max_new_tokens`` when it arrives), and so is the last one running if it alone has no room, as SGLang
    aborts it.
    """

    name: ClassVar[str] = "sglang"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, scheduling_policy="fcfs"))
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self._chunked: Entry | None = None
        """The only one that is half-way through its prompt."""
        self._full = False
        """Nobody is admitted until somebody ends or is retracted: SGLang's ``batch_is_full``."""
        self._decodes = False
        """Whether the last plan is a batch of decodes."""

    def schedule(self, kv: KVPolicy) -> Plan:
        """Prompts, or a token of everyone. O(running + admitted), with a retraction O(running * log(running))."""
        if not isinstance(kv, RadixPolicy):
            raise TypeError(f"the scheduler sglang needs the policy radix, not {type(kv).__name__}")
        plan = Plan(self._rejected)
        self._rejected = []
        self._prefill(plan, kv)
        self._decodes = not plan.scheduled
        if self._decodes:
            self._decode(plan, kv)
        self._note_idle()
        return plan

    # -- prefills ----------------------------------------------------------------------------------------------------

    def _prefill(self, plan: Plan, kv: RadixPolicy) -> None:
        page, waiting, running = kv.config.block_size, self._waiting, self._running
        budget = self.config.max_num_batched_tokens // page * page
        if self._chunked is None and (self._full or not waiting or len(running) >= self._most_running):
            return
        promised = self._promised()
        if self._chunked is not None:
            s = self._chunked.sequence
            left = s.num_tokens - s.num_computed_tokens
            new = min(left, budget)
            self._compute(plan, kv, self._chunked, new, 0)
            budget -= -(-new // page) * page
            promised += page + (_clipped(self._chunked.request.max_tokens) if new == left else 0)
        while waiting and budget > 0 and not self._full and len(running) < self._most_running:
            entry = waiting[0]
            s = entry.sequence
            hit = kv.lookup(s)
            new = s.num_tokens - hit
            expected = _clipped(_max_new_left(entry))
            if new + expected + page >= kv.available_tokens(s, hit) - promised:
                if running and s.num_tokens + expected + page < (kv.config.num_blocks - 1) * page:
                    self._full = True
                    return
                self._reject_head(plan, kv, "kv_capacity")
                continue
            reserved = _clipped(entry.request.max_tokens)
            if new > budget:
                new, reserved, self._chunked = budget, 0, entry
            self._compute(plan, kv, entry, new, hit)
            waiting.popleft()
            running.append(entry)
            s.num_computed_tokens = hit
            self.running_tokens += hit
            plan.admitted.append(Admitted(entry.request, s, hit))
            budget -= -(-new // page) * page
            promised += page + reserved
            self._full = kv.available_tokens() <= promised

    def _promised(self) -> float:
        """Slots that running requests are expected to need, the one that is half-way through its prompt left out."""
        left = (_clipped(_max_new_left(e)) for e in self._running if e is not self._chunked)
        return sum(left) * self.new_token_ratio.value

    def _compute(self, plan: Plan, kv: RadixPolicy, entry: Entry, new: int, hit: int) -> None:
        """Take the pages of tokens whose room has been looked at; raise RuntimeError if there is none."""
        s = entry.sequence
        answer = kv.reserve(s, new, hit=hit, admitting=not s.num_computed_tokens, others_running=bool(self._running))
        if isinstance(answer, Refused):
            raise RuntimeError(f"radix broke its word: {answer.reason}")
        plan.scheduled.append((s, new))
        if s.num_tokens - s.num_computed_tokens - hit == 1:
            plan.decoding.append(s)

    # -- decodes -----------------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan, kv: RadixPolicy) -> None:
        running = self._running
        if self.config.oom == "preempt" and _needed(running, kv) > kv.available_tokens():
            self._retract(plan, kv)
        for entry in running:
            s = entry.sequence
            if isinstance(refused := kv.reserve(s, 1, others_running=len(running) > 1), Refused):
                plan.exhausted = (s, refused)
                return
            plan.scheduled.append((s, 1))
            plan.decoding.append(s)

    def _retract(self, plan: Plan, kv: RadixPolicy) -> None:
        """Send back at least one, and as many as the next step is short of; the last one is aborted if it must go."""
        # Of those that are alike the last admitted goes first: sorting keeps their order, also in reverse.
        staying = sorted(self._running, key=lambda e: (e.output_tokens, -e.request.prompt_tokens), reverse=True)
        while len(staying) > 1 and (not plan.preempted or _needed(staying, kv) > kv.available_tokens()):
            victim = staying.pop()
            self._running.remove(victim)
            kv.release(victim.sequence, Release.PREEMPT)
            victim.sequence.lost_tokens = victim.held_tokens
            self._uncount(victim)
            victim.sequence.num_computed_tokens = 0
            self._waiting.append(victim)
            plan.preempted.append(victim.sequence)
        if _needed(staying, kv) > kv.available_tokens():
            last = self._running.pop()
            kv.release(last.sequence, Release.DROP)
            self._uncount(last)
            del self._entries[last.sequence.id]
            plan.rejected.append((last.request, "kv_capacity"))
            plan.dropped.append(last.sequence)
            return
        generated = sum(e.output_tokens for e in staying) + RETRACT_DECODE_STEPS * len(staying)
        self.new_token_ratio.reset(min(1.0, generated / (sum(e.request.max_tokens for e in staying) + 1)))

    # -- in leaps ----------------------------------------------------------------------------------------------------

    def steady_steps(self, p: Plan) -> int:
        """As with continuous batching; 0 with a prompt.

        The ratio falls meanwhile, and nobody sees it: after a step of decodes the queue is empty, or waits until
        somebody ends.
        """
        return super().steady_steps(p) if self._decodes else 0

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """Count *k* steps, of decodes in the ratio, too. O(scheduled)."""
        if self._decodes and not p.preempted:
            self.new_token_ratio.fall(k)
        half_way = self._chunked
        if half_way is not None and any(
            s is half_way.sequence and s.num_computed_tokens + new == s.num_tokens for s, new in p.scheduled
        ):
            self._chunked = None
        finished = super().commit(p, k)
        self._note_idle()
        return finished

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        """As any scheduler over a queue: SGLang holds the memory of activations from the start. O(running)."""
        failed = super().fail(p, kv, owner, how)
        self._note_idle()
        return failed

    def _uncount(self, entry: Entry) -> None:
        super()._uncount(entry)
        self._full = False
        if entry is self._chunked:
            self._chunked = None

    def _note_idle(self) -> None:
        if not self._running and not self._waiting:
            self.new_token_ratio.reset(self.new_token_ratio.init)


def _clipped(tokens: int) -> int:
    return min(tokens, CLIP_MAX_NEW_TOKENS)


def _max_new_left(entry: Entry) -> int:
    """What it may still generate."""
    return entry.request.max_tokens - entry.output_tokens


def _needed(entries: Sequence[Entry], kv: RadixPolicy) -> int:
    """Slots of the pages that a token of each takes."""
    page = kv.config.block_size
    return page * sum(entry.sequence.num_computed_tokens % page == 0 for entry in entries)
