"""The buddy system: worked examples, what a failure says, and the bounds that the literature proves."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.buddy import RULE, BuddyAllocator, BuddyConfig
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.records import Block, Segment, Tag, Work

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def buddy(units: int, cls: type[BuddyAllocator] = BuddyAllocator) -> BuddyAllocator:
    """A region of so many units of 512 bytes."""
    return cls(HbmDriver(64 * GIB), BuddyConfig(units * 512))


def take(allocator: BuddyAllocator, units: int) -> int:
    return allocator.malloc(units * 512, tag=Tag.KV)


def unit(allocator: BuddyAllocator, handle: int) -> int:
    return (allocator.address(handle) - FIRST_ADDRESS) // 512


def blocks(allocator: BuddyAllocator) -> list[str]:
    """Blocks in address order: 4 is free, x4 is in use."""
    (region,) = allocator.walk()
    return [
        f"{'' if b.state == 'inactive' else 'x'}{b.size // allocator.config.alignment_bytes}" for b in region.blocks
    ]


def test_the_figure_of_stallings() -> None:
    """Operating Systems, figure 7.6: a block of 1 MiB, line by line. Sizes in KiB."""
    allocator = BuddyAllocator(HbmDriver(GIB), BuddyConfig(MIB, alignment_bytes=KIB))
    lines = [blocks(allocator)]
    held = {}
    for name, size in [("A", 100), ("B", 240), ("C", 64), ("D", 256)]:
        held[name] = allocator.malloc(size * KIB, tag=Tag.KV)
        lines.append(blocks(allocator))
    for name in "BA":
        allocator.free(held[name])
        lines.append(blocks(allocator))
    held["E"] = allocator.malloc(75 * KIB, tag=Tag.KV)
    lines.append(blocks(allocator))
    for name in "CED":
        allocator.free(held[name])
        lines.append(blocks(allocator))
    assert [" ".join(line) for line in lines] == [
        "1024",
        "x128 128 256 512",
        "x128 128 x256 512",
        "x128 x64 64 x256 512",
        "x128 x64 64 x256 x256 256",
        "x128 x64 64 256 x256 256",
        "128 x64 64 256 x256 256",
        "x128 x64 64 256 x256 256",
        "x128 128 256 x256 256",
        "512 x256 256",
        "1024",
    ]
    allocator.check()


def test_the_region_is_taken_at_start_and_stays() -> None:
    driver = HbmDriver(10 * MIB)
    allocator = BuddyAllocator(driver, BuddyConfig(4 * MIB))
    assert driver.mem_info() == (6 * MIB, 10 * MIB)
    assert allocator.take_work() == Work(driver_calls=1)
    allocator.free(allocator.malloc(MIB, tag=Tag.KV))
    allocator.empty_cache()
    assert driver.mem_info() == (6 * MIB, 10 * MIB)
    assert allocator.take_work() == Work()
    assert list(allocator.walk()) == [
        Segment(FIRST_ADDRESS, 4 * MIB, "region", 0, (Block(FIRST_ADDRESS, 4 * MIB, 0, "inactive", None, -1),))
    ]


def test_a_region_that_is_no_power_of_two_is_covered_by_trees() -> None:
    assert blocks(buddy(13)) == ["8", "4", "1"]
    assert blocks(buddy(16)) == ["16"]
    assert BuddyAllocator(HbmDriver(MIB), BuddyConfig(1535)).usage().reserved == 1024


def test_trees_never_merge_with_each_other() -> None:
    allocator = buddy(13)
    handles = [take(allocator, 1) for _ in range(13)]
    assert sorted(unit(allocator, handle) for handle in handles) == list(range(13))
    for handle in handles:
        allocator.free(handle)
        allocator.check()
    assert blocks(allocator) == ["8", "4", "1"]


def test_the_smallest_order_first_then_the_lowest_address() -> None:
    allocator = buddy(13)
    assert unit(allocator, take(allocator, 1)) == 12
    assert unit(allocator, take(allocator, 3)) == 8
    assert unit(allocator, take(allocator, 2)) == 0
    assert blocks(allocator) == ["x2", "2", "4", "x4", "x1"]
    low, high = take(allocator, 2), take(allocator, 2)
    assert (unit(allocator, low), unit(allocator, high)) == (2, 4)
    allocator.free(high)
    allocator.free(low)
    assert blocks(allocator) == ["x2", "2", "4", "x4", "x1"]


def test_neighbours_that_are_no_buddies_stay_apart() -> None:
    allocator = buddy(8)
    handles = [take(allocator, 2) for _ in range(4)]
    allocator.free(handles[1])
    allocator.free(handles[2])
    assert blocks(allocator) == ["x2", "2", "2", "x2"]
    allocator.free(handles[0])
    assert blocks(allocator) == ["4", "2", "x2"]
    allocator.free(handles[3])
    assert blocks(allocator) == ["8"]


@pytest.mark.parametrize(
    ("asked", "taken"), [(1, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 2048), (5 * 512, 8 * 512)]
)
def test_sizes_round_up_to_a_power_of_two_of_units(asked: int, taken: int) -> None:
    allocator = BuddyAllocator(HbmDriver(10 * MIB), BuddyConfig(MIB))
    allocator.malloc(asked, tag=Tag.KV)
    usage = allocator.usage()
    assert (usage.reserved, usage.allocated, usage.requested) == (MIB, taken, asked)
    assert usage.pool_free == usage.largest_free == MIB // 2


def test_split_pieces_are_counted_as_torch_counts_them() -> None:
    """Free blocks of a region in pieces are split; a region in one piece is not. Running sums move by net changes."""
    whole, trees = buddy(8), buddy(13)
    assert whole.stats()["inactive_split.all.current"] == 0
    assert trees.stats()["inactive_split.all.current"] == 3
    assert trees.stats()["inactive_split_bytes.all.current"] == 13 * 512
    handle = take(whole, 1)
    stats = whole.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (3, 7 * 512)
    whole.free(handle)
    stats = whole.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (0, 0)
    assert (stats["inactive_split.all.allocated"], stats["inactive_split_bytes.all.freed"]) == (3, 7 * 512)
    assert stats["segment.large_pool.current"] == 1


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_run_that_is_long_enough_but_not_aligned_is_the_allocators_rule() -> None:
    allocator = buddy(8)
    handles = [take(allocator, 2) for _ in range(4)]
    allocator.free(handles[1])
    allocator.free(handles[2])
    assert allocator.usage().largest_free == 2 * 512
    with pytest.raises(OutOfMemory, match="buddy: 2048 bytes needed, 2048 free, largest piece 2048") as raised:
        allocator.malloc(4 * 512, tag=Tag.ACTIVATION, owner=4)
    assert raised.value.facts == OomFacts(
        allocator="buddy",
        asked_bytes=2048,
        need_bytes=2048,
        tag=Tag.ACTIVATION,
        owner=4,
        stream=0,
        capacity_bytes=64 * GIB,
        limit_bytes=8 * 512,
        reserved_bytes=8 * 512,
        allocated_bytes=4 * 512,
        requested_bytes=4 * 512,
        largest_free_bytes=4 * 512,
        cached_free_bytes=4 * 512,
        driver_free_bytes=0,
        rule=RULE,
    )
    assert classify(raised.value.facts) is Cause.ALLOCATOR_RULE
    assert allocator.stats()["num_ooms"] == 1


def test_a_request_beyond_the_largest_tree_is_the_allocators_rule_too() -> None:
    """150 of 200 MiB: an empty region has the room, in trees of 128, 64 and 8 MiB."""
    allocator = BuddyAllocator(HbmDriver(256 * MIB), BuddyConfig(200 * MIB))
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(150 * MIB, tag=Tag.KV)
    facts = raised.value.facts
    assert (facts.need_bytes, facts.largest_free_bytes, facts.rule) == (150 * MIB, 200 * MIB, RULE)
    assert classify(facts) is Cause.ALLOCATOR_RULE
    assert allocator.usage().largest_free == 128 * MIB


def test_failure_in_holes_is_external_fragmentation() -> None:
    allocator = buddy(8)
    handles = [take(allocator, 1) for _ in range(8)]
    for handle in handles[::2]:
        allocator.free(handle)
    with pytest.raises(OutOfMemory) as raised:
        take(allocator, 2)
    facts = raised.value.facts
    assert (facts.largest_free_bytes, facts.cached_free_bytes, facts.rule) == (512, 4 * 512, "")
    assert classify(facts) is Cause.EXTERNAL_FRAGMENTATION


def test_a_region_that_the_driver_cannot_give_is_out_of_memory_at_once() -> None:
    driver = HbmDriver(10 * MIB, tenants_bytes=8 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        BuddyAllocator(driver, BuddyConfig(4 * MIB))
    assert raised.value.facts.largest_free_bytes == 2 * MIB
    assert classify(raised.value.facts) is Cause.OTHER_TENANT


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"limit_bytes": 100}, "limit_bytes must be at least alignment_bytes, 512, not 100"),
        ({"limit_bytes": MIB, "alignment_bytes": 48}, "alignment_bytes must be a power of two, not 48"),
    ],
)
def test_bad_settings_are_refused(given_settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuddyConfig(**given_settings)


# -- bounds ------------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 16 * GIB), alignment=st.sampled_from([1, 512, 2 * MIB]))
def test_a_block_is_less_than_twice_its_request_or_one_unit(size: int, alignment: int) -> None:
    allocator = BuddyAllocator(HbmDriver(64 * GIB), BuddyConfig(32 * GIB, alignment_bytes=alignment))
    allocator.malloc(size, tag=Tag.KV)
    taken = allocator.usage().allocated
    assert size <= taken
    assert taken < 2 * size or taken == alignment


def test_the_worst_request_wastes_all_but_one_byte_of_a_half() -> None:
    allocator = BuddyAllocator(HbmDriver(64 * GIB), BuddyConfig(32 * GIB, alignment_bytes=1))
    allocator.malloc(8 * GIB + 1, tag=Tag.KV)
    assert allocator.usage().allocated - allocator.usage().requested == 8 * GIB - 1


def traffic(allocator: BuddyAllocator, n: int, requests: Iterable[tuple[int, int]]) -> None:
    """Requests of 2^order units; before one that would make more than *n* units live, some are freed by *place*."""
    live: list[tuple[int, int]] = []
    for order, place in requests:
        while sum(units for _, units in live) + (1 << order) > n:
            allocator.free(live.pop(place % len(live))[0])
        live.append((take(allocator, 1 << order), 1 << order))
    allocator.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), r=st.integers(0, 4), m=st.integers(1, 4))
def test_a_region_of_r_plus_1_times_n_never_overflows(data: st.DataObject, r: int, m: int) -> None:
    """Knuth 2.5, exercise 41: requests of 1 to 2^r units, at most n = m * 2^r of them live."""
    n = m << r
    requests = data.draw(st.lists(st.tuples(st.integers(0, r), st.integers(0, 1 << 20)), max_size=150))
    traffic(buddy((r + 1) * n), n, requests)


class SplitsTheLargest(BuddyAllocator):
    """A wrong rule: small requests open large blocks while smaller ones are free."""

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> Any:
        if self._bitmap:
            self._bitmap = 1 << self._bitmap.bit_length() - 1
        try:
            return super()._place(size, stream, tag, owner)
        finally:
            self._bitmap = sum(1 << order for order, offsets in enumerate(self._free) if offsets)


def test_long_traffic_at_the_bound() -> None:
    """r = 3 and n = 64 in 256 units."""
    chance = random.Random(3)
    traffic(buddy(256), 64, [(chance.randrange(4), chance.randrange(1 << 20)) for _ in range(20_000)])


def test_the_bound_holds_because_the_smallest_block_is_split() -> None:
    """64 single units, then 8 in place of the first eight: halving the largest block strews the units all over."""
    requests = [(0, 0)] * 64 + [(3, 0)]
    traffic(buddy(256), 64, requests)
    with pytest.raises(OutOfMemory):
        traffic(buddy(256, SplitsTheLargest), 64, requests)


def knuths_worst_case(units: int, r: int) -> list[int]:
    """His adversary with n = 2^(r + 1): the first unit of each block that it is given, step by step."""
    allocator = buddy(units)
    n = 2 << r
    live = {unit(allocator, handle): handle for handle in [take(allocator, 1) for _ in range(n)]}
    starts = list(live)
    for k in range(1, r + 1):
        for start in [start for start in live if start % (1 << k)]:
            allocator.free(live.pop(start))
        for _ in range(n >> k + 1):
            handle = take(allocator, 1 << k)
            live[unit(allocator, handle)] = handle
            starts.append(unit(allocator, handle))
        assert allocator.usage().allocated <= n * 512
    return starts


def test_knuths_worst_case_needs_1_plus_half_r_times_what_is_ever_live() -> None:
    """n = 32 and r = 4, in the words of exercise 41: 96 units are used, three times 32, and 64 do not do."""
    assert knuths_worst_case(128, 4) == [*range(32), *range(32, 48, 2), *range(48, 64, 4), 64, 72, 80]
    with pytest.raises(OutOfMemory) as raised:
        knuths_worst_case(64, 4)
    assert classify(raised.value.facts) is Cause.EXTERNAL_FRAGMENTATION
