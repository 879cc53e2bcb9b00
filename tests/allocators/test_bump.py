"""The bump allocator: an offset that only rises, and bytes that are never given again."""

import random

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.bump import RULE, BumpAllocator, BumpConfig
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Block, Segment, Tag, Work
from hbmtwin.allocators.region import RegionBlock

MIB = 1 << 20


def bump(units: int) -> BumpAllocator:
    """A region of so many units of 512 bytes in a device of 10 MiB."""
    return BumpAllocator(HbmDriver(10 * MIB), BumpConfig(units * 512))


def take(allocator: BumpAllocator, units: int, owner: int = -1) -> int:
    return allocator.malloc(units * 512, tag=Tag.KV, owner=owner)


def unit(allocator: BumpAllocator, handle: int) -> int:
    return (allocator.address(handle) - FIRST_ADDRESS) // 512


def runs(allocator: BumpAllocator) -> list[tuple[str, int]]:
    """What lies in the region, in units."""
    (region,) = allocator.walk()
    return [("free" if block.state == "inactive" else "live", block.size // 512) for block in region.blocks]


def refusal(allocator: BumpAllocator, units: int, owner: int = -1) -> OomFacts:
    with pytest.raises(OutOfMemory) as raised:
        take(allocator, units, owner)
    return raised.value.facts


def test_the_region_is_taken_at_start_and_stays() -> None:
    driver = HbmDriver(10 * MIB)
    allocator = BumpAllocator(driver, BumpConfig(6 * MIB))
    assert allocator.take_work() == Work(driver_calls=1)
    allocator.free(allocator.malloc(MIB, tag=Tag.KV))
    allocator.empty_cache()
    assert driver.mem_info() == (4 * MIB, 10 * MIB)
    assert allocator.take_work() == Work()
    assert list(allocator.walk()) == [
        Segment(FIRST_ADDRESS, 6 * MIB, "region", 0, (Block(FIRST_ADDRESS, 6 * MIB, 0, "inactive", None, -1),))
    ]


def test_a_region_that_the_driver_cannot_give_is_out_of_memory_at_once() -> None:
    with pytest.raises(OutOfMemory) as raised:
        BumpAllocator(HbmDriver(10 * MIB, tenants_bytes=8 * MIB), BumpConfig(4 * MIB))
    facts = raised.value.facts
    assert (facts.need_bytes, facts.driver_free_bytes, facts.largest_free_bytes) == (4 * MIB, 2 * MIB, 2 * MIB)
    assert classify(facts) is Cause.OTHER_TENANT


def test_the_offset_only_rises_whatever_is_freed() -> None:
    allocator = bump(20)
    places = []
    for size in (4, 1, 3, 4, 2):
        handle = take(allocator, size)
        places.append(unit(allocator, handle))
        allocator.free(handle)
        allocator.check()
    assert places == [0, 4, 5, 8, 12]
    assert runs(allocator) == [("free", 20)]
    assert allocator.usage()[:6] == (20 * 512, 0, 0, 0, 6 * 512, 20 * 512)
    assert unit(allocator, take(allocator, 6)) == 14
    assert refusal(allocator, 1).rule == RULE


@pytest.mark.parametrize(("alignment", "asked", "taken"), [(512, 1, 512), (512, 513, 1024), (1, 7, 7), (4096, 1, 4096)])
def test_sizes_round_up_to_the_alignment(alignment: int, asked: int, taken: int) -> None:
    allocator = BumpAllocator(HbmDriver(10 * MIB), BumpConfig(MIB, alignment_bytes=alignment))
    first, second = (allocator.malloc(asked, tag=Tag.KV) for _ in range(2))
    assert allocator.address(second) - allocator.address(first) == taken
    assert allocator.usage()[:3] == (MIB, 2 * taken, 2 * asked)


def test_dead_bytes_are_external_in_the_books() -> None:
    allocator = bump(20)
    handles = [take(allocator, n) for n in (4, 2, 3, 1, 4)]
    for handle in (handles[0], handles[2], handles[3]):
        allocator.free(handle)
    assert runs(allocator) == [("free", 4), ("live", 2), ("free", 4), ("live", 4), ("free", 6)]
    usage = allocator.usage()
    assert (usage.allocated, usage.pool_free, usage.largest_free) == (6 * 512, 6 * 512, 6 * 512)
    assert usage.reserved - usage.allocated - usage.pending - usage.pool_free == 8 * 512
    stats = allocator.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (2, 8 * 512)


def test_a_dead_run_that_would_do_is_barred_by_the_rule() -> None:
    allocator = bump(20)
    handles = [take(allocator, n) for n in (5, 3, 2, 8)]
    for handle in handles[:2]:
        allocator.free(handle)
    facts = refusal(allocator, 7, owner=1)
    assert facts == OomFacts(
        allocator="bump",
        asked_bytes=7 * 512,
        need_bytes=7 * 512,
        tag=Tag.KV,
        owner=1,
        stream=0,
        capacity_bytes=10 * MIB,
        limit_bytes=20 * 512,
        reserved_bytes=20 * 512,
        allocated_bytes=10 * 512,
        requested_bytes=10 * 512,
        largest_free_bytes=8 * 512,
        cached_free_bytes=10 * 512,
        driver_free_bytes=0,
        rule="a free run is large enough, but the offset only rises: freed bytes are never given again",
    )
    assert classify(facts) is Cause.ALLOCATOR_RULE


def test_dead_bytes_at_the_offset_and_those_above_it_are_one_run() -> None:
    allocator = bump(10)
    take(allocator, 4)
    allocator.free(take(allocator, 4))
    assert runs(allocator) == [("live", 4), ("free", 6)]
    facts = refusal(allocator, 6)
    assert (facts.largest_free_bytes, facts.rule) == (6 * 512, RULE)


def test_dead_bytes_in_pieces_are_external_fragmentation_as_they_would_be_elsewhere() -> None:
    allocator = bump(10)
    handles = [take(allocator, n) for n in (3, 1, 3, 1)]
    for handle in handles[::2]:
        allocator.free(handle)
    facts = refusal(allocator, 5)
    assert (facts.largest_free_bytes, facts.cached_free_bytes, facts.rule) == (3 * 512, 8 * 512, "")
    assert classify(facts) is Cause.EXTERNAL_FRAGMENTATION


def test_with_nothing_dead_it_is_a_plain_shortage() -> None:
    allocator = bump(10)
    take(allocator, 6)
    facts = refusal(allocator, 5)
    assert (facts.largest_free_bytes, facts.rule, classify(facts)) == (4 * 512, "", Cause.SHORTAGE)


def test_a_step_that_gives_all_back_is_not_the_same_step_again() -> None:
    allocator = bump(10)
    before = allocator.counters()
    allocator.repeat(before, 5)
    allocator.free(take(allocator, 1))
    with pytest.raises(ValueError, match="cannot be repeated"):
        allocator.repeat(before, 5)


def test_concatenation_runs_out_where_a_pool_that_reclaims_needs_two_copies() -> None:
    """Claim C12's allocator: a buffer that grows token by token to 100 units takes 1 + 2 + ... + 100 = 5050."""
    allocator = bump(5049)
    pool = PooledAllocator(HbmDriver(10 * MIB), PooledConfig(299 * 512))
    handle, beside = take(allocator, 1), pool.malloc(512, tag=Tag.KV)
    for units in range(2, 100):
        (handle,) = allocator.regrow([handle], units * 512)
        (beside,) = pool.regrow([beside], units * 512)
    pool.regrow([beside], 100 * 512)
    with pytest.raises(OutOfMemory) as raised:
        allocator.regrow([handle], 100 * 512)
    assert classify(raised.value.facts) is Cause.ALLOCATOR_RULE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_bytes": 100}, "at least alignment_bytes, 512, not 100"),
        ({"limit_bytes": MIB, "alignment_bytes": 48}, "alignment_bytes must be a power of two, not 48"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BumpConfig(**settings)


# -- a map of units ----------------------------------------------------------------------------------------------------


def compare(allocator: BumpAllocator, units: int, operations: int) -> int:
    """Random traffic on the allocator and on a list of units, -1 where nobody ever was; return the refusals."""
    chance = random.Random(3)
    cells, offset = [-1] * units, 0
    live: list[int] = []
    failures = 0
    for _ in range(operations):
        if chance.random() < 0.5 or not live:
            size = chance.randrange(1, 9)
            if offset + size > units:
                failures += 1
                facts = refusal(allocator, size)
                free = "".join("." if cell < 0 else "x" for cell in cells).split("x")
                assert facts.largest_free_bytes == 512 * max(map(len, free))
                continue
            handle = take(allocator, size)
            assert unit(allocator, handle) == offset
            cells[offset : offset + size] = [handle] * size
            offset += size
            live.append(handle)
        else:
            handle = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            cells = [-1 if cell == handle else cell for cell in cells]
        free = "".join("." if cell < 0 else "x" for cell in cells).split("x")
        assert allocator.usage().largest_free == 512 * max(map(len, free))
        assert allocator.usage().pool_free == 512 * (units - offset)
        assert [size for state, size in runs(allocator) if state == "free"] == [len(run) for run in free if run]
    allocator.check()
    return failures


def test_random_traffic_agrees_with_a_map_of_units() -> None:
    assert compare(bump(700), 700, 500) > 20


class Reclaiming(BumpAllocator):
    """The last block, freed, gives its bytes back."""

    def _give_back(self, block: RegionBlock) -> None:
        super()._give_back(block)
        if block.address + block.size == self._offset:
            self._offset = block.address


class BlindToTheTail(BumpAllocator):
    """Dead bytes below the offset and those above it are not taken together."""

    def _largest_free(self) -> int:
        return max(self._largest_dead, self._end - self._offset)


class Splitting(BumpAllocator):
    """Dead neighbours stay apart."""

    def _give_back(self, block: RegionBlock) -> None:
        self.grid.free(1, block.size, block.requested)
        self._dead[block.address] = block.address + block.size
        self._dead_to[block.address + block.size] = block.address
        self._largest_dead = max(self._largest_dead, block.size)
        self.grid.inactive_split(1, 1, block.size)


@pytest.mark.parametrize("bug", [Reclaiming, BlindToTheTail, Splitting])
def test_a_wrong_allocator_is_found(bug: type[BumpAllocator]) -> None:
    with pytest.raises(AssertionError):
        compare(bug(HbmDriver(10 * MIB), BumpConfig(700 * 512)), 700, 500)
