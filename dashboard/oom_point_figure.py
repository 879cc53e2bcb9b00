"""Figures of OOM points: shares of draws against load and place, causes, and the smallest memory against load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import device
from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.oom_point_words import GIB, fate, name_of, number
from hbmtwin.dashboard.palette import INK, MEMORY, policy_colours
from hbmtwin.sim.capacity.oom_point import OomPoint
from hbmtwin.sim.capacity.oom_point_curves import PLACES, Share, by_load, by_place, causes, memory_by_load
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.capacity.oom_point_runs import End

CAUSE_COLOURS = {
    "external_fragmentation": MEMORY["external"].colour,
    "growth_copy": MEMORY["growth_copy"].colour,
    "reservation": MEMORY["internal"].colour,
    "parked_history": MEMORY["kv_parked"].colour,
    "runtime_peak": MEMORY["activations"].colour,
    "shortage": MEMORY["kv_tokens"].colour,
    "other_tenant": MEMORY["static"].colour,
    "never_fits": "#444444",
    "does_not_fit": "#444444",
    "allocator_rule": MEMORY["pending_events"].colour,
}
"""Of the memory that was in the way; a cause that is none of these is grey."""
OTHER_CAUSE = "#A3A3A3"
HELD = MEMORY["kv_pool_free"].colour
PALE = "#C8C8C8"
PLACE_TITLES = {
    "users": "users in the server",
    "turn": "turn of the request that asked",
    "time_s": "simulated time (s)",
    "operations": "allocator operations",
}
MARGIN = {"l": 64, "r": 24, "t": 40, "b": 56}


def share_by_load(point: OomPoint) -> go.Figure:
    """The share of draws that have run out at each load or below, with its bounds, a panel each policy.

    Preemption is dotted; the other policies' curves are pale, to compare.
    """
    curves = {(p, end): by_load(point, p, end) for p, ends in point.ends.items() for end in ends}
    titles = [_title(point, policy, ends) for policy, ends in point.ends.items()]
    figure = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.025, subplot_titles=titles)
    for col, (policy, colour) in enumerate(policy_colours(point.ends).items(), start=1):
        for (other, end), curve in curves.items():
            if other != policy and end == "fails" and curve:
                _line(figure, curve, other, {"color": PALE, "width": 1.5}, show=False, col=col)
        for end in point.ends[policy]:
            if curve := curves[policy, end]:
                _stairs(figure, curve, name_of(policy, end), colour, dotted=end == "preempts", show=False, col=col)
    style(figure, 400)
    figure.update_annotations(font_size=13)
    figure.update_xaxes(title_text=WORDS[point.load.word], **_axis(point.load.values))
    figure.update_yaxes(title_text="draws that ran out (%)", range=[-3, 104], row=1, col=1)
    figure.update_layout(margin={**MARGIN, "t": 88})
    return figure


def _title(point: OomPoint, policy: str, ends: Sequence[End]) -> str:
    said = [fate(point, policy, end) for end in ends if point.of(policy, end)]
    if len(said) == 2:
        said = [f"runs out: {said[0]}", "preempts (dotted):", said[1]]
    return "<br>".join([f"<b>{policy}</b>", *said])


def cause_shares(point: OomPoint) -> go.Figure:
    """A bar for each policy: draws by the cause of their first failure, and those that did not fail."""
    figure = go.Figure()
    policies = list(reversed(point.ends))
    found = {policy: causes(point.of(policy, "fails")) for policy in policies}
    known = [*CAUSE_COLOURS, *(c for counts in found.values() for c in counts)]
    for cause in dict.fromkeys(c for c in known if any(c in counts for counts in found.values())):
        counts = [found[policy].get(cause, 0) for policy in policies]
        _bar(figure, policies, counts, cause.replace("_", " "), CAUSE_COLOURS.get(cause, OTHER_CAUSE))
    held = [len(point.of(p, "fails")) - sum(found[p].values()) for p in policies]
    if any(held):
        _bar(figure, policies, held, f"held up to {number(point.load.values[-1])}", HELD)
    style(figure, 130 + 44 * len(policies))
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_layout(margin={**MARGIN, "l": 84, "t": 64}, bargap=0.35)
    figure.update_xaxes(title_text="draws", dtick=max(1, len(point.draws) // 10))
    return figure


def share_by_place(point: OomPoint) -> go.Figure:
    """Where within the run at its critical load a draw died: the share of all draws, one panel for each measure."""
    drawn = {name: column for name, column in PLACES.items() if _varies(point, column)} or {"time_s": PLACES["time_s"]}
    figure = make_subplots(rows=1, cols=len(drawn), shared_yaxes=True, horizontal_spacing=0.04)
    for col, (name, column) in enumerate(drawn.items(), start=1):
        largest = 0.0
        for policy, colour in policy_colours(point.ends).items():
            if curve := by_place(point.of(policy, "fails"), column):
                shown = [s._replace(at=s.at + (name == "turn")) for s in curve]
                largest = max(largest, shown[-1].at)
                start = Share(shown[0].at, 0, shown[0].n, 0.0, shown[0].low, shown[0].high)
                _stairs(figure, [start, *shown], policy, colour, show=col == 1, col=col)
        figure.update_xaxes(title_text=PLACE_TITLES[name], range=[0, 1.04 * largest], row=1, col=col)
        if name == "turn" and largest < 15:
            figure.update_xaxes(dtick=1, row=1, col=col)
    style(figure, 360)
    figure.update_yaxes(title_text="draws that died there or before (%)", range=[-3, 104], row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={**MARGIN, "t": 56})
    return figure


def memory_by_load_figure(point: OomPoint) -> go.Figure:
    """The smallest device memory that survives against the load: the middle of the draws, least to most as a band."""
    figure = go.Figure()
    for policy, colour in policy_colours(point.ends).items():
        for end in point.ends[policy]:
            curve = [m for m in memory_by_load(point.smallest, policy, end) if m.median_bytes is not None]
            if not curve:
                continue
            name = f"<b>{policy}</b>" + (", never preempts" if end == "preempts" else "")
            x = [m.load for m in curve]
            banded = [m for m in curve if m.most_bytes is not None and m.least_bytes is not None]
            low = [(m.least_bytes or 0) / GIB for m in banded]
            high = [(m.most_bytes or 0) / GIB for m in banded]
            at = [m.load for m in banded]
            look = {"fill": "toself", "fillcolor": colour, "opacity": 0.13, "mode": "lines", "line": {"width": 0}}
            both = {"x": [*at, *reversed(at)], "y": [*high, *reversed(low)], "legendgroup": name}
            figure.add_scatter(**both, showlegend=False, hoverinfo="skip", **look)
            figure.add_scatter(
                x=x,
                y=[(m.median_bytes or 0) / GIB for m in curve],
                name=name,
                legendgroup=name,
                mode="lines+markers",
                line={"color": colour, "width": 2.5, "dash": "dot" if end == "preempts" else "solid"},
                hovertemplate="%{y:.2f} GiB at %{x}",
            )
    here = (point.scenario.device.memory_bytes or device(point.scenario.device.name).memory_bytes) / GIB
    line = {"color": INK, "width": 1, "dash": "dash"}
    text = f"{point.scenario.device.name}: {here:.1f} GiB"
    figure.add_hline(y=here, line=line, annotation={"text": text, "font": {"size": 12}}, annotation_position="top left")
    style(figure, 440)
    figure.update_xaxes(title_text=WORDS[point.load.word], **_axis(point.load.values))
    figure.update_yaxes(title_text="smallest memory that survives (GiB)")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={**MARGIN, "t": 64})
    return figure


def _stairs(
    figure: go.Figure,
    curve: Sequence[Share],
    name: str,
    colour: str,
    *,
    col: int,
    dotted: bool = False,
    show: bool = True,
) -> None:
    """A share that rises in steps, and its bounds as an area of the same steps."""
    x = [curve[0].at, *(s.at for s in curve[1:] for _ in (0, 1))]
    high = _steps([100 * s.high for s in curve])
    low = _steps([100 * s.low for s in curve])
    look = {"fill": "toself", "fillcolor": colour, "opacity": 0.13, "mode": "lines", "line": {"width": 0}}
    both = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "legendgroup": name, "row": 1, "col": col}
    figure.add_scatter(**both, showlegend=False, hoverinfo="skip", **look)
    line = {"color": colour, "width": 2.5, "dash": "dot" if dotted else "solid"}
    _line(figure, curve, name, line, show=show, col=col)


def _line(
    figure: go.Figure, curve: Sequence[Share], name: str, line: dict[str, object], *, show: bool, col: int
) -> None:
    figure.add_scatter(
        x=[s.at for s in curve],
        y=[100 * s.share for s in curve],
        name=name,
        legendgroup=name,
        showlegend=show,
        mode="lines",
        line={"shape": "hv", **line},
        customdata=[[s.ended, s.n, 100 * s.low, 100 * s.high] for s in curve],
        hovertemplate="%{customdata[0]} of %{customdata[1]} at %{x} (%{customdata[2]:.0f} to %{customdata[3]:.0f} %)",
        row=1,
        col=col,
    )


def _steps(values: Sequence[float]) -> list[float]:
    """A value until the next place, then the next value: what goes with a stair's x."""
    return [values[0], *(v for pair in pairwise(values) for v in pair)]


