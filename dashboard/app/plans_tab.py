"""Finished plans: the answer, what was seen at each value, what it leans on; and a small one that is started here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from hbmtwin.api import PlanQuestion, Scenario, question_of
from hbmtwin.dashboard.app import finished
from hbmtwin.dashboard.app.capacity_jobs import (
    CHECKED,
    NEW,
    choose_policies,
    refused,
    show_command,
    show_finished,
    so_far,
    start,
)
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, lang, text
from hbmtwin.dashboard.app.plan_figure import held_by_value
from hbmtwin.dashboard.app.plan_tables import changes_table, figures_table
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.worker import check_requests
from hbmtwin.dashboard.app.wrong import why_text
from hbmtwin.sim.capacity.plan import check_each
from hbmtwin.sim.phrases import Phrase

TARGET = Phrase("What is planned", "规划目标")
TARGETS = {
    "users": Phrase("the most users (closed loop)", "最多用户数（闭环）"),
    "request_rate": Phrase("the highest request rate (open loop)", "最高请求速率（开环）"),
    "max_model_len": Phrase("the longest max_model_len", "最长 max_model_len"),
    "devices": Phrase("the fewest devices", "最少设备数"),
    "gpu_memory_utilization": Phrase("the smallest gpu_memory_utilization", "最小 gpu_memory_utilization"),
}
SLO = Phrase(
    "What is promised (empty: only that nothing dies or is rejected)", "服务目标（留空：只要求不耗尽、不拒绝）"
)
SLO_HELP = Phrase(
    "As --slo takes it, separated by commas: ttft, tpot, e2e or queue, each with _p50, _p90, _p95 or _p99",
    "写法同 --slo，以逗号分隔：ttft、tpot、e2e、queue，后接 _p50、_p90、_p95 或 _p99",
)
SURVIVE = Phrase("Share of runs that must hold", "需撑住的运行比例")
QUICK = Phrase(
    "only the answer: not what binds it, what would help and what it leans on (faster)",
    "只求结论：不分析瓶颈、改进办法与敏感假设（更快）",
)
SEEN = Phrase("What was seen at each value", "各取值的结果")
BAND = Phrase(
    "Share of the runs that held, with its bounds; hollow: looked at on the way, not counted. Dashed: what must hold.",
    "满足目标的运行比例及其置信界；空心为搜索途中的试探，不计入结论。虚线为要求的比例。",
)
LEFT_OUT = Phrase("{name} is left out: {why}", "{name} 未参与：{why}")
NAME = Phrase("{name}: {target}, {policies}", "{name}：{target}，{policies}")
SCENARIO = Phrase("scenario", "当前场景")
ALL_CHANGES = Phrase("All {count} changes that were tried, one at a time", "逐一试验的全部 {count} 项改动")
ALL_FIGURES = Phrase("Uncertain figures that move the answer", "会改变结论的不确定系数")
COLON = Phrase(": ", "：")


def show(settings: list[str], usable: bool) -> None:
    """Draw the part: a new one, and one that is finished."""
    with st.expander(text(NEW), expanded=not finished.of_kind("plan")):
        _new(settings, usable)
    show_finished("plan", _name, _finished)


def _new(settings: list[str], usable: bool) -> None:
    chosen = choose_policies(["paged"], "plan-policies")
    target = st.selectbox(
        text(TARGET), list(TARGETS), format_func=lambda name: text(TARGETS[name]), key="target", persist_state="session"
    )
    slo = st.text_input(
        text(SLO), "", placeholder="ttft_p99=2s,tpot_p99=80ms", help=text(SLO_HELP), key="slo", **IN_ADDRESS
    )
    survive = st.slider(text(SURVIVE), 0.5, 0.99, 0.9, 0.01, key="survive", **IN_ADDRESS)
    quick = st.checkbox(text(QUICK), value=True, key="quick", **IN_ADDRESS)
    job = {"settings": settings, "policies": chosen, "target": target, "slo": slo, "survive": survive}
    right = not refused(lambda: _question(target, slo, survive)) and usable and bool(chosen)
    if right:
        right = not refused(lambda: _check(tuple(chosen), target, slo, survive, tuple(settings)))
    start("plan", {"verb": "plan", **job, "quick": quick}, right, so_far)
    if right:
        more = ["--target", target, "--policies", ",".join(chosen), "--survive", f"{survive:g}"]
        more += ["--slo", slo] * bool(slo) + ["--quick"] * quick
        show_command("plan", settings, *more)


@st.cache_data(show_spinner=False, max_entries=CHECKED)
def _check(policies: tuple[str, ...], target: str, slo: str, survive: float, settings: tuple[str, ...]) -> None:
    """Raise what the plan would raise before its first run."""
    check_requests(Scenario.load(overrides=settings))
    scenarios = {name: Scenario.load(overrides=settings, preset=name) for name in policies}
    check_each(scenarios, _question(target, slo, survive))


def _question(target: str, slo: str, survive: float) -> PlanQuestion:
    return question_of(
        target,
        slo=slo or None,
        survive=survive,
        confidence=0.95,
        margin="1%",
        max_preemptions=None,
        seeds=None,
        explain=False,
    )


def _finished(one: Finished) -> None:
    plans = one.told["plans"]
    for name, plan in plans.items():
        st.subheader(as_text(name or text(SCENARIO)))
        (st.error if plan["answer"] is None else st.success)(as_text(plan["verdict"][lang()]))
        st.markdown(
            "\n".join(
                f"- **{as_text(heading)}**{text(COLON)}{as_text(said)}" for heading, said in plan["sentences"][lang()]
            )
        )
        if plan["changes"]:
            with st.expander(text(ALL_CHANGES, count=len(plan["changes"]))):
                st.table(changes_table(plan["changes"]), hide_index=True)
        if plan["leaning"] and plan["leaning"]["figures"]:
            with st.expander(text(ALL_FIGURES)):
                st.table(figures_table(plan["leaning"]["figures"]), hide_index=True)
    if plans:
        st.subheader(text(SEEN))
        draw(held_by_value(plans, lang()), key="held")
        st.caption(text(BAND))
    for name, why in one.told["left_out"].items():
        st.caption(as_text(text(LEFT_OUT, name=name, why=why_text(why))))


def _name(one: Finished) -> str:
    plans: Mapping[str, Any] = one.told["plans"]
    targets = ", ".join(dict.fromkeys(plan["target"] for plan in plans.values()))
    return text(
        NAME, name=one.name, target=targets, policies=", ".join(name for name in plans if name) or text(SCENARIO)
    )
