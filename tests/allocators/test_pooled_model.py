"""The pooled allocator against a naive model: a list of intervals, written from the definition of each fit alone."""

import random
from typing import Any

import pytest

from hbmtwin.allocators import HbmDriver, free_lists, pooled
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.free_lists import ByAddress, BySize, LargestFirst, LinkedBlock, NextFit
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Tag

MIB = 1 << 20
FITS = ("best", "first", "next", "worst")


class Intervals:
    """Intervals ``(start, size, free)`` in address order that tile the region, searched from the front, in units."""

    def __init__(self, units: int, fit: str, coalescing: str) -> None:
        self.intervals = [(0, units, True)]
        self.fit = fit
        self.coalescing = coalescing
        self.rover = 0

    def malloc(self, units: int) -> int | None:
        place = self.choose(units)
        if place is None and self.coalescing == "deferred":
            self.merge()
            place = self.choose(units)
        if place is None:
            return None
        start, size, _ = self.intervals[place]
        rest = [(start + units, size - units, True)] if size > units else []
        self.intervals[place : place + 1] = [(start, units, False), *rest]
        self.rover = start + units
        return start

    def free(self, start: int) -> None:
        place = [interval[0] for interval in self.intervals].index(start)
        self.intervals[place] = (start, self.intervals[place][1], True)
        if self.coalescing == "immediate":
            self.merge()

    def choose(self, units: int) -> int | None:
        fitting = [i for i, (_, size, free) in enumerate(self.intervals) if free and size >= units]
        if not fitting:
            return None
        if self.fit == "best":
            return min(fitting, key=lambda i: self.intervals[i][1])
        if self.fit == "worst":
            return max(fitting, key=lambda i: self.intervals[i][1])
        if self.fit == "next":
            for i in fitting:
                start, size, _ = self.intervals[i]
                if start + size > self.rover:
                    return i
        return fitting[0]

    def merge(self) -> None:
        merged: list[tuple[int, int, bool]] = []
        was_free = False
        for interval in self.intervals:
            free = interval[2]
            if free and was_free:
                start, size, _ = merged[-1]
                merged[-1] = (start, size + interval[1], True)
            else:
                merged.append(interval)
            was_free = free
        self.intervals = merged

    def largest_free(self) -> int:
        return max([size for _, size, free in self.intervals if free], default=0)


def request(allocator: PooledAllocator, size: int) -> tuple[int | None, int]:
    """The handle, or the largest free block that a refusal tells."""
    try:
        return allocator.malloc(size, tag=Tag.KV), 0
    except OutOfMemory as failure:
        return None, failure.facts.largest_free_bytes


