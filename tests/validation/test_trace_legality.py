"""What no program can do is told before either side runs: the operation, what is wrong, and the cure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from hbmtwin.sim.replay import ReplayError
from hbmtwin.validation.allocator import Case, EmulatedBackend, validate
from hbmtwin.validation.configurations import CONFIGURATIONS
from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.legality import check_trace
from hbmtwin.workloads.formats.memory_trace import MemoryOp

BEGIN, END, DELETE = (MemoryOp(f"mempool_{verb}", "mine") for verb in ("begin", "end", "delete"))
STREAM_33 = "there is no stream 33, torch has 32 besides the default one; number them from 0 to 32"
TWICE = "id 0 stands for another tensor already; give each a number of its own"


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([MemoryOp("malloc", 0, 512, 33)], f"operation 0, malloc: {STREAM_33}"),
        ([MemoryOp("workspace", None, 512, 33)], f"operation 0, workspace: {STREAM_33}"),
        ([MemoryOp("event_complete", stream=33)], f"operation 0, event_complete: {STREAM_33}"),
        ([MemoryOp("erase_stream", 0, stream=1, arg="33")], f"operation 0, erase_stream: {STREAM_33}"),
        ([MemoryOp("malloc", 0, 0), MemoryOp("malloc", 0, 512)], f"operation 1, malloc: {TWICE}"),
        ([MemoryOp("malloc", 0, 8), MemoryOp("free", 0), MemoryOp("malloc", 0, 8)], f"operation 2, malloc: {TWICE}"),
        ([END], "operation 0, mempool_end: there is no pool 'mine'; begin it first"),
        ([DELETE], "operation 0, mempool_delete: there is no pool 'mine'; begin it first"),
        ([BEGIN, DELETE], "operation 1, mempool_delete: pool 'mine' is entered; end its scope first"),
        ([BEGIN, END, DELETE, BEGIN], "operation 3, mempool_begin: pool 'mine' is deleted; give each pool a name of"),
        ([BEGIN, END, DELETE, END], "operation 3, mempool_end: pool 'mine' is deleted; give each pool a name of"),
    ],
)
def test_what_is_not_legal_names_the_operation(ops: list[MemoryOp], message: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(f"a.csv: {message}")):
        check_trace("a.csv", ops)


def test_what_the_real_one_refuses_and_survives_is_legal(npu: EmulatedNpu) -> None:
    ops = [MemoryOp("free", 7), BEGIN, BEGIN, END, END, BEGIN, END, DELETE, MemoryOp("malloc", 0, 512, 32)]
    report = validate([Case("legal", ops, NpuSettings())], EmulatedBackend(npu))
    assert (report.differing, report.operations) == ((), 9)


def test_made_up_traces_are_legal() -> None:
    for c in CONFIGURATIONS:
        check_trace(c.name, c.trace(400, seed=3))


def test_validate_checks_before_either_side_runs(npu: EmulatedNpu) -> None:
    def never(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        raise AssertionError

    case = Case("a.csv", [BEGIN, DELETE], NpuSettings())
    with pytest.raises(ReplayError, match=r"^a.csv: operation 1, mempool_delete"):
        validate([case], EmulatedBackend(npu, never))
