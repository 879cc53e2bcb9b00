"""``direct``: what every tensor costs without a cache, pages behind ranges, and a naive second model beside both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.direct import DirectAllocator, DirectBlock, DirectConfig
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Block, Segment, Tag, Work

KIB = 1 << 10
MIB = 1 << 20


def make(capacity: int = 100 * MIB, limit: int | None = None, **driver: int) -> DirectAllocator:
    return DirectAllocator(HbmDriver(capacity, **driver), DirectConfig(limit_bytes=limit))


# Tensors


def test_a_malloc_is_a_driver_call_and_a_free_waits_for_the_device_as_well() -> None:
    a = make()
    handles = [a.malloc(1000, tag=Tag.KV) for _ in range(3)]
    assert a.take_work() == Work(driver_calls=3)
    for handle in handles:
        a.free(handle)
    assert a.take_work() == Work(driver_calls=3, syncs=3)
    assert a.take_work() == Work()


def test_a_concatenation_of_64_tensors_is_128_calls_and_64_waits() -> None:
    a = make()
    grown = a.regrow([a.malloc(8192, tag=Tag.KV) for _ in range(64)], 16384)
    assert a.take_work() == Work(driver_calls=64 + 128, syncs=64, copied_bytes=64 * 8192)
    assert len(grown) == 64


def test_the_driver_rounds_to_512_and_that_is_all_the_waste_there_is() -> None:
    a = make()
    a.malloc(1, tag=Tag.WEIGHT)
    a.malloc(512, tag=Tag.KV)
    a.malloc(513, tag=Tag.KV)
    usage = a.usage()
    assert (usage.reserved, usage.allocated, usage.requested) == (2048, 2048, 1026)
    assert (usage.pool_free, usage.largest_free, usage.pending) == (0, 0, 0)
    assert usage.requested_by_tag == (1, 0, 0, 1025)
    assert a.driver.mem_info()[0] == 100 * MIB - 2048


def test_each_tensor_is_a_segment_of_its_own() -> None:
    a = make()
    first = a.malloc(1000, tag=Tag.KV, owner=7)
    a.malloc(5, tag=Tag.WEIGHT, stream=2)
    at = FIRST_ADDRESS
    assert list(a.walk()) == [
        Segment(at, 1024, "large", 0, (Block(at, 1024, 1000, "active_allocated", Tag.KV, 7),)),
        Segment(at + 1024, 512, "large", 2, (Block(at + 1024, 512, 5, "active_allocated", Tag.WEIGHT, -1),)),
    ]
    a.free(first)
    assert [segment.address for segment in a.walk()] == [at + 1024]
    a.malloc(600, tag=Tag.KV)
    assert a.address(2) == at, "first fit: the gap is used again"


def test_statistics_count_each_tensor_as_a_segment() -> None:
    a = make()
    handle = a.malloc(1000, tag=Tag.KV)
    a.malloc(2000, tag=Tag.KV)
    a.free(handle)
    stats = a.stats()
    assert {name: stats[f"{name}.all.current"] for name in ("segment", "allocation", "reserved_bytes")} == {
        "segment": 1,
        "allocation": 1,
        "reserved_bytes": 2048,
    }
    assert stats["segment.large_pool.peak"] == 2
    assert stats["reserved_bytes.all.peak"] == 3072
    assert stats["requested_bytes.all.freed"] == 1000
    assert (stats["num_device_alloc"], stats["num_device_free"], stats["num_ooms"]) == (2, 1, 0)


def test_holes_are_no_reason_to_fail() -> None:
    a = make(capacity=10 * MIB)
    handles = [a.malloc(MIB, tag=Tag.KV) for _ in range(10)]
    for handle in handles[::2]:
        a.free(handle)
    assert a.free_bytes == 5 * MIB
    a.malloc(5 * MIB, tag=Tag.KV)
    with pytest.raises(OutOfMemory):
        a.malloc(1, tag=Tag.KV)


def test_the_facts_of_a_failure() -> None:
    a = make(capacity=10 * MIB, limit=8 * MIB, tenants_bytes=MIB)
    a.malloc(2 * MIB, tag=Tag.WEIGHT)
    a.malloc(3 * MIB - 1, tag=Tag.KV, owner=4)
    with pytest.raises(OutOfMemory) as raised:
        a.malloc(3 * MIB + 1, tag=Tag.KV, owner=4, stream=1)
    facts = raised.value.facts
    assert (facts.allocator, facts.asked_bytes, facts.need_bytes) == ("direct", 3 * MIB + 1, 3 * MIB + 512)
    assert (facts.tag, facts.owner, facts.stream, facts.owner_bytes) == (Tag.KV, 4, 1, 3 * MIB)
    assert (facts.capacity_bytes, facts.limit_bytes, facts.tenants_bytes) == (10 * MIB, 8 * MIB, MIB)
    assert (facts.reserved_bytes, facts.allocated_bytes, facts.requested_bytes) == (5 * MIB, 5 * MIB, 5 * MIB - 1)
    assert (facts.driver_free_bytes, facts.largest_free_bytes, facts.cached_free_bytes) == (3 * MIB, 3 * MIB, 0)
    assert facts.weights_bytes == 2 * MIB
    assert classify(facts) is Cause.NEVER_FITS
    assert a.stats()["num_ooms"] == 1


def test_a_refused_driver_call_is_a_call_and_a_cap_asks_nobody() -> None:
    a = make(capacity=4 * MIB, limit=8 * MIB)
    for size, calls in ((5 * MIB, 1), (9 * MIB, 0)):
        with pytest.raises(OutOfMemory):
            a.malloc(size, tag=Tag.KV)
        assert a.take_work() == Work(driver_calls=calls)
    span = a.reserve_range(32 * MIB)
    a.take_work()
    for size, calls in ((6 * MIB, 1), (10 * MIB, 0)):
        with pytest.raises(OutOfMemory):
            a.map_page(span, size, tag=Tag.KV)
        assert a.take_work() == Work(driver_calls=calls)
    a.check()
    a.driver.check()


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, but is -1"):
        DirectConfig(limit_bytes=-1)


# Pages


def test_a_range_is_addresses_and_a_page_is_memory() -> None:
    a = make()
    span = a.reserve_range(64 * MIB)
    assert a.usage().reserved == 0
    assert a.take_work() == Work(driver_calls=1)
    page = a.map_page(span + 4 * MIB, 2 * MIB, tag=Tag.KV, owner=3)
    assert a.take_work() == Work(driver_calls=2, mapped_bytes=2 * MIB)
    assert a.address(page) == span + 4 * MIB
    assert a.usage()[:3] == (2 * MIB, 2 * MIB, 2 * MIB), "a page has no rounding"
    assert a.usage().requested_by_tag[Tag.KV] == 2 * MIB
    assert list(a.walk()) == [
        Segment(
            span + 4 * MIB,
            2 * MIB,
            "large",
            0,
            (Block(span + 4 * MIB, 2 * MIB, 2 * MIB, "active_allocated", Tag.KV, 3),),
            is_expandable=True,
        )
    ]
    a.check()
    a.free(page)
    assert a.take_work() == Work(driver_calls=2), "unmap and destroy; nobody waits"
    a.release_range(span)
    assert a.take_work() == Work(driver_calls=1)
    assert a.driver.mem_info()[0] == 100 * MIB


def test_pages_are_mapped_memory_in_the_statistics_and_no_segments() -> None:
    a = make()
    span = a.reserve_range(64 * MIB)
    first = a.map_page(span, 2 * MIB, tag=Tag.KV)
    a.map_page(span + 2 * MIB, 6 * MIB, tag=Tag.KV)
    a.free(first)
    stats = a.stats()
    assert stats["segment.all.peak"] == 0
    assert stats["reserved_bytes.all.current"] == 6 * MIB
    assert stats["reserved_bytes.all.peak"] == 8 * MIB
    assert stats["allocation.all.current"] == 1
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)


def test_the_observer_sees_pages_as_mallocs_and_frees() -> None:
    a = make()
    seen: list[tuple[Any, ...]] = []
    a.observer = lambda *call: seen.append(call)
    span = a.reserve_range(8 * MIB)
    page = a.map_page(span, 2 * MIB, tag=Tag.KV, owner=5)
    a.free(page)
    assert seen == [("malloc", page, 2 * MIB, 0, "", Tag.KV, 5), ("free", page, 0, 0, "", None, -1)]


def test_pages_run_out_like_bytes() -> None:
    a = make(capacity=10 * MIB, limit=7 * MIB)
    span = a.reserve_range(64 * MIB)
    for place in range(3):
        a.map_page(span + place * 2 * MIB, 2 * MIB, tag=Tag.KV, owner=1)
    assert a.free_bytes == MIB
    with pytest.raises(OutOfMemory) as raised:
        a.map_page(span + 6 * MIB, 2 * MIB, tag=Tag.KV, owner=1)
    facts = raised.value.facts
    assert (facts.asked_bytes, facts.need_bytes, facts.driver_free_bytes) == (2 * MIB, 2 * MIB, MIB)
    assert (facts.owner_bytes, facts.tag) == (6 * MIB, Tag.KV)
    a.driver.set_tenants(4 * MIB)
    assert a.free_bytes == 0
    a.check()


def test_a_page_of_a_wrong_size_or_place_changes_nothing() -> None:
    a = make()
    span = a.reserve_range(8 * MIB)
    a.map_page(span, 2 * MIB, tag=Tag.KV)
    before = a.usage()
    for address, size, why in (
        (span + 2 * MIB, MIB, "multiples of 2097152 bytes, not 1048576"),
        (span, 2 * MIB, "has memory already"),
        (span + 8 * MIB, 2 * MIB, "in no reserved range"),
    ):
        with pytest.raises(ValueError, match=why):
            a.map_page(address, size, tag=Tag.KV)
    assert a.usage() == before
    assert a.driver.mem_info()[0] == 98 * MIB
    a.check()
    a.driver.check()
    with pytest.raises(ValueError, match="still has mapped pages"):
        a.release_range(span)


def test_small_pages_need_a_driver_that_has_them() -> None:
    a = make(page_bytes=64 * KIB)
    assert a.page_bytes == 64 * KIB
    span = a.reserve_range(MIB)
    a.map_page(span + 64 * KIB, 64 * KIB, tag=Tag.KV)
    assert a.usage().reserved == 64 * KIB


# A naive second model under random calls: what is held, and from where to where


class Traffic(RuleBasedStateMachine):
    """Tensors and pages beside a dictionary of intervals."""

    def __init__(self, cls: type[DirectAllocator] = DirectAllocator) -> None:
        super().__init__()
        self.allocator = cls(HbmDriver(64 * KIB, page_bytes=2 * KIB), DirectConfig(limit_bytes=60 * KIB))
        self.span = self.allocator.reserve_range(16 * KIB)
        self.held: dict[int, tuple[int, int]] = {}
        """Requested and taken bytes by handle."""
        self.calls = self.syncs = 0
        self.allocator.take_work()

    def left(self) -> int:
        return 60 * KIB - sum(taken for _, taken in self.held.values())

    @rule(size=st.integers(1, 20 * KIB))
    def malloc(self, size: int) -> None:
        taken = -(-size // 512) * 512
        fits = taken <= self.left()
        self.calls += fits
        try:
            handle = self.allocator.malloc(size, tag=Tag.KV)
        except OutOfMemory:
            assert not fits
        else:
            assert fits
            self.held[handle] = (size, taken)

    @rule(place=st.integers(0, 7))
    def map_page(self, place: int) -> None:
        at = self.span + place * 2 * KIB
        if any(self.allocator.address(handle) == at for handle in self.held):
            return
        fits = self.left() >= 2 * KIB
        self.calls += 2 * fits
        try:
            handle = self.allocator.map_page(at, 2 * KIB, tag=Tag.KV)
        except OutOfMemory:
            assert not fits
        else:
            assert fits
            assert self.allocator.address(handle) == at
            self.held[handle] = (2 * KIB, 2 * KIB)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.held)))
        in_range = 0 <= self.allocator.address(handle) - self.span < 16 * KIB
        self.calls += 2 if in_range else 1
        self.syncs += not in_range
        self.allocator.free(handle)
        del self.held[handle]

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        self.allocator.driver.check()
        usage, taken = self.allocator.usage(), sum(taken for _, taken in self.held.values())
        assert (usage.reserved, usage.allocated) == (taken, taken)
        assert usage.requested == sum(requested for requested, _ in self.held.values())
        assert self.allocator.free_bytes == self.left()
        assert self.allocator.driver.mem_info()[0] == 64 * KIB - taken
        work = self.allocator.take_work()
        assert (work.driver_calls, work.syncs) == (self.calls, self.syncs)
        self.calls = self.syncs = 0


def drive(cls: type[DirectAllocator], **more: object) -> None:
    run_state_machine_as_test(
        lambda: Traffic(cls), settings=settings(max_examples=40, stateful_step_count=40, deadline=None, **more)
    )


def test_a_naive_model_agrees() -> None:
    drive(DirectAllocator)


class LeaksAPage(DirectAllocator):
    """Unmaps a page and keeps its memory."""

    def _give_back(self, block: DirectBlock) -> None:
        if block.page is not None:
            self.driver.create(self.page_bytes)
        super()._give_back(block)


class ForgetsToWait(DirectAllocator):
    """Frees without waiting for the device."""

    def _give_back(self, block: DirectBlock) -> None:
        super()._give_back(block)
        self.work.syncs = 0


class CountsPagesAsTensors(DirectAllocator):
    """Pages are counted as segments."""

    def map_page(self, addr: int, size: int, *, tag: Tag, owner: int = -1) -> int:
        handle = super().map_page(addr, size, tag=tag, owner=owner)
        self.grid.segment_unmap(1, size)
        self.grid.segment_alloc(1, size)
        return handle


class KeepsTheCapLoosely(DirectAllocator):
    """Lets a request pass the cap by 4 KiB."""

    def _within_cap(self, size: int) -> bool:
        return super()._within_cap(size - 4 * KIB)


@pytest.mark.parametrize("bug", [LeaksAPage, ForgetsToWait, CountsPagesAsTensors, KeepsTheCapLoosely])
def test_a_planted_bug_is_noticed(bug: type[DirectAllocator]) -> None:
    with pytest.raises(AssertionError):
        drive(bug, phases=[Phase.generate], database=None, derandomize=True)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda a: setattr(next(iter(a._live.values())), "size", 4096),
        lambda a: setattr(next(iter(a._live.values())), "address", a.address(2) - 512),
        lambda a: a.grid.segment_free(1, 512),
        lambda a: a._requested_by_tag.__setitem__(0, 1),
    ],
    ids=["size", "overlap", "segments", "tags"],
)
def test_check_finds_broken_books(break_it: Callable[[DirectAllocator], None]) -> None:
    a = make()
    for size in (1000, 2000, 3000):
        a.malloc(size, tag=Tag.KV)
    a.map_page(a.reserve_range(8 * MIB), 2 * MIB, tag=Tag.KV)
    a.check()
    break_it(a)
    with pytest.raises(AssertionError):
        a.check()
