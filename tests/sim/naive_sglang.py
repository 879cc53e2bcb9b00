"""A second model of SGLang's scheduler, from section 10 of specs/paged-kv.md alone, over the second model of its pool.

One step at a time, and sums written out where the scheduler keeps counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hbmtwin.allocators.records import KVSequence, Release

from ..allocators.naive_radix import NaivePool
from .naive_vllm import Told, ceil

CLIP = 4096


@dataclass
class Asked:
    """A request: what it is told to generate at most, and what it does generate."""

    s: KVSequence
    prompt: int
    output: int
    most: int

    @property
    def got(self) -> int:
        return self.s.num_tokens - self.prompt

    @property
    def may_get(self) -> int:
        return min(self.most - self.got, CLIP)


class NaiveSglang:
    """fcfs, with chunks, without mixing."""

    def __init__(self, pool: NaivePool, seqs: int, chunk: int, conservativeness: float) -> None:
        self.pool = pool
        self.page = pool.config.block_size
        self.seqs = seqs
        self.chunk = chunk // self.page * self.page
        self.asked: dict[int, Asked] = {}
        self.running: list[int] = []
        self.queue: list[int] = []
        self.half_way: int | None = None
        self.full = False
        self.init = min(0.7 * conservativeness, 1.0)
        self.least = min(0.14 * self.init, 1.0)
        self.from_ratio, self.decodes = self.init, 0
        self.hits = 0

    def add(self, r: Asked) -> None:
        self.asked[r.s.id] = r
        self.queue.append(r.s.id)

    def ratio(self) -> float:
        fallen = (self.init - self.least) / 600 * self.decodes
        return max(self.from_ratio - fallen, self.least) if self.decodes else self.from_ratio

    def room(self) -> int:
        return (len(self.pool.free) + len(self.pool.group) + self.pool.evictable()) * self.page

    def room_for(self, s: KVSequence, hit: int) -> int:
        """With its own prefix locked."""
        path = self.pool.pass_down(self.pool.tokens_of(s)[:hit]) if hit else []
        return self.room() - sum(len(run.pages) for run in path if not run.users) * self.page

    def pages(self, tokens: int) -> int:
        return ceil(tokens, self.page) * self.page

    # A step

    def step(self) -> Told:
        told = Told()
        self.prefill(told)
        prefilled = bool(told.scheduled)
        if not prefilled:
            self.decode(told)
        self.idle()
        self.pool.end_step()
        ended = []
        for id, new in told.scheduled:
            r = self.asked[id]
            r.s.num_computed_tokens += new
            if r.s.num_computed_tokens == r.s.num_tokens:
                r.s.num_tokens += 1
                self.half_way = None if self.half_way == id else self.half_way
                if r.got == r.output:
                    ended.append(id)
        if not prefilled and not told.preempted:
            self.decodes += 1
        for id in ended:
            self.leave(id, Release.FINISH)
        self.idle()
        return told

    def leave(self, id: int, why: Release) -> None:
        self.running.remove(id)
        self.pool.release(self.asked[id].s, why)
        self.full = False

    def idle(self) -> None:
        if not self.running and not self.queue:
            self.from_ratio, self.decodes = self.init, 0

    def prefill(self, told: Told) -> None:
        left = self.chunk
        reserved = self.ratio() * sum(self.asked[id].may_get for id in self.running if id != self.half_way)
        if self.half_way is not None:
            r = self.asked[self.half_way]
            lacks = r.s.num_tokens - r.s.num_computed_tokens
            new = min(lacks, left)
            assert self.pool.reserve(r.s, new, 0, 0, False)
            told.scheduled.append((r.s.id, new))
            left -= self.pages(new)
            reserved += self.page + (min(r.most, CLIP) if new == lacks else 0)
        while self.queue and left > 0 and len(self.running) < self.seqs and not self.full:
            r = self.asked[self.queue[0]]
            hit = self.pool.lookup(r.s)
            extend = r.s.num_tokens - hit
            if not extend + r.may_get + self.page < self.room_for(r.s, hit) - reserved:
                never = r.s.num_tokens + r.may_get + self.page >= (self.pool.config.num_blocks - 1) * self.page
                if never or not self.running:  # SGLang shortens what it may get
                    told.rejected.append(self.queue.pop(0))
                    continue
                self.full = True
                break
            new = min(extend, left)
            if new < extend:
                self.half_way = r.s.id
            assert self.pool.reserve(r.s, new, hit, 0, True)
            r.s.num_computed_tokens = hit
            self.hits += hit
            told.scheduled.append((r.s.id, new))
            self.running.append(self.queue.pop(0))
            left -= self.pages(new)
            reserved += self.page + (min(r.most, CLIP) if new == extend else 0)
            self.full = self.room() <= reserved

    def lacks(self, ids: list[int]) -> int:
        """Slots of the pages that the next token of each takes."""
        return self.page * sum(1 for id in ids if self.asked[id].s.num_computed_tokens % self.page == 0)

    def decode(self, told: Told) -> None:
        if self.lacks(self.running) > self.room():
            self.retract(told)
        for id in self.running:
            assert self.pool.reserve(self.asked[id].s, 1, 0, 0, False)
            told.scheduled.append((id, 1))

    def retract(self, told: Told) -> None:
        def last(ids: list[int]) -> int:
            """Fewest generated tokens, among equals the longest prompt, then who was admitted last."""
            return min(reversed(ids), key=lambda id: (self.asked[id].got, -self.asked[id].prompt))

        while len(self.running) > 1 and (not told.preempted or self.lacks(self.running) > self.room()):
            id = last(self.running)
            self.leave(id, Release.PREEMPT)
            self.asked[id].s.num_computed_tokens = 0
            self.queue.append(id)
            told.preempted.append(id)
        if self.lacks(self.running) > self.room():
            id = self.running[0]
            self.leave(id, Release.DROP)
            told.rejected.append(id)
            return
        staying = [self.asked[id] for id in self.running]
        generated = sum(r.got + 20 for r in staying)
        self.from_ratio, self.decodes = min(1.0, generated / (sum(r.most for r in staying) + 1)), 0
