"""What the sessions of the app share: the workers and the kept results; and how a page waits for a run of its own.

A page asks :func:`result_of` for the result of a scenario. If it is kept, it is there at once; if not, the page draws
what :func:`wait` draws until it is.
"""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st

from hbmtwin.api import Result, Scenario, scenario_key
from hbmtwin.dashboard.app.kept_results import KeptResults
from hbmtwin.dashboard.app.language import text
from hbmtwin.dashboard.app.settings_link import settings_of
from hbmtwin.dashboard.app.workers import Task, TooManyJobs, Workers
from hbmtwin.sim.phrases import Phrase

WAITS = Phrase("Waiting for {before} other runs", "排队中，前面还有 {before} 个")
BEGINS = Phrase("Starting", "正在启动")
RUNS = Phrase(
    "{completed:,} of {total} requests, {simulated:,.0f} simulated seconds, {running} running",
    "已完成 {completed:,} / {total} 条请求，仿真时间 {simulated:,.0f} 秒，运行中 {running}",
)
CANCEL = Phrase("Cancel", "取消")
LOST = Phrase(
    "The process that ran it was ended from outside, as the system does when memory is short. Nothing else was lost: "
    "run it again, or ask for fewer requests.",
    "执行该任务的进程被系统终止（常见原因是内存不足）。其他内容未受影响：请重新运行，或减少请求数。",
)
EVERY_S = 0.25
LOADED = 12
"""Results in memory, of all sessions together."""


class Shared(NamedTuple):
    """Of all sessions."""

    workers: Workers
    kept: KeptResults


@st.cache_resource(show_spinner=False)
def shared() -> Shared:
    """The one set of workers, and the one directory of results."""
    kept = KeptResults()
    return Shared(Workers(finished=lambda task: kept.make_room()), kept)


@st.cache_resource(show_spinner=False, max_entries=LOADED)
def _loaded(key: str) -> Result:
    result = shared().kept.get(key)
    if result is None:
        raise KeyError(key)
    return result


def result_of(scenario: Scenario) -> Result | None:
    """The result of a scenario, if one is kept. Raise ScenarioError where a file of it is missing."""
    try:
        return _loaded(scenario_key(scenario))
    except KeyError:
        return None


def start(scenario: Scenario) -> None:
    """Begin its run for this session, in place of one that is under way. Raise TooManyJobs."""
    leave()
    both = shared()
    key = scenario_key(scenario)
    job = {"verb": "run", "settings": settings_of(scenario), "out": str(both.kept.path(key))}
    try:
        st.session_state["task"] = both.workers.start(key, job)
    except TooManyJobs as error:
        st.error(str(error))


def under_way() -> Task | None:
    """This session's run, if one is under way or has ended badly."""
    task: Task | None = st.session_state.get("task")
    return task


def leave() -> None:
    """Wait for it no longer."""
    task = st.session_state.pop("task", None)
    if task is not None:
        shared().workers.leave(task)


@st.fragment(run_every=EVERY_S)
def wait() -> None:
    """Draw how far this session's run is, with a button that cancels it; the whole page is drawn anew at its end."""
    task = under_way()
    if task is None:
        return
    if task.state == "done":
        st.session_state.pop("task")
        st.rerun()
    if task.ended:
        st.rerun()
    p = task.progress
    total = p.get("total")
    fraction = min(1.0, p["completed"] / total) if total else 0.0
    if task.state == "waiting":
        words = text(WAITS, before=shared().workers.waiting_before(task))
    elif not p:
        words = text(BEGINS)
    else:
        words = text(
            RUNS,
            completed=p["completed"],
            total=f"{total:,}" if total else "?",
            simulated=p["simulated_s"],
            running=p["running"],
        )
    st.progress(fraction, words)
    if st.button(text(CANCEL), key="cancel", icon="⏹️"):
        leave()
        st.rerun()


def tell_end(task: Task) -> None:
    """Why a run has no result."""
    if task.state == "failed":
        st.error(task.message, icon="✏️")
    elif task.state == "lost":
        st.error(text(LOST), icon="💥")

