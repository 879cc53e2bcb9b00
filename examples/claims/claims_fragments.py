"""The claim of write-up A on freed places that are not adjacent."""

from __future__ import annotations

from claim import GIB, MIB, Found, claim, simulate
from pieces import Piece, pieces

from hbmtwin import HbmDriver, Result, make_allocator
from hbmtwin.allocators.records import Tag


def a6_pool(died: Result) -> list[Piece]:
    """The pool in address order when the large request fails."""
    assert died.oom is not None
    pool = pieces(died.checkpoints)
    assert sum(piece.size for piece in pool if piece.what == "free") == died.oom["free_bytes"]
    assert max(piece.size for piece in pool if piece.what == "free") == died.oom["largest_free_bytes"]
    return pool


def placed_afresh(pool: list[Piece], asked_bytes: int) -> int:
    """Put the buffers into an empty pool of the same size, side by side; the largest free piece then.

    Ends in OutOfMemory if what was *asked* for does not fit there.
    """
    pool_bytes = sum(piece.size for piece in pool)
    allocator = make_allocator("pooled", HbmDriver(pool_bytes), {"limit_bytes": pool_bytes})
    for piece in pool:
        if piece.what == "kv":
            allocator.malloc(piece.size, tag=Tag.KV)
    largest: int = allocator.usage().largest_free
    allocator.malloc(asked_bytes, tag=Tag.KV)
    return largest


@claim(
    "A6",
    "Freed places are not adjacent, so that a large request fails though their sum is free.",
    picture="The pool in address order when a request fails, and the same buffers placed side by side",
)
def a6() -> Found:
    """The map at the death, and the same buffers in an empty pool."""
    died, paged = simulate("A6"), simulate("A6", preset="paged")
    oom = died.oom
    assert oom is not None
    assert oom["cause"] == "external_fragmentation"
    need, free, largest = (oom[f"{name}_bytes"] for name in ("need", "free", "largest_free"))
    assert largest < need <= free
    pool = a6_pool(died)
    holes = sum(piece.what == "free" for piece in pool)
    together = placed_afresh(pool, oom["asked_bytes"])
    assert together == free
    assert paged.oom is None
    served = paged.summary["requests_completed"]
    assert served == paged.summary["requests_total"]
    return Found(
        "holds",
        f"at {oom['time_s']:.1f} s {need / MIB:,.0f} MiB are asked for, {free / MIB:,.0f} free in {holes} pieces, the "
        f"largest {largest / MIB:,.0f}; cause: external fragmentation. The same {len(pool) - holes} buffers side by "
        f"side leave {together / MIB:,.0f} MiB in one piece, and the request fits",
        "Each freed place lies between two chats that go on. Only places are short, not memory: in pages all "
        f"{served} requests are served. The traffic was made for the map; on drawn lengths C5 dies so, and C6 in a "
        "pool.",
        f"Of {(free + _held(pool)) / GIB:.1f} GiB more than half is free, and no request of more than "
        f"{largest / MIB:,.0f} MiB can be placed. A free sum says nothing; the largest free piece does, which a result "
        'has under `summary["oom"]`, and the report as a map.',
    )


def _held(pool: list[Piece]) -> int:
    return sum(piece.size for piece in pool if piece.what == "kv")
