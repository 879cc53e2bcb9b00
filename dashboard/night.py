"""Figures on a dark page: every colour that is meant for a white one becomes its counterpart, wherever it stands.

::

    trace, layout  --colours in them-->  NIGHT of the palette  --update-->  the same figure
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from hbmtwin.dashboard.palette import AXIS, INK, NIGHT, PAPER

BUTTON = "#B8BDC7"
"""Plotly paints the button that is on nearly white, and lets nobody change that: so all of them are bright."""


def at_night(figure: go.Figure) -> go.Figure:
    """Turn *figure* itself to the colours of a dark page, and return it. O(size of what is not an array)."""
    for trace in figure.data:
        trace.update(_turned(trace.to_plotly_json()) or {})
    figure.update_layout(_turned(figure.layout.to_plotly_json()) or {})
    figure.update_layout(hoverlabel={"bgcolor": NIGHT[PAPER], "font": {"color": NIGHT[INK]}})
    figure.update_xaxes(tickcolor=NIGHT[AXIS])
    figure.update_yaxes(tickcolor=NIGHT[AXIS])
    for menu in figure.layout.updatemenus:
        menu.update(bgcolor=BUTTON, font_color=INK)
    return figure


def _turned(value: Any) -> Any:
    """What of *value* becomes another, in its shape; None: nothing does. A list of parts stays as long as it was."""
    if isinstance(value, str):
        return NIGHT.get(value)
    if isinstance(value, dict):
        return {key: new for key, old in value.items() if (new := _turned(old)) is not None} or None
    if isinstance(value, list | tuple) and any(new := [_turned(item) for item in value]):
        if all(isinstance(item, dict) for item in value):  # annotations, shapes: Plotly updates each of its own
            return [item or {} for item in new]
        return [old if item is None else item for old, item in zip(value, new, strict=True)]
    return None
