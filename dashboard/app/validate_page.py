"""Validate: predicted against measured, from reports of `hbmtwin validate run`; and the calibration in use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.dashboard.app import finished, knobs
from hbmtwin.dashboard.app.language import as_text, lang, text
from hbmtwin.dashboard.app.overlay_figure import memory_overlay, times_overlay
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.sim.calibration import profile_of
from hbmtwin.sim.phrases import Phrase

TITLE = Phrase("How far can it be trusted?", "结果可信度")
REPORT = Phrase("Report", "报告")
UPLOAD = Phrase(
    "validate_run.json of `hbmtwin validate run --out`", "`hbmtwin validate run --out` 的 validate_run.json"
)
NONE = Phrase(
    "No report is open. Make one: run with `--set results.steps=true --set results.memory_trace=true --out DIR`, then "
    "`hbmtwin validate run DIR --backend emulated --out REPORT` (memory, beside the real torch_npu; anywhere), or "
    "`--backend npu`, `cuda`, `cpu` for times. Then open it here, or start with `hbmtwin dashboard REPORT`.",
    "尚未打开报告。先用 `--set results.steps=true --set results.memory_trace=true --out DIR` 运行，再执行 "
    "`hbmtwin validate run DIR --backend emulated --out REPORT`（与真实 torch_npu 对照显存，任何机器均可），"
    "或用 `--backend npu`、`cuda`、`cpu` 对照时间。然后在此上传，或以 `hbmtwin dashboard REPORT` 启动。",
)
NO_REPORT = Phrase("{name} is no report of `hbmtwin validate run`", "{name} 不是 `hbmtwin validate run` 的报告")
TOO_LARGE = Phrase("{name} is larger than 64 MiB", "{name} 超过 64 MiB")
AGREES = Phrase("No difference in memory: {numbers:,} numbers compared", "显存无差异：共比较 {numbers:,} 个数值")
DIFFERS = Phrase("Memory differs from the real one", "显存与真实结果不一致")
TIMES_ONLY = Phrase("Times are reported, not judged", "时间仅报告，不作判断")
MEMORY, STEPS, KERNELS = (
    Phrase("Memory", "显存"),
    Phrase("Whole steps", "整步时间"),
    Phrase("Attention", "attention 时间"),
)
ERRORS = Phrase("Errors", "误差")
ON = Phrase(
    "Measured on {measured}; predicted for {predicted} ({basis}).", "实测：{measured}；预测：{predicted}（{basis}）。"
)
CALIBRATION = Phrase("Calibration of the settings on the left", "左侧设置所用的校准")
DEFAULT = Phrase(
    "None: times come from the catalog's figures, *default, uncalibrated*. A profile of your own: `hbmtwin bench "
    "kernels`, then `hbmtwin calibrate`, then `calibration.profile`.",
    "无：时间来自目录默认值（未校准）。自行校准：`hbmtwin bench kernels`，`hbmtwin calibrate`，"
    "再设置 `calibration.profile`。",
)
MEASURED_ON = Phrase(
    "{profile}, measured on {device} ({made}): {source}", "{profile}，测于 {device}（{made}）：{source}"
)
COEFFICIENTS, RANGE = Phrase("Figures", "系数"), Phrase("Measured for", "测量范围")
COLUMNS = {
    "quantity": Phrase("quantity", "量"),
    "steps": Phrase("steps", "步数"),
    "differing": Phrase("that differ", "不一致"),
    "mape_percent": Phrase("MAPE (%)", "MAPE（%）"),
    "p50_percent": Phrase("p50 (%)", "p50（%）"),
    "p95_percent": Phrase("p95 (%)", "p95（%）"),
    "worst_step": Phrase("worst step", "最差步"),
}


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    scenario = knobs.choose()
    told = _report()
    if told is None:
        st.info(text(NONE))
    else:
        _show(told)
    st.subheader(text(CALIBRATION))
    profile = profile_of(scenario) if scenario is not None else None
    if profile is None:
        st.markdown(text(DEFAULT))
        return
    st.markdown(
        as_text(
            text(MEASURED_ON, profile=profile.name, device=profile.device, made=profile.made, source=profile.source)
        )
    )
    left, right = st.columns(2)
    left.markdown(f"**{text(COEFFICIENTS)}**")
    left.dataframe(pd.DataFrame({name: c._asdict() for name, c in profile.coefficients.items()}).T)
    right.markdown(f"**{text(RANGE)}**")
    right.dataframe(pd.DataFrame({name: [f"{v:,}" for v in span] for name, span in profile.validity.items()}).T)


def _report() -> dict[str, Any] | None:
    """The report that is open: an uploaded one, or one of the directories."""
    file = st.file_uploader(text(UPLOAD), type=["json"], key="report", max_upload_size=finished.MOST_BYTES >> 20)
    if file is not None:
        if file.size > finished.MOST_BYTES:
            st.error(as_text(text(TOO_LARGE, name=file.name)))
            return None
        told = read_report(file.getvalue())
        if told is None:
            st.error(as_text(text(NO_REPORT, name=file.name)))
        return told
    found = finished.of_kind("validate")
    if not found:
        return None
    at = st.selectbox(text(REPORT), range(len(found)), format_func=lambda i: found[i].name, key="which")
    told = read_report(json.dumps(found[at].told).encode())
    if told is None:
        st.error(as_text(text(NO_REPORT, name=found[at].name)))
    return told


def read_report(content: bytes) -> dict[str, Any] | None:
    """A report of ``validate run``; None for anything else, however it is made."""
    try:
        told = json.loads(content)
        for part, kind in (("memory", memory_overlay), ("step_times", times_overlay), ("kernels", times_overlay)):
            if told.get(part) is not None:
                kind(told[part], "en")
                pd.DataFrame(told[part]["errors"])[list(COLUMNS)]
        return {**told, "run": str(told["run"]), "backend": str(told["backend"]), "agrees": bool(told["agrees"])}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return None


def _show(told: Mapping[str, Any]) -> None:
    memory = told["memory"]
    st.markdown(f"**{as_text(told['run'])}** — {as_text(told['backend'])}")
    if memory is None:
        st.info(text(TIMES_ONLY))
    elif told["agrees"]:
        st.success(text(AGREES, numbers=int(memory["numbers_compared"])))
    else:
        st.error(text(DIFFERS))
    if memory is not None:
        st.subheader(text(MEMORY))
        draw(memory_overlay(memory, lang()), key="memory")
        _errors(memory["errors"])
    for part, title in (("step_times", STEPS), ("kernels", KERNELS)):
        if (times := told.get(part)) is None:
            continue
        st.subheader(text(title))
        on = {"measured": times["measured_on"], "predicted": times["predicted_for"], "basis": times["basis"]}
        st.caption(as_text(text(ON, **on)))
        draw(times_overlay(times, lang()), key=part)
        _errors(times["errors"])


def _errors(rows: list[dict[str, Any]]) -> None:
    st.markdown(f"**{text(ERRORS)}**")
    table = pd.DataFrame(rows)[list(COLUMNS)]
    st.dataframe(table.rename(columns={name: text(label) for name, label in COLUMNS.items()}), hide_index=True)
