"""Operation traces replayed: literal tables, refusals by name, and a recorded run that comes out the same."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.registry import UnknownPolicy, device_allocators
from hbmtwin.sim.replay import (
    PER_OP,
    OpResult,
    ReplayError,
    Tally,
    _Ids,
    make_allocator,
    per_op_rows,
    replay,
    write_per_op,
)
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace

MIB = 1 << 20
SHORTAGE = [
    MemoryOp("malloc", 0, 100, 0),
    MemoryOp("malloc", 1, 3 * MIB, 0),
    MemoryOp("malloc", 2, 30 * MIB, 0),  # 2 + 20 MiB are reserved: 32 more do not fit in 40
    MemoryOp("free", 2),
    MemoryOp("free", 1),
    MemoryOp("malloc", 3, 30 * MIB, 0),  # the large segment goes back first
    MemoryOp("empty_cache"),
    MemoryOp("free", 3),
]

SHORT_RUN = [
    "results.memory_trace=true",
    "engine.max_model_len=512",
    "workload.num_prompts=6",
    "workload.prompt_tokens={distribution='uniform',low=1,high=200}",
    "workload.output_tokens={distribution='uniform',low=1,high=30}",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
]


def replayed(ops: list[MemoryOp], name: str = "caching", capacity: int = 40 * MIB, **settings: Any) -> list[OpResult]:
    driver = HbmDriver(capacity)
    return list(replay(ops, make_allocator(name, driver, settings), driver))


def table(ops: list[MemoryOp], capacity: int = 40 * MIB, **settings: Any) -> list[tuple[Any, ...]]:
    driver = HbmDriver(capacity)
    allocator = make_allocator("caching", driver, settings)
    return list(per_op_rows(replay(ops, allocator, driver), allocator))


def test_the_table_of_a_shortage() -> None:
    assert table(SHORTAGE) == [
        (0, "malloc", 0, 0, 2097152, 512, 100, 512, 1, 0, 0, 0),
        (1, "malloc", 1, 2097152, 23068672, 3146752, 3145828, 3146752, 2, 0, 0, 0),
        (2, "malloc", 2, None, 23068672, 3146752, 3145828, 3146752, 2, 0, 1, 1),
        (3, "free", 2, None, 23068672, 3146752, 3145828, 3146752, 2, 0, 1, 0),
        (4, "free", 1, 2097152, 23068672, 512, 100, 512, 2, 0, 1, 0),
        (5, "malloc", 3, 2097152, 35651584, 31458304, 31457380, 31458304, 3, 1, 2, 0),
        (6, "empty_cache", None, None, 35651584, 31458304, 31457380, 31458304, 3, 1, 2, 0),
        (7, "free", 3, 2097152, 35651584, 512, 100, 512, 3, 1, 2, 0),
    ]


class Foreign:
    """Another package's allocator: nothing but the contract."""

    def __init__(self, inner: DeviceAllocator) -> None:
        self.stats = inner.stats


def test_the_table_needs_nothing_but_the_contract() -> None:
    driver = HbmDriver(40 * MIB)
    allocator = make_allocator("caching", driver, {})
    foreign: Any = Foreign(allocator)
    assert list(per_op_rows(replay(SHORTAGE, allocator, driver), foreign)) == table(SHORTAGE)


def test_other_memory_is_the_drivers() -> None:
    ops = [MemoryOp("other_memory", None, 39 * MIB), MemoryOp("malloc", 0, 100, 0), MemoryOp("other_memory")]
    assert [r.oom for r in replayed([*ops, MemoryOp("malloc", 1, 100, 0)])] == [False, True, False, False]


def test_a_request_for_nothing_owns_nothing() -> None:
    results = replayed([MemoryOp("malloc", 0, 0, 0), MemoryOp("free", 0), MemoryOp("free", 99)])
    assert [(r.address, r.oom, r.error) for r in results] == [(None, False, "")] * 3


@pytest.mark.parametrize(
    "before",
    [
        [MemoryOp("malloc", 0, 512, 0)],
        [MemoryOp("malloc", 0, 512, 0), MemoryOp("free", 0)],
        [MemoryOp("malloc", 0, 50 * MIB, 0)],  # does not fit
        [MemoryOp("malloc", 0, 0, 0)],
    ],
)
def test_an_id_is_never_used_again(before: list[MemoryOp]) -> None:
    with pytest.raises(ReplayError, match=rf"^operation {len(before)}, malloc: id 0 was used by a malloc before"):
        replayed([*before, MemoryOp("malloc", 0, 512, 0)])


def test_a_malloc_needs_a_number() -> None:
    with pytest.raises(ReplayError, match=r"^operation 0, malloc: id is None; it must be a whole number"):
        replayed([MemoryOp("malloc", None, 512, 0)])


@given(st.lists(st.integers(0, 12), max_size=40))
def test_every_order_of_ids_is_known_again(numbers: list[int]) -> None:
    ids, those = _Ids(), set[int]()
    for number in numbers:
        assert (number in ids) == (number in those)
        if number not in those:
            ids.add(number)
            those.add(number)
    assert {n for n in range(14) if n in ids} == those


