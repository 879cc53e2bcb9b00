"""Expandable segments: mapping, growing, splitting, alignment, unmapping, kept pages, pages of 1 GiB."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag, Work

MIB = 1 << 20
GIB = 1 << 30
ON = "expandable_segments:True"


def npu(capacity_mib: int = 1024, conf: str = ON, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(alloc_conf=conf, **settings))


def mib(a: CachingAllocator, size: float, stream: int = 0) -> int:
    return a.malloc(round(size * MIB), stream=stream, tag=Tag.KV)


def watched(a: CachingAllocator) -> list[tuple[str, int]]:
    """Action and bytes of what happens to memory, from now on."""
    seen: list[tuple[str, int]] = []

    def observe(action: str, address: int, size: int, stream: int, pool: int) -> None:
        if action.startswith("segment"):
            seen.append((action.removeprefix("segment_"), size // MIB))

    a.trace_observer = observe
    return seen


def blocks(a: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Of each mapped run."""
    a.check()
    return [[(b.size, b.state.removeprefix("active_")) for b in s.blocks] for s in a.walk()]


# -- growing -----------------------------------------------------------------------------------------------------------


def test_small_3_mib_and_24_mib_map_2_20_and_20_mib() -> None:
    a = npu()
    seen = watched(a)
    a.malloc(100, tag=Tag.KV)
    three = mib(a, 3)
    large = mib(a, 24)
    assert seen == [("map", 2), ("map", 20), ("map", 20)]
    assert a.address(large) - a.address(three) == 3 * MIB + 16 * 1024, "aligned to 16 KiB behind 3 MiB + 512"
    stats = a.stats()
    assert (stats["segment.all.current"], stats["reserved_bytes.all.current"]) == (0, 42 * MIB)
    assert (stats["num_device_alloc"], stats["inactive_split.all.allocated"]) == (3, 0)
    assert [(s.pool, s.size // MIB, s.is_expandable) for s in a.walk()] == [("small", 2, True), ("large", 40, True)]


def test_on_cuda_the_24_mib_block_starts_at_3_mib_and_spans_both_pages() -> None:
    a = npu(flavour="torch_cuda")
    three, large = mib(a, 3), mib(a, 24)
    assert a.address(large) - a.address(three) == 3 * MIB
    assert blocks(a) == [[(3 * MIB, "allocated"), (24 * MIB, "allocated"), (13 * MIB, "inactive")]]


def test_alignment_leaves_a_sliver_of_15872_bytes() -> None:
    a = npu()
    mib(a, 1.5)
    mib(a, 4)
    assert blocks(a) == [
        [
            (1_573_376, "allocated"),
            (15_872, "inactive"),
            (4_194_816, "allocated"),
            (20 * MIB - 1_573_376 - 15_872 - 4_194_816, "inactive"),
        ]
    ]


@pytest.mark.parametrize(("size", "sliver"), [(2 * MIB - 544, False), (2 * MIB - 543, True)])
def test_alignment_begins_at_a_rounded_size_of_2_mib(size: int, sliver: bool) -> None:
    a = npu()
    mib(a, 1.5)
    a.malloc(size, tag=Tag.KV)
    assert ((15_872, "inactive") in blocks(a)[0]) == sliver


@pytest.mark.parametrize(("kib", "sliver"), [(0, 0), (4, 3_584), (8, 7_680)])
def test_alignment_is_a_setting(kib: int, sliver: int) -> None:
    a = npu(conf=f"{ON},base_addr_aligned_kb:{kib}")
    mib(a, 1.5)
    mib(a, 4)
    assert blocks(a)[0][1] == ((sliver, "inactive") if sliver else (4_194_816, "allocated"))


def test_an_unaligned_block_that_is_too_short_to_be_cut_is_used_as_it_is() -> None:
    a = npu()
    mib(a, 1.5)
    a.malloc(18 * MIB + 512 * 1023 - 32, tag=Tag.KV)
    assert [size for size, _ in blocks(a)[0][:2]] == [1_573_376, 18 * MIB + 512 * 1023]


def test_large_pages_follow_large_segment_size_else_segment_size() -> None:
    for conf, pages in (("large_segment_size_mb:32", 32), ("segment_size_mb:64", 64), ("page_size:1g", 1024)):
        a = npu(4096, f"{ON},{conf}")
        seen = watched(a)
        mib(a, 3)
        assert seen == [("map", pages)]


def test_a_tail_of_512_bytes_is_split_off_in_the_large_pool() -> None:
    a = npu()
    a.malloc(20 * MIB - 512 - 32, tag=Tag.KV)
    assert blocks(a) == [[(20 * MIB - 512, "allocated"), (512, "inactive")]]


def test_each_stream_and_pool_has_a_range_of_its_own() -> None:
    a = npu(64)
    mib(a, 3)
    mib(a, 3, stream=1)
    assert [s.stream for s in a.walk()] == [0, 1]
    one, two = a.walk()
    assert two.address - one.address == 80 * MIB, "64 MiB and an eighth in pages of 20 MiB"


def test_hccl_zero_copy_shortens_the_ranges() -> None:
    a = npu(64, hccl_zero_copy=True)
    a.malloc(100, tag=Tag.KV)
    mib(a, 3, stream=1)
    mib(a, 3)
    mib(a, 3, stream=2)
    starts = [s.address for s in a.walk()]
    assert [b - c for b, c in zip(starts[1:], starts, strict=False)] == [2 * GIB, 10_240 * MIB, 80 * MIB]


def test_what_was_mapped_before_memory_ran_out_stays_mapped_and_free() -> None:
    driver = HbmDriver(64 * MIB)
    a = CachingAllocator(driver, CachingConfig(alloc_conf=ON))
    mib(a, 3)
    driver.set_tenants(24 * MIB)
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 50)
    assert a.usage().reserved == 20 * MIB, "pages collected in vain are given back"
    assert failed.value.facts.driver_free_bytes == 20 * MIB
    mib(a, 30)
    assert a.usage().reserved == 40 * MIB


def test_a_free_block_counts_as_large_as_it_can_grow() -> None:
    """Two free blocks fit: the lower, larger one is taken, since the other one lies before unmapped addresses."""
    a = npu(flavour="torch_cuda")
    low, wall = mib(a, 12), mib(a, 2)
    assert blocks(a)[0][-1] == (6 * MIB, "inactive")
    a.free(low)
    assert a.address(mib(a, 5)) == a.address(wall) - 12 * MIB


# -- unmapping ---------------------------------------------------------------------------------------------------------


def test_only_pages_that_are_wholly_free_are_unmapped() -> None:
    a = npu(flavour="torch_cuda")
    first, second, last = mib(a, 3), mib(a, 53), mib(a, 4)
    a.free(second)
    seen = watched(a)
    assert a.usage().reserved == 60 * MIB
    a.empty_cache()
    assert seen == [("unmap", 20)]
    assert blocks(a) == [
        [(3 * MIB, "allocated"), (17 * MIB, "inactive")],
        [(16 * MIB, "inactive"), (4 * MIB, "allocated")],
    ]
    assert a.stats()["num_device_free"] == 1
    a.free(first)
    a.free(last)
    a.empty_cache()
    assert seen == [("unmap", 20)] * 3
    assert list(a.walk()) == []
    assert a.driver.mem_info()[0] == GIB
    a.driver.check()


def test_a_hole_is_mapped_again_before_the_end_grows() -> None:
    a = npu(flavour="torch_cuda")
    first, second, last = mib(a, 3), mib(a, 53), mib(a, 4)
    a.free(second)
    a.empty_cache()
    seen = watched(a)
    assert a.address(mib(a, 18)) == a.address(first) + 3 * MIB
    assert seen == [("map", 20)]
    assert a.address(mib(a, 30)) > a.address(first)
    assert a.address(last) == a.address(first) + 56 * MIB


def test_the_last_try_unmaps() -> None:
    a = npu(64)
    keep, go = mib(a, 3), mib(a, 50)
    a.free(go)
    assert a.usage().reserved == 60 * MIB
    with pytest.raises(OutOfMemory):
        mib(a, 45, stream=1)
    assert a.usage().reserved == 20 * MIB, "released, and not enough"
    mib(a, 40 - 1, stream=1)
    a.free(keep)
    a.check()


def test_every_unmapping_synchronizes_the_device() -> None:
    a = npu()
    mib(a, 3)
    a.free(mib(a, 50))
    assert a.take_work() == Work(driver_calls=1 + 3 + 3, mapped_bytes=60 * MIB)
    a.empty_cache()
    assert a.take_work() == Work(driver_calls=4, syncs=2)


# -- kept pages --------------------------------------------------------------------------------------------------------


def test_empty_virt_addr_cache_keeps_the_pages_and_the_next_mapping_takes_them() -> None:
    a = npu(64)
    mib(a, 3)
    a.free(mib(a, 50))
    a.empty_virt_addr_cache()
    assert a.usage().reserved == 20 * MIB
    assert a.driver.mem_info()[0] == 4 * MIB, "the kept pages still occupy the device"
    stats = a.stats()
    assert (stats["num_device_free"], stats["num_sync_all_streams"]) == (1, 1)
    mib(a, 30)
    assert a.usage().reserved == 40 * MIB
    assert a.driver.mem_info()[0] == 4 * MIB
    assert a.stats()["num_device_alloc"] == 3
    a.empty_cache()
    assert a.driver.mem_info()[0] == 24 * MIB
    a.check()


def test_a_mapping_that_fails_gives_kept_pages_back_too() -> None:
    a = npu(64)
    mib(a, 3)
    a.free(mib(a, 30))
    a.empty_virt_addr_cache()
    with pytest.raises(OutOfMemory):
        mib(a, 60)
    assert a.driver.mem_info()[0] == 44 * MIB


def test_empty_virt_addr_cache_needs_expandable_segments() -> None:
    with pytest.raises(RuntimeError, match="needs expandable_segments:True"):
        npu(conf="").empty_virt_addr_cache()
    with pytest.raises(RuntimeError, match="does not exist in this release of torch_cuda"):
        npu(flavour="torch_cuda").empty_virt_addr_cache()


# -- both kinds in one pool --------------------------------------------------------------------------------------------


def test_switched_off_expandable_blocks_are_passed_by() -> None:
    a = npu(64)
    a.free(mib(a, 15))
    a.set_allocator_settings("expandable_segments:False")
    mib(a, 3)
    assert [s.is_expandable for s in a.walk()] == [True, False]
    mib(a, 4)
    assert [s.is_expandable for s in a.walk()] == [True, False], "behind the expandable block an ordinary one fits"


def test_a_request_can_fail_with_an_expandable_block_free() -> None:
    a = npu(40)
    keep = mib(a, 1.5)
    a.free(mib(a, 15))
    a.set_allocator_settings("expandable_segments:False")
    mib(a, 11)
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 12)
    assert failed.value.facts.rule == "expandable_segments"
    a.free(keep)


def test_switched_on_an_ordinary_block_is_split_at_512_and_aligned_and_the_cut_is_not_counted() -> None:
    a = npu(64, "")
    mib(a, 1.5)
    a.set_allocator_settings(ON)
    mib(a, 4)
    assert blocks(a)[0][1] == (15_872, "inactive")
    stats = a.stats()
    assert stats["inactive_split.all.current"] == 1, "two pieces are free; the cut was not counted"
    assert stats["inactive_split_bytes.all.current"] == 20 * MIB - 1_573_376 - 4_194_816


# -- pages of 1 GiB ----------------------------------------------------------------------------------------------------


def test_ordinary_segments_of_the_large_pool_are_whole_gib() -> None:
    a = npu(4096, "page_size:1g")
    a.malloc(100, tag=Tag.KV)
    mib(a, 3)
    mib(a, 1500)
    assert [s.size // MIB for s in a.walk()] == [2, 1024, 2048]
    assert a.stats()["num_device_alloc"] == 3


def test_an_old_cann_ignores_pages_of_1_gib() -> None:
    a = npu(4096, "page_size:1g", cann="8.0.0")
    mib(a, 3)
    assert a.usage().reserved == 20 * MIB
