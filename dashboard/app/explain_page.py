"""Explain: paste a log or an error; what it says, why it happened, what helps and what does not."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from hbmtwin.api import Explanation, explain_bytes
from hbmtwin.dashboard.app.knobs import take
from hbmtwin.dashboard.app.language import lang, text
from hbmtwin.sim.explain import words
from hbmtwin.sim.phrases import Phrase, Said

TITLE = Phrase("Why did it die?", "为什么显存不足？")
EMPTY = Phrase(
    "Paste a log, an error message, `npu-smi info` or `nvidia-smi` here. It is read on this machine, and nothing of it "
    "is sent or run.",
    "将日志、报错、`npu-smi info` 或 `nvidia-smi` 的输出粘贴到这里。内容只在本机读取，不会发送，也不会执行。",
)
FILE = Phrase("or a file", "或上传文件")
MOST_LETTERS = 1_000_000
UNKNOWN = Phrase("Nothing of it is of a form that is known here.", "没有识别出已知格式的内容。")
SCENARIO_FILE = Phrase("What it tells, as a scenario (TOML)", "文本内容对应的场景（TOML）")
COMMAND = Phrase("Go on with", "下一步")
EXAMPLE = Phrase("For example", "示例")
EXAMPLE_TEXT = (
    "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 54.10 GiB already "
    "allocated; 54.30 GiB current active; 1.72 GiB free; 58.90 GiB reserved in total by PyTorch) If reserved memory is "
    ">> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
