"""How an explanation looks on a terminal, in either language.

::

    the verdict in one sentence, start-up or run time
    What it says          sentences with their lines
    Why                   each judgement: its cause, its books
    What helps            + changes with their numbers
    What does not help    - usual advice that would not
    Could not be read     what was passed over
    Go on with            hbmtwin fit ..., the scenario file
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hbmtwin.cli.wrapping import wrap
from hbmtwin.sim.explain.explanation import Explanation
from hbmtwin.sim.explain.judge import Judgement, cause_line
from hbmtwin.sim.explain.words import (
    ANOTHER,
    BOOKS,
    CAN_WRITE,
    CHECKED,
    GO_ON,
    HELPS,
    MORE,
    NOT_READ,
    NOT_WRITTEN,
    SAYS,
    TRIED,
    USELESS,
    WHY,
    WRITTEN,
)
from hbmtwin.sim.fit.what_is_kv import WHAT_IS_KV
from hbmtwin.sim.phrases import Lang, Phrase, Said

WIDEST = 100
"""Columns beyond which a sentence is harder to read, not easier."""
MOST_JUDGEMENTS = 3


class ExplainScreen:
    """Prints one explanation on *console* in *lang*."""

    def __init__(self, console: Console, lang: Lang) -> None:
        self._console = console
        self._lang: Lang = lang

    def show(self, told: Explanation, scenario: Path | None = None) -> None:
        """All of it, the verdict first."""
        self._say(told.verdict, "bold red" if told.judgements or not told.understood else "bold green", sentence=True)
        if told.direction is not None:
            self._say(told.direction, "yellow", sentence=True)
        self._list(SAYS, told.says, "  ")
        for at, judgement in enumerate(told.judgements[:MOST_JUDGEMENTS]):
            self._judgement(judgement, first=at == 0, tried=told.tried)
        if (more := len(told.judgements) - MOST_JUDGEMENTS) > 0:
            self._say(Said.of(MORE, count=more), "dim")
        self._list(BOOKS, told.arithmetic, "  ")
        if not told.judgements:
            self._list(CHECKED, told.tried, "  ")
        self._list(NOT_READ, told.not_read, "  ", "dim")
        self._go_on(told, scenario)

    def _judgement(self, judgement: Judgement, *, first: bool, tried: Iterable[Said]) -> None:
        if not first:
            self._console.print()
            self._say(Said.of(ANOTHER, line=judgement.line, said=judgement.said), "bold red")
        self._list(WHY, (cause_line(judgement), *judgement.arithmetic), "  ")
        if first and judgement.facts.fixed_pool and judgement.cause is not None:
            self._say(WHAT_IS_KV, "dim", "  ")
        if first and tried and judgement.when == "start_up":
            self._list(TRIED, tuple(tried), "+ ", "green")
        self._list(HELPS, judgement.helps, "+ ", "green")
        self._list(USELESS, judgement.does_not_help, "- ", "dim")

    def _go_on(self, told: Explanation, scenario: Path | None) -> None:
        lines: list[Said] = list(told.doubts)
        if scenario is not None:
            lines.append(Said.of(WRITTEN, path=scenario) if told.scenario else Said.of(NOT_WRITTEN))
        elif told.scenario:
            lines.append(Said.of(CAN_WRITE))
        if not lines and not told.fit_command:
            return
        self._console.print()
        self._say(GO_ON, "bold")
        if told.fit_command:  # in one line, so that it can be copied
            self._console.print(Text("  " + told.fit_command), soft_wrap=True)
        for line in lines:
            self._say(line, "", "  ")

    def _list(self, heading: Phrase, said: Iterable[Said], mark: str, style: str = "") -> None:
        sentences = tuple(said)
        if not sentences:
            return
        self._console.print()
        self._say(heading, "bold")
        for sentence in sentences:
            self._say(sentence, style, mark)

    def _say(self, said: Said | Phrase, style: str = "", mark: str = "", *, sentence: bool = False) -> None:
        """A sentence behind *mark*, whose continuation lines stand under its first word."""
        text = self._text(said)
        if sentence:
            text = text[:1].upper() + text[1:] + ("." if self._lang == "en" else "。")
        width = max(20, min(self._console.width, WIDEST) - len(mark))
        for at, line in enumerate(wrap(text, width)):
            self._console.print(Text((mark if at == 0 else " " * len(mark)) + line, style), soft_wrap=True)

    def _text(self, said: Said | Phrase) -> str:
        return (said if isinstance(said, Said) else Said.of(said)).text(self._lang)
