"""What every registered device allocator promises. A new one is listed by the registry and held to this at once.

The variants of those that there are stand in ``conftest.py``.
"""

import dataclasses
import inspect
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.bump import BumpAllocator
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.direct import DirectAllocator
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.pooled import PooledAllocator
from hbmtwin.allocators.records import Tag, Work
from hbmtwin.allocators.registry import device_allocators

MIB = 1 << 20
CAPACITY = 256 * MIB
LIMIT = 200 * MIB

Build = Callable[..., Any]
named = pytest.mark.parametrize("name", device_allocators.names())


@pytest.fixture
def build(device_setup: Any) -> Build:
    """Makes the allocator anew, over a driver of its own unless one is given."""
    return lambda driver=None: device_setup.make(driver or HbmDriver(CAPACITY), LIMIT)


def fill(allocator: DeviceAllocator, operations: int, seed: int = 1) -> dict[int, int]:
    """Random traffic; return live handles and sizes."""
    chance = random.Random(seed)
    live: dict[int, int] = {}
    for _ in range(operations):
        if live and chance.random() < 0.45:
            handle = chance.choice(list(live))
            del live[handle]
            allocator.free(handle)
        else:
            size = int(2 ** chance.uniform(0, 24))
            try:
                live[allocator.malloc(size, tag=Tag(chance.randrange(4)), owner=chance.randrange(5))] = size
            except OutOfMemory:
                continue
    return live


def serves(allocator: DeviceAllocator) -> list[bool]:
    """Whether it has room for each of some sizes, one after the other."""
    answers = []
    for size in (200 * MIB, 150 * MIB, 100 * MIB, 64 * MIB, 33 * MIB + 1, 7 * MIB):
        try:
            allocator.free(allocator.malloc(size, tag=Tag.KV))
        except OutOfMemory:
            answers.append(False)
        else:
            answers.append(True)
    return answers


def longest_free_run(allocator: DeviceAllocator) -> int:
    """Bytes of the longest row of free neighbours, merged or not."""
    longest = 0
    for segment in allocator.walk():
        run = 0
        for block in segment.blocks:
            run = run + block.size if block.state == "inactive" else 0
            longest = max(longest, run)
    return longest


@named
def test_it_says_what_it_is(name: str) -> None:
    cls: Any = device_allocators.get(name)
    assert cls.name == name
    assert isinstance(cls.features, frozenset)
    assert dataclasses.is_dataclass(cls.Config)
    assert cls.Config.__dataclass_params__.frozen
    assert "limit_bytes" in {field.name for field in dataclasses.fields(cls.Config)}
    first = (cls.__doc__ or "").splitlines()[0]
    assert first.endswith("."), "the first line of the docstring says what it is"


@named
def test_every_verb_of_the_contract_is_there_with_the_same_arguments(name: str) -> None:
    cls = device_allocators.get(name)
    promised = {v: f for v, f in inspect.getmembers(DeviceAllocator, inspect.isfunction) if not v.startswith("_")}
    assert {"malloc", "free", "regrow", "walk", "check"} <= set(promised)
    for verb, function in promised.items():
        assert list(inspect.signature(getattr(cls, verb)).parameters) == list(inspect.signature(function).parameters)


def test_a_new_one_is_empty(build: Build) -> None:
    usage = build().usage()
    assert (usage.allocated, usage.requested, usage.pending) == (0, 0, 0)
    assert usage.requested_by_tag == (0, 0, 0, 0)


def test_live_blocks_never_overlap_and_lie_in_driver_memory(build: Build) -> None:
    allocator = build()
    live = fill(allocator, 400)
    spans = sorted((allocator.address(handle), size) for handle, size in live.items())
    assert len(spans) > 10
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    held = [(s.address, s.address + s.size) for s in allocator.walk()]
    assert all(any(low <= a and a + n <= high for low, high in held) for a, n in spans)


def test_the_books_agree_with_the_walk(build: Build) -> None:
    allocator = build()
    live = fill(allocator, 400)
    usage = allocator.usage()
    blocks = [b for s in allocator.walk() for b in s.blocks]
    taken = [b for b in blocks if b.state == "active_allocated"]
    assert usage.reserved == sum(s.size for s in allocator.walk())
    assert usage.allocated == sum(b.size for b in taken)
    assert usage.requested == sum(b.requested for b in taken) == sum(live.values()) == sum(usage.requested_by_tag)
    assert usage.largest_free == max((b.size for b in blocks if b.state == "inactive"), default=0)
    if "monotonic" in allocator.features:
        assert usage.pool_free <= usage.largest_free, "what was freed is free, and no request gets it"
    else:
        assert usage.pool_free == (usage.largest_free if "region" in allocator.features else 0)
    for tag in Tag:
        assert usage.requested_by_tag[tag] == sum(b.requested for b in taken if b.tag is tag)
    allocator.check()


def test_segments_and_blocks_come_in_address_order_and_tile(build: Build) -> None:
    allocator = build()
    fill(allocator, 300)
    end = 0
    for segment in allocator.walk():
        assert segment.address >= end
        end = segment.address
        for block in segment.blocks:
            assert block.address == end
            end += block.size
        assert end == segment.address + segment.size


