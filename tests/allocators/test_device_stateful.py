"""Every registered device allocator under whatever Hypothesis thinks of, checked after each step."""

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


CASES = [(name, {}) for name in device_allocators.names()] + [
    ("caching", {"flavour": "torch_cuda", "alloc_conf": "max_split_size_mb:20"}),
    ("pooled", {"fit": "first"}),
]


@pytest.mark.parametrize(("policy", "options"), CASES, ids=str)
def test_whatever_is_called(policy: str, options: dict[str, Any]) -> None:
    machine = type("Machine", (Machine,), {"policy": policy, "options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
