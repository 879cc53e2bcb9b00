"""Error bars on the screen: of one run beside its numbers, of several one beside the other with their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hbmtwin.cli.tables import print_table
from hbmtwin.dashboard.error_bar_words import (
    NONE,
    ONE_AT_A_TIME,
    bar_header,
    bar_rows,
    compared_rows,
    fate_sentence,
    most_sentence,
    order_sentences,
    origin_text,
    sentences,
)
from hbmtwin.sim.phrases import Said


def print_error_bars(console: Console, named: Mapping[str, Mapping[str, Any]]) -> None:
    """What :func:`hbmtwin.sim.capacity.error_bars.error_bars_to_dicts` made of one run, or of several."""
    console.print("[bold]Error bars[/bold]")
    if not next(iter(named.values()))["ends"]:
        console.print(Said.of(NONE).text())
        return
    if len(named) == 1:
        _one(console, *next(iter(named.items())))
    else:
        _several(console, named)


def _one(console: Console, name: str, told: Mapping[str, Any]) -> None:
    header = bar_header()
    print_table(console, header, bar_rows(told, names=True), words=header[-2:])
    for sentence in sentences(told, name):
        console.print(Text(sentence))
    _origin(console, told)


def _several(console: Console, named: Mapping[str, Mapping[str, Any]]) -> None:
    print_table(console, (bar_header()[0], *named), compared_rows(named))
    for name, told in named.items():
        console.print(Text(f"{fate_sentence(told, name)} {most_sentence(told)}"))
    for sentence in order_sentences(named):
        console.print(Text(sentence))
    first = next(iter(named.values()))
    console.print(Text(Said.of(ONE_AT_A_TIME, ends=len(first["ends"])).text()))
    _origin(console, first)


def _origin(console: Console, told: Mapping[str, Any]) -> None:
    """Of the figure that moves it most: those of all stand in the JSON."""
    if origin := origin_text(told):
        console.print(Text(origin, style="dim"))
