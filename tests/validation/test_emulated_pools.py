"""Private pools and the workspace allocator of torch_npu 2.13.0, in its own numbers."""

import signal

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealError
from hbmtwin.validation.emulated.records import CALLS
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
GIB = 1 << 30
FIRST = 2 * MIB


def test_deleting_a_pool_releases_its_free_segments_at_once(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("mempool_begin", "mine"),
        MemoryOp("malloc", 1, 100),
        MemoryOp("mempool_end", "mine"),
        MemoryOp("malloc", 2, 100),
        MemoryOp("free", 1),
        MemoryOp("empty_cache"),
        MemoryOp("mempool_delete", "mine"),
    ]
    run = npu.replay(ops, entries=True, snapshot_every=1)
    assert run.segments["pool"][run.segments["operation"] == 3].tolist() == [1, 0]
    assert run.stat("reserved_bytes.all.current").tolist() == [0, *[2 * MIB] * 2, *[4 * MIB] * 3, 2 * MIB]
    assert run.stat("num_sync_all_streams").tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert run.entries["pool"].tolist() == [1, 1, 0, 0, 1, 1, 1]


def test_no_split_gives_a_whole_segment(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("mempool_begin", "mine", arg="use_on_oom|no_split"), MemoryOp("malloc", 1, 100)]
    run = npu.replay(ops)
    assert run.blocks[["size", "requested_size"]].tolist() == [(2 * MIB, 100)]
    assert run.stat("allocated_bytes.all.current").tolist() == [0, 2 * MIB]


def test_use_on_oom_lends_its_free_blocks_to_everybody(npu: EmulatedNpu) -> None:
    for flag, ooms in (("use_on_oom", 0), ("", 1)):
        ops = [
            MemoryOp("mempool_begin", "mine", arg=flag),
            MemoryOp("malloc", 1, 900 * MIB),
            MemoryOp("free", 1),
            MemoryOp("mempool_end", "mine"),
            MemoryOp("malloc", 2, 800 * MIB),
        ]
        assert npu.replay(ops).stat("num_ooms")[-1] == ooms


def test_a_pool_cannot_be_entered_twice(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("mempool_begin", "mine"), MemoryOp("mempool_begin", "mine")])
    assert run.errors == {1: RealError("RuntimeError", "beginAllocateToPool: already recording to mempool_id")}


def test_an_expandable_pool_can_kill_the_process(npu: EmulatedNpu) -> None:
    """One request mapped, two ranges are unmapped: the pool's count falls below 0, asserted in a destructor."""
    ops = [
        MemoryOp("mempool_begin", "mine"),
        MemoryOp("malloc", 1, 60 * MIB),
        MemoryOp("free", 1),
        MemoryOp("malloc", 2, 22 * MIB),
        MemoryOp("malloc", 3, 2 * MIB),
        MemoryOp("malloc", 4, 30 * MIB),
        MemoryOp("free", 2),
        MemoryOp("free", 4),
        MemoryOp("mempool_end", "mine"),
        MemoryOp("mempool_delete", "mine"),
        MemoryOp("malloc", 5, 100),
    ]
    run = npu.replay(ops, NpuSettings(alloc_conf="expandable_segments:True"))
    assert run.crash is not None
    assert (run.crash.operation, run.crash.signal) == (9, signal.SIGABRT)
    assert "npuMalloc_count > 0 INTERNAL ASSERT FAILED" in run.crash.text
    assert len(run.results) == len(run.stats) == 9, "what was done before it is told"
    assert run.stat("reserved_bytes.all.current").tolist() == [0, *[80 * MIB] * 8]
    assert npu.replay(ops[:9]).crash is None, "and the next run is not touched"


def test_a_workspace_grows_by_whole_2_mib_and_never_shrinks(npu: EmulatedNpu) -> None:
    sizes = (100, 3 * MIB, 100, 2 * MIB - 32)
    ops = [MemoryOp("workspace", size=size, stream=0) for size in sizes] + [MemoryOp("workspace", size=100, stream=1)]
    run = npu.replay(ops)
    calls = [
        (operation, CALLS[call], size) for operation, call, size in run.calls[["operation", "call", "size"]].tolist()
    ]
    assert calls == [
        (0, "malloc", 2 * MIB),
        (1, "sync_device", 0),
        (1, "free", 2 * MIB),
        (1, "malloc", 4 * MIB),
        (4, "malloc", 2 * MIB),
    ]
    assert run.results["address"].tolist() == [FIRST] * 4 + [FIRST + 4 * MIB]
    assert run.stat("reserved_bytes.all.current").tolist() == [0] * 5
    assert run.segments[["total_size", "is_workspace"]].tolist() == [(4 * MIB, 1), (2 * MIB, 1)]
    assert run.blocks[["size", "requested_size", "state"]].tolist() == [(4 * MIB, 3 * MIB, 0), (2 * MIB, 100, 0)]


def test_a_failed_workspace_refuses_all_up_to_its_size_until_emptied(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("workspace", size=GIB),
        MemoryOp("workspace", size=100),
        MemoryOp("empty_cache"),
        MemoryOp("workspace", size=100),
    ]
    run = npu.replay(ops)
    assert [*run.errors] == [0, 1]
    assert run.errors[1] == RealError(
        "OutOfMemoryError",
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 100 bytes(NPU 0; 1024.00 MiB total capacity; "
        "1024.00 MiB free). If you want to reduce memory usage, take a try to set the environment variable "
        "TASK_QUEUE_ENABLE=1.",
    )
    assert run.results["address"].tolist() == [-1, -1, -1, FIRST]


def test_the_last_try_empties_the_workspaces_first(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("workspace", size=100 * MIB), MemoryOp("malloc", 1, 1000 * MIB)]
    run = npu.replay(ops)
    made = run.calls[run.calls["operation"] == 1]
    assert [CALLS[call] for call in made["call"]] == ["malloc", "sync_device", "free", "malloc"]
    assert run.errors == {}
