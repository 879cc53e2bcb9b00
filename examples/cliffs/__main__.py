"""Sweep the pool and print where the cliffs are: ``python examples/cliffs [--json | --markdown] [--picture FILE]``."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from cliff import Point, sweep
from rich.console import Console
from rich.table import Table

HEADER = ("rule", "KV pool (GiB)", "verdict", "preemptions", "recomputed (%)", "TTFT p99 (s)", "end (s)", "completed")
USAGE = "usage: python examples/cliffs [--json | --markdown] [--picture FILE.html]"


def cells(p: Point) -> tuple[str, ...]:
    """A point under HEADER; of a run that would not end, TTFT is of those that were answered before."""
    return (
        p.rule,
        f"{p.pool_gib:.2f}",
        p.verdict,
        f"{p.preemptions:,}",
        f"{100 * p.recomputed_share:.1f}",
        f"{p.ttft_p99_s:,.2f}",
        f"{p.end_s:,.0f}",
        f"{p.completed:,}",
    )


def main(arguments: list[str]) -> int:
    """Print the sweep as a table, as JSON or as Markdown; with --picture also draw it."""
    rest, page = list(arguments), None
    if "--picture" in rest:
        place = rest.index("--picture")
        page = rest[place + 1] if place + 1 < len(rest) else ""
        del rest[place : place + 2]
    if page == "" or [a for a in rest if a not in ("--json", "--markdown")]:
        print(USAGE, file=sys.stderr)
        return 2
    points = sweep()
    if page is not None:
        from picture import cliffs

        cliffs(points).write_html(Path(page), include_plotlyjs=True, config={"displayModeBar": False})
    if "--json" in rest:
        print(json.dumps([{**p._asdict(), "pool_gib": p.pool_gib} for p in points], indent=2))
    elif "--markdown" in rest:
        rows = (HEADER, ("---",) * len(HEADER), *(cells(p) for p in points))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        table = Table(*HEADER)
        for p in points:
            table.add_row(*cells(p))
        console = Console()
        if not console.is_terminal:
            console = Console(width=max(120, console.width))
        console.print(table)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that joblib ends its workers
    sys.exit(main(sys.argv[1:]))