def test_owner_and_tag_are_kept(build: Build) -> None:
    allocator = build()
    handle = allocator.malloc(1000, tag=Tag.WORKSPACE, owner=42)
    address = allocator.address(handle)
    (block,) = [b for s in allocator.walk() for b in s.blocks if b.address == address]
    assert (block.requested, block.state, block.tag, block.owner) == (1000, "active_allocated", Tag.WORKSPACE, 42)


def test_it_never_takes_more_than_its_limit(build: Build) -> None:
    driver = HbmDriver(CAPACITY)
    allocator = build(driver)
    for _ in range(50):
        allocator.malloc(3 * MIB, tag=Tag.KV)
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB, tag=Tag.KV)
    assert CAPACITY - driver.mem_info()[0] == allocator.usage().reserved <= LIMIT


def test_failure_leaves_live_memory_as_it_was_and_says_what_was_asked(build: Build) -> None:
    allocator = build()
    live = fill(allocator, 300)
    places = {handle: allocator.address(handle) for handle in live}
    before = allocator.usage()
    failures = allocator.stats()["num_ooms"]
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(LIMIT + 1, tag=Tag.ACTIVATION, owner=7, stream=0)
    facts = raised.value.facts
    assert (facts.allocator, facts.asked_bytes, facts.tag, facts.owner) == (
        allocator.name,
        LIMIT + 1,
        Tag.ACTIVATION,
        7,
    )
    assert facts.need_bytes >= facts.asked_bytes
    assert facts.capacity_bytes == CAPACITY
    assert facts.limit_bytes == LIMIT
    after = allocator.usage()
    assert (facts.reserved_bytes, facts.allocated_bytes, facts.requested_bytes) == after[:3]
    assert facts.cached_free_bytes == after.reserved - after.allocated
    assert facts.largest_free_bytes == max(facts.driver_free_bytes, longest_free_run(allocator))
    assert (after.allocated, after.requested, after.requested_by_tag) == (
        before.allocated,
        before.requested,
        before.requested_by_tag,
    )
    assert {handle: allocator.address(handle) for handle in live} == places
    assert allocator.stats()["num_ooms"] == failures + 1
    allocator.check()


def test_everything_can_be_given_back(build: Build) -> None:
    allocator = build()
    for handle in fill(allocator, 500):
        allocator.free(handle)
    allocator.check()
    usage = allocator.usage()
    assert (usage.allocated, usage.requested) == (0, 0)
    allocator.empty_cache()
    allocator.check()
    assert allocator.usage().reserved == (LIMIT if "region" in allocator.features else 0)
    if "monotonic" not in allocator.features:
        as_new = serves(build())
        assert as_new[2], "100 MiB of the 200 MiB at least: beyond that a rule may bar a request, as buddy's does"
        assert serves(allocator) == as_new


def test_handles_are_never_reused(build: Build) -> None:
    allocator = build()
    seen = set()
    for _ in range(50):
        handle = allocator.malloc(100, tag=Tag.KV)
        assert handle not in seen
        seen.add(handle)
        allocator.free(handle)
    assert allocator.regrow([allocator.malloc(5, tag=Tag.KV)], 6)[0] not in seen


def test_dead_handles_are_errors(build: Build) -> None:
    allocator = build()
    handle = allocator.malloc(100, tag=Tag.KV)
    allocator.free(handle)
    for verb in (allocator.free, allocator.address, lambda h: allocator.regrow([h], 5)):
        with pytest.raises(KeyError):
            verb(handle)
    allocator.check()


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_cannot_be_allocated(build: Build, size: int) -> None:
    allocator = build()
    with pytest.raises(ValueError, match=f"{size} bytes cannot be allocated"):
        allocator.malloc(size, tag=Tag.KV)
    assert allocator.stats()["allocation.all.allocated"] == 0


def test_regrow_is_malloc_copy_free_for_one_tensor_after_the_other(build: Build) -> None:
    one, two = build(), build()
    handles = [one.malloc(3_000_000 + i, tag=Tag.KV, owner=i) for i in range(6)]
    assert handles == [two.malloc(3_000_000 + i, tag=Tag.KV, owner=i) for i in range(6)]
    grown = one.regrow(handles, 3_000_003)
    singly = []
    for i, handle in enumerate(handles):
        singly.append(two.malloc(3_000_003, tag=Tag.KV, owner=i))
        two.free(handle)
    assert grown == singly
    assert [one.address(h) for h in grown] == [two.address(h) for h in singly]
    assert one.stats() == two.stats()
    assert list(one.walk()) == list(two.walk())
    work = one.take_work()
    assert work.copied_bytes == 3_000_000 + 3_000_001 + 3_000_002 + 3 * 3_000_003
    assert work == two.take_work()._replace(copied_bytes=work.copied_bytes)
    assert one.take_work() == Work()