def compare(
    fit: str,
    operations: int,
    *,
    coalescing: str = "immediate",
    units: int = 450,
    largest: int = 5,
    allocator_class: type[PooledAllocator] = PooledAllocator,
) -> int:
    """Random requests of 1 to 2^*largest* units on both; return how many found no room."""
    chance = random.Random(f"{fit} {coalescing}")
    naive = Intervals(units, fit, coalescing)
    config = PooledConfig(units * 512, fit=fit, coalescing=coalescing)
    allocator = allocator_class(HbmDriver(100 * MIB), config)
    live: list[tuple[int, int]] = []
    failures = 0
    for i in range(operations):
        if not live or chance.random() < (0.7 if i // 1000 % 2 else 0.48):
            size = round(2 ** chance.uniform(0, largest))
            start = naive.malloc(size)
            handle, largest_free = request(allocator, size * 512 - chance.randrange(512))
            if handle is None or start is None:
                assert handle is start is None, f"operation {i}: the allocator got {handle}, the model {start}"
                assert largest_free == naive.largest_free() * 512, f"facts of operation {i}"
                failures += 1
            else:
                assert allocator.address(handle) == FIRST_ADDRESS + 512 * start, f"place of operation {i}"
                live.append((handle, start))
        else:
            handle, start = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            naive.free(start)
        assert allocator.usage().largest_free == naive.largest_free() * 512, f"largest free after operation {i}"
        if not i % 5000:
            allocator.check()
            blocks = [b for segment in allocator.walk() for b in segment.blocks]
            walked = [((b.address - FIRST_ADDRESS) // 512, b.size // 512, b.state == "inactive") for b in blocks]
            assert walked == naive.intervals
    allocator.check()
    return failures


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks make many runs."""
    monkeypatch.setattr(free_lists, "RUN", 4)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("fit", FITS)
def test_a_hundred_thousand_operations_agree_with_a_list_of_intervals(fit: str) -> None:
    assert compare(fit, 100_000) > 5000


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("fit", FITS)
def test_deferred_coalescing_agrees_with_a_list_of_intervals(fit: str) -> None:
    assert compare(fit, 20_000, coalescing="deferred") > 1000


@pytest.mark.parametrize("coalescing", ["immediate", "deferred"])
@pytest.mark.parametrize("fit", ["first", "next"])
def test_several_runs_of_their_usual_length_agree_too(fit: str, coalescing: str) -> None:
    assert compare(fit, 8000, coalescing=coalescing, units=1600, largest=3) > 100


# -- planted bugs ------------------------------------------------------------------------------------------------------


class HighestOfEquals(BySize[LinkedBlock]):
    def take(self, size: int) -> LinkedBlock | None:
        fitting = [block for block in self.blocks if block.size >= size]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: (block.size, -block.address))
        self.drop(block)
        return block


class LargestHighest(LargestFirst):
    def _key(self, block: LinkedBlock) -> int:
        return BySize._key(self, block)


class AnyThatFits(BySize[LinkedBlock]):
    """Worst fit with the smallest that is large enough."""


class Restarting(NextFit):
    def take(self, size: int) -> LinkedBlock | None:
        self.rover = 0
        return super().take(size)


class BehindTheBlock(NextFit):
    """The block that has grown over the rover is not looked at."""

    def _begin(self) -> tuple[int, int]:
        i, j = super()._begin()
        if j < len(self._runs[i]) and self._runs[i][j].address < self.rover:
            return i, j + 1
        return i, j


class NeverRound(NextFit):
    def take(self, size: int) -> LinkedBlock | None:
        highest = max((block.address + block.size for block in self.blocks), default=0)
        return super().take(size) if highest > self.rover else None


class LosingTheLargest(ByAddress):
    def put(self, block: LinkedBlock) -> None:
        i = len(self._runs)
        before = list(self._largest)
        super().put(block)
        if len(self._runs) == i:
            self._largest = before


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(
    ("fit", "bug"),
    [
        ("best", HighestOfEquals),
        ("worst", LargestHighest),
        ("worst", AnyThatFits),
        ("next", Restarting),
        ("next", BehindTheBlock),
        ("next", NeverRound),
        ("next", ByAddress),
        ("first", NextFit),
        ("first", LosingTheLargest),
        ("best", ByAddress),
    ],
)
def test_a_wrong_free_list_is_found(fit: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pooled._FITS, fit, bug)
    with pytest.raises((AssertionError, StopIteration)):
        compare(fit, 5000)


class NotBackwards(PooledAllocator):
    """A freed block does not absorb the free one before it."""

    def _absorb_neighbours(self, block: LinkedBlock) -> None:
        before, block.prev = block.prev, None
        super()._absorb_neighbours(block)
        block.prev = before


class NotForwards(PooledAllocator):
    def _absorb_neighbours(self, block: LinkedBlock) -> None:
        after, block.next = block.next, None
        super()._absorb_neighbours(block)
        block.next = after


class Eager(PooledAllocator):
    """Merges at once where it should wait."""

    def _keep_apart(self, block: LinkedBlock) -> None:
        self._absorb_neighbours(block)


class Lazy(PooledAllocator):
    """Never merges where it should at last."""

    def _keep_apart(self, block: LinkedBlock) -> None:
        super()._keep_apart(block)
        self._unmerged = False


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(
    ("coalescing", "bug"),
    [("immediate", NotBackwards), ("immediate", NotForwards), ("deferred", Eager), ("deferred", Lazy)],
)
@pytest.mark.parametrize("fit", FITS)
def test_a_wrong_merge_is_found(fit: str, coalescing: str, bug: type[PooledAllocator]) -> None:
    with pytest.raises(AssertionError):
        compare(fit, 5000, coalescing=coalescing, allocator_class=bug)
