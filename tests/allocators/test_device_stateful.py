"""Every registered device allocator under whatever Hypothesis thinks of, checked after each step."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.bump import BumpAllocator
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.pooled import PooledAllocator
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.tlsf import TlsfAllocator

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 2048),
    st.sampled_from([MIB - 32, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 12_000_000, 20 * MIB]),
    st.integers(1, 30 * MIB),
)


class Machine(RuleBasedStateMachine):
    """malloc, free, regrow, empty_cache and tenants that come and go, beside a plain dictionary."""

    def __init__(self, make: Callable[[HbmDriver, int], Any]) -> None:
        super().__init__()
        self.driver = HbmDriver(100 * MIB)
        self.allocator = make(self.driver, 90 * MIB)
        self.live: dict[int, tuple[int, Tag, int]] = {}

    def failed(self, failure: OutOfMemory) -> None:
        facts = failure.facts
        assert facts.largest_free_bytes <= facts.free_bytes
        if classify(facts) is Cause.ALLOCATOR_RULE:
            assert facts.rule
        assert facts.need_bytes >= facts.asked_bytes

    @rule(size=SIZES, tag=st.sampled_from(Tag), stream=st.integers(0, 2), owner=st.integers(-1, 3))
    def malloc(self, size: int, tag: Tag, stream: int, owner: int) -> None:
        try:
            handle = self.allocator.malloc(size, stream=stream, tag=tag, owner=owner)
        except OutOfMemory as failure:
            self.failed(failure)
        else:
            self.live[handle] = (size, tag, owner)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[handle]
        self.allocator.free(handle)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), size=SIZES)
    def regrow(self, data: st.DataObject, size: int) -> None:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=4, unique=True))
        try:
            done = self.allocator.regrow(handles, size)
        except OutOfMemory as failure:
            self.failed(failure)
            done = failure.done
            assert len(done) < len(handles)
        for old, new in zip(handles, done, strict=False):
            _, tag, owner = self.live.pop(old)
            self.live[new] = (size, tag, owner)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    @rule(held=st.integers(0, 60 * MIB))
    def tenants(self, held: int) -> None:
        self.driver.set_tenants(held)

    @invariant()
    def holds(self) -> None:
        self.allocator.check()
        self.driver.check()
        blocks = [b for s in self.allocator.walk() for b in s.blocks if b.state == "active_allocated"]
        assert sorted((b.requested, b.tag, b.owner) for b in blocks) == sorted(self.live.values())
        spans = sorted((self.allocator.address(handle), size) for handle, (size, _, _) in self.live.items())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans)), "no byte has two owners"
        assert [b.address for b in sorted(blocks)] == [address for address, _ in spans]


class CachingMachine(Machine):
    """All verbs of the caching allocator; the model knows who owns which bytes, and which blocks may still wait."""

    def __init__(self, make: Callable[[HbmDriver, int], Any], options: dict[str, Any]) -> None:
        super().__init__(make)
        self.entered: list[str] = []
        self.pools: list[str] = []
        self.made = 0
        self.expandable = "expandable_segments:True" in options.get("alloc_conf", "")

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=st.integers(0, 3))
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        self.allocator.record_stream(data.draw(st.sampled_from(sorted(self.live))), stream)

    @precondition(lambda self: self.live and self.allocator.rules.flavour == "torch_npu")
    @rule(data=st.data(), stream=st.integers(0, 3), current=st.integers(0, 2))
    def erase_stream(self, data: st.DataObject, stream: int, current: int) -> None:
        self.allocator.erase_stream(data.draw(st.sampled_from(sorted(self.live))), stream, current)

    @rule(stream=st.one_of(st.none(), st.integers(0, 3)), count=st.one_of(st.none(), st.integers(0, 3)))
    def complete_events(self, stream: int | None, count: int | None) -> None:
        before = self.allocator.usage()
        self.allocator.complete_events(stream, count)
        assert self.allocator.usage() == before, "completed is not freed"

    @rule()
    def synchronize(self) -> None:
        self.allocator.synchronize()

    @rule(fraction=st.sampled_from([0.3, 0.7, 0.9]))
    def fraction(self, fraction: float) -> None:
        self.allocator.set_per_process_memory_fraction(fraction)

    @rule(accumulated=st.booleans())
    def reset(self, accumulated: bool) -> None:
        a = self.allocator
        (a.reset_accumulated_memory_stats if accumulated else a.reset_peak_memory_stats)()
        stats = a.stats()
        if accumulated:
            assert not any(value for key, value in stats.items() if key.endswith((".allocated", ".freed")))
        else:
            peaks = {key: value for key, value in stats.items() if key.endswith(".peak")}
            assert all(stats[key.replace(".peak", ".current")] == value for key, value in peaks.items())

    @rule(data=st.data(), use_on_oom=st.booleans(), no_split=st.booleans())
    def mempool_begin(self, data: st.DataObject, use_on_oom: bool, no_split: bool) -> None:
        outside = [name for name in self.pools if name not in self.entered]
        name = data.draw(st.sampled_from([*outside, ""])) or f"pool {self.made}"
        if name not in self.pools:
            self.made += 1
            self.pools.append(name)
        self.entered.append(name)
        self.allocator.mempool_begin(name, use_on_oom, no_split)

    @precondition(lambda self: self.entered)
    @rule(data=st.data())
    def mempool_end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.entered))
        self.entered.remove(name)
        self.allocator.mempool_end(name)

    @precondition(lambda self: not self.expandable and set(self.pools) - set(self.entered))
    @precondition(lambda self: self.allocator.rules.flavour == "torch_npu" or not self.entered)
    @rule(data=st.data())
    def mempool_delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.pools) - set(self.entered))))
        self.pools.remove(name)
        self.allocator.mempool_delete(name)

    @precondition(lambda self: self.allocator.rules.flavour == "torch_npu")
    @rule(size=SIZES, stream=st.integers(0, 2))
    def workspace(self, size: int, stream: int) -> None:
        with suppress(OutOfMemory):
            self.allocator.workspace(size, stream)

    @precondition(lambda self: self.expandable and self.allocator.rules.keeps_pages)
    @rule()
    def empty_virt_addr_cache(self) -> None:
        self.allocator.empty_virt_addr_cache()

    @invariant()
    def the_driver_agrees(self) -> None:
        a = self.allocator
        held = a.usage().reserved + a.workspace_bytes
        kept = self.driver.used_bytes - held
        assert kept == 0 or (self.expandable and kept > 0), "all but kept pages"
        stats = a.stats()
        for family in ("active", "active_bytes", "allocation", "allocated_bytes", "reserved_bytes", "segment"):
            for pool in ("all", "small_pool", "large_pool"):
                assert 0 <= stats[f"{family}.{pool}.current"] <= stats[f"{family}.{pool}.peak"]


CACHING_CASES = [
    {},
    {"flavour": "torch_cuda", "alloc_conf": "max_split_size_mb:20,garbage_collection_threshold:0.4"},
    {"alloc_conf": "expandable_segments:True"},
    {"alloc_conf": "expandable_segments:True,multi_stream_lazy_reclaim:True", "research_after_sync": True},
    {"flavour": "torch_cuda", "alloc_conf": "expandable_segments:True,garbage_collection_threshold:0.4"},
    {"alloc_conf": "max_split_size_mb:20,garbage_collection_threshold:0.4,roundup_power2_divisions:4"},
]


def drive(machine: Callable[[], Machine], examples: int, **more: Any) -> None:
    quick = settings(max_examples=examples, stateful_step_count=40, deadline=None, **more)
    run_state_machine_as_test(machine, settings=quick)


@pytest.mark.parametrize("options", CACHING_CASES, ids=str)
def test_whatever_is_called_of_the_caching_allocator(options: dict[str, Any], device_setup_of: Any) -> None:
    setup = device_setup_of("caching", options)
    drive(lambda: CachingMachine(setup.make, options), examples=40)


def test_whatever_is_called(device_setup: Any) -> None:
    drive(lambda: Machine(device_setup.make), examples=20)


# Planted bugs, all of them with a check of their own that says nothing


class Overlaps(TlsfAllocator):
    """A block that is cut off begins in the last bytes of the one before."""

    def address(self, handle: int) -> int:
        block = self._live[handle]
        return block.address - 512 * (block.prev is not None and block.prev.size > 20 * MIB)


class HandsOutLiveMemory(BumpAllocator):
    """The offset comes back to the last block that was freed, whatever lies behind it."""

    def _give_back(self, block: Any) -> None:
        super()._give_back(block)
        self._offset = min(self._offset, block.address)


class ForgetsOneOfTheReplaced(PooledAllocator):
    """A regrow that runs out says nothing of the last tensor that it has replaced."""

    def regrow(self, handles: Sequence[int], size: int) -> list[int]:
        try:
            return super().regrow(handles, size)
        except OutOfMemory as failure:
            raise failure.after(failure.done[:-1]) from None


@pytest.mark.parametrize("bug", [Overlaps, HandsOutLiveMemory, ForgetsOneOfTheReplaced])
def test_a_planted_bug_is_noticed(bug: Any, device_setup_of: Any) -> None:
    class Hidden(bug):
        def check(self) -> None:
            pass

    setup = device_setup_of(bug.name, {})
    with pytest.raises(AssertionError):
        drive(
            lambda: Machine(lambda driver, limit: setup.make(driver, limit, Hidden)),
            examples=300,
            phases=[Phase.generate],
            database=None,
            derandomize=True,
        )
