"""The caching allocator against the real torch_npu: no difference in 240,000 operations; planted bugs are caught."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import pytest

from hbmtwin.allocators.caching import CachingAllocator, conf, garbage, policy, releases
from hbmtwin.allocators.caching.blocks import Block, FreeBlocks
from hbmtwin.allocators.free_lists import ADDRESS_BITS
from hbmtwin.validation.allocator import Case, EmulatedBackend, Report, validate
from hbmtwin.validation.comparison import Difference
from hbmtwin.validation.configurations import CONFIGURATIONS, configuration
from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.simulated import simulate
from hbmtwin.validation.traffic import Configuration
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
OPERATIONS = 4000
"""Of each configuration."""
GROUPS = 6


def case(c: Configuration, operations: int = OPERATIONS, seed: int = 1) -> Case:
    settings = NpuSettings(capacity_bytes=c.capacity_bytes, alloc_conf=c.alloc_conf, soc=c.soc, cann=c.cann)
    return Case(c.name, c.trace(operations, seed), settings)


def first_of(report: Report) -> Difference:
    (found,) = report.differing
    assert found.difference is not None
    return found.difference


def test_there_are_enough_of_them() -> None:
    assert len(CONFIGURATIONS) >= 30
    assert len(CONFIGURATIONS) * OPERATIONS >= 200_000
    assert len({c.name for c in CONFIGURATIONS}) == len(CONFIGURATIONS)


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_number_differs_at_any_operation(npu: EmulatedNpu, group: int) -> None:
    chosen = CONFIGURATIONS[group::GROUPS]
    report = validate(map(case, chosen), EmulatedBackend(npu))
    assert {found.name: found.difference and found.difference.what for found in report.differing} == {}
    assert report.operations == OPERATIONS * len(chosen)
    assert all(done.counters == 126 for done in report.cases)
    assert 0.05 <= sum(done.ooms for done in report.cases) / report.operations <= 0.10


@pytest.mark.parametrize(
    "texts",
    [
        ("expandable_segments:True,max_split_size_mb:40",),
        ("expandable_segments:True,max_split_size_mb:40", "max_split_size_mb:40"),
        ("expandable_segments:True,max_split_size_mb:40", "expandable_segments:False,max_split_size_mb:40"),
        ("max_split_size_mb:30,expandable_segments:maybe",),
        ("expandable_segments:maybe,max_split_size_mb:30",),
        ("max_split_size_mb:30,colour:blue",),
        ("max_split_size_mb:30,base_addr_aligned_kb:0",),
        ("throw_on_npumalloc_oom:maybe,max_split_size_mb:30",),
        ("throw_on_npumalloc_oom:True,per_process_memory_fraction:0.5,max_split_size_mb:x",),
        ("per_process_memory_fraction:0.5,throw_on_npumalloc_oom:True,per_process_memory_fraction:2",),
        ("max_split_size_mb:30,max_non_split_rounding_mb:25", "release_lock_on_npumalloc:True"),
        ("max_split_size_mb:30,max_non_split_rounding_mb:50", ""),
        ("max_split_size_mb",),
        ("max_split_size_mb,30",),
    ],
)
def test_what_a_setting_leaves_behind_refused_or_not(npu: EmulatedNpu, texts: tuple[str, ...]) -> None:
    traffic = configuration("max_split").trace(600)
    ops = [*(MemoryOp("set_conf", arg=text) for text in texts), *traffic]
    # Large enough that nothing must be released: some of these leave what the real one cannot release safely.
    start = NpuSettings(8 << 30, alloc_conf="roundup_power2_divisions:4,garbage_collection_threshold:0.3")
    one = Case("settings", ops, start)
    assert validate([one], EmulatedBackend(npu)).differing == ()


# -- planted bugs ------------------------------------------------------------------------------------------------------


def caught(npu: EmulatedNpu, name: str, allocator: type[CachingAllocator] = CachingAllocator) -> Difference:
    """The difference that the harness finds on one kind of traffic."""

    def ours(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        return simulate(ops, settings, allocator=allocator)

    difference = first_of(validate([case(configuration(name))], EmulatedBackend(npu, ours)))
    assert difference.op is not None
    assert difference.before_ours == difference.before_real, "nothing differs before"
    return difference


def names(difference: Difference) -> set[str]:
    return {name for name, _, _ in difference.what}


def test_a_wrong_pad_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "NPU_PAD", 0)
    assert "allocated_bytes.all.current" in names(caught(npu, "default"))


def test_a_wrong_segment_size_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf, "LARGE_BUFFER", 22 * MIB)
    difference = caught(npu, "default")
    assert {"reserved_bytes.all.current", "driver_bytes", "trace entries"} <= names(difference)
    assert difference.after_ours != difference.after_real


class HighestAddressFirst(CachingAllocator):
    """Best fit, but the highest address among equals."""

    def _get_free_block(self, home: FreeBlocks, rounded: int) -> Block | None:
        i = bisect_left(home.keys, rounded << ADDRESS_BITS)
        if i == len(home.keys):
            return None
        i = bisect_left(home.keys, home.blocks[i].size + 1 << ADDRESS_BITS) - 1
        del home.keys[i]
        return home.blocks.pop(i)


def test_a_wrong_tie_break_is_caught(npu: EmulatedNpu) -> None:
    assert "address" in names(caught(npu, "default", HighestAddressFirst))


def test_a_wrong_split_rule_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SPLIT_REMAINDER", MIB - 512)  # splits where exactly 1 MiB is over
    assert "active_bytes.large_pool.current" in names(caught(npu, "default"))


def test_a_wrong_age_in_garbage_collection_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_age", lambda block, pool: pool.searches)  # never starts anew
    assert "trace entries" in names(caught(npu, "gc and fraction"))


def test_a_wrong_alignment_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "ROUND_LARGE", 4 * MIB)  # aligns only from 4 MiB on
    assert "address" in names(caught(npu, "expandable"))


class ReapsByIndex(CachingAllocator):
    """Frees what waits in order of streams, not in the order of the real one's hash table."""

    def _process_events(self) -> None:
        self._insert_deferred_events()
        done: list[Block] = []
        self._events.reap(done.append)
        for block in sorted(done, key=lambda block: block.stream):
            self._free_completed(block)


