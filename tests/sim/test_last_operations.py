"""The last operations before a death: those of the stored trace, and the map before each as a replay has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.sim.export import export
from hbmtwin.sim.last_operations import MOST, LastOperations, last_operations
from hbmtwin.sim.replay import make_allocator, replay
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario
from hbmtwin.workloads.formats.memory_trace import MemoryOp

SETTINGS = ["kv_cache.preset=doubling"]


@pytest.fixture(scope="module")
def died() -> Result:
    result = run(Scenario.load(overrides=[*SETTINGS, "results.memory_trace=true"]))
    assert result.oom is not None
    return result


@pytest.fixture(scope="module")
def last(died: Result) -> LastOperations:
    return last_operations(died, 40)


def test_they_are_the_end_of_the_stored_trace(died: Result, last: LastOperations) -> None:
    assert died.memory_trace is not None
    trace = died.memory_trace.tail(40)
    for column in ("op", "id", "size", "stream", "tag", "owner", "time_ns", "step", "allocator"):
        assert list(last.operations[column]) == list(trace[column])
    assert list(last.operations["op_index"]) == list(range(len(died.memory_trace) - 40, len(died.memory_trace)))


def test_the_last_one_is_what_was_asked_in_vain(died: Result, last: LastOperations) -> None:
    assert died.oom is not None
    asked = last.operations.iloc[-1]
    assert (asked["op"], asked["owner"]) == ("malloc", died.oom["owner"])
    assert died.oom["need_bytes"] == asked["size"] + 512 == 2**31 + 512  # rounded as torch_npu does
    assert asked["largest_free_bytes"] < asked["size"]


def test_books_are_those_of_a_replay_of_the_trace(died: Result, last: LastOperations) -> None:
    assert died.memory_trace is not None
    driver = HbmDriver(int(died.summary["capacity_bytes"]))
    allocator = make_allocator("caching", driver, {})
    ops = [MemoryOp(r.op, r.id, r.size, r.stream, r.arg, tag=r.tag) for r in died.memory_trace.itertuples()]
    used = [
        sum(b.size for s in allocator.walk() for b in s.blocks if b.state != "inactive")
        for _ in replay(ops[:-1], allocator, driver)
    ]
    assert list(last.operations["used_bytes"]) == used[-40:]


def test_each_map_sums_to_what_is_reserved(last: LastOperations) -> None:
    for row in last.operations.itertuples():
        there = last.maps[last.maps["op_index"] == row.op_index]
        segments, blocks = (there[there["level"] == level] for level in ("segment", "block"))
        assert segments["size"].sum() == blocks["size"].sum() == row.reserved_bytes
        assert row.used_bytes + row.free_bytes == row.reserved_bytes
    assert last.maps["op_index"].nunique() == 41  # and the end


def test_a_run_that_lived_and_odd_counts_are_refused(died: Result) -> None:
    lived = run(Scenario.load(overrides=["workload.num_prompts=2"]))
    with pytest.raises(ValueError, match="did not run out of memory"):
        last_operations(lived)
    for count in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"from 1 to {MOST} operations, not {count}"):
            last_operations(died, count)


def test_a_result_that_another_scenario_made_is_noticed(died: Result) -> None:
    other = Result(
        Scenario.load(overrides=[*SETTINGS, "seed=1"]), died.summary, died.timeline, died.requests, died.checkpoints
    )
    with pytest.raises(ValueError, match="did not end as it did"):
        last_operations(other)


def test_they_are_exported_as_csv(died: Result, tmp_path: Path) -> None:
    export(died, "last_operations", tmp_path / "last.csv")
    lines = (tmp_path / "last.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 49
    assert lines[0].startswith("op_index,allocator,op,id,size,stream,tag,owner,time_ns,step,reserved_bytes")
