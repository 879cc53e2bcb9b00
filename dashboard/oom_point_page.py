"""OOM points as a page that works without a network: ``report.html``, and ``plotly.min.js`` beside it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from hbmtwin.dashboard.figures import inline
from hbmtwin.dashboard.oom_point_figure import cause_shares, memory_by_load_figure, share_by_load, share_by_place
from hbmtwin.dashboard.oom_point_words import HEADER, headline, memory_header, memory_rows, rows, sentences
from hbmtwin.sim.capacity.oom_point import OomPoint
from hbmtwin.sim.capacity.oom_point_curves import CONFIDENCE
from hbmtwin.sim.capacity.oom_point_tables import write_file

PREEMPTS = "A policy that preempts may never run out: the dotted line is its first preemption."
MEMORY = """
<h2>The smallest memory that survives</h2>
<p class="note">Device memory on which a load is served without running out, all else as in the scenario, found to 1/32
GiB: the middle of the draws, and from the least to the most as a band. Dotted: without a preemption either.</p>
"""


def write_oom_point_page(point: OomPoint, directory: Path) -> None:
    """Write the page into *directory*; same answers, same bytes. Raise ResultError."""
    template = Template(files("hbmtwin.dashboard").joinpath("oom_point.html").read_text(encoding="utf-8"))
    died = any(c.row is not None for c in point.critical if c.end == "fails")
    memory = ""
    if point.smallest:
        table = _table(memory_header(point), memory_rows(point))
        memory = MEMORY + inline(memory_by_load_figure(point), "memory") + f'<div class="wide">{table}</div>'
    page = template.substitute(
        headline=html.escape(headline(point)),
        sentences="\n".join(f"<li>{html.escape(text)}</li>" for text in sentences(point)),
        table=_table(HEADER, rows(point)),
        confidence=f"{CONFIDENCE:.0%}",
        preempts=PREEMPTS if any("preempts" in ends for ends in point.ends.values()) else "",
        by_load=inline(share_by_load(point), "by-load"),
        causes=inline(cause_shares(point), "causes"),
        by_place=inline(share_by_place(point), "by-place") if died else "<p>No run died.</p>",
        memory=memory,
        runs=f"{len({row['key'] for row in point.runs}):,}",
        version=html.escape(version("hbmtwin")),
        seed=point.scenario.seed,
    )
    write_file(directory / "plotly.min.js", get_plotlyjs().encode())
    write_file(directory / "report.html", page.encode())


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
