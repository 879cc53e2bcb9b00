"""A description of traffic as one HTML page, and ``plotly.min.js`` beside it, that works without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from hbmtwin import __version__
from hbmtwin.dashboard.figures import inline
from hbmtwin.dashboard.workload_figure import arrivals_at_two_scales, length_distributions, reuse_by_capacity
from hbmtwin.dashboard.workload_words import Rows, facts, headline, lengths_table, reuse_table, windows_table
from hbmtwin.workloads.statistics.describe import Description

_NOTHING_SHARED = "<p>The trace tells of no prompt that begins as another does.</p>"


def write_workload_report(name: str, d: Description, path: Path, notes: Sequence[str] = ()) -> None:
    """Write the page at *path* and ``plotly.min.js`` beside it; same description, same bytes. Raise OSError."""
    template = Template(files("hbmtwin.dashboard").joinpath("workload.html").read_text(encoding="utf-8"))
    page = template.substitute(
        name=html.escape(name),
        headline=html.escape(headline(d)),
        facts="".join(_row(cells) for cells in facts(d)),
        notes="".join(f'<p class="note">{html.escape(note)}</p>' for note in notes),
        arrivals=inline(arrivals_at_two_scales(d), "arrivals"),
        windows=_table(windows_table(d)),
        lengths=inline(length_distributions(d), "lengths"),
        quantiles=_table(lengths_table(d)),
        reuse=_NOTHING_SHARED if d.reuse is None else inline(reuse_by_capacity(d.reuse), "reuse"),
        hits="" if d.reuse is None else _table(reuse_table(d.reuse)),
        version=html.escape(__version__),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    path.write_text(page, encoding="utf-8")


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in rows.header)
    body = "".join(_row(cells) for cells in rows.cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
