"""What the sessions of the app share: the workers and the kept results; and how a page waits for a run of its own.

A page asks :func:`result_of` for the result of a scenario. If it is kept, it is there at once; if not, the page starts
a job in a slot of its own, and draws what :func:`done` draws until it is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import streamlit as st

from hbmtwin.api import Result, Scenario, scenario_key
from hbmtwin.dashboard.app.kept_results import KeptResults
from hbmtwin.dashboard.app.language import text
from hbmtwin.dashboard.app.session_tasks import Departed, SessionTasks
from hbmtwin.dashboard.app.settings_link import settings_of
from hbmtwin.dashboard.app.workers import Task, TooManyJobs, Workers
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.sim.phrases import Phrase

WAITS = Phrase("Number {place} in the queue: other runs are under way", "排队中，第 {place} 位：其他任务正在运行")
BEGINS = Phrase("Starting", "正在启动")
RUNS = Phrase(
    "{completed:,} of {total} requests, {simulated:,.0f} simulated seconds, {running} running",
    "已完成 {completed:,} / {total} 条请求，仿真时间 {simulated:,.0f} 秒，运行中 {running}",
)
OTHERS = Phrase(
    "Under way with the settings before; what is started with these takes its place.",
    "正在运行的是更改前的设置；用当前设置启动后将取代它。",
)
CANCEL = Phrase("Cancel", "取消")
LOST = Phrase(
    "The process that ran it was ended from outside, as the system does when memory is short. Nothing else was lost: "
    "run it again, or ask for fewer requests.",
    "执行该任务的进程被系统终止（常见原因是主机内存不足）。其他内容未受影响：请重新运行，或减少请求数。",
)
EVERY_S = 0.25
AT_ONCE_S = 1.0
"""So long a click waits for what it asked for: what is done by then is drawn without a word of progress."""
BUTTON = "run"
LOADED = 12
"""Results in memory, of all sessions together."""


class Shared(NamedTuple):
    """Of all sessions."""

    workers: Workers
    kept: KeptResults
    departed: Departed


@st.cache_resource(show_spinner=False)
def shared() -> Shared:
    """The one set of workers, and the one directory of results."""
    kept = KeptResults()
    return Shared(Workers(finished=lambda task: kept.make_room()), kept, Departed())


@st.cache_resource(show_spinner=False, max_entries=LOADED)
def _loaded(key: str) -> Result:
    result = shared().kept.get(key)
    if result is None:
        raise KeyError(key)
    return result


def result_of(scenario: Scenario) -> Result | None:
    """The result of a scenario, if one is kept. Raise ScenarioError where a file of it is missing.

    One in memory whose directory is gone is none: jobs read it there, and a run would bring it back.
    """
    key = key_of(scenario)
    if not shared().kept.path(key).is_dir():
        return None
    try:
        return _loaded(key)
    except KeyError:
        return None


def asked() -> bool:
    """Whether the button that :func:`start_button` draws has been pressed; known before it is drawn anew."""
    return bool(st.session_state.get(BUTTON))


def start_button(label: str, *, disabled: bool) -> None:
    """The button of a page that starts what takes long."""
    st.button(label, type="primary", icon=":material/play_arrow:", disabled=disabled, key=BUTTON)


def key_of(scenario: Scenario) -> str:
    """The name under which its result is kept: of its run, and of the tables that it is to have."""
    wanted = scenario.results
    stored = (wanted.steps, wanted.memory_trace, wanted.cache_events, wanted.checkpoint_s)
    limits = (wanted.alert_kv_used_bytes, wanted.alert_kv_usage, wanted.alert_hit_rate)
    plain = (False, False, False, 0.0), (None, None, None)
    name = scenario_key(scenario)
    if (stored, limits) == plain:
        return name
    return f"{name}-{hashlib.sha256(repr((stored, limits)).encode()).hexdigest()[:8]}"


def start(slot: str, key: str, job: Mapping[str, Any]) -> bool:
    """Begin a job of this session under *slot*, in place of one that is under way there; what is short is done by then.

    Return whether it has begun: the page is to be drawn with it. If not, why not is drawn.
    """
    leave(slot)
    try:
        task = _tasks()[slot] = shared().workers.start(key, job)
    except TooManyJobs as error:
        show_wrong(str(error))
        return False
    task.wait(AT_ONCE_S)
    return True


def start_run(slot: str, scenario: Scenario) -> None:
    """Begin the run of a scenario."""
    key = key_of(scenario)
    start(slot, key, {"verb": "run", "settings": settings_of(scenario), "out": str(shared().kept.path(key))})


def task_of(slot: str) -> Task | None:
    """What this session has under way there, or what has ended there and nobody has seen."""
    return _tasks().get(slot)


def _task_for(slot: str, key: str) -> Task | None:
    """As :func:`task_of`; where there is none, that of a lost session which waits for the same, as before a reload."""
    task = task_of(slot)
    if task is None and (task := shared().departed.take(slot, key)) is not None:
        _tasks()[slot] = task
    return task


def leave(slot: str) -> None:
    """Wait for it no longer."""
    if (task := _tasks().pop(slot, None)) is not None:
        shared().workers.leave(task)


def _tasks() -> SessionTasks:
    if "tasks" not in st.session_state:
        st.session_state["tasks"] = SessionTasks(shared().workers, shared().departed)
    tasks: SessionTasks = st.session_state["tasks"]
    _connected(tasks)
    return tasks


@st.cache_resource(show_spinner=False, scope="session", on_release=SessionTasks.went)
def _connected(_tasks: SessionTasks) -> SessionTasks:
    """Cached for as long as the session's connection lasts: its release is how a lost one is told."""
    _tasks.came()
    return _tasks


