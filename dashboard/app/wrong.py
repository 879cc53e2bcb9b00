"""What somebody got wrong, on a page: the first sentences of it, and how many more there are."""

from __future__ import annotations

import streamlit as st

from hbmtwin.api import DoesNotFit
from hbmtwin.dashboard.app.in_chinese import in_chinese
from hbmtwin.dashboard.app.language import as_text, lang, text
from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.fit.advice import ANY_ONE
from hbmtwin.sim.fit.words import DOES_NOT, NOTHING, SMALLEST
from hbmtwin.sim.phrases import Phrase

MOST_LINES = 5
"""Of an error that has one for each setting: an address may have hundreds of them."""
MORE = Phrase("and {count:,} more", "另有 {count:,} 处")
IN_ENGLISH = Phrase("In the words of the command line:", "以下说明与命令行相同，为英文：")


def show_wrong(error: Exception | str) -> None:
    """Draw why it cannot be done, and the cure, as the command line words it; in Chinese where that is known."""
    st.error(wrong_text(error), icon=":material/edit:")


def wrong_text(error: Exception | str) -> str:
    """A paragraph a sentence, of which no letter means anything to Markdown."""
    if isinstance(error, DoesNotFit) and error.budget.why is not None and lang() != "en":
        return "\n\n".join(map(as_text, _does_not_start(error.budget)))
    said = [line for line in str(error).splitlines() if line.strip()]
    lines = said[:MOST_LINES] if lang() == "en" else _translated(said[:MOST_LINES])
    if len(said) > MOST_LINES:
        lines.append(text(MORE, count=len(said) - MOST_LINES))
    return "\n\n".join(map(as_text, lines))


def why_text(why: str) -> str:
    """A reason within a sentence, or a note of a run, as it is in English; in Chinese where that is known."""
    return why if lang() == "en" else in_chinese(why) or why


def _translated(lines: list[str]) -> list[str]:
    """Those that are known in Chinese, then the others in English behind a word that says so."""
    told = [(line, in_chinese(line)) for line in lines]
    english = [line for line, zh in told if zh is None]
    return [*(zh for _, zh in told if zh is not None), *([text(IN_ENGLISH)] if english else []), *english]


def _does_not_start(budget: MemoryBudget) -> list[str]:
    """Why, and what helps: its reason has both in English, and the changes are named by their keys."""
    _, _, changes = budget.reason.partition(ANY_ONE)
    why = text(DOES_NOT, why=budget.why)
    return [why, f"{text(SMALLEST)}：{changes}" if changes else text(NOTHING)]
