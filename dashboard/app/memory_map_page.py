"""Memory map: where every segment, block and hole lies at one moment of the run, and why memory ran out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import CatalogError, Result, ScenarioError, ran_short
from hbmtwin.dashboard.address_map import address_map, moments
from hbmtwin.dashboard.app import jobs, knobs
from hbmtwin.dashboard.app.free_sizes_figure import free_pieces, free_sizes
from hbmtwin.dashboard.app.language import lang, text
from hbmtwin.dashboard.app.memory_tables import MIB_COLUMN, books_table, operations_table
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.dashboard.verdict import bytes_text, oom_in_words
from hbmtwin.sim.capacity.plan_phrases import cause_name, change_name
from hbmtwin.sim.phrases import Phrase

TITLE = Phrase("Memory map", "显存地图")
NO_RESULT = Phrase(
    "There is no run of these settings yet: start one on the page *What if*.",
    "当前设置还没有运行结果：请先在“假设分析”页运行。",
)
MOMENT = Phrase("Moment (s)", "时刻（s）")
FREE = Phrase("Free, cached by allocators", "分配器缓存的空闲")
LARGEST = Phrase("Largest piece of it", "其中最大块")
HOLES = Phrase("In how many pieces", "其中块数")
BY_SIZE = Phrase("Free pieces by size", "空闲块大小分布")
WHY = Phrase("Why memory ran out", "显存耗尽的原因")
TERMS = Phrase("The books at that moment", "当时的显存账目")
HELD = Phrase("What would have held", "怎样才能撑住")
TRY = Phrase("Run the same traffic under each single change", "用相同流量逐一试验各项改动")
TRYING = Phrase("{runs} changes tried, last: {name}", "已试验 {runs} 项，最近：{name}")
CHANGE, OUTCOME = Phrase("change", "改动"), Phrase("outcome", "结果")
HOLDS = Phrase("holds", "撑住")
DIES = Phrase("dies at {at:.1f} s: {cause}", "{at:.1f} 秒时耗尽：{cause}")
NO_START = Phrase("does not start", "无法启动")
SHORT = Phrase("rejects requests", "拒绝请求")
STEPS = Phrase("Operation by operation to the end", "逐个操作查看耗尽过程")
LOOK = Phrase("Run it again and watch its last operations", "重新运行并记录最后的操作")
LOOKING = Phrase("The run is on its way again", "正在重新运行")
OPERATION = Phrase("Operation", "操作")
BEFORE = Phrase("before operation {index}: {op}", "操作 {index} 之前：{op}")
AT_END = Phrase("at the end: the last operation failed", "结束时：最后一次操作失败")
PREVIOUS, NEXT = Phrase("Previous", "上一个"), Phrase("Next", "下一个")
WATCH = "operations"
SLOT = "cures"


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    if scenario is None:
        return
    try:
        result = jobs.result_of(scenario)
    except (ScenarioError, CatalogError) as error:
        show_wrong(error)
        return
    if result is None:
        st.info(text(NO_RESULT))
        return
    _map(result)
    if result.oom is not None:
        _forensics(result)
        _operations(result, jobs.key_of(scenario))
    if ran_short(result.summary):
        _cures(result, jobs.key_of(scenario))


def _map(result: Result) -> None:
    at = [time / 1e9 for time in moments(result)]
    brushed = st.session_state.get("brush")
    first = at[-1] if brushed is None else max([t for t in at if t <= brushed[1]], default=at[0])
    chosen = st.select_slider(text(MOMENT), at, first, format_func=lambda t: f"{t:.1f}") if len(at) > 1 else first
    time_ns = round(chosen * 1e9)
    pieces = free_pieces(result.checkpoints, time_ns)
    three = st.columns(3)
    three[0].metric(text(FREE), bytes_text(int(pieces.sum())), border=True)
    three[1].metric(text(LARGEST), bytes_text(int(pieces.max(initial=0))), border=True)
    three[2].metric(text(HOLES), f"{len(pieces):,}", border=True)
    draw(address_map(result, time_ns, lang()), key="map")
    st.subheader(text(BY_SIZE))
    asked = result.oom["need_bytes"] if result.oom is not None and chosen == at[-1] else None
    draw(free_sizes(pieces, asked, lang()), key="free")


def _forensics(result: Result) -> None:
    oom = result.oom
    assert oom is not None
    st.subheader(text(WHY))
    st.error(oom_in_words(oom, lang()))
    with st.expander(text(TERMS)):
        st.dataframe(
            books_table(oom),
            hide_index=True,
            height="content",
            column_config={text(MIB_COLUMN): st.column_config.NumberColumn(format="%.1f")},
        )


def _operations(result: Result, key: str) -> None:
    """Step through what came last."""
    st.subheader(text(STEPS))
    kept = jobs.shared().kept
    tables = kept.tables(f"{key}-operations", ("operations", "maps"))
    if tables is None:
        if st.button(text(LOOK), key="look", disabled=jobs.under_way(WATCH, f"{key}-operations")):
            job = {"verb": "operations", "result": str(kept.path(key)), "out": str(kept.path(f"{key}-operations"))}
            if jobs.start(WATCH, f"{key}-operations", job):
                st.rerun()
        if jobs.done(WATCH, f"{key}-operations", lambda said: (0.0, text(LOOKING))) is not None:
            st.rerun()
        return
    operations, maps = tables
    moments = sorted(maps["op_index"].unique())
    names = {int(row["op_index"]): _operation(row) for row in operations.to_dict("records")}
    left, right, _ = st.columns([1, 1, 4])
    left.button(text(PREVIOUS), icon=":material/skip_previous:", on_click=_step, args=(-1, moments), key="previous")
    right.button(text(NEXT), icon=":material/skip_next:", on_click=_step, args=(1, moments), key="next")
    at = st.select_slider(
        text(OPERATION), moments, key=WATCH, value=moments[-1] if WATCH not in st.session_state else None
    )
    st.markdown(text(BEFORE, index=f"{at:,}", op=names[at]) if at in names else f"**{text(AT_END)}**")
    there = maps[maps["op_index"] == at]
    draw(address_map(replace(result, checkpoints=there), int(there["time_ns"].iloc[0]), lang()), key="operation-map")
    table = operations_table(operations)
    numbers = st.column_config.NumberColumn(format="%.3f")
    st.dataframe(
        table,
        hide_index=True,
        placeholder="–",
        column_config=dict.fromkeys(table.select_dtypes("float").columns, numbers),
    )


def _step(by: int, moments: list[int]) -> None:
    at = moments.index(st.session_state[WATCH]) + by
    st.session_state[WATCH] = moments[max(0, min(at, len(moments) - 1))]


def _operation(row: dict[Any, Any]) -> str:
    size = f" {bytes_text(int(row['size']))}" if row["size"] else ""
    return f"`{row['op']}{size} {row['tag']}`"


def _cures(result: Result, key: str) -> None:
    st.subheader(text(HELD))
    rows = result.summary.get("what_would_hold") or st.session_state.get("cures", {}).get(key)
    if rows is None:
        if st.button(text(TRY), key="try", disabled=jobs.under_way(SLOT, f"cures-{key}")):
            job = {"verb": "what_would_hold", "result": str(jobs.shared().kept.path(key))}
            if jobs.start(SLOT, f"cures-{key}", job):
                st.rerun()
        task = jobs.done(SLOT, f"cures-{key}", lambda said: (0.0, text(TRYING, runs=said["runs"], name=said["name"])))
        if task is not None:
            st.session_state.setdefault("cures", {})[key] = task.outcome["rows"]
            st.rerun()
        return
    changes = [change_name(row["change"], lang()) for row in rows]
    table = pd.DataFrame({text(CHANGE): changes, text(OUTCOME): [_outcome(row) for row in rows]})
    st.dataframe(table, hide_index=True, height="content")


def _outcome(row: dict[str, Any]) -> str:
    if row["held"]:
        return text(HOLDS)
    if row["cause"] == "does_not_fit":
        return text(NO_START)
    return text(SHORT) if row["died_at_s"] is None else text(DIES, at=row["died_at_s"], cause=_cause(row))


def _cause(row: dict[str, Any]) -> str:
    return cause_name(row["cause"], lang())