@st.fragment(run_every=EVERY_S)
def wait(slot: str, words: Callable[[Mapping[str, Any]], tuple[float, str]]) -> None:
    """Draw how far a job is, with a button that cancels it; the whole page is drawn anew at its end.

    *words* tells the share that is done, and a sentence, from what its worker said last.
    """
    task = task_of(slot)
    if task is None:
        return
    if task.ended:
        st.rerun()
    if task.state == "waiting":
        fraction, said = 0.0, text(WAITS, place=shared().workers.waiting_before(task) + 1)
    elif not task.progress:
        fraction, said = 0.0, text(BEGINS)
    else:
        fraction, said = words(task.progress)
    st.progress(fraction, said)
    if st.button(text(CANCEL), key=f"cancel-{slot}", icon=":material/stop:"):
        leave(slot)
        st.rerun()


def of_run(progress: Mapping[str, Any]) -> tuple[float, str]:
    """How far a run is."""
    total = progress["total"]
    said = text(
        RUNS,
        completed=progress["completed"],
        total=f"{total:,}" if total else "?",
        simulated=progress["simulated_s"],
        running=progress["running"],
    )
    return min(1.0, progress["completed"] / total) if total else 0.0, said


def done(slot: str, key: str, words: Callable[[Mapping[str, Any]], tuple[float, str]]) -> Task | None:
    """Draw what there is to draw of a slot: its progress, or why it failed; return its task once it is done.

    *key* is that of the job that the page would start now: what became of another is told when its settings are back. A
    page stops where it has drawn progress: call :func:`busy` first if it should not.
    """
    task = _task_for(slot, key)
    if task is None:
        return None
    if not task.ended:
        if task.key != key:
            st.caption(text(OTHERS))
        wait(slot, words)
        return None
    if task.key != key:
        return None
    if task.state == "done":
        _tasks().pop(slot)
        return task
    if task.state == "failed":
        show_wrong(task.message)
    elif task.state == "lost":
        st.error(text(LOST), icon=":material/error:")
    return None


def busy(slot: str) -> bool:
    """Whether a job is under way there."""
    task = task_of(slot)
    return task is not None and not task.ended


def under_way(slot: str, key: str) -> bool:
    """Whether that very job is under way there; another gives way to it."""
    task = _task_for(slot, key)
    return task is not None and not task.ended and task.key == key
