"""Fit: a model, a device and an engine's flags; where the memory goes, whether it starts, what would help.

The knobs are vLLM's flags under their own names, and stand under these in the address bar. What is left empty is the
engine's default. The answer is worked out anew at each change: it takes milliseconds, so it stands in the script.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import CatalogError, Fit, FitError, devices, fit, models
from hbmtwin.dashboard.app.breakdown_figure import breakdown_bar
from hbmtwin.dashboard.app.language import IN_ADDRESS, lang, text
from hbmtwin.dashboard.app.theme import draw
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.sim.fit import words
from hbmtwin.sim.fit.what_is_kv import WHAT_IS_KV
from hbmtwin.sim.phrases import Phrase

TITLE = Phrase("Will it start, and what takes the memory?", "能否启动，显存用在哪里？")
MODEL = Phrase("Model", "模型")
DEVICE = Phrase("Device", "设备")
ENGINE = Phrase("Engine", "推理引擎")
BY_DEVICE = Phrase("by device", "按设备")
DEFAULT = Phrase("default", "默认")
RANKS = Phrase("Ranks", "并行")
LIMITS = Phrase("Lengths and batch", "长度与批")
MEMORY = Phrase("Memory", "显存")
FLAGS = Phrase("More", "更多")
ITEM = Phrase("what", "项目")
GIB_COLUMN = Phrase("GiB", "GiB")
KNOWN = Phrase("how it is known", "依据")
COMMAND = Phrase("The same as a command line", "等价的命令行")
DOWNLOAD = Phrase("Download the answer (JSON)", "下载结果（JSON）")
AS_TOKENS = Phrase("KV cache (tokens)", "KV 缓存（token）")
CONCURRENCY = Phrase("Requests of {length:,} tokens", "{length:,} token 请求的并发")
BLOCKS = Phrase("Blocks", "块数")
WHAT_BLOCKS = Phrase(
    "Of {block} tokens each. Below: from the worst to the best end of the estimates.",
    "每块 {block} 个 token。下方为估算误差两端对应的范围。",
)
LONGEST = Phrase("Longest request (tokens)", "最长请求（token）")
QUANTIZATIONS = ("", "fp8", "ascend", "awq", "gptq")
KV_DTYPES = ("", "auto", "fp8", "int8")
ENGINES = ("", "vllm", "vllm-ascend", "sglang", "mindie", "tensorrt-llm")
GIB = 1 << 30


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    options = _knobs()
    try:
        answer = fit(**options)
    except (FitError, CatalogError) as error:
        show_wrong(error)
        return
    _verdict(answer)
    _figures(answer)
    draw(breakdown_bar(answer.budget, lang()), key="breakdown")
    left, right = st.columns([3, 2])
    with left:
        _lines(answer)
    with right:
        _log(answer)
    _advice(answer)
    _share(answer, options)


def _knobs() -> dict[str, Any]:
    """The options of ``fit`` that somebody set."""
    bar = st.sidebar
    said: dict[str, Any] = {
        "model": bar.selectbox(text(MODEL), models(), index=models().index("llama-2-7b"), key="model", **IN_ADDRESS),
        "device": bar.selectbox(
            text(DEVICE), devices(), index=devices().index("ascend-910b4"), key="device", **IN_ADDRESS
        ),
        "engine": bar.selectbox(
            text(ENGINE), ENGINES, format_func=lambda name: name or text(BY_DEVICE), key="engine", **IN_ADDRESS
        ),
    }
    with bar.expander(text(LIMITS), expanded=True):
        said["max_model_len"] = _number("max-model-len", step=1024)
        said["max_num_seqs"] = _number("max-num-seqs")
        said["max_num_batched_tokens"] = _number("max-num-batched-tokens", step=1024)
    with bar.expander(text(RANKS), expanded=True):
        said["tensor_parallel_size"] = _number("tensor-parallel-size")
        said["pipeline_parallel_size"] = _number("pipeline-parallel-size")
        said["data_parallel_size"] = _number("data-parallel-size")
    with bar.expander(text(MEMORY), expanded=True):
        fraction = "mem-fraction-static" if said["engine"] == "sglang" else "gpu-memory-utilization"
        said[fraction.replace("-", "_")] = _share_of_device(fraction)
        said["kv_cache_dtype"] = _choice("kv-cache-dtype", KV_DTYPES)
        said["quantization"] = _choice("quantization", QUANTIZATIONS)
    with bar.expander(text(FLAGS)):
        said["block_size"] = _number("block-size")
        said["num_speculative_tokens"] = _number("num-speculative-tokens", least=0)
        said["enforce_eager"] = st.toggle("enforce-eager", key="enforce-eager", **IN_ADDRESS) or None
        said["enable_expert_parallel"] = (
            st.toggle("enable-expert-parallel", key="enable-expert-parallel", **IN_ADDRESS) or None
        )
    return {name: value for name, value in said.items() if value not in (None, "")}


def _number(flag: str, *, step: int = 1, least: int = 1) -> int | None:
    value: int | None = st.number_input(
        flag, min_value=least, value=None, step=step, placeholder=text(DEFAULT), key=flag, **IN_ADDRESS
    )
    return value


def _share_of_device(flag: str) -> float | None:
    value: float | None = st.number_input(
        flag,
        min_value=0.05,
        max_value=1.0,
        value=None,
        step=0.01,
        format="%.2f",
        placeholder=text(DEFAULT),
        key=flag,
        **IN_ADDRESS,
    )
    return value


def _choice(flag: str, names: tuple[str, ...]) -> str:
    chosen: str = st.selectbox(flag, names, format_func=lambda name: name or text(DEFAULT), key=flag, **IN_ADDRESS)
    return chosen


def _verdict(answer: Fit) -> None:
    tell = st.error if not answer.fits else st.warning if answer.may_not_start is not None else st.success
    tell("**" + text(words.title(answer)) + "**\n\n" + "\n\n".join(text(said) for said in words.verdict(answer)))


def _figures(answer: Fit) -> None:
    b = answer.budget
    four = st.columns(4)
    low, high = answer.num_blocks_range
    ranged = f"{low:,} – {high:,}" if low != high else None
    four[0].metric(text(AS_TOKENS), f"{b.kv_tokens:,}", **_PLAIN)
    four[1].metric(text(CONCURRENCY, length=b.max_model_len), f"{b.max_concurrency:.2f}", **_PLAIN)
    four[2].metric(text(BLOCKS), f"{b.num_blocks:,}", ranged, help=text(WHAT_BLOCKS, block=b.block_size), **_PLAIN)
    four[3].metric(text(LONGEST), f"{answer.max_model_len_that_fits:,}", **_PLAIN)


_PLAIN: dict[str, Any] = {"delta_color": "off", "delta_arrow": "off", "border": True, "height": "stretch"}


def _lines(answer: Fit) -> None:
    lines = [line for line in answer.budget.lines if line.bytes or line.high]
    table = pd.DataFrame(
        {
            text(ITEM): [text(words.label(line.item)) for line in lines] + [text(words.DEVICE_SUM)],
            text(GIB_COLUMN): [line.bytes / GIB for line in lines] + [answer.budget.total_bytes / GIB],
            text(KNOWN): [text(words.how_known(line)) for line in lines] + [""],
        }
    )
    st.dataframe(
        table,
        hide_index=True,
        column_config={text(GIB_COLUMN): st.column_config.NumberColumn(format="%.2f")},
    )
    st.caption(text(WHAT_IS_KV))


def _log(answer: Fit) -> None:
    if answer.boot_lines:
        st.markdown(f"**{text(words.LOG)}**")
        st.code("\n".join(answer.boot_lines), language=None, wrap_lines=True)
    with st.expander(text(words.HOW)):
        for said in words.formula(answer):
            st.markdown(text(said))


def _advice(answer: Fit) -> None:
    for warning in answer.warnings:
        if warning != answer.refused:
            st.warning(text(warning))
    if answer.fits:
        return
    advised = answer.advice or answer.advised.pairs
    heading = words.SMALLEST if answer.advice else words.TOGETHER if advised else words.NOTHING
    st.markdown(f"**{text(heading)}**")
    for advice in advised:
        st.markdown(f"- {text(advice.change)} — {text(words.result(advice))}")


def _share(answer: Fit, options: dict[str, Any]) -> None:
    st.markdown(f"**{text(COMMAND)}**")
    st.code(fit_command(options), language="bash", wrap_lines=True)
    record = json.dumps(answer.to_dict(lang()), indent=2, ensure_ascii=False)
    st.download_button(text(DOWNLOAD), record, file_name="fit.json", mime="application/json", on_click="ignore")


def fit_command(options: dict[str, Any]) -> str:
    """The command line that asks the same."""
    parts = ["hbmtwin", "fit"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        parts += [flag] if value is True else [flag, str(value)]
    return shlex.join(parts)
