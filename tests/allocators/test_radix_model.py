"""SGLang's pool and tree against a second model of plain lists.

Pages, hits, the order of the free list and the nodes with their locks, hits and order of access are compared after each
operation. Prompts of whole pages are repeated, extended and cut short, answers are gone on from, equal prompts meet in
a step, and pools are small. Planted bugs show that each rule is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import heappop
from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.radix_tree import Node, RadixTree, Reader
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span

from .naive_radix import NaivePool, Token

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


def nodes_of(policy: RadixPolicy) -> list[tuple[list[int], int, int]]:
    nodes = sorted(policy._tree.nodes(), key=lambda node: node.touched)
    return [(node.pages, node.locks, node.hits) for node in nodes]


def prefixes_of(policy: RadixPolicy) -> list[tuple[list[int], list[Token]]]:
    return sorted(
        (
            [page for each in reversed(list(node.path())) for page in each.pages],
            [(w, a + i) for each in reversed(list(node.path())) for w, a, n in each.spans for i in range(n)],
        )
        for node in policy._tree.nodes()
    )


class Comparison:
    """A random server that asks both the same."""

    def __init__(self, policy_class: type[RadixPolicy], config: RadixConfig, seed: int, other: Any = NaivePool) -> None:
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        self.policy = policy_class(TINY, arena, config)
        self.naive = other(config)
        self.config = config
        self.draw = random.Random(seed)
        self.running: list[KVSequence] = []
        self.waiting: list[KVSequence] = []
        self.told: list[tuple[tuple[Span, ...], int]] = []
        self.next_id = 0
        self.counts: dict[str, int] = {}
        self.operations = 0

    def run(self, operations: int) -> None:
        verbs = [self.admit] * 3 + [self.step] * 4 + [self.leap, self.abort, self.look_at_one] + [self.end] * 3
        while self.operations < operations:
            self.draw.choice(verbs)()
            for s in [s for s in self.running if s.num_tokens >= self.config.max_model_len]:
                self.finish(s, Release.FINISH)
            self.compare()
            if self.draw.random() < 0.03:
                self.policy.check()
                assert prefixes_of(self.policy) == self.naive.prefixes()
        self.policy.check()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # Prompts

    def cut(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """The same tokens in other pieces, and sometimes with an empty one between."""
        out: list[Span] = []
        for stream, start, length in spans:
            at = self.draw.randint(0, length)
            out += [(stream, start, at), (stream, start + at, length - at)]
        return tuple(out)

    def prompt(self) -> tuple[tuple[Span, ...], int]:
        """Spans and length: new, or one of the last prompts or answers again, shorter, or extended."""
        size, longest = self.config.block_size, self.config.max_model_len
        kind = self.draw.choice(("new", "repeat", "shorten", "extend", "extend"))
        if kind == "new" or not self.told:
            length = min(
                self.draw.choice((self.draw.randint(1, 5) * size, self.draw.randint(1, longest // 3))), longest - 2
            )
            return ((f"u{self.next_id}", 0, length),), length
        spans, length = self.draw.choice(self.told[-12:])
        if kind == "shorten":
            length = self.draw.choice((self.draw.randint(1, length), -(-length // 2 // size) * size or 1))
        elif kind == "extend":
            more = min(self.draw.choice((size, 1, 2 * size, self.draw.randint(1, 3 * size))), longest - 2 - length)
            if more > 0:
                kept = Reader(spans, length)
                return (*kept.ahead(kept.left), (f"e{self.draw.randint(0, 1)}", 0, more)), length + more
        return spans, min(length, longest - 2)

    def fresh(self) -> KVSequence:
        spans, length = self.prompt()
        self.told.append((spans, length))
        kept = Reader(spans, length)
        answer = f"o{self.next_id if self.draw.random() < 0.5 else 0}"
        whole = (*self.cut(kept.ahead(kept.left)), (answer, 0, self.config.max_model_len + 8))
        self.next_id += 1
        return KVSequence(id=self.next_id, session=0, turn=0, num_tokens=length, max_tokens=length, spans=whole)

    # Operations

    def look(self, s: KVSequence) -> int:
        hit = self.naive.lookup(s)
        assert self.policy.lookup(s) == hit
        self.count("hit" if hit else "miss")
        self.operations += 1
        return hit

    def look_at_one(self) -> None:
        if self.waiting:
            self.look(self.waiting[-1])

    def reserve(self, s: KVSequence, new: int, hit: int, lookahead: int, admitting: bool) -> bool:
        evictable = self.policy.usage().cached
        answer = self.policy.reserve(s, new, hit=hit, lookahead=lookahead, admitting=admitting)
        granted = self.naive.reserve(s, new, hit, lookahead, admitting)
        assert answer == Granted(hit) if granted else isinstance(answer, Refused)
        self.count(f"reserve {'granted' if granted else 'refused'}")
        if self.policy.usage().cached < evictable - hit // self.config.block_size * self.policy._block_bytes:
            self.count("evicted")
        self.operations += 1
        return granted

    def chunk(self, s: KVSequence, hit: int = 0) -> int:
        return min(s.num_tokens - s.num_computed_tokens - hit, self.draw.choice((1, 7, 64, 4096)))

    def end_step(self, scheduled: list[tuple[KVSequence, int]]) -> None:
        self.policy.end_step()
        self.naive.end_step()
        for s, new in scheduled:
            s.num_computed_tokens += new
            s.num_tokens += s.num_computed_tokens == s.num_tokens

    def admit(self) -> None:
        """One to three requests in one step; some come back from preemption."""
        scheduled = []
        for _ in range(self.draw.randint(1, 3)):
            s = self.waiting.pop() if self.waiting and self.draw.random() < 0.6 else self.fresh()
            hit = self.look(s)
            new = self.chunk(s, hit)
            if not self.reserve(s, new, hit, self.draw.choice((0, 0, 3)), admitting=True):
                self.waiting = [*self.waiting[-5:], s]
                break
            self.running.append(s)
            scheduled.append((s, hit + new))
        self.end_step(scheduled)

    def step(self) -> None:
        index = 0
        scheduled = []
        while index < len(self.running):
            s = self.running[index]
            new = self.chunk(s)
            if self.reserve(s, new, 0, self.draw.choice((0, 0, 0, 5)), False):
                scheduled.append((s, new))
                index += 1
            else:
                victim = self.running[-1]
                self.finish(victim, Release.PREEMPT)
                victim.num_computed_tokens = 0
                self.waiting.append(victim)
        self.end_step(scheduled)

    def leap(self) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        if decoding != self.running or not decoding:
            return
        room = self.config.max_model_len - max(s.num_tokens for s in decoding)
        k = self.policy.horizon(decoding, min(self.draw.randint(0, 60), room))
        evictable = self.policy.usage().cached
        self.policy.advance(decoding, k)
        for _ in range(k):
            for s in decoding:
                assert self.naive.reserve(s, 1, 0, 0, False)
            self.naive.end_step()
            for s in decoding:
                s.num_computed_tokens += 1
                s.num_tokens += 1
        self.operations += 1
        self.count("leap" if k else "no leap")
        if self.policy.usage().cached < evictable:
            self.count("leap over an eviction")

    def end(self) -> None:
        if self.running:
            why = self.draw.choice((Release.FINISH, Release.FINISH, Release.PARK, Release.DROP))
            self.finish(self.draw.choice(self.running), why)

    def finish(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        self.naive.release(s, why)
        if why is Release.FINISH:
            self.told.append((s.spans, min(s.num_tokens, self.config.max_model_len - 2)))
        self.count(why.value)
        self.operations += 1

    def abort(self) -> None:
        adopted = False
        for s in [self.fresh(), self.fresh()]:
            hit = self.look(s)
            adopted |= self.reserve(s, self.chunk(s, hit), hit, 0, admitting=True) and hit > 0
        for s in self.running:
            self.reserve(s, self.chunk(s), 0, 0, False)
        self.policy.abort_step()
        self.naive.abort_step()
        self.count("adopted and given back" if adopted else "taken and given back")

    def compare(self) -> None:
        for s in self.running:
            assert self.policy.block_ids(s) == tuple(self.naive.pages(s))
        ended, free = self.policy._ended, list(self.policy._free)
        assert (ended + free if self.config.block_size > 1 else free + ended) == self.naive.order()
        nodes = self.naive.nodes()
        assert nodes_of(self.policy) == nodes
        usage, page = self.policy.usage(), self.policy._block_bytes
        assert usage.cached == page * sum(len(pages) for pages, locks, _ in nodes if not locks)
        assert usage.pool == page * (len(self.naive.order()) + 1)
        assert usage.shared == page * sum(len(pages) * (locks - 1) for pages, locks, _ in nodes if locks)


def pool(**settings: Any) -> RadixConfig:
    return RadixConfig(**({"enable_prefix_caching": True} | settings))


CONFIGS = {
    "one token a page": pool(num_blocks=90, max_model_len=64),
    "pages of 4": pool(num_blocks=45, block_size=4, max_model_len=120),
    "least frequently used": pool(num_blocks=60, block_size=4, max_model_len=150, eviction_policy="lfu"),
    "segmented": pool(num_blocks=200, block_size=1, max_model_len=100, eviction_policy="slru"),
    "large": pool(num_blocks=300, block_size=16, max_model_len=400),
    "off": pool(num_blocks=45, block_size=4, max_model_len=120, enable_prefix_caching=False),
}
OPERATIONS = 17_000


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_pages_hits_free_list_and_tree_are_those_of_the_naive_model(config: RadixConfig) -> None:
    comparison = Comparison(RadixPolicy, config, seed=1)
    comparison.run(OPERATIONS)
    for what in ("reserve granted", "reserve refused", "preempt", "finish", "park", "drop", "leap"):
        assert comparison.counts.get(what, 0) >= 20, f"the traffic has too few of: {what}"
    for what, least in (("hit", 300), ("evicted", 100), ("leap over an eviction", 8), ("adopted and given back", 30)):
        assert (comparison.counts.get(what, 0) >= least) == config.enable_prefix_caching, what


def test_the_operations_are_as_many_as_the_issue_asks_for() -> None:
    assert len(CONFIGS) * OPERATIONS >= 100_000


# Planted bugs


class KeepsDuplicates(RadixPolicy):
    """A request's own pages for what the tree has already are not given back."""

    def _insert(self, *given: Any) -> tuple[Node, int, int]:
        ended = list(self._ended)
        found = super()._insert(*given)
        self._ended = ended
        return found


