"""A second model of SGLang's pool and its radix tree, from section 10 of specs/paged-kv.md: plain lists of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hbmtwin.allocators.radix import RadixConfig
from hbmtwin.allocators.records import KVSequence, Release

Token = tuple[str | int, int]


def told(s: KVSequence) -> list[Token]:
    return [(stream, start + i) for stream, start, length in s.spans for i in range(length)]


def pages_for(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@dataclass
class Run:
    """A node of the naive tree: tokens of whole pages, and the ids of the requests that lock it."""

    tokens: list[Token]
    pages: list[int]
    users: list[int]
    hits: int = 0
    time: int = 0
    children: list[Run] = field(default_factory=list)

    def below(self) -> Iterator[Run]:
        for child in self.children:
            yield child
            yield from child.below()


@dataclass
class Request:
    """What a running request has: its pages, of which the tree has the first ``shared``; -1 tokens before admission."""

    tokens: int
    prefill: int
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    counted: int = 0


class NaivePool:
    """Section 10, sentence by sentence."""

    def __init__(self, config: RadixConfig) -> None:
        self.config = config
        self.free = list(range(1, config.num_blocks))
        self.group: list[int] = []
        self.root = Run([], [], [])
        self.clock = 0
        self.requests: dict[int, Request] = {}
        self.known: dict[int, list[Token]] = {}
        self.computing: list[tuple[KVSequence, int]] = []
        self.before: list[tuple[int, int, int]] = []

    # The pool

    def give(self, pages: list[int]) -> None:
        self.free = self.free + pages if self.config.block_size == 1 else pages + self.free

    def new_step(self) -> None:
        self.give(self.group)
        self.group = []

    def evictable(self) -> int:
        return sum(len(run.pages) for run in self.root.below() if not run.users)

    def make_room(self, count: int) -> None:
        while len(self.free) < count:
            leaves = [run for run in self.root.below() if not run.users and not run.children]
            if not leaves:
                return
            gone = min(leaves, key=self.rank)
            parent = next(run for run in [self.root, *self.root.below()] if any(c is gone for c in run.children))
            parent.children = [child for child in parent.children if child is not gone]
            self.give(gone.pages)

    def rank(self, run: Run) -> tuple[int, ...]:
        if self.config.eviction_policy == "lru":
            return (run.time,)
        if self.config.eviction_policy == "lfu":
            return (run.hits, run.time)
        return (1 if run.hits >= 2 else 0, run.time)

    # The tree

    def tokens_of(self, s: KVSequence) -> list[Token]:
        if s.id not in self.known:
            self.known[s.id] = told(s)
        return self.known[s.id]

    def pass_down(self, tokens: list[Token], counted: int | None = None) -> list[Run]:
        """The path of whole pages that are there; access times are refreshed, a run that goes on otherwise is split."""
        size, path, at = self.config.block_size, [self.root], 0
        while len(tokens) - at >= size:
            child = next((run for run in path[-1].children if run.tokens[:size] == tokens[at : at + size]), None)
            if child is None:
                break
            self.touch(child)
            same = size
            while child.tokens[same : same + size] == tokens[at + same : at + same + size] and same < len(child.tokens):
                same += size
            if same < len(child.tokens):
                upper = Run(child.tokens[:same], child.pages[: same // size], list(child.users), child.hits)
                upper.children = [child]
                path[-1].children = [upper if run is child else run for run in path[-1].children]
                child.tokens, child.pages = child.tokens[same:], child.pages[same // size :]
                self.touch(upper)
                child = upper
            path.append(child)
            at += same
            if counted is not None and at > counted:
                child.hits += 1
        return path

    def touch(self, run: Run) -> None:
        self.clock += 1
        run.time = self.clock

    def put(self, s: KVSequence, computed: int) -> list[int]:
        """Insert the whole pages of its first *computed* tokens; its own pages for what was there are given back."""
        mine, size = self.requests[s.id], self.config.block_size
        tokens = self.tokens_of(s)[:computed]
        tokens = tokens[: len(tokens) // size * size]
        path = self.pass_down(tokens, mine.counted)
        there = [page for run in path for page in run.pages]
        if len(tokens) // size > len(there):
            new = Run(tokens[len(there) * size :], mine.pages[len(there) : len(tokens) // size], [])
            new.hits = 1 if len(tokens) > mine.counted else 0
            path[-1].children = [*path[-1].children, new]
            self.touch(new)
            path.append(new)
        self.group = self.group + mine.pages[mine.shared : len(there)]
        self.unlock(s.id)
        for run in path[1:]:
            run.users = [*run.users, s.id]
        whole = len(tokens) // size
        mine.counted = max(mine.counted, len(tokens))
        mine.shared, mine.pages = whole, [p for run in path for p in run.pages] + mine.pages[whole:]
        return mine.pages

    def unlock(self, owner: int) -> None:
        for run in self.root.below():
            run.users = [user for user in run.users if user != owner]

    # What a server does

    def lookup(self, s: KVSequence) -> int:
        if not self.config.enable_prefix_caching:
            return 0
        path = self.pass_down(self.tokens_of(s)[: s.num_tokens - 1])
        return sum(len(run.tokens) for run in path)

    def reserve(self, s: KVSequence, new: int, hit: int, lookahead: int, admitting: bool) -> bool:
        self.new_step()
        size, longest = self.config.block_size, self.config.max_model_len
        path = self.pass_down(self.tokens_of(s)[:hit]) if hit else [self.root]
        mine = self.requests.get(s.id)
        held = len(mine.pages) if mine else hit // size
        room = len(self.free) + self.evictable() - sum(len(run.pages) for run in path if not run.users)
        target = min(s.num_computed_tokens + hit + new, longest)
        need = pages_for(min(target + lookahead, longest), size) - held
        whole = pages_for(min(s.num_tokens, longest), size) - held
        if need > room or (admitting and whole > room):
            return False
        if mine is None:
            mine = self.requests[s.id] = Request(-1, s.num_tokens)
            self.before.append((s.id, -1, 0))
        elif all(owner != s.id for owner, _, _ in self.before):
            self.before.append((s.id, mine.tokens, held))
        if hit:
            mine.shared, mine.pages = hit // size, [page for run in path for page in run.pages]
            for run in path[1:]:
                run.users = [*run.users, s.id]
        if need > 0:
            self.make_room(need)
            mine.pages, self.free = mine.pages + self.free[:need], self.free[need:]
        mine.tokens = target
        if self.config.enable_prefix_caching and s.num_computed_tokens + hit < mine.prefill:
            self.computing.append((s, target))
        return True

    def end_step(self) -> None:
        self.before = []
        for s, computed in self.computing:
            self.put(s, computed)
        self.computing = []

    def abort_step(self) -> None:
        for owner, tokens, held in reversed(self.before):
            mine = self.requests[owner]
            first = max(held, mine.shared)
            self.free, mine.pages = mine.pages[first:] + self.free, mine.pages[:first]
            mine.tokens = tokens
            if tokens < 0:
                self.unlock(owner)
                del self.requests[owner]
        self.before, self.computing = [], []

    def release(self, s: KVSequence, why: Release) -> None:
        if s.id not in self.requests:
            return
        mine = self.requests[s.id]
        if why in (Release.FINISH, Release.PARK):
            if self.config.enable_prefix_caching:
                self.put(s, s.num_computed_tokens)
            self.group = self.group + mine.pages[mine.shared :]
        else:
            self.new_step()
            self.give(mine.pages[mine.shared :])
        self.unlock(s.id)
        del self.requests[s.id]
        if why is Release.PREEMPT:
            self.make_room(pages_for(20 * len(self.requests), self.config.block_size))

    # What is compared

    def pages(self, s: KVSequence) -> list[int]:
        return self.requests[s.id].pages

    def order(self) -> list[int]:
        return self.group + self.free if self.config.block_size > 1 else self.free + self.group

    def nodes(self) -> list[tuple[list[int], int, int]]:
        """Pages, locks and hits of each node, the one accessed last comes last."""
        runs = sorted(self.root.below(), key=lambda run: run.time)
        return [(run.pages, len(run.users), run.hits) for run in runs]

    def prefixes(self) -> list[tuple[list[int], list[Token]]]:
        found: list[tuple[list[int], list[Token]]] = []

        def walk(run: Run, pages: list[int], tokens: list[Token]) -> None:
            for child in run.children:
                found.append((pages + child.pages, tokens + child.tokens))
                walk(child, *found[-1])

        walk(self.root, [], [])
        return sorted(found)
