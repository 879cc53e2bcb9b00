"""The picture of servers that are tuned for one length of conversations and get another.

C13: users that each server holds of either traffic.
"""

from __future__ import annotations

import plotly.graph_objects as go
from claims_capacity import LONG, MEASURED, SHORT, TUNED, c13_lengths, c13_servers, c13_too_long
from look import finish, label

from hbmtwin.dashboard.palette import ALARM, INK, MEMORY

COLOURS = {SHORT: MEMORY["kv_tokens"].colour, LONG: MEMORY["internal"].colour}


def tuned_servers() -> go.Figure:
    """C13: two bars a server."""
    figure = go.Figure()
    servers = c13_servers()
    for place, (server, held) in enumerate(servers.items()):
        for side, (traffic, capacity) in enumerate(held.items()):
            y = -place + 0.2 - 0.4 * side
            shown = 0 if capacity is None else capacity.shown
            marker = {"color": COLOURS[traffic], "line_width": 0}
            figure.add_bar(y=[y], x=[shown], width=0.34, orientation="h", marker=marker)
            text, colour, end = f"<b>{capacity}</b>", INK, float(shown)
            if capacity is None:
                text, colour = "none: all are too long", ALARM
            elif capacity.failing - 1 > shown:
                end = capacity.failing - 1.0
                undecided = marker | {"opacity": 0.4}
                figure.add_bar(y=[y], x=[end - shown], base=shown, width=0.34, orientation="h", marker=undecided)
            if server.endswith(str(MEASURED)) and traffic == SHORT:
                text += f"; {100 * c13_too_long(SHORT, MEASURED):.1f} % of the requests are too long"
            label(figure, text, end, y, colour, xanchor="left", xshift=8)
        label(figure, f"<b>{server}</b>", 0, -place, xanchor="right", xshift=-8)
    for side, (traffic, colour) in enumerate(COLOURS.items()):
        text = f"conversations of {c13_lengths(traffic).mean():,.0f} tokens on average"
        label(figure, f"<b>{text}</b>", 150, 0.2 - 0.24 * side, colour, xanchor="right")
    label(figure, "pale: not decided", 150, -0.28, xanchor="right")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="users at once, without a death or a preemption", range=[0, 152])
    figure.update_yaxes(visible=False, range=[-len(servers) + 0.45, 0.55])
    tuned, measured, _ = (held[SHORT] for held in servers.values())
    return finish(
        figure,
        f"Of short conversations, buffers of {MEASURED} tokens hold {measured} users, and of {TUNED:,} only {tuned}",
        "Claim C13 (tuning for 2,048 is waste: measure first): Llama-2-7B on a 32 GB 910B4, KV in a pool",
    ).update_layout(margin={"l": 195})