class FreesToTheOtherEnd(RadixPolicy):
    def _put(self, pages: Sequence[int]) -> None:
        if self.config.block_size == 1:
            self._free.extendleft(reversed(pages))
        else:
            self._free.extend(pages)


class FreesInReverse(RadixPolicy):
    def _put(self, pages: Sequence[int]) -> None:
        super()._put(pages[::-1])


class FreesRequestByRequest(RadixPolicy):
    """What ends with one step is given back in as many calls as requests."""

    def release(self, s: KVSequence, why: Release) -> None:
        super().release(s, why)
        self._end_group()


class MatchesTheLastToken(RadixPolicy):
    def lookup(self, s: KVSequence) -> int:
        return self._tree.match(s.spans, s.num_tokens)[1] * self.config.block_size


class InsertsAnswersWhenPreempted(RadixPolicy):
    def release(self, s: KVSequence, why: Release) -> None:
        super().release(s, Release.FINISH if why is Release.PREEMPT else why)


class EvictsWhatItLacksOnly(RadixPolicy):
    """A preemption makes no room for those that stay."""

    def release(self, s: KVSequence, why: Release) -> None:
        super().release(s, Release.DROP if why is Release.PREEMPT else why)


class CountsItsOwnPrefixAsRoom(RadixPolicy):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._tree.idle = lambda node: 0


