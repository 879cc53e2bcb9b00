"""Run the claims and print what was found: ``python examples/claims [ID ...] [--json | --markdown]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

import claims_a
import claims_b
import claims_c
import claims_growth
import claims_paged
import claims_sharing
from claim import CLAIMS, Found
from joblib import Parallel, delayed
from rich.console import Console
from rich.table import Table

MODULES = (claims_a, claims_b, claims_c, claims_growth, claims_paged, claims_sharing)
"""Each registers its claims when it is imported, here and in every process that runs one."""
HEADER = ("claim", "claimed", "simulated", "verdict", "why")


def find(id: str) -> Found:
    """Run one experiment."""
    return CLAIMS[id].find()


def row(id: str, found: Found) -> tuple[str, ...]:
    """The cells of a claim, under HEADER."""
    return id, CLAIMS[id].claimed, found.simulated, found.verdict, found.why


def markdown(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Print the findings as a table, as JSON or as the Markdown of docs/claims.md."""
    ids = [argument.upper() for argument in arguments if not argument.startswith("--")] or sorted(CLAIMS, key=_order)
    unknown = [id for id in ids if id not in CLAIMS]
    if unknown:
        print(
            f"error: no claim is called {unknown[0]}; there are {', '.join(sorted(CLAIMS, key=_order))}",
            file=sys.stderr,
        )
        return 2
    found = dict(zip(ids, Parallel(n_jobs=-1)(delayed(find)(id) for id in ids), strict=True))
    if "--json" in arguments:
        print(json.dumps({id: {"claimed": CLAIMS[id].claimed, **asdict(f)} for id, f in found.items()}, indent=2))
        return 0
    rows = [row(id, f) for id, f in found.items()]
    if "--markdown" in arguments:
        print("\n".join(map(markdown, (HEADER, ("---",) * len(HEADER), *rows))))
        return 0
    table = Table(*HEADER, show_lines=True)
    for cells in rows:
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and 80 columns break every word
        console = Console(width=max(160, console.width))
    console.print(table)
    return 0


def _order(id: str) -> tuple[str, int]:
    return id[0], int(id[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
