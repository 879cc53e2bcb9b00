"""Prompts as ids of blocks: an id stands for the tokens of its block *and all before them*.

::

    block 512, input_length 1300    hash_ids [0, 7, 9]       ids 0 and 7 full, 9 for 276 tokens
    spans                           (name, 0, 512) (name, 7 x 512, 512) (name, 9 x 512, 276)

Two prompts share a prefix exactly where their ids are equal. As a piece of an endless stream an id can be cut at any
place: pages of 16 tokens share what the 512 of a block shared, the 32 children of each id being its own.
"""

from __future__ import annotations

from typing import Any

from hbmtwin.workloads.formats.rows import BadRow, shown
from hbmtwin.workloads.records import Span

_LAST_ID = 2**63


def checked_ids(ids: Any) -> list[int]:
    """``hash_ids`` as it should be. Raise BadRow."""
    if not isinstance(ids, list):
        raise BadRow(f"hash_ids is {shown(ids)}", "it must be a list of whole numbers")
    for id in ids:
        # Not isinstance: JSON's true is an int to Python, and would pass for block 1.
        if type(id) is not int:
            raise BadRow(f"an id in hash_ids is {shown(id)}", "it must be a whole number")
        if not 0 <= id < _LAST_ID:
            raise BadRow(f"an id in hash_ids is {shown(id)}", "it must be from 0 to 2^63 - 1")
    return ids


def prompt_spans(stream: str, ids: Any, prompt_tokens: int, block_size: int) -> tuple[Span, ...]:
    """The prompt that *ids* stand for, its last block as long as is left. O(ids).

    Raise BadRow where they are no ids, or not one for each block, a begun one included.
    """
    ids = checked_ids(ids)
    if len(ids) != -(-prompt_tokens // block_size):
        raise BadRow(
            f"{len(ids)} hash_ids for input_length {prompt_tokens}",
            f"there must be one for each {block_size} tokens, begun ones included; if ids stand for another number of "
            "tokens, set workload.trace_block_size",
        )
    return pieces(stream, ids, prompt_tokens, block_size)


def pieces(stream: str, ids: list[int], tokens: int, block_size: int) -> tuple[Span, ...]:
    """*tokens* tokens of the blocks *ids*, adjacent ones merged."""
    spans: list[Span] = []
    first, count, left = ids[0] if ids else 0, 0, tokens
    for id in ids:
        if id != first + count:
            spans.append((stream, first * block_size, count * block_size))
            left -= count * block_size
            first, count = id, 0
        count += 1
    if left:
        spans.append((stream, first * block_size, left))
    return tuple(spans)