def test_ids_that_rise_one_by_one_cost_no_memory() -> None:
    ids = _Ids()
    for number in (5, *range(1_000, 6, -1), 6, *range(1_001, 2_000)):
        ids.add(number)
    assert (ids.low, ids.end, ids.others) == (5, 2_000, set())


def test_operations_on_ids_that_no_malloc_has_are_counted() -> None:
    ops = [
        MemoryOp("free", 3),
        MemoryOp("malloc", 3, 512, 0),
        MemoryOp("free", 3),
        MemoryOp("free", 3),  # owns nothing, but is known
        MemoryOp("record_stream", 4, stream=1),
        MemoryOp("erase_stream", 4, stream=1, arg="0"),
        MemoryOp("workspace", None, 512, 0),
    ]
    tally = Tally()
    assert [r.stray for r in tally.count(replayed(ops))] == [True, False, False, False, True, True, False]
    assert (tally.strays, tally.first_stray) == (3, "operation 0, free of id 3")


@pytest.mark.parametrize(
    ("op", "feature"),
    [
        (MemoryOp("record_stream", 0, stream=1), "streams"),
        (MemoryOp("empty_virt_addr_cache"), "virtual_memory"),
        (MemoryOp("set_conf", arg="max_split_size_mb:40"), "settings"),
        (MemoryOp("set_fraction", arg="0.5"), "settings"),
        (MemoryOp("mempool_begin", "p"), "pools"),
        (MemoryOp("workspace", None, 100, 0), "workspace"),
    ],
)
def test_what_an_allocator_lacks_is_refused_by_feature(op: MemoryOp, feature: str) -> None:
    with pytest.raises(ReplayError, match=f"operation 0, {op.op}: pooled has no feature '{feature}'"):
        replayed([op], "pooled")


def test_a_refused_setting_is_noted_and_the_replay_goes_on() -> None:
    ops = [MemoryOp("set_conf", arg="page_size:1g"), MemoryOp("set_conf", arg="max_split_size_mb:x")]
    first, second, third = replayed([*ops, MemoryOp("malloc", 0, 512, 0)])
    assert first.error.startswith("ValueError: _set_allocator_settings() unsupported setting: page_size")
    assert second.error.startswith("RuntimeError: stoull")
    assert (third.address is None, third.error) == (False, "")
    tally = Tally()
    list(tally.count([first, second, third]))
    assert (tally.errors, tally.first_error) == (2, f"operation 0, set_conf: {first.error}")


def test_where_the_real_one_would_break_its_memory_the_replay_stops() -> None:
    ops = [
        MemoryOp("malloc", 0, 60 * MIB, 0),
        MemoryOp("free", 0),
        MemoryOp("malloc", 1, 10 * MIB, 0),
        MemoryOp("set_conf", arg="max_split_size_mb:20"),
        MemoryOp("malloc", 2, 70 * MIB, 0),
    ]
    with pytest.raises(ReplayError, match=r"operation 4, malloc: .*frees a segment under its live tensors"):
        replayed(ops, capacity=100 * MIB)


def test_what_only_torch_npu_has_is_refused_for_cuda() -> None:
    with pytest.raises(ReplayError, match=r"operation 0, workspace: .*torch_cuda has none"):
        replayed([MemoryOp("workspace", None, 512, 0)], flavour="torch_cuda")


def test_streams_pools_workspaces_and_fractions_replay_as_well() -> None:
    ops = [
        MemoryOp("mempool_begin", "graphs", arg="no_split"),
        MemoryOp("malloc", 0, 100, 0),
        MemoryOp("mempool_end", "graphs"),
        MemoryOp("malloc", 1, 100, 1),
        MemoryOp("record_stream", 1, stream=2),
        MemoryOp("erase_stream", 1, stream=2, arg="1"),
        MemoryOp("record_stream", 1, stream=2),
        MemoryOp("free", 1),
        MemoryOp("event_complete", stream=2, arg="1"),
        MemoryOp("workspace", None, 3 * MIB, 0),
        MemoryOp("set_fraction", arg="0.1"),
        MemoryOp("malloc", 2, 3 * MIB, 0),
        MemoryOp("synchronize"),
        MemoryOp("reset_peak"),
        MemoryOp("reset_accumulated"),
        MemoryOp("free", 0),
        MemoryOp("mempool_delete", "graphs"),
        MemoryOp("empty_cache"),
    ]
    driver = HbmDriver(100 * MIB)
    allocator = make_allocator("caching", driver, {})
    results = list(replay(ops, allocator, driver))
    assert [r.index for r in results if r.oom] == [11]
    assert [r.error for r in results if r.error and not r.oom] == []
    assert results[9].address is not None
    assert allocator.stats()["reserved_bytes.all.current"] == 0
    assert driver.used_bytes == 0


def test_every_device_allocator_replays_and_frees_all() -> None:
    for name, _ in device_allocators:
        ops = [op for op in SHORTAGE if op.op in ("malloc", "free")] + [MemoryOp("free", 0)]
        driver = HbmDriver(200 * MIB)
        allocator = make_allocator(name, driver, {})
        assert all(not r.oom for r in replay(ops, allocator, driver)), name
        assert allocator.usage().allocated == 0, name
        allocator.check()


