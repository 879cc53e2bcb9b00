"""What torch_npu 2.13.0 really does with sizes, segments, pages and the cache, in its own numbers.

These are observations of the binary, not of our model: literals to which the rules of the specification are held.
"""

import numpy as np
import pytest

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.emulated.records import ACTIONS, BLOCK_STATES, CALLS, Table
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
GIB = 1 << 30
FIRST = 2 * MIB
"""First address that a driver gives."""
EXPANDABLE = NpuSettings(alloc_conf="expandable_segments:True")


def rows(table: Table, operation: int, *columns: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in table[table["operation"] == operation][[*columns]].tolist()]


def blocks(run: RealRun, after: int) -> list[tuple[int, int, str]]:
    """``(size, requested size, state)`` in address order after an operation."""
    found = rows(run.blocks, after, "size", "requested_size", "state")
    return [(size, requested, BLOCK_STATES[state]) for size, requested, state in found]


def entries(run: RealRun, of: int) -> list[tuple[str | int, ...]]:
    """``(action, address, size)`` of one operation's trace."""
    return [(ACTIONS[action], *rest) for action, *rest in rows(run.entries, of, "action", "address", "size")]


def calls(run: RealRun, of: int) -> list[tuple[str | int, ...]]:
    """``(call, object, size)`` that reached the driver in one operation."""
    return [(CALLS[call], *rest) for call, *rest in rows(run.calls, of, "call", "object", "size")]


@pytest.mark.parametrize(
    ("asked", "rounded", "segment", "pool"),
    [
        (1, 512, 2 * MIB, "small"),
        (480, 512, 2 * MIB, "small"),
        (481, 1024, 2 * MIB, "small"),
        (512, 1024, 2 * MIB, "small"),
        (MIB - 32, MIB, 2 * MIB, "small"),
        (MIB, 1_049_088, 20 * MIB, "large"),
        (10 * MIB - 544, 10_485_248, 20 * MIB, "large"),
        (10 * MIB - 512, 10_485_760, 10 * MIB, "large"),
        (10 * MIB, 10_486_272, 12 * MIB, "large"),
        (20 * MIB, 20_972_032, 22 * MIB, "large"),
    ],
)
def test_32_bytes_are_added_before_a_request_is_rounded(
    npu: EmulatedNpu, asked: int, rounded: int, segment: int, pool: str
) -> None:
    run = npu.replay([MemoryOp("malloc", 1, asked)])
    (row,) = run.segments
    assert (row["total_size"], "large" if row["is_large"] else "small") == (segment, pool)
    size, requested, state = blocks(run, 0)[0]
    assert (requested, state) == (asked, "active_allocated")
    assert size == (segment if segment - rounded <= MIB and pool == "large" else rounded)


@pytest.mark.parametrize(
    ("soc", "cann", "rounded"),
    [
        ("Ascend910B2", "8.5.0", 1_049_088),
        ("Ascend910B2", "9.1.0", 1_049_088),
        ("Ascend950PR_9599", "8.5.0", 1_049_088),
        ("Ascend950PR_9599", "9.1.0", 1_048_576),
    ],
)
def test_no_32_bytes_on_ascend_950_with_cann_9_1(npu: EmulatedNpu, soc: str, cann: str, rounded: int) -> None:
    run = npu.replay([MemoryOp("malloc", 1, MIB)], NpuSettings(soc=soc, cann=cann))
    assert blocks(run, 0)[0] == (rounded, MIB, "active_allocated")


def test_12_000_000_bytes_take_a_whole_segment_of_12_mib(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 12_000_000)])
    assert blocks(run, 0) == [(12_582_912, 12_000_000, "active_allocated")]
    assert run.stat("allocated_bytes.all.current").tolist() == [12_582_912]
    assert run.stat("requested_bytes.all.current").tolist() == [12_000_000]
    assert run.results["address"].tolist() == [FIRST]


def test_nothing_is_asked_for_0_bytes(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 0), MemoryOp("free", 1)], entries=True)
    assert run.results["address"].tolist() == [-1, -1]  # a null pointer is no address
    assert not run.stats[:, run.stat_names.index("allocation.all.allocated")].any()
    assert len(run.entries) == len(run.calls) == 0


