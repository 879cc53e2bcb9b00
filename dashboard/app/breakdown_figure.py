"""The device as one bar: who holds which bytes of it, ends of estimates marked. Its pieces sum to the device."""

from __future__ import annotations

import plotly.graph_objects as go

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, MEMORY, PAPER
from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.fit import words
from hbmtwin.sim.phrases import Lang, Phrase, Said

GIB = 1 << 30
DEVICE_END = Phrase("{device} ends: {gib:.2f} GiB", "{device}上限：{gib:.2f} GiB")
COLOURS = {
    "other tenants": "#882255",
    "context": "#6E6E6E",
    "weights": "#A3A3A3",
    "activations": "#C9BBA8",
    "non-torch": "#8A6FB0",
    "graphs": "#E69F00",
    "late buffers": "#D55E00",
    "KV cache": "#0072B2",
    "operators": "#56B4E9",
    "run-time sampler": "#F0E442",
    "unplanned": MEMORY["driver_free"].colour,
}
"""As far as they mean the same, those of the memory picture."""


def breakdown_bar(budget: MemoryBudget, lang: Lang) -> go.Figure:
    """A horizontal bar, a piece a line of the budget; where more is asked than there is, the device ends within it."""
    figure = go.Figure()
    total = budget.total_bytes
    for line in budget.lines:
        if line.bytes <= 0:
            continue
        label, known = words.label(line.item).text(lang), words.how_known(line).text(lang)
        figure.add_bar(
            x=[line.bytes / GIB],
            y=[""],
            orientation="h",
            name=label,
            marker={"color": COLOURS.get(line.item, "#999999"), "line": {"color": PAPER, "width": 1}},
            hovertemplate=f"{label}: %{{x:.2f}} GiB<br>{known}<extra></extra>",
            text=f"{line.bytes / GIB:.2f}" if line.bytes > total / 25 else "",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
        )
    asked = sum(max(0, line.bytes) for line in budget.lines)
    style(figure, 210)
    figure.update_layout(
        barmode="stack",
        bargap=0.1,
        legend={"orientation": "h", "y": -0.75, "yanchor": "top", "traceorder": "normal"},
        margin={"l": 10, "r": 20, "t": 28, "b": 106},
    )
    figure.update_xaxes(title={"text": "GiB", "standoff": 4}, range=[0, max(total, asked) * 1.01 / GIB])
    figure.update_yaxes(visible=False)
    if asked > total:
        figure.add_vline(
            x=total / GIB,
            line={"color": ALARM, "width": 3},
            annotation={
                "text": Said.of(DEVICE_END, device=Said.of(words.DEVICE_SUM), gib=total / GIB).text(lang),
                "font": {"color": ALARM},
                "y": 1,
                "xanchor": "left" if 2 * total < asked else "right",
                "yanchor": "bottom",  # above the bar, whose grey no red is read on
            },
        )
    return figure