class LeapsEvictAtOnce(RadixPolicy):
    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        size = self.config.block_size
        self._evict_for(sum(-(-(t.tokens + k) // size) - len(t.pages) for t in self._tables_of(decoding)))
        super().advance(decoding, k)


class LeapsPastAPrompt(RadixPolicy):
    """The last token of a prompt is taken for one of the answer."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        prefill = [table.prefill for table in self._tables_of(decoding)]
        for table in self._tables_of(decoding):
            table.prefill = 0
        steps = super().horizon(decoding, limit)
        for table, tokens in zip(self._tables_of(decoding), prefill, strict=True):
            table.prefill = tokens
        return steps


@pytest.mark.parametrize(
    ("bug", "config"),
    [
        (KeepsDuplicates, "pages of 4"),
        (FreesToTheOtherEnd, "pages of 4"),
        (FreesToTheOtherEnd, "one token a page"),
        (FreesInReverse, "pages of 4"),
        (FreesRequestByRequest, "pages of 4"),
        (MatchesTheLastToken, "one token a page"),
        (MatchesTheLastToken, "pages of 4"),
        (InsertsAnswersWhenPreempted, "pages of 4"),
        (EvictsWhatItLacksOnly, "one token a page"),
        (CountsItsOwnPrefixAsRoom, "pages of 4"),
        (LeapsEvictAtOnce, "pages of 4"),
        (LeapsPastAPrompt, "one token a page"),
    ],
)
def test_a_planted_bug_in_the_policy_is_noticed(bug: type[RadixPolicy], config: str) -> None:
    with pytest.raises((AssertionError, ValueError, IndexError)):
        Comparison(bug, CONFIGS[config], seed=1).run(OPERATIONS)


class SplitsWithoutLocks(RadixTree):
    def _split(self, lower: Node, pages: int) -> Node:
        upper = super()._split(lower, pages)
        upper.locks = 0
        return upper


class SplitsWithoutHits(RadixTree):
    def _split(self, lower: Node, pages: int) -> Node:
        upper = super()._split(lower, pages)
        upper.hits = 0
        return upper


class EvictsAPartOfALeaf(RadixTree):
    """As many pages as are short, from the end of the node."""

    def evict(self, pages: int) -> list[list[int]]:
        freed: list[list[int]] = []
        while pages > 0 and self._leaves:
            leaf = heappop(self._leaves)[2]
            leaf.queued = False
            if not leaf.locks and not leaf.children:
                if len(leaf.pages) > pages:
                    self._split(leaf, len(leaf.pages) - pages)
                self._offer(leaf)
                freed += super().evict(1)
                pages -= len(freed[-1])
        return freed


class LookUpsDoNotTouch(RadixTree):
    def match(self, spans: Iterable[Span], tokens: int) -> tuple[Node, int]:
        before = {id(node): node.touched for node in self.nodes()}
        found = super().match(spans, tokens)
        for node in self.nodes():
            node.touched = before.get(id(node), node.touched)
        return found


class InsertsDoNotTouch(RadixTree):
    def insert(self, *given: Any) -> tuple[Node, int, int]:
        before = {id(node): node.touched for node in self.nodes()}
        found = super().insert(*given)
        for node in self.nodes():
            node.touched = before.get(id(node), node.touched)
        return found


class CountsARequestAgain(RadixTree):
    def insert(self, spans: Iterable[Span], tokens: int, pages: Sequence[int], counted: int = 0) -> Any:
        return super().insert(spans, tokens, pages, 0)


class ForgetsParents(RadixTree):
    """What becomes a leaf by an eviction is not offered."""

    def evict(self, pages: int) -> list[list[int]]:
        with_children = [node for node in self.nodes() if node.children]
        freed = super().evict(pages)
        self._leaves = [entry for entry in self._leaves if entry[2] not in with_children]
        return freed


@pytest.mark.parametrize(
    "bug",
    [
        SplitsWithoutLocks,
        SplitsWithoutHits,
        EvictsAPartOfALeaf,
        LookUpsDoNotTouch,
        InsertsDoNotTouch,
        CountsARequestAgain,
        ForgetsParents,
    ],
)
def test_a_planted_bug_in_the_tree_is_noticed(bug: type[RadixTree], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.allocators.page_pool.RadixTree", bug)
    with pytest.raises((AssertionError, IndexError)):
        Comparison(RadixPolicy, CONFIGS["least frequently used"], seed=1).run(OPERATIONS)
