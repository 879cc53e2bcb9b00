"""Every registered device allocator under whatever Hypothesis thinks of, checked after each step."""

from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 2048),
    st.sampled_from([MIB - 32, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 12_000_000, 20 * MIB]),
    st.integers(1, 30 * MIB),
)


class Machine(RuleBasedStateMachine):
    """malloc, free, regrow, empty_cache and tenants that come and go, beside a plain dictionary."""

    policy: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        cls: Any = device_allocators.get(self.policy)
        self.driver = HbmDriver(100 * MIB)
        self.allocator = cls(self.driver, cls.Config(limit_bytes=90 * MIB, **self.options))
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
        assert {b.address for b in blocks} == {self.allocator.address(handle) for handle in self.live}


class CachingMachine(Machine):
    """All verbs of the caching allocator; the model knows who owns which bytes, and which blocks may still wait."""

    policy = "caching"

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.pools: list[str] = []
        self.made = 0
        self.expandable = "expandable_segments:True" in self.options.get("alloc_conf", "")

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


@pytest.mark.parametrize("options", CACHING_CASES, ids=str)
def test_whatever_is_called_of_the_caching_allocator(options: dict[str, Any]) -> None:
    machine = type("CachingMachine", (CachingMachine,), {"options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=50, deadline=None))


CASES = [(name, {}) for name in device_allocators.names()] + [
    ("caching", {"flavour": "torch_cuda", "alloc_conf": "max_split_size_mb:20"}),
    ("pooled", {"fit": "first", "coalescing": "deferred"}),
    ("pooled", {"fit": "next", "alignment_bytes": 4096}),
    ("pooled", {"fit": "worst", "coalescing": "deferred"}),
]


@pytest.mark.parametrize(("policy", "options"), CASES, ids=str)
def test_whatever_is_called(policy: str, options: dict[str, Any]) -> None:
    machine = type("Machine", (Machine,), {"policy": policy, "options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