def test_the_observer_sees_every_call_before_it_is_carried_out(build: Build) -> None:
    allocator = build()
    seen: list[tuple[Any, ...]] = []
    allocator.observer = lambda *call: seen.append((*call, allocator.usage().requested))
    first = allocator.malloc(1000, tag=Tag.KV, owner=3)
    (second,) = allocator.regrow([first], 1500)
    with pytest.raises(OutOfMemory):
        allocator.malloc(LIMIT + 1, tag=Tag.WEIGHT)
    allocator.free(second)
    allocator.empty_cache()
    assert seen == [
        ("malloc", first, 1000, 0, "", Tag.KV, 3, 0),
        ("malloc", second, 1500, 0, "", Tag.KV, 3, 1000),
        ("free", first, 0, 0, "", None, -1, 2500),
        ("malloc", second + 1, LIMIT + 1, 0, "", Tag.WEIGHT, -1, 1500),
        ("free", second, 0, 0, "", None, -1, 1500),
        ("empty_cache", -1, 0, 0, "", None, -1, 0),
    ]
    assert allocator.malloc(5, tag=Tag.KV) == second + 2, "a failed request keeps its number"


def test_peaks_are_kept_and_reset(build: Build) -> None:
    allocator = build()
    allocator.free(allocator.malloc(100 * MIB, tag=Tag.KV))
    allocator.malloc(50 * MIB, tag=Tag.KV)
    assert allocator.stats()["requested_bytes.all.peak"] == 100 * MIB
    allocator.reset_peak_memory_stats()
    assert allocator.stats()["requested_bytes.all.peak"] == 50 * MIB
    assert allocator.stats()["requested_bytes.all.allocated"] == 150 * MIB


def test_the_same_calls_give_the_same_places(build: Build) -> None:
    one, two = build(), build()
    assert fill(one, 400, seed=5) == fill(two, 400, seed=5)
    assert list(one.walk()) == list(two.walk())
    assert one.stats() == two.stats()


def test_check_finds_broken_books(build: Build) -> None:
    def lose_tag(a: Any) -> None:
        a._requested_by_tag[0] += 1

    def lose_block(a: Any) -> None:
        a._live.popitem()

    def lose_bytes(a: Any) -> None:
        a.grid.current[1][1] -= 512

    def lose_link(a: Any) -> None:
        next(b for b in a._live.values() if b.next is not None).next = None

    def shrink(a: Any) -> None:
        next(iter(a._live.values())).size -= 1

    if not isinstance(build(), BlockAllocator):
        pytest.skip("its books are not those of BlockAllocator")
    for break_it in (lose_tag, lose_block, lose_bytes, lose_link, shrink):
        allocator = build()
        fill(allocator, 200)
        allocator.check()
        if break_it is lose_link and not hasattr(next(iter(allocator._live.values())), "next"):
            continue  # blocks that know no neighbours
        break_it(allocator)
        with pytest.raises((AssertionError, KeyError)):
            allocator.check()


# Planted bugs, all of them with a check of their own that says nothing


class Overlaps(BumpAllocator):
    """A block begins in the last 512 bytes of the one before."""

    def _place(self, *request: Any) -> Any:
        block = super()._place(*request)
        self._offset -= 512
        return block


class LosesMemory(PooledAllocator):
    """What is given back is never free again."""

    def _give_back(self, block: Any) -> None:
        self.grid.free(1, block.size, block.requested)


class PassesItsLimit(DirectAllocator):
    """The cap is not looked at."""

    def _within_cap(self, size: int) -> bool:
        return True


class ForgetsTheOwner(PooledAllocator):
    """A block knows its tag and not its owner."""

    def walk(self) -> Any:
        for segment in super().walk():
            yield segment._replace(blocks=tuple(block._replace(owner=-1) for block in segment.blocks))


class FailsOnlyAfterTaking(PooledAllocator):
    """A request that fails leaves its bytes in the books."""

    def malloc(self, size: int, *, stream: int = 0, tag: Tag, owner: int = -1) -> int:
        try:
            return super().malloc(size, stream=stream, tag=tag, owner=owner)
        except OutOfMemory:
            self._requested_by_tag[tag] += size
            raise


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        (Overlaps, test_live_blocks_never_overlap_and_lie_in_driver_memory),
        (LosesMemory, test_everything_can_be_given_back),
        (PassesItsLimit, test_it_never_takes_more_than_its_limit),
        (ForgetsTheOwner, test_owner_and_tag_are_kept),
        (FailsOnlyAfterTaking, test_failure_leaves_live_memory_as_it_was_and_says_what_was_asked),
    ],
)
def test_a_planted_bug_is_noticed(bug: Any, test: Callable[[Build], None], device_setup_of: Any) -> None:
    class Hidden(bug):
        def check(self) -> None:
            pass

    setup = device_setup_of(bug.name, {})

    def build(driver: HbmDriver | None = None, cls: Any = Hidden) -> Any:
        return setup.make(driver or HbmDriver(CAPACITY), LIMIT, cls)

    test(lambda driver=None: build(driver, None))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(build)
