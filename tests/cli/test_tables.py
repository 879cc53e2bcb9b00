"""Tables for people: nothing is cut off, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hbmtwin.api import Scenario, run
from hbmtwin.cli.tables import WIDE, print_comparison
from hbmtwin.dashboard.verdict import HEADER, rows

FEW = ("workload.num_prompts=12",)


@pytest.mark.parametrize("width", [72, 100, WIDE, 200])
def test_every_number_is_whole_at_every_width(width: int) -> None:
    summaries = {name: run(Scenario.load(preset=name, overrides=FEW)).summary for name in ("doubling", "paged")}
    out = io.StringIO()
    print_comparison(Console(file=out, width=width, force_terminal=False), summaries, wall_s=1.0)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for row in rows(summaries):
        for title, cell in list(zip(HEADER, row, strict=True))[2:]:
            assert cell in text, title
    assert "…" not in text


def test_a_narrow_terminal_gets_a_column_a_policy() -> None:
    summaries = {"paged": run(Scenario.load(overrides=FEW)).summary}
    out = io.StringIO()
    print_comparison(Console(file=out, width=WIDE - 1, force_terminal=False), summaries, wall_s=1.0)
    labels = [line.split("  ")[0].strip() for line in out.getvalue().splitlines()]
    assert {"verdict", "completed", "KV util. (%)", "makespan (s)"} <= set(labels)
