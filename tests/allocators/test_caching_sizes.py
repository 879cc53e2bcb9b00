"""Sizes of requests, pools and segments, for both flavours, as the sources of torch_npu and PyTorch have them."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.caching.conf import AllocatorConf
from hbmtwin.allocators.caching.sizes import Flavour, allocation_size, round_size, round_to_division, slot
from hbmtwin.allocators.records import Tag

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAD = {"torch_npu": 32, "torch_cuda": 0}

# request: (CUDA rounded, pool, segment), (NPU rounded, pool, segment)
SIZES = {
    1: ((512, "small", 2 * MIB), (512, "small", 2 * MIB)),
    480: ((512, "small", 2 * MIB), (512, "small", 2 * MIB)),
    481: ((512, "small", 2 * MIB), (1024, "small", 2 * MIB)),
    512: ((512, "small", 2 * MIB), (1024, "small", 2 * MIB)),
    513: ((1024, "small", 2 * MIB), (1024, "small", 2 * MIB)),
    MIB - 32: ((1_048_576, "small", 2 * MIB), (1_048_576, "small", 2 * MIB)),
    MIB - 31: ((1_048_576, "small", 2 * MIB), (1_049_088, "large", 20 * MIB)),
    MIB: ((1_048_576, "small", 2 * MIB), (1_049_088, "large", 20 * MIB)),
    MIB + 1: ((1_049_088, "large", 20 * MIB), (1_049_088, "large", 20 * MIB)),
    10 * MIB - 1024: ((10_484_736, "large", 20 * MIB), (10_485_248, "large", 20 * MIB)),
    10 * MIB - 512: ((10_485_248, "large", 20 * MIB), (10_485_760, "large", 10 * MIB)),
    10 * MIB: ((10_485_760, "large", 10 * MIB), (10_486_272, "large", 12 * MIB)),
    12_000_000: ((12_000_256, "large", 12 * MIB), (12_000_256, "large", 12 * MIB)),
    20 * MIB: ((20_971_520, "large", 20 * MIB), (20_972_032, "large", 22 * MIB)),
    GIB: ((GIB, "large", GIB), (GIB + 512, "large", GIB + 2 * MIB)),
}


@pytest.mark.parametrize("request_bytes", SIZES)
@pytest.mark.parametrize("flavour", ["torch_cuda", "torch_npu"])
def test_a_request_is_rounded_pooled_and_given_a_segment(request_bytes: int, flavour: Flavour) -> None:
    rounded, pool, segment = SIZES[request_bytes][flavour == "torch_npu"]
    assert round_size(request_bytes, PAD[flavour]) == rounded
    assert allocation_size(rounded) == segment
    allocator = CachingAllocator(HbmDriver(2 * GIB), CachingConfig(flavour=flavour))
    allocator.malloc(request_bytes, tag=Tag.KV)
    (only,) = allocator.walk()
    assert (only.pool, only.size) == (pool, segment)
    first = only.blocks[0]
    rest = segment - rounded
    split = rest >= 512 if pool == "small" else rest > MIB
    assert (first.size, first.requested, first.state) == (
        rounded if split else segment,
        request_bytes,
        "active_allocated",
    )
    assert [(b.size, b.state) for b in only.blocks[1:]] == ([(rest, "inactive")] if split else [])


@pytest.mark.parametrize(
    ("size", "parts", "rounded"),
    [
        (1200, 4, 1280),
        (1024, 4, 1024),
        (1025, 4, 1280),
        (1281, 4, 1536),
        (2047, 4, 2048),
        (1200, 2, 1536),
        (5, 8, 8),
        (300_000_000, 8, 301_989_888),
    ],
)
def test_power_of_two_divisions(size: int, parts: int, rounded: int) -> None:
    assert round_to_division(size, parts) == rounded


def test_divisions_apply_above_512_times_their_number() -> None:
    quarters = (4,) * 16
    assert round_size(2048, 0, quarters) == 2048
    assert round_size(1200, 0, quarters) == 1536, "1200 <= 4 x 512: plain rounding"
    assert round_size(2049, 0, quarters) == 2560
    assert round_size(2016, 32, quarters) == 2048
    assert round_size(2017, 32, quarters) == 2560, "the pad counts"
    assert round_size(5 * MIB, 0, quarters) == 5 * MIB
    assert round_size(5 * MIB + 1, 0, quarters) == 6 * MIB
    assert round_size(5 * MIB + 1, 0, (1,) * 16) == 5 * MIB + 512, "1 division is off"


@pytest.mark.parametrize(
    ("size", "index"),
    [(1, 0), (MIB, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (4 * MIB, 2), (256 * MIB, 8), (32 * GIB, 15), (100 * GIB, 15)],
)
def test_slots_of_divisions(size: int, index: int) -> None:
    assert slot(size) == index


def test_a_listed_1_leaves_300_mb_at_plain_rounding() -> None:
    conf = AllocatorConf("torch_cuda")
    conf.parse("roundup_power2_divisions:[256:1,512:2,>:8]")
    divisions = conf.roundup_power2_divisions
    assert round_size(300_000_000, 0, divisions) == 300_000_256
    assert round_size(600 * MIB, 0, divisions) == 768 * MIB
    assert round_size(1100 * MIB, 0, divisions) == 1152 * MIB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [(MIB, 2 * MIB), (MIB + 512, 33 * MIB), (10 * MIB - 512, 33 * MIB), (10 * MIB, 10 * MIB), (33 * MIB, 34 * MIB)],
)
def test_large_segments_can_have_another_size(rounded: int, segment: int) -> None:
    assert allocation_size(rounded, 33 * MIB) == segment


def test_a_tensor_of_whole_pages_costs_a_page_more_on_an_npu() -> None:
    """And its tail is split off, since it is larger than 1 MiB: it serves others."""
    npu = CachingAllocator(HbmDriver(GIB), CachingConfig(flavour="torch_npu"))
    npu.malloc(20 * MIB, tag=Tag.KV)
    npu.malloc(1_800_000, tag=Tag.KV)
    assert npu.usage().reserved == 22 * MIB
    cuda = CachingAllocator(HbmDriver(GIB), CachingConfig(flavour="torch_cuda"))
    cuda.malloc(20 * MIB, tag=Tag.KV)
    assert cuda.usage().reserved == 20 * MIB
    cuda.malloc(1_800_000, tag=Tag.KV)
    assert cuda.usage().reserved == 40 * MIB
