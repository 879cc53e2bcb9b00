"""What sweeps, OOM points and groups of ranks say in Chinese: held to it by ``test_chinese``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go

from hbmtwin.dashboard import collectives_figure, sweep_figures, sweep_words
from hbmtwin.sim.sweep.points import Spread
from hbmtwin.validation.bench.records import Bench

from ..sweep.test_sweep_figures import ABOUT, two_axes
from ..validation.test_calibrate_collectives import measured

WORDS = {"preset", "users", "rank", "AllReduce", "Pareto", "GB"}
"""Names of keys, and those of the field."""
POINTS = two_axes()


def groups() -> Bench:
    """Of two, four and eight ranks, eager and in a graph."""
    eager = measured()
    return replace(eager, points=eager.points + measured(op="all_reduce_in_graph").points)


def table_of(point: int) -> list[list[str]]:
    """The header of a sweep's table, and a row of it."""
    header, cells = sweep_words.summary_rows(POINTS, "zh")
    return [header, cells[point]]


FIGURES: dict[Callable[..., object], Callable[[], list[go.Figure]]] = {
    sweep_figures.heat_maps: lambda: list(sweep_figures.heat_maps(POINTS, "zh").values()),
    sweep_figures.curves: lambda: [sweep_figures.curves(POINTS, "zh")],
    sweep_figures.pareto_figure: lambda: [sweep_figures.pareto_figure(POINTS, "zh")],
    collectives_figure.collectives_figure: lambda: [collectives_figure.collectives_figure(groups(), "zh")],
}
SENTENCES: dict[Callable[..., object], tuple[Callable[[], object], object]] = {
    sweep_words.point_name: (
        lambda: sweep_words.point_name(POINTS[0].settings, "zh"),
        "preset paged、users 10",
    ),
    sweep_words.capacity_name: (lambda: sweep_words.capacity_name(POINTS, "zh"), "服务的用户数"),
    sweep_words.headline: (
        lambda: sweep_words.headline(POINTS, ABOUT, "zh"),
        "12 次运行中 9 次跑完全程。所有种子都跑完全程的组合中，承载最多的是 preset paged、users 30（TTFT p99 1.50 s，"
        "TPOT p99 30.0 ms）。",
    ),
    sweep_words.summary_rows: (
        lambda: [cells[2:] for cells in table_of(4)],
        [
            ["跑完全程", "跑完比例\n（95 %）", "每秒\n请求数", "TTFT p99\n（s）", "TPOT p99\n（ms）", "其余运行"],
            ["1 / 2", "50 %（1 至 99）", "2.000", "0.50", "10.0", "增长缓冲区的旧副本 1 次"],
        ],
    ),
    sweep_words.share_text: (lambda: sweep_words.share_text(Spread(0.9, 0.55, 0.997), "zh"), "90 %（55 至 100）"),
    sweep_words.ends_text: (
        lambda: sweep_words.ends_text({"held": 1200, "live_lock": 2, "kv_capacity": 1, "does_not_fit": 1}, "zh"),
        "跑完全程 1,200 次，活锁 2 次，KV 容量不足 1 次，放不下 1 次",
    ),
    sweep_words.cause_text: (lambda: sweep_words.cause_text("external_fragmentation", "zh"), "显存碎片"),
}
