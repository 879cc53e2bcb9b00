"""The script that Streamlit runs for each click of each session: `hbmtwin dashboard` starts it."""

from __future__ import annotations

import streamlit as st

from hbmtwin.dashboard.app import compare_page, fit_page, language, memory_map_page, what_if_page
from hbmtwin.sim.phrases import Phrase

FIT = Phrase("Fit", "显存规划")
WHAT_IF = Phrase("What if", "假设分析")
MEMORY_MAP = Phrase("Memory map", "显存地图")
COMPARE = Phrase("Compare", "对比")


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="hbmtwin", page_icon="🧮", layout="wide")
    language.choose()
    pages = [
        st.Page(fit_page.show, title=language.text(FIT), default=True),
        st.Page(what_if_page.show, title=language.text(WHAT_IF), url_path="what-if"),
        st.Page(memory_map_page.show, title=language.text(MEMORY_MAP), url_path="memory-map"),
        st.Page(compare_page.show, title=language.text(COMPARE), url_path="compare"),
    ]
    st.navigation(pages).run()


main()
