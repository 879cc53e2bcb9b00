"""The language of the screens: chosen in the sidebar, carried in the address as ``lang=zh``."""

from __future__ import annotations

from typing import Any

import streamlit as st

from hbmtwin.sim.phrases import LANGUAGES, Lang, Phrase, Said

KEY = "lang"
IN_ADDRESS: dict[str, Any] = {"bind": "query-params", "persist_state": "session"}
"""Of a widget whose value stands in the address under its key, so that a link shares it."""
DEFAULT_BASIS = Phrase("default, uncalibrated", "默认值，未校准")
NAMES: dict[Lang, str] = {"en": "English", "zh": "中文"}
FRAMEWORK_IN_CHINESE = {
    "[data-testid=stFileUploaderDropzone] button p": "上传文件",
    "[data-testid=stFileUploaderDropzoneInstructions] span": "或拖放到此处",
    "[data-testid=stFileUploaderFileErrorMessage]": "文件过大，或类型不符",
    "[data-testid=stTextInput] [data-testid=InputInstructions] span:first-child": "按 Enter 应用",
    "[data-testid=stNumberInput] [data-testid=InputInstructions] span:first-child": "按 Enter 应用",
    "[data-testid=stTextArea] [data-testid=InputInstructions] span:first-child": "按 Ctrl+Enter 应用",
}
"""What Streamlit itself says, in English and without an option: by where it stands, and what stands there instead."""


def choose() -> Lang:
    """Draw the switch, and return the language; the address says it where it is not English."""
    if KEY not in st.session_state:
        asked = st.query_params.get(KEY)
        st.session_state[KEY] = asked if asked in LANGUAGES else LANGUAGES[0]
    chosen = (
        st.sidebar.segmented_control(
            "Language · 语言", LANGUAGES, format_func=NAMES.__getitem__, key=KEY, required=True, persist_state="session"
        )
        or LANGUAGES[0]
    )
    if chosen != LANGUAGES[0]:
        st.query_params[KEY] = chosen
        st.html(f"<style>{_instead()}</style>")
    elif KEY in st.query_params:
        del st.query_params[KEY]
    return chosen


def _instead() -> str:
    """Style sheet that hides those words, and writes the others at their place."""
    return "".join(
        f'{where} {{ font-size: 0 !important }} {where}::after {{ content: "{words}"; font-size: 0.875rem }} '
        for where, words in FRAMEWORK_IN_CHINESE.items()
    )


def lang() -> Lang:
    """The language in use."""
    chosen: Lang = st.session_state.get(KEY) or "en"
    return chosen


def text(said: Phrase | Said, /, **values: object) -> str:
    """In the language in use."""
    return (Said.of(said, **values) if isinstance(said, Phrase) else said).text(lang())


def basis_of(basis: str) -> str:
    """Where times come from, as results have it in English."""
    return text(DEFAULT_BASIS) if basis == DEFAULT_BASIS.en else basis


def as_text(written: str) -> str:
    """Markdown of a sentence that may quote a log, a file or an address: no letter of it means anything."""
    return "".join("\\" + letter if letter in "\\`*_{}[]()#+-!|<>$~:" else letter for letter in written)
