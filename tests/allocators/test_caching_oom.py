"""What the caching allocator says when it fails: the facts, and the rule that bars a free run."""

from collections.abc import Callable

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import RULES, CachingAllocator, CachingConfig
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.records import Tag

MIB = 1 << 20


def cuda(capacity_mib: int, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(flavour="torch_cuda", **settings))


def failure(request: Callable[[], object]) -> OomFacts:
    with pytest.raises(OutOfMemory) as raised:
        request()
    return raised.value.facts


def test_the_facts_are_complete() -> None:
    driver = HbmDriver(100 * MIB, tenants_bytes=6 * MIB)
    a = CachingAllocator(driver, CachingConfig(limit_bytes=80 * MIB))
    a.malloc(30 * MIB, tag=Tag.WEIGHT)
    a.malloc(5 * MIB, tag=Tag.KV, owner=3)
    a.malloc(100, tag=Tag.WORKSPACE, stream=2)
    a.malloc(4 * MIB, tag=Tag.KV, owner=3)
    message = "caching: 31457792 bytes needed, 42989568 free, largest piece 27262976"
    with pytest.raises(OutOfMemory, match=message) as raised:
        a.malloc(30 * MIB, tag=Tag.KV, owner=3, stream=2)
    assert raised.value.done == ()
    assert raised.value.facts == OomFacts(
        allocator="caching",
        asked_bytes=31_457_280,
        need_bytes=31_457_792,
        tag=Tag.KV,
        owner=3,
        stream=2,
        capacity_bytes=100 * MIB,
        limit_bytes=80 * MIB,
        reserved_bytes=54 * MIB,
        allocated_bytes=31_457_792 + 5_243_392 + 4_194_816 + 512,
        requested_bytes=40_894_564,
        largest_free_bytes=26 * MIB,
        cached_free_bytes=15_726_592,
        driver_free_bytes=26 * MIB,
        rule="cap",
        weights_bytes=31_457_792,
        owner_bytes=9_438_208,
        tenants_bytes=6 * MIB,
    )


def test_a_segment_can_be_too_large_though_the_tensor_is_not() -> None:
    a = cuda(30)
    a.malloc(20 * MIB, tag=Tag.KV)
    facts = failure(lambda: a.malloc(3 * MIB, tag=Tag.KV))
    assert (facts.need_bytes, facts.driver_free_bytes, facts.rule) == (3 * MIB, 10 * MIB, "segment_size")
    assert classify(facts) is Cause.ALLOCATOR_RULE
    a.malloc(10 * MIB, tag=Tag.KV)


def test_the_same_within_what_the_cap_allows() -> None:
    a = cuda(100, limit_bytes=30 * MIB)
    a.malloc(20 * MIB, tag=Tag.KV)
    facts = failure(lambda: a.malloc(3 * MIB, tag=Tag.KV))
    assert (facts.limit_bytes, facts.driver_free_bytes, facts.rule) == (30 * MIB, 10 * MIB, "segment_size")
    assert classify(facts) is Cause.ALLOCATOR_RULE


def test_another_stream_can_hold_the_block() -> None:
    a = cuda(20)
    a.malloc(3 * MIB, tag=Tag.KV, stream=1)
    facts = failure(lambda: a.malloc(3 * MIB, tag=Tag.KV, stream=0))
    assert (facts.largest_free_bytes, facts.driver_free_bytes, facts.rule) == (17 * MIB, 0, "stream")
    assert classify(facts) is Cause.ALLOCATOR_RULE
    a.malloc(3 * MIB, tag=Tag.KV, stream=1)


def test_the_large_pool_does_not_serve_small_requests() -> None:
    a = cuda(20)
    a.malloc(3 * MIB, tag=Tag.KV)
    facts = failure(lambda: a.malloc(1000, tag=Tag.WORKSPACE))
    assert (facts.need_bytes, facts.largest_free_bytes, facts.rule) == (1024, 17 * MIB, "pool")
    assert classify(facts) is Cause.ALLOCATOR_RULE


def test_the_small_pool_does_not_serve_large_requests() -> None:
    a = cuda(3)
    a.malloc(1000, tag=Tag.KV)
    facts = failure(lambda: a.malloc(MIB + 1, tag=Tag.KV))
    assert (facts.driver_free_bytes, facts.largest_free_bytes, facts.rule) == (MIB, 2 * MIB - 1024, "pool")
    assert classify(facts) is Cause.ALLOCATOR_RULE


def test_the_cap_is_named_and_is_no_cause() -> None:
    """Every simulated server has a cap; that memory beyond it is free explains nothing."""
    a = cuda(100, limit_bytes=20 * MIB)
    a.malloc(20 * MIB, tag=Tag.KV, owner=1)
    facts = failure(lambda: a.malloc(2 * MIB, tag=Tag.KV, owner=2))
    assert (facts.driver_free_bytes, facts.largest_free_bytes, facts.rule) == (0, 0, "cap")
    assert classify(facts) is Cause.SHORTAGE


def test_no_rule_is_named_when_no_run_is_large_enough() -> None:
    a = cuda(20)
    handles = [a.malloc(2 * MIB, tag=Tag.KV, owner=i) for i in range(10)]
    for handle in handles[::2]:
        a.free(handle)
    facts = failure(lambda: a.malloc(3 * MIB, tag=Tag.KV, owner=11))
    assert (facts.largest_free_bytes, facts.free_bytes, facts.rule) == (2 * MIB, 10 * MIB, "")
    assert classify(facts) is Cause.EXTERNAL_FRAGMENTATION


def test_an_owner_that_is_larger_than_the_device_never_fits() -> None:
    a = cuda(40, limit_bytes=30 * MIB)
    a.malloc(20 * MIB, tag=Tag.KV, owner=1)
    facts = failure(lambda: a.malloc(11 * MIB, tag=Tag.KV, owner=1))
    assert facts.owner_bytes == 20 * MIB
    assert classify(facts) is Cause.NEVER_FITS


def test_every_rule_has_a_sentence() -> None:
    assert set(RULES) == {
        "segment_size",
        "no_second_search",
        "stream",
        "pool",
        "private_pool",
        "expandable_segments",
        "max_split_size",
        "preempted",
        "workspace",
        "cap",
    }


def test_regrow_says_which_tensors_it_had_replaced() -> None:
    a = cuda(80)
    old = [a.malloc(n * MIB, tag=Tag.KV, owner=5) for n in (10, 30)]
    with pytest.raises(OutOfMemory) as raised:
        a.regrow(old, 35 * MIB)
    (new,) = raised.value.done
    with pytest.raises(KeyError):
        a.address(old[0])
    a.free(old[1])
    a.free(new)
    assert a.take_work().copied_bytes == 10 * MIB
    assert a.usage().allocated == 0
