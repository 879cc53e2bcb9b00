"""Frees that wait for streams, in torch_npu 2.13.0: who is asked when, and what comes back in which order."""

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.emulated.records import ACTIONS, BLOCK_STATES, CALLS
from hbmtwin.workloads.formats.memory_trace import MemoryOp


def states(run: RealRun) -> list[str]:
    """State of the lowest block after each operation."""
    after = {operation: BLOCK_STATES[state] for operation, state in run.blocks[["operation", "state"]].tolist()[::-1]}
    return [after[i] for i in range(len(run.results))]


def queries(run: RealRun, of: int) -> list[tuple[int, int, int]]:
    """``(stream, number, complete)`` of the event queries of one operation."""
    asked = run.event_queries()
    return [tuple(row) for row in asked[asked["operation"] == of][["object", "size", "result"]].tolist()]


def test_a_use_on_its_own_stream_defers_the_free_until_the_next_malloc(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 100),
        MemoryOp("record_stream", 1, stream=0),
        MemoryOp("free", 1),
        MemoryOp("synchronize"),
        MemoryOp("malloc", 2, 100),
    ]
    run = npu.replay(ops, snapshot_every=1)
    assert states(run) == ["active_allocated"] * 2 + ["active_pending_free"] * 2 + ["active_allocated"]
    assert queries(run, 4) == [(0, 1, 1)]
    assert run.results["address"][4] == run.results["address"][0]


def test_a_block_comes_back_when_each_of_its_streams_has_passed(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 100),
        MemoryOp("record_stream", 1, stream=1),
        MemoryOp("record_stream", 1, stream=2),
        MemoryOp("free", 1),
        MemoryOp("malloc", 2, 100),
        MemoryOp("event_complete", stream=1, arg="1"),
        MemoryOp("malloc", 3, 100),
        MemoryOp("event_complete"),
        MemoryOp("malloc", 4, 100),
    ]
    run = npu.replay(ops)
    first = run.results["address"][0]
    assert run.stat("active.all.current").tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 3]
    assert run.stat("allocation.all.current").tolist() == [1, 1, 1, 0, 1, 1, 2, 2, 3]
    assert queries(run, 4) == [(2, 1, 0), (1, 1, 0)]
    assert queries(run, 6) == [(2, 1, 0), (1, 1, 1)]
    assert queries(run, 8) == [(2, 1, 1)]
    assert run.results["address"][[4, 6, 8]].tolist() == [first + 512, first + 1024, first]


def test_a_stream_recorded_twice_makes_one_event(npu: EmulatedNpu) -> None:
    uses = [MemoryOp("record_stream", 1, stream=1)] * 2
    run = npu.replay([MemoryOp("malloc", 1, 100), *uses, MemoryOp("free", 1)])
    assert [CALLS[call] for call in run.calls["call"]] == ["malloc", "record_event"]


def test_streams_are_asked_in_the_order_of_the_hash_table(npu: EmulatedNpu) -> None:
    for streams, order in (((1,), [0, 1]), ((1, 2, 3), [3, 2, 0, 1]), ((1, 2, 3, 4), [3, 2, 0, 4, 1])):
        uses = [MemoryOp("record_stream", 1, stream=stream) for stream in (0, *streams)]
        run = npu.replay([MemoryOp("malloc", 1, 100), *uses, MemoryOp("free", 1), MemoryOp("malloc", 2, 100)])
        assert run.event_queries()["object"].tolist() == order


def test_erase_stream_works_from_the_blocks_own_stream_only(npu: EmulatedNpu) -> None:
    for current, waiting in ((1, 1), (0, 0)):
        ops = [
            MemoryOp("malloc", 1, 100),
            MemoryOp("record_stream", 1, stream=1),
            MemoryOp("erase_stream", 1, stream=1, arg=str(current)),
            MemoryOp("free", 1),
        ]
        assert npu.replay(ops).stat("active.all.current")[-1] == waiting


def test_lazy_reclaim_asks_only_after_a_miss(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 100),
        MemoryOp("record_stream", 1, stream=1),
        MemoryOp("free", 1),
        MemoryOp("event_complete"),
        MemoryOp("malloc", 2, 100),
        MemoryOp("malloc", 3, 3 << 20),
    ]
    run = npu.replay(ops, NpuSettings(alloc_conf="multi_stream_lazy_reclaim:True"), entries=True)
    assert queries(run, 4) == []
    assert queries(run, 5) == [(1, 1, 1)]
    assert [ACTIONS[a] for a in run.entries["action"][run.entries["operation"] == 5]] == [
        "free_completed",
        "segment_alloc",
        "alloc",
    ]


def test_empty_cache_waits_for_all_and_frees_what_waited(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("malloc", 1, 100),
        MemoryOp("record_stream", 1, stream=1),
        MemoryOp("free", 1),
        MemoryOp("empty_cache"),
    ]
    run = npu.replay(ops)
    assert run.stat("active.all.current").tolist() == [1, 1, 1, 0]
    assert run.stat("reserved_bytes.all.current").tolist() == [2 << 20] * 3 + [0]
    assert [CALLS[call] for call in run.calls["call"][run.calls["operation"] == 3]] == [
        "sync_device",
        "sync_event",
        "free",
    ]