class RollsBack(CachingAllocator):
    """Takes a refused setting back."""

    def set_allocator_settings(self, text: str) -> None:
        before = vars(self.conf).copy()
        try:
            super().set_allocator_settings(text)
        except (ValueError, RuntimeError):
            vars(self.conf).update(before)
            raise


def test_a_setting_rolled_back_is_caught(npu: EmulatedNpu) -> None:
    def ours(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        return simulate(ops, settings, allocator=RollsBack)

    ops = [MemoryOp("set_conf", arg="expandable_segments:True,max_split_size_mb:40"), MemoryOp("malloc", 0, 512, 0)]
    difference = first_of(validate([Case("rolled back", ops, NpuSettings())], EmulatedBackend(npu, ours)))
    assert difference.operation == 1
    assert "segment.all.current" in names(difference)


class CountsRefusalsLate(CachingAllocator):
    """Does not count a retry that the cap refuses."""

    def _out_of_memory(self, *arguments: object) -> Exception:
        if self._cap is not None:
            self.grid.num_alloc_retries -= 1
        raise super()._out_of_memory(*arguments)


@pytest.mark.parametrize(
    ("allocator", "name", "number"),
    [
        (ReapsByIndex, "events on twelve streams", "trace entries"),
        (CountsRefusalsLate, "fraction", "num_alloc_retries"),
    ],
)
def test_subtler_ones_are_caught(npu: EmulatedNpu, allocator: type[CachingAllocator], name: str, number: str) -> None:
    assert number in names(caught(npu, name, allocator))


def test_a_refused_setting_is_compared_by_kind(npu: EmulatedNpu) -> None:
    def other(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        return simulate(ops, NpuSettings(alloc_conf="base_addr_aligned_kb:99"))

    ops = [MemoryOp("malloc", 0, 512, 0)]
    refused = Case("refused", ops, NpuSettings(alloc_conf="max_split_size_mb:1"))
    report = validate([refused], EmulatedBackend(npu))
    assert (report.cases, len(report.skipped)) == ((), 1)
    assert report.skipped[0][1].startswith("both sides refuse the settings 'max_split_size_mb:1', so nothing was run")
    ((what, ours, real),) = first_of(validate([refused], EmulatedBackend(npu, other))).what
    assert what == "settings"
    assert ours.startswith("RuntimeError: base_addr_aligned_kb")
    assert real.startswith("ValueError: ")


Forge = Callable[[RealRun], None]


def flip_address(run: RealRun) -> None:
    run.results["address"][7] += 512


def flip_peak(run: RealRun) -> None:
    run.stats[7, run.stat_names.index("active_bytes.small_pool.peak")] += 1


def flip_last_block(run: RealRun) -> None:
    run.blocks["requested_size"][-1] += 1


def flip_entry(run: RealRun) -> None:
    (at,) = (run.entries["operation"] == 7).nonzero()
    run.entries["size"][at[-1]] += 1


def flip_driver(run: RealRun) -> None:
    run.results["driver_bytes"][7] += 1


@pytest.mark.parametrize(
    ("forge", "operation", "name"),
    [
        (flip_address, 7, "address"),
        (flip_peak, 7, "active_bytes.small_pool.peak"),
        (flip_last_block, 199, "segments and blocks at the end"),
        (flip_entry, 7, "trace entries"),
        (flip_driver, 7, "driver_bytes"),
    ],
)
def test_one_number_that_differs_is_found_and_named(npu: EmulatedNpu, forge: Forge, operation: int, name: str) -> None:
    def forged(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        run = simulate(ops, settings)
        if len(ops) == 200:
            forge(run)
        return run

    difference = first_of(validate([case(configuration("default"), 200)], EmulatedBackend(npu, forged)))
    assert difference.operation == operation
    assert names(difference) == {name}


# -- what has no answer on one side ------------------------------------------------------------------------------------


def test_a_null_pointer_is_no_address(npu: EmulatedNpu) -> None:
    """Of 0 bytes torch gives a null pointer, which also must not become the place that addresses count from."""
    ops = [
        MemoryOp("malloc", 0, 0, 0),
        MemoryOp("malloc", 1, 512, 0),
        MemoryOp("record_stream", 0, stream=1),
        MemoryOp("erase_stream", 0, stream=1, arg="0"),
        MemoryOp("free", 0),
        MemoryOp("free", 1),
    ]
    assert npu.replay(ops).results["address"].tolist() == [-1, 2 * MIB, -1, -1, -1, 2 * MIB]
    report = validate([Case("nothing", ops, NpuSettings())], EmulatedBackend(npu))
    assert (report.differing, report.operations) == ((), 6)
