"""A group of decoding sequences against the same ones reserved one by one: same ids, same queue, same books."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from hbmtwin.allocators.decode_batch import DecodeBatch
from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, Refused, Release

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


def policy(blocks: int, size: int, caching: bool) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = PagedConfig(num_blocks=blocks, max_model_len=4096, block_size=size, enable_prefix_caching=caching)
    return PagedPolicy(TINY, arena, config)


class Pair:
    """A server that plans its decoders together, and one that plans each alone; the same things happen to both."""

    def __init__(self, seed: int, size: int, caching: bool) -> None:
        self.draw = Random(seed)
        self.together, self.singly = policy(40, size, caching), policy(40, size, caching)
        self.group = DecodeGroup()
        self.members: list[tuple[KVSequence, KVSequence, int]] = []
        """In the group, alone, and how many tokens both will have."""
        self.next_id = 0
        self.seen = dict.fromkeys(("short", "aborted", "left", "leapt", "stepped"), 0)

    def run(self, steps: int) -> dict[str, int]:
        for _ in range(steps):
            self.admit()
            if self.members:
                self.step()
            self.compare()
        return self.seen

    def admit(self) -> None:
        """One whose prompt is computed joins; sometimes the group steps in the same step, before it."""
        if self.draw.random() < 0.6 or len(self.members) > 8:
            return
        id, prompt = 100 - self.next_id, self.draw.randint(1, 12)  # ids fall: they are no order of running
        self.next_id += 1
        spans = (("system", 0, prompt), (f"out/{id}", 0, 200))
        pair = [KVSequence(id, id, 0, prompt, 200, spans=spans) for _ in range(2)]
        hits = [p.lookup(s) for p, s in zip((self.together, self.singly), pair, strict=True)]
        assert hits[0] == hits[1]
        answers = [
            p.reserve(s, prompt - hits[0], hit=hits[0], admitting=True, others_running=bool(self.members))
            for p, s in zip((self.together, self.singly), pair, strict=True)
        ]
        assert answers[0] == answers[1]
        if isinstance(answers[0], Refused):
            for p, s in zip((self.together, self.singly), pair, strict=True):
                p.release(s, Release.DROP)
            return
        for p, s in zip((self.together, self.singly), pair, strict=True):
            p.end_step()
            s.num_computed_tokens, s.num_tokens = prompt, prompt + 1
        final = prompt + 1 + self.draw.randint(1, 40)
        self.group.join(pair[0], final)
        self.members.append((pair[0], pair[1], final))

    def step(self) -> None:
        """A step of all, as far as blocks go; then, at times, a leap, or the step is taken back."""
        granted = self.together.reserve_together(self.group)
        refused = [s for _, s, _ in self.members if isinstance(self.singly.reserve(s, 1), Refused)]
        assert granted == (not refused)
        if refused:  # as a scheduler then does
            self.group.fold()
            assert [s.id for s, _, _ in self.members if isinstance(self.together.reserve(s, 1), Refused)] == [
                s.id for s in refused
            ]
        if refused or self.draw.random() < 0.1:
            self.seen["short" if refused else "aborted"] += 1
            self.together.abort_step()
            self.singly.abort_step()
            if refused:
                self.break_up()
            return
        self.together.end_step()
        self.singly.end_step()
        steps = 1
        if self.draw.random() < 0.5:
            limit = self.draw.randint(0, self.group.steps_left - 1)
            alone = [s for _, s, _ in self.members]
            further = self.together.horizon(self.group, limit)
            assert further == self.singly.horizon(alone, limit)
            self.together.advance(self.group, further)
            self.singly.advance(alone, further)
            steps += further
            self.seen["leapt"] += further > 0
        self.seen["stepped"] += 1
        ended = self.group.go(steps)
        for _, s, _ in self.members:
            s.num_tokens += steps
            s.num_computed_tokens += steps
        gone = [m for m in self.members if m[1].num_tokens >= m[2]]
        assert [s.id for s in ended] == [s.id for s, _, _ in gone]
        self.leave(gone, Release.FINISH)

    def break_up(self) -> None:
        """Blocks are short: the last one gives way, and the others are a new group."""
        self.group.fold()
        self.leave(self.members[-1:], Release.PREEMPT)
        self.group = DecodeGroup()
        for s, _, final in self.members:
            self.group.join(s, final)

    def leave(self, gone: list[tuple[KVSequence, KVSequence, int]], why: Release) -> None:
        for first, second, _ in gone:
            assert (first.num_tokens, first.num_computed_tokens) == (second.num_tokens, second.num_computed_tokens)
            self.together.release(first, why)
            self.singly.release(second, why)
            self.seen["left"] += 1
        self.members = [m for m in self.members if m not in gone]

    def compare(self) -> None:
        together, singly = self.together, self.singly
        assert together.free_queue() == singly.free_queue()
        assert together.usage() == singly.usage()
        for first, second, _ in self.members:
            assert together.block_ids(first) == singly.block_ids(second)
        assert len(self.group) == len(self.members)
        assert [s.id for s in self.group] == [s.id for s, _, _ in self.members]
        assert self.group.context_tokens == sum(s.num_computed_tokens for _, s, _ in self.members)
        if self.draw.random() < 0.2:
            together.check()
            self.group.fold()
            assert [s.num_tokens for s in self.group] == [s.num_tokens for _, s, _ in self.members]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_group_is_its_members_one_by_one(size: int, caching: bool) -> None:
    seen = dict.fromkeys(("short", "aborted", "left", "leapt", "stepped"), 0)
    for seed in range(6):
        for name, count in Pair(seed, size, caching).run(300).items():
            seen[name] += count
    assert all(seen.values()) or size == 16, seen
    assert seen["left"] > 50


def joins_at_its_own_count(honest: Callable[..., Any]) -> Callable[..., Any]:
    def join(self: DecodeGroup, s: KVSequence, final_tokens: int) -> None:
        honest(self, s, final_tokens)
        s.num_tokens += self.lead
        s.num_computed_tokens += self.lead

    return join


def places_by_id(honest: Callable[..., Any]) -> Callable[..., Any]:
    def join(self: DecodeBatch[Any], table: Any, *rest: int) -> int:
        self._next_place = table.sequence.id + 1000
        return honest(self, table, *rest)

    return join


def forgets_the_block(honest: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: DecodeBatch[Any], place: int, num_blocks: int, next_key: int) -> None:
        table = self.tables.pop(place)
        table.tokens += self.lead
        self.longest = self._longest()

    return leave


def keeps_what_it_took(honest: Callable[..., Any]) -> Callable[..., Any]:
    def reserve_together(self: PagedPolicy, group: DecodeGroup) -> bool:
        granted = honest(self, group)
        self._stepped = False
        return bool(granted)

    return reserve_together


def takes_though_short(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: 0


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (DecodeGroup, "join", joins_at_its_own_count),
        (DecodeBatch, "join", places_by_id),
        (DecodeBatch, "leave", forgets_the_block),
        (PagedPolicy, "reserve_together", keeps_what_it_took),
        (DecodeBatch, "need_now", takes_though_short),
    ],
)
def test_a_planted_bug_is_noticed(
    where: type, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault(getattr(where, name)))
    pairs = [Pair(seed, 4, caching=False) for seed in range(6)]
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        [pair.run(300) for pair in pairs]
