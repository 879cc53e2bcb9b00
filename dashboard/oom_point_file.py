"""OOM points as files: the tables, and beside the numbers of ``summary.json`` what is said of them.

::

    {..., "said": {"en": {"headline": text, "sentences": [text, ...], "table": [header, row, ...],
                          "memory": [header, row, ...] or null}, "zh": ...}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hbmtwin.dashboard.oom_point_words import header, headline, memory_header, memory_rows, rows, sentences
from hbmtwin.sim.capacity.oom_point import OomPoint
from hbmtwin.sim.capacity.oom_point_tables import write_tables
from hbmtwin.sim.phrases import LANGUAGES, Lang


def write_oom_point(point: OomPoint, directory: Path) -> None:
    """Write all but the page; whoever opens it later may want either language. Raise ResultError."""
    write_tables(point, directory, {"said": {lang: _said(point, lang) for lang in LANGUAGES}})


def _said(point: OomPoint, lang: Lang) -> dict[str, Any]:
    return {
        "headline": headline(point, lang),
        "sentences": sentences(point, lang),
        "table": [header(lang), *rows(point, lang)],
        "memory": [memory_header(point, lang), *memory_rows(point, lang)] if point.smallest else None,
    }
