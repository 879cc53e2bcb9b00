"""The buddy system against a map of units that knows no lists, no orders kept and no trees."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.buddy import BuddyAllocator, BuddyConfig
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Tag


class Cells:
    """What a buddy system must do, from who holds which unit alone.

    Immediate merging means that the free blocks are exactly the largest aligned empty ranges. So there is nothing to
    remember: bit *u* of ``used`` says that unit *u* is taken, and what is empty and aligned is worked out afresh.
    """

    def __init__(self, units: int) -> None:
        self.units = units
        self.used = 0

    def empty(self) -> Iterator[int]:
        """For each order, the starts of its aligned empty ranges as bits."""
        starts = ~self.used & (1 << self.units) - 1
        order = 0
        while 1 << order <= self.units:
            yield starts
            aligned = sum(1 << u for u in range(0, self.units, 2 << order))
            starts &= starts >> (1 << order) & aligned
            order += 1

    def free_blocks(self) -> list[tuple[int, int]]:
        """(order, start) of each block that is free and part of no larger free block, in that order."""
        found = []
        orders = [*self.empty(), 0]
        for order, (starts, above) in enumerate(pairwise(orders)):
            starts &= ~(above | above << (1 << order))
            while starts:
                found.append((order, (starts & -starts).bit_length() - 1))
                starts &= starts - 1
        return found

    def take(self, units: int) -> int | None:
        order = next(k for k in range(64) if 1 << k >= units)
        start = next((start for k, start in self.free_blocks() if k >= order), None)
        if start is not None:
            self.used |= (1 << (1 << order)) - 1 << start
        return start

    def give(self, start: int, units: int) -> None:
        order = next(k for k in range(64) if 1 << k >= units)
        self.used &= ~((1 << (1 << order)) - 1 << start)


def compare(allocator: BuddyAllocator, cells: Cells, operations: int, seed: int) -> tuple[int, int]:
    """Random traffic on both; return how often there was no room, and how often only the rule stood in the way."""
    chance = random.Random(seed)
    live: list[tuple[int, int, int]] = []
    failures = barred = 0
    for i in range(operations):
        if chance.random() < 0.52 or not live:
            units = round(2 ** chance.uniform(0, 5.5))
            start = cells.take(units)
            try:
                handle = allocator.malloc(units * 512, tag=Tag.KV)
            except OutOfMemory as failure:
                assert start is None
                failures += 1
                barred += classify(failure.facts) is Cause.ALLOCATOR_RULE
                continue
            assert (allocator.address(handle) - FIRST_ADDRESS) // 512 == start
            live.append((handle, start, units))
        else:
            handle, start, units = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            cells.give(start, units)
        if not i % 25:
            (region,) = allocator.walk()
            free = [b for b in region.blocks if b.state == "inactive"]
            assert sorted((b.size // 512, (b.address - FIRST_ADDRESS) // 512) for b in free) == [
                (1 << order, start) for order, start in cells.free_blocks()
            ]
            assert allocator.usage().largest_free == max((b.size for b in free), default=0)
    allocator.check()
    return failures, barred


def buddy(units: int, cls: type[BuddyAllocator] = BuddyAllocator) -> BuddyAllocator:
    return cls(HbmDriver(1 << 30), BuddyConfig(units * 512))


@pytest.mark.parametrize("units", [237, 256])
def test_random_traffic_agrees_with_a_map_of_units(units: int) -> None:
    failures, barred = compare(buddy(units), Cells(units), 50_000, seed=units)
    assert failures > 1000
    assert barred > 100


class NeverMerges(BuddyAllocator):
    def _find(self, order: int, offset: int) -> int | None:
        return None


class MergesAnyNeighbour(BuddyAllocator):
    """Takes the block behind for the buddy, wherever it lies."""

    def _give_back(self, block: Any) -> None:
        find = self._find
        start = block.address - self._region[0]
        self._find = lambda order, _: find(order, start + (self._unit << order))
        super()._give_back(block)
        self._find = find


class NewestFirst(BuddyAllocator):
    def _put(self, order: int, offset: int) -> None:
        super()._put(order, offset)
        self._free[order].remove(offset)
        self._free[order].insert(0, offset)

    def _find(self, order: int, offset: int) -> int | None:
        return self._free[order].index(offset) if offset in self._free[order] else None


class RoundsToUnits(BuddyAllocator):
    """One order too small where the units are no power of two."""

    def _order(self, size: int) -> int:
        return (size // self._unit).bit_length() - 1


class OneTree(BuddyAllocator):
    """Loses what lies beyond the largest power of two."""

    def __init__(self, driver: Any, config: BuddyConfig) -> None:
        super().__init__(driver, config)
        for order in range(len(self._free) - 1):
            while self._free[order]:
                self._drop(order, 0)


@pytest.mark.parametrize("bug", [NeverMerges, MergesAnyNeighbour, NewestFirst, RoundsToUnits, OneTree])
def test_a_wrong_rule_is_found(bug: type[BuddyAllocator]) -> None:
    with pytest.raises(AssertionError):
        compare(buddy(237, bug), Cells(237), 5000, seed=1)


def broken(a: BuddyAllocator, how: str) -> None:
    order = next(k for k, offsets in enumerate(a._free) if offsets)
    offset = a._free[order][0]
    if how == "a bit too many":
        a._bitmap |= 1 << next(k for k, offsets in enumerate(a._free) if not offsets)
    elif how == "a bit too few":
        a._bitmap &= ~(1 << order)
    elif how == "a bit beyond":
        a._bitmap |= 1 << len(a._free)
    elif how == "lost":
        a._free[order].remove(offset)
    elif how == "twice":
        a._free[order].insert(0, offset)
    elif how == "moved":
        a._free[order][0] += 1
    elif how == "unmerged":
        order = next(k for k, offsets in enumerate(a._free) if k and offsets)
        offset = a._free[order][0]
        a._drop(order, 0)
        a._put(order - 1, offset)
        a._put(order - 1, offset + (a._unit << order - 1))
        a.grid.inactive_split(1, 1, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a bit too many", "says whether there are blocks"),
        ("a bit too few", "says whether there are blocks"),
        ("a bit beyond", "no bits beyond"),
        ("lost", "hole or overlap|tile"),
        ("twice", "hole or overlap"),
        ("moved", "hole or overlap"),
        ("unmerged", "buddies of order . are both free"),
    ],
)
def test_check_finds_what_is_broken(how: str, message: str) -> None:
    allocator = buddy(16)
    for units in (3, 1, 2):
        allocator.malloc(units * 512, tag=Tag.KV)
    allocator.check()
    broken(allocator, how)
    with pytest.raises(AssertionError, match=message):
        allocator.check()
