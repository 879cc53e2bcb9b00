"""The address map: every byte that an allocator has reserved lies in exactly one piece of one kind."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from hbmtwin.api import Result, Scenario, run
from hbmtwin.dashboard.address_map import address_map, moments

MIB = 2**20
ROOM = ("workload.num_prompts=20", "workload.request_rate=4", "workload.prompt_tokens=700", "kv_cache.tensors=merged")
LABELS = {
    "tokens": "KV: live tokens",
    "internal": "Internal: held, no token in it",
    "external": "Hole: cached by the allocator, in nobody's use",
}


def result_of(preset: str) -> Result:
    return run(Scenario.load(preset=preset, overrides=ROOM))


def drawn_mib(figure: go.Figure) -> dict[str, float]:
    """MiB of each kind in a map's upper part."""
    return {
        bar.name: float(np.sum(np.asarray(bar.x, dtype=float)))
        for bar in figure.data
        if bar.type == "bar" and bar.x[0] is not None
    }


@pytest.mark.parametrize("preset", ["caching", "pooled", "doubling"])
def test_the_map_and_the_timeline_count_the_same_bytes(preset: str) -> None:
    result = result_of(preset)
    line = result.timeline
    compared = 0
    for moment in moments(result):
        mib = drawn_mib(address_map(result, moment))
        tokens = line["kv_tokens"] + line["kv_parked"]
        # Several rows may stand at one moment, before and after memory is released; the map shows one of them.
        matching = line[(line["time_ns"] == moment) & ((tokens / MIB - mib.get(LABELS["tokens"], 0.0)).abs() < 0.01)]
        assert len(matching) >= 1
        row = matching.iloc[-1]
        free = row["external"] + (row["kv_pool_free"] if preset == "pooled" else 0)
        assert mib.get(LABELS["internal"], 0.0) == pytest.approx((row["kv_unfilled"] + row["rounding"]) / MIB, abs=0.5)
        assert mib.get(LABELS["external"], 0.0) == pytest.approx(free / MIB, abs=0.5)
        compared += row["kv_tokens"] > 0
    assert compared >= 3


def test_a_block_pool_is_drawn_as_one_cell_a_block() -> None:
    result = result_of("paged")
    moment = moments(result)[len(moments(result)) // 2]
    at = result.checkpoints.query("time_ns == @moment and level == 'kv_block'")
    block_bytes = result.summary["kv_block_bytes"]
    assert block_bytes == 128 * 524_288
    figure = address_map(result, moment)
    grid = next(trace for trace in figure.data if trace.type == "heatmap")
    cells = np.asarray(grid.z, dtype=float)
    num_blocks = int(at["size"].sum()) // block_bytes
    assert num_blocks > len(at), "alike neighbours are one row of the checkpoint"
    assert np.count_nonzero(~np.isnan(cells)) == num_blocks
    held = at[at["state"] != "free"]
    assert np.count_nonzero(cells > 0) == int(held["size"].sum()) // block_bytes
    partly = held[held["requested"] < held["size"]]
    assert np.count_nonzero(cells == 2) == len(partly) > 0
    assert f"{num_blocks:,} blocks" in [title.text for title in figure.layout.annotations][1]
    row = held.iloc[0]
    assert cells.ravel()[int(row["address"]) // block_bytes] > 0, "a cell's place is its block id"


def test_the_largest_hole_is_named() -> None:
    def row(level: str, address: int, size: int, requested: int, state: str, tag: str) -> tuple[object, ...]:
        return (0, 1, level, address * MIB, size * MIB, requested * MIB, state, tag, 7)

    base = result_of("caching")
    names = list(base.checkpoints.columns)
    checkpoints = pd.DataFrame(
        [
            row("segment", 0, 20, 12, "caching/large", ""),
            row("block", 0, 8, 8, "active_allocated", "weight"),
            row("block", 8, 3, 0, "inactive", ""),
            row("block", 11, 4, 4, "active_allocated", "weight"),
            row("block", 15, 5, 0, "inactive", ""),
        ],
        columns=names,
    )
    result = Result(base.scenario, base.summary, base.timeline, base.requests, checkpoints)
    note = address_map(result, 0).layout.annotations[-1].text
    assert note == "largest of 2 holes: 5.00 MiB; all: 8.00 MiB"