def _bar(figure: go.Figure, policies: Sequence[str], counts: Sequence[int], name: str, colour: str) -> None:
    shown = [str(count) if count else "" for count in counts]
    figure.add_bar(
        y=list(policies),
        x=list(counts),
        name=name,
        orientation="h",
        marker_color=colour,
        text=shown,
        textangle=0,
        insidetextanchor="middle",
    )


def _axis(values: Sequence[float]) -> dict[str, object]:
    """Logarithmic for loads that span a factor of 6, with ticks at 1, 2 and 5; a little room at both ends."""
    first, last = values[0], values[-1]
    if last < 6 * first:
        return {"range": [first - 0.03 * (last - first), last + 0.04 * (last - first)]} if last > first else {}
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if first * 0.999 <= tick <= last * 1.001]
    ends = [math.log10(first), math.log10(last)]
    room = 0.03 * (ends[1] - ends[0])
    words = [f"{tick:,.10g}" for tick in shown]
    return {"type": "log", "tickvals": shown, "ticktext": words, "range": [ends[0] - room, ends[1] + room]}


def _varies(point: OomPoint, column: str) -> bool:
    """Whether deaths differ in it: where all requests are first turns, the turn says nothing."""
    found = {c.row[column] for c in point.critical if c.end == "fails" and c.row is not None}
    return len(found - {None}) > 1
