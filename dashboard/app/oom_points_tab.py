"""Finished OOM points in sentences, curves and tables; and a small one that is started here."""

from __future__ import annotations

import streamlit as st

from hbmtwin.api import Scenario, parse_load
from hbmtwin.dashboard.app import finished
from hbmtwin.dashboard.app.capacity_jobs import (
    CHECKED,
    NEW,
    choose_policies,
    refused,
    show_command,
    show_finished,
    show_table,
    so_far,
    start,
)
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, lang, text
from hbmtwin.dashboard.app.oom_curves_figure import memory_curves, share_curves
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.worker import check_requests
from hbmtwin.sim.capacity.oom_point import check_oom_point
from hbmtwin.sim.capacity.oom_point_loads import Load
from hbmtwin.sim.phrases import Phrase

LOAD = Phrase(
    "The load that grows (empty: from an eighth to 8 times the scenario's own)",
    "逐步增大的负载（留空：当前场景的八分之一到 8 倍）",
)
LOAD_HELP = Phrase(
    "As --load takes it: users=10:200:10, request_rate=0.5:8:x1.25 (by a factor), rate_scale=0.1,0.2,0.5 (of a trace), "
    "num_prompts=8:64:8",
    "写法同 --load：users=10:200:10、request_rate=0.5:8:x1.25（按倍数）、rate_scale=0.1,0.2,0.5（用于 trace）、"
    "num_prompts=8:64:8",
)
SEEDS = Phrase("Seeds", "随机种子数")
SMALLEST = Phrase("also the smallest memory that survives (takes longer)", "同时求能撑住的最小显存（耗时更长）")
WHERE, LEAST = Phrase("Where memory runs out", "显存在何处耗尽"), Phrase("The smallest memory", "最小显存")
BAND = Phrase(
    "The band holds the true share with 95 % confidence. Of a policy that preempts, the dotted line is its first "
    "preemption.",
    "阴影为真实比例的 95 % 置信区间；会抢占的策略，虚线为首次抢占。",
)
MEDIANS = Phrase(
    "Users, turn, time and operations are medians of the runs at the loads where it first happened.",
    "用户数、轮次、时间与操作数为首次出现时那些运行的中位数。",
)
SPREAD = Phrase(
    "In GiB: the middle of the draws, and from the least to the most as a band.",
    "单位 GiB：样本的中位数，阴影为最小到最大。",
)
NAME = Phrase("{name}: {model} on {device}, {policies}", "{name}：{model}，{device}，{policies}")


def show(settings: list[str], usable: bool) -> None:
    """Draw the part: a new one, and one that is finished."""
    with st.expander(text(NEW), expanded=not finished.of_kind("oom-point")):
        _new(settings, usable)
    show_finished("oom-point", _name, _finished)


def _new(settings: list[str], usable: bool) -> None:
    chosen = choose_policies(["doubling", "paged"], "oom-policies")
    load = st.text_input(text(LOAD), "", placeholder="users=8:64:8", help=text(LOAD_HELP), key="load", **IN_ADDRESS)
    seeds = st.number_input(text(SEEDS), 1, 100, 5, key="oom-seeds", **IN_ADDRESS)
    memory = st.checkbox(text(SMALLEST), key="memory", **IN_ADDRESS)
    right = not refused(lambda: _read(load)) and usable and bool(chosen)
    if right:
        right = not refused(lambda: _check(tuple(chosen), load, seeds, tuple(settings)))
    job = {"verb": "oom_point", "settings": settings, "policies": chosen, "load": load, "seeds": seeds}
    start("oom-point", {**job, "memory": memory}, right, so_far)
    if right:
        more = ["--policies", ",".join(chosen), "--seeds", str(seeds)]
        more += ["--load", load] * bool(load) + ["--memory"] * memory
        show_command("oom-point", settings, *more)


@st.cache_data(show_spinner=False, max_entries=CHECKED)
def _check(policies: tuple[str, ...], load: str, seeds: int, settings: tuple[str, ...]) -> None:
    """Raise what the study would raise before its first run."""
    grown = _read(load)
    most = [f"workload.{grown.word}={grown.values[-1]}"] if grown is not None and grown.word == "num_prompts" else []
    check_requests(Scenario.load(overrides=[*settings, *most]))
    check_oom_point(None, policies=policies, load=grown, seeds=seeds, overrides=settings)


def _read(load: str) -> Load | None:
    return parse_load(load) if load else None


def _finished(one: Finished) -> None:
    said = one.told.get("said", {}).get(lang())
    if said is not None:
        answer, *others = said["sentences"]
        st.info(f"**{as_text(said['headline'])}**\n\n{as_text(answer)}")
        st.markdown("\n".join(f"- {as_text(sentence)}" for sentence in others))
    st.subheader(text(WHERE))
    draw(share_curves(one.told, lang()), key="shares")
    st.caption(text(BAND))
    if said is not None:
        show_table(said["table"][0], said["table"][1:])
        st.caption(text(MEDIANS))
    if one.told["smallest_memory"]:
        st.subheader(text(LEAST))
        draw(memory_curves(one.told, lang()), key="memories")
        st.caption(text(SPREAD))
        if said is not None and said["memory"]:
            show_table(said["memory"][0], said["memory"][1:])


def _name(one: Finished) -> str:
    told = one.told
    return text(NAME, name=one.name, model=told["model"], device=told["device"], policies=", ".join(told["policies"]))
