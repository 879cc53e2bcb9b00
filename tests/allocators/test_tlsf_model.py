"""Two-level segregated fit against plain lists that are scanned from end to end."""

import random
from typing import Any

import pytest

from hbmtwin.allocators import HbmDriver, tlsf
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.free_lists import LinkedBlock
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.tlsf import TlsfAllocator, TlsfConfig


class Scanned:
    """The rules in units, without bits: a table of first sizes, and free blocks in the order in which they came."""

    def __init__(self, units: int, log2: int) -> None:
        parts = 2**log2
        firsts = [2**fl * (parts + i) / parts for fl in range(units.bit_length() + 1) for i in range(parts)]
        self.class_of = [max(i for i, first in enumerate(firsts) if first <= size) for size in range(1, units + 1)]
        self.rounded = [min(first for first in firsts if first >= size) for size in range(1, units + 1)]
        self.free = [(0, units)]
        self.live: dict[int, int] = {}

    def take(self, units: int) -> int | None:
        size = int(self.rounded[units - 1])
        fitting = [block for block in self.free if block[1] >= size]
        if not fitting:
            return None
        lowest = min(self.class_of[n - 1] for _, n in fitting)
        start, n = [block for block in fitting if self.class_of[block[1] - 1] == lowest][-1]
        self.free.remove((start, n))
        if n > size:
            self.free.append((start + size, n - size))
        self.live[start] = size
        return start

    def give(self, start: int) -> None:
        size = self.live.pop(start)
        for other in list(self.free):
            if other[0] == start + size or other[0] + other[1] == start:
                self.free.remove(other)
                start, size = min(start, other[0]), size + other[1]
        self.free.append((start, size))


