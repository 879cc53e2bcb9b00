"""The common look of the pictures."""

from __future__ import annotations

import plotly.graph_objects as go

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import INK

WIDTH, HEIGHT = 1000, 560


def finish(figure: go.Figure, title: str, subtitle: str, *, right: int = 20) -> go.Figure:
    """Give a figure the common look, and the finding as its title."""
    style(figure, HEIGHT)
    return figure.update_layout(
        width=WIDTH,
        showlegend=False,
        title={
            "text": f"<b>{title}</b><br><span style='font-size:13px'>{subtitle}</span>",
            "x": 0.01,
            "y": 0.95,
            "font_size": 18,
        },
        margin={"t": 80, "r": right},
    )


def label(figure: go.Figure, text: str, x: float, y: float, colour: str = INK, **place: object) -> None:
    """Write beside a line, or on an area, where a legend would make the eye travel."""
    figure.add_annotation(text=text, x=x, y=y, showarrow=False, font={"color": colour, "size": 13}, **place)
