"""A replayed run as one HTML page, and ``plotly.min.js`` beside it, that works without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hbmtwin import __version__
from hbmtwin.dashboard.figures import GIB, inline, style
from hbmtwin.dashboard.palette import ALARM
from hbmtwin.dashboard.run_replay_steps import KIND_WORDS, MEASURED, PREDICTED, SYMBOLS, steps_part
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.validation.run_replay.errors import ErrorRow
from hbmtwin.validation.run_replay.kernels import KernelReplay
from hbmtwin.validation.run_replay.memory import MemoryReplay
from hbmtwin.validation.run_replay.report import RunReplay
from hbmtwin.validation.run_replay.step_report import StepReplay

MOST_POINTS = 2000
"""Steps drawn of a longer run: every n-th, and those that differ."""
LABELS = {
    "reserved": Phrase("Reserved", "预留"),
    "allocated": Phrase("Allocated", "已分配"),
    "requested": Phrase("Requested", "已申请"),
    "driver_free": Phrase("Free at the driver", "驱动层空闲"),
}
FOUND = {"measured": Phrase("measured", "实测"), "predicted": Phrase("predicted", "预测")}
IN_GIB = Phrase("{label} %{{y:.6f}} GiB", "{label} %{{y:.6f}} GiB")
DIFFER = Phrase("they differ", "不一致")
STEP = Phrase("step", "步")
WHOLE_STEP = Phrase("whole step, predicted ({on})", "整步，预测（{on}）")
ATTENTION_PREDICTED = Phrase("attention, predicted ({on})", "attention，预测（{on}）")
ATTENTION_MEASURED = Phrase("attention, measured ({on})", "attention，实测（{on}）")
STEP_KINDS = Phrase(
    "step (squares prefill, diamonds prefill and decode, circles decode)",
    "步（方块 prefill，菱形 prefill 加 decode，圆点 decode）",
)
TIME = Phrase("time (ms)", "时间（ms）")


def write_run_replay(report: RunReplay, path: Path) -> None:
    """Write the page at *path* and ``plotly.min.js`` beside it; same report, same bytes. Raise OSError."""
    template = Template(files("hbmtwin.dashboard").joinpath("run_replay.html").read_text(encoding="utf-8"))
    page = template.substitute(
        name=html.escape(report.run),
        verdict=html.escape(report.verdict),
        kind="" if report.memory is None else "good" if report.agrees else "bad",
        facts=_rows(_facts(report)),
        memory=_absent(report.memory_absent) if report.memory is None else _memory(report, report.memory),
        kernels=_absent(report.kernels_absent) if report.kernels is None else _kernels(report.kernels),
        steps=_absent(report.steps_absent) if report.steps is None else _steps(report.steps),
        version=html.escape(__version__),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    path.write_text(page, encoding="utf-8")


def _facts(report: RunReplay) -> list[tuple[str, str]]:
    on = report.measured_on
    facts = [("result", report.directory), ("backend", report.backend)]
    facts.append(("memory measured on", on["memory"] or "nothing"))
    facts.append(("steps measured on", on["steps"] or "nothing"))
    facts.append(("kernels measured on", on["kernels"] or "nothing"))
    facts.append(("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())))
    if report.memory is not None:
        facts.append(("out of memory", report.memory.oom_in_words))
    return facts


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(report: RunReplay, m: MemoryReplay) -> str:
    case = m.case
    parts = [
        f"<p>{case.operations:,} operations of torch's allocator, {case.counters} numbers after each: "
        f"{case.operations * case.counters:,} compared; out of memory: {m.ooms:,}.</p>"
    ]
    if case.difference is not None:
        d = case.difference
        told = "; ".join(f"{name}: predicted {ours}, measured {real}" for name, ours, real in d.what)
        parts.append(f'<p class="bad">First difference, operation {d.operation}: {html.escape(told)}</p>')
    parts.append(inline(memory_by_step(m), "memory"))
    parts.append(_errors(report.memory_errors(), "byte"))
    header = ("held to", "numbers", "differ", "the first")
    cells = [(c.name, f"{c.compared:,}", f"{c.differing:,}", c.first or "–") for c in m.checks]
    parts.append(_table(header, cells, kind="checks"))
    if m.oom.message:
        parts.append(f"<p>The real one said: <code>{html.escape(m.oom.message)}</code></p>")
    parts += [f'<p class="note">Not compared: {html.escape(words)}</p>' for words in m.not_compared]
    return "\n".join(parts)


def memory_by_step(m: MemoryReplay, lang: Lang = "en") -> go.Figure:
    """Predicted and measured bytes after each step, a panel a number; steps that differ are marked, and a dotted line
    is the step in which memory ran out first."""
    figure = make_subplots(
        rows=2,
        cols=2,
        shared_xaxes=True,
        subplot_titles=[Said.of(LABELS[name]).text(lang) for name in m.measured],
        vertical_spacing=0.12,
    )
    for position, name in enumerate(m.measured):
        place = {"row": position // 2 + 1, "col": position % 2 + 1}
        steps, predicted, measured = _drawn(m, name)
        for found, values, line in (
            ("measured", measured, {"width": 6, "color": MEASURED}),
            ("predicted", predicted, {"width": 1.5, "color": PREDICTED}),
        ):
            label = Said.of(FOUND[found])
            figure.add_scatter(
                x=steps[: len(values)],
                y=values / GIB,
                name=label.text(lang),
                legendgroup=found,
                showlegend=position == 0,
                mode="lines+markers" if len(values) < 60 else "lines",
                marker={"size": 9 if found == "measured" else 4},
                line=line,
                hovertemplate=Said.of(IN_GIB, label=label).text(lang),
                **place,
            )
        n = min(len(predicted), len(measured))
        apart = np.flatnonzero(predicted[:n] != measured[:n])
        figure.add_scatter(
            x=steps[apart],
            y=measured[apart] / GIB,
            name=Said.of(DIFFER).text(lang),
            legendgroup="differ",
            showlegend=position == 0 and bool(len(apart)),
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": ALARM},
            hoverinfo="skip",
            **place,
        )
        figure.update_yaxes(title_text="GiB" if place["col"] == 1 else None, rangemode="nonnegative", **place)
        step = Said.of(STEP).text(lang) if place["row"] == 2 else None
        figure.update_xaxes(title_text=step, showticklabels=True, **place)
        if m.oom.step >= 0:
            figure.add_vline(x=m.oom.step, line={"color": ALARM, "width": 2, "dash": "dot"}, **place)
    style(figure, 620)
    figure.update_layout(
        hovermode="x unified", legend={"orientation": "h", "y": 1.06, "yanchor": "bottom"}, margin={"t": 90}
    )
    return figure


def _drawn(m: MemoryReplay, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    predicted, measured = m.predicted[name], m.measured[name]
    n = min(len(predicted), len(measured))
    if len(m.steps) <= MOST_POINTS:
        return m.steps, predicted, measured
    every = np.arange(0, n, -(-n // MOST_POINTS))
    keep = np.unique(np.concatenate([every, np.flatnonzero(predicted[:n] != measured[:n])[:MOST_POINTS], [n - 1]]))
    return m.steps[keep], predicted[keep], measured[keep]


# -- whole steps -------------------------------------------------------------------------------------------------------


def _steps(s: StepReplay) -> str:
    return f"{steps_part(s)}\n{_errors(s.errors(), 'ns')}"


# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernels(k: KernelReplay) -> str:
    parts = [f"<p>{html.escape(note)}</p>" for note in k.notes]
    words = f"Measured on {k.measured_on}; predicted for {k.predicted_for} ({k.basis})."
    if not k.same_device and k.factor is not None:
        words += (
            " That is another device, so that sizes say nothing: measured times are "
            f"{k.factor_in_words} the predicted ones (median), and errors are those behind this one factor."
        )
    parts.append(f'<p class="note">{html.escape(words)}</p>')
    parts.append(inline(attention_by_step(k), "attention"))
    parts.append(_errors(k.errors(), "ns"))
    return "\n".join(parts)


def attention_by_step(k: KernelReplay, lang: Lang = "en") -> go.Figure:
    """Time of a step's attention, predicted and measured, and of the whole step as predicted; both in ms, on a log axis
    where devices differ."""
    figure = go.Figure()
    symbols = [SYMBOLS[kind] for kind in k.kinds]
    series = [
        (WHOLE_STEP, k.predicted_for, k.predicted_step_ns, "#999999"),
        (ATTENTION_PREDICTED, k.predicted_for, k.predicted_attention_ns, PREDICTED),
        (ATTENTION_MEASURED, k.measured_on, k.measured_ns, MEASURED),
    ]
    kinds = [Said.of(KIND_WORDS[kind]).text(lang) for kind in k.kinds]
    for label, on, values, colour in series:
        if values is None:
            continue
        figure.add_scatter(
            x=k.steps,
            y=values / 1e6,
            customdata=kinds,
            name=Said.of(label, on=on.partition(",")[0]).text(lang),
            mode="lines+markers",
            marker={"size": 8, "symbol": symbols, "color": colour},
            line={"width": 1.5, "color": colour},
            hovertemplate="%{y:.3f} ms, %{customdata}",
        )
    style(figure, 440)
    figure.update_xaxes(title_text=Said.of(STEP_KINDS).text(lang))
    figure.update_yaxes(title_text=Said.of(TIME).text(lang), type="linear" if k.same_device else "log")
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure


# -- tables ------------------------------------------------------------------------------------------------------------


def _errors(rows: Sequence[ErrorRow], unit: str) -> str:
    header = (
        "error",
        "steps",
        "differ",
        "MAPE",
        "p50",
        "p95",
        "worst step",
        f"predicted ({unit})",
        f"measured ({unit})",
    )
    cells = []
    for row in rows:
        percents = ["–" if p is None else f"{p:.2f} %" for p in (row.mape_percent, row.p50_percent, row.p95_percent)]
        worst = ["–"] * 3
        if row.worst_step >= 0:
            worst = [f"{row.worst_step:,}", f"{row.worst_predicted:,}", f"{row.worst_measured:,}"]
        name = LABELS[row.quantity].en if row.quantity in LABELS else row.quantity
        cells.append((name, f"{row.steps:,}", f"{row.differing:,}", *percents, *worst))
    return _table(header, cells)


def _table(header: Sequence[str], cells: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = f"<thead><tr>{head}</tr></thead><tbody>{_rows(cells)}</tbody>"
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def _rows(cells: Sequence[Sequence[str]]) -> str:
    return "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)


def _absent(why: str) -> str:
    return f'<p class="note">{html.escape(why)}</p>'
