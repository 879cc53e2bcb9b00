"""Prefix caching against a second model, written from sections 2, 7, 8 and 11 of specs/paged-kv.md alone.

It keeps plain lists of real tokens. Ids, hits, statistics and the order of the free queue are compared after every
operation, for each version's rules and for both gates. Prompts of whole blocks are repeated and
extended and pools are small, or a model without the last-token rule would pass. Planted bugs show that it does not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.prefix_cache import PrefixCache
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
Token = tuple[str | int, int]


def told(s: KVSequence) -> list[Token]:
    return [(stream, start + i) for stream, start, length in s.spans for i in range(length)]


def blocks_for(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@dataclass
class NaivePool:
    """Section 2 with the table of section 8, sentence by sentence, and the gate of section 11.

    A key is the whole prefix; the map is a list of (key, block) by insertion.
    """

    config: PagedConfig
    free: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    known: dict[tuple[int, tuple[Token, ...]], int] = field(default_factory=dict)
    prefixes: dict[int, list[int]] = field(default_factory=dict)
    full: dict[int, int] = field(default_factory=dict)
    """Blocks of prompt + max_new, of each sequence that runs."""
    gone: list[int] = field(default_factory=list)
    """Who was preempted."""
    stats: list[int] = field(default_factory=lambda: [0] * 6)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.config.num_blocks))
        self.refs = [0] * self.config.num_blocks

    def prefix_keys(self, s: KVSequence) -> list[int]:
        """A number for each (prefix before the block, tokens of the block): equal ones have equal numbers."""
        if s.id not in self.prefixes:
            tokens, size, before, out = told(s), self.config.block_size, -1, []
            for index in range(len(tokens) // size):
                pair = (before, tuple(tokens[index * size : (index + 1) * size]))
                before = self.known.setdefault(pair, len(self.known))
                out.append(before)
            self.prefixes[s.id] = out
        return self.prefixes[s.id]

    def key_of(self, block: int) -> int | None:
        return next((key for key, other in self.keys if other == block), None)

    def lookup(self, s: KVSequence) -> list[int]:
        if not self.config.enable_prefix_caching:
            return []
        found: list[int] = []
        first = dict(reversed(self.keys))
        for key in self.prefix_keys(s)[: (s.num_tokens - 1) // self.config.block_size]:
            if key not in first:
                break
            found.append(first[key])
        if self.config.version in ("0.18", "0.22"):
            self.queried(s, found)
        return found

    def queried(self, s: KVSequence, found: list[int]) -> None:
        at = 3 if s.id in self.gone else 0
        for place, count in enumerate((1, s.num_tokens, len(found) * self.config.block_size)):
            self.stats[at + place] += count

    def allocate(
        self, s: KVSequence, new: int, hits: list[int], lookahead: int, admitting: bool, others_running: bool
    ) -> bool:
        size, longest = self.config.block_size, self.config.max_model_len
        table = list(self.tables.get(s.id, []))
        watermark = int(self.config.watermark * self.config.num_blocks) if admitting and others_running else 0
        unused = len([block for block in hits if self.refs[block] == 0])
        full = blocks_for(min(s.max_tokens + lookahead, longest), size)
        if admitting and self.config.admission == "reserve":
            lacking = sum(self.full[other] - len(blocks) for other, blocks in self.tables.items())
            if full > len(self.free) - lacking:
                return False
        whole = self.config.version in ("0.22", "0.27")
        if self.config.reserve_full_sequence is not None:
            whole = self.config.reserve_full_sequence
        if admitting and whole:
            need = blocks_for(min(s.num_tokens, longest), size) - len(table) - len(hits) + unused
            if need + watermark > len(self.free):
                return False
        computed = s.num_computed_tokens + len(hits) * size
        fresh = max(0, blocks_for(min(computed + new + lookahead, longest), size) - len(table) - len(hits))
        if fresh + unused + watermark > len(self.free):
            return False
        for block in hits:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
            table.append(block)
        for _ in range(fresh):
            block = self.free.pop(0)
            self.keys = [pair for pair in self.keys if pair[1] != block]
            self.refs[block] = 1
            table.append(block)
        if s.id not in self.tables:
            self.full[s.id] = full
            if self.config.enable_prefix_caching and self.config.version == "0.27":
                self.queried(s, hits)
        self.tables[s.id] = table
        if self.config.enable_prefix_caching:
            have = {block for _, block in self.keys}
            for index in range(min(computed + new, s.num_tokens) // size):
                if table[index] not in have:
                    self.keys.append((self.prefix_keys(s)[index], table[index]))
        return True

    def release(self, s: KVSequence) -> None:
        have = {block for _, block in self.keys}
        head: list[int] = []
        for block in reversed(self.tables.pop(s.id, [])):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if self.config.enable_prefix_caching and block not in have and self.config.version == "0.27":
                head.append(block)
            else:
                self.free.append(block)
        self.free = head + self.free

    def snapshot(self) -> NaivePool:
        """A copy for a step that may be taken back; what keys mean is never taken back."""
        tables = {owner: list(table) for owner, table in self.tables.items()}
        twin = copy.copy(self)
        twin.free, twin.refs, twin.keys, twin.tables = list(self.free), list(self.refs), list(self.keys), tables
        twin.stats = list(self.stats)
        return twin

    def undo(self, before: NaivePool, adopted: list[list[int]]) -> NaivePool:
        """What an aborted step leaves: the state before it, less the keys of blocks that were popped from the queue;
        and idle blocks that were *adopted*, a list for each sequence, at the tail."""
        back = [block for hits in reversed(adopted) for block in reversed(hits)]
        popped = {b for table in self.tables.values() for b in table if before.refs[b] == 0 and b not in back}
        before.keys = [(key, block) for key, block in before.keys if block not in popped]
        before.free = [block for block in before.free if block not in back] + back
        if self.config.version != "0.27":
            before.stats = self.stats  # looked up is looked up
        return before

    def reset(self) -> bool:
        if len(self.free) < self.config.num_blocks - 1:
            return False
        self.keys = []
        return True


class Comparison:
    def __init__(self, policy_class: type[PagedPolicy], config: PagedConfig, seed: int) -> None:
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        self.policy = policy_class(TINY, arena, config)
        self.naive = NaivePool(config)
        self.draw = random.Random(seed)
        self.running: list[KVSequence] = []
        self.waiting: list[KVSequence] = []
        self.told: list[tuple[tuple[Span, ...], int]] = []
        self.next_id = 0
        self.counts: dict[str, int] = {}
        self.operations = 0

    def run(self, operations: int) -> None:
        verbs = [self.admit] * 4 + [self.step] * 4 + [self.leap, self.end, self.end, self.abort]
        while self.operations < operations:
            self.draw.choice(verbs)()
            for s in [s for s in self.running if s.num_tokens >= s.max_tokens]:
                self.finish(s)
            self.compare()
            if self.draw.random() < 0.02:
                self.policy.check()
            if self.draw.random() < 0.002:
                self.flush()
        self.policy.check()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def cut(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """The same tokens in other pieces, and sometimes with an empty one between."""
        out: list[Span] = []
        for stream, start, length in spans:
            at = self.draw.randint(0, length)
            out += [(stream, start, at), (stream, start + at, length - at)]
        return tuple(out)

    def prompt(self) -> tuple[tuple[Span, ...], int]:
        """Spans and length: new, or one of the last prompts again, or extended, often of whole blocks."""
        size, longest = self.policy.config.block_size, self.policy.config.max_model_len
        kind = self.draw.choice(("new", "repeat", "repeat", "extend", "extend"))
        if kind == "new" or not self.told:
            length = self.draw.choice((self.draw.randint(1, 5) * size, self.draw.randint(1, longest // 3)))
            length = min(length, longest - 2)
            return ((f"u{self.next_id}", 0, length),), length
        spans, length = self.draw.choice(self.told[-12:])
        if kind == "repeat":
            return spans, length
        more = min(self.draw.choice((size, 1, 2 * size, self.draw.randint(1, 3 * size))), longest - 2 - length)
        return (spans, length) if more < 1 else ((*spans, (f"e{self.draw.randint(0, 1)}", 0, more)), length + more)

    def fresh(self) -> KVSequence:
        spans, length = self.prompt()
        self.told.append((spans, length))
        longest = self.policy.config.max_model_len
        output = (f"o{self.next_id if self.draw.random() < 0.5 else 0}", 0, longest + 8)
        most = longest
        if self.policy.config.admission == "reserve":
            most = min(longest, length + self.draw.choice((2, self.policy.config.block_size, 40)))
        s = KVSequence(self.next_id, 0, 0, length, most, spans=(*self.cut(spans), output))
        self.next_id += 1
        return s

    def reserve(self, s: KVSequence, new: int, hits: list[int], lookahead: int, admitting: bool) -> bool:
        others = bool(self.running)
        if self.policy.config.admission == "reserve":
            lookahead = 2  # a server's drafts are always as many
        hit = len(hits) * self.policy.config.block_size
        answer = self.policy.reserve(s, new, hit=hit, lookahead=lookahead, admitting=admitting, others_running=others)
        granted = self.naive.allocate(s, new, hits, lookahead, admitting, others)
        assert answer == Granted(hit) if granted else isinstance(answer, Refused)
        self.count(f"reserve {'granted' if granted else 'refused'}")
        self.operations += 1
        return granted

    def chunk(self, s: KVSequence, hit: int = 0) -> int:
        return min(s.num_tokens - s.num_computed_tokens - hit, self.draw.choice((1, 7, 64, 4096)))

    def computed(self, s: KVSequence, new: int) -> None:
        s.num_computed_tokens += new
        if s.num_computed_tokens == s.num_tokens:
            s.num_tokens += 1

    def look(self, s: KVSequence) -> list[int]:
        hits = self.naive.lookup(s)
        assert self.policy.lookup(s) == len(hits) * self.policy.config.block_size
        self.count("hit" if hits else "miss")
        return hits

    def admit(self) -> None:
        """One to three requests in one step; some come back from preemption."""
        scheduled = []
        for _ in range(self.draw.randint(1, 3)):
            s = self.waiting.pop() if self.waiting else self.fresh()
            hits = self.look(s)
            new = self.chunk(s, len(hits) * self.policy.config.block_size)
            if not self.reserve(s, new, hits, self.draw.choice((0, 0, 3)), admitting=True):
                if self.draw.random() < 0.5:
                    self.waiting.append(s)
                else:
                    self.policy.release(s, Release.DROP)
                break
            self.running.append(s)
            scheduled.append((s, len(hits) * self.policy.config.block_size + new))
        self.policy.end_step()
        for s, tokens in scheduled:
            self.computed(s, tokens)

    def step(self) -> None:
        index = 0
        scheduled = []
        while index < len(self.running):
            s = self.running[index]
            new = self.chunk(s)
            drafts = self.draw.choice((0, 0, 0, 2)) if s.num_computed_tokens + new == s.num_tokens else 0
            drafts = 0 if self.policy.config.admission == "reserve" else drafts
            if self.reserve(s, new + drafts, [], self.draw.choice((0, 0, 0, 5)), False):
                scheduled.append((s, new))
                index += 1
            else:
                victim = self.running.pop()
                self.policy.release(victim, Release.PREEMPT)
                self.naive.release(victim)
                self.naive.gone.append(victim.id)
                victim.num_computed_tokens = 0
                self.waiting.append(victim)
                self.count("preempt")
        self.policy.end_step()
        for s, new in scheduled:
            self.computed(s, new)

    def leap(self) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        if any(self.policy.config.max_model_len - s.num_tokens < 1 for s in decoding):
            return
        # A step with drafts leaves more tokens in the books than computed; one plain step sets that right.
        granted = [s for s in decoding if self.reserve(s, 1, [], 0, False)]
        self.policy.end_step()
        for s in granted:
            self.computed(s, 1)
        if granted != decoding:
            return
        limit = min([self.draw.randint(0, 60), *(s.max_tokens - s.num_tokens for s in decoding)])
        k = self.policy.horizon(decoding, limit)
        self.policy.advance(decoding, k)
        for _ in range(k):
            for s in decoding:
                assert self.naive.allocate(s, 1, [], 0, False, True), "within the horizon"
                self.computed(s, 1)
        self.count("leap")
        self.operations += 1

    def end(self) -> None:
        if self.running:
            self.finish(self.draw.choice(self.running))

    def finish(self, s: KVSequence) -> None:
        self.running.remove(s)
        self.policy.release(s, self.draw.choice((Release.FINISH, Release.DROP)))
        self.naive.release(s)
        self.operations += 1

    def abort(self) -> None:
        before = self.naive.snapshot()
        adopted = []
        for _ in range(2):
            s = self.fresh()
            hits = self.look(s)
            idle = [block for block in hits if self.naive.refs[block] == 0]
            if self.reserve(s, self.chunk(s, len(hits) * self.policy.config.block_size), hits, 0, admitting=True):
                adopted.append(idle)
                self.count("adopted and given back" if idle else "taken and given back")
        for s in self.running:
            self.reserve(s, self.chunk(s), [], 0, False)
        self.policy.abort_step()
        self.naive = self.naive.undo(before, adopted)
        self.count("abort")

    def flush(self) -> None:
        assert self.policy.reset_prefix_cache() == self.naive.reset() if self.policy.config.enable_prefix_caching else 1
        for s in list(self.running):
            self.finish(s)
        if self.policy.config.enable_prefix_caching:
            assert self.policy.reset_prefix_cache()
            assert self.naive.reset()

    def compare(self) -> None:
        for s in self.running:
            assert self.policy.block_ids(s) == tuple(self.naive.tables[s.id])
        assert list(self.policy._free) == self.naive.free
        assert list(self.policy.prefix_stats()) == self.naive.stats
        usage, config = self.policy.usage(), self.policy.config
        block = config.block_size * TINY.token_bytes
        have = {b for _, b in self.naive.keys}
        assert usage.cached == block * len(have & set(self.naive.free))
        assert usage.cached + usage.pool == block * (len(self.naive.free) + 1)
        assert usage.shared == block * sum(refs - 1 for refs in self.naive.refs if refs)
        if self.policy._cache is not None:
            assert len(have) == len(self.naive.keys)
            by_key: dict[int, list[int]] = {}
            for key, b in self.naive.keys:
                by_key.setdefault(key, []).append(b)
            assert sorted(by_key.values()) == sorted(self.policy._cache.carriers().values())


CONFIGS = {
    "blocks of 4": PagedConfig(num_blocks=45, block_size=4, max_model_len=120, enable_prefix_caching=True),
    "watermark": PagedConfig(
        num_blocks=100, block_size=16, max_model_len=500, watermark=0.1, enable_prefix_caching=True
    ),
    "one token a block": PagedConfig(num_blocks=150, block_size=1, max_model_len=64, enable_prefix_caching=True),
    "chunks in": PagedConfig(
        num_blocks=60, block_size=4, max_model_len=150, reserve_full_sequence=False, enable_prefix_caching=True
    ),
    "large": PagedConfig(num_blocks=400, block_size=4, max_model_len=300, watermark=0.05, enable_prefix_caching=True),
    "off": PagedConfig(num_blocks=45, block_size=4, max_model_len=120, watermark=0.1),
    "0.22": PagedConfig(num_blocks=50, block_size=4, max_model_len=120, version="0.22", enable_prefix_caching=True),
    "0.18": PagedConfig(num_blocks=80, block_size=4, max_model_len=150, version="0.18", enable_prefix_caching=True),
    "full length": PagedConfig(
        num_blocks=60, block_size=4, max_model_len=150, admission="reserve", enable_prefix_caching=True
    ),
    "full length, off": PagedConfig(
        num_blocks=60, block_size=3, max_model_len=150, version="0.18", admission="reserve"
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_ids_hits_and_queue_are_those_of_the_naive_model(config: PagedConfig) -> None:
    comparison = Comparison(PagedPolicy, config, seed=1)
    comparison.run(17_000)
    reserved = config.admission == "reserve"
    for what in ("reserve granted", "reserve refused", "leap", "abort", *([] if reserved else ["preempt"])):
        assert comparison.counts[what] >= 20, f"the traffic has too few of: {what}"
    assert not reserved or "preempt" not in comparison.counts
    assert (comparison.counts.get("hit", 0) >= 300) == config.enable_prefix_caching


# Planted bugs


class WithoutTheLastTokenRule(PrefixCache):
    def _find(self, s: KVSequence) -> list[int]:
        s.num_tokens += 1
        found = super()._find(s)
        s.num_tokens -= 1
        return found


class BareBlocksToTheTail(PrefixCache):
    def put_back(self, blocks: Sequence[int]) -> None:
        before = set(self.free)
        super().put_back(blocks)
        bare = [block for block in self.free if block not in before and self.key_of[block] < 0]
        for block in bare:
            self.free.remove(block)
        self.free.extend(bare)


class NewestOfTwoFirst(PrefixCache):
    def register(self, blocks: Sequence[int], keys: Sequence[int], group: int = 0) -> None:
        super().register(blocks, keys, group)
        for block, key in zip(blocks, keys, strict=True):
            if key in self._twins:
                first, *others = self.carriers()[key]
                self.block_of[key], self._twins[key] = block, [first, *others[:-1]]


class IdleHitsAreNotCounted(PrefixCache):
    def idle(self, blocks: Iterable[int]) -> int:
        return 0


@pytest.mark.parametrize(
    "broken", [WithoutTheLastTokenRule, BareBlocksToTheTail, NewestOfTwoFirst, IdleHitsAreNotCounted]
)
def test_a_planted_bug_in_the_cache_is_noticed(broken: type[PrefixCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.allocators.paged.PrefixCache", broken)
    with pytest.raises((AssertionError, KeyError)):
        Comparison(PagedPolicy, CONFIGS["blocks of 4"], seed=1).run(17_000)


class LeapsKeysSequenceBySequence(PagedPolicy):
    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        late = []
        self._register = lambda cache, table, s, full: late.append((decoding.index(s), cache, table, s))
        super().advance(decoding, k)
        del self._register
        for _, cache, table, s in sorted(late, key=lambda call: call[0]):
            self._register(cache, table, s, table.keyed + 1)
            self._changed(table)


class KeepsKeysOfAnAbortedStep(PagedPolicy):
    def abort_step(self) -> None:
        self._keyed.clear()
        super().abort_step()


class AdmitsByPresentLength(PagedPolicy):
    """Promises a newcomer what it has now, and not its full length."""

    def reserve(self, s: KVSequence, new: int, **more: int) -> Granted | Refused:
        most, s.max_tokens = s.max_tokens, s.num_tokens
        answer = super().reserve(s, new, **more)
        s.max_tokens = most
        return answer


class ForgetsWhatItPromised(PagedPolicy):
    """A leap's blocks count as if they had not been promised."""

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        free = len(self._free)
        super().advance(decoding, k)
        self._admission.promised += free - len(self._free)


