"""How torch_npu 2.13.0 says that memory is out: texts, counters, what it asked the driver before."""

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealError
from hbmtwin.validation.emulated.records import CALLS
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
GIB = 1 << 30
HINT = ".If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


def test_the_text_names_the_allocation_size_and_what_is_held(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 512), MemoryOp("malloc", 2, 2 * GIB)])
    assert run.errors == {
        1: RealError(
            "OutOfMemoryError",
            "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 1024.00 MiB total capacity; 1024 bytes already "
            "allocated; 1024 bytes current active; 1022.00 MiB free; 2.00 MiB reserved in total by PyTorch)" + HINT,
        )
    }
    assert run.stat("num_ooms").tolist() == [0, 1]
    assert run.stat("num_alloc_retries").tolist() == [0, 1]
    assert run.results["address"].tolist() == [2 * MIB, -1]


def test_a_cap_stands_between_free_and_reserved(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("set_fraction", arg="0.5"), MemoryOp("malloc", 1, 600 * MIB)])
    assert run.errors[1].text == (
        "NPU out of memory. Tried to allocate 602.00 MiB (NPU 0; 1024.00 MiB total capacity; 0 bytes already "
        "allocated; 0 bytes current active; 1024.00 MiB free; 512.00 MiB allowed; 0 bytes reserved in total by PyTorch)"
        + HINT
    )
    assert [CALLS[call] for call in run.calls["call"]] == ["sync_device"], "the cap refuses before the driver is asked"


def test_what_others_hold_is_not_free(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("malloc", 1, 100), MemoryOp("other_memory", size=2 * GIB), MemoryOp("malloc", 2, 3 * MIB)]
    run = npu.replay(ops, NpuSettings(tenants_bytes=1000 * MIB))
    assert "0 bytes free; 2.00 MiB reserved" in run.errors[2].text
    assert npu.replay(ops[:1], NpuSettings(tenants_bytes=GIB)).errors[0].kind == "OutOfMemoryError"


def test_more_than_an_exbibyte_is_refused_outright(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", 1, 1 << 60), MemoryOp("malloc", 2, (1 << 60) - 1)], entries=True)
    assert run.errors[0] == RealError("OutOfMemoryError", "NPU out of memory. Tried to allocate more than 1EB memory.")
    assert run.errors[1].text.startswith("NPU out of memory. Tried to allocate 1073741824.00 GiB (NPU 0;")
    assert run.stat("num_ooms").tolist() == [0, 1]
    assert run.entries.tolist() == [(1, 8, GIB, (1 << 60) + 512, 0, 0)]


def test_a_preemptive_refusal_is_no_oom_of_the_statistics(npu: EmulatedNpu) -> None:
    run = npu.replay(
        [MemoryOp("malloc", 1, 2 * GIB)], NpuSettings(alloc_conf="throw_on_npumalloc_oom:True"), entries=True
    )
    assert run.errors[0] == RealError(
        "OutOfMemoryError",
        "NPU out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 2.00 GiB",
    )
    assert (run.stat("num_ooms").tolist(), run.stat("num_oom_rejections").tolist()) == ([0], [1])
    assert len(run.entries) == len(run.calls) == 0


def test_a_block_that_comes_free_in_the_last_try_serves_the_next_request_only(npu: EmulatedNpu) -> None:
    """pytorch#189504: the wait for events frees a piece of a split segment, and the pool is not searched again."""
    ops = [
        MemoryOp("malloc", 1, 900 * MIB),
        MemoryOp("free", 1),
        MemoryOp("malloc", 2, 5 * MIB),
        MemoryOp("malloc", 3, 800 * MIB),
        MemoryOp("record_stream", 3, stream=1),
        MemoryOp("free", 3),
        MemoryOp("malloc", 4, 800 * MIB),
        MemoryOp("malloc", 5, 800 * MIB),
    ]
    run = npu.replay(ops)
    assert [*run.errors] == [6]
    assert run.results["address"][7] == run.results["address"][3]
    assert [CALLS[call] for call in run.calls["call"][run.calls["operation"] == 6]] == [
        "query_event",
        "malloc",
        "sync_device",
        "sync_event",
        "malloc",
    ]
