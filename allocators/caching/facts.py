"""Why a caching allocator failed although a free run looks large enough: the rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RULES: Final[Mapping[str, str]] = {
    "segment_size": (
        "the driver has room for the rounded size, but a miss asks for a whole segment: 2 MiB for the small pool, "
        "large_segment_size_mb (20 MiB) up to 10 MiB, else whole multiples of 2 MiB"
    ),
    "stream": "a cached block is large enough, but belongs to another stream",
    "pool": "a cached block is large enough, but belongs to the other pool (small: up to 1 MiB rounded)",
    "cap": "the driver has room for the rounded size, but the allocator's own limit is reached",
}
"""Name of each rule that can bar a free run at the moment of failure, and what it says.

Limits of ``max_split_size_mb`` are not among them: a block that they bar is never split, so that it has been released
to the driver before a request fails. Nor is the tail of a block that was not split: it belongs to its tensor.
"""


def barring_rule(
    *,
    need: int,
    allocation_size: int,
    driver_free: int,
    limit_left: int | None,
    other_stream: int,
    other_pool: int,
) -> str:
    """Name the rule that bars a free run of at least *need* bytes, or "" when there is no such run.

    *other_stream* and *other_pool* are the largest free blocks there, *limit_left* what the cap still allows. The cap
    comes last: :func:`~hbmtwin.allocators.oom.classify` does not count what it bars as free.
    """
    allowed = driver_free if limit_left is None else min(driver_free, limit_left)
    if need <= allowed < allocation_size:
        return "segment_size"
    if other_stream >= need:
        return "stream"
    if other_pool >= need:
        return "pool"
    if allowed < need <= driver_free:
        return "cap"
    return ""
