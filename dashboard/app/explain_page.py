"""Explain: paste a log or an error; what it says, why it happened, what helps and what does not."""

from __future__ import annotations

import json
from collections.abc import Iterable

import streamlit as st

from hbmtwin.api import Explanation
from hbmtwin.dashboard.app.knobs import settings_of_file, take
from hbmtwin.dashboard.app.language import as_text, lang, text
from hbmtwin.sim.explain import words
from hbmtwin.sim.explain.decode import decode
from hbmtwin.sim.explain.explaining import explain_decoded
from hbmtwin.sim.explain.judge import Judgement, cause_line
from hbmtwin.sim.phrases import Phrase, Said

TITLE = Phrase("Why did it die?", "为什么显存不足？")
PASTE = Phrase("A log, an error message, npu-smi info or nvidia-smi", "日志、报错、npu-smi info 或 nvidia-smi 的输出")
EMPTY = Phrase(
    "It is read on this machine; nothing of it is sent anywhere, and nothing is run.",
    "内容只在本机读取，不会发送到任何地方，也不会执行。",
)
READ = Phrase("Explain", "解释")
FILE = Phrase("or a file", "或上传文件（最大 64 MiB）")
EXAMPLE = Phrase("An example", "示例")
SCENARIO_FILE = Phrase("What it tells, as a scenario (TOML)", "文本内容对应的场景（TOML）")
USE = Phrase("Take it to What if", "带入“假设分析”")
JSON_FILE = Phrase("Explanation (JSON)", "解释（JSON）")
MOST_JUDGEMENTS = 3
MOST_LETTERS = 2_000_000
MOST_UPLOAD_MB = 64
"""Of a log, of whose begin and end as much is read as on a command line."""
EXAMPLE_TEXT = (
    "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 54.10 GiB already "
    "allocated; 54.30 GiB current active; 1.72 GiB free; 58.90 GiB reserved in total by PyTorch) If reserved memory is "
    ">> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
PASTED = "pasted"


def show() -> None:
    """Draw the page."""
    st.title(text(TITLE))
    typed = st.text_area(text(PASTE), key=PASTED, height=220, max_chars=MOST_LETTERS, persist_state="session")
    with st.container(horizontal=True):
        st.button(text(READ), type="primary", key="read")
        st.button(text(EXAMPLE), key="example", on_click=_example)
    file = st.file_uploader(text(FILE), key="log", max_upload_size=MOST_UPLOAD_MB)
    content = file.getvalue() if file is not None else (typed or "").encode()
    if not content.strip():
        st.info(text(EMPTY))
        return
    _explanation(explain_decoded(decode(content), lang()))


def _example() -> None:
    st.session_state[PASTED] = EXAMPLE_TEXT


def _explanation(told: Explanation) -> None:
    tell = st.error if told.judgements or not told.understood else st.success
    tell(f"**{_sentence(told.verdict)}**")
    if told.direction is not None:
        st.warning(_sentence(told.direction))
    _list(words.SAYS, told.says)
    for at, judgement in enumerate(told.judgements[:MOST_JUDGEMENTS]):
        _judgement(judgement, first=at == 0, tried=told.tried)
    if (more := len(told.judgements) - MOST_JUDGEMENTS) > 0:
        st.caption(text(words.MORE, count=more))
    _list(words.BOOKS, told.arithmetic)
    if not told.judgements:
        _list(words.CHECKED, told.tried)
    _list(words.NOT_READ, told.not_read)
    _go_on(told)


def _judgement(judgement: Judgement, *, first: bool, tried: Iterable[Said]) -> None:
    if not first:
        st.error(text(words.ANOTHER, line=judgement.line, said=judgement.said))
    _list(words.WHY, (cause_line(judgement), *judgement.arithmetic))
    if first and judgement.when == "start_up":
        _list(words.TRIED, tried, ":material/check: ")
    _list(words.HELPS, judgement.helps, ":material/check: ")
    _list(words.USELESS, judgement.does_not_help, ":material/close: ")


def _go_on(told: Explanation) -> None:
    _list(words.GO_ON, told.doubts)
    if told.fit_command:
        st.code(told.fit_command, language="bash", wrap_lines=True)
    record = json.dumps(told.to_dict(), indent=2, ensure_ascii=False)
    with st.container(horizontal=True):
        st.download_button(
            text(JSON_FILE), record, "explanation.json", "application/json", on_click="ignore", key="json"
        )
        if not told.scenario:
            return
        st.download_button(
            text(SCENARIO_FILE), told.scenario, "scenario.toml", "application/toml", on_click="ignore", key="toml"
        )
        if st.button(text(USE), key="use"):
            take(settings_of_file("scenario.toml", told.scenario.encode()))
            st.switch_page(st.session_state["pages"]["what-if"])


def _list(heading: Phrase, said: Iterable[Said], mark: str = "") -> None:
    if sentences := tuple(said):
        st.markdown(f"**{text(heading)}**\n\n" + "\n".join(f"- {mark}{as_text(text(one))}" for one in sentences))


def _sentence(said: Said) -> str:
    written = text(said)
    return as_text(written[:1].upper() + written[1:] + ("." if lang() == "en" else "。"))
