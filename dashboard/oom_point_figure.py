"""Figures of OOM points: shares of draws against load and place, causes, and the smallest memory against load.

Each says what it draws in English or in Chinese.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import device
from hbmtwin.dashboard.figures import SIMULATED_TIME, style
from hbmtwin.dashboard.oom_point_words import GIB, cause_name, fate, name_of, number
from hbmtwin.dashboard.palette import DID_NOT_START, INK, MEMORY, PALE, policy_colours
from hbmtwin.sim.capacity.oom_point import OomPoint
from hbmtwin.sim.capacity.oom_point_curves import PLACES, Share, by_load, by_place, causes, memory_by_load
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.phrases import Lang, Phrase, Said

CAUSE_COLOURS = {
    "external_fragmentation": MEMORY["external"].colour,
    "growth_copy": MEMORY["growth_copy"].colour,
    "reservation": MEMORY["internal"].colour,
    "parked_history": MEMORY["kv_parked"].colour,
    "runtime_peak": MEMORY["activations"].colour,
    "shortage": MEMORY["kv_tokens"].colour,
    "other_tenant": MEMORY["static"].colour,
    "never_fits": DID_NOT_START,
    "does_not_fit": DID_NOT_START,
    "allocator_rule": MEMORY["pending_events"].colour,
}
"""Of the memory that was in the way; a cause that is none of these is grey."""
OTHER_CAUSE = "#A3A3A3"
HELD = MEMORY["kv_pool_free"].colour
PLACE_TITLES = {
    "users": Phrase("users in the server", "服务中的用户数"),
    "turn": Phrase("turn of the request that asked", "申请显存的请求所在轮次"),
    "time_s": SIMULATED_TIME,
    "operations": Phrase("allocator operations", "分配器操作数"),
}
RAN_OUT = Phrase("draws that ran out (%)", "显存耗尽的样本（%）")
RUNS_OUT = Phrase("runs out: {fate}", "显存耗尽：{fate}")
PREEMPTS = Phrase("preempts (dotted):<br>{fate}", "抢占（点线）：<br>{fate}")
HELD_UP_TO = Phrase("held up to {load}", "到 {load} 都跑完")
DRAWS = Phrase("draws", "样本数")
DIED = Phrase("draws that died there or before (%)", "到此处为止 OOM 的样本（%）")
NEVER_PREEMPTS = Phrase("{policy}, never preempts", "{policy}，且不抢占")
AT = Phrase("%{{y:.2f}} GiB at %{{x}}", "%{{x}} 时 %{{y:.2f}} GiB")
HERE = Phrase("{device}: {size:.1f} GiB", "{device}：{size:.1f} GiB")
SMALLEST = Phrase("smallest memory that survives (GiB)", "能撑住的最小显存（GiB）")
SHARE_AT = Phrase(
    "%{{customdata[0]}} of %{{customdata[1]}} at %{{x}} (%{{customdata[2]:.0f}} to %{{customdata[3]:.0f}} %)",
    "%{{x}} 时 %{{customdata[0]}} / %{{customdata[1]}}（%{{customdata[2]:.0f}} 至 %{{customdata[3]:.0f}} %）",
)
MARGIN = {"l": 64, "r": 24, "t": 40, "b": 56}


def share_by_load(point: OomPoint, lang: Lang = "en") -> go.Figure:
    """The share of draws that have run out at each load or below, with its bounds, a panel each policy.

    Preemption is dotted; the other policies' curves are pale, to compare.
    """
    curves = {(p, end): by_load(point, p, end) for p, ends in point.ends.items() for end in ends}
    titles = [_title(point, policy, ends, lang) for policy, ends in point.ends.items()]
    figure = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.025, subplot_titles=titles)
    for col, (policy, colour) in enumerate(policy_colours(point.ends).items(), start=1):
        for (other, end), curve in curves.items():
            if other != policy and end == "fails" and curve:
                _line(figure, curve, other, {"color": PALE, "width": 1.5}, lang, show=False, col=col)
        for end in point.ends[policy]:
            if curve := curves[policy, end]:
                name, dotted = name_of(policy, end, lang), end == "preempts"
                _stairs(figure, curve, name, colour, lang, dotted=dotted, show=False, col=col)
    style(figure, 400)
    figure.update_annotations(font_size=13)
    figure.update_xaxes(title_text=Said.of(WORDS[point.load.word]).text(lang), **_axis(point.load.values))
    figure.update_yaxes(title_text=Said.of(RAN_OUT).text(lang), range=[-3, 104], row=1, col=1)
    figure.update_layout(margin={**MARGIN, "t": 88})
    return figure


def _title(point: OomPoint, policy: str, ends: Sequence[End], lang: Lang) -> str:
    said = [fate(point, policy, end, lang) for end in ends if point.of(policy, end)]
    if len(said) == 2:
        said = [Said.of(how, fate=one).text(lang) for how, one in zip((RUNS_OUT, PREEMPTS), said, strict=True)]
    return "<br>".join([f"<b>{policy}</b>", *said])


def cause_shares(point: OomPoint, lang: Lang = "en") -> go.Figure:
    """A bar for each policy: draws by the cause of their first failure, and those that did not fail."""
    figure = go.Figure()
    policies = list(reversed(point.ends))
    found = {policy: causes(point.of(policy, "fails")) for policy in policies}
    known = [*CAUSE_COLOURS, *(c for counts in found.values() for c in counts)]
    for cause in dict.fromkeys(c for c in known if any(c in counts for counts in found.values())):
        counts = [found[policy].get(cause, 0) for policy in policies]
        _bar(figure, policies, counts, cause_name(cause, lang).replace("_", " "), CAUSE_COLOURS.get(cause, OTHER_CAUSE))
    held = [len(point.of(p, "fails")) - sum(found[p].values()) for p in policies]
    if any(held):
        _bar(figure, policies, held, Said.of(HELD_UP_TO, load=number(point.load.values[-1])).text(lang), HELD)
    style(figure, 130 + 44 * len(policies))
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_layout(margin={**MARGIN, "l": 84, "t": 64}, bargap=0.35)
    figure.update_xaxes(title_text=Said.of(DRAWS).text(lang), dtick=max(1, len(point.draws) // 10))
    return figure


def share_by_place(point: OomPoint, lang: Lang = "en") -> go.Figure:
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
                _stairs(figure, [start, *shown], policy, colour, lang, show=col == 1, col=col)
        figure.update_xaxes(
            title_text=Said.of(PLACE_TITLES[name]).text(lang), range=[0, 1.04 * largest], row=1, col=col
        )
        if name == "turn" and largest < 15:
            figure.update_xaxes(dtick=1, row=1, col=col)
    style(figure, 360)
    figure.update_yaxes(title_text=Said.of(DIED).text(lang), range=[-3, 104], row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={**MARGIN, "t": 56})
    return figure


def memory_by_load_figure(point: OomPoint, lang: Lang = "en") -> go.Figure:
    """The smallest device memory that survives against the load: the middle of the draws, least to most as a band."""
    figure = go.Figure()
    for policy, colour in policy_colours(point.ends).items():
        for end in point.ends[policy]:
            curve = [m for m in memory_by_load(point.smallest, policy, end) if m.median_bytes is not None]
            if not curve:
                continue
            name = f"<b>{policy}</b>"
            if end == "preempts":
                name = Said.of(NEVER_PREEMPTS, policy=name).text(lang)
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
                hovertemplate=Said.of(AT).text(lang),
            )
    here = (point.scenario.device.memory_bytes or device(point.scenario.device.name).memory_bytes) / GIB
    line = {"color": INK, "width": 1, "dash": "dash"}
    text = Said.of(HERE, device=point.scenario.device.name, size=here).text(lang)
    figure.add_hline(y=here, line=line, annotation={"text": text, "font": {"size": 12}}, annotation_position="top left")
    style(figure, 440)
    figure.update_xaxes(title_text=Said.of(WORDS[point.load.word]).text(lang), **_axis(point.load.values))
    figure.update_yaxes(title_text=Said.of(SMALLEST).text(lang))
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={**MARGIN, "t": 64})
    return figure


def _stairs(
    figure: go.Figure,
    curve: Sequence[Share],
    name: str,
    colour: str,
    lang: Lang,
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
    _line(figure, curve, name, line, lang, show=show, col=col)


def _line(
    figure: go.Figure, curve: Sequence[Share], name: str, line: dict[str, object], lang: Lang, *, show: bool, col: int
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
        hovertemplate=Said.of(SHARE_AT).text(lang),
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
