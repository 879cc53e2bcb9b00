"""What the three parts of the Capacity page share: how one is started, and the choice among those that are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import PRESETS, CatalogError, DoesNotFit, ScenarioError, UnknownPolicy, WorkloadError
from hbmtwin.dashboard.app import finished, jobs
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, text
from hbmtwin.dashboard.app.settings_link import command
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.sim.phrases import Phrase

SHOWN = Phrase("Shown", "显示")
NONE = Phrase(
    "None is finished yet: start a small one, or open directories with `hbmtwin dashboard DIR`.",
    "还没有完成的结果：可在此启动一个小规模任务，或用 `hbmtwin dashboard DIR` 打开目录。",
)
DAMAGED = Phrase(
    "{name} cannot be shown: its files are damaged, or another release wrote them. Start it again.",
    "无法显示 {name}：文件已损坏，或由其他版本写出。请重新运行。",
)
AMISS = (ValueError, TypeError, KeyError, AttributeError, IndexError, StopIteration)
"""What a file raises that says other things, or things of another kind, than a sweep, OOM point or plan does."""
CHECKED = 64
"""Questions of one kind whose check is remembered, of all sessions together."""
START = Phrase("Start", "开始")
NEW = Phrase("Start a new one with the settings on the left", "用左侧设置新建")
COMMAND = Phrase("The same as a command line", "等价的命令行")
POLICIES = Phrase("KV policies", "KV 策略")
RUNS = Phrase("{runs:,} runs so far", "已完成 {runs:,} 次运行")


def refused(check: Callable[[], object]) -> bool:
    """Whether *check* refuses what is asked, as the command line would before its first run; why is drawn."""
    try:
        check()
    except (ScenarioError, CatalogError, WorkloadError, DoesNotFit, UnknownPolicy) as error:
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        show_wrong(f"{where}{error}" if where else error)
        return True
    return False


def choose_policies(default: list[str], key: str) -> list[str]:
    """Which of the presets, in the address as *key*."""
    chosen: list[str] = st.pills(
        text(POLICIES), list(PRESETS), selection_mode="multi", default=default, key=key, **IN_ADDRESS
    )
    return chosen


def start(
    kind: finished.Kind, job: dict[str, Any], usable: bool, words: Callable[[Mapping[str, Any]], tuple[float, str]]
) -> None:
    """A button that starts the job, and how far it is; *words* are those of :func:`hbmtwin.dashboard.app.jobs.wait`."""
    key = f"{kind}-{hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]}"
    pressed = st.button(
        text(START),
        type="primary",
        icon=":material/play_arrow:",
        disabled=not usable or jobs.under_way(kind, key),
        key=f"start-{kind}",
    )
    if pressed and jobs.start(kind, key, {**job, "out": str(jobs.shared().kept.path(key))}):
        st.rerun()
    if jobs.done(kind, key, words) is not None:
        st.rerun()


def so_far(said: Mapping[str, Any]) -> tuple[float, str]:
    """Of a search, which knows no end before it is there."""
    return 0.0, text(RUNS, **said)


def show_command(verb: str, settings: Sequence[str], *more: str) -> None:
    """What does the same in a shell."""
    st.markdown(f"**{text(COMMAND)}**")
    st.code(command(verb, settings, *more), language="bash", wrap_lines=True)


def show_finished(kind: finished.Kind, name: Callable[[Finished], str], draw: Callable[[Finished], None]) -> None:
    """Draw one of those that are finished, chosen by what *name* says of it; the one named first is offered first."""
    found = finished.of_kind(kind)
    if not found:
        st.info(text(NONE))
        return
    names = [_name(one, name) for one in found]
    at = 0
    if len(found) > 1:
        chosen = st.selectbox(text(SHOWN), range(len(found)), format_func=names.__getitem__, key=f"shown-{kind}")
        at = chosen if chosen in range(len(found)) else 0  # a name, as the language is switched, or as others finish
    try:
        draw(found[at])
    except AMISS:
        st.error(as_text(text(DAMAGED, name=found[at].name)))


def _name(one: Finished, name: Callable[[Finished], str]) -> str:
    try:
        return name(one)
    except AMISS:
        return one.name


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Cells as words; a key is told by its last one, and a title of several lines stands in one."""
    titles = [title.rpartition(".\n")[2].replace("\n", " ") for title in header]
    st.dataframe(pd.DataFrame(rows, columns=titles), hide_index=True)
