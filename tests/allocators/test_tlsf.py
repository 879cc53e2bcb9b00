"""Two-level segregated fit: the mapping by its formula, worked examples, what a failure says, and the bounds."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators import HbmDriver, tlsf
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.records import Block, Segment, Tag, Work
from hbmtwin.allocators.tlsf import RULE, TlsfAllocator, TlsfConfig, mapping_insert, mapping_search

MIB = 1 << 20
GIB = 1 << 30


def region(units: int, log2: int = 5) -> TlsfAllocator:
    """A region of so many units of 512 bytes, with 2^log2 lists per power of two."""
    return TlsfAllocator(HbmDriver(4 * GIB), TlsfConfig(units * 512, second_level_log2=log2))


def take(allocator: TlsfAllocator, units: int) -> int:
    return allocator.malloc(units * 512, tag=Tag.KV)


def unit(allocator: TlsfAllocator, handle: int) -> int:
    return (allocator.address(handle) - FIRST_ADDRESS) // 512


def blocks(allocator: TlsfAllocator) -> str:
    """Blocks in address order: 4 is free, x4 is in use."""
    (segment,) = allocator.walk()
    return " ".join(f"{'' if b.state == 'inactive' else 'x'}{b.size // 512}" for b in segment.blocks)


# -- the mapping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "log2", "inserted", "searched"),
    [
        # 460 = 1 1100 1100 in binary: fl is the place of the highest 1, sl the next J bits.
        (460, 4, (8, 0b1100), (464, 8, 0b1101)),
        (460, 5, (8, 0b11001), (464, 8, 0b11010)),
        (460, 3, (8, 0b110), (480, 8, 0b111)),
        (464, 4, (8, 13), (464, 8, 13)),
        (511, 4, (8, 15), (512, 9, 0)),
        (512, 4, (9, 0), (512, 9, 0)),
        (513, 4, (9, 0), (544, 9, 1)),
        (1, 5, (0, 0), (1, 0, 0)),
        (3, 5, (1, 16), (3, 1, 16)),
        (200 * MIB, 5, (27, 18), (200 * MIB, 27, 18)),
        (64 * GIB - 1, 5, (35, 31), (64 * GIB, 36, 0)),
    ],
)
def test_a_size_and_its_lists(size: int, log2: int, inserted: tuple[int, int], searched: tuple[int, int, int]) -> None:
    assert mapping_insert(size, log2) == inserted
    assert mapping_search(size, log2) == searched


@pytest.mark.parametrize("log2", range(7))
def test_the_mapping_is_the_papers_formula_for_every_size(log2: int) -> None:
    """fl = floor(log2(size)); sl = floor((size - 2^fl) / 2^(fl - J)); the search goes to the next list's first size."""
    firsts = [Fraction(1 << fl) + Fraction(i << fl, 1 << log2) for fl in range(14) for i in range(1 << log2)]
    lists = [(fl, sl) for fl in range(14) for sl in range(1 << log2)]
    place = 0
    for size in range(1, 4097):
        while firsts[place + 1] <= size:
            place += 1
        assert mapping_insert(size, log2) == lists[place]
        # The first list all of whose blocks are large enough; a size that is no whole number is nobody's.
        up = place + (firsts[place] < size)
        while firsts[up].denominator > 1:
            up += 1
        rounded, fl, sl = mapping_search(size, log2)
        assert (rounded, (fl, sl)) == (firsts[up], lists[up])


@given(size=st.integers(1, 1 << 48), log2=st.integers(0, 8))
def test_the_search_adds_at_most_a_2_to_the_jth(size: int, log2: int) -> None:
    rounded, _, _ = mapping_search(size, log2)
    assert size <= rounded
    assert (rounded - size) << log2 < size
    assert mapping_search(rounded, log2) == (rounded, *mapping_insert(rounded, log2)), "a first size stays as it is"


# -- placing -----------------------------------------------------------------------------------------------------------


def test_an_example_worked_by_hand() -> None:
    """64 units, 4 lists per power of two: ... 4 5 6 7 | 8 10 12 14 | 16 20 24 28 | 32 40 48 56 | 64 ..."""
    allocator = region(64, log2=2)
    a = take(allocator, 5)
    assert blocks(allocator) == "x5 59"
    b = take(allocator, 9)
    assert blocks(allocator) == "x5 x10 49", "9 is rounded to the list of 10"
    take(allocator, 17)
    assert blocks(allocator) == "x5 x10 x20 29"
    take(allocator, 3)
    assert blocks(allocator) == "x5 x10 x20 x3 26"
    allocator.free(b)
    e = take(allocator, 9)
    assert unit(allocator, e) == 5, "the block of 10 serves 9 again"
    allocator.free(a)
    f = take(allocator, 6)
    assert (unit(allocator, f), blocks(allocator)) == (38, "5 x10 x20 x3 x6 20")
    allocator.free(e)
    assert blocks(allocator) == "15 x20 x3 x6 20", "merged with the free block before it"
    g = take(allocator, 14)
    assert (unit(allocator, g), blocks(allocator)) == (0, "x14 1 x20 x3 x6 20")
    with pytest.raises(OutOfMemory) as raised:
        take(allocator, 21)
    assert classify(raised.value.facts) is Cause.EXTERNAL_FRAGMENTATION
    allocator.free(f)
    assert blocks(allocator) == "x14 1 x20 x3 26", "merged with the free block behind it"
    with pytest.raises(OutOfMemory) as raised:
        take(allocator, 25)
    assert classify(raised.value.facts) is Cause.ALLOCATOR_RULE, "26 would do, but lies in the list of 24 to 27"
    assert unit(allocator, take(allocator, 23)) == 38
    assert blocks(allocator) == "x14 1 x20 x3 x24 2"
    allocator.check()


