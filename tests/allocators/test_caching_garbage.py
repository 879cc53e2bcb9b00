"""Garbage collection and the memory fraction."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag

MIB = 1 << 20
CONF = "garbage_collection_threshold:0.5"


def make(
    capacity_mib: int = 200, conf: str = CONF, flavour: str = "torch_cuda", **settings: object
) -> CachingAllocator:
    config = CachingConfig(flavour=flavour, alloc_conf=conf, **settings)
    return CachingAllocator(HbmDriver(capacity_mib * MIB), config)


def mib(a: CachingAllocator, size: float, stream: int = 0) -> int:
    return a.malloc(round(size * MIB), stream=stream, tag=Tag.KV)


def sizes(a: CachingAllocator) -> list[float]:
    a.check()
    return [s.size / MIB for s in a.walk()]


def aged() -> CachingAllocator:
    """Free segments of 12, 14, 16 and 18 MiB in stream 1, of ages 5, 4, 3 and 2; 98 MiB held, limit 100."""
    a = make(250, limit_bytes=200 * MIB)
    handles = [mib(a, size, stream=1) for size in (12, 14, 16, 18)]
    for handle in handles:
        a.free(handle)
        mib(a, 2.5)
    mib(a, 17.5)
    return a


def test_below_the_threshold_nothing_is_collected() -> None:
    a = aged()
    assert sizes(a) == [12, 14, 16, 18, 20, 18]
    assert a.stats()["num_device_free"] == 0
    b = make(250, limit_bytes=200 * MIB)
    for handle in [mib(b, 50), mib(b, 50)]:
        b.free(handle)
    mib(b, 60)
    assert sizes(b) == [50, 50, 60], "100 MiB are held, and the limit is 100 MiB"


def test_a_pass_takes_all_that_are_at_least_as_old_as_the_average() -> None:
    a = aged()
    mib(a, 30)
    assert sizes(a) == [12, 14, 16, 18, 20, 18, 30], "98 MiB were held"
    mib(a, 11)
    assert sizes(a) == [12, 18, 20, 18, 30], "28 to go, ages 7 6 5 4: 12 and 14 MiB; 2 to go, ages 5 4: 16 MiB"


def test_a_pass_does_not_stop_at_the_target() -> None:
    a = make(300, limit_bytes=200 * MIB)
    for handle in [mib(a, size, stream=1) for size in (12, 14, 16, 60)]:
        a.free(handle)
    mib(a, 17.5)
    assert sizes(a) == [18], "102 MiB were held, 2 MiB too many, and all had the same age"


def test_blocks_that_are_taken_put_back_or_cut_are_young_again() -> None:
    a = make(400, limit_bytes=300 * MIB)
    for handle in [mib(a, 40, stream=1), mib(a, 50, stream=1)]:
        a.free(handle)
    for _ in range(3):
        mib(a, 5, stream=2)
    a.free(mib(a, 50, stream=1))
    mib(a, 76, stream=3)
    assert sizes(a) == [40, 50, 20, 76]
    mib(a, 11, stream=3)
    assert sizes(a) == [12, 50, 20, 76], "36 to go, ages 6 and 2: the one that was not used"


def test_split_segments_and_the_small_pool_are_left_alone() -> None:
    a = make(100, "garbage_collection_threshold:0.1", limit_bytes=90 * MIB)
    a.free(mib(a, 0.5))
    keep = mib(a, 3)
    a.free(mib(a, 4))
    mib(a, 30)
    assert sizes(a) == [2, 20, 30]
    a.free(keep)


def test_an_npu_is_synchronized_only_if_there_is_a_candidate() -> None:
    a = make(200, "garbage_collection_threshold:0.1", "torch_npu", limit_bytes=190 * MIB)
    mib(a, 30)
    mib(a, 30)
    assert a.take_work().syncs == 0
    a.free(mib(a, 40))
    mib(a, 50)
    assert a.take_work().syncs == 1
    handle = mib(a, 3)
    a.record_stream(handle, 1)
    a.free(handle)


def test_without_a_cap_there_is_no_collection() -> None:
    a = make(200)
    for size in (60, 50, 40):
        a.free(mib(a, size))
    mib(a, 45)
    mib(a, 49)
    assert a.stats()["num_device_free"] == 0


# -- the fraction ------------------------------------------------------------------------------------------------------


def test_a_fraction_caps_new_memory_and_releases_nothing() -> None:
    a = make(100, "")
    kept = mib(a, 60)
    a.set_per_process_memory_fraction(0.5)
    assert a.usage().reserved == 60 * MIB
    a.free(kept)
    mib(a, 60)
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 20)
    assert (failed.value.facts.limit_bytes, failed.value.facts.rule) == (50 * MIB, "cap")
    assert "50.00 MiB allowed; Of the allocated memory" in failed.value.torch_message
    a.set_per_process_memory_fraction(1)
    mib(a, 20)


def test_a_fraction_of_0_refuses_every_segment_but_not_the_cache() -> None:
    a = make(100, "", "torch_npu")
    a.free(mib(a, 3))
    a.set_per_process_memory_fraction(0)
    mib(a, 5)
    with pytest.raises(OutOfMemory):
        a.malloc(100, tag=Tag.KV)


def test_a_fraction_is_floored_and_checked() -> None:
    a = CachingAllocator(HbmDriver(100 * MIB + 7), CachingConfig())
    a.set_per_process_memory_fraction(0.7)
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 90)
    assert failed.value.facts.limit_bytes == 73_400_324
    with pytest.raises(ValueError, match=r"must lie between 0 and 1, not 1\.5"):
        a.set_per_process_memory_fraction(1.5)


def test_a_fraction_in_the_settings_is_a_cap_from_the_start() -> None:
    a = make(100, "per_process_memory_fraction:0.5")
    with pytest.raises(OutOfMemory):
        mib(a, 51)
    both = make(100, "per_process_memory_fraction:0.5", limit_bytes=30 * MIB)
    with pytest.raises(OutOfMemory) as failed:
        mib(both, 31)
    assert failed.value.facts.limit_bytes == 30 * MIB


def test_before_26_1_a_fraction_of_1_still_was_a_cap() -> None:
    """And so collection began, with a threshold set."""
    for release, collected in (("2.9.0", True), ("2.13.0", False)):
        a = make(100, "garbage_collection_threshold:0.3", "torch_npu", release=release)
        a.set_per_process_memory_fraction(1.0)
        a.free(mib(a, 30))
        mib(a, 3, stream=1)
        assert (a.stats()["segment.all.freed"] > 0) == collected