def test_allocators_and_settings_are_refused_by_name() -> None:
    driver = HbmDriver(40 * MIB)
    with pytest.raises(UnknownPolicy, match="no device allocator is called 'cashing'"):
        make_allocator("cashing", driver, {})
    with pytest.raises(ReplayError, match="pooled has no setting 'flavour'"):
        make_allocator("pooled", driver, {"flavour": "torch_npu"})
    with pytest.raises(ReplayError, match="caching: max_split_size_mb too small, must be >= 20"):
        make_allocator("caching", driver, {"alloc_conf": "max_split_size_mb:1"})
    with pytest.raises(ReplayError, match="caching: stoull"):
        make_allocator("caching", driver, {"alloc_conf": "max_split_size_mb:x"})


def test_a_tally_counts_what_goes_by() -> None:
    tally = Tally()
    driver = HbmDriver(40 * MIB)
    rows = list(tally.count(replay(SHORTAGE, make_allocator("caching", driver, {}), driver)))
    assert len(rows) == 8
    assert tally.first_oom_message.startswith("NPU out of memory. Tried to allocate 32.00 MiB ")
    assert tally == Tally(operations=8, ooms=1, first_oom_index=2, first_oom_message=tally.first_oom_message)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.parquet"])
def test_the_table_as_a_file(tmp_path: Path, name: str) -> None:
    write_per_op(iter(table(SHORTAGE)), tmp_path / name)
    frame = pd.read_csv(tmp_path / name) if "csv" in name else pd.read_parquet(tmp_path / name)
    assert tuple(frame.columns) == PER_OP
    assert frame["op"].tolist() == [op.op for op in SHORTAGE]
    assert frame["oom"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert frame["address"].isna().tolist() == [False, False, True, True, False, False, True, False]
    assert frame["reserved_bytes"].tolist()[-1] == 35651584
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_name_in_gz_is_gzip_the_same_at_every_time(tmp_path: Path) -> None:
    write_per_op(iter(table(SHORTAGE)), tmp_path / "rows.csv")
    write_per_op(iter(table(SHORTAGE)), tmp_path / "rows.csv.gz")
    packed = (tmp_path / "rows.csv.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "rows.csv").read_bytes()
    assert packed[4:8] == b"\0\0\0\0"


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.csv").symlink_to("elsewhere/table")
    write_per_op(iter(table(SHORTAGE)), tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").is_symlink()
    assert (tmp_path / "elsewhere" / "table").read_text(encoding="utf-8").startswith("index,op,id,")


def test_a_file_that_fails_half_way_does_not_appear(tmp_path: Path) -> None:
    driver = HbmDriver(40 * MIB)
    allocator = make_allocator("pooled", driver, {})
    ops = [MemoryOp("malloc", 0, 512, 0), MemoryOp("record_stream", 0, stream=1)]
    with pytest.raises(ReplayError):
        write_per_op(per_op_rows(replay(ops, allocator, driver), allocator), tmp_path / "rows.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["caching", "doubling", "paged"])
def test_the_memory_trace_of_a_run_replays_to_the_same_statistics(tmp_path: Path, preset: str) -> None:
    twin = Twin(Scenario.load(preset=preset, overrides=SHORT_RUN))
    twin.run().save(tmp_path / "run")
    ops = read_memory_trace(tmp_path / "run" / "memory_trace.parquet")
    driver = HbmDriver(twin.budget.total_bytes)
    driver.alloc(twin.static_bytes)
    again = make_allocator("caching", driver, {"limit_bytes": twin.limit_bytes, "flavour": "torch_npu"})
    for _ in replay(ops, again, driver):
        pass
    assert again.stats() == twin.general.stats()
    assert again.stats()["allocation.all.allocated"] > 40


def test_a_trace_of_two_allocators_is_replayed_one_at_a_time(tmp_path: Path) -> None:
    twin = Twin(Scenario.load(preset="pooled", overrides=SHORT_RUN))
    twin.run().save(tmp_path / "run")
    ops = list(read_memory_trace(tmp_path / "run" / "memory_trace.parquet", allocator="pooled"))
    results = replayed(ops, "pooled", twin.budget.total_bytes, limit_bytes=twin.kv_budget_bytes)
    assert len(results) == len(ops) > 100
    assert not any(r.oom for r in results)


def test_a_workspace_of_nothing_takes_nothing() -> None:
    """Seen on the binary: neither the first use of a stream nor a later one gets an address or memory."""
    ops = [MemoryOp("workspace", size=0, stream=0), MemoryOp("workspace", size=5 * MIB, stream=0)]
    driver = HbmDriver(40 * MIB)
    allocator = device_allocators.get("caching")(driver, device_allocators.get("caching").Config())
    first, second, third = replay([*ops, MemoryOp("workspace", size=0, stream=0)], allocator, driver)
    assert first.address is None
    assert second.address is not None
    assert third.address is None
    assert (first.oom, second.oom, third.oom) == (False, False, False)
    assert driver.used_bytes == 6 * MIB
