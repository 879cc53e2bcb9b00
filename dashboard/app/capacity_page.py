"""Capacity: finished sweeps, OOM points and plans, and small ones that are started here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import PRESETS, ScenarioError, parse_load, question_of
from hbmtwin.dashboard.app import finished, jobs, knobs
from hbmtwin.dashboard.app.compare_page import without_policy
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, lang, text
from hbmtwin.dashboard.app.oom_curves_figure import memory_curves, share_curves
from hbmtwin.dashboard.app.settings_link import command
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.sweep_figures import axes_of, curves, heat_maps, pareto_figure
from hbmtwin.dashboard.sweep_words import headline, summary_rows
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.sweep.grid import parse_grid
from hbmtwin.sim.sweep.points import point_summaries

TITLE = Phrase("How many fit?", "能承载多少？")
SWEEP, OOM_POINT, PLAN = Phrase("Sweep", "参数扫描"), Phrase("OOM point", "显存耗尽点"), Phrase("Plan", "容量规划")
SHOWN = Phrase("Shown", "显示")
NONE = Phrase(
    "None is finished yet: start a small one, or open directories with `hbmtwin dashboard DIR`.",
    "还没有完成的结果：可在此启动一个小规模任务，或用 `hbmtwin dashboard DIR` 打开目录。",
)
START = Phrase("Start", "开始")
NEW = Phrase("A new one, with the settings on the left", "用左侧设置新建")
GRID = Phrase("Grid", "网格")
GRID_HELP = Phrase(
    "As --grid takes it: key=a,b,c or key=start:stop:step, a word a key",
    "写法同 --grid：key=a,b,c 或 key=start:stop:step，每个参数一个词",
)
SEEDS = Phrase("Seeds", "随机种子数")
POLICIES = Phrase("KV policies", "KV 策略")
LOAD = Phrase("Load (empty: around the scenario's own)", "负载（留空：围绕当前场景）")
SMALLEST = Phrase("also the smallest memory that survives", "同时求能撑住的最小显存")
TARGET = Phrase("What is planned", "规划目标")
SLO = Phrase("Promised, e.g. ttft_p99=2s,tpot_p99=80ms", "服务目标，例如 ttft_p99=2s,tpot_p99=80ms")
SURVIVE = Phrase("Share of runs that must hold", "需撑住的运行比例")
QUICK = Phrase("only the answer", "只求结论")
TOO_MANY = Phrase(
    "{runs:,} runs: here at most {most:,}; use the command line for more",
    "{runs:,} 次运行：此处最多 {most:,} 次，更多请用命令行",
)
PROGRESS = Phrase("{runs:,} of {total:,} runs", "已完成 {runs:,} / {total:,} 次运行")
RUNS = Phrase("{runs:,} runs so far", "已完成 {runs:,} 次运行")
MAPS, CURVES, PARETO = Phrase("Maps", "热力图"), Phrase("Curves", "曲线"), Phrase("What nothing beats", "Pareto 前沿")
TABLE = Phrase("All points", "全部组合")
WHERE, LEAST = Phrase("Where memory runs out", "显存在何处耗尽"), Phrase("The smallest memory", "最小显存")
ANSWER = Phrase("answer", "结论")
LEFT_OUT = Phrase("{name} is left out: {why}", "{name} 未参与：{why}")
COMMAND = Phrase("The same as a command line", "等价的命令行")
TARGETS = ("users", "request_rate", "max_model_len", "devices", "gpu_memory_utilization")
MOST_RUNS = 500
"""Of a sweep that is started here."""


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    settings = without_policy(knobs.settings())
    for tab, draw_tab in zip(
        st.tabs([text(SWEEP), text(OOM_POINT), text(PLAN)]), (_sweeps, _oom_points, _plans), strict=True
    ):
        with tab:
            draw_tab(settings, scenario is not None)


# -- sweeps ----------------------------------------------------------------------------------------------------------


def _sweeps(settings: list[str], usable: bool) -> None:
    with st.expander(text(NEW), expanded=not finished.of_kind("sweep")):
        words = st.text_input(
            text(GRID),
            "kv_cache.preset=paged,doubling workload.users=8:64:8",
            help=text(GRID_HELP),
            key="grid",
            **IN_ADDRESS,
        ).split()
        seeds = st.number_input(text(SEEDS), 1, 100, 3, key="sweep-seeds", **IN_ADDRESS)
        try:
            count = len(parse_grid(words, settings)) * seeds
        except (ScenarioError, ValueError) as error:
            st.error(as_text(str(error)), icon=":material/edit:")
            return
        if count > MOST_RUNS:
            st.error(text(TOO_MANY, runs=count, most=MOST_RUNS))
        job = {"verb": "sweep", "settings": settings, "grid": words, "seeds": seeds}
        _start("sweep", job, usable and count <= MOST_RUNS, lambda s: (s["runs"] / s["total"], text(PROGRESS, **s)))
        st.code(command("sweep", settings, "--grid", *words, "--seeds", str(seeds)), language="bash", wrap_lines=True)
    if (one := _choose("sweep")) is None:
        return
    points = point_summaries(finished.rows_of(one), list(one.told["grid"]))
    if not points:
        st.info(text(NONE))
        return
    st.success(as_text(headline(points, one.told, lang())))
    if len(axes_of(points)) > 1:
        st.subheader(text(MAPS))
        for place, (name, figure) in enumerate(heat_maps(points, lang()).items()):
            if name:
                st.markdown(f"**{as_text(name)}**")
            draw(figure, key=f"map{place}")
    st.subheader(text(CURVES))
    draw(curves(points, lang()), key="curves")
    st.subheader(text(PARETO))
    draw(pareto_figure(points, lang()), key="pareto")
    st.subheader(text(TABLE))
    header, rows = summary_rows(points, lang())
    st.dataframe(pd.DataFrame(rows, columns=header), hide_index=True)


# -- OOM points ------------------------------------------------------------------------------------------------------


def _oom_points(settings: list[str], usable: bool) -> None:
    with st.expander(text(NEW), expanded=not finished.of_kind("oom-point")):
        policies = st.pills(
            text(POLICIES), list(PRESETS), selection_mode="multi", default=["doubling", "paged"], key="op"
        )
        load = st.text_input(text(LOAD), "", placeholder="users=8:64:8", key="load", **IN_ADDRESS)
        seeds = st.number_input(text(SEEDS), 1, 100, 5, key="oom-seeds", **IN_ADDRESS)
        memory = st.checkbox(text(SMALLEST), key="memory", **IN_ADDRESS)
        try:
            if load:
                parse_load(load)
        except (ScenarioError, ValueError) as error:
            st.error(as_text(str(error)), icon=":material/edit:")
            return
        job = {"verb": "oom_point", "settings": settings, "policies": policies, "load": load, "seeds": seeds}
        _start("oom-point", {**job, "memory": memory}, usable and bool(policies), _so_far)
        more = ["--policies", ",".join(policies), "--seeds", str(seeds)]
        more += ["--load", load] * bool(load) + ["--memory"] * memory
        st.code(command("oom-point", settings, *more), language="bash", wrap_lines=True)
    if (one := _choose("oom-point")) is None:
        return
    st.subheader(text(WHERE))
    draw(share_curves(one.told, lang()), key="shares")
    if one.told["smallest_memory"]:
        st.subheader(text(LEAST))
        draw(memory_curves(one.told, lang()), key="memories")


# -- plans -----------------------------------------------------------------------------------------------------------


def _plans(settings: list[str], usable: bool) -> None:
    with st.expander(text(NEW), expanded=not finished.of_kind("plan")):
        policies = st.pills(
            text(POLICIES), list(PRESETS), selection_mode="multi", default=["paged"], key="plan-policies"
        )
        target = st.selectbox(text(TARGET), TARGETS, key="target", **IN_ADDRESS)
        slo = st.text_input(text(SLO), "", key="slo", **IN_ADDRESS)
        survive = st.slider(text(SURVIVE), 0.5, 0.99, 0.9, 0.01, key="survive", **IN_ADDRESS)
        quick = st.checkbox(text(QUICK), value=True, key="quick", **IN_ADDRESS)
        job = {"settings": settings, "policies": policies, "target": target, "slo": slo, "survive": survive}
        try:
            question_of(
                target,
                slo=slo or None,
                survive=survive,
                confidence=0.95,
                margin="1%",
                max_preemptions=None,
                seeds=None,
                explain=not quick,
            )
        except ScenarioError as error:
            st.error(as_text(str(error)), icon=":material/edit:")
            return
        _start("plan", {"verb": "plan", **job, "quick": quick}, usable and bool(policies), _so_far)
        more = ["--target", target, "--policies", ",".join(policies), "--survive", f"{survive:g}"]
        more += ["--slo", slo] * bool(slo) + ["--quick"] * quick
        st.code(command("plan", settings, *more), language="bash", wrap_lines=True)
    if (one := _choose("plan")) is None:
        return
    for name, plan in one.told["plans"].items():
        st.markdown(f"#### {as_text(name or 'scenario')}")
        (st.error if plan["answer"] is None else st.success)(as_text(plan["verdict"][lang()]))
        for heading, sentence in plan["sentences"][lang()]:
            st.markdown(f"- **{as_text(heading)}**: {as_text(sentence)}")
    for name, why in one.told["left_out"].items():
        st.caption(as_text(text(LEFT_OUT, name=name, why=why)))


# -- of all three ----------------------------------------------------------------------------------------------------


def _policies(default: list[str], key: str) -> list[str]:
    chosen: list[str] = st.pills(
        text(POLICIES), list(PRESETS), selection_mode="multi", default=default, key=key, **IN_ADDRESS
    )
    return chosen


def _start(
    kind: str, job: dict[str, Any], usable: bool, words: Callable[[Mapping[str, Any]], tuple[float, str]]
) -> None:
    """A button that starts the job, and how far it is."""
    key = f"{kind}-{hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]}"
    pressed = st.button(text(START), type="primary", disabled=not usable or jobs.busy(kind), key=f"start-{kind}")
    if pressed and jobs.start(kind, key, {**job, "out": str(jobs.shared().kept.path(key))}):
        st.rerun()
    if jobs.done(kind, words) is not None:
        st.rerun()


def _choose(kind: finished.Kind) -> Finished | None:
    """One of those that are finished; the one that ended last is offered first."""
    found = finished.of_kind(kind)
    if not found:
        st.info(text(NONE))
        return None
    if len(found) == 1:
        return found[0]
    at = st.selectbox(text(SHOWN), range(len(found)), format_func=lambda i: found[i].name, key=f"shown-{kind}")
    return found[at]


def _so_far(said: Mapping[str, Any]) -> tuple[float, str]:
    return 0.0, text(RUNS, **said)
