"""Torch's grid of allocator statistics: families x pools x {current, peak, allocated, freed}.

The grid is written in the innermost loop of every simulation, so it is three lists of plain integers per pool, and
each event is one method that updates all families it touches. What can be derived is derived when read: ``allocated``
(the running sum of increases) is ``current + freed`` less what they were at the last reset, and everything under
``all`` but the peaks is the sum of both pools. The peak of a sum is not the sum of the peaks and is kept apart.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SMALL: Final = 0
LARGE: Final = 1

# Rows of a pool.
ALLOCATION: Final = 0
ALLOCATED_BYTES: Final = 1
REQUESTED_BYTES: Final = 2
SEGMENT: Final = 3
RESERVED_BYTES: Final = 4
INACTIVE_SPLIT: Final = 5
INACTIVE_SPLIT_BYTES: Final = 6
OVERSIZE_ALLOCATIONS: Final = 7
OVERSIZE_SEGMENTS: Final = 8
# A block stops being active when its last stream is done with it. Until a free is deferred for the first time that is
# the moment of the free itself: both rows then equal those of allocation in every number, and are not kept.
ACTIVE: Final = 9
ACTIVE_BYTES: Final = 10
_ROWS: Final = 11

FAMILIES: Final = {
    "active": ACTIVE,
    "active_bytes": ACTIVE_BYTES,
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


DEVICE_COUNTERS: Final = ("num_device_alloc", "num_device_free", "num_sync_all_streams")
COUNTERS: Final = (*DEVICE_COUNTERS, "num_alloc_retries", "num_oom_rejections", "num_ooms")


class Counters(NamedTuple):
    """What an allocator had and had freed at a moment, by pool and row."""

    current: tuple[tuple[int, ...], tuple[int, ...]]
    freed: tuple[tuple[int, ...], tuple[int, ...]]


class StatsGrid:
    """The numbers of one allocator. ``current``, ``peak`` and ``freed`` are indexed by pool, then row."""

    __slots__ = ("_base", "_deferred", "all_peak", "current", "freed", "max_split_size", "oversize", "peak", *COUNTERS)

    num_alloc_retries: int
    num_device_alloc: int
    num_device_free: int
    num_oom_rejections: int
    num_ooms: int
    num_sync_all_streams: int

    def __init__(self, max_split_size: int = UNLIMITED) -> None:
        self.current = ([0] * _ROWS, [0] * _ROWS)
        self.peak = ([0] * _ROWS, [0] * _ROWS)
        self.freed = ([0] * _ROWS, [0] * _ROWS)
        self.all_peak = [0] * _ROWS
        self.max_split_size = max_split_size
        """The statistic of that name: the value when the allocator was made."""
        self.oversize = max_split_size
        """From this size on a block or segment counts as oversize; a setting that changes in mid-run."""
        # What was current and freed at the last reset of the running sums: allocated = current + freed - base.
        self._base = ([0] * _ROWS, [0] * _ROWS)
        self._deferred = False
        for counter in COUNTERS:
            setattr(self, counter, 0)

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
        if self._deferred:
            self._change(pool, ACTIVE, 1)
            self._change(pool, ACTIVE_BYTES, size)
        if size >= self.oversize:
            self._change(pool, OVERSIZE_ALLOCATIONS, 1)

    def free(self, pool: int, size: int, requested: int) -> None:
        """A block of *size* bytes came back, and nobody waits for it."""
        current = self.current[pool]
        freed = self.freed[pool]
        current[ALLOCATION] -= 1
        freed[ALLOCATION] += 1
        current[ALLOCATED_BYTES] -= size
        freed[ALLOCATED_BYTES] += size
        current[REQUESTED_BYTES] -= requested
        freed[REQUESTED_BYTES] += requested
        if self._deferred:
            self._change(pool, ACTIVE, -1)
            self._change(pool, ACTIVE_BYTES, -size)
        if size >= self.oversize:
            self._change(pool, OVERSIZE_ALLOCATIONS, -1)

    def free_requested(self, pool: int, size: int) -> None:
        """A block of *size* bytes came back, and stays active until its streams are done with it."""
        if not self._deferred:
            self._keep_active_rows()
        self._change(pool, ALLOCATION, -1)
        self._change(pool, ALLOCATED_BYTES, -size)
        if size >= self.oversize:
            self._change(pool, OVERSIZE_ALLOCATIONS, -1)

    def free_completed(self, pool: int, size: int, requested: int) -> None:
        """The streams are done with a block of *size* bytes that had come back before."""
        self._change(pool, ACTIVE, -1)
        self._change(pool, ACTIVE_BYTES, -size)
        self._change(pool, REQUESTED_BYTES, -requested)

    def inactive_split(self, pool: int, count: int, size: int) -> None:
        """Free pieces of split segments changed by *count* and *size* bytes, net."""
        current = self.current[pool]
        if count:
            n = current[INACTIVE_SPLIT] + count
            current[INACTIVE_SPLIT] = n
            if count < 0:
                self.freed[pool][INACTIVE_SPLIT] -= count
            else:
                if n > self.peak[pool][INACTIVE_SPLIT]:
                    self.peak[pool][INACTIVE_SPLIT] = n
                n += self.current[1 - pool][INACTIVE_SPLIT]
                if n > self.all_peak[INACTIVE_SPLIT]:
                    self.all_peak[INACTIVE_SPLIT] = n
        n = current[INACTIVE_SPLIT_BYTES] + size
        current[INACTIVE_SPLIT_BYTES] = n
        if size < 0:
            self.freed[pool][INACTIVE_SPLIT_BYTES] -= size
        else:
            if n > self.peak[pool][INACTIVE_SPLIT_BYTES]:
                self.peak[pool][INACTIVE_SPLIT_BYTES] = n
            n += self.current[1 - pool][INACTIVE_SPLIT_BYTES]
            if n > self.all_peak[INACTIVE_SPLIT_BYTES]:
                self.all_peak[INACTIVE_SPLIT_BYTES] = n

    def shrink_split(self, pool: int, size: int) -> None:
        """A free piece of a split segment lost *size* bytes: ``inactive_split(pool, 0, -size)``, at half the price."""
        self.current[pool][INACTIVE_SPLIT_BYTES] -= size
        self.freed[pool][INACTIVE_SPLIT_BYTES] += size

    def segment_alloc(self, pool: int, size: int) -> None:
        """The driver gave a segment."""
        self.num_device_alloc += 1
        self._change(pool, SEGMENT, 1)
        self._change(pool, RESERVED_BYTES, size)
        if size >= self.oversize:
            self._change(pool, OVERSIZE_SEGMENTS, 1)

    def segment_free(self, pool: int, size: int) -> None:
        """The driver got a segment back."""
        self.num_device_free += 1
        self._change(pool, SEGMENT, -1)
        self._change(pool, RESERVED_BYTES, -size)
        if size >= self.oversize:
            self._change(pool, OVERSIZE_SEGMENTS, -1)

    def segment_map(self, pool: int, size: int) -> None:
        """Physical memory was put behind *size* bytes of an expandable segment."""
        self.num_device_alloc += 1
        self._change(pool, RESERVED_BYTES, size)

    def segment_unmap(self, pool: int, size: int) -> None:
        """Physical memory behind *size* bytes of an expandable segment was taken away."""
        self.num_device_free += 1
        self._change(pool, RESERVED_BYTES, -size)

    def counters(self) -> Counters:
        """The present numbers, for :meth:`repeat`."""
        (small, large), (small_freed, large_freed) = self.current, self.freed
        return Counters((tuple(small), tuple(large)), (tuple(small_freed), tuple(large_freed)))

    def repeat(self, before: Counters, times: int) -> None:
        """Count what has happened since *before* *times* times more, where all of it was taken and given back."""
        for freed, earlier in zip(self.freed, before.freed, strict=True):
            for row, was in enumerate(earlier):
                freed[row] += (freed[row] - was) * times

    def total(self, row: int) -> int:
        """Current value over both pools."""
        row = self._row(row)
        return self.current[SMALL][row] + self.current[LARGE][row]

    def reset_peak(self) -> None:
        """Set every peak to the current value."""
        for row in range(_ROWS):
            for pool in (SMALL, LARGE):
                self.peak[pool][row] = self.current[pool][row]
            self.all_peak[row] = self.current[SMALL][row] + self.current[LARGE][row]

    def reset_accumulated(self) -> None:
        """Set the running sums (``allocated``, ``freed``) and the plain counters to 0; the rest stays."""
        for pool in (SMALL, LARGE):
            self.freed[pool][:] = [0] * _ROWS
            self._base[pool][:] = self.current[pool]
        for counter in COUNTERS:
            setattr(self, counter, 0)

    def to_dict(self, absent: frozenset[str] = frozenset()) -> dict[str, int]:
        """All 123 numbers under torch's flat keys (``allocated_bytes.all.current``), sorted, but for *absent* keys."""
        flat = {counter: getattr(self, counter) for counter in COUNTERS}
        flat["max_split_size"] = self.max_split_size - (1 << 64) if self.max_split_size >> 63 else self.max_split_size
        for family, kept in FAMILIES.items():
            row = self._row(kept)
            flat |= self._four(f"{family}.all", (SMALL, LARGE), row, self.all_peak[row])
            for name, pool in (("small_pool", SMALL), ("large_pool", LARGE)):
                flat |= self._four(f"{family}.{name}", (pool,), row, self.peak[pool][row])
        for family, row in (("oversize_allocations", OVERSIZE_ALLOCATIONS), ("oversize_segments", OVERSIZE_SEGMENTS)):
            flat |= self._four(family, (SMALL, LARGE), row, self.all_peak[row])
        return {key: flat[key] for key in sorted(flat) if key not in absent}

    def _four(self, key: str, pools: tuple[int, ...], row: int, peak: int) -> dict[str, int]:
        current = sum(self.current[pool][row] for pool in pools)
        freed = sum(self.freed[pool][row] for pool in pools)
        base = sum(self._base[pool][row] for pool in pools)
        return {
            f"{key}.current": current,
            f"{key}.peak": peak,
            f"{key}.allocated": current + freed - base,
            f"{key}.freed": freed,
        }

    def _row(self, row: int) -> int:
        """Where a row is kept."""
        return row if row < ACTIVE or self._deferred else row - ACTIVE

    def _keep_active_rows(self) -> None:
        self._deferred = True
        for rows in (*self.current, *self.peak, *self.freed, *self._base, self.all_peak):
            rows[ACTIVE] = rows[ALLOCATION]
            rows[ACTIVE_BYTES] = rows[ALLOCATED_BYTES]

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
