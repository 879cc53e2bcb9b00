"""Torch's grid of statistics, in literal numbers."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.stats import LARGE, SMALL, StatsGrid

MIB = 1 << 20


def four(stats: dict[str, int], key: str) -> tuple[int, int, int, int]:
    current, peak, allocated, freed = (stats[f"{key}.{n}"] for n in ("current", "peak", "allocated", "freed"))
    return current, peak, allocated, freed


def test_the_keys_are_those_of_torch_npu() -> None:
    stats = StatsGrid().to_dict()
    assert len(stats) == 123, "as torch.npu.memory_stats() of torch_npu 2.13.0 has"
    assert list(stats) == sorted(stats)
    families = [
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    ]
    grid = {
        f"{family}.{pool}.{number}"
        for family in families
        for pool in ("all", "small_pool", "large_pool")
        for number in ("current", "peak", "allocated", "freed")
    }
    plain = {
        "max_split_size",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
        "num_ooms",
        "num_sync_all_streams",
    }
    oversize = {
        f"oversize_{what}.{number}"
        for what in ("allocations", "segments")
        for number in ("current", "peak", "allocated", "freed")
    }
    assert set(stats) == grid | plain | oversize
    assert stats["max_split_size"] == -1
    assert all(value == 0 for key, value in stats.items() if key != "max_split_size")


def test_the_peak_of_a_sum_is_not_the_sum_of_the_peaks() -> None:
    grid = StatsGrid()
    grid.malloc(SMALL, 1024, 1000)
    grid.free(SMALL, 1024, 1000)
    grid.malloc(LARGE, 4096, 4000)
    grid.malloc(SMALL, 512, 100)
    stats = grid.to_dict()
    assert four(stats, "allocated_bytes.small_pool") == (512, 1024, 1536, 1024)
    assert four(stats, "allocated_bytes.large_pool") == (4096, 4096, 4096, 0)
    assert four(stats, "allocated_bytes.all") == (4608, 4608, 5632, 1024)
    assert four(stats, "requested_bytes.all") == (4100, 4100, 5100, 1000)
    assert four(stats, "allocation.all") == (2, 2, 3, 1)
    assert four(stats, "active.all") == (2, 2, 3, 1)


def test_reset_peak_sets_every_peak_to_the_current_value() -> None:
    grid = StatsGrid(max_split_size=4096)
    grid.segment_alloc(LARGE, 8192)
    grid.malloc(LARGE, 4096, 4000)
    grid.malloc(SMALL, 512, 100)
    grid.free(LARGE, 4096, 4000)
    grid.segment_free(LARGE, 8192)
    before = grid.to_dict()
    assert four(before, "oversize_allocations") == (0, 1, 1, 1)
    assert four(before, "oversize_segments") == (0, 1, 1, 1)
    assert four(before, "allocated_bytes.all") == (512, 4608, 4608, 4096)
    grid.reset_peak()
    after = grid.to_dict()
    for key, value in before.items():
        assert after[key] == (before[key.replace(".peak", ".current")] if key.endswith(".peak") else value)


def test_a_short_life_in_numbers() -> None:
    """torch_npu: 100 bytes, 12,000,000 bytes and 3 MiB come, the 3 MiB go, and 1.5 MiB take their place."""
    allocator = CachingAllocator(HbmDriver(100 * MIB), CachingConfig())
    small = allocator.malloc(100, tag=Tag.KV)
    allocator.malloc(12_000_000, tag=Tag.WEIGHT)
    middle = allocator.malloc(3 * MIB, tag=Tag.KV)
    stats = allocator.stats()
    assert four(stats, "allocated_bytes.small_pool") == (512, 512, 512, 0)
    assert four(stats, "allocated_bytes.large_pool") == (15_729_152, 15_729_152, 15_729_152, 0)
    assert four(stats, "requested_bytes.all") == (15_145_828, 15_145_828, 15_145_828, 0)
    assert four(stats, "reserved_bytes.small_pool") == (2 * MIB, 2 * MIB, 2 * MIB, 0)
    assert four(stats, "reserved_bytes.large_pool") == (32 * MIB, 32 * MIB, 32 * MIB, 0)
    assert four(stats, "segment.all") == (3, 3, 3, 0)
    assert four(stats, "inactive_split.all") == (2, 2, 2, 0)
    assert four(stats, "inactive_split_bytes.small_pool") == (2_096_640, 2_096_640, 2_096_640, 0)
    assert four(stats, "inactive_split_bytes.large_pool") == (17_825_280, 17_825_280, 17_825_280, 0)
    allocator.free(middle)
    stats = allocator.stats()
    assert four(stats, "allocation.all") == (2, 3, 3, 1)
    assert four(stats, "active_bytes.all") == (12_583_424, 15_729_664, 15_729_664, 3_146_240)
    assert four(stats, "inactive_split.large_pool") == (0, 1, 1, 1)
    assert four(stats, "inactive_split_bytes.large_pool") == (0, 17_825_280, 17_825_280, 17_825_280)
    allocator.malloc(1_572_864, tag=Tag.KV)
    stats = allocator.stats()
    assert four(stats, "segment.large_pool") == (2, 2, 2, 0)
    assert four(stats, "inactive_split_bytes.large_pool") == (19_398_144, 19_398_144, 37_223_424, 17_825_280)
    allocator.free(small)
    allocator.empty_cache()
    stats = allocator.stats()
    assert four(stats, "reserved_bytes.small_pool") == (0, 2 * MIB, 2 * MIB, 2 * MIB)
    assert four(stats, "segment.all") == (2, 3, 3, 1)
    assert (stats["num_device_alloc"], stats["num_device_free"], stats["num_sync_all_streams"]) == (3, 1, 1)
    allocator.check()


def test_a_free_between_free_neighbours_moves_the_split_numbers_by_one_net_change() -> None:
    """The block absorbs two free neighbours of 512 bytes and more: one free block less, its own bytes more."""
    allocator = CachingAllocator(HbmDriver(100 * MIB), CachingConfig(flavour="torch_cuda"))
    a, b, c, _ = (allocator.malloc(512, tag=Tag.KV) for _ in range(4))
    allocator.free(a)
    allocator.free(c)
    assert four(allocator.stats(), "inactive_split.all") == (3, 3, 3, 0)
    assert four(allocator.stats(), "inactive_split_bytes.all") == (2_096_128, 2_096_640, 2_097_664, 1_536)
    allocator.free(b)
    assert four(allocator.stats(), "inactive_split.all") == (2, 3, 3, 1), "absorbed two, is one: -1"
    assert four(allocator.stats(), "inactive_split_bytes.all") == (2_096_640, 2_096_640, 2_098_176, 1_536), "+512"


@pytest.mark.parametrize(
    ("conf", "shown"), [("", -1), ("max_split_size_mb:20", 20 * MIB), ("max_split_size_mb:-1", -MIB)]
)
def test_max_split_size_is_shown_as_torch_shows_it(conf: str, shown: int) -> None:
    allocator = CachingAllocator(HbmDriver(MIB), CachingConfig(alloc_conf=conf))
    assert allocator.stats()["max_split_size"] == shown
