"""Why a caching allocator failed although a free run looks large enough: the rules by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from hbmtwin.allocators.caching.blocks import FreeBlocks

RULES: Final[Mapping[str, str]] = {
    "segment_size": (
        "the driver has room for the rounded size, but a miss asks for a whole segment: 2 MiB for the small pool, "
        "large_segment_size_mb (20 MiB) up to 10 MiB, else whole multiples of 2 MiB (of 1 GiB under page_size:1g; with "
        "expandable_segments whole pages)"
    ),
    "no_second_search": (
        "a block that is large enough became free only when the allocator waited for its last events, and it does not "
        "search again after that (pytorch#189504; research_after_sync:True is the proposed fix)"
    ),
    "stream": "a cached block is large enough, but belongs to another stream",
    "pool": "a cached block is large enough, but belongs to the other pool (small: up to 1 MiB rounded)",
    "private_pool": "a cached block is large enough, but belongs to a private pool that this request may not use",
    "expandable_segments": (
        "a cached block is large enough, but lies in an expandable segment, and expandable_segments is off by now"
    ),
    "max_split_size": (
        "a cached block is large enough, but max_split_size_mb keeps it for requests of its size, and a private pool "
        "does not release what it has"
    ),
    "preempted": (
        "the driver has room, but throw_on_npumalloc_oom refuses what would exceed per_process_memory_fraction"
    ),
    "workspace": (
        "a cached block is large enough, but operators' workspaces (TASK_QUEUE_ENABLE=2) come from the driver only, "
        "and do not make the cache give anything back"
    ),
    "cap": "the driver has room for the rounded size, but the allocator's own limit is reached",
}
"""Name of each rule that can bar a free run at the moment of failure, and what it says.

The tail of a block that was not split is not among them: it belongs to its tensor.
"""


def barring_rule(
    home: FreeBlocks,
    others: Iterable[FreeBlocks],
    *,
    need: int,
    allocation_size: int,
    driver_free: int,
    limit_left: int | None,
    expandable: bool,
    max_split_size: int,
) -> str:
    """Name the rule that bars a free run of at least *need* bytes, or "" when there is no such run.

    *home* is the list that was searched, *others* are all others, *limit_left* is what the cap still allows. The cap
    comes last: :func:`~hbmtwin.allocators.oom.classify` does not count what it bars as free. O(free lists + blocks of
    *home*).
    """
    allowed = driver_free if limit_left is None else min(driver_free, limit_left)
    if need <= allowed < allocation_size or (expandable and need <= allowed):
        return "segment_size"
    fitting = [block for block in home.blocks if block.size >= need]
    if fitting:
        if not expandable and all(block.expandable is not None for block in fitting):
            return "expandable_segments"
        return "max_split_size" if fitting[0].size >= max_split_size else "no_second_search"
    barred = [other for other in others if other is not home and other.largest() >= need]
    for other in barred:
        if other.pool is home.pool:
            return "stream"
    for other in barred:
        if other.pool.private is home.pool.private:
            return "pool"
    if barred:
        return "private_pool"
    if allowed < need <= driver_free:
        return "cap"
    return ""
