"""Figures on a page in the light or in the dark: those of the reports, with the page's own paper and ink."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from hbmtwin.dashboard.night import at_night
from hbmtwin.dashboard.palette import INK, NIGHT, PAPER

CLEAR = "rgba(0,0,0,0)"
CONFIG = {"displaylogo": False, "responsive": True}


def is_dark() -> bool:
    """Whether this session's browser shows the dark theme."""
    return st.context.theme.type == "dark"


def in_theme(figure: go.Figure, dark: bool) -> go.Figure:
    """The figure itself, on the page's own paper and in the colours of the day or the night."""
    if dark:
        at_night(figure)
    else:
        figure.update_layout(hoverlabel={"bgcolor": PAPER, "font": {"color": INK}})
    figure.update_layout(paper_bgcolor=CLEAR)
    if figure.layout.plot_bgcolor in (PAPER, NIGHT[PAPER]):  # another one says something: a cell without a number
        figure.update_layout(plot_bgcolor=CLEAR)
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
