"""The made-up traces: the same for the same seed, in the words of the operation trace, and safe for the real one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hbmtwin.allocators.caching import AllocatorConf
from hbmtwin.validation.configurations import CONFIGURATIONS, configuration
from hbmtwin.validation.traffic import Configuration
from hbmtwin.workloads.formats.memory_trace import OPERATIONS, read_memory_trace, write_memory_trace

NAMES = [c.name for c in CONFIGURATIONS]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_can_be_written_and_read_and_comes_again(tmp_path: Path, name: str) -> None:
    ops = configuration(name).trace(1500, 3)
    assert len(ops) == 1500
    assert ops == configuration(name).trace(1500, 3)
    assert ops != configuration(name).trace(1500, 4)
    assert ops[:700] == configuration(name).trace(700, 3)
    write_memory_trace(ops, tmp_path / "trace.csv.gz")
    assert list(read_memory_trace(tmp_path / "trace.csv.gz")) == ops


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_given_once_and_freed_at_most_once(name: str) -> None:
    ops = configuration(name).trace(3000)
    mallocs = [op.id for op in ops if op.op == "malloc"]
    frees = [op.id for op in ops if op.op == "free"]
    assert len(set(mallocs)) == len(mallocs) > 500
    assert len(set(frees)) == len(frees) > 200
    assert set(frees) <= set(mallocs)


@pytest.mark.parametrize("c", CONFIGURATIONS, ids=NAMES)
def test_settings_are_legal_and_pools_deleted_outside_their_scope(c: Configuration) -> None:
    AllocatorConf().parse(c.alloc_conf)
    entered: list[object] = []
    for op in c.trace(4000):
        if op.op == "mempool_begin":
            assert op.id not in entered
            entered.append(op.id)
        elif op.op == "mempool_end":
            entered.remove(op.id)
        elif op.op == "mempool_delete":
            assert op.id not in entered


def test_together_they_use_every_operation() -> None:
    used = Counter(op.op for c in CONFIGURATIONS for op in c.trace(2000))
    assert set(used) == set(OPERATIONS)
    assert min(used.values()) > 20
