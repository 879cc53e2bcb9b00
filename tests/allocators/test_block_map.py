"""The address map of a pool: as told block by block, with runs of free and of cached ones in one piece."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.block_map import block_map
from hbmtwin.allocators.records import KVBlock


def test_runs_are_one_piece_and_held_blocks_are_told_one_by_one() -> None:
    found = list(block_map(9, 10, {1: (10, 7), 2: (4, 8), 4: (1, 7)}, [3, 4, 5, 6]))
    assert found == [
        KVBlock(0, 10, 0, "free", -1),
        KVBlock(10, 10, 10, "running", 7),
        KVBlock(20, 10, 4, "running", 8),
        KVBlock(30, 10, 0, "cached", -1),
        KVBlock(40, 10, 1, "running", 7),
        KVBlock(50, 20, 0, "cached", -1),
        KVBlock(70, 20, 0, "free", -1),
    ]


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))
def test_it_tells_what_a_list_of_blocks_tells(num_blocks: int, held: set[int], cached: set[int]) -> None:
    owners = {block: (block + 1, block % 3) for block in sorted(held) if block < num_blocks}
    keyed = [block for block in sorted(cached) if block < num_blocks]
    one_by_one = [
        ("running", block) if block in owners else ("cached" if block in keyed else "free", -1)
        for block in range(num_blocks)
    ]
    expected, at = [], 0
    for (state, block), run in groupby(one_by_one):
        blocks = len(list(run))
        token_bytes, owner = owners[block] if state == "running" else (0, -1)
        expected.append(KVBlock(at * 5, blocks * 5, token_bytes, state, owner))
        at += blocks
    assert list(block_map(num_blocks, 5, owners, keyed)) == expected
