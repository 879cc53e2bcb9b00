"""The context itself: fresh devices, files without pickles, what it refuses, how fast the bare binary is."""

import random
from dataclasses import fields

import numpy as np
import pytest

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun, WorkerDied
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20


def random_ops(count: int) -> list[MemoryOp]:
    draw = random.Random(3)
    live: list[int] = []
    ops: list[MemoryOp] = []
    for i in range(count):
        size = draw.choice((2000, 30 * MIB, draw.randrange(1, 100 * MIB)))
        if live and draw.random() < 0.4:
            ops.append(MemoryOp("free", live.pop(draw.randrange(len(live)))))
        else:
            ops.append(MemoryOp("malloc", i, size, draw.randrange(3)))
            live.append(i)
        if draw.random() < 0.1 and live:
            ops.append(MemoryOp("record_stream", draw.choice(live), stream=draw.randrange(3)))
        if draw.random() < 0.02:
            ops.append(MemoryOp("event_complete", arg="2"))
    return ops


def test_the_same_trace_gives_the_same_run_to_the_byte(npu: EmulatedNpu) -> None:
    ops = random_ops(600)
    first, second = (npu.replay(ops, entries=True, snapshot_every=7) for _ in range(2))
    assert len(first.errors) > 0
    assert len(first.event_queries()) > 100
    for field in fields(RealRun):
        one, other = getattr(first, field.name), getattr(second, field.name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, field.name


def test_observing_changes_nothing(npu: EmulatedNpu) -> None:
    ops = random_ops(300)
    bare, watched = npu.replay(ops), npu.replay(ops, entries=True, snapshot_every=1)
    assert np.array_equal(bare.stats, watched.stats)
    assert np.array_equal(bare.results, watched.results)
    assert np.array_equal(bare.calls, watched.calls)
    last = watched.blocks[watched.blocks["operation"] == len(ops) - 1]
    assert np.array_equal(bare.blocks, last)


def test_statistics_and_blocks_tell_the_same(npu: EmulatedNpu) -> None:
    run = npu.replay(random_ops(300), snapshot_every=1)
    for i in range(len(run.results)):
        blocks = run.blocks[run.blocks["operation"] == i]
        assert blocks["size"][blocks["state"] > 0].sum() == run.stat("active_bytes.all.current")[i]
        assert blocks["size"].sum() == run.stat("reserved_bytes.all.current")[i] == run.results["driver_bytes"][i]


def test_each_run_has_a_device_of_its_own(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("malloc", 1, 3 << 30)]
    assert npu.replay(ops).results["outcome"].tolist() == [1]
    assert npu.replay(ops, NpuSettings(capacity_bytes=8 << 30)).results["outcome"].tolist() == [0]
    assert npu.replay([MemoryOp("free", 1)]).results["address"].tolist() == [-1]
    empty = npu.replay([])
    assert len(empty.stat_names) == 123
    assert empty.stats.shape == (0, 123)
    assert dict(zip(empty.stat_names, empty.initial_stats.tolist(), strict=True))["max_split_size"] == -1


def test_33_streams_are_one_pool_of_them(npu: EmulatedNpu) -> None:
    run = npu.replay([MemoryOp("malloc", i, 100, i) for i in range(33)])
    assert run.segments["stream"].tolist() == [*range(33)]
    with pytest.raises(ValueError, match="stream 33 is none: torch_npu has 32 besides the default one"):
        npu.replay([MemoryOp("malloc", 1, 100, 33)])


def test_unknown_operations_are_refused_before_anything_runs(npu: EmulatedNpu) -> None:
    with pytest.raises(ValueError, match="no operation is called 'realloc'; there are malloc, free, "):
        npu.replay([MemoryOp("realloc", 1, 100)])


def test_a_trace_that_makes_no_sense_is_our_failure_not_the_allocators(npu: EmulatedNpu) -> None:
    with pytest.raises(WorkerDied, match=r"(?s)the child ended with 1: .*KeyError: 'never begun'"):
        npu.replay([MemoryOp("mempool_end", "never begun")])
    assert npu.replay([MemoryOp("malloc", 1, 100)]).errors == {}, "the worker lives on"


def test_the_bare_binary_is_timed(npu: EmulatedNpu) -> None:
    ops = [op for op in random_ops(2000) if op.op in ("malloc", "free")]
    timing = npu.time_raw(ops, NpuSettings(capacity_bytes=64 << 30))
    assert (timing.operations, timing.ooms) == (len(ops), 0)
    assert timing.operations_per_second > 10_000
    assert npu.time_raw([MemoryOp("malloc", 1, 2 << 30), MemoryOp("free", 1)]).ooms == 1
    with pytest.raises(ValueError, match="record_stream cannot be timed with raw pointers"):
        npu.time_raw([MemoryOp("record_stream", 1, stream=1)])
    with pytest.raises(WorkerDied, match=r"timing ended with 0: .*must be >= 20"):
        npu.time_raw([], NpuSettings(alloc_conf="max_split_size_mb:1"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes and page_bytes must be at least 1, not 0 and 2097152"),
        ({"tenants_bytes": -1}, "other processes cannot hold -1 bytes"),
    ],
)
def test_settings_that_no_device_has_are_refused(fields: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EmulatedNpu(**fields)


def test_a_soc_that_torch_npu_does_not_know_is_its_own_error(npu: EmulatedNpu) -> None:
    refused = npu.replay([], NpuSettings(soc="Ascend000")).setup_error
    assert refused is not None
    assert (refused.kind, refused.text) == ("RuntimeError", "Unsupported soc version: Ascend000")
