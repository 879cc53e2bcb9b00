"""A prompt as ids of its blocks, each of which stands for its block and all before it: what a prefix cache looks up.

::

    spans    (system, 0, 24) (user, 0, 10)                          blocks of 16
    block    system 0..15    system 16..23, user 0..7    user 8..9
    id       a = hash of it  b = hash of a and it        hash of b and it, if partial blocks have ids

Equal beginnings of two prompts are equal beginnings of their chains.
"""

from __future__ import annotations

import hashlib

from hbmtwin.workloads.records import Span, WorkloadError, merge_spans

_ID_BYTES = 16


def block_chain(spans: tuple[Span, ...], block_size: int, *, partial: bool = False) -> list[bytes]:
    """The chain of a prompt, as ``Request.spans`` gives it: an id for each whole block of *block_size* tokens.

    Two ids are equal exactly where all tokens up to the end of their blocks are, however the spans are cut (but for
    a clash of 128-bit digests). With *partial* the tokens behind the last whole block have an id too, as in Mooncake's
    traces; only as many equal tokens at the end of a prompt have the same. The same in every process. O(blocks +
    pieces). Raise WorkloadError on a block size below 1.
    """
    if block_size < 1:
        raise WorkloadError(f"a block has at least 1 token, not {block_size}")
    chain: list[bytes] = []
    block: list[Span] = []
    room = block_size

    def close() -> None:
        parent = chain[-1] if chain else b""
        chain.append(hashlib.blake2b(parent + repr(block).encode(), digest_size=_ID_BYTES).digest())

    # Merged, equal tokens have one writing only; so each block's pieces name its tokens.
    for stream, start, length in merge_spans(spans):
        while length >= room:
            block.append((stream, start, room))
            close()
            start, length = start + room, length - room
            block, room = [], block_size
        if length:
            block.append((stream, start, length))
            room -= length
    if block and partial:
        close()
    return chain
