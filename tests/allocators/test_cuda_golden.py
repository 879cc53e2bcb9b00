"""The CUDA flavour against recorded runs of torch 2.11.0's libc10_cuda.so: no number differs, planted bugs are caught.

The recordings are our own: ``scripts/validate_cuda --wheels FOLDER --seed 1 --record tests/golden/cuda``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hbmtwin.allocators.caching import CachingAllocator, CachingConfig, UnsafeState, garbage, policy
from hbmtwin.allocators.caching.sizes import Flavour
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.validation.emulated import RealRun
from hbmtwin.validation.emulated.cuda.golden import COLUMNS, GOLDEN, Golden, read_golden, results_of, snapshot_sha256
from hbmtwin.validation.simulated import simulate

MIB = 1 << 20
RECORDED = {golden.name: golden for golden in read_golden(Path(__file__).parents[1] / "golden" / "cuda")}


def replayed(
    golden: Golden, allocator: type[CachingAllocator] = CachingAllocator, flavour: Flavour = "torch_cuda"
) -> RealRun:
    return simulate(golden.ops, golden.settings, flavour=flavour, allocator=allocator)


def first_difference(golden: Golden, run: RealRun) -> tuple[int, set[str]] | None:
    """The first operation after which anything differs, and the columns that do."""
    differs = results_of(run) != golden.results
    rows = np.flatnonzero(differs.any(axis=1))
    if not len(rows):
        return None
    return int(rows[0]), {COLUMNS[i] for i in np.flatnonzero(differs[rows[0]])}


def caught(name: str, allocator: type[CachingAllocator] = CachingAllocator) -> set[str]:
    found = first_difference(RECORDED[name], replayed(RECORDED[name], allocator))
    assert found is not None
    return found[1]


def test_all_that_was_chosen_is_recorded() -> None:
    assert set(RECORDED) == set(GOLDEN)
    assert sum(len(golden.ops) for golden in RECORDED.values()) > 8_900
    ooms = sum(int((golden.results[:, COLUMNS.index("outcome")] == 1).sum()) for golden in RECORDED.values())
    assert ooms > 400


@pytest.mark.parametrize("name", GOLDEN)
def test_no_number_differs_at_any_operation(name: str) -> None:
    golden = RECORDED[name]
    run = replayed(golden)
    assert len(run.stat_names) == 122
    assert len(golden.results) == len(golden.ops)
    assert first_difference(golden, run) is None
    assert snapshot_sha256(run) == golden.snapshot_sha256


# -- planted bugs ------------------------------------------------------------------------------------------------------


def test_a_wrong_split_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SPLIT_REMAINDER", 2 * MIB)
    assert {"allocated_bytes", "active_bytes", "all_statistics"} <= caught("default")


def test_a_wrong_age_in_garbage_collection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_age", lambda block, pool: pool.searches)  # never starts anew
    assert "reserved_bytes" in caught("gc and fraction, three streams")


def test_the_rules_of_the_npu_are_not_those_of_cuda() -> None:
    golden = RECORDED["default"]
    run = replayed(golden, flavour="torch_npu")
    assert results_of(run).shape == golden.results.shape
    assert first_difference(golden, run) is not None
    columns = [COLUMNS.index("allocated_bytes"), COLUMNS.index("address")]
    assert (results_of(run)[:, columns] != golden.results[:, columns]).any(axis=0).all()


class ReleasesInScopes(CachingAllocator):
    """Empties the default pools though a MemPool's scope is entered."""

    def _release_cached_blocks(self, *, keep_pages: bool = False) -> None:
        inner = self._scopes[1:]
        del self._scopes[1:]
        synchronized = self.grid.num_sync_all_streams
        super()._release_cached_blocks(keep_pages=keep_pages)
        self._scopes += inner
        if inner:
            self.grid.num_sync_all_streams = synchronized


def test_an_empty_cache_inside_a_scope_that_empties_too_much_is_caught() -> None:
    assert {"reserved_bytes", "num_device_free", "all_statistics"} <= caught("pools with options", ReleasesInScopes)


def test_a_single_peak_is_caught() -> None:
    run = replayed(RECORDED["default"])
    run.stats[7, run.stat_names.index("inactive_split.small_pool.peak")] += 1
    assert first_difference(RECORDED["default"], run) == (7, {"all_statistics"})


# -- what no trace can hold --------------------------------------------------------------------------------------------


def test_a_pool_that_dies_inside_a_scope_would_end_the_process() -> None:
    allocator = CachingAllocator(HbmDriver(64 * MIB), CachingConfig(flavour="torch_cuda"))
    for name in ("first", "second"):
        allocator.mempool_begin(name)
    allocator.mempool_end("first")
    with pytest.raises(UnsafeState, match="End the other scope first"):
        allocator.mempool_delete("first")