def compare(allocator: TlsfAllocator, scanned: Scanned, operations: int, seed: int) -> tuple[int, int]:
    """Random traffic on both; return how often there was no room, and how often only the rule stood in the way."""
    chance = random.Random(seed)
    live: list[tuple[int, int]] = []
    failures = barred = 0
    for i in range(operations):
        if chance.random() < 0.52 or not live:
            units = round(2 ** chance.uniform(0, 8))
            start = scanned.take(units)
            try:
                handle = allocator.malloc(units * 512, tag=Tag.KV)
            except OutOfMemory as failure:
                assert start is None
                failures += 1
                barred += classify(failure.facts) is Cause.ALLOCATOR_RULE
                continue
            assert (allocator.address(handle) - FIRST_ADDRESS) // 512 == start
            live.append((handle, start))
        else:
            handle, start = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            scanned.give(start)
        assert allocator.usage().largest_free == 512 * max((n for _, n in scanned.free), default=0)
        if not i % 25:
            (region,) = allocator.walk()
            free = [b for b in region.blocks if b.state == "inactive"]
            assert sorted(scanned.free) == [((b.address - FIRST_ADDRESS) // 512, b.size // 512) for b in free]
    allocator.check()
    return failures, barred


def region(log2: int, cls: type[TlsfAllocator] = TlsfAllocator) -> TlsfAllocator:
    return cls(HbmDriver(1 << 30), TlsfConfig(1500 * 512, second_level_log2=log2))


@pytest.mark.parametrize("log2", [5, 2])
def test_random_traffic_agrees_with_scanned_lists(log2: int) -> None:
    failures, barred = compare(region(log2), Scanned(1500, log2), 50_000, seed=log2)
    assert failures > 1000
    assert barred > 10


class NeverMerges(TlsfAllocator):
    def _give_back(self, block: LinkedBlock) -> None:
        block.allocated = False
        self._insert(block)
        self.grid.free(1, block.size, block.requested)


class FirstInFirstOut(TlsfAllocator):
    def _take(self, fl: int, sl: int) -> LinkedBlock | None:
        block = super()._take(fl, sl)
        if block is not None:
            self._insert(block)
            fl, sl = tlsf.mapping_insert(block.size, self.config.second_level_log2)
            block = next(iter(self._lists[fl][sl].values()))
            self._remove(block)
        return block


class ForgetsTheFirstLevel(TlsfAllocator):
    """Looks in the powers of two above only as far as the next one."""

    def _take(self, fl: int, sl: int) -> LinkedBlock | None:
        kept = self._first_bitmap
        self._first_bitmap &= (4 << fl) - 1
        block = super()._take(fl, sl)
        self._first_bitmap |= kept & ~((4 << fl) - 1)
        return block


class OneSecondLevelListTooHigh(TlsfAllocator):
    def _take(self, fl: int, sl: int) -> LinkedBlock | None:
        return super()._take(fl, sl + 1)


@pytest.mark.parametrize("bug", [NeverMerges, FirstInFirstOut, ForgetsTheFirstLevel, OneSecondLevelListTooHigh])
def test_a_wrong_rule_is_found(bug: type[TlsfAllocator]) -> None:
    with pytest.raises(AssertionError):
        compare(region(5, bug), Scanned(1500, 5), 5000, seed=1)


def test_a_search_that_does_not_round_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may find a block that is too small, and cut it to less than nothing."""
    monkeypatch.setattr(tlsf, "mapping_search", lambda size, log2: (size, *tlsf.mapping_insert(size, log2)))
    with pytest.raises((AssertionError, IndexError)):
        compare(region(2), Scanned(1500, 2), 5000, seed=1)


def test_the_wrong_number_of_lists_is_found() -> None:
    with pytest.raises(AssertionError):
        compare(region(4), Scanned(1500, 5), 5000, seed=1)


def break_it(a: TlsfAllocator, how: str) -> None:
    fl, sl, block = next(
        (fl, sl, block)
        for fl, lists in enumerate(a._lists)
        for sl, blocks in enumerate(lists)
        for block in blocks.values()
    )
    if how == "a second-level bit too many":
        a._second_bitmaps[fl] |= 1 << sl + 1
    elif how == "a second-level bit too few":
        a._second_bitmaps[fl] = 0
    elif how == "a second-level bit beyond":
        a._second_bitmaps[fl] |= 1 << 32
    elif how == "a first-level bit too many":
        a._first_bitmap |= 1
    elif how == "a first-level bit too few":
        a._first_bitmap = 0
    elif how == "a first-level bit beyond":
        a._first_bitmap |= 1 << 60
    elif how == "in no list":
        a._remove(block)
    elif how == "in the wrong list":
        a._remove(block)
        a._lists[fl][sl + 1][block.address] = block
        a._second_bitmaps[fl] |= 1 << sl + 1
        a._first_bitmap |= 1 << fl
    elif how == "under the wrong address":
        blocks = a._lists[fl][sl]
        blocks[block.address + 1] = blocks.pop(block.address)
    elif how == "not cut":
        used = next(b for b in a._live.values() if b.next is block)
        a._remove(block)
        used.size += 512
        block.address += 512
        block.size -= 512
        a._insert(block)
    elif how == "unmerged":
        a._insert(tlsf._cut(_removed(a, block), 512))
        a._insert(block)
    elif how == "a link back":
        block.prev = None


def _removed(a: TlsfAllocator, block: Any) -> Any:
    a._remove(block)
    return block


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a second-level bit too many", "bit .*, .*"),
        ("a second-level bit too few", "bit .*, .*"),
        ("a second-level bit beyond", "no bits beyond the lists"),
        ("a first-level bit too many", "bit 0"),
        ("a first-level bit too few", "bit "),
        ("a first-level bit beyond", "no bits beyond the highest level"),
        ("in no list", "free or not"),
        ("in the wrong list", "wrong list"),
        ("under the wrong address", "has moved"),
        ("not cut", "not cut to the rounded size"),
        ("unmerged", "free neighbours"),
        ("a link back", "links"),
    ],
)
def test_check_finds_what_is_broken(how: str, message: str) -> None:
    allocator = region(5)
    for units in (70, 3, 9):
        allocator.malloc(units * 512, tag=Tag.KV)
    allocator.check()
    break_it(allocator, how)
    with pytest.raises(AssertionError, match=message):
        allocator.check()
