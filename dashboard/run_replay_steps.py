"""Whole steps of a replayed run in a picture: what they took, and how far the prediction lay from it.

::

    time (ms)   |  o   o     o        step, measured and predicted; attention in it, both      | error (%)
                |    o   o o   o                                                               |  by sequences of
                +------------------------------------------------------------ step of the run  |  the batch
"""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import inline, style
from hbmtwin.dashboard.log_axis import log_axis
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.validation.run_replay.sampling import KINDS
from hbmtwin.validation.run_replay.step_report import StepReplay

PREDICTED, MEASURED = "#0072B2", "#E69F00"
SYMBOLS = {"prefill": "square", "mixed": "diamond", "decode": "circle"}
KIND_COLOURS = {"prefill": "#009E73", "mixed": "#CC79A7", "decode": "#56B4E9"}
KIND_WORDS = {
    "prefill": Phrase("prefill", "prefill"),
    "mixed": Phrase("mixed", "prefill 加 decode"),
    "decode": Phrase("decode", "decode"),
}

TIMES = Phrase("Time of a step, and of attention in it", "单步时间，及其中的 attention")
ERRORS = Phrase("Error of a step, by sequences in its batch", "单步误差与批中序列数")
STEP_MEASURED = Phrase("step, measured", "整步，实测")
STEP_PREDICTED = Phrase("step, predicted", "整步，预测")
ATTENTION_MEASURED = Phrase("attention, measured", "attention，实测")
ATTENTION_PREDICTED = Phrase("attention, predicted", "attention，预测")
OF_SEQUENCES = Phrase(
    "%{{y:.3f}} ms, %{{customdata[0]}} of %{{customdata[1]}}",
    "%{{y:.3f}} ms，%{{customdata[0]}}，%{{customdata[1]}} 条序列",
)
ERROR = Phrase("step %{{customdata}}: %{{y:+.1f}} %", "第 %{{customdata}} 步：%{{y:+.1f}} %")
STEP = Phrase(
    "step of the run (squares prefill, diamonds mixed, circles decode)",
    "步（方块 prefill，菱形 prefill 加 decode，圆点 decode）",
)
TIME = Phrase("time (ms)", "时间（ms）")
SEQUENCES = Phrase("sequences", "序列数")
DIFFERENCE = Phrase("predicted less measured (% of measured)", "预测减实测（占实测的 %）")
BEHIND_A_FACTOR = Phrase("{difference}, behind one factor", "{difference}，按同一系数折算后")


def steps_part(s: StepReplay) -> str:
    """What stands above the table of errors."""
    words = f"Measured on {s.measured_on}, {s.clock} time, through {s.layers_in_words}; predicted for {s.predicted_for}"
    parts = [f"<p>{html.escape(sentence)}</p>" for sentence in s.in_words]
    parts.append(f'<p class="note">{html.escape(words)} ({html.escape(s.basis)}).</p>')
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in s.notes]
    parts.append(inline(steps_figure(s), "steps"))
    return "\n".join(parts)


def steps_figure(s: StepReplay, lang: Lang = "en") -> go.Figure:
    """Times of the measured steps over the run, on a log axis; beside it their errors by size of the batch, behind one
    factor where devices differ."""
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.66, 0.34],
        horizontal_spacing=0.09,
        subplot_titles=[Said.of(title).text(lang) for title in (TIMES, ERRORS)],
    )
    symbols = [SYMBOLS[kind] for kind in s.kinds]
    series = [
        (STEP_MEASURED, s.measured_ns, MEASURED, 9, None),
        (STEP_PREDICTED, s.predicted_ns, PREDICTED, 5, None),
        (ATTENTION_MEASURED, s.measured_attention_ns, MEASURED, 9, "-open"),
        (ATTENTION_PREDICTED, s.predicted_attention_ns, PREDICTED, 5, "-open"),
    ]
    kinds = np.array([Said.of(KIND_WORDS[kind]).text(lang) for kind in s.kinds], object)
    for label, values, colour, size, form in series:
        if values is None:
            continue
        figure.add_scatter(
            x=s.steps,
            y=values / 1e6,
            customdata=np.stack([kinds, s.sequences.astype(object)], axis=1),
            name=Said.of(label).text(lang),
            mode="lines+markers",
            marker={"size": size, "symbol": [f"{symbol}{form or ''}" for symbol in symbols], "color": colour},
            line={"width": 1, "color": colour, "dash": "dot" if form else "solid"},
            hovertemplate=Said.of(OF_SEQUENCES).text(lang),
            row=1,
            col=1,
        )
    scale = 1.0 if s.same_device else (s.factor or 1.0)
    errors = 100 * (s.predicted_ns * scale - s.measured_ns) / np.maximum(1, s.measured_ns)
    for kind in KINDS:
        own = np.array([k == kind for k in s.kinds], bool)
        if own.any():
            figure.add_scatter(
                x=s.sequences[own],
                y=errors[own],
                customdata=s.steps[own],
                name=Said.of(KIND_WORDS[kind]).text(lang),
                mode="markers",
                marker={"size": 9, "symbol": SYMBOLS[kind], "color": KIND_COLOURS[kind]},
                hovertemplate=Said.of(ERROR).text(lang),
                row=1,
                col=2,
            )
    figure.add_hline(y=0, line={"color": "#888", "width": 1}, row=1, col=2)
    style(figure, 480)
    shown = [float(value) / 1e6 for _, values, *_ in series if values is not None for value in values]
    figure.update_xaxes(title_text=Said.of(STEP).text(lang), row=1, col=1)
    figure.update_yaxes(title_text=Said.of(TIME).text(lang), **log_axis(shown), row=1, col=1)
    figure.update_xaxes(title_text=Said.of(SEQUENCES).text(lang), rangemode="tozero", row=1, col=2)
    difference = Said.of(DIFFERENCE)
    title = difference if s.same_device else Said.of(BEHIND_A_FACTOR, difference=difference)
    figure.update_yaxes(title_text=title.text(lang), row=1, col=2)
    figure.update_layout(
        hovermode="closest", legend={"orientation": "h", "y": -0.2, "yanchor": "top"}, margin={"t": 60, "b": 110}
    )
    return figure