def test_empty_cache_gives_whole_segments_back_and_a_split_one_stays(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 12_000_000),
        MemoryOp("malloc", 2, 100),
        MemoryOp("free", 1),
        MemoryOp("empty_cache"),
    ]
    run = npu.replay(ops, entries=True)
    assert run.stat("reserved_bytes.all.current").tolist() == [12 * MIB, 14 * MIB, 14 * MIB, 2 * MIB]
    assert run.results["driver_bytes"].tolist() == [12 * MIB, 14 * MIB, 14 * MIB, 2 * MIB]
    assert entries(run, 3) == [("segment_free", FIRST, 12 * MIB)]
    assert calls(run, 3) == [("sync_device", 0, 0), ("free", FIRST, 12 * MIB)]
    assert run.stat("num_device_free").tolist() == [0, 0, 0, 1]
    assert run.stat("num_sync_all_streams").tolist() == [0, 0, 0, 1]


def test_an_inactive_block_keeps_the_size_last_asked_of_it(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 12_000_000), MemoryOp("free", 1)])
    assert blocks(run, 1) == [(12_582_912, 12_000_000, "inactive")]


def test_expandable_segments_map_2_then_20_then_20_mib(npu: EmulatedNpu) -> None:
    sizes = (100, 3 * MIB, 24 * MIB)
    run = npu.replay([MemoryOp("malloc", i, size) for i, size in enumerate(sizes)], EXPANDABLE, entries=True)
    small, large = run.results["address"].tolist()[:2]
    assert calls(run, -1) == [("reserve", FIRST, 512), ("release", FIRST, 512)]
    # 1.125 x 1 GiB of addresses in whole pages: 576 of 2 MiB, 58 of 20 MiB.
    assert calls(run, 0) == [("reserve", FIRST, 576 * 2 * MIB), ("create", 1, 2 * MIB), ("map", FIRST, 2 * MIB)]
    assert calls(run, 1) == [("reserve", large, 58 * 20 * MIB), ("create", 2, 20 * MIB), ("map", large, 20 * MIB)]
    assert calls(run, 2) == [("create", 3, 20 * MIB), ("map", large + 20 * MIB, 20 * MIB)]
    assert (small, large) == (FIRST, FIRST + 576 * 2 * MIB)
    assert entries(run, 2) == [
        ("segment_map", large + 20 * MIB, 20 * MIB),
        ("alloc", large + 3_162_112, 24 * MIB),
    ]
    assert run.stat("reserved_bytes.all.current").tolist() == [2 * MIB, 22 * MIB, 42 * MIB]
    assert run.stat("segment.all.current").tolist() == [0, 0, 0]


def test_a_sliver_of_15872_bytes_aligns_4_mib_to_16_kib(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("malloc", 1, 3 * MIB // 2), MemoryOp("malloc", 2, 4 * MIB)]
    run = npu.replay(ops, EXPANDABLE)
    assert blocks(run, 1) == [
        (1_573_376, 1_572_864, "active_allocated"),
        (15_872, 0, "inactive"),
        (4_194_816, 4_194_304, "active_allocated"),
        (15_187_456, 0, "inactive"),
    ]
    unaligned = NpuSettings(alloc_conf="expandable_segments:True,base_addr_aligned_kb:0")
    assert [size for size, _, _ in blocks(npu.replay(ops, unaligned), 1)] == [1_573_376, 4_194_816, 15_203_328]


def test_pages_without_an_address_stay_ours_until_empty_cache(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 3 * MIB),
        MemoryOp("free", 1),
        MemoryOp("empty_virt_addr_cache"),
        MemoryOp("malloc", 2, 3 * MIB),
        MemoryOp("free", 2),
        MemoryOp("empty_virt_addr_cache"),
        MemoryOp("empty_cache"),
    ]
    run = npu.replay(ops, EXPANDABLE)
    page = 20 * MIB
    assert run.stat("reserved_bytes.all.current").tolist() == [page, page, 0, page, page, 0, 0]
    assert run.results["driver_bytes"].tolist() == [page, page, page, page, page, page, 0]
    assert run.stat("num_device_alloc").tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert run.stat("num_device_free").tolist() == [0, 0, 1, 1, 1, 2, 2]
    refused = npu.replay([MemoryOp("empty_virt_addr_cache")]).errors[0]
    assert refused.kind == "RuntimeError"
    assert refused.text.endswith("please enable expandable_segments.")


@pytest.mark.parametrize(
    ("conf", "page_bytes", "first_call"),
    [
        ("page_size:1g", GIB, "malloc"),
        ("page_size:1g,expandable_segments:True", GIB, "reserve"),
        ("large_segment_size_mb:64", 64 * MIB, "malloc"),
        ("segment_size_mb:64", 20 * MIB, "malloc"),
        ("segment_size_mb:64,expandable_segments:True", 64 * MIB, "reserve"),
    ],
)
def test_the_unit_of_the_large_pool(npu: EmulatedNpu, conf: str, page_bytes: int, first_call: str) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 3 * MIB)], NpuSettings(capacity_bytes=8 * GIB, alloc_conf=conf))
    assert run.stat("reserved_bytes.large_pool.current").tolist() == [page_bytes]
    assert calls(run, 0)[0][0] == first_call


