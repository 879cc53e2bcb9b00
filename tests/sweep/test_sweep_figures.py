"""Figures of a sweep show what its points say: heat maps, curves and fronts, for grids of every shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hbmtwin.dashboard.log_axis import log_axis
from hbmtwin.dashboard.palette import HOLE
from hbmtwin.dashboard.sweep_figures import across, axes_of, curves, heat_maps, pareto_figure
from hbmtwin.dashboard.sweep_report import write_sweep_report
from hbmtwin.dashboard.sweep_words import headline, point_name, summary_rows, value_text
from hbmtwin.sim.sweep.points import PointSummary, point_summaries
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS

ABOUT: dict[str, Any] = {
    "scenario": "chat.toml",
    "set": [],
    "grid": {"kv_cache.preset": ["paged", "doubling"], "workload.users": ["10", "20", "30"]},
    "seeds": {"first": 0, "count": 2},
    "runs": 12,
    "outcomes": {"held": 9, "out_of_memory": 2, "does_not_fit": 1},
    "version": "0.1.0",
}


def row(settings: dict[str, Any], outcome: str = "held", ttft_s: float = 1.0) -> dict[str, Any]:
    held = {"ttft_p99_s": ttft_s, "tpot_p99_s": ttft_s / 50, "requests_per_s": 2.0}
    cause = {"out_of_memory": "growth_copy", "does_not_fit": "does_not_fit"}.get(outcome)
    return {**dict.fromkeys(ROW_COLUMNS), **settings, "outcome": outcome, "cause": cause, **(held if not cause else {})}


def two_axes() -> list[PointSummary]:
    rows = []
    for preset, users, ends in (
        ("paged", 10, ("held", "held")),
        ("paged", 20, ("held", "held")),
        ("paged", 30, ("held", "held")),
        ("doubling", 10, ("held", "held")),
        ("doubling", 20, ("held", "out_of_memory")),
        ("doubling", 30, ("does_not_fit", "does_not_fit")),
    ):
        settings = {"kv_cache.preset": preset, "workload.users": users}
        rows += [row(settings, end, users / (20 if preset == "paged" else 40)) for end in ends]
    return point_summaries(rows, ["kv_cache.preset", "workload.users"])


def test_a_heat_map_has_every_combination_in_its_cell() -> None:
    (figure,) = heat_maps(two_axes()).values()
    held, served, ttft, tpot = figure.data
    assert list(held.x) == ["10", "20", "30"]
    assert list(held.y) == ["paged", "doubling"]
    assert [list(line) for line in held.z] == [[100, 100, 100], [100, 50, None]]
    assert [list(line) for line in served.z] == [[2, 2, 2], [2, 2, None]]
    assert [list(line) for line in ttft.z] == [[0.5, 1.0, 1.5], [0.25, 0.5, None]]
    assert [list(line) for line in tpot.z] == [[10, 20, 30], [5, 10, None]]
    assert (held.zmin, held.zmax) == (0, 100)
    assert "1 growth copy" in held.customdata[1][1]


def test_curves_have_a_line_a_policy_and_its_band() -> None:
    figure = curves(two_axes())
    lines = {(t.name, t.yaxis): t for t in figure.data if t.mode == "lines+markers"}
    assert list(lines["paged", "y"].y) == [100, 100, 100]
    assert list(lines["doubling", "y"].y) == [100, 50]  # what never started is not on it
    assert list(lines["doubling", "y3"].y) == [0.25, 0.5]
    bands = [t for t in figure.data if t.fill == "toself" and t.legendgroup == "doubling" and t.yaxis == "y"]
    assert list(bands[0].x) == [10, 20, 20, 10]
    assert min(bands[0].y) == pytest.approx(100 * 0.01258, abs=0.01)  # Clopper and Pearson, 1 of 2


def test_a_front_has_full_points_only() -> None:
    points = two_axes()
    figure = pareto_figure(points)
    front = next(t for t in figure.data if t.name == "nothing beats these")
    assert list(zip(front.x, front.y, strict=True)) == [(0.25, 10), (1.0, 20), (1.5, 30)]
    doubling = next(t for t in figure.data if t.name == "doubling")
    assert list(doubling.y) == [10, 20]
    assert doubling.marker.color[0] != HOLE
    assert doubling.marker.color[1] == HOLE  # faster, but one seed died


def test_grids_of_other_shapes(tmp_path: Path) -> None:
    one = point_summaries([row({"kv_cache.preset": name}) for name in ("paged", "caching")], ["kv_cache.preset"])
    three = point_summaries(
        [
            row({"kv_cache.preset": name, "workload.users": users, "engine.gpu_memory_utilization": share})
            for name in ("paged", "caching")
            for users in (1, 2, 3)
            for share in (0.8, 0.9)
        ],
        ["kv_cache.preset", "workload.users", "engine.gpu_memory_utilization"],
    )
    lone = point_summaries([row({"workload.users": 4})], ["workload.users"])
    nothing = point_summaries([row({"workload.users": n}, "does_not_fit") for n in (1, 2)], ["workload.users"])
    assert across(axes_of(three)) == "workload.users"
    assert list(heat_maps(three)) == ["preset paged", "preset caching"]
    assert list(axes_of(lone)) == ["workload.users"]
    for name, points in (("one", one), ("three", three), ("lone", lone), ("nothing", nothing)):
        (tmp_path / name).mkdir()
        write_sweep_report(points, {**ABOUT, "grid": {key: [] for key in points[0].settings}}, tmp_path / name)
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        assert page.count("</h2>") == (4 if name == "three" else 3)
        assert "$" not in page.replace("${", "").partition("<body>")[0]


def test_the_same_points_are_the_same_page_and_nothing_comes_from_the_network(tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_sweep_report(two_axes(), ABOUT, tmp_path / name)
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]
    assert b"https://cdn" not in pages[0]
    assert pages[0].count(b'<tr class="') == 6
    assert b'<tr class="some"><td class="left">doubling</td><td class="left">20</td>' in pages[0]
    assert b'<tr class="none"><td class="left">doubling</td><td class="left">30</td>' in pages[0]


def test_words() -> None:
    points = two_axes()
    assert headline(points, ABOUT) == (
        "9 of 12 runs held. The most with every seed: preset paged, users 30 (TTFT p99 1.50 s, TPOT p99 30.0 ms)."
    )
    assert "no combination held with every seed" in headline(points[4:], ABOUT)
    _, cells = summary_rows(points)
    assert cells[4] == ["doubling", "20", "1 / 2", "50 % (1 to 99)", "2.000", "0.50", "10.0", "1 growth copy"]
    assert cells[5] == ["doubling", "30", "–", "–", "–", "–", "–", "2 did not fit"]
    assert value_text("device.memory_bytes", 32 << 30) == "32 GiB"
    assert point_name({"a.b": True, "c": 0.5}) == "b true, c 0.5"


def test_a_logarithmic_axis_has_ticks_however_short_it_is() -> None:
    for low, high in ((0.001, 1000.0), (30.0, 80.0), (5.0, 5.0)):
        axis = log_axis([low, high, 0.0])
        inside = [tick for tick in axis["tickvals"] if 10 ** axis["range"][0] <= tick <= 10 ** axis["range"][1]]
        assert len(inside) >= (1 if low == high else 3)
        assert 10 ** axis["range"][0] < low <= high < 10 ** axis["range"][1]


def test_nine_lines_are_told_apart_by_colour_and_dash() -> None:
    keys = ["kv_cache.preset", "workload.users", "engine.max_model_len"]
    rows = [
        row(dict(zip(keys, (preset, users, length), strict=True)))
        for preset in ("paged", "doubling", "pooled")
        for users in (10, 20, 30, 40)
        for length in (1024, 2048, 4096)
    ]
    lines = [trace for trace in curves(point_summaries(rows, keys)).data if trace.showlegend]
    looks = {trace.name: (trace.line.color, trace.line.dash) for trace in lines}
    assert len(set(looks.values())) == len(looks) == 9
    assert len({colour for colour, _ in looks.values()}) == 3
    assert looks["paged, 1024"][0] == looks["paged, 4096"][0]
    assert looks["paged, 1024"][1] == looks["pooled, 1024"][1] == "solid"
