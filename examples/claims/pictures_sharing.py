"""Picture of the claim on shared pages. C9: what answers to one prompt hold, and when a copy is made."""

from __future__ import annotations

import plotly.graph_objects as go
from claim import GIB
from claims_sharing import C9_ENGINES, PROMPT, SAMPLES, c9_pages
from look import finish, label
from plotly.subplots import make_subplots

from hbmtwin.dashboard.palette import MEMORY

COLOURS = {
    "v0, forked": MEMORY["kv_tokens"].colour,
    "v1, prefix cache": MEMORY["kv_cached"].colour,
    "nothing shared": "#777777",
}
COUNTS = (1, 2, 4, 8, 12, 16)
FIRST_STEPS = 5


def shared_pages() -> go.Figure:
    """C9: KV held against the number of answers, and in the first steps of eight of them."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.13, column_widths=[0.55, 0.45])
    for engine in C9_ENGINES:
        runs = [c9_pages(engine, samples=count) for count in COUNTS]
        gib = [pages.most * pages.page_bytes / GIB for pages in runs]
        width, dash = (4, "dot") if engine == "v1, prefix cache" else (9, "solid") if "v0" in engine else (3, "solid")
        line = {"color": COLOURS[engine], "width": width, "dash": dash}
        figure.add_scatter(x=COUNTS, y=gib, mode="lines", line=line, row=1, col=1)
    alone, forked = (c9_pages(engine).most * c9_pages(engine).page_bytes / GIB for engine in list(C9_ENGINES)[::-2])
    figure.add_scatter(
        x=[SAMPLES, SAMPLES], y=[forked, alone], mode="lines", line={"color": "#999999", "width": 1, "dash": "dash"}
    )
    grey, blue = COLOURS["nothing shared"], COLOURS["v0, forked"]
    label(figure, "<b>nothing shared</b>", 11.5, 7.9, grey, xanchor="right", row=1, col=1)
    label(figure, "<b>forked (v0)</b>, the same as", 16, 3.1, blue, xanchor="right", row=1, col=1)
    label(figure, "<b>prefix cache (v1)</b>", 16, 2.65, COLOURS["v1, prefix cache"], xanchor="right", row=1, col=1)
    label(
        figure, f"8 answers: {alone:.2f} GiB", SAMPLES, alone, grey, xanchor="left", xshift=8, yshift=-8, row=1, col=1
    )
    label(figure, f"{forked:.2f} GiB", SAMPLES, forked, blue, yshift=-22, row=1, col=1)
    steps = list(range(1, FIRST_STEPS + 1))
    for engine, shift in (("v0, forked", -0.2), ("v1, prefix cache", 0.2)):
        held = c9_pages(engine).held[1 : FIRST_STEPS + 1]
        places = [step + shift for step in steps]
        figure.add_bar(x=places, y=held, width=0.36, marker={"color": COLOURS[engine]}, row=1, col=2)
        for place, pages in zip(places, held, strict=True):
            label(figure, f"{pages}", place, pages, yanchor="bottom", row=1, col=2)
        label(figure, f"<b>{engine[:2]}</b>", places[0], 5, "#FFFFFF", row=1, col=2)
    copies = c9_pages("v0, forked").copied
    label(
        figure,
        f"<b>{copies} copies</b> with the second token:<br>the page that was partly filled",
        2,
        84,
        MEMORY["growth_copy"].colour,
        xanchor="left",
        align="left",
        row=1,
        col=2,
    )
    figure.update_xaxes(title_text="answers to the prompt", range=[0, 16.5], row=1, col=1)
    figure.update_xaxes(title_text="tokens of each of 8 answers", tickvals=steps, row=1, col=2)
    figure.update_yaxes(title_text="KV when most is held (GiB)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="pages held", range=[0, 95], row=1, col=2)
    return finish(
        figure,
        f"Counting references saves {alone - forked:.2f} GiB; copy-on-write, {copies} pages for one step",
        f"Claim C9 (copy-on-write lets sequences share pages): Llama-2-7B, a prompt of {PROMPT:,} tokens, "
        "answers of 200, pages of 16",
    ).update_layout(margin={"b": 65})
