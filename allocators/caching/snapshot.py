"""The segments as ``torch.npu.memory_snapshot()`` shows them, and every invariant of them.

Of an expandable segment each maximal mapped run is a segment of its own there; unmapped ranges do not appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hbmtwin.allocators.caching.blocks import ALLOCATED, FREE, UNMAPPED, WAITING, Block, BlockPool
from hbmtwin.allocators.caching.expandable import ExpandableSegments
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.caching.workspace import WorkspaceBlock
from hbmtwin.allocators.stats import (
    ACTIVE,
    ACTIVE_BYTES,
    ALLOCATED_BYTES,
    ALLOCATION,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
    RESERVED_BYTES,
    SEGMENT,
    SMALL,
)

STATES: Final = ("active_allocated", "active_pending_free", "inactive", "unmapped")
"""Torch's word for each state of a block."""


def mapped_runs(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """The blocks of each segment as a snapshot shows them, in address order. O(n log n)."""
    run: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.address):
        if block.state == UNMAPPED:
            continue
        if run and block.prev is not run[-1]:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def memory_snapshot(blocks: Iterable[Block], workspaces: Mapping[int, WorkspaceBlock]) -> list[dict[str, Any]]:
    """Torch's list of segments, in its order and with its keys; a stream is its number. O(n log n).

    As there, an inactive block shows the size that was last requested of its block object, and workspaces stand behind
    all others (here by stream), inactive, one that failed with address 0.
    """
    segments = []
    for run in mapped_runs(blocks):
        head = run[0]
        active = [block for block in run if block.state <= WAITING]
        segments.append(
            _segment(
                head.address,
                [_block(block.address, block.size, block.requested, STATES[block.state]) for block in run],
                stream=head.stream,
                allocated_size=sum(block.size for block in run if block.state == ALLOCATED),
                active_size=sum(block.size for block in active),
                requested_size=sum(block.requested for block in active),
                pool_id=head.home.pool.pool_id,
                segment_type="large" if head.home.kind == LARGE else "small",
                is_expandable=head.expandable is not None,
            )
        )
    for stream, space in sorted(workspaces.items()):
        address = space.address or 0
        segments.append(_segment(address, [_block(address, space.size, space.requested, "inactive")], stream=stream))
    return segments


def _segment(
    address: int,
    blocks: list[dict[str, Any]],
    *,
    stream: int,
    allocated_size: int = 0,
    active_size: int = 0,
    requested_size: int = 0,
    pool_id: int = 0,
    segment_type: str = "large",
    is_expandable: bool = False,
) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": allocated_size,
        "active_size": active_size,
        "requested_size": requested_size,
        "stream": stream,
        "segment_pool_id": (0, pool_id),
        "segment_type": segment_type,
        "is_expandable": is_expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, requested_size: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested_size, "state": state, "frames": []}


def check_segments(
    segments: Segments, expandable: ExpandableSegments, pools: list[BlockPool], active: list[Block]
) -> None:
    """Assert all invariants of segments, blocks, free lists and books. *active*: in use or waiting. O(n log n)."""
    free = [block for pool in pools for home in pool.homes() for block in home.blocks]
    unmapped = [block for pool in pools for home in pool.homes() for block in home.unmapped]
    grid = segments.grid
    rows = ([0] * 11, [0] * 11)
    ranges = dict(segments.sizes) | {segment.address: segment.size for segment in expandable.live}
    ends = {start + size for start, size in ranges.items()}
    everything = sorted([*active, *free, *unmapped], key=lambda block: block.address)
    assert len(set(map(id, everything))) == len(everything), "a block is in one place only"
    for block in everything:
        _check_block(block, ranges, ends)
        row = rows[block.home.kind]
        if block.expandable is None:
            row[SEGMENT] += block.prev is None
            if block.state == FREE and block.is_split:
                row[INACTIVE_SPLIT] += 1
                row[INACTIVE_SPLIT_BYTES] += block.size
        if block.state != UNMAPPED:
            row[RESERVED_BYTES] += block.size
        if block.state == ALLOCATED:
            row[ALLOCATION] += 1
            row[ALLOCATED_BYTES] += block.size
        if block.state <= WAITING:
            row[ACTIVE] += 1
            row[ACTIVE_BYTES] += block.size
            row[REQUESTED_BYTES] += block.requested
    heads = [block.address for block in everything if block.prev is None]
    assert heads == sorted(ranges), "every segment has blocks"
    assert all(block.state == FREE for block in free), "listed blocks are free"
    assert all(block.state == UNMAPPED for block in unmapped), "listed ranges are unmapped"
    for pool in pools:
        for home in pool.homes():
            home.check()
            assert all(block.home is home for block in (*home.blocks, *home.unmapped)), "blocks are in their list"
    for segment in expandable.live:
        mapped = sum(b.size for b in everything if b.expandable is segment and b.state != UNMAPPED)
        assert mapped == len(segment.pages) * segment.page_size, "mapped blocks are backed by pages"
    for family in (ALLOCATION, ALLOCATED_BYTES, REQUESTED_BYTES, SEGMENT, RESERVED_BYTES, ACTIVE, ACTIVE_BYTES):
        assert grid.total(family) == rows[SMALL][family] + rows[LARGE][family], f"books, row {family}"
    for kind in (SMALL, LARGE):
        kept = 5 if segments.uncounted_cuts else 7
        assert grid.current[kind][:kept] == rows[kind][:kept], "books of a pool"
    segments.events.check()


def _check_block(block: Block, ranges: dict[int, int], ends: set[int]) -> None:
    at = f"block at {block.address:#x}"
    assert block.size > 0, f"{at} is empty"
    assert (block.event_count > 0) <= (block.state == WAITING), f"{at}: events"
    if block.prev is None:
        assert block.address in ranges, f"{at} starts no segment"
    if block.next is None:
        assert block.address + block.size in ends, f"{at} ends no segment"
        return
    after = block.next
    assert after.prev is block, f"links at {block.address:#x}"
    assert after.address == block.address + block.size, f"hole or overlap behind {block.address:#x}"
    assert after.home is block.home, f"{at}: one segment, one pool and stream"
    assert after.expandable is block.expandable, f"{at}: one segment"
    assert block.state < FREE or after.state != block.state, f"free neighbours at {block.address:#x}"
