"""What ``hbmtwin workload`` prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hbmtwin.cli.tables import print_table
from hbmtwin.dashboard.workload_words import Rows, facts, headline, lengths_table, reuse_table, windows_table
from hbmtwin.workloads.statistics.describe import Description


def print_description(console: Console, name: str, d: Description) -> None:
    """One line that says how much, then what is one number, then tables."""
    console.print(f"[bold]{escape(name)}: {escape(headline(d))}[/bold]")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in facts(d):
        table.add_row(label, escape(text))
    console.print(table)
    console.print()
    _print(console, lengths_table(d))
    if d.arrivals.span_s:
        _print(console, windows_table(d))
    if d.reuse is not None:
        _print(console, reuse_table(d.reuse))


def _print(console: Console, rows: Rows) -> None:
    console.print(f"[bold]{escape(rows.title)}[/bold]")
    print_table(console, rows.header, rows.cells)
