"""Torch's grid of allocator statistics: families x pools x {current, peak, allocated, freed}.

The grid is written in the innermost loop of every simulation, so it is three lists of plain integers per pool, and
each event is one method that updates all families it touches. What can be derived is derived when read: ``allocated``
(the running sum of increases) is ``current + freed``, and everything under ``all`` but the peaks is the sum of both
pools. The peak of a sum is not the sum of the peaks and is kept apart.
"""

from __future__ import annotations

from typing import Final

SMALL: Final = 0
LARGE: Final = 1

# Rows of a pool. Without deferred frees a block stops being active at the moment it is freed, so torch's families
# ``active`` and ``active_bytes`` equal ``allocation`` and ``allocated_bytes`` in every number and share their rows.
ALLOCATION: Final = 0
ALLOCATED_BYTES: Final = 1
REQUESTED_BYTES: Final = 2
SEGMENT: Final = 3
RESERVED_BYTES: Final = 4
INACTIVE_SPLIT: Final = 5
INACTIVE_SPLIT_BYTES: Final = 6
OVERSIZE_ALLOCATIONS: Final = 7
OVERSIZE_SEGMENTS: Final = 8
_ROWS: Final = 9

FAMILIES: Final = {
    "active": ALLOCATION,
    "active_bytes": ALLOCATED_BYTES,
    "allocated_bytes": ALLOCATED_BYTES,
    "allocation": ALLOCATION,
    "inactive_split": INACTIVE_SPLIT,
    "inactive_split_bytes": INACTIVE_SPLIT_BYTES,
    "requested_bytes": REQUESTED_BYTES,
    "reserved_bytes": RESERVED_BYTES,
    "segment": SEGMENT,
}
"""Torch's name of each family, and the row that holds it."""

UNLIMITED: Final = (1 << 64) - 1
"""``max_split_size`` when none is set; torch prints it as the signed -1."""


class StatsGrid:
    """The numbers of one allocator. ``current``, ``peak`` and ``freed`` are indexed by pool, then row."""

    __slots__ = (
        "all_peak",
        "current",
        "freed",
        "max_split_size",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_ooms",
        "num_sync_all_streams",
        "peak",
    )

    def __init__(self, max_split_size: int = UNLIMITED) -> None:
        self.current = ([0] * _ROWS, [0] * _ROWS)
        self.peak = ([0] * _ROWS, [0] * _ROWS)
        self.freed = ([0] * _ROWS, [0] * _ROWS)
        self.all_peak = [0] * _ROWS
        self.max_split_size = max_split_size
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    def malloc(self, pool: int, size: int, requested: int) -> None:
        """A block of *size* bytes was handed out for *requested*."""
        current = self.current[pool]
        peak = self.peak[pool]
        other = self.current[1 - pool]
        all_peak = self.all_peak
        n = current[ALLOCATION] + 1
        current[ALLOCATION] = n
        if n > peak[ALLOCATION]:
            peak[ALLOCATION] = n
        n += other[ALLOCATION]
        if n > all_peak[ALLOCATION]:
            all_peak[ALLOCATION] = n
        n = current[ALLOCATED_BYTES] + size
        current[ALLOCATED_BYTES] = n
        if n > peak[ALLOCATED_BYTES]:
            peak[ALLOCATED_BYTES] = n
        n += other[ALLOCATED_BYTES]
        if n > all_peak[ALLOCATED_BYTES]:
            all_peak[ALLOCATED_BYTES] = n
        n = current[REQUESTED_BYTES] + requested
        current[REQUESTED_BYTES] = n
        if n > peak[REQUESTED_BYTES]:
            peak[REQUESTED_BYTES] = n
        n += other[REQUESTED_BYTES]
        if n > all_peak[REQUESTED_BYTES]:
            all_peak[REQUESTED_BYTES] = n
        if size >= self.max_split_size:
            self._change(pool, OVERSIZE_ALLOCATIONS, 1)

    def free(self, pool: int, size: int, requested: int) -> None:
        """A block of *size* bytes came back."""
        current = self.current[pool]
        freed = self.freed[pool]
        current[ALLOCATION] -= 1
        freed[ALLOCATION] += 1
        current[ALLOCATED_BYTES] -= size
        freed[ALLOCATED_BYTES] += size
        current[REQUESTED_BYTES] -= requested
        freed[REQUESTED_BYTES] += requested
        if size >= self.max_split_size:
            self._change(pool, OVERSIZE_ALLOCATIONS, -1)

    def inactive_split(self, pool: int, count: int, size: int) -> None:
        """Free pieces of split segments changed by *count* and *size* bytes, net."""
        if count:
            self._change(pool, INACTIVE_SPLIT, count)
        if size:
            self._change(pool, INACTIVE_SPLIT_BYTES, size)

    def segment_alloc(self, pool: int, size: int) -> None:
        """The driver gave a segment."""
        self.num_device_alloc += 1
        self._change(pool, SEGMENT, 1)
        self._change(pool, RESERVED_BYTES, size)
        if size >= self.max_split_size:
            self._change(pool, OVERSIZE_SEGMENTS, 1)

    def segment_free(self, pool: int, size: int) -> None:
        """The driver got a segment back."""
        self.num_device_free += 1
        self._change(pool, SEGMENT, -1)
        self._change(pool, RESERVED_BYTES, -size)
        if size >= self.max_split_size:
            self._change(pool, OVERSIZE_SEGMENTS, -1)

    def total(self, row: int) -> int:
        """Current value over both pools."""
        return self.current[SMALL][row] + self.current[LARGE][row]

    def reset_peak(self) -> None:
        """Set every peak to the current value."""
        for row in range(_ROWS):
            for pool in (SMALL, LARGE):
                self.peak[pool][row] = self.current[pool][row]
            self.all_peak[row] = self.total(row)

    def to_dict(self) -> dict[str, int]:
        """All 123 numbers under torch's flat keys (``allocated_bytes.all.current``), sorted."""
        flat = {
            "num_alloc_retries": self.num_alloc_retries,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_oom_rejections": 0,
            "num_ooms": self.num_ooms,
            "num_sync_all_streams": self.num_sync_all_streams,
            "max_split_size": self.max_split_size - (1 << 64) if self.max_split_size >> 63 else self.max_split_size,
        }
        for family, row in FAMILIES.items():
            flat |= _four(f"{family}.all", self.total(row), self.all_peak[row], self._freed(row))
            for name, pool in (("small_pool", SMALL), ("large_pool", LARGE)):
                flat |= _four(f"{family}.{name}", self.current[pool][row], self.peak[pool][row], self.freed[pool][row])
        for family, row in (("oversize_allocations", OVERSIZE_ALLOCATIONS), ("oversize_segments", OVERSIZE_SEGMENTS)):
            flat |= _four(family, self.total(row), self.all_peak[row], self._freed(row))
        return dict(sorted(flat.items()))

    def _freed(self, row: int) -> int:
        return self.freed[SMALL][row] + self.freed[LARGE][row]

    def _change(self, pool: int, row: int, by: int) -> None:
        current = self.current[pool]
        n = current[row] + by
        current[row] = n
        if by < 0:
            self.freed[pool][row] -= by
            return
        if n > self.peak[pool][row]:
            self.peak[pool][row] = n
        n += self.current[1 - pool][row]
        if n > self.all_peak[row]:
            self.all_peak[row] = n


def _four(key: str, current: int, peak: int, freed: int) -> dict[str, int]:
    return {
        f"{key}.current": current,
        f"{key}.peak": peak,
        f"{key}.allocated": current + freed,
        f"{key}.freed": freed,
    }
