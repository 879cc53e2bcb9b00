"""Capacity: finished sweeps, OOM points and plans, and small ones that are started here."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from hbmtwin.dashboard.app import knobs, oom_points_tab, plans_tab, sweeps_tab
from hbmtwin.dashboard.app.compare_page import without_policy
from hbmtwin.dashboard.app.language import text
from hbmtwin.sim.phrases import Phrase

TITLE = Phrase("How many fit?", "能承载多少？")
KIND = "kind"
KINDS: dict[str, tuple[Phrase, Callable[[list[str], bool], None]]] = {
    "sweep": (Phrase("Sweep", "参数扫描"), sweeps_tab.show),
    "oom-point": (Phrase("OOM point", "显存耗尽点"), oom_points_tab.show),
    "plan": (Phrase("Plan", "容量规划"), plans_tab.show),
}
"""By what the address calls them."""
ASKS = {
    "sweep": Phrase(
        "What becomes of memory and latency as settings vary, every combination with several seeds.",
        "各参数取值的全部组合，每个组合用多个随机种子运行：显存与时延如何变化。",
    ),
    "oom-point": Phrase(
        "At which load memory runs out as it grows, policy by policy, and the smallest memory that survives.",
        "负载逐步增大时，各策略在何处耗尽显存；以及能撑住的最小显存。",
    ),
    "plan": Phrase(
        "The most users, or the smallest server, with which a promise holds, and what limits it.",
        "满足服务目标的最多用户数或最小配置，以及瓶颈所在。",
    ),
}


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    kind = _kind()
    st.caption(text(ASKS[kind]))
    KINDS[kind][1](without_policy(knobs.settings()), scenario is not None)


def _kind() -> str:
    """Which of the three; the address says it where it is not the first."""
    names = list(KINDS)
    if KIND not in st.session_state:
        asked = st.query_params.get(KIND)
        st.session_state[KIND] = asked if asked in KINDS else names[0]
    chosen = (
        st.segmented_control(
            text(TITLE),
            names,
            format_func=lambda name: text(KINDS[name][0]),
            key=KIND,
            required=True,
            persist_state="session",
            label_visibility="collapsed",
        )
        or names[0]
    )
    if chosen != names[0]:
        st.query_params[KIND] = chosen
    elif KIND in st.query_params:
        del st.query_params[KIND]
    return chosen
