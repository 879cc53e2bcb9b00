"""The pooled allocator: one region, a free list, four fits, coalescing now or later."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.free_lists import LinkedBlock
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Block, Segment, Tag, Work

MIB = 1 << 20
FITS = ("best", "first", "next", "worst")


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


@pytest.mark.parametrize(
    ("fit", "asked", "places"),
    [
        ("best", (2, 2, 3, 4, 1), [5, 12, 8, 0, 15]),
        ("first", (2, 2, 3, 4, 1), [0, 2, 8, 15, 5]),
        # The last request ended at 15; from 17 nothing behind is large enough, so it goes round to 0, then 8.
        ("next", (2, 4, 3, 1, 2), [15, 0, 8, 12, 17]),
        # Largest first: 5, 4, then 3 at 8 before what is left of the 5; the next three are runs of 2 but for that one.
        ("worst", (2, 2, 1, 1, 1, 2), [15, 0, 8, 17, 2, 5]),
    ],
)
def test_where_each_fit_puts_requests(fit: str, asked: tuple[int, ...], places: list[int]) -> None:
    allocator = with_holes(fit)
    assert [unit(allocator, take(allocator, n)) for n in asked] == places
    allocator.check()


@pytest.mark.parametrize(
    ("fit", "lefts"),
    [("first", [[300, 1200], [300, 100], [50, 100]]), ("best", [[1300, 200], [200, 200], None])],
)
def test_knuths_example_in_which_first_fit_is_better_than_best_fit(fit: str, lefts: list[list[int] | None]) -> None:
    """The Art of Computer Programming 1, section 2.5: areas of 1300 and 1200; requests for 1000, 1100 and 250."""
    allocator = PooledAllocator(HbmDriver(MIB), PooledConfig(2501, fit=fit, alignment_bytes=1))
    first = allocator.malloc(1300, tag=Tag.KV)
    allocator.malloc(1, tag=Tag.WEIGHT)
    allocator.free(first)
    for asked, left in zip((1000, 1100, 250), lefts, strict=True):
        if left is None:
            with pytest.raises(OutOfMemory, match="250 bytes needed, 400 free, largest piece 200"):
                allocator.malloc(asked, tag=Tag.KV)
        else:
            allocator.malloc(asked, tag=Tag.KV)
            (region,) = allocator.walk()
            assert [block.size for block in region.blocks if block.state == "inactive"] == left


def test_ties_of_best_fit_go_to_the_lowest_address() -> None:
    allocator = with_holes("best")
    assert [unit(allocator, take(allocator, 2)) for _ in range(3)] == [5, 12, 8]


def test_ties_of_worst_fit_go_to_the_lowest_address() -> None:
    allocator = pooled(14, fit="worst")
    handles = [take(allocator, n) for n in (4, 1, 4, 1, 4)]
    for handle in handles[::2]:
        allocator.free(handle)
    assert [unit(allocator, take(allocator, 1)) for _ in range(4)] == [0, 5, 10, 1]


def test_worst_fit_fails_when_the_largest_is_too_small() -> None:
    allocator = with_holes("worst")
    with pytest.raises(OutOfMemory, match="3072 bytes needed, 8192 free, largest piece 2560"):
        take(allocator, 6)


def test_next_fit_goes_on_in_the_block_that_has_grown_over_its_place() -> None:
    allocator = pooled(9, fit="next")
    low, middle, _ = (take(allocator, 3) for _ in range(3))
    allocator.free(middle)
    middle = take(allocator, 2)  # ended at 5, and so goes on there
    allocator.free(low)
    assert holes(allocator) == [3, 1]
    allocator.free(middle)
    assert holes(allocator) == [6]
    assert [unit(allocator, take(allocator, 2)) for _ in range(3)] == [0, 2, 4]


def test_next_fit_keeps_its_place_when_it_finds_nothing() -> None:
    allocator = with_holes("next")
    assert unit(allocator, take(allocator, 3)) == 15
    with pytest.raises(OutOfMemory):
        take(allocator, 5)
    assert unit(allocator, take(allocator, 2)) == 18


def test_what_is_over_stays_free_down_to_one_unit() -> None:
    allocator = with_holes("best")
    take(allocator, 1)
    assert holes(allocator) == [4, 1, 3, 2, 5]
    stats = allocator.stats()
    assert stats["inactive_split.all.current"] == 5
    assert stats["inactive_split_bytes.all.current"] == 15 * 512
    assert stats["segment.large_pool.current"] == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("fit", FITS)
def test_free_neighbours_merge_whatever_the_order(fit: str, order: tuple[int, ...]) -> None:
    allocator = pooled(9, fit=fit)
    handles = [take(allocator, 3) for _ in range(3)]
    assert holes(allocator) == []
    for i in order:
        allocator.free(handles[i])
        allocator.check()
    assert holes(allocator) == [9]
    assert allocator.stats()["inactive_split.all.current"] == 0


@pytest.mark.parametrize("fit", FITS)
def test_deferred_coalescing_keeps_freed_blocks_apart_until_a_request_finds_no_room(fit: str) -> None:
    allocator = pooled(12, fit=fit, coalescing="deferred")
    handles = [take(allocator, 3) for _ in range(4)]
    for handle in handles[:3]:
        allocator.free(handle)
        allocator.check()
    assert holes(allocator) == [3, 3, 3]
    assert allocator.usage().largest_free == 3 * 512, "as the list stands"
    assert unit(allocator, take(allocator, 3)) == 0, "a block of the size is found whole"
    assert holes(allocator) == [3, 3]
    assert unit(allocator, take(allocator, 4)) == 3, "merged, and searched once more"
    assert holes(allocator) == [2]
    allocator.check()


def test_a_region_of_which_all_is_free_is_whole_after_the_merge() -> None:
    allocator = pooled(9, coalescing="deferred")
    for handle in [take(allocator, 3) for _ in range(3)]:
        allocator.free(handle)
    stats = allocator.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (3, 9 * 512)
    assert unit(allocator, take(allocator, 9)) == 0
    stats = allocator.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (0, 0)
    allocator.check()


def test_empty_cache_merges_too() -> None:
    allocator = pooled(9, coalescing="deferred")
    handles = [take(allocator, 3) for _ in range(3)]
    for handle in handles[:2]:
        allocator.free(handle)
    assert (holes(allocator), allocator.usage().largest_free) == ([3, 3], 3 * 512)
    allocator.empty_cache()
    assert (holes(allocator), allocator.usage().largest_free) == ([6], 6 * 512)
    allocator.check()


def test_the_facts_of_a_failure_are_those_after_the_merge() -> None:
    allocator = pooled(9, coalescing="deferred")
    handles = [take(allocator, 3) for _ in range(3)]
    for handle in handles[:2]:
        allocator.free(handle)
    with pytest.raises(OutOfMemory, match="3584 bytes needed, 3072 free, largest piece 3072"):
        take(allocator, 7)
    assert holes(allocator) == [6]


def test_check_finds_a_merge_that_was_forgotten() -> None:
    class Forgetful(PooledAllocator):
        def _absorb_neighbours(self, block: LinkedBlock) -> None:
            self._free.put(block)
            self.grid.inactive_split(1, 1, block.size)

    allocator = Forgetful(HbmDriver(10 * MIB), PooledConfig(9 * 512))
    handles = [take(allocator, 3) for _ in range(3)]
    allocator.free(handles[0])
    allocator.check()
    allocator.free(handles[1])
    with pytest.raises(AssertionError, match="free neighbours at"):
        allocator.check()


def test_check_finds_a_deferred_merge_that_is_not_noted() -> None:
    class Forgetful(PooledAllocator):
        def _keep_apart(self, block: LinkedBlock) -> None:
            super()._keep_apart(block)
            self._unmerged = False

    allocator = Forgetful(HbmDriver(10 * MIB), PooledConfig(9 * 512, coalescing="deferred"))
    for handle in [take(allocator, 3) for _ in range(2)]:
        allocator.free(handle)
    with pytest.raises(AssertionError, match="free neighbours at"):
        allocator.check()


@pytest.mark.parametrize("fit", FITS)
def test_check_finds_a_free_list_out_of_order(fit: str) -> None:
    allocator = with_holes(fit)
    allocator._free.check()
    one, two = allocator._free.blocks[1:3]
    one.address, two.address = two.address, one.address
    with pytest.raises(AssertionError, match=r"keys belong to their blocks|ordered by address"):
        allocator._free.check()


@pytest.mark.parametrize("fit", ["first", "next"])
def test_check_finds_a_run_whose_largest_is_not_known(fit: str) -> None:
    allocator = with_holes(fit)
    allocator._free.blocks[-1].size += 512
    with pytest.raises(AssertionError, match="largest of the run"):
        allocator._free.check()


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
        ({"limit_bytes": MIB, "coalescing": "never"}, "coalescing must be one of immediate, deferred, not 'never'"),
        ({"limit_bytes": MIB, "alignment_bytes": 48}, "alignment_bytes must be a power of two, not 48"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PooledConfig(**settings)
