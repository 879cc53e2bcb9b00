"""Figures on a page in the light or in the dark: those of the reports, with the page's own paper and ink."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from hbmtwin.dashboard.palette import INK

DARK_INK, DARK_GRID, DARK_AXIS = "#E6E6E6", "#3A3F4B", "#8A8F99"
CLEAR = "rgba(0,0,0,0)"
CONFIG = {"displaylogo": False, "responsive": True}


def is_dark() -> bool:
    """Whether this session's browser shows the dark theme."""
    return st.context.theme.type == "dark"


def in_theme(figure: go.Figure, dark: bool) -> go.Figure:
    """The figure on the page's own paper; in the dark with light letters and dim lines."""
    figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR)
    if not dark:
        return figure
    figure.update_layout(font_color=DARK_INK, legend_font_color=DARK_INK, title_font_color=DARK_INK)
    figure.update_xaxes(gridcolor=DARK_GRID, linecolor=DARK_AXIS, tickcolor=DARK_AXIS)
    figure.update_yaxes(gridcolor=DARK_GRID, linecolor=DARK_AXIS, tickcolor=DARK_AXIS)
    figure.for_each_annotation(
        lambda note: note.update(font_color=DARK_INK) if note.font.color in (None, INK) else None
    )
    return figure


def draw(figure: go.Figure, key: str) -> None:
    """Draw it where the script stands, as wide as the page."""
    st.plotly_chart(in_theme(figure, is_dark()), theme=None, key=key, config=CONFIG)


def draw_brushed(figure: go.Figure, key: str) -> tuple[float, float] | None:
    """Draw it, and return the stretch of the horizontal axis that somebody dragged over; None without one."""
    event = st.plotly_chart(
        in_theme(figure, is_dark()), theme=None, key=key, config=CONFIG, on_select="rerun", selection_mode="box"
    )
    boxes = event["selection"]["box"]
    if not boxes:
        return None
    begin, end = sorted(map(float, boxes[-1]["x"]))
    return begin, end
