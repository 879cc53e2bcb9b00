"""Validate: predicted against measured, from reports of `hbmtwin validate run`; and the calibration in use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import streamlit as st

from hbmtwin.dashboard.app import finished, knobs
from hbmtwin.dashboard.app.finished import Finished
from hbmtwin.dashboard.app.language import as_text, basis_of, lang, text
from hbmtwin.dashboard.app.overlay_figure import memory_overlay, times_overlay
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.validation_tables import (
    COLUMNS,
    coefficients_table,
    errors_table,
    memory_table,
    validity_table,
)
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
TIMES_ONLY = Phrase(
    "Times only: predicted {predicted:,.3f} s and measured {measured:,.3f} s for {steps:,} steps. They are "
    "reported, and judged by nobody.",
    "仅有时间：{steps:,} 步共预测 {predicted:,.3f} s，实测 {measured:,.3f} s。时间只报告，不作判断。",
)
KERNELS_ONLY = Phrase("Times only, which are reported and judged by nobody.", "仅有时间：时间只报告，不作判断。")
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
OUTSIDE = Phrase(
    "A step outside of these ranges is answered all the same, and told in the run's notes.",
    "超出此范围的步仍会给出结果，并在运行说明中指出。",
)
HELD_OUT = Phrase(
    "On points that the fit did not see: {percent:.1f} % off in the mean.",
    "对拟合未用的测点，平均误差 {percent:.1f} %。",
)
MEMORY_FIGURES = Phrase("Memory", "显存")
BESIDE = {
    "emulated": Phrase("beside the real torch_npu on an emulated driver", "对照：模拟驱动上的真实 torch_npu"),
    "cpu": Phrase("beside a decoder on this CPU", "对照：CPU 上的 decoder"),
    "cuda": Phrase("beside a CUDA device", "对照：CUDA 设备"),
    "npu": Phrase("beside an NPU", "对照：NPU"),
}
NO_MEMORY = Phrase(
    "Memory was not replayed: a CPU has no caching allocator to ask. `--backend emulated` asks the real torch_npu.",
    "未对照显存：CPU 没有缓存分配器。`--backend emulated` 可对照真实 torch_npu。",
)
NO_TIMES = Phrase(
    "No times: an emulated driver computes nothing. `--backend cpu` measures whole steps on a decoder.",
    "没有时间：模拟驱动不做计算。`--backend cpu` 可在 decoder 上实测整步时间。",
)
OPEN = Phrase("{name}: {run} ({backend})", "{name}：{run}（{backend}）")


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
    if profile.cross_validated_percent is not None:
        st.markdown(text(HELD_OUT, percent=profile.cross_validated_percent))
    st.markdown(f"**{text(COEFFICIENTS)}**")
    st.table(coefficients_table(profile.coefficients), hide_index=True)
    if profile.memory:
        st.markdown(f"**{text(MEMORY_FIGURES)}**")
        st.table(memory_table(profile.memory), hide_index=True)
    if profile.validity:
        st.markdown(f"**{text(RANGE)}**")
        st.table(validity_table(profile.validity), hide_index=True)
        st.caption(text(OUTSIDE))


def _report() -> dict[str, Any] | None:
    """The report that is open: an uploaded one, or one of the directories."""
    file = st.file_uploader(text(UPLOAD), type=["json"], key="report", max_upload_size=finished.MOST_BYTES >> 20)
    if file is not None:
        if file.size > finished.MOST_BYTES:
            st.error(as_text(text(TOO_LARGE, name=file.name)))
            return None
        told = read_report(file.getvalue())
        if told is None:
            st.error(text(NO_REPORT, name=as_text(file.name)))
        return told
    found = finished.of_kind("validate")
    if not found:
        return None
    at = st.selectbox(text(REPORT), range(len(found)), format_func=lambda i: _name(found[i]), key="which")
    told = read_report(json.dumps(found[at].told).encode())
    if told is None:
        st.error(text(NO_REPORT, name=as_text(found[at].name)))
    return told


def read_report(content: bytes) -> dict[str, Any] | None:
    """A report of ``validate run``; None for anything else, however it is made."""
    try:
        told = json.loads(content)
        for part, kind in (("memory", memory_overlay), ("step_times", times_overlay), ("kernels", times_overlay)):
            if told.get(part) is not None:
                kind(told[part], "en")
                errors_table(told[part]["errors"])
        if told.get("step_times") is not None:
            text(TIMES_ONLY, **_totals(told["step_times"]))
        return {**told, "run": str(told["run"]), "backend": str(told["backend"]), "agrees": bool(told["agrees"])}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return None


def _show(told: Mapping[str, Any]) -> None:
    memory, steps = told["memory"], told.get("step_times")
    beside = BESIDE.get(told["backend"])
    st.markdown(f"**{as_text(told['run'])}** — {as_text(told['backend']) if beside is None else text(beside)}")
    if memory is not None:
        (st.success if told["agrees"] else st.error)(
            text(AGREES, numbers=int(memory["numbers_compared"])) if told["agrees"] else text(DIFFERS)
        )
    elif steps is not None:
        st.info(text(TIMES_ONLY, **_totals(steps)))
    else:
        st.info(text(KERNELS_ONLY))
    if memory is not None:
        st.subheader(text(MEMORY))
        draw(memory_overlay(memory, lang()), key="memory")
        _errors(memory["errors"])
    elif told["backend"] == "cpu":
        st.caption(text(NO_MEMORY))
    for part, title in (("step_times", STEPS), ("kernels", KERNELS)):
        if (times := told.get(part)) is None:
            continue
        st.subheader(text(title))
        on = {"measured": times["measured_on"], "predicted": times["predicted_for"], "basis": basis_of(times["basis"])}
        st.caption(as_text(text(ON, **on)))
        draw(times_overlay(times, lang()), key=part)
        _errors(times["errors"])
    if told["backend"] == "emulated":
        st.caption(text(NO_TIMES))


def _totals(times: Mapping[str, Any]) -> dict[str, float]:
    predicted_s, measured_s = (times[f"total_{of}_ns"] / 1e9 for of in ("predicted", "measured"))
    return {"steps": times["steps_of_the_run"], "predicted": predicted_s, "measured": measured_s}


def _errors(rows: list[dict[str, Any]]) -> None:
    st.markdown(f"**{text(ERRORS)}**")
    percents = [text(title) for name, title in COLUMNS.items() if name.endswith("_percent")]
    config = dict.fromkeys(percents, st.column_config.NumberColumn(format="%.2f"))
    st.dataframe(errors_table(rows), hide_index=True, placeholder="–", column_config=config)


def _name(report: Finished) -> str:
    told = report.told
    if not {"run", "backend"} <= told.keys():
        return report.name
    return text(OPEN, name=report.name, run=told["run"], backend=told["backend"])
