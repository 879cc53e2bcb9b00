"""Run the claims and print what was found, or write docs/claims.md from it: ``python examples/claims --help``."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path

import claims_a
import claims_b
import claims_bytes
import claims_c
import claims_capacity
import claims_copies
import claims_fragments
import claims_growth
import claims_paged
import claims_sharing
from claim import CLAIMS, Found, order
from joblib import Parallel, delayed
from page import COLUMNS, page, row, table, write
from rich.console import Console
from rich.table import Table

MODULES = (
    claims_a,
    claims_b,
    claims_bytes,
    claims_c,
    claims_capacity,
    claims_copies,
    claims_fragments,
    claims_growth,
    claims_paged,
    claims_sharing,
)
"""Each registers its claims when it is imported, here and in every process that runs one."""
LONGEST = ("C13", "A1", "C5", "C6", "A8", "B4", "C4")
"""Those of several seconds, longest first: begun first, so that none is still running when all others have ended."""


def find(id: str) -> Found:
    """Run one experiment."""
    return CLAIMS[id].find()


def find_all(ids: list[str]) -> dict[str, Found]:
    """Run them in parallel."""
    begun = [id for id in LONGEST if id in ids] + [id for id in ids if id not in LONGEST]
    found = dict(zip(begun, Parallel(n_jobs=-1)(delayed(find)(id) for id in begun), strict=True))
    return {id: found[id] for id in ids}


def main(arguments: list[str]) -> int:
    """Print the findings as a table, as JSON or as Markdown, or write the page that has them all."""
    parser = ArgumentParser("python examples/claims", description="Run the claims and print what was found.")
    parser.add_argument("ids", nargs="*", metavar="ID", type=str.upper, help="A1, C5 ...; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print what was found as JSON")
    form.add_argument("--markdown", action="store_true", help="print the table of docs/claims.md")
    form.add_argument("--write", metavar="FILE", type=Path, help="write all of docs/claims.md to FILE")
    given = parser.parse_args(arguments)
    known = sorted(CLAIMS, key=order)
    unknown = [id for id in given.ids if id not in CLAIMS]
    if unknown:
        print(f"error: no claim is called {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if given.write and given.ids:
        print("error: the page has all claims; leave out their names, or --write", file=sys.stderr)
        return 2
    found = find_all(given.ids or known)
    if given.write:
        try:
            write(given.write, page(found))
        except OSError as error:
            print(f"error: {given.write}: {error.strerror}; give a file in a directory that is there", file=sys.stderr)
            return 1
    elif given.json:
        print(json.dumps({id: {"claimed": CLAIMS[id].claimed, **asdict(f)} for id, f in found.items()}, indent=2))
    elif given.markdown:
        print("\n".join(table(found)))
    else:
        show(found)
    return 0


def show(found: dict[str, Found]) -> None:
    """As a table on the screen."""
    screen = Table(*COLUMNS, show_lines=True)
    for id, f in found.items():
        screen.add_row(*row(id, f))
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and 80 columns break every word
        console = Console(width=max(160, console.width))
    console.print(screen)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that joblib ends its workers
    sys.exit(main(sys.argv[1:]))
