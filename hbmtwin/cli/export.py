"""``hbmtwin export``: a stored result for other tools."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hbmtwin.cli.exits import OK, UsageError
from hbmtwin.cli.options import Json


class ExportFormat(StrEnum):
    """What ``hbmtwin export`` writes."""

    PERFETTO = "perfetto"
    OPENMETRICS = "openmetrics"
    CSV = "csv"
    LAST_OPERATIONS = "last_operations"


def export(
    result: Annotated[Path, typer.Argument(help="Result directory, as `hbmtwin run --out` writes it.")],
    fmt: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="perfetto: a trace for ui.perfetto.dev; openmetrics: vLLM's metrics over simulated time; csv: every "
            "table; last_operations: CSV of the 48 operations before memory ran out.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="File to write, packed if its name ends in .gz; of csv: a directory, a file a table.")
    ],
    json_: Json = False,
) -> int:
    """Write a result for other tools: Perfetto, Prometheus, spreadsheets."""
    from hbmtwin.api import Result, check_exportable
    from hbmtwin.api import export as write

    if not (result / "summary.json").is_file():
        runs = sorted(path.parent.name for path in result.glob("*/summary.json"))
        hint = f"name one of its runs, e.g. {result / runs[0]}" if runs else "`hbmtwin run --out DIRECTORY` writes one"
        raise UsageError(f"{result}: not a result directory of hbmtwin; {hint}")
    if (reason := check_exportable(fmt.value, out)) is not None:
        raise UsageError(reason)
    loaded = Result.load(result)
    if fmt is ExportFormat.LAST_OPERATIONS and loaded.oom is None:
        raise UsageError(f"{result}: memory did not run out in this run, so there is no last operation")
    write(loaded, fmt.value, out)
    print(json.dumps({"written": str(out), "format": fmt.value}) if json_ else f"wrote {out}")
    return OK
