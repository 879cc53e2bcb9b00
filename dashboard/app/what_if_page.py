"""What-if: a scenario, a run of it, and what became of its memory, its requests and its latency."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import CatalogError, Result, Scenario, ScenarioError
from hbmtwin.dashboard.app import error_bars, jobs, knobs
from hbmtwin.dashboard.app.breakdown_figure import breakdown_bar
from hbmtwin.dashboard.app.language import as_text, basis_of, lang, text
from hbmtwin.dashboard.app.settings_link import command, settings_of
from hbmtwin.dashboard.app.theme import draw, draw_brushed
from hbmtwin.dashboard.app.timeline_figure import timeline
from hbmtwin.dashboard.app.wrong import show_wrong, why_text
from hbmtwin.dashboard.figures import latency_by_turn
from hbmtwin.dashboard.palette import ALARM
from hbmtwin.dashboard.remarks import remarks
from hbmtwin.dashboard.standstill import recomputed_text, standstill_in_words, unfinished_text
from hbmtwin.dashboard.verdict import ended_early, goodput_text, headline, oom_in_words, rejections_text
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.server_plan import ServerPlan

TITLE = Phrase("What if?", "假设分析")
RUN = Phrase("Run", "运行")
EMPTY = Phrase(
    "Turn a knob on the left, then run: you will see where every byte of the device is over time, when it runs out, "
    "and what that does to latency.",
    "在左侧调整参数后点击运行：将看到设备显存随时间的去向、何时耗尽，以及对时延的影响。",
)
BEFORE = Phrase("The device before the first request", "首个请求到来之前的设备")
NAME = Phrase("The run", "本次运行")
SLOT = "what-if"
DONE = Phrase("Completed", "已完成")
OF = Phrase("of {total:,}", "共 {total:,}")
PEAK = Phrase("Peak reserved (GiB)", "预留峰值（GiB）")
OF_DEVICE = Phrase("of {total:.2f}", "共 {total:.2f}")
TTFT = Phrase("TTFT p99 (s)", "TTFT p99（s）")
TPOT = Phrase("TPOT p99 (ms)", "TPOT p99（ms）")
PREEMPTED = Phrase("Preemptions", "抢占次数")
REJECTED = Phrase("rejected: {reasons}", "被拒绝：{reasons}")
RECOMPUTED = Phrase("tokens computed again after preemptions: {share}", "抢占后重计算的 token：{share}")
MEDIAN = Phrase("p50 {value}", "p50 {value}")
OVER_TIME = Phrase(
    "Memory, KV and queue over time (drag to choose a stretch)", "显存、KV 与队列随时间（拖动可选取一段）"
)
LATENCY = Phrase("Latency", "时延")
PERCENTILES = Phrase("Percentiles", "分位数")
STRETCH = Phrase("{begin:.1f} to {end:.1f} s", "{begin:.1f} 至 {end:.1f} 秒")
COMMAND = Phrase("The same as a command line", "等价的命令行")
SCENARIO_FILE = Phrase("Scenario (TOML)", "场景（TOML）")
SUMMARY_FILE = Phrase("Summary (JSON)", "汇总（JSON）")
REQUESTS_FILE = Phrase("Requests (CSV)", "请求明细（CSV）")
RESULT_FILE = Phrase("Result directory (zip)", "结果目录（zip）")
BASIS = Phrase(
    "Memory follows the allocator's and the engine's own rules. Times come from the cost model: {basis}.",
    "显存按分配器与引擎自身的规则得出；时间来自成本模型：{basis}。",
)
NOTES = Phrase("Notes", "说明")
METRICS = {
    "ttft_s": Phrase("TTFT (s)", "TTFT（s）"),
    "tpot_s": Phrase("TPOT (s)", "TPOT（s）"),
    "e2e_s": Phrase("end to end (s)", "端到端（s）"),
    "queue_s": Phrase("queue (s)", "排队（s）"),
}
GIB = 1 << 30


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    if scenario is None:
        return
    try:
        result = jobs.result_of(scenario)
        if result is None and jobs.asked():
            jobs.start_run(SLOT, scenario)
            result = jobs.result_of(scenario)
    except (ScenarioError, CatalogError) as error:
        show_wrong(error)
        return
    key = jobs.key_of(scenario)
    jobs.start_button(text(RUN), disabled=result is not None or jobs.under_way(SLOT, key))
    if jobs.done(SLOT, key, jobs.of_run) is not None and result is None:
        st.rerun()
    if result is None and jobs.busy(SLOT):
        return
    if result is None:
        st.info(text(EMPTY))
        st.subheader(text(BEFORE))
        draw(breakdown_bar(ServerPlan(scenario).budget, lang()), key="breakdown")
        _share(scenario)
        return
    _result(result)
    _share(scenario, result)


def _result(result: Result) -> None:
    s = result.summary
    told = headline({text(NAME): s}, lang())
    (st.error if ended_early(s) else st.success)(told)
    if result.oom is not None:
        st.markdown(as_text(oom_in_words(result.oom, lang())))
    if s.get("standstill"):
        st.markdown(as_text(standstill_in_words(s, lang())))
    if unserved := unserved_lines(s):
        st.warning(as_text("\n".join(unserved)).replace("\n", "\n\n"))
    _figures(s)
    st.caption(as_text(text(BASIS, basis=basis_of(s["basis"]))))
    st.subheader(text(OVER_TIME))
    chosen = draw_brushed(timeline(result, lang()), key="timeline")
    if chosen is not None:
        st.session_state["brush"] = chosen
        st.caption(text(STRETCH, begin=chosen[0], end=chosen[1]))
    left, right = st.columns([3, 2])
    with left:
        st.subheader(text(LATENCY))
        figure = latency_by_turn({text(NAME): result}, lang())
        if (limit_s := result.scenario.slo.tpot_s) is not None:
            figure.add_hline(
                y=1e3 * limit_s,
                line={"color": ALARM, "width": 1, "dash": "dash"},
                annotation={"text": f"SLO {1e3 * limit_s:g} ms", "font": {"color": ALARM}},
            )
        draw(figure, key="latency")
    with right:
        st.subheader(text(PERCENTILES))
        st.dataframe(percentiles(s), hide_index=True)
        if s["goodput"]:
            st.markdown(as_text(goodput_text(s["goodput"], lang())))
    error_bars.show(SLOT, {"": result})
    notes = remarks({text(NAME): s}, lang())
    if notes:
        with st.expander(text(NOTES)):
            for note in notes:
                st.markdown(f"- {as_text(why_text(note))}")


def _figures(s: dict[str, Any]) -> None:
    five = st.columns(5)
    five[0].metric(text(DONE), f"{s['requests_completed']:,}", text(OF, total=s["requests_total"]), **_PLAIN)
    capacity = text(OF_DEVICE, total=s["capacity_bytes"] / GIB)
    five[1].metric(text(PEAK), f"{s['peak_reserved_bytes'] / GIB:.2f}", capacity, **_PLAIN)
    for column, label, name, factor in ((2, TTFT, "ttft_s", 1), (3, TPOT, "tpot_s", 1e3)):
        values = s[name]
        high, middle = (None if values[q] is None else f"{values[q] * factor:,.2f}" for q in ("p99", "p50"))
        five[column].metric(text(label), high or "–", text(MEDIAN, value=middle or "–"), **_PLAIN)
    five[4].metric(text(PREEMPTED), f"{s['preemptions']:,}", **_PLAIN)


def unserved_lines(summary: dict[str, Any]) -> list[str]:
    """A line each for requests that were rejected, those never sent, and tokens computed again; none is the best."""
    lines = []
    if rejected := rejections_text(summary, lang()):
        lines.append(text(REJECTED, reasons=rejected))
    if unfinished := unfinished_text(summary, lang()):
        lines.append(unfinished)
    if summary["recomputed_tokens"]:
        lines.append(text(RECOMPUTED, share=recomputed_text(summary, lang())))
    return lines


_PLAIN: dict[str, Any] = {"delta_color": "off", "delta_arrow": "off", "border": True, "height": "stretch"}


def percentiles(summary: dict[str, Any]) -> pd.DataFrame:
    """A row a latency in seconds, a column a percentile."""
    names = [name for name in METRICS if summary.get(name)]
    columns = {which: [summary[name][which] for name in names] for which in summary[names[0]]}
    return pd.DataFrame({"": [text(METRICS[name]) for name in names], **columns})


def _share(scenario: Scenario, result: Result | None = None) -> None:
    st.markdown(f"**{text(COMMAND)}**")
    more = ["--error-bars"] if result is not None and error_bars.wanted(SLOT, {"": result}) else []
    st.code(command("run", settings_of(scenario), *more), language="bash", wrap_lines=True)
    with st.container(horizontal=True):
        st.download_button(
            text(SCENARIO_FILE), scenario.to_toml(), "scenario.toml", "application/toml", on_click="ignore", key="toml"
        )
        if result is not None:
            _downloads(result)


def _downloads(result: Result) -> None:
    text_ = json.dumps(result.summary, indent=2, ensure_ascii=False, allow_nan=False)
    st.download_button(text(SUMMARY_FILE), text_, "summary.json", "application/json", on_click="ignore", key="json")
    st.download_button(
        text(REQUESTS_FILE),
        lambda: result.requests.to_csv(index=False),
        "requests.csv",
        "text/csv",
        on_click="ignore",
        key="csv",
    )
    st.download_button(
        text(RESULT_FILE), lambda: zipped(result), "result.zip", "application/zip", on_click="ignore", key="zip"
    )


def zipped(result: Result) -> bytes:
    """The files of the result, as the command line writes them, packed. Same result, same bytes."""
    packed = io.BytesIO()
    with TemporaryDirectory(prefix="hbmtwin-") as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        result.write_into(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
