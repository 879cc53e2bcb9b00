"""The blocks of a pool in order of address, as an address map shows them: millions of free ones are one piece.

::

    ids      0 1 2 3 4 5 6 7 8 9
    state    f A A a c c f f f f        f: free, A: running and full, a: the same partly, c: cached
    pieces   f  AA a  cc   ffff
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from hbmtwin.allocators.records import KVBlock

Held = dict[int, tuple[int, int]]
"""Of each block that a sequence has the bytes of tokens in it, and its owner: of those who share it the first."""


def enter(held: Held, owner: int, blocks: Sequence[int], tokens: int, block_size: int, token_bytes: int) -> None:
    """Add the table of a sequence that has so many *tokens*."""
    for place, block in enumerate(blocks):
        held.setdefault(block, (max(0, min(block_size, tokens - place * block_size)) * token_bytes, owner))


def block_map(
    num_blocks: int, block_bytes: int, held: Mapping[int, tuple[int, int]], cached: Collection[int] = ()
) -> Iterator[KVBlock]:
    """The whole pool, neighbours that are alike in one piece: free, cached, or of one owner and all full or all without
    a token. Held blocks count as such where they are *cached* too. O((held + cached) log)."""
    piece = KVBlock(0, 0, 0, "free", -1)
    for block in sorted(held.keys() | set(cached)):
        start = block * block_bytes
        gap = start - piece.address - piece.size
        if gap:
            if piece.size:
                yield piece
            piece = KVBlock(start - gap, gap, 0, "free", -1)
        token_bytes, owner = held.get(block, (0, -1))
        state = "running" if block in held else "cached"
        alike = state == piece.state and owner == piece.owner and token_bytes in (0, block_bytes)
        if alike and piece.size and token_bytes * piece.size == piece.token_bytes * block_bytes:
            piece = KVBlock(piece.address, piece.size + block_bytes, piece.token_bytes + token_bytes, state, owner)
            continue
        if piece.size:
            yield piece
        piece = KVBlock(start, block_bytes, token_bytes, state, owner)
    if piece.size:
        yield piece
    end = piece.address + piece.size
    if end < num_blocks * block_bytes:
        yield KVBlock(end, num_blocks * block_bytes - end, 0, "free", -1)
