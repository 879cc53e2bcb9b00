"""A second model of ``pooled``, which no binary has: a region written down as a plain list, searched from end to end.

::

    [start, size, tensor or None]  [start, size, tensor or None] ...      in address order, no gap

Rules: a size is rounded up to the alignment; best fit takes the smallest free piece that is large enough (the lowest
of equals), first fit the lowest, worst fit the largest (the lowest of equals); the low end is taken. Free neighbours
merge at once, or, where merging is deferred, all of them when a request finds no room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.sim.replay import replay
from hbmtwin.validation.run_replay.witness import Check
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MODELLED_FITS = ("best", "first", "worst")


class RegionState(NamedTuple):
    """What a region says after an operation; ``offset`` is that of the tensor, -1 where there is none."""

    offset: int
    oom: bool
    allocated: int
    requested: int
    largest_free: int


class PlainRegion:
    """The list. Every operation is O(pieces)."""

    def __init__(self, config: PooledConfig) -> None:
        self._config = config
        size = config.limit_bytes // config.alignment_bytes * config.alignment_bytes
        self._pieces: list[tuple[int, int, int | None]] = [(0, size, None)]
        self._requested: dict[int, int] = {}

    def do(self, op: MemoryOp) -> RegionState:
        """Carry out a malloc, a free, or ``empty_cache``."""
        offset, oom = -1, False
        if op.op == "malloc":
            assert isinstance(op.id, int)
            offset = self._malloc(op.id, op.size)
            oom = offset < 0
        elif op.op == "free" and op.id in self._requested:
            offset = self._free(op.id)
        elif op.op == "empty_cache":
            self._merge()
        taken = [size for _, size, tensor in self._pieces if tensor is not None]
        free = [size for _, size, tensor in self._pieces if tensor is None]
        return RegionState(offset, oom, sum(taken), sum(self._requested.values()), max(free, default=0))

    def _malloc(self, tensor: int, asked: int) -> int:
        unit = self._config.alignment_bytes
        need = -(-asked // unit) * unit
        found = self._search(need)
        if found is None:
            self._merge()
            found = self._search(need)
        if found is None:
            return -1
        i = self._pieces.index(found)
        start, size, _ = found
        rest = [(start + need, size - need, None)] if size > need else []
        self._pieces[i : i + 1] = [(start, need, tensor), *rest]
        self._requested[tensor] = asked
        return start

    def _search(self, need: int) -> tuple[int, int, None] | None:
        free = [(start, size, None) for start, size, tensor in self._pieces if tensor is None and size >= need]
        if not free:
            return None
        if self._config.fit == "first":
            return free[0]
        return min(free, key=lambda piece: piece[1] if self._config.fit == "best" else -piece[1])

    def _free(self, tensor: int) -> int:
        del self._requested[tensor]
        i = next(i for i, piece in enumerate(self._pieces) if piece[2] == tensor)
        start, size, _ = self._pieces[i]
        self._pieces[i] = (start, size, None)
        if self._config.coalescing == "immediate":
            self._merge()
        return start

    def _merge(self) -> None:
        merged: list[tuple[int, int, int | None]] = []
        for start, size, tensor in self._pieces:
            if merged and tensor is None and merged[-1][2] is None:
                merged[-1] = (merged[-1][0], merged[-1][1] + size, None)
            else:
                merged.append((start, size, tensor))
        self._pieces = merged


def hold_region(arena: DeviceAllocator, ops: Sequence[MemoryOp]) -> tuple[list[RegionState], list[Check], list[str]]:
    """Our region's states (one before the first operation), what the second model says, and what is said of both."""
    states = list(region_states(arena, ops))
    name = f"memory.kv_arena = '{arena.name}'"
    if not isinstance(arena, PooledAllocator) or arena.config.fit not in MODELLED_FITS:
        which = f"memory.fit = '{arena.config.fit}'" if isinstance(arena, PooledAllocator) else name
        words = (
            "the region's blocks have neither a binary nor a second model; its sums are held to the run's own books."
        )
        return states, [], [f"{which}: {words}"]
    plain = PlainRegion(arena.config)
    differing, first = 0, ""
    for i, (op, state) in enumerate(zip(ops, states[1:], strict=True)):
        if (other := plain.do(op)) != state:
            differing += 1
            first = first or f"operation {i} of the region, {op.op} {op.id}: {state}, the plain list {other}"
    check = Check("the region's blocks, by a second model", len(ops) * len(RegionState._fields), differing, first)
    words = (
        f"The region of KV ({name}) has no binary anywhere. The real allocator and its driver work beside the region's "
        "bytes, so they are compared as always; the blocks inside the region, their offsets and where it runs out are "
        "held to a second model, a plain list."
    )
    return states, [check], [words]


def region_states(arena: DeviceAllocator, ops: Sequence[MemoryOp]) -> Iterator[RegionState]:
    """A fresh region of the kind of *arena* on the operations: its state before the first, and after each."""
    like: Any = arena
    driver = HbmDriver(like.config.limit_bytes)
    side: DeviceAllocator = type(like)(driver, like.config)
    base = next(iter(side.walk())).address
    yield _state(side, -1, oom=False)
    for result in replay(ops, side, driver):
        offset = -1 if result.address is None else result.address - base
        yield _state(side, offset, oom=result.oom)


def _state(side: DeviceAllocator, offset: int, *, oom: bool) -> RegionState:
    usage = side.usage()
    return RegionState(offset, oom, usage.allocated, usage.requested, usage.pool_free)
