"""The picture of servers that are tuned for one length of conversations and get another.

C13: users that each server holds of either traffic.
"""

from __future__ import annotations

import plotly.graph_objects as go
from claims_capacity import C13_LIMITS, LONG, SHORT, Capacity, c13_lengths, c13_paged, c13_static
from look import finish, label

from hbmtwin.dashboard.palette import ALARM, INK, MEMORY

COLOURS = {SHORT: MEMORY["kv_tokens"].colour, LONG: MEMORY["internal"].colour}


def tuned_servers() -> go.Figure:
    """C13: two bars a server."""
    rows: dict[str, dict[str, Capacity]] = {
        f"static, {limit:,} tokens": {traffic: c13_static(limit, traffic) for traffic in COLOURS}
        for limit in reversed(C13_LIMITS)
    }
    rows["pages of 128"] = {traffic: c13_paged(traffic) for traffic in COLOURS}
    figure = go.Figure()
    for place, (server, held) in enumerate(rows.items()):
        for side, (traffic, capacity) in enumerate(held.items()):
            y = -place + 0.2 - 0.4 * side
            marker = {"color": COLOURS[traffic], "line_width": 0}
            figure.add_bar(y=[y], x=[capacity.users], width=0.34, orientation="h", marker=marker)
            text, colour = f"<b>{capacity.users}</b>", INK
            if not capacity.users:
                text, colour = "none: all are too long", ALARM
            elif capacity.refused:
                text += f"; {capacity.refused:.1f} % too long"
            label(figure, text, capacity.users, y, colour, xanchor="left", xshift=8)
        label(figure, f"<b>{server}</b>", 0, -place, xanchor="right", xshift=-8)
    for side, (traffic, colour) in enumerate(COLOURS.items()):
        text = f"conversations of {c13_lengths(traffic).mean():,.0f} tokens on average"
        label(figure, f"<b>{text}</b>", 148, 0.2 - 0.3 * side, colour, xanchor="right")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="users at once, without a death or a preemption", range=[0, 152])
    figure.update_yaxes(visible=False, range=[-len(rows) + 0.45, 0.55])
    told, measured = rows[f"static, {C13_LIMITS[2]:,} tokens"][SHORT], rows[f"static, {C13_LIMITS[1]:,} tokens"][SHORT]
    return finish(
        figure,
        f"Of short conversations, buffers of {C13_LIMITS[1]} tokens hold {measured.users} users, and of "
        f"{C13_LIMITS[2]:,} only {told.users}",
        "Claim C13 (tuning for 2,048 is waste: measure first): Llama-2-7B on a 32 GB 910B4, KV in a pool",
    ).update_layout(margin={"l": 165})
