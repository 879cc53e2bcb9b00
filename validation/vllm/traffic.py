"""One random traffic for two block managers that must agree.

::

    waiting  |  p7 p8 ...   prompts are new, or repeat, extend or cut what was told before, often by whole blocks
    running  |  p3 p5 p6    a step: chunks, decodes (some with drafts), preemptions from the end, then admissions

Tokens are a fixed function of stream and position, so that equal spans are equal tokens where a side hashes those.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hbmtwin.allocators.records import KVSequence, Release, Span
from hbmtwin.sim.schedulers.aligned_chunks import aligned_chunk
from hbmtwin.validation.vllm.comparison import Asked, Comparison, Differs, Found
from hbmtwin.validation.vllm.sides import Pool

STREAM_TOKENS = 1_000_000
"""Token ids of one stream: position + this many times the stream."""
CONCURRENT = 24
"""Sequences that run at once, at most."""


def token_ids(spans: Sequence[Span]) -> list[int]:
    """Equal pieces of a stream give equal tokens, different ones give different tokens."""
    return [
        int(stream) * STREAM_TOKENS + place for stream, start, length in spans for place in range(start, start + length)
    ]


def cut(spans: Sequence[Span], tokens: int) -> list[Span]:
    """The spans of the first *tokens*."""
    kept: list[Span] = []
    for stream, start, length in spans:
        taken = min(length, tokens)
        if taken:
            kept.append((stream, start, taken))
        tokens -= taken
    return kept


def spans_tokens(spans: Sequence[Span]) -> int:
    """Tokens of all of them."""
    return sum(length for _, _, length in spans)


@dataclass(slots=True)
class Traffic:
    """Random traffic on one pool."""

    both: Comparison
    seed: int
    random: random.Random = field(init=False)
    pool: Pool = field(init=False)
    waiting: list[Asked] = field(default_factory=list)
    told: list[list[Span]] = field(default_factory=list)
    """Spans of prompts and of whole sequences that later ones repeat and extend."""
    streams: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool = self.both.pool

    # -- who comes -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A new one: fresh, or a repeat, an extension or a part of what was told before, often of exact blocks."""
        choose, size, longest = self.random, self.pool.unit, self.pool.max_model_len
        spans: list[Span] = []
        kind = choose.choice(["fresh", "repeat", "repeat", "extend", "extend", "part"]) if self.told else "fresh"
        if kind != "fresh":
            spans = list(choose.choice(self.told[-12:]))
            if kind == "part":
                whole = choose.randint(1, max(1, spans_tokens(spans) // size)) * size
                spans = cut(spans, whole + choose.choice([-1, 0, 0, 1]))
        spans = cut(spans, longest - 1)
        if kind in ("fresh", "extend") or not spans:
            room = longest - 1 - spans_tokens(spans)
            more = choose.choice([choose.randint(1, 6) * size, choose.randint(1, max(1, longest // 3))])
            if min(more, room) > 0:
                self.streams += 1
                spans.append((self.streams, choose.randint(0, 5), min(more, room)))
        prompt = spans_tokens(spans)
        self.told.append(list(spans))
        # The same prompt often gets the same answer: then two tables carry the same keys beyond it.
        output = 0 if choose.random() < 0.5 else self.names + 1
        answer: Span = (500_000 + output, prompt, longest - prompt)
        self.names += 1
        s = KVSequence(
            id=self.names,
            session=self.names,
            turn=0,
            num_tokens=prompt,
            max_tokens=longest,
            spans=(*self.split(spans), answer),
        )
        outputs = [1, size, choose.randint(1, 6 * size), choose.randint(1, longest)]
        asked = Asked(s, prompt, min(longest, prompt + choose.choice(outputs)))
        tokens = token_ids([*spans, answer])
        self.both.ours.arrive(s, tokens)
        self.both.theirs.arrive(s, tokens)
        self.waiting.append(asked)

    def split(self, spans: Sequence[Span]) -> list[Span]:
        """The same tokens in other pieces, sometimes."""
        pieces: list[Span] = []
        for stream, start, length in spans:
            at = self.random.randint(1, length) if self.random.random() < 0.3 else length
            pieces += [(stream, start, at), (stream, start + at, length - at)] if at < length else [(stream, start, at)]
        return pieces

    # -- what a step does --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step as the scheduler would make it, with chunks, drafts and pauses by chance."""
        both, choose = self.both, self.random
        both.start_step()
        scheduled, preempted = self.grow()
        while self.waiting and not preempted and len(both.running) < CONCURRENT:
            asked = self.waiting[0]
            tokens = self.admit(asked, choose.choice([1 << 30, choose.randint(1, 5 * self.pool.unit)]))
            if not tokens:
                if not both.running or choose.random() < 0.2:
                    both.release(self.waiting.pop(0), Release.DROP)  # its client went away
                break
            both.running.append(self.waiting.pop(0))
            scheduled.append((asked, tokens, 0))
        both.end_step()
        for asked, new, drafts in scheduled:
            more = asked.length - asked.s.num_tokens
            if asked.s.num_computed_tokens + new < asked.s.num_tokens:
                both.compute(asked.s, new, 0)
            elif more > 0:
                accepted = choose.randint(0, min(drafts, more - 1))
                both.compute(asked.s, new + accepted, 1 + accepted)
            else:
                self.finish(asked)
        for asked in list(both.running):
            if choose.random() < 0.01:
                self.finish(asked)

    def grow(self) -> tuple[list[tuple[Asked, int, int]], bool]:
        """Those that run get room in their order; while one is refused, the last one is preempted.

        (sequence, tokens, drafts) of those that got it, and whether one was preempted.
        """
        both, choose = self.both, self.random
        scheduled: list[tuple[Asked, int, int]] = []
        preempted = False
        for asked in list(both.running):
            if asked not in both.running or choose.random() < 0.1:
                continue
            left = asked.s.num_tokens - asked.s.num_computed_tokens
            new = self.chunk(asked, 0, min(left, choose.choice([left, choose.randint(1, 3 * self.pool.unit)])))
            if not new:
                continue
            drafts = self.drafts(asked)
            while not (granted := both.reserve(asked, new + drafts)):
                victim = both.running[-1]
                scheduled = [entry for entry in scheduled if entry[0] is not victim]
                both.preempt(victim)
                self.waiting.insert(0, victim)
                preempted = True
                if victim is asked:
                    return scheduled, True
            if granted:
                scheduled.append((asked, new, drafts))
        return scheduled, preempted

    def admit(self, asked: Asked, budget: int) -> int:
        """Look up and admit; the tokens scheduled, hits included, or 0 if it has to wait."""
        hit = self.both.look_up(asked)
        new = self.chunk(asked, hit, min(asked.s.num_tokens - hit, budget))
        return hit + new if new and self.both.reserve(asked, new, hit, admitting=True) else 0

    def chunk(self, asked: Asked, hit: int, new: int) -> int:
        """How much of *new* is computed at once: Mamba wants whole blocks, and mostly gets them.

        Chunks do not end at shared boundaries here: wherever they end, both sides must agree.
        """
        new = min(new, self.pool.max_num_batched_tokens)
        if not self.pool.aligned_block or self.random.random() < 0.1:
            return new
        aligned = aligned_chunk(
            asked.s.num_computed_tokens + hit,
            new,
            num_tokens=asked.s.num_tokens,
            prompt_tokens=asked.prompt,
            block_size=self.pool.aligned_block,
            max_num_batched_tokens=self.pool.max_num_batched_tokens,
        )
        self.both.met["no whole block in a chunk"] += not aligned
        return aligned

    def drafts(self, asked: Asked) -> int:
        """Draft tokens of its next step, as many as fit its longest length."""
        if not (self.pool.drafts and asked.decodes):
            return 0
        return min(self.random.randint(0, self.pool.drafts), self.pool.max_model_len - asked.s.num_tokens)

    def finish(self, asked: Asked) -> None:
        """It ends, and may be repeated or extended later."""
        self.told.append(cut(asked.s.spans, asked.s.num_tokens))
        self.both.finish(asked)

    # -- all of it ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Arrivals, then a step or a leap, and now and then a flush or a check."""
        both, choose, pool = self.both, self.random, self.pool
        for _ in range(choose.choice([0, 0, 1, 1, 2])):
            if len(self.waiting) < 12:
                self.arrive()
        running = both.running
        limit = min((asked.length - asked.s.num_tokens for asked in running if asked.decodes), default=0)
        single = pool.lookahead or pool.drafts
        if limit and not single and all(asked.decodes for asked in running) and choose.random() < 0.3:
            both.leap(limit)
        else:
            self.step()
        if pool.caching and choose.random() < 0.002:
            both.reset()
        if choose.random() < 0.002:
            for asked in choose.sample(running, len(running)):
                self.finish(asked)
            if pool.caching and choose.random() < 0.5:
                both.reset()
        if choose.random() < 0.02:
            both.ours.check()

    def run(self, operations: int) -> Found | None:
        """The first difference in about that many operations, if there is one."""
        try:
            while self.both.operations < operations:
                self.turn()
            self.both.end()
        except Differs as differs:
            return differs.found
        except (AssertionError, LookupError, ValueError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{type(error).__name__}: {error}"
            return Found(self.both.operations, where.name, "outcome", *_raised_by(where.filename, raised))
        return None


def _raised_by(file: str, raised: str) -> tuple[str, str]:
    """(our, vLLM's) outcome when one side raised: which one is told by the file."""
    return ("no error", raised) if "vllm" in Path(file).parts else (raised, "no error")
