"""``hbmtwin explain``: a pasted log or error in plain words, why it happened, and what would help."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import FAILURE, OK, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.sim.explain.decode import Decoded


class Language(StrEnum):
    """Of what is said to people."""

    EN = "en"
    ZH = "zh"


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE|-", help="A log, an error, npu-smi or nvidia-smi; -: stdin.")],
    lang: Annotated[Language, typer.Option(help="Language of what is printed.")] = Language.EN,
    scenario: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write what the text tells as a scenario for `fit` and `run`."),
    ] = None,
    json_: Json = False,
) -> int:
    """Say what a pasted log or error means, why it ran out of memory, what would help and what would not."""
    from hbmtwin.sim.explain.explaining import explain_decoded

    decoded = _standard_input() if str(file) == "-" else _file(file)
    told = explain_decoded(decoded, lang.value)
    if scenario is not None and told.scenario:
        _write(scenario, told.scenario)
    if json_:
        print(json_text(told.to_dict()))
    else:
        from hbmtwin.cli.explain_screen import ExplainScreen

        ExplainScreen(stdout(), lang.value).show(told, scenario)
    return OK if told.understood else FAILURE


def _file(path: Path) -> Decoded:
    if path.is_dir():
        raise UsageError(f"{path}: this is a directory; name one file of it, or `cat {path}/*.log | hbmtwin explain -`")
    try:
        with path.open("rb") as stream:
            return _read(stream)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; to paste a text, run `hbmtwin explain -` and end it with Ctrl-D"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _standard_input() -> Decoded:
    if sys.stdin is None:
        raise UsageError("-: stdin is closed; name a file, or pipe a text into `hbmtwin explain -`")
    if sys.stdin.isatty():
        print("Paste the text here, then press Enter and Ctrl-D:", file=sys.stderr)
    return _read(sys.stdin.buffer)


def _read(stream: IO[bytes]) -> Decoded:
    from hbmtwin.sim.explain.decode import read_limited

    return read_limited(stream)


def _write(path: Path, text: str) -> None:
    """Write the scenario, never over a file that is there."""
    if path.exists():
        raise UsageError(f"--scenario {path}: it is there already; name a new file, or remove it")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--scenario {path}: cannot be written: {error.strerror}") from None
