"""Finished sweeps as maps, curves, a front and a table; and a small one that is started here."""

from __future__ import annotations

import streamlit as st

from hbmtwin.api import Scenario
from hbmtwin.dashboard.app import finished
from hbmtwin.dashboard.app.capacity_jobs import (
    CHECKED,
    NEW,
    refused,
    show_command,
    show_finished,
    show_table,
    start,
)
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, lang, text
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.worker import check_requests
from hbmtwin.dashboard.sweep_figures import MOST_FACETS, axes_of, curves, heat_maps, pareto_figure
from hbmtwin.dashboard.sweep_words import headline, short_key, summary_rows
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.sweep.grid import parse_grid
from hbmtwin.sim.sweep.points import point_summaries
from hbmtwin.sim.sweep.sweep import points_of

GRID = Phrase("What is varied: every combination of these values", "扫描的参数：取各参数值的全部组合")
GRID_HELP = Phrase(
    "As --grid takes it: key=a,b,c or key=start:stop:step, a space between two keys. For example "
    "workload.users=8:64:8 engine.max_model_len=2048,4096",
    "写法同 --grid：key=a,b,c 或 key=start:stop:step，参数之间用空格分开。例如 "
    "workload.users=8:64:8 engine.max_model_len=2048,4096",
)
GRID_EXAMPLE = "kv_cache.preset=paged,doubling workload.users=8:64:8"
SEEDS = Phrase("Seeds of each combination", "每个组合的随机种子数")
SO_MANY = Phrase(
    "{points:,} combinations x {seeds:,} seeds = {runs:,} runs",
    "{points:,} 个组合 × {seeds:,} 个种子 = {runs:,} 次运行",
)
TOO_MANY = Phrase(
    "{runs:,} runs: here at most {most:,}; use the command line for more",
    "{runs:,} 次运行：此处最多 {most:,} 次，更多请用命令行",
)
PROGRESS = Phrase("{runs:,} of {total:,} runs", "已完成 {runs:,} / {total:,} 次运行")
MAPS, CURVES, PARETO = Phrase("Maps", "热力图"), Phrase("Curves", "曲线"), Phrase("What nothing beats", "Pareto 前沿")
BANDS = Phrase(
    "Medians of the seeds that held, bands of 95 %. Of the share that held, the band is what so few seeds can say.",
    "跑完全程的种子的中位数与 95 % 区间；跑完比例的区间反映种子数有限带来的不确定性。",
)
FRONT = Phrase(
    "Each mark is a combination: full where every seed held, hollow where some did not.",
    "每个标记是一个组合：实心为所有种子都跑完全程，空心为部分种子未跑完。",
)
FIRST_MAPS = Phrase("At most {most} of these are drawn; the table has all.", "最多绘制 {most} 组；表中列出全部组合。")
TABLE = Phrase("All combinations", "全部组合")
NAME = Phrase("{name}: {keys}, {runs:,} runs", "{name}：{keys}，{runs:,} 次运行")
MOST_RUNS = 500
"""Of a sweep that is started here."""


def show(settings: list[str], usable: bool) -> None:
    """Draw the part: a new one, and one that is finished."""
    with st.expander(text(NEW), expanded=not finished.of_kind("sweep")):
        _new(settings, usable)
    show_finished("sweep", _name, _finished)


def _new(settings: list[str], usable: bool) -> None:
    words = st.text_input(text(GRID), GRID_EXAMPLE, help=text(GRID_HELP), key="grid", **IN_ADDRESS).split()
    seeds = st.number_input(text(SEEDS), 1, 100, 3, key="sweep-seeds", **IN_ADDRESS)
    right = not refused(lambda: parse_grid(words, settings if usable else ())) and usable
    if right:
        points = len(parse_grid(words, settings))
        if (runs := points * seeds) > MOST_RUNS:
            st.error(text(TOO_MANY, runs=runs, most=MOST_RUNS))
            right = False
        elif refused(lambda: _check(tuple(words), tuple(settings))):
            right = False
        else:
            st.caption(text(SO_MANY, points=points, seeds=seeds, runs=runs))
    job = {"verb": "sweep", "settings": settings, "grid": words, "seeds": seeds}
    start("sweep", job, right, lambda s: (s["runs"] / s["total"], text(PROGRESS, **s)))
    if right:
        show_command("sweep", settings, "--grid", *words, "--seeds", str(seeds))


@st.cache_data(show_spinner=False, max_entries=CHECKED)
def _check(words: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Raise what the sweep would raise before its first run: 10 ms a combination, and once for the same question."""
    grid = parse_grid(words, settings)
    for value in (f"{axis.key}={value}" for axis in grid.axes for value in axis.values):
        check_requests(Scenario.load(overrides=[*settings, value]))
    points_of(None, grid, overrides=settings)


def _finished(one: Finished) -> None:
    points = point_summaries(finished.rows_of(one), list(one.told["grid"]))
    if not points:
        raise ValueError("none of its runs can be read")
    st.success(as_text(headline(points, one.told, lang())))
    if len(axes_of(points)) > 1:
        st.subheader(text(MAPS))
        maps = heat_maps(points, lang())
        for place, (name, figure) in enumerate(maps.items()):
            if name:
                st.markdown(f"**{as_text(name)}**")
            draw(figure, key=f"map{place}")
        if len(maps) == MOST_FACETS:
            st.caption(text(FIRST_MAPS, most=MOST_FACETS))
    st.subheader(text(CURVES))
    draw(curves(points, lang()), key="curves")
    st.caption(text(BANDS))
    st.subheader(text(PARETO))
    draw(pareto_figure(points, lang()), key="pareto")
    st.caption(text(FRONT))
    st.subheader(text(TABLE))
    show_table(*summary_rows(points, lang()))


def _name(one: Finished) -> str:
    keys = " × ".join(map(short_key, one.told["grid"]))
    return text(NAME, name=one.name, keys=keys, runs=one.told["runs"])
