"""The address map of a pool: as told block by block, with runs of free and of cached ones in one piece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.block_map import block_map
from hbmtwin.allocators.records import KVBlock


def test_neighbours_that_are_alike_are_one_piece() -> None:
    found = list(block_map(11, 10, {1: (10, 7), 2: (10, 7), 3: (4, 7), 4: (10, 8), 6: (10, 8)}, [3, 5, 7, 8]))
    assert found == [
        KVBlock(0, 10, 0, "free", -1),
        KVBlock(10, 20, 20, "running", 7),
        KVBlock(30, 10, 4, "running", 7),
        KVBlock(40, 10, 10, "running", 8),
        KVBlock(50, 10, 0, "cached", -1),
        KVBlock(60, 10, 10, "running", 8),
        KVBlock(70, 20, 0, "cached", -1),
        KVBlock(90, 20, 0, "free", -1),
    ]


@given(
    st.integers(1, 30),
    st.dictionaries(st.integers(0, 29), st.tuples(st.sampled_from((0, 3, 5)), st.integers(0, 2))),
    st.sets(st.integers(0, 29)),
)
def test_it_tells_what_a_list_of_blocks_tells(
    num_blocks: int, held: dict[int, tuple[int, int]], cached: set[int]
) -> None:
    held = {block: held[block] for block in held if block < num_blocks}
    keyed = [block for block in sorted(cached) if block < num_blocks]
    expected: list[list[KVBlock]] = []
    for id in range(num_blocks):
        token_bytes, owner = held.get(id, (0, -1))
        state = "running" if id in held else "cached" if id in keyed else "free"
        block = KVBlock(id * 5, 5, token_bytes, state, owner)
        if expected and expected[-1][-1][2:] == block[2:] and token_bytes != 3:
            expected[-1].append(block)
        else:
            expected.append([block])
    pieces = [
        KVBlock(run[0].address, 5 * len(run), sum(block.token_bytes for block in run), run[0].state, run[0].owner)
        for run in expected
    ]
    assert list(block_map(num_blocks, 5, held, keyed)) == pieces
