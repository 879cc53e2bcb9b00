"""Two block managers told the same: their answers are compared at every operation.

::

    look-up                              hit tokens
    admission, chunk, decode, leap       granted or refused, the sequence's table of every group, blocks forgotten too
    preemption, free, reset              tables, the answer
    each of them                         free blocks; cache events in their order; now and then the whole free queue
    the end                              the free queue and the prefix statistics
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hbmtwin.allocators.records import KVSequence, Release
from hbmtwin.validation.vllm.sides import Leaping, Pool, Side

QUEUE_EVERY = 50
"""Operations between two comparisons of the whole free queue."""


@dataclass(frozen=True, slots=True)
class Found:
    """The first difference of a run, with the state of both sides after it."""

    operation: int
    verb: str
    what: str
    ours: object
    theirs: object
    our_state: str = ""
    their_state: str = ""

    def __str__(self) -> str:
        return (
            f"operation {self.operation}, {self.verb}: {self.what} is {self.ours} here and {self.theirs} there\n"
            f"  here: {self.our_state}\n  there: {self.their_state}"
        )


class Differs(Exception):
    """Carries the first difference out of the traffic."""

    def __init__(self, found: Found) -> None:
        super().__init__(str(found))
        self.found = found


@dataclass(slots=True, eq=False)
class Asked:
    """A sequence, and how the traffic has it end."""

    s: KVSequence
    prompt: int
    length: int
    """Tokens at which it ends by itself."""

    @property
    def decodes(self) -> bool:
        """Whether all but its last token are computed."""
        return self.s.num_computed_tokens == self.s.num_tokens - 1


@dataclass(slots=True)
class Comparison:
    """Both sides of one pool, the sequences that run, and what was met."""

    pool: Pool
    ours: Leaping
    theirs: Side
    operations: int = 0
    met: Counter[str] = field(default_factory=Counter)
    running: list[Asked] = field(default_factory=list)
    key_names: dict[int, int] = field(default_factory=dict)
    """Our key of an event -> the other side's."""

    # -- comparing ---------------------------------------------------------------------------------------------------

    def same(self, verb: str, what: str, ours: object, theirs: object) -> None:
        """Raise Differs unless they are equal."""
        if ours != theirs:
            states = [
                f"free {side.free_blocks()} {side.free_queue()}, "
                f"held {[(asked.s.id, side.tables(asked.s)) for asked in self.running]}"
                for side in (self.ours, self.theirs)
            ]
            raise Differs(Found(self.operations, verb, what, ours, theirs, *states))

    def done(self, verb: str, *touched: Asked) -> None:
        """Count one operation; compare tables of *touched*, free blocks, events, and now and then the queue."""
        self.operations += 1
        self.met[verb] += 1
        for asked in touched:
            name = f"tables of {asked.s.id}"
            self.same(verb, name, self.ours.tables(asked.s), self.theirs.tables(asked.s))
        self.same(verb, "free blocks", self.ours.free_blocks(), self.theirs.free_blocks())
        self.same_events(verb)
        if not self.operations % QUEUE_EVERY:
            self.same(verb, "free queue", self.ours.free_queue(), self.theirs.free_queue())
            self.met["queue compared"] += 1

    def same_events(self, verb: str) -> None:
        """Compare what was stored, removed and cleared, in its order; a key of ours stands for one of theirs."""
        ours, theirs = self.ours.events(), self.theirs.events()
        if ours is None or theirs is None:
            return
        if verb == "leap":
            # A policy may take all blocks of a leap before it gives any a key: the order of either is the same.
            ours, theirs = (sorted(events, key=lambda event: event[0] != "stored") for events in (ours, theirs))
        for (action, key, group), (real_action, real_key, real_group) in zip(ours, theirs, strict=False):
            self.same(verb, "cache event", (action, group), (real_action, real_group))
            self.same(verb, f"key of {action} {key}", self.key_names.setdefault(key, real_key), real_key)
            self.met[f"event {action}"] += 1
        self.same(verb, "number of cache events", len(ours), len(theirs))

    # -- one operation each ------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """On both sides."""
        self.ours.start_step()
        self.theirs.start_step()

    def end_step(self) -> None:
        """On both sides."""
        self.ours.end_step()
        self.theirs.end_step()

    def look_up(self, asked: Asked) -> int:
        """Tokens of its prefix that both hold."""
        hit = self.ours.lookup(asked.s)
        self.same("look-up", f"hit of {asked.s.id}", hit, self.theirs.lookup(asked.s))
        shared = self.ours.shared_boundary(asked.s)
        self.same("look-up", f"shared boundary of {asked.s.id}", shared, self.theirs.shared_boundary(asked.s))
        self.done("look-up")
        self.met["hits"] += hit > 0
        self.met["shared boundaries"] += shared > 0
        return hit

    def reserve(self, asked: Asked, new: int, hit: int = 0, admitting: bool = False) -> bool:
        """Ask both for room, as an admission or for one that runs; whether both granted it."""
        s, others = asked.s, bool(self.running)
        granted, real = (
            side.reserve(s, new, hit=hit, lookahead=self.pool.lookahead, admitting=admitting, others_running=others)
            for side in (self.ours, self.theirs)
        )
        kind = "admission" if admitting else "decode" if asked.decodes else "chunk"
        verb = kind if granted else f"refused {kind}"
        self.same(verb, f"grant of {new} to {s.id}", granted, real)
        self.done(verb, asked)
        return granted

    def leap(self, limit: int) -> None:
        """Decode steps of all that run: at once here, one by one there."""
        sequences = [asked.s for asked in self.running]
        steps = self.ours.horizon(sequences, limit)
        if not steps:
            return
        self.ours.advance(sequences, steps)
        for _ in range(steps):
            self.theirs.start_step()
            for s in sequences:
                real = self.theirs.reserve(s, 1, hit=0, lookahead=0, admitting=False, others_running=True)
                self.same("leap", f"grant to {s.id}", True, real)
            self.theirs.end_step()
            for s in sequences:
                self.compute(s, 1, 1)
        self.done("leap", *self.running)

    def compute(self, s: KVSequence, computed: int, sampled: int) -> None:
        """It has so many tokens more."""
        s.num_computed_tokens += computed
        s.num_tokens += sampled
        self.ours.counted(s)
        self.theirs.counted(s)

    def preempt(self, asked: Asked) -> None:
        """As vLLM's scheduler does: nothing of it is computed any more."""
        self.running.remove(asked)
        self.release(asked, Release.PREEMPT)
        self.compute(asked.s, -asked.s.num_computed_tokens, 0)
        self.done("preemption", asked)

    def finish(self, asked: Asked) -> None:
        """It ends."""
        self.running.remove(asked)
        self.release(asked, Release.FINISH)
        self.done("free", asked)

    def release(self, asked: Asked, why: Release) -> None:
        """On both sides."""
        self.ours.release(asked.s, why)
        self.theirs.release(asked.s, why)

    def reset(self) -> None:
        """Both forget their keys, or both refuse because something runs."""
        ours = self.ours.reset_prefix_cache()
        self.same("reset", "answer", ours, self.theirs.reset_prefix_cache())
        self.done("reset" if ours else "refused reset")

    def end(self) -> None:
        """Compare what is left: the free queue and the sums of prefix statistics."""
        self.same("end", "free queue", self.ours.free_queue(), self.theirs.free_queue())
        ours, theirs = self.ours.statistics(), self.theirs.statistics()
        if ours is not None and theirs is not None:
            self.same("end", "prefix statistics", ours, theirs)
            self.met["statistics compared"] += 1
