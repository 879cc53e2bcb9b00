"""The script that Streamlit runs for each click of each session: `hbmtwin dashboard` starts it."""

from __future__ import annotations

import streamlit as st

from hbmtwin.dashboard.app import (
    capacity_page,
    compare_page,
    explain_page,
    fit_page,
    language,
    memory_map_page,
    validate_page,
    what_if_page,
)
from hbmtwin.sim.phrases import Phrase

PAGES = {
    "": (Phrase("Fit", "显存规划"), fit_page.show),
    "what-if": (Phrase("What if", "假设分析"), what_if_page.show),
    "memory-map": (Phrase("Memory map", "显存地图"), memory_map_page.show),
    "compare": (Phrase("Compare", "对比"), compare_page.show),
    "capacity": (Phrase("Capacity", "容量"), capacity_page.show),
    "explain": (Phrase("Explain", "日志诊断"), explain_page.show),
    "validate": (Phrase("Validate", "验证"), validate_page.show),
}  # by their place in the address
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#0072B2"/>'
    '<path d="M3 4h4v3H3zM8 4h5v3H8zM3 8h7v4H3z" fill="#FFFFFF"/><path d="M11 8h2v4h-2z" fill="#E69F00"/></svg>'
)
"""Of our own: one by name would be asked of a server of Google's."""


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="hbmtwin", page_icon=ICON, layout="wide")
    language.choose()
    pages = {
        path: st.Page(show, title=language.text(title), url_path=path or None, default=not path)
        for path, (title, show) in PAGES.items()
    }
    st.session_state["pages"] = pages
    st.navigation(list(pages.values())).run()


main()
