"""The blocks of a pool in order of address, as an address map shows them: millions of free ones are one piece.

::

    ids      0 1 2 3 4 5 6 7 8
    state    f r r c c f f f f          f: free, r: running, c: cached
    pieces   f r r  cc  ffff
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hbmtwin.allocators.records import KVBlock


def block_map(
    num_blocks: int, block_bytes: int, held: Mapping[int, tuple[int, int]], cached: Collection[int] = ()
) -> Iterator[KVBlock]:
    """*held* blocks one by one, with the bytes of tokens in each and its owner; neighbours that are cached, or free, in
    one piece. Blocks that are held count as such where they are *cached* too. O((held + cached) log)."""
    start = 0
    """First block that is not told yet."""
    run = 0
    """How many cached ones stand from there."""
    for block in sorted(held.keys() | set(cached)):
        if run and (block != start + run or block in held):
            yield KVBlock(start * block_bytes, run * block_bytes, 0, "cached", -1)
            start, run = start + run, 0
        if block not in held:
            if not run and block > start:
                yield KVBlock(start * block_bytes, (block - start) * block_bytes, 0, "free", -1)
                start = block
            run += 1
            continue
        if block > start:
            yield KVBlock(start * block_bytes, (block - start) * block_bytes, 0, "free", -1)
        token_bytes, owner = held[block]
        yield KVBlock(block * block_bytes, block_bytes, token_bytes, "running", owner)
        start = block + 1
    if run:
        yield KVBlock(start * block_bytes, run * block_bytes, 0, "cached", -1)
        start += run
    if num_blocks > start:
        yield KVBlock(start * block_bytes, (num_blocks - start) * block_bytes, 0, "free", -1)
