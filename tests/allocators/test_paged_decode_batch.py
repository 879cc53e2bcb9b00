"""Which step takes a block for whom: a batch beside one that asks every table in every step.

And what it costs: after the first call, a leap looks at the sequences that take or fill a block, and at no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.decode_batch import NEVER, BlockTable, DecodeBatch
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


def table_of(tokens: int, spare: int, size: int, keys: bool) -> BlockTable:
    """Its blocks but *spare* ones are needed for its tokens; full ones have their keys."""
    table = BlockTable(KVSequence(0, 0, 0, 0, 0), NEVER, 0)
    table.blocks = [0] * (-(-tokens // size) + spare)
    table.tokens = tokens
    table.keyed = tokens // size
    table.next_key = (table.keyed + 1) * size if keys else NEVER
    return table


def batch_of(tables: list[BlockTable], size: int) -> DecodeBatch[BlockTable]:
    num_blocks, keys = [len(table.blocks) for table in tables], [table.next_key for table in tables]
    return DecodeBatch([], tables, num_blocks, size, keys)


def one_by_one(tables: list[BlockTable], size: int, steps: int) -> list[tuple[int, bool]]:
    """Every table asked in every step."""
    events = []
    room = [len(table.blocks) * size for table in tables]
    for step in range(1, steps + 1):
        for place, table in enumerate(tables):
            if table.tokens + step > room[place]:
                room[place] += size
                events.append((place, False))
            if table.next_key != NEVER and (table.tokens + step) % size == 0:
                events.append((place, True))
    return events


TABLES = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 0, 1, 3]), st.booleans()), min_size=1, max_size=9
)


@given(TABLES, st.integers(1, 9), st.lists(st.integers(0, 30), max_size=5), st.integers(0, 60), st.integers(1, 90))
def test_what_is_due_is_what_asking_everybody_finds(
    made_of: list[tuple[int, int, bool]], size: int, pieces: list[int], free: int, limit: int
) -> None:
    tables = [table_of(tokens, spare, size, keys) for tokens, spare, keys in made_of]
    batch = batch_of(tables, size)
    gone = 0
    wanted = one_by_one(tables, size, sum(pieces) + limit)
    for piece in pieces:
        before = len(one_by_one(tables, size, gone))
        needed = batch.need(piece)
        events = list(batch.go(piece))
        gone += piece
        assert events == wanted[before : before + len(events)]
        assert len(events) + before == len(one_by_one(tables, size, gone))
        assert needed == sum(not fills for _, fills in events)
    assert (batch.lead, batch.longest) == (gone, gone + max(table.tokens for table in tables))
    horizon = min(batch.horizon(free, limit), limit)
    assert batch.need(horizon) <= free
    assert horizon == limit or batch.need(horizon + 1) > free
    before = [table.tokens for table in tables]
    batch.fold()
    batch.fold()
    assert [table.tokens for table in tables] == [tokens + gone for tokens in before]


def test_the_picture_of_the_docstring() -> None:
    tables = [table_of(tokens, 0, 4, False) for tokens in (6, 3, 8, 7)]
    tables[2].blocks.append(0)
    batch = batch_of(tables, 4)
    assert list(batch.go(5)) == [(1, False), (3, False), (0, False), (2, False)]
    assert list(batch.go(2)) == [(1, False), (3, False), (0, False)]


# What a leap costs


class Watched(list[Any]):
    """A list that counts who looks at it."""

    walks = reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def running(count: int, caching: bool, longest: int = 4096) -> tuple[PagedPolicy, Watched]:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = PagedConfig(num_blocks=40 * count, max_model_len=longest, block_size=16, enable_prefix_caching=caching)
    policy = PagedPolicy(TINY, arena, config)
    batch = Watched()
    for id in range(count):
        s = KVSequence(id, id, 0, 20 + id % 16, 4096, spans=((f"s{id}", 0, 4096),))
        assert policy.reserve(s, s.num_tokens, admitting=True) == Granted()
        s.num_computed_tokens = s.num_tokens
        batch.append(s)
    policy.end_step()
    return policy, batch


@pytest.mark.parametrize("caching", [False, True])
def test_a_list_that_is_known_is_not_walked_again(caching: bool) -> None:
    policy, batch = running(208, caching)
    changed: list[BlockTable] = []
    policy._changed = lambda table: (changed.append(table), PagedPolicy._changed(policy, table))
    policy.advance(batch, 1)
    assert batch.walks == 1
    changed.clear()
    batch.walks = batch.reads = 0
    held = policy.usage().table
    for _ in range(30):
        assert policy.horizon(batch, 5_000) < 5_000
        policy.advance(batch, 3)
    taken = (policy.usage().table - held) // 4
    assert taken == 208 * 90 // 16
    assert (batch.walks, batch.reads) == (0, 0)
    assert len(changed) == (2 * taken if caching else taken)
    policy.check()


def test_whatever_else_happens_ends_a_batch() -> None:
    policy, batch = running(4, False)
    tokens = policy.usage().token

    def walked() -> int:
        policy.check()
        batch.walks = 0
        policy.advance(batch, 1)
        return batch.walks

    assert (walked(), walked()) == (1, 0)
    assert policy.block_ids(batch[0])
    list(policy.walk())
    policy.end_step()
    assert walked() == 0
    assert policy.usage().token == tokens + 3 * 4 * TINY.token_bytes
    batch[3].num_computed_tokens += 3
    assert policy.reserve(batch[3], 1) == Granted()
    assert walked() == 1
    policy.abort_step()
    assert walked() == 1
    policy.release(batch.pop(), Release.FINISH)
    assert (walked(), walked()) == (1, 0)
    assert policy.advance(list(batch), 1) is None
    assert walked() == 1, "another list was in use"


def test_steps_past_the_longest_length_are_refused() -> None:
    policy, batch = running(2, False, longest=100)
    usage = policy.usage()
    with pytest.raises(ValueError, match="80 steps lead to 101 tokens, past max_model_len 100"):
        policy.advance(batch, 80)
    assert policy.usage() == usage
    policy.advance(batch, 9)
    with pytest.raises(ValueError, match="71 steps lead to 101 tokens"):
        policy.advance(batch, 71)
    policy.advance(batch, 70)
    assert policy.usage().token == (99 + 100) * TINY.token_bytes
    policy.check()


@pytest.mark.parametrize("fault", ["order of places", "another step", "no second round"])
def test_a_planted_bug_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DecodeBatch.go

    def go(self: DecodeBatch[BlockTable], steps: int) -> Iterator[tuple[int, bool]]:
        events = list(honest(self, steps))
        if fault == "order of places":
            events.sort()
        elif fault == "another step":
            events = list(honest(self, 1)) + events
        else:
            events = list(dict.fromkeys(events))
        return iter(events)

    monkeypatch.setattr(DecodeBatch, "go", go)
    with pytest.raises(AssertionError):
        test_what_is_due_is_what_asking_everybody_finds.hypothesis.inner_test(
            [(6, 0, True), (3, 0, True), (8, 1, False), (7, 0, True)], 4, [5, 1, 9], 10, 30
        )
