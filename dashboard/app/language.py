"""The language of the screens: chosen in the sidebar, carried in the address as ``lang=zh``."""

from __future__ import annotations

import streamlit as st

from hbmtwin.sim.phrases import LANGUAGES, Lang, Phrase, Said

KEY = "lang"
NAMES: dict[Lang, str] = {"en": "English", "zh": "中文"}
LANGUAGE = Phrase("Language", "语言")


def choose() -> Lang:
    """Draw the switch, and return the language."""
    lang: Lang = st.sidebar.segmented_control(
        "Language · 语言",
        LANGUAGES,
        default="en",
        format_func=NAMES.__getitem__,
        key=KEY,
        required=True,
        bind="query-params",
        persist_state="session",
    )
    return lang


def lang() -> Lang:
    """The language in use."""
    chosen: Lang = st.session_state.get(KEY) or "en"
    return chosen


def text(said: Phrase | Said, **values: object) -> str:
    """In the language in use."""
    return (Said.of(said, **values) if isinstance(said, Phrase) else said).text(lang())
