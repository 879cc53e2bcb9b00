"""A second model of vLLM's scheduler and block pool, from sections 2 and 3 of specs/paged-kv.md alone; no shared code.

Plain lists, real tokens, one step at a time::

    queue     ids in the order in which they will be admitted
    running   ids in the order in which they were
    tables    the blocks of each
    free      block ids, next one first
    keyed     (number of the prefix, block) in the order of their registration
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Token = tuple[str, int]


@dataclass
class Asked:
    """A request: all tokens that it will ever have, and how far it is."""

    id: int
    tokens: list[Token]
    prompt: int
    priority: int = 0
    arrival: int = 0
    most: int = 0
    """max_tokens: what the server is told of the answer"""
    total: int = 0
    computed: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.total = self.prompt


@dataclass
class Rules:
    """What a server is started with."""

    num_blocks: int
    block_size: int
    longest: int
    """max_model_len"""
    seqs: int
    budget: int
    caching: bool = False
    by_priority: bool = False
    threshold: int = 0
    chunked: bool = True
    watermark: float = 0.0


@dataclass
class Told:
    """What one step did."""

    scheduled: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


def ceil(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


class NaiveVllm:
    """Section 3 over section 2."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.free = list(range(1, rules.num_blocks))
        self.refs = [0] * rules.num_blocks
        self.keyed: list[tuple[int, int]] = []
        self.tables: dict[int, list[int]] = {}
        self.asked: dict[int, Asked] = {}
        self.running: list[int] = []
        self.queue: list[int] = []
        self.known: dict[tuple[int, tuple[Token, ...]], int] = {}
        self.prefixes: dict[int, list[int]] = {}
        self.hits = 0

    # Section 2

    def keys(self, r: Asked) -> list[int]:
        """The number of each prefix that ends with a block: equal prefixes have equal ones."""
        if r.id not in self.prefixes:
            size, before, out = self.rules.block_size, -1, []
            for i in range(len(r.tokens) // size):
                before = self.known.setdefault((before, tuple(r.tokens[i * size : (i + 1) * size])), len(self.known))
                out.append(before)
            self.prefixes[r.id] = out
        return self.prefixes[r.id]

    def look_up(self, r: Asked) -> list[int]:
        found: list[int] = []
        if self.rules.caching:
            for key in self.keys(r)[: (r.total - 1) // self.rules.block_size]:
                block = next((block for other, block in self.keyed if other == key), None)
                if block is None:
                    break
                found.append(block)
        return found

    def allocate(self, r: Asked, new: int, hits: Sequence[int] = (), admitting: bool = False) -> bool:
        rules, size = self.rules, self.rules.block_size
        table = self.tables.get(r.id, [])
        idle = sum(1 for block in hits if self.refs[block] == 0)
        kept = int(rules.watermark * rules.num_blocks) if admitting and self.running else 0
        if admitting and ceil(min(r.total, rules.longest), size) - len(hits) + idle + kept > len(self.free):
            return False
        reached = min(r.computed + len(hits) * size + new, rules.longest)
        fresh = max(0, ceil(reached, size) - len(table) - len(hits))
        if fresh + idle + kept > len(self.free):
            return False
        for block in hits:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
        taken, self.free = self.free[:fresh], self.free[fresh:]
        for block in taken:
            self.refs[block] = 1
        self.keyed = [pair for pair in self.keyed if pair[1] not in taken]
        self.tables[r.id] = [*table, *hits, *taken]
        if rules.caching:
            have = {block for _, block in self.keyed}
            for i in range(min(reached, r.total) // size):
                block = self.tables[r.id][i]
                if block not in have:
                    self.keyed.append((self.keys(r)[i], block))
        return True

    def give_back(self, id: int) -> None:
        have = {block for _, block in self.keyed}
        bare, tail = [], []
        for block in reversed(self.tables.pop(id)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (bare if self.rules.caching and block not in have else tail).append(block)
        self.free = bare + self.free + tail

    # Section 3

    def add(self, r: Asked) -> None:
        self.asked[r.id] = r
        self.put_in_queue(r, front=False)

    def put_in_queue(self, r: Asked, front: bool) -> None:
        if self.rules.by_priority:
            self.queue.append(r.id)
            self.queue.sort(key=lambda id: (self.asked[id].priority, self.asked[id].arrival, id))
        else:
            self.queue.insert(0 if front else len(self.queue), r.id)

    def gives_way(self) -> int:
        """Who is preempted next: of equals in priority and arrival the one admitted first, as Python's max has it."""
        if not self.rules.by_priority:
            return self.running[-1]
        ranks = [(self.asked[id].priority, self.asked[id].arrival) for id in self.running]
        return self.running[ranks.index(max(ranks))]

    def preempt(self, id: int) -> None:
        r = self.asked[id]
        self.running.remove(id)
        self.give_back(id)
        r.computed = 0
        r.preemptions += 1
        self.put_in_queue(r, front=True)

    def step(self) -> Told:
        told = Told()
        budget = self.schedule_running(told)
        if not told.preempted:
            self.schedule_waiting(told, budget)
        return self.done(told)

    def done(self, told: Told) -> Told:
        """The step has been computed: tokens are there, and who has all of them leaves."""
        for id, new in told.scheduled:
            r = self.asked[id]
            r.computed += new
            if r.computed == r.total:
                r.total += 1
                if r.total == len(r.tokens):
                    self.running.remove(id)
                    self.give_back(id)
        return told

    def schedule_running(self, told: Told) -> int:
        rules, budget, seen = self.rules, self.rules.budget, []
        while budget > 0:
            id = next((id for id in self.running if id not in seen), None)
            if id is None:
                break
            seen.append(id)
            r = self.asked[id]
            lacking = r.total - r.computed
            new = min(lacking, rules.threshold or lacking, budget, rules.longest - r.computed - 1)
            if new == 0:
                continue
            while not self.allocate(r, new):
                victim = self.gives_way()
                self.preempt(victim)
                told.preempted.append(victim)
                if victim == id:
                    return 0
                budget += sum(tokens for other, tokens in told.scheduled if other == victim)
                told.scheduled = [pair for pair in told.scheduled if pair[0] != victim]
            told.scheduled.append((id, new))
            budget -= new
        return budget

    def schedule_waiting(self, told: Told, budget: int) -> None:
        rules = self.rules
        while self.queue and budget > 0 and len(self.running) < rules.seqs:
            r = self.asked[self.queue[0]]
            hits = self.look_up(r)
            new = r.total - len(hits) * rules.block_size
            new = min(new, rules.threshold or new)
            if new > budget and not rules.chunked:
                return
            new = min(new, budget)
            if not self.allocate(r, new, hits, admitting=True):
                if self.running:
                    return
                told.rejected.append(self.queue.pop(0))  # vLLM would wait for ever: what is alone can never fit
                continue
            self.running.append(self.queue.pop(0))
            r.computed = len(hits) * rules.block_size
            self.hits += len(hits)
            told.scheduled.append((r.id, new))
            budget -= new
