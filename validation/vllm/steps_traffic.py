"""Random requests for two schedulers that must agree.

::

    prompt   p p p p | u u u     fresh, or repeats, extends or cuts what was told before, often by whole blocks
    output   o o o o             as many tokens as it may get; those of a repeated session are the same again

Whatever arrives can run alone, so that nothing waits for ever in one engine and is refused in the other.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.validation.vllm.steps import Server, Steps, StepsDiffer
from hbmtwin.validation.vllm.traffic import cut, spans_tokens, token_ids
from hbmtwin.workloads.records import Request, Span, merge_spans, output_stream

REMEMBERED = 12
"""The latest prompts and sequences, which new ones repeat and extend."""
MOST_WAITING = 12


def blocks_alone(server: Server, tokens: int) -> int:
    """Blocks that a sequence of so many tokens needs at most when nothing else runs."""
    return sum(_blocks_of(group, tokens, server.in_flight_tokens) for group in server.pool.groups)


def _blocks_of(group: KVGroup, tokens: int, chunk: int) -> int:
    whole = -(-tokens // group.block_size)
    if group.kind == "mamba" and group.mamba_mode != "all":
        return min(whole, 3) + group.speculative_blocks
    if group.kind in ("full", "mamba"):
        return whole  # also of states in mode all, which a sequence gives back but an admission counts
    return min(whole, -(-(group.window + chunk) // group.block_size) + 2)


@dataclass(slots=True)
class Requests:
    """Random traffic on one server."""

    both: Steps
    server: Server
    seed: int
    random: random.Random = field(init=False)
    told: list[tuple[int, tuple[Span, ...]]] = field(default_factory=list)
    """``(session, spans)`` of prompts and of whole sequences."""
    live: dict[int, Request] = field(default_factory=dict)
    streams: dict[str | int, int] = field(default_factory=dict)
    now_ns: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def prompt(self) -> tuple[int, tuple[Span, ...]]:
        """Session and spans of a new prompt."""
        choose, pool = self.random, self.server.pool
        kind = choose.choice(["fresh", "repeat", "repeat", "extend", "extend", "part"]) if self.told else "fresh"
        session, spans = self.names, []
        if kind != "fresh":
            session, old = choose.choice(self.told[-REMEMBERED:])
            spans = list(old)
            if kind == "part":
                whole = choose.randint(1, max(1, spans_tokens(spans) // pool.unit)) * pool.unit
                spans = cut(spans, whole + choose.choice([-1, 0, 0, 1]))
        if kind in ("fresh", "extend") or not spans:
            more = choose.choice([choose.randint(1, 6) * pool.unit, choose.randint(1, max(1, pool.max_model_len // 3))])
            spans.append((self.names, choose.randint(0, 5), more))
        # The same prompt often gets the same answer: then two tables carry the same keys beyond it.
        return (session if choose.random() < 0.5 else self.names), merge_spans(tuple(spans))

    def arrive(self) -> None:
        """A new request that can run, and be answered, alone."""
        choose, pool = self.random, self.server.pool
        self.names += 1
        session, spans = self.prompt()
        longest = pool.max_model_len
        while blocks_alone(self.server, longest) > pool.num_blocks - 1:
            longest -= 1
        spans = tuple(cut(spans, longest - 1))
        prompt = spans_tokens(spans)
        outputs = [1, pool.unit, choose.randint(1, 6 * pool.unit), choose.randint(1, longest)]
        output = min(longest - prompt, choose.choice(outputs))
        # Answers that end by themselves make a difference where steps are planned before that is known.
        early = self.server.async_scheduling and choose.random() < 0.5
        most = choose.randint(output, longest - prompt) if early else output
        self.now_ns += choose.choice([0, 1, 1])
        r = Request(
            id=self.names,
            session=session,
            turn=0,
            arrival_ns=self.now_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=most,
            spans=spans,
            priority=choose.choice([0, 0, 0, 1, 2]),
        )
        self.told.append((session, spans))
        self.live[r.id] = r
        self.both.arrive(r, self.tokens(self.whole(r)))

    def whole(self, r: Request) -> tuple[Span, ...]:
        """Prompt and output."""
        return (*r.spans, (output_stream(r.session, r.turn), 0, r.output_tokens))

    def tokens(self, spans: Sequence[Span]) -> list[int]:
        """Token ids, equal where the spans are."""
        numbers = self.streams
        return token_ids([(numbers.setdefault(stream, len(numbers)), start, length) for stream, start, length in spans])

    def turn(self) -> None:
        """Arrivals, and a step."""
        choose = self.random
        crowd = self.server.max_num_seqs + MOST_WAITING
        for _ in range(choose.choice([0, 0, 0, 1, 1, 2])):
            if self.both.unfinished < crowd:
                self.arrive()
        if choose.random() < 0.01:  # a burst after a pause, with equal times of arrival
            while self.both.unfinished < crowd:
                self.arrive()
        if not self.both.unfinished:
            self.arrive()
        for ended in self.both.step():
            r = self.live.pop(ended)
            self.told.append((r.session, merge_spans(self.whole(r))))

    def run(self, steps: int) -> str:
        """The first difference in so many steps, or nothing."""
        try:
            while self.both.steps < steps:
                self.turn()
        except StepsDiffer as differs:
            return str(differs)
        except (AssertionError, LookupError, ValueError, RuntimeError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"step {self.both.steps}: {type(error).__name__} in {where.name} of {where.filename}: {error}"
        return ""
