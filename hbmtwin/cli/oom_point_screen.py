"""How OOM points look on a terminal: a sentence for each policy, then the tables behind them."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from hbmtwin.cli.tables import print_table
from hbmtwin.dashboard.oom_point_words import HEADER, headline, memory_header, memory_rows, rows, sentences
from hbmtwin.sim.capacity.oom_point import OomPoint


def print_oom_point(console: Console, point: OomPoint, wall_s: float) -> None:
    """The answer first."""
    console.print(f"[bold]{escape(headline(point))}[/bold]")
    for sentence in sentences(point):
        console.print(escape(sentence))
    print_table(console, HEADER, rows(point), words=("causes",))
    if point.smallest:
        console.print(
            "Smallest device memory that survives (GiB): the middle of the draws, and from the least to the most."
        )
        print_table(console, memory_header(point), memory_rows(point))
    runs = len({row["key"] for row in point.runs})
    console.print(
        "Users, turn, time and operations are medians of the runs at the critical loads; of a policy that preempts, "
        "the time of its first preemption. Loads between those that were asked for are not known. "
        f"{runs:,} runs, {wall_s:.1f} s.",
        style="dim",
    )