def test_a_driver_too_old_for_1_gib_pages_gets_the_usual_segment(npu: EmulatedNpu) -> None:
    old = NpuSettings(capacity_bytes=8 * GIB, alloc_conf="page_size:1g", driver="24.1.0")
    run = npu.replay([MemoryOp("malloc", 1, 3 * MIB)], old)
    assert run.segments["total_size"].tolist() == [20 * MIB]


def test_a_refused_request_of_1_gib_is_asked_twice_and_counted_once(npu: EmulatedNpu) -> None:
    full = NpuSettings(capacity_bytes=GIB - 1, alloc_conf="page_size:1g")
    run = npu.replay([MemoryOp("malloc", 1, 3 * MIB)], full)
    refused = ("malloc", 0, GIB)
    assert calls(run, 0) == [refused, refused, ("sync_device", 0, 0), refused, refused]
    assert run.stat("num_device_alloc").tolist() == [0]


def test_garbage_collection_takes_the_oldest_unsplit_blocks(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("set_fraction", arg="0.5"),
        MemoryOp("malloc", 1, 200 * MIB),
        MemoryOp("malloc", 2, 200 * MIB),
        MemoryOp("free", 1),
        MemoryOp("free", 2),
        MemoryOp("malloc", 3, 300 * MIB),
    ]
    run = npu.replay(ops, NpuSettings(alloc_conf="garbage_collection_threshold:0.5"), entries=True)
    assert entries(run, 5) == [
        ("segment_free", FIRST, 202 * MIB),
        ("segment_free", FIRST + 202 * MIB, 202 * MIB),
        ("segment_alloc", FIRST, 302 * MIB),
        ("alloc", FIRST, 300 * MIB),
    ]
    assert calls(run, 5)[0] == ("sync_device", 0, 0)


def test_a_lowered_max_split_size_makes_the_driver_refuse_a_piece_of_a_segment(npu: EmulatedNpu) -> None:
    """Known fault of the release: the free piece is handed to the driver, and counted as gone."""
    ops = [
        MemoryOp("malloc", 1, 200 * MIB),
        MemoryOp("free", 1),
        MemoryOp("malloc", 2, 50 * MIB),
        MemoryOp("set_conf", arg="max_split_size_mb:20"),
        MemoryOp("malloc", 3, 900 * MIB),
    ]
    run = npu.replay(ops)
    assert run.errors[4].kind == "RuntimeError"
    assert run.errors[4].text.endswith("aclrtFree((void*)block->ptr), error code is 107000")
    assert run.results["driver_bytes"].tolist() == [202 * MIB] * 5
    assert run.stat("num_device_free").tolist() == [0, 0, 0, 0, 1]


def test_without_caching_nothing_is_counted(npu: EmulatedNpu) -> None:
    off = NpuSettings(environment=(("PYTORCH_NO_NPU_MEMORY_CACHING", "1"),))
    run = npu.replay([MemoryOp("malloc", 1, 3 * MIB), MemoryOp("free", 1)], off)
    assert calls(run, 0) == [("malloc", FIRST, 3 * MIB + 32)]
    assert calls(run, 1) == [("sync_device", 0, 0), ("free", FIRST, 3 * MIB + 512)]
    assert np.array_equal(run.stats[-1], run.initial_stats)
