"""How far the times of a run may be off: it is run again with each uncertain figure at each of its ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import Scenario
from hbmtwin.dashboard.app import jobs
from hbmtwin.dashboard.app.language import lang, text
from hbmtwin.dashboard.app.settings_link import settings_of
from hbmtwin.dashboard.verdict import bytes_text
from hbmtwin.sim.capacity.assumptions import assumptions_of
from hbmtwin.sim.phrases import Phrase

SLOT = "bands"
ASK = Phrase("How far may the times be off?", "时延可能偏差多少？")
RUNS = Phrase("{runs} of {total} runs", "已完成 {runs} / {total} 次运行")
SPAN = Phrase(
    "One uncertain figure at a time at its low or high end: TTFT p99 from {ttft_low:.2f} to {ttft_high:.2f} s, TPOT "
    "p99 from {tpot_low:.2f} to {tpot_high:.2f} ms.",
    "每次只把一个不确定的参数取到下限或上限：TTFT p99 为 {ttft_low:.2f} 至 {ttft_high:.2f} s，TPOT p99 为 "
    "{tpot_low:.2f} 至 {tpot_high:.2f} ms。",
)
NONE = Phrase("No figure behind this run has a range.", "本次运行所依据的参数均没有误差范围。")
FIGURE, AT, RUN = Phrase("figure", "参数"), Phrase("at", "取值"), Phrase("the run", "本次运行")
TTFT, TPOT = Phrase("TTFT p99 (s)", "TTFT p99（s）"), Phrase("TPOT p99 (ms)", "TPOT p99（ms）")


def show(scenario: Scenario, summary: Mapping[str, Any]) -> None:
    """Draw the button that asks, or the answer."""
    key = f"bands-{jobs.key_of(scenario)}"
    rows = st.session_state.get(SLOT, {}).get(key)
    if rows is None:
        pressed = st.button(text(ASK), key="ask-bands", disabled=jobs.under_way(SLOT, key))
        if pressed and jobs.start(SLOT, key, {"verb": "bands", "settings": settings_of(scenario)}):
            st.rerun()
        task = jobs.done(SLOT, key, lambda said: (said["runs"] / said["total"], text(RUNS, **said)))
        if task is not None:
            st.session_state.setdefault(SLOT, {})[key] = task.outcome["rows"]
            st.rerun()
        return
    if not rows:
        st.caption(text(NONE))
        return
    if (span := span_of(summary, rows)) is not None:
        st.markdown(text(SPAN, **span))
    words = {figure.name: figure.words(lang()) for figure in assumptions_of(scenario)}
    ends = [(row["figure"], row["at"]) for row in rows]
    table = {
        text(FIGURE): [words[row["figure"]] for row in rows],
        text(AT): [bytes_text(int(v)) if n.endswith("_bytes") else f"{v:.4g}" for n, v in ends],
        text(TTFT): [row["ttft_s"] for row in rows],
        text(TPOT): [None if row["tpot_s"] is None else 1e3 * row["tpot_s"] for row in rows],
        text(RUN): [row["fate"][lang()] for row in rows],
    }
    numbers = st.column_config.NumberColumn(format="%.2f")
    config = dict.fromkeys((text(TTFT), text(TPOT)), numbers)
    st.dataframe(pd.DataFrame(table), hide_index=True, column_config=config, height="content")


def span_of(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The least and the most of both times, the run as it is among them; None where one has no such times."""
    found: dict[str, float] = {}
    for name, factor in (("ttft", 1.0), ("tpot", 1e3)):
        times = [summary[f"{name}_s"]["p99"], *(row[f"{name}_s"] for row in rows)]
        if None in times:
            return None
        found |= {f"{name}_low": factor * min(times), f"{name}_high": factor * max(times)}
    return found
