"""The pooled allocator: one region, a free list, best or first fit."""

import random

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Block, Segment, Tag, Work

MIB = 1 << 20


def pooled(units: int, **settings: object) -> PooledAllocator:
    """A region of so many units of 512 bytes in a device of 10 MiB."""
    return PooledAllocator(HbmDriver(10 * MIB), PooledConfig(units * 512, **settings))


def take(allocator: PooledAllocator, units: int) -> int:
    return allocator.malloc(units * 512, tag=Tag.KV)


def unit(allocator: PooledAllocator, handle: int) -> int:
    return (allocator.address(handle) - FIRST_ADDRESS) // 512


def holes(allocator: PooledAllocator) -> list[int]:
    """Free runs in units, in address order."""
    (region,) = allocator.walk()
    return [block.size // 512 for block in region.blocks if block.state == "inactive"]


def with_holes(fit: str) -> PooledAllocator:
    """Runs of 4, 2, 3 and 2 free units between live ones, and 5 at the end."""
    allocator = pooled(20, fit=fit)
    handles = [take(allocator, n) for n in (4, 1, 2, 1, 3, 1, 2, 1)]
    for handle in handles[::2]:
        allocator.free(handle)
    assert holes(allocator) == [4, 2, 3, 2, 5]
    return allocator


def test_the_region_is_taken_at_start_and_stays() -> None:
    driver = HbmDriver(10 * MIB)
    allocator = PooledAllocator(driver, PooledConfig(6 * MIB))
    assert driver.mem_info() == (4 * MIB, 10 * MIB)
    assert allocator.take_work() == Work(driver_calls=1)
    allocator.free(allocator.malloc(MIB, tag=Tag.KV))
    allocator.empty_cache()
    assert driver.mem_info() == (4 * MIB, 10 * MIB)
    assert allocator.take_work() == Work()
    assert list(allocator.walk()) == [
        Segment(FIRST_ADDRESS, 6 * MIB, "region", 0, (Block(FIRST_ADDRESS, 6 * MIB, 0, "inactive", None, -1),))
    ]


@pytest.mark.parametrize(("fit", "places"), [("best", [5, 12, 8, 0, 15]), ("first", [0, 2, 8, 15, 5])])
def test_best_and_first_fit(fit: str, places: list[int]) -> None:
    allocator = with_holes(fit)
    assert [unit(allocator, take(allocator, n)) for n in (2, 2, 3, 4, 1)] == places
    allocator.check()


def test_ties_of_best_fit_go_to_the_lowest_address() -> None:
    allocator = with_holes("best")
    assert [unit(allocator, take(allocator, 2)) for _ in range(3)] == [5, 12, 8]


def test_what_is_over_stays_free_down_to_one_unit() -> None:
    allocator = with_holes("best")
    take(allocator, 1)
    assert holes(allocator) == [4, 1, 3, 2, 5]
    stats = allocator.stats()
    assert stats["inactive_split.all.current"] == 5
    assert stats["inactive_split_bytes.all.current"] == 15 * 512
    assert stats["segment.large_pool.current"] == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("fit", ["best", "first"])
def test_free_neighbours_merge_whatever_the_order(fit: str, order: tuple[int, ...]) -> None:
    allocator = pooled(9, fit=fit)
    handles = [take(allocator, 3) for _ in range(3)]
    assert holes(allocator) == []
    for i in order:
        allocator.free(handles[i])
        allocator.check()
    assert holes(allocator) == [9]


@pytest.mark.parametrize(
    ("alignment", "asked", "taken"), [(512, 1, 512), (512, 512, 512), (512, 513, 1024), (1, 7, 7), (4096, 4097, 8192)]
)
def test_sizes_round_up_to_the_alignment(alignment: int, asked: int, taken: int) -> None:
    allocator = PooledAllocator(HbmDriver(10 * MIB), PooledConfig(MIB, alignment_bytes=alignment))
    allocator.malloc(asked, tag=Tag.KV)
    assert allocator.usage()[:7] == (MIB, taken, asked, 0, MIB - taken, MIB - taken, (0, 0, 0, asked))


def test_the_region_is_a_whole_number_of_units() -> None:
    assert pooled(3).usage().reserved == 1536
    assert PooledAllocator(HbmDriver(MIB), PooledConfig(1535)).usage().reserved == 1024


def test_failure_in_holes_is_external_fragmentation() -> None:
    allocator = with_holes("best")
    with pytest.raises(OutOfMemory, match="pooled: 3072 bytes needed, 8192 free, largest piece 2560") as raised:
        allocator.malloc(6 * 512, tag=Tag.ACTIVATION, owner=4)
    assert raised.value.facts == OomFacts(
        allocator="pooled",
        asked_bytes=3072,
        need_bytes=3072,
        tag=Tag.ACTIVATION,
        owner=4,
        stream=0,
        capacity_bytes=10 * MIB,
        limit_bytes=20 * 512,
        reserved_bytes=20 * 512,
        allocated_bytes=4 * 512,
        requested_bytes=4 * 512,
        largest_free_bytes=5 * 512,
        cached_free_bytes=16 * 512,
        driver_free_bytes=0,
    )
    assert classify(raised.value.facts) is Cause.EXTERNAL_FRAGMENTATION
    assert allocator.stats()["num_ooms"] == 1
    assert holes(allocator) == [4, 2, 3, 2, 5]


def test_a_region_that_the_driver_cannot_give_is_out_of_memory_at_once() -> None:
    driver = HbmDriver(10 * MIB, tenants_bytes=8 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        PooledAllocator(driver, PooledConfig(4 * MIB))
    facts = raised.value.facts
    assert (facts.need_bytes, facts.driver_free_bytes, facts.largest_free_bytes) == (4 * MIB, 2 * MIB, 2 * MIB)
    assert classify(facts) is Cause.OTHER_TENANT
    assert driver.mem_info()[0] == 2 * MIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_bytes": 100}, "at least alignment_bytes, 512, not 100"),
        ({"limit_bytes": MIB, "fit": "tight"}, "fit must be one of best, first, next, worst, not 'tight'"),
        ({"limit_bytes": MIB, "alignment_bytes": 48}, "alignment_bytes must be a power of two, not 48"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PooledConfig(**settings)


class Intervals:
    """A naive model: a map of units, searched from the front."""

    def __init__(self, units: int, fit: str) -> None:
        self.cells = [False] * units
        self.fit = fit

    def runs(self) -> list[tuple[int, int]]:
        runs, start = [], None
        for i, used in enumerate([*self.cells, True]):
            if used and start is not None:
                runs.append((start, i - start))
                start = None
            elif not used and start is None:
                start = i
        return runs

    def take(self, units: int) -> int | None:
        fitting = [run for run in self.runs() if run[1] >= units]
        if not fitting:
            return None
        start = min(fitting, key=lambda run: (run[1], run[0]) if self.fit == "best" else run)[0]
        self.cells[start : start + units] = [True] * units
        return start

    def give(self, start: int, units: int) -> None:
        self.cells[start : start + units] = [False] * units


def compare(allocator: PooledAllocator, naive: Intervals, operations: int, seed: int) -> int:
    chance = random.Random(seed)
    live: list[tuple[int, int, int]] = []
    failures = 0
    for _ in range(operations):
        if chance.random() < 0.55 or not live:
            units = round(2 ** chance.uniform(0, 6))
            start = naive.take(units)
            try:
                handle = take(allocator, units)
            except OutOfMemory:
                assert start is None
                failures += 1
                continue
            assert unit(allocator, handle) == start
            live.append((handle, start, units))
        else:
            handle, start, units = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            naive.give(start, units)
        runs = naive.runs()
        assert holes(allocator) == [size for _, size in runs]
        usage = allocator.usage()
        assert usage.pool_free == usage.largest_free == 512 * max((size for _, size in runs), default=0)
    allocator.check()
    return failures


@pytest.mark.parametrize("fit", ["best", "first"])
def test_random_traffic_agrees_with_a_map_of_units(fit: str) -> None:
    assert compare(pooled(500, fit=fit), Intervals(500, fit), 4000, 1) > 100


@pytest.mark.parametrize(("fit", "other"), [("best", "first"), ("first", "best")])
def test_the_wrong_fit_is_found(fit: str, other: str) -> None:
    with pytest.raises(AssertionError):
        compare(pooled(500, fit=fit), Intervals(500, other), 4000, 1)
