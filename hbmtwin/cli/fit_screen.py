"""How the answer of ``fit`` looks on a terminal: as wide as it is, in either language.

::

    title
    label     GiB  |     bar, each beginning where the one above ended     |  exact, or estimated within a range
    ...            |                                                       |
    the engine's log lines; the formula; warnings; the verdict; what would help
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hbmtwin.cli.wrapping import wrap
from hbmtwin.sim.fit import words
from hbmtwin.sim.fit.advice import Advice
from hbmtwin.sim.fit.report import Fit
from hbmtwin.sim.fit.what_is_kv import WHAT_IS_KV
from hbmtwin.sim.phrases import Lang, Phrase, Said

GIB = 1 << 30
WIDEST = 100
"""Columns beyond which a bar is harder to read, not easier."""
BAR = 12
"""Columns that a bar has at least; else the words beside it are shortened."""
COLOURS = {
    "other tenants": "red",
    "context": "magenta",
    "weights": "blue",
    "activations": "yellow",
    "non-torch": "cyan",
    "graphs": "bright_magenta",
    "late buffers": "bright_red",
    "KV cache": "green",
    "operators": "bright_cyan",
    "run-time sampler": "bright_yellow",
    "unplanned": "bright_black",
}


class FitScreen:
    """Prints one answer on *console* in *lang*."""

    def __init__(self, console: Console, lang: Lang) -> None:
        self._console = console
        self._lang: Lang = lang
        self._full, self._line = ("█", "─") if console.encoding.lower().startswith("utf") else ("#", "-")

    def show(self, fit: Fit) -> None:
        """All of it, from where the memory goes to what would help."""
        self._say(words.title(fit), "bold")
        if fit.built_in:
            self._say(words.BUILT_IN)
        for said in words.settings(fit):
            self._say(said, "dim")
        self._breakdown(fit)
        self._list(words.STAGES, words.stages(fit))
        self._log(fit)
        self._list(words.HOW, words.formula(fit))
        self._console.print()
        for warning in fit.warnings:
            if warning != fit.refused:
                self._say(Said.of(words.NOTE, text=warning), "yellow")
        for said in words.verdict(fit):
            self._say(said, "bold" if fit.fits else "bold red")
        self._advice(fit)

    def _breakdown(self, fit: Fit) -> None:
        if (only := words.only_kv(fit)) is not None:
            self._say(only)
            return
        lines = [line for line in fit.budget.lines if line.bytes or line.high]
        total = fit.budget.total_bytes
        self._heading(
            Said.of(words.WHERE_OF_RANK, rank=fit.budget.binding_rank) if fit.budget.stages else Said.of(words.WHERE)
        )
        labels = [self._text(words.label(line.item)) for line in lines] + [self._text(words.DEVICE_SUM)]
        label_width = max(map(cell_len, labels))
        size_width = max(len(_gib(n)) for n in [*(line.bytes for line in lines), total])
        width = min(self._console.width, WIDEST) - (label_width + size_width + 6)
        known = [self._text(words.how_known(line)) for line in lines]
        if width - 2 - max(map(cell_len, known)) < BAR:
            known = [self._text(words.how_known(line, short=True)) for line in lines]
        bar = max(1, width - 2 - max(map(cell_len, known)))
        edges = _edges([line.bytes for line in lines], total, bar)
        for line, text, how, (start, end) in zip(lines, labels, known, edges, strict=False):
            row = Text("  " + _pad(text, label_width) + "  " + _gib(line.bytes).rjust(size_width) + "  " + " " * start)
            row.append(self._full * (end - start), COLOURS.get(line.item, "white"))
            row.append(" " * (bar - end) + "  " + how, "dim")
            row.rstrip()
            self._console.print(row, soft_wrap=True)
        row = Text("  " + _pad(labels[-1], label_width) + "  " + _gib(total).rjust(size_width) + "  ", "bold")
        self._console.print(row.append(self._line * edges[-1][1]), soft_wrap=True)
        if any(line.low != line.high for line in lines):
            self._say(words.SOURCES, "dim", 2)
        self._say(WHAT_IS_KV, "dim", 2)

    def _log(self, fit: Fit) -> None:
        if fit.boot_lines:
            self._heading(words.LOG)
            for line in fit.boot_lines:
                self._lines(line, "", 2)

    def _advice(self, fit: Fit) -> None:
        if fit.fits:
            return
        if fit.advice:
            self._changes(words.SMALLEST, fit.advice)
        elif fit.advised.pairs:
            self._changes(words.TOGETHER, fit.advised.pairs)
        elif fit.advised.helps:  # no kernel runs it, and no change helps both
            self._changes(words.SMALLEST_FOR_MEMORY, fit.advised.helps)
        else:
            self._say(words.NOTHING_RUNS if fit.budget.fits else words.NOTHING, "bold")
        if fit.refused is None and fit.advised.helps and fit.advised.in_vain:
            self._say(Said.of(words.NOT_ALONE, names=", ".join(fit.advised.in_vain)), "dim")

    def _changes(self, heading: Phrase, helps: Sequence[Advice]) -> None:
        self._heading(heading)
        rows = [(self._text(advice.change), self._text(words.result(advice))) for advice in helps]
        width = max(cell_len(change) for change, _ in rows)
        beside = 2 + width + 4 + max(cell_len(result) for _, result in rows) <= self._console.width
        for advice, (change, result) in zip(helps, rows, strict=True):
            if beside:
                self._console.print(Text(f"  {_pad(change, width)}    ").append(result, "dim"))
            else:
                self._lines(change, "", 2)
                self._lines(result, "dim", 6)
            for note in advice.notes:
                self._say(Said.of(words.NOTE, text=note), "yellow", 6)

    def _list(self, heading: Phrase, lines: Sequence[Said]) -> None:
        if lines:
            self._heading(heading)
        for said in lines:
            self._say(said, indent=2)

    def _heading(self, said: Said | Phrase) -> None:
        self._console.print()
        self._say(said, "bold")

    def _say(self, said: Said | Phrase, style: str = "", indent: int = 0) -> None:
        self._lines(self._text(said), style, indent)

    def _lines(self, text: str, style: str, indent: int) -> None:
        """*text*, whose continuation lines stand two columns further in where it is indented."""
        width = max(20, min(self._console.width, WIDEST) - indent - 2 * bool(indent))
        for i, line in enumerate(wrap(text, width)):
            self._console.print(Text(" " * (indent + 2 * bool(indent and i)) + line, style), soft_wrap=True)

    def _text(self, said: Said | Phrase) -> str:
        return (said if isinstance(said, Said) else Said.of(said)).text(self._lang)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _edges(sizes: Sequence[int], total: int, width: int) -> list[tuple[int, int]]:
    """Where the bar of each line begins and ends: each follows the one above. Last, that of the whole device.

    Where more is needed than the device has, they are drawn smaller, and run past the device's end.
    """
    scale = max(1, total, sum(size for size in sizes if size > 0))
    at, found = 0, []
    for size in sizes:
        start, at = at, at + max(0, size)
        found.append((round(start * width / scale), round(at * width / scale)))
    return [*found, (0, round(total * width / scale))]