def test_lists_are_last_in_first_out() -> None:
    allocator = region(100)
    handles = [take(allocator, n) for n in (4, 1, 4, 1, 4, 1)]
    for i in (2, 0, 4):
        allocator.free(handles[i])
    assert blocks(allocator) == "4 x1 4 x1 4 x1 85"
    assert [unit(allocator, take(allocator, 4)) for _ in range(4)] == [10, 0, 5, 15]


def test_good_fit_is_not_best_fit() -> None:
    """Both holes stand in the list of 8 and 9 units: the newer one is taken, the smaller one is not looked for."""
    allocator = region(100, log2=2)
    handles = [take(allocator, n) for n in (8, 1, 8, 1, 1)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    allocator.free(handles[3])
    assert blocks(allocator) == "8 x1 9 x1 81"
    assert unit(allocator, take(allocator, 8)) == 9


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge_whatever_the_order(order: tuple[int, ...]) -> None:
    allocator = region(9)
    handles = [take(allocator, 3) for _ in range(3)]
    assert blocks(allocator) == "x3 x3 x3"
    for i in order:
        allocator.free(handles[i])
        allocator.check()
    assert blocks(allocator) == "9"


def test_the_region_is_taken_at_start_and_stays() -> None:
    driver = HbmDriver(10 * MIB)
    allocator = TlsfAllocator(driver, TlsfConfig(6 * MIB))
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
    ("alignment", "asked", "taken"),
    [
        (512, 1, 512),
        (512, 513, 1024),
        (512, 64 * 512, 64 * 512),
        (512, 65 * 512, 66 * 512),
        (512, 127 * 512, 128 * 512),
        (1, 63, 63),
        (1, 65, 66),
        (4096, 4097, 8192),
    ],
)
def test_sizes_round_up_to_units_and_then_to_a_list(alignment: int, asked: int, taken: int) -> None:
    allocator = TlsfAllocator(HbmDriver(10 * MIB), TlsfConfig(MIB, alignment_bytes=alignment))
    allocator.malloc(asked, tag=Tag.KV)
    usage = allocator.usage()
    assert (usage.reserved, usage.allocated, usage.requested) == (MIB, taken, asked)
    assert usage.pool_free == usage.largest_free == MIB - taken


def test_split_pieces_are_counted_as_torch_counts_them() -> None:
    allocator = region(8)
    assert allocator.stats()["inactive_split.all.current"] == 0
    handle = take(allocator, 3)
    stats = allocator.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (1, 5 * 512)
    allocator.free(handle)
    stats = allocator.stats()
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (0, 0)
    assert (stats["inactive_split.all.allocated"], stats["inactive_split_bytes.all.freed"]) == (1, 5 * 512)
    assert stats["segment.large_pool.current"] == 1


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_block_that_the_search_passes_by_is_the_allocators_rule() -> None:
    """An empty region of 65 units holds no request of 65: its list begins at 64, the search at 66."""
    allocator = region(65)
    with pytest.raises(OutOfMemory, match="tlsf: 33280 bytes needed, 33280 free, largest piece 33280") as raised:
        allocator.malloc(65 * 512, tag=Tag.ACTIVATION, owner=4)
    assert raised.value.facts == OomFacts(
        allocator="tlsf",
        asked_bytes=65 * 512,
        need_bytes=65 * 512,
        tag=Tag.ACTIVATION,
        owner=4,
        stream=0,
        capacity_bytes=4 * GIB,
        limit_bytes=65 * 512,
        reserved_bytes=65 * 512,
        allocated_bytes=0,
        requested_bytes=0,
        largest_free_bytes=65 * 512,
        cached_free_bytes=65 * 512,
        driver_free_bytes=0,
        rule=RULE,
    )
    assert classify(raised.value.facts) is Cause.ALLOCATOR_RULE
    assert allocator.stats()["num_ooms"] == 1
    assert unit(allocator, take(allocator, 64)) == 0


