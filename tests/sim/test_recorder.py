"""What is written down of a run: the columns, the address maps, the steps, and a trace that can be replayed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pandas as pd
import pytest

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Tag
from hbmtwin.sim.recorder import MAX_MAPS
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario


def twin(preset: str, *overrides: str) -> Twin:
    base = [
        "engine.max_model_len=512",
        "engine.gpu_memory_utilization=0.55",
        "workload.request_rate=10",
        "workload.num_prompts=8",
        "workload.prompt_tokens={distribution='uniform',low=1,high=200}",
        "workload.output_tokens={distribution='uniform',low=1,high=30}",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
    ]
    return Twin(Scenario.load(preset=preset, overrides=[*base, *overrides]))


def run(preset: str, *overrides: str) -> Result:
    return twin(preset, *overrides).run()


def table(frame: pd.DataFrame | None) -> pd.DataFrame:
    assert frame is not None
    return frame


# -- columns -------------------------------------------------------------------------------------------------------


def test_the_columns_are_those_of_the_design() -> None:
    result = run("paged", "results.steps=true", "results.memory_trace=true")
    columns = {
        "timeline": "time_ns tenants static weights activations kv_tokens kv_padding kv_state kv_parked kv_unfilled "
        "growth_copy rounding external pending_events kv_cached kv_pool_free driver_free running waiting parked "
        "preemptions hit_tokens "
        "queried_tokens",
        "requests": "id session turn sample tenant priority arrival_ns scheduled_ns first_token_ns end_ns "
        "prompt_tokens cached_tokens output_tokens preemptions dropped_tokens status reason",
        "checkpoints": "time_ns op_index level address size requested state tag owner",
        "steps": "step start_ns duration_ns repeat seq_ids new_tokens context_tokens preempted step_ends_ns",
        "memory_trace": "op id size stream arg step time_ns tag owner allocator",
    }
    for name, expected in columns.items():
        assert " ".join(getattr(result, name).columns) == expected, name
    for name in ("timeline", "requests"):
        frame = getattr(result, name).drop(columns=["status", "reason"], errors="ignore")
        assert set(frame.dtypes.astype(str)) == {"int64"}


def test_steps_and_trace_are_kept_on_demand_only() -> None:
    result = run("paged")
    assert result.steps is None
    assert result.memory_trace is None


def test_timeline_rows_stand_in_order_and_at_least_once_an_interval() -> None:
    result = run("paged", "results.interval_s=0.1", "workload.output_tokens=40")
    times = result.timeline["time_ns"]
    assert times.is_monotonic_increasing
    assert times.iloc[0] == 0
    assert times.iloc[-1] == result.requests["end_ns"].max()
    busy = result.timeline["running"] > 0
    gaps = times.diff()[busy & busy.shift(fill_value=False)]
    assert gaps.max() < 0.1e9 + 0.05e9  # to the end of the step in which an interval ends


# -- address maps --------------------------------------------------------------------------------------------------


def map_times(result: Result) -> list[int]:
    return sorted(set(result.checkpoints["time_ns"]))


def test_maps_are_thinned_to_a_number_that_does_not_grow() -> None:
    short = run("paged", "results.interval_s=0.05", "workload.num_prompts=20")
    long = run("paged", "results.interval_s=0.05", "workload.num_prompts=80")
    for result in (short, long):
        assert MAX_MAPS // 2 <= len(map_times(result)) <= MAX_MAPS
        assert map_times(result)[0] == 0
    assert map_times(long)[-1] > map_times(short)[-1]


def test_thinning_leaves_an_even_grid_and_is_the_same_every_time() -> None:
    first, second = (run("paged", "results.interval_s=0.05", "workload.num_prompts=60") for _ in range(2))
    assert map_times(first) == map_times(second)
    times = map_times(first)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) <= 2.2 * min(gaps)


def test_maps_at_an_interval_are_all_kept() -> None:
    result = run("paged", "results.interval_s=0.01", "results.checkpoint_s=0.05", "workload.num_prompts=40")
    times = map_times(result)
    assert len(times) > MAX_MAPS
    cells = [time // 50_000_000 for time in times]
    assert len(cells) == len(set(cells))


def test_a_map_covers_its_segments_without_holes_and_says_what_lies_where() -> None:
    result = run("pooled", "kv_cache.tensors=merged")
    for (time, _), rows in result.checkpoints.groupby(["time_ns", "op_index"]):
        segments, blocks = rows[rows["level"] == "segment"], rows[rows["level"] == "block"]
        assert segments["size"].sum() == blocks["size"].sum()
        buffers = rows[rows["level"] == "kv_block"]
        placed = blocks[blocks["tag"] == "kv"].set_index("address")
        assert sorted(buffers["address"]) == sorted(placed.index)
        assert set(segments["state"]) <= {"caching/large", "caching/small", "pooled/region"}
        row = result.timeline[result.timeline["time_ns"] == time].iloc[-1]
        if len(buffers):
            assert row["weights"] == blocks.loc[blocks["tag"] == "weight", "requested"].sum()


def test_the_map_of_a_death_shows_what_stood_in_the_way() -> None:
    result = run(
        "caching", "engine.gpu_memory_utilization=0.47", "workload.prompt_tokens=480", "workload.request_rate=inf"
    )
    oom = result.oom
    assert oom is not None
    last = result.checkpoints[result.checkpoints["time_ns"] == result.checkpoints["time_ns"].max()]
    assert last["time_ns"].iloc[0] == round(oom["time_s"] * 1e9)
    blocks = last[last["level"] == "block"]
    assert blocks["size"].sum() == oom["reserved_bytes"]
    assert blocks.loc[blocks["state"] == "active_allocated", "requested"].sum() == oom["requested_bytes"]


# -- steps -----------------------------------------------------------------------------------------------------------


def test_steps_are_numbered_through_and_account_for_every_token() -> None:
    result = run("paged", "results.steps=true", "kv_cache.block_size=16", "kv_cache.options={num_blocks=40}")
    steps = table(result.steps)
    assert list(steps["step"]) == [0, *steps["repeat"].cumsum().iloc[:-1]]
    ends = steps["start_ns"] + steps["duration_ns"]
    assert (steps["start_ns"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy()).all()
    assert all(len(a) == len(b) == len(c) for a, b, c in steps[["seq_ids", "new_tokens", "context_tokens"]].values)
    assert [len(e) for e in steps["step_ends_ns"]] == list(steps["repeat"])
    assert [e[-1] for e in steps["step_ends_ns"]] == list(ends)
    requests = result.requests
    assert set(requests["status"]) == {"completed"}
    computed = sum(sum(new) + (repeat - 1) * len(new) for new, repeat in steps[["new_tokens", "repeat"]].values)
    assert computed >= (requests["prompt_tokens"] + requests["output_tokens"] - 1).sum()


# -- the operation trace -----------------------------------------------------------------------------------------------


def replayed(trace: pd.DataFrame, allocator: BlockAllocator) -> BlockAllocator:
    """Carry out the rows of one allocator, by hand."""
    handles: dict[int, int] = {}
    for op, id, size, stream, tag, owner in trace[["op", "id", "size", "stream", "tag", "owner"]].values:
        if op == "malloc":
            handles[id] = allocator.malloc(size, stream=stream, tag=Tag[tag.upper()], owner=owner)
        elif op == "free":
            allocator.free(handles.pop(id))
        else:
            raise AssertionError(op)
    return allocator


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("caching", ["kv_cache.tensors=merged"]),
        ("caching", ["workload.num_prompts=3"]),
        ("doubling", []),
        ("pooled", ["kv_cache.tensors=merged", "memory.fit=first"]),
        ("paged", []),
    ],
)
def test_the_trace_replayed_by_hand_gives_the_same_memory(preset: str, overrides: list[str]) -> None:
    it = twin(preset, "results.memory_trace=true", *overrides)
    result = it.run()
    trace = table(result.memory_trace)
    assert result.oom is None
    for ours in {id(a): a for a in (it.general, it.arena)}.values():
        rows = trace[trace["allocator"] == ours.name]
        driver = HbmDriver(it.driver.capacity_bytes)
        again: BlockAllocator
        if ours.name == "caching":
            again = CachingAllocator(driver, CachingConfig(limit_bytes=it.driver.capacity_bytes))
        else:
            fit: Any = it.scenario.memory.fit
            again = PooledAllocator(driver, PooledConfig(limit_bytes=ours.usage().reserved, fit=fit))
        assert isinstance(ours, BlockAllocator)
        replayed(rows, again)
        assert again.usage() == ours.usage()
        assert again.stats()["reserved_bytes.all.peak"] == ours.stats()["reserved_bytes.all.peak"]
        # Ours stands behind what the context holds: all addresses are shifted, sizes and order are not.
        assert [[b[1:] for b in segment.blocks] for segment in again.walk()] == [
            [b[1:] for b in segment.blocks] for segment in ours.walk()
        ]


def test_the_trace_says_when_and_for_whom() -> None:
    result = run("caching", "results.memory_trace=true", "kv_cache.tensors=merged", "results.steps=true")
    trace, steps = table(result.memory_trace), table(result.steps)
    loading = trace[trace["tag"].isin(["weight", "activation"])]
    assert set(loading["time_ns"]) == {0}
    assert set(loading["owner"]) == {-1}
    grown = trace[trace["tag"] == "kv"]
    assert set(grown["owner"]) == set(range(8))
    starts = dict(zip(steps["step"], steps["start_ns"], strict=True))
    assert all(starts[step] == time for step, time in grown[["step", "time_ns"]].values)
    frees = trace[trace["op"] == "free"]
    assert set(frees["size"]) == {0}
    assert set(frees["tag"]) == {""}
    assert result.checkpoints["op_index"].max() <= len(trace)


def test_operations_are_counted_whether_they_are_kept_or_not() -> None:
    kept, counted = run("doubling", "results.memory_trace=true"), run("doubling")
    assert list(kept.checkpoints["op_index"]) == list(counted.checkpoints["op_index"])
