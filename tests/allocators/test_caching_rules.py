"""The caching allocator, rule by rule. CUDA's sizes are used where the pad does not matter: they are rounder."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.driver import FIRST_ADDRESS
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag, Work

MIB = 1 << 20


def cuda(capacity_mib: int, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(flavour="torch_cuda", **settings))


def mib(allocator: CachingAllocator, size: float, stream: int = 0) -> int:
    return allocator.malloc(round(size * MIB), stream=stream, tag=Tag.KV)


def offset(allocator: CachingAllocator, handle: int) -> float:
    return (allocator.address(handle) - FIRST_ADDRESS) / MIB


def layout(allocator: CachingAllocator) -> list[list[tuple[float, str]]]:
    """Blocks of each segment in MiB: ``live`` or ``free``."""
    words = {"active_allocated": "live", "inactive": "free"}
    return [[(b.size / MIB, words[b.state]) for b in s.blocks] for s in allocator.walk()]


# -- best fit ----------------------------------------------------------------------------------------------------------


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    a = cuda(100)
    blocks = [mib(a, n) for n in (4, 2, 3, 2, 6)]
    for block in blocks[::2]:
        a.free(block)
    assert layout(a) == [[(4, "free"), (2, "live"), (3, "free"), (2, "live"), (9, "free")]]
    assert offset(a, mib(a, 2.5)) == 6
    assert offset(a, mib(a, 3.5)) == 0
    assert offset(a, mib(a, 5)) == 11


def test_ties_go_to_the_lowest_address() -> None:
    a = cuda(100)
    blocks = [mib(a, 2) for _ in range(9)]
    for block in (blocks[5], blocks[1], blocks[3]):
        a.free(block)
    mib(a, 2)
    assert layout(a) == [
        [(2, "live")] * 3 + [(2, "free"), (2, "live"), (2, "free")] + [(2, "live")] * 3 + [(2, "free")]
    ]


def test_small_requests_have_segments_of_their_own() -> None:
    a = cuda(100)
    mib(a, 1)
    mib(a, 1.5)
    assert [(s.pool, s.size // MIB) for s in a.walk()] == [("small", 2), ("large", 20)]
    assert layout(a) == [[(1, "live"), (1, "free")], [(1.5, "live"), (18.5, "free")]]


def test_streams_never_share_blocks() -> None:
    a = cuda(100)
    a.free(mib(a, 3, stream=1))
    assert offset(a, mib(a, 3, stream=0)) == 20
    assert offset(a, mib(a, 3, stream=1)) == 0
    assert [s.stream for s in a.walk()] == [1, 0]


# -- split and merge ---------------------------------------------------------------------------------------------------


def test_a_large_block_is_kept_whole_if_1_mib_is_over() -> None:
    a = cuda(200)
    for size in (11, 13, 15.5):
        mib(a, size)
    assert layout(a) == [[(12, "live")], [(14, "live")], [(16, "live")]]
    assert a.usage().allocated == 42 * MIB
    assert a.usage().requested == round(39.5 * MIB)


def test_a_large_block_is_split_at_1_mib_and_512() -> None:
    a = cuda(200)
    a.malloc(11 * MIB - 512, tag=Tag.KV)
    assert layout(a) == [[((11 * MIB - 512) / MIB, "live"), ((MIB + 512) / MIB, "free")]]


def test_a_small_block_is_split_down_to_512() -> None:
    a = cuda(200)
    handles = [a.malloc(512, tag=Tag.KV) for _ in range(4096)]
    assert a.usage().reserved == 2 * MIB
    assert offset(a, handles[-1]) * MIB == 2 * MIB - 512
    a.malloc(512, tag=Tag.KV)
    assert a.usage().reserved == 4 * MIB
    a.check()


def test_the_low_part_is_handed_out() -> None:
    a = cuda(100)
    assert [offset(a, mib(a, n)) for n in (3, 5, 2)] == [0, 3, 8]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge_whatever_the_order(order: tuple[int, ...]) -> None:
    a = cuda(100)
    handles = [mib(a, 3) for _ in range(3)]
    for i in order:
        a.free(handles[i])
        a.check()
    assert layout(a) == [[(20, "free")]]


def test_segments_do_not_merge() -> None:
    a = cuda(100)
    a.free(mib(a, 12))
    a.free(mib(a, 14))
    assert layout(a) == [[(12, "free")], [(14, "free")]], "though they touch"
    assert offset(a, mib(a, 26)) == 26


# -- the miss path -----------------------------------------------------------------------------------------------------


def test_cached_memory_stays_until_it_is_needed() -> None:
    a = cuda(50)
    a.free(mib(a, 12))
    a.free(mib(a, 0.5))
    assert a.usage().reserved == 14 * MIB
    mib(a, 36)
    assert a.usage().reserved == 50 * MIB, "the driver had just enough"
    assert a.stats()["num_alloc_retries"] == 0


def test_before_failing_every_whole_segment_is_released_and_the_driver_asked_again() -> None:
    a = cuda(50)
    a.free(mib(a, 12))
    a.free(mib(a, 0.5))
    a.free(mib(a, 3, stream=7))
    kept = mib(a, 0.5, stream=7)
    assert a.take_work() == Work(driver_calls=4)
    mib(a, 40)
    assert layout(a) == [[(0.5, "live"), (1.5, "free")], [(40, "live")]]
    stats = a.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_sync_all_streams"]) == (1, 0, 1)
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (5, 3)
    assert a.take_work() == Work(driver_calls=5), "refused, three released, given"
    a.free(kept)
    a.check()


def test_a_split_segment_cannot_be_released() -> None:
    a = cuda(40)
    keep, go = mib(a, 2), mib(a, 17)
    a.free(go)
    a.empty_cache()
    assert layout(a) == [[(2, "live"), (18, "free")]]
    assert a.stats()["inactive_split_bytes.all.current"] == 18 * MIB
    a.free(keep)
    a.empty_cache()
    assert a.usage() == (0, 0, 0, 0, 0, 0, (0, 0, 0, 0), 0)
    assert a.driver.mem_info() == (40 * MIB, 40 * MIB)


def test_the_third_try_counts_as_a_retry_even_if_the_cap_refuses_it() -> None:
    a = cuda(100, limit_bytes=20 * MIB)
    mib(a, 20)
    a.take_work()
    with pytest.raises(OutOfMemory):
        mib(a, 20)
    stats = a.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_sync_all_streams"]) == (1, 1, 1)
    assert a.take_work() == Work(), "a request over the cap never reaches the driver"


def test_the_cap_is_on_segments() -> None:
    a = cuda(100, limit_bytes=39 * MIB)
    mib(a, 3)
    with pytest.raises(OutOfMemory):
        mib(a, 20)
    mib(a, 17)
    assert a.usage().reserved == 20 * MIB


def test_a_cap_of_0_refuses_every_segment() -> None:
    with pytest.raises(OutOfMemory):
        mib(cuda(100, limit_bytes=0), 1)


def test_an_npu_is_synchronized_before_memory_is_released() -> None:
    a = CachingAllocator(HbmDriver(50 * MIB), CachingConfig())
    a.free(mib(a, 12))
    assert a.take_work() == Work(driver_calls=1)
    mib(a, 45)
    assert a.take_work() == Work(driver_calls=3, syncs=1)
    a.empty_cache()
    assert a.take_work() == Work(syncs=1)


def test_an_exabyte_is_refused_before_anything_is_counted() -> None:
    a = cuda(50)
    with pytest.raises(OutOfMemory):
        a.malloc(1 << 60, tag=Tag.KV)
    assert a.stats()["num_ooms"] == 0
    with pytest.raises(OutOfMemory):
        a.malloc((1 << 60) - 1, tag=Tag.KV)
    assert a.stats()["num_ooms"] == 1


# -- max_split_size_mb -------------------------------------------------------------------------------------------------


def test_a_block_of_the_limit_is_not_cut_for_a_smaller_request() -> None:
    a = cuda(200, alloc_conf="max_split_size_mb:20")
    a.free(mib(a, 40))
    mib(a, 15)
    assert layout(a) == [[(40, "free")], [(16, "live")]]
    unlimited = cuda(200)
    unlimited.free(mib(unlimited, 40))
    mib(unlimited, 15)
    assert layout(unlimited) == [[(15, "live"), (25, "free")]]


def test_an_oversize_request_takes_a_block_that_is_less_than_20_mib_larger() -> None:
    a = cuda(200, alloc_conf="max_split_size_mb:20")
    a.free(mib(a, 40))
    a.malloc(20 * MIB + 512, tag=Tag.KV)
    assert layout(a) == [[(40, "live")]], "and takes it whole"
    assert a.stats()["oversize_allocations.current"] == 1
    b = cuda(200, alloc_conf="max_split_size_mb:20")
    b.free(mib(b, 40))
    mib(b, 20)
    assert layout(b) == [[(40, "free")], [(20, "live")]]
    c = cuda(200, alloc_conf="max_split_size_mb:20,max_non_split_rounding_mb:21")
    c.free(mib(c, 40))
    mib(c, 20)
    assert layout(c) == [[(40, "live")]]


def test_a_segment_of_exactly_the_limit_is_cut_when_it_is_new_but_not_when_it_is_cached() -> None:
    a = cuda(200, alloc_conf="max_split_size_mb:20")
    first = mib(a, 3)
    assert layout(a) == [[(3, "live"), (17, "free")]]
    a.free(first)
    mib(a, 3)
    assert layout(a) == [[(20, "free")], [(3, "live"), (17, "free")]]


def test_under_shortage_one_oversize_block_that_is_large_enough_is_released() -> None:
    a = cuda(104, alloc_conf="max_split_size_mb:20")
    for handle in [mib(a, n) for n in (60, 40)]:
        a.free(handle)
    mib(a, 20)
    assert layout(a) == [[(60, "free")], [(20, "live")]]
    assert a.stats()["num_alloc_retries"] == 0, "the second try is none"


def test_under_shortage_the_largest_oversize_blocks_are_released_until_their_sum_is_enough() -> None:
    a = cuda(110, alloc_conf="max_split_size_mb:20")
    for handle in [mib(a, n) for n in (22, 40, 30, 16)]:
        a.free(handle)
    assert a.take_work() == Work(driver_calls=4)
    mib(a, 62)
    assert layout(a) == [[(22, "free")], [(62, "live")], [(16, "free")]]
    stats = a.stats()
    assert (stats["num_alloc_retries"], stats["num_sync_all_streams"], stats["num_device_free"]) == (0, 0, 2)


def test_oversize_blocks_that_do_not_add_up_stay_released() -> None:
    a = CachingAllocator(HbmDriver(110 * MIB), CachingConfig(alloc_conf="max_split_size_mb:20"))
    mib(a, 19)
    for handle in [mib(a, n) for n in (21, 31, 15)]:
        a.free(handle)
    a.take_work()
    with pytest.raises(OutOfMemory):
        mib(a, 95)
    stats = a.stats()
    assert (stats["num_device_free"], stats["num_alloc_retries"], stats["num_ooms"]) == (3, 1, 1)
    assert a.take_work() == Work(driver_calls=5, syncs=2), "asked, released 2, released 1 more, asked again"
    assert layout(a) == [[(20, "live")]]


def test_blocks_below_the_limit_are_left_to_the_last_step() -> None:
    a = cuda(60, alloc_conf="max_split_size_mb:20")
    for handle in [mib(a, n) for n in (16, 18)]:
        a.free(handle)
    mib(a, 40)
    assert a.stats()["num_alloc_retries"] == 1
    assert layout(a) == [[(40, "live")]]