class CountsThePreemptedAsNew(PagedPolicy):
    def release(self, s: KVSequence, why: Release) -> None:
        super().release(s, why)
        self._prefixes.gone(s)


class CountsAdmissionsThatWereUndone(PagedPolicy):
    def abort_step(self) -> None:
        self._prefixes.end_step()
        super().abort_step()


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (LeapsKeysSequenceBySequence, "large"),
        (KeepsKeysOfAnAbortedStep, "large"),
        (AdmitsByPresentLength, "full length"),
        (ForgetsWhatItPromised, "full length, off"),
        (CountsThePreemptedAsNew, "0.22"),
        (CountsThePreemptedAsNew, "blocks of 4"),
        (CountsAdmissionsThatWereUndone, "blocks of 4"),
    ],
)
def test_a_planted_bug_in_the_policy_is_noticed(broken: type[PagedPolicy], name: str) -> None:
    with pytest.raises(AssertionError):
        Comparison(broken, CONFIGS[name], seed=1).run(17_000)


@pytest.mark.parametrize(
    ("rule", "name", "instead"),
    [
        ("frees_bare_blocks_first", "0.22", True),
        ("frees_bare_blocks_first", "blocks of 4", False),
        ("admits_whole_sequences", "0.18", True),
        ("admits_whole_sequences", "0.22", False),
        ("counts_look_ups", "0.18", False),
        ("counts_look_ups", "blocks of 4", True),
    ],
)
def test_a_rule_of_another_version_is_noticed(
    rule: str, name: str, instead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedConfig, rule, property(lambda config: instead))
    with pytest.raises(AssertionError):
        Comparison(PagedPolicy, CONFIGS[name], seed=1).run(17_000)