def test_a_region_that_the_driver_cannot_give_is_out_of_memory_at_once() -> None:
    driver = HbmDriver(10 * MIB, tenants_bytes=8 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        TlsfAllocator(driver, TlsfConfig(4 * MIB))
    assert raised.value.facts.largest_free_bytes == 2 * MIB
    assert classify(raised.value.facts) is Cause.OTHER_TENANT


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"limit_bytes": 100}, "limit_bytes must be at least alignment_bytes, 512, not 100"),
        ({"limit_bytes": MIB, "alignment_bytes": 48}, "alignment_bytes must be a power of two, not 48"),
        ({"limit_bytes": MIB, "second_level_log2": 9}, "second_level_log2 must be from 0 to 8, not 9"),
        ({"limit_bytes": MIB, "second_level_log2": -1}, "second_level_log2 must be from 0 to 8, not -1"),
    ],
)
def test_bad_settings_are_refused(given_settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TlsfConfig(**given_settings)


# -- bounds ------------------------------------------------------------------------------------------------------------

REQUESTS = st.lists(st.tuples(st.booleans(), st.integers(1, 120), st.integers(0, 1 << 20)), max_size=120)


def traffic(allocator: TlsfAllocator, requests: list[tuple[bool, int, int]]) -> int:
    """Take and give back, and hold each answer to the bounds; return how many blocks were passed by.

    - A block is its request rounded to units and a 2^J-th at most.
    - A request is refused exactly when no free block holds what it is rounded to. So no refused request had a free
      block of itself and a 2^J-th.
    """
    log2 = allocator.config.second_level_log2
    live: list[int] = []
    passed_by = 0
    for taking, units, place in requests:
        if not taking and live:
            allocator.free(live.pop(place % len(live)))
            continue
        before = allocator.usage()
        rounded, _, _ = mapping_search(units * 512, log2)
        refused = None
        try:
            live.append(take(allocator, units))
        except OutOfMemory as failure:
            refused = failure.facts
        assert (refused is None) == (before.largest_free >= rounded)
        if refused is None:
            taken = allocator.usage().allocated - before.allocated
            assert 0 <= (taken - units * 512) << log2 < units * 512
        else:
            assert before.largest_free < units * 512 + (units * 512 >> log2)
            assert refused.largest_free_bytes == before.largest_free
            assert bool(refused.rule) == (units * 512 <= before.largest_free)
            passed_by += bool(refused.rule)
    allocator.check()
    return passed_by


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, log2=st.integers(0, 6))
def test_rounding_and_refusal_are_bounded_by_a_2_to_the_jth(requests: list[tuple[bool, int, int]], log2: int) -> None:
    traffic(region(400, log2), requests)


def test_long_traffic_within_the_bounds() -> None:
    """Some of its requests pass a block by that would do: the bound is met and not idle."""
    chance = random.Random(2)
    requests = [(chance.random() < 0.55, chance.randint(1, 120), chance.randrange(1 << 20)) for _ in range(10_000)]
    assert traffic(region(400, 3), requests) > 20


def test_the_bound_on_what_is_passed_by_is_met() -> None:
    """At 32 lists a free block of 65 units is refused to 65, and any of 66 = 65 + 1/65 is not."""
    with pytest.raises(OutOfMemory):
        take(region(65), 65)
    take(region(66), 65)
    with pytest.raises(OutOfMemory):
        take(region(2015), 1985)
    take(region(2016), 1985)


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, log2=st.integers(0, 6), place=st.integers(0, 1 << 20))
def test_what_was_freed_can_be_had_again(requests: list[tuple[bool, int, int]], log2: int, place: int) -> None:
    """The block has the rounded size, so that it goes back to a list that serves the same request."""
    allocator = region(400, log2)
    live: list[tuple[int, int]] = []
    for _, units, _ in requests:
        try:
            live.append((take(allocator, units), units))
        except OutOfMemory:
            break
    if live:
        handle, units = live[place % len(live)]
        allocator.free(handle)
        take(allocator, units)


def test_a_block_cut_to_what_was_asked_could_not_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As later implementations cut it (espressif/tlsf, pull request 2): a block of 65 is refused to a request of 65."""

    def again(allocator: TlsfAllocator) -> None:
        first = take(allocator, 65)
        while True:
            try:
                take(allocator, 1)
            except OutOfMemory:
                break
        allocator.free(first)
        take(allocator, 65)

    again(region(100))

    def unrounded(size: int, log2: int) -> tuple[int, int, int]:
        _, fl, sl = mapping_search(size, log2)
        return size, fl, sl

    monkeypatch.setattr(tlsf, "mapping_search", unrounded)
    with pytest.raises(OutOfMemory):
        again(region(100))


def test_more_lists_waste_less() -> None:
    """Bytes that a request of 1 MiB and a byte is rounded up by, at 1 to 64 lists per power of two."""
    worst = [mapping_search(MIB + 1, log2)[0] - (MIB + 1) for log2 in range(7)]
    assert worst == [1048575, 524287, 262143, 131071, 65535, 32767, 16383]
