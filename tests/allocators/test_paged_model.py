"""Paged KV against a second, naive model of vLLM's rules, block id by block id on random traffic.

The naive model knows nothing of leaps, of undo records or of running sums: it keeps lists, takes single steps, and
copies itself to take a step back. Planted bugs show that the comparison would notice.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


def blocks_for(tokens: int, block_size: int) -> int:
    count = 0
    while count * block_size < tokens:
        count += 1
    return count


@dataclass
class NaivePool:
    """Section 2 of specs/paged-kv.md with caching off, word by word."""

    config: PagedConfig
    free: list[int] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [block for block in range(self.config.num_blocks) if block != 0]

    def allocate(self, s: KVSequence, new: int, lookahead: int, admitting: bool, others_running: bool) -> bool:
        config = self.config
        table = self.tables.get(s.id, [])
        watermark = int(config.watermark * config.num_blocks) if admitting and others_running else 0
        if admitting and config.reserve_full_sequence is not False:
            whole = blocks_for(min(s.num_tokens, config.max_model_len), config.block_size) - len(table)
            if whole + watermark > len(self.free):
                return False
        target = min(s.num_computed_tokens + new + lookahead, config.max_model_len)
        need = max(0, blocks_for(target, config.block_size) - len(table))
        if need + watermark > len(self.free):
            return False
        for _ in range(need):
            table.append(self.free.pop(0))
        self.tables[s.id] = table
        return True

    def release(self, s: KVSequence) -> None:
        for block in reversed(self.tables.pop(s.id, [])):
            self.free.append(block)


class Comparison:
    """Random traffic on both; asserts equal ids after every operation and equal queues every hundred."""

    def __init__(self, policy_class: type[PagedPolicy], config: PagedConfig, seed: int) -> None:
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        self.policy = policy_class(TINY, arena, config)
        self.naive = NaivePool(config)
        self.draw = random.Random(seed)
        self.running: list[KVSequence] = []
        self.next_id = 0
        self.counts: dict[str, int] = {}

    def run(self, operations: int) -> None:
        verbs = (
            self.admit,
            self.admit,
            self.step,
            self.step,
            self.step,
            self.leap,
            self.end,
            self.abort,
            self.take_back,
        )
        for number in range(operations):
            self.draw.choice(verbs)()
            self.end_full_ones()
            self.compare()
            if number % 100 == 0:
                self.compare_queues()

    def reserve(self, s: KVSequence, new: int, lookahead: int = 0, admitting: bool = False) -> bool:
        others = bool(self.running)
        answer = self.policy.reserve(s, new, lookahead=lookahead, admitting=admitting, others_running=others)
        granted = self.naive.allocate(s, new, lookahead, admitting, others)
        assert isinstance(answer, Granted if granted else Refused)
        self.count(f"reserve {'granted' if granted else 'refused'}")
        return granted

    def chunk(self, s: KVSequence) -> int:
        return min(s.num_tokens - s.num_computed_tokens, self.draw.choice((1, 7, 64, 4096)))

    def computed(self, s: KVSequence, new: int) -> None:
        s.num_computed_tokens += new
        if s.num_computed_tokens == s.num_tokens:
            s.num_tokens += 1

    def admit(self) -> None:
        length = self.draw.randint(1, self.policy.config.max_model_len // self.draw.choice((1, 4, 16)) - 1)
        s = KVSequence(id=self.next_id, session=0, turn=0, num_tokens=length, max_tokens=length)
        self.next_id += 1
        new = self.chunk(s)
        if self.reserve(s, new, self.draw.choice((0, 0, 3)), admitting=True):
            self.running.append(s)
            self.computed(s, new)
        self.policy.end_step()

    def step(self) -> None:
        """One step of the running list in order; the last admitted goes when memory is short."""
        index = 0
        while index < len(self.running):
            s = self.running[index]
            new = self.chunk(s)
            if self.reserve(s, new, self.draw.choice((0, 0, 0, 5))):
                self.computed(s, new)
                index += 1
            else:
                victim = self.running.pop()
                self.policy.release(victim, Release.PREEMPT)
                self.naive.release(victim)
                self.count("preempt")
        self.policy.end_step()

    def leap(self) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        longest = max((s.num_tokens for s in decoding), default=0)
        limit = min(
            self.draw.randint(0, 60 + self.policy.config.block_size), self.policy.config.max_model_len - longest
        )
        horizon = self.policy.horizon(decoding, limit)
        k = self.draw.choice((horizon, self.draw.randint(0, horizon)))
        self.policy.advance(decoding, k)
        for _ in range(k):
            for s in decoding:
                assert self.naive.allocate(s, 1, 0, False, True)
                self.computed(s, 1)
        if horizon < limit and k == horizon:
            twin = copy.deepcopy(self.naive)
            assert not all(twin.allocate(s, 1, 0, False, True) for s in decoding), "the horizon is not the largest"
            self.count("tight leap")
        self.count("leap")

    def end(self) -> None:
        if self.running:
            s = self.running.pop(self.draw.randrange(len(self.running)))
            self.policy.release(s, self.draw.choice((Release.FINISH, Release.DROP, Release.PARK)))
            self.naive.release(s)

    def end_full_ones(self) -> None:
        for s in [s for s in self.running if s.num_tokens >= self.policy.config.max_model_len]:
            self.running.remove(s)
            self.policy.release(s, Release.FINISH)
            self.naive.release(s)

    def abort(self) -> None:
        before = copy.deepcopy(self.naive)
        for s in self.running:
            self.reserve(s, self.chunk(s))
        late = KVSequence(id=self.next_id, session=0, turn=0, num_tokens=9, max_tokens=9)
        self.next_id += 1
        self.reserve(late, 9, admitting=True)
        self.policy.abort_step()
        self.naive = before
        self.count("abort")

    def take_back(self) -> None:
        """A scheduler sets a sequence back: it keeps its blocks and computes some tokens again."""
        if self.running:
            s = self.draw.choice(self.running)
            before = s.num_computed_tokens
            s.num_computed_tokens -= min(before, self.draw.randint(0, 3))
            new = self.chunk(s)
            if self.reserve(s, new):
                self.computed(s, new)
            else:
                s.num_computed_tokens = before
            self.policy.end_step()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def compare(self) -> None:
        for s in self.running:
            assert self.policy.block_ids(s) == tuple(self.naive.tables[s.id])
        unheld = self.policy.config.num_blocks - sum(map(len, self.naive.tables.values()))
        usage = self.policy.usage()
        assert usage.pool == unheld * self.policy.config.block_size * TINY.token_bytes
        assert usage.token == sum(s.num_computed_tokens for s in self.running) * TINY.token_bytes

    def compare_queues(self) -> None:
        self.policy.check()
        twin, probe = copy.deepcopy(self.policy), KVSequence(id=-1, session=0, turn=0, num_tokens=0, max_tokens=0)
        longest = self.policy.config.max_model_len
        queue: list[int] = []
        while len(queue) < len(self.naive.free):
            new = min(longest, (len(self.naive.free) - len(queue)) * self.policy.config.block_size)
            assert isinstance(twin.reserve(probe, new), Granted)
            queue += twin.block_ids(probe)
            probe.id -= 1
        assert queue == self.naive.free


CONFIGS = {
    "tight": PagedConfig(num_blocks=24, block_size=4, max_model_len=60),
    "watermark": PagedConfig(num_blocks=60, block_size=16, max_model_len=300, watermark=0.1),
    "chunks in": PagedConfig(num_blocks=40, block_size=3, max_model_len=100, reserve_full_sequence=False),
    "one token a block": PagedConfig(num_blocks=200, block_size=1, max_model_len=64),
    "blocks of 128": PagedConfig(num_blocks=30, block_size=128, max_model_len=2048),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_block_id_is_that_of_the_naive_model(config: PagedConfig) -> None:
    comparison = Comparison(PagedPolicy, config, seed=1)
    comparison.run(10_000)
    for what in ("reserve granted", "reserve refused", "preempt", "leap", "tight leap", "abort"):
        assert comparison.counts[what] >= 20, f"the traffic has too few of: {what}"


# Planted bugs


class FreesForward(PagedPolicy):
    def release(self, s: KVSequence, why: Release) -> None:
        self._tables[s.id].blocks.reverse()
        super().release(s, why)


class HandsOutTheNullBlock(PagedPolicy):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._free.append(0)


class TakesTheBlockAStepEarly(PagedPolicy):
    def reserve(self, s: KVSequence, new: int, *, lookahead: int = 0, **more: bool) -> Granted | Refused:
        return super().reserve(s, new, lookahead=lookahead + 1, **more)


class TakesFromTheTail(PagedPolicy):
    def reserve(self, s: KVSequence, new: int, **more: int) -> Granted | Refused:
        self._free.reverse()
        answer = super().reserve(s, new, **more)
        self._free.reverse()
        return answer


class LeapsSequenceBySequence(PagedPolicy):
    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        for s in decoding:
            super().advance([s], k)


class LeapsTooShort(PagedPolicy):
    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        return max(0, super().horizon(decoding, limit) - 1)


class AbortsToTheTail(PagedPolicy):
    def abort_step(self) -> None:
        before = list(self._free)
        super().abort_step()
        given_back = [block for block in self._free if block not in before]
        self._free.clear()
        self._free.extend([*before, *given_back])


class ForgetsTheWatermark(PagedPolicy):
    def reserve(self, s: KVSequence, new: int, *, others_running: bool = False, **more: int) -> Granted | Refused:
        return super().reserve(s, new, **more)


class AdmitsByTheFirstChunk(PagedPolicy):
    def reserve(self, s: KVSequence, new: int, *, admitting: bool = False, **more: int) -> Granted | Refused:
        return super().reserve(s, new, **more)


@pytest.mark.parametrize(
    "broken",
    [
        FreesForward,
        HandsOutTheNullBlock,
        TakesTheBlockAStepEarly,
        TakesFromTheTail,
        LeapsSequenceBySequence,
        LeapsTooShort,
        AbortsToTheTail,
        ForgetsTheWatermark,
        AdmitsByTheFirstChunk,
    ],
)
def test_a_planted_bug_is_noticed(broken: type[PagedPolicy]) -> None:
    with pytest.raises(AssertionError):
        Comparison(broken, CONFIGS["watermark"], seed=1).run(4_000)


# A leap is its steps


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 40),
    limit=st.integers(0, 200),
    lookahead=st.integers(0, 9),
    cut=st.integers(0, 200),
)
def test_a_leap_equals_single_steps_however_it_is_cut(
    lengths: list[int], block_size: int, spare: int, limit: int, lookahead: int, cut: int
) -> None:
    num_blocks = 1 + spare + sum(-(-(length + lookahead) // block_size) for length in lengths)
    config = PagedConfig(num_blocks=num_blocks, block_size=block_size, max_model_len=150)
    policies, batches = [], []
    for _ in range(2):
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        policy = PagedPolicy(TINY, arena, config)
        batch = [KVSequence(i, i, 0, length, length) for i, length in enumerate(lengths)]
        for s in batch:
            assert policy.reserve(s, s.num_tokens, lookahead=lookahead, admitting=True) == Granted()
            s.num_computed_tokens = s.num_tokens
        policy.end_step()
        policies.append(policy)
        batches.append(batch)
    (leaping, stepping), (in_leap, in_steps) = policies, batches
    limit = min(limit, config.max_model_len - max(lengths))
    k = leaping.horizon(in_leap, limit)
    leaping.advance(in_leap, min(cut, k))
    leaping.advance(in_leap, k - min(cut, k))
    for _ in range(k):
        for s in in_steps:
            assert stepping.reserve(s, 1, others_running=True) == Granted()
            s.num_computed_tokens += 1
        stepping.end_step()
    assert [leaping.block_ids(s) for s in in_leap] == [stepping.block_ids(s) for s in in_steps]
    assert leaping.usage() == stepping.usage()
    assert list(leaping.walk()) == list(stepping.walk())
    leaping.check()
    if k < limit:
        assert any(isinstance(stepping.reserve(s, 1), Refused) for s in in_steps)
