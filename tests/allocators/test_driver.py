"""The driver model: first-fit addresses, and memory that never fragments."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hbmtwin.allocators.driver import FIRST_ADDRESS, HbmDriver

MIB = 1 << 20


def test_addresses_are_first_fit() -> None:
    driver = HbmDriver(100 * MIB)
    a, b, c, d = (driver.alloc(n * MIB) for n in (2, 20, 4, 2))
    assert [a, b, c, d] == [FIRST_ADDRESS + n * MIB for n in (0, 2, 22, 26)]
    driver.free(a)
    driver.free(c)
    assert driver.alloc(4 * MIB) == c, "the gap of 2 MiB in front is too small"
    assert driver.alloc(2 * MIB) == a
    assert driver.alloc(2 * MIB) == d + 2 * MIB, "no gap is left"
    driver.check()


def test_gaps_merge_on_both_sides() -> None:
    driver = HbmDriver(100 * MIB)
    a, b, c, _ = (driver.alloc(2 * MIB) for _ in range(4))
    driver.free(a)
    driver.free(c)
    driver.free(b)
    assert driver.alloc(6 * MIB) == a
    driver.check()


def test_a_request_fits_exactly_when_enough_bytes_are_free() -> None:
    driver = HbmDriver(10 * MIB)
    held = [driver.alloc(MIB) for _ in range(10)]
    assert driver.alloc(1) is None
    for address in held[::2]:
        driver.free(address)
    assert driver.mem_info() == (5 * MIB, 10 * MIB)
    assert driver.alloc(5 * MIB + 1) is None
    assert driver.alloc(5 * MIB) is not None, "pages may lie anywhere, so five holes of 1 MiB hold 5 MiB"
    assert driver.mem_info() == (0, 10 * MIB)
    assert (driver.num_alloc, driver.num_free) == (11, 5), "refused calls are not counted"


@pytest.mark.parametrize(
    ("size", "taken"), [(1, 512), (512, 512), (513, 1024), (2 * MIB, 2 * MIB), (2 * MIB + 1, 2097664)]
)
def test_sizes_round_up_to_512(size: int, taken: int) -> None:
    driver = HbmDriver(10 * MIB)
    driver.alloc(size)
    assert driver.mem_info()[0] == 10 * MIB - taken


def test_other_processes_can_hold_more_than_is_free() -> None:
    driver = HbmDriver(10 * MIB, tenants_bytes=4 * MIB)
    assert driver.mem_info() == (6 * MIB, 10 * MIB)
    address = driver.alloc(6 * MIB)
    driver.set_tenants(8 * MIB)
    assert driver.mem_info() == (0, 10 * MIB)
    driver.free(address)
    assert driver.mem_info() == (2 * MIB, 10 * MIB)
    assert driver.tenants_bytes == 8 * MIB


def test_ranges_cost_addresses_and_pages_cost_bytes() -> None:
    driver = HbmDriver(10 * MIB)
    span = driver.reserve(100 * MIB)
    assert driver.mem_info()[0] == 10 * MIB
    page = driver.create(4 * MIB)
    assert driver.mem_info()[0] == 6 * MIB
    driver.map(span + 2 * MIB, page)
    assert driver.alloc(2 * MIB) == span + 100 * MIB
    with pytest.raises(ValueError, match="still has mapped pages"):
        driver.release_range(span)
    with pytest.raises(ValueError, match="is mapped"):
        driver.destroy(page)
    driver.check()
    assert driver.unmap(span + 2 * MIB) == page
    driver.destroy(page)
    driver.release_range(span)
    assert driver.mem_info()[0] == 8 * MIB
    assert driver.reserve(MIB) == span
    driver.check()


def test_maps_do_not_overlap_and_stay_in_their_range() -> None:
    driver = HbmDriver(20 * MIB)
    span = driver.reserve(8 * MIB)
    first, second = driver.create(4 * MIB), driver.create(2 * MIB)
    driver.map(span + 2 * MIB, first)
    for address in (span + 2 * MIB, span + 4 * MIB, span + 1 * MIB):
        with pytest.raises(ValueError, match="has memory already"):
            driver.map(address, second)
    for address in (span - 2 * MIB, span + 7 * MIB, span + 8 * MIB):
        with pytest.raises(ValueError, match="in no reserved range"):
            driver.map(address, second)
    with pytest.raises(ValueError, match="mapped at"):
        driver.map(span, first)
    driver.map(span, second)
    driver.map(span + 6 * MIB, driver.create(2 * MIB))
    driver.check()


def test_physical_memory_runs_out() -> None:
    driver = HbmDriver(5 * MIB)
    assert driver.create(4 * MIB) == 0
    assert driver.create(2 * MIB) is None
    with pytest.raises(ValueError, match="multiples of 2097152 bytes, not 1048576"):
        driver.create(MIB)


def test_pages_may_be_smaller_where_the_driver_allows_it() -> None:
    driver = HbmDriver(MIB, page_bytes=65536)
    span = driver.reserve(MIB)
    for place in (3, 0, 2, 1):
        driver.map(span + place * 65536, driver.create(65536))
    assert driver.mem_info()[0] == MIB - 4 * 65536
    driver.check()
    with pytest.raises(ValueError, match="multiples of 65536 bytes, not 65535"):
        driver.create(65535)
    for size in (0, 1000, -512):
        with pytest.raises(ValueError, match=f"page_bytes must be a multiple of 512, not {size}"):
            HbmDriver(MIB, page_bytes=size)


def test_pages_of_neighbouring_ranges_do_not_meet() -> None:
    driver = HbmDriver(20 * MIB)
    low, high = driver.reserve(4 * MIB), driver.reserve(4 * MIB)
    assert high == low + 4 * MIB
    driver.map(high, driver.create(2 * MIB))
    with pytest.raises(ValueError, match="in no reserved range"):
        driver.map(low + 2 * MIB, driver.create(4 * MIB))
    driver.map(low + 2 * MIB, page := driver.create(2 * MIB))
    driver.check()
    with pytest.raises(ValueError, match="still has mapped pages"):
        driver.release_range(low)
    assert driver.unmap(low + 2 * MIB) == page
    driver.release_range(low)
    with pytest.raises(ValueError, match="still has mapped pages"):
        driver.release_range(high)
    driver.check()


def test_wrong_calls_are_errors() -> None:
    driver = HbmDriver(MIB)
    address = driver.alloc(512)
    driver.free(address)
    for call in (driver.free, driver.release_range, driver.destroy, driver.unmap):
        with pytest.raises(KeyError):
            call(address)
    with pytest.raises(ValueError, match="cannot serve 0 bytes"):
        driver.alloc(0)
    with pytest.raises(ValueError, match="capacity_bytes must be at least 1, not -5"):
        HbmDriver(-5)
    with pytest.raises(ValueError, match="cannot hold -1 bytes"):
        driver.set_tenants(-1)


class Ranges(RuleBasedStateMachine):
    """Against a naive model: first fit by looking at every address in turn."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.driver = HbmDriver(64 * 512)
        self.held: dict[int, tuple[int, bool]] = {}

    def naive_place(self, size: int) -> int:
        at = FIRST_ADDRESS
        for start in sorted(self.held):
            if start - at >= size:
                break
            at = start + self.held[start][0]
        return at

    @rule(target=live, units=st.integers(1, 20), virtual=st.booleans())
    def take(self, units: int, virtual: bool) -> int | None:
        size = units * 512
        free = 64 * 512 - sum(n for n, v in self.held.values() if not v)
        expected = self.naive_place(size) if virtual or size <= free else None
        address = self.driver.reserve(size) if virtual else self.driver.alloc(size)
        assert address == expected
        if address is not None:
            self.held[address] = (size, virtual)
        return address

    @rule(address=consumes(live))
    def give(self, address: int | None) -> None:
        if address is not None:
            _, virtual = self.held.pop(address)
            (self.driver.release_range if virtual else self.driver.free)(address)

    @invariant()
    def holds(self) -> None:
        self.driver.check()


TestRanges = Ranges.TestCase


@pytest.mark.parametrize(
    "break_it",
    [
        lambda d: d._gap_sizes.__setitem__(0, d._gap_sizes[0] - 512),
        lambda d: setattr(d, "_used_bytes", d._used_bytes + 512),
        lambda d: d._allocated.popitem(),
        lambda d: d._mapped_starts.popitem()[1].clear(),
        lambda d: d._mapped_starts[next(iter(d._reserved))].clear(),
    ],
    ids=["lost addresses", "lost bytes", "lost range", "lost pages of a range", "lost pages"],
)
def test_check_finds_broken_books(break_it: object) -> None:
    driver = HbmDriver(100 * MIB)
    chance = random.Random(1)
    held = [driver.alloc(chance.randint(1, MIB)) for _ in range(20)]
    for address in held[::3]:
        driver.free(address)
    driver.map(driver.reserve(4 * MIB), driver.create(2 * MIB))
    driver.check()
    break_it(driver)
    with pytest.raises(AssertionError):
        driver.check()
