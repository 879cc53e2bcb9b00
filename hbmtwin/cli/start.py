"""``hbmtwin init`` and ``hbmtwin catalog``: a file to begin with, and what can stand in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hbmtwin.cli.exits import OK, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from rich.console import Console


class Part(StrEnum):
    """What ``hbmtwin catalog`` lists."""

    DEVICES = "devices"
    MODELS = "models"
    POLICIES = "policies"
    WORKLOADS = "workloads"


def init(
    file: Annotated[Path, typer.Argument(help="File to write; - for stdout.")] = Path("scenario.toml"),
    json_: Json = False,
) -> int:
    """Write a commented scenario with every key and its default."""
    from hbmtwin.cli.commented import commented_scenario

    if file == Path("-"):
        print(commented_scenario(), end="")
        return OK
    if os.path.lexists(file):
        raise UsageError(f"{file} exists; name another file, or remove it first")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(commented_scenario(), encoding="utf-8")
        partial.rename(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        with suppress(OSError):  # it may not have come to be, as below a file that is no folder
            partial.unlink()
    print(json.dumps({"written": str(file)}) if json_ else f"wrote {file}; now: hbmtwin compare {file}")
    return OK


def catalog(
    part: Annotated[Part | None, typer.Argument()] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Of devices: every figure, with its range, confidence and source.")
    ] = False,
    json_: Json = False,
) -> int:
    """List devices, models, policies and workloads."""
    from hbmtwin.cli import device_tables, listing, tables

    if all_:
        if part is not Part.DEVICES:
            raise UsageError("--all lists the figures of devices: use hbmtwin catalog devices --all")
        figures = listing.list_device_figures()
        if json_:
            print(json_text(figures))
        else:
            device_tables.print_device_figures(stdout(), figures)
        return OK
    verbs: dict[Part, tuple[Callable[[], Any], Callable[[Console, Any], None]]] = {
        Part.DEVICES: (listing.list_devices, device_tables.print_devices),
        Part.MODELS: (listing.list_models, tables.print_models),
        Part.POLICIES: (listing.list_policies, tables.print_policies),
        Part.WORKLOADS: (listing.list_workloads, tables.print_workloads),
    }
    found = {name: verbs[name][0]() for name in ([part] if part else Part)}
    if json_:
        print(json_text(found[part] if part else found))
        return OK
    for name, entries in found.items():
        verbs[name][1](stdout(), entries)
    return OK
