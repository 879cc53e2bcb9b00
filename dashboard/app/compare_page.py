"""Compare: KV policies, or variants of the scenario, on the same traffic; overlaid, and with their differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import PRESETS, CatalogError, Result, Scenario, ScenarioError
from hbmtwin.dashboard.app import error_bars, jobs, knobs
from hbmtwin.dashboard.app.language import IN_ADDRESS, as_text, lang, text
from hbmtwin.dashboard.app.settings_link import command
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.wrong import show_wrong, why_text
from hbmtwin.dashboard.figures import kv_utilization, latency_by_turn, memory_over_time
from hbmtwin.dashboard.server_figure import server_over_time
from hbmtwin.dashboard.verdict import headline, same_traffic
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.variants import parse_variants

TITLE = Phrase("Compare on the same traffic", "相同流量下的对比")
POLICIES = Phrase("KV policies", "KV 策略")
VARIANTS = Phrase("Variants of the settings on the left", "左侧设置的变体")
VARIANTS_HELP = Phrase(
    "One a line, as --variant takes it: small:kv_cache.block_size=16,scheduler.max_num_seqs=8",
    "每行一个，写法同 --variant：small:kv_cache.block_size=16,scheduler.max_num_seqs=8",
)
RUN = Phrase("Compare", "对比")
RUNNING = Phrase("{runs} of {total} runs done, last: {name}", "已完成 {runs} / {total} 个，最近：{name}")
EMPTY = Phrase(
    "Choose what to compare, then start: all of it runs on the same traffic.",
    "选择要对比的内容后开始：全部使用相同流量。",
)
NOTHING = Phrase("Choose a policy, or write a variant.", "请选择策略或填写变体。")
LEFT_OUT = Phrase("{name} is left out: {why}", "{name} 未参与：{why}")
MEMORY = Phrase("Memory over time", "显存随时间")
SERVER = Phrase("Server over time", "服务状态随时间")
LATENCY = Phrase("Latency", "时延")
UTILIZATION = Phrase("KV utilisation", "KV 利用率")
NUMBERS = Phrase("Numbers and differences", "数值与差异")
BASELINE = Phrase("Baseline", "基线")
METRIC = Phrase("metric", "指标")
COMMAND = Phrase("The same as a command line", "等价的命令行")
SLOT = "compare"
GIB = 1 << 30

METRICS: tuple[tuple[Phrase, Callable[[Mapping[str, Any]], float | None]], ...] = (
    (Phrase("completed requests", "已完成请求"), lambda s: s["requests_completed"]),
    (Phrase("dead at (s)", "耗尽时刻（s）"), lambda s: None if s["oom"] is None else s["oom"]["time_s"]),
    (Phrase("preemptions", "抢占次数"), lambda s: s["preemptions"]),
    (Phrase("peak reserved (GiB)", "预留峰值（GiB）"), lambda s: s["peak_reserved_bytes"] / GIB),
    (Phrase("KV utilisation (%)", "KV 利用率（%）"), lambda s: _percent(s["kv_utilization_mean"])),
    (Phrase("internal fragmentation (%)", "内部碎片（%）"), lambda s: _percent(s["internal_fragmentation_mean"])),
    (Phrase("external fragmentation (%)", "显存碎片（%）"), lambda s: _percent(s["external_fragmentation_mean"])),
    (Phrase("TTFT p50 (s)", "TTFT p50（s）"), lambda s: s["ttft_s"]["p50"]),
    (Phrase("TTFT p99 (s)", "TTFT p99（s）"), lambda s: s["ttft_s"]["p99"]),
    (Phrase("TPOT p50 (ms)", "TPOT p50（ms）"), lambda s: _ms(s["tpot_s"]["p50"])),
    (Phrase("TPOT p99 (ms)", "TPOT p99（ms）"), lambda s: _ms(s["tpot_s"]["p99"])),
    (Phrase("end to end p50 (s)", "端到端 p50（s）"), lambda s: s["e2e_s"]["p50"]),
)


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    if scenario is None:
        return
    settings = without_policy(knobs.settings())
    policies = st.pills(
        text(POLICIES), list(PRESETS), selection_mode="multi", default=list(PRESETS), key="policies", **IN_ADDRESS
    )
    typed = st.text_area(
        text(VARIANTS), key="variants", help=text(VARIANTS_HELP), height=80, max_chars=5_000, **IN_ADDRESS
    )
    try:
        variants = parse_variants([line.strip() for line in (typed or "").splitlines() if line.strip()])
        wanted = scenarios_of(settings, policies, variants)
        results = {name: jobs.result_of(one) for name, one in wanted.items()}
    except (ScenarioError, CatalogError) as error:
        show_wrong(error)
        return
    if not wanted:
        st.info(text(NOTHING))
        return
    out = {name: str(jobs.shared().kept.path(jobs.key_of(one))) for name, one in wanted.items()}
    key = "compare " + " ".join(sorted(out.values()))
    left_out: dict[str, str] = st.session_state.get("left-out", {}).get(key, {})
    there = {name: result for name, result in results.items() if result is not None}
    complete = there.keys() | left_out.keys() >= wanted.keys()
    if jobs.asked() and not complete:
        job = {"verb": "compare", "settings": settings, "policies": policies, "variants": variants, "out": out}
        if jobs.start(SLOT, key, job):
            st.rerun()
    jobs.start_button(text(RUN), disabled=complete or jobs.under_way(SLOT, key))
    task = jobs.done(SLOT, key, _progress)
    if task is not None:
        st.session_state.setdefault("left-out", {})[key] = task.outcome["left_out"]
        st.rerun()
    if jobs.busy(SLOT):
        return
    for name, why in left_out.items():
        st.caption(as_text(text(LEFT_OUT, name=name, why=why_text(why))))
    if complete and there:
        _results(there)
    else:
        st.info(text(EMPTY))
    st.markdown(f"**{text(COMMAND)}**")
    more = ["--policies", ",".join(policies) or "none"]
    for name, own in variants.items():
        more += ["--variant", f"{name}:{','.join(own)}"]
    if complete and there and error_bars.wanted(SLOT, there):
        more.append("--error-bars")
    st.code(command("compare", settings, *more), language="bash", wrap_lines=True)


def without_policy(settings: tuple[str, ...]) -> list[str]:
    """Without what a preset would say otherwise."""
    governed = {"kv_cache.preset"} | {key for keys in PRESETS.values() for key in keys}
    return [setting for setting in settings if setting.partition("=")[0].strip() not in governed]


def scenarios_of(settings: list[str], policies: list[str], variants: Mapping[str, list[str]]) -> dict[str, Scenario]:
    """Each as :func:`hbmtwin.api.compare` takes it. Raise what loading raises."""
    loaded = {name: Scenario.load(overrides=settings, preset=name) for name in policies}
    return loaded | {name: Scenario.load(overrides=[*settings, *own]) for name, own in variants.items()}


def difference(a: float, b: float) -> float:
    """None where a reader sees the same number twice: less than a millionth of it."""
    return 0 if abs(a - b) < 1e-6 * max(abs(a), abs(b)) else a - b


def difference_table(summaries: Mapping[str, Mapping[str, Any]], baseline: str) -> pd.DataFrame:
    """A row a metric: each run, then each other's difference from the baseline. A number that is not there is blank."""
    columns: dict[str, list[Any]] = {text(METRIC): [text(label) for label, _ in METRICS]}
    values = {name: [of(summary) for _, of in METRICS] for name, summary in summaries.items()}
    columns |= values
    for name in summaries:
        if name != baseline:
            pairs = zip(values[name], values[baseline], strict=True)
            columns[f"{name} − {baseline}"] = [None if a is None or b is None else difference(a, b) for a, b in pairs]
    return pd.DataFrame(columns)


def _results(results: Mapping[str, Result]) -> None:
    summaries = {name: result.summary for name, result in results.items()}
    died = sum(summary["oom"] is not None for summary in summaries.values())
    tell = st.success if not died else st.warning if died < len(summaries) else st.error
    tell(as_text(headline(summaries, lang())))
    if len(results) > 1:
        st.caption(same_traffic(results, lang()))
    st.subheader(text(NUMBERS))
    baseline = st.selectbox(text(BASELINE), list(results), key="baseline") if len(results) > 1 else next(iter(results))
    table = difference_table(summaries, baseline)
    numbers = st.column_config.NumberColumn(format="%.4g")
    shown = dict.fromkeys(table.columns[1:], numbers)
    st.dataframe(table, hide_index=True, column_config=shown, height="content", placeholder="–")
    error_bars.show(SLOT, results)
    for title, figure in (
        (MEMORY, memory_over_time),
        (SERVER, server_over_time),
        (LATENCY, latency_by_turn),
        (UTILIZATION, kv_utilization),
    ):
        st.subheader(text(title))
        draw(figure(results, lang()), key=figure.__name__)


def _progress(said: Mapping[str, Any]) -> tuple[float, str]:
    return said["runs"] / said["total"], text(RUNNING, **said)


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
