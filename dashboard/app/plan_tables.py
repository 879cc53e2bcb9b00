"""Tables of a stored plan: the single changes that were run, and uncertain figures with the answers at their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hbmtwin.dashboard.app.language import lang, text
from hbmtwin.dashboard.figure_text import figure_text
from hbmtwin.dashboard.verdict import MISSING
from hbmtwin.sim.capacity.assumptions import WORDS
from hbmtwin.sim.capacity.plan_phrases import NO_VALUE, change_name
from hbmtwin.sim.phrases import Phrase

CHANGE, HELD, CARRIES = Phrase("change", "改动"), Phrase("held", "满足"), Phrase("carries to", "可到")
OF = Phrase("{held} of {trials}", "{held} / {trials}")
DROPS = Phrase("{change} (drops tokens)", "{change}（会丢弃 token）")
OR_MORE = Phrase("{value} or more", "{value} 或更多")
FIGURE, LOW, VALUE, HIGH = (
    Phrase("figure", "系数"),
    Phrase("low", "下限"),
    Phrase("value", "取值"),
    Phrase("high", "上限"),
)
AT_LOW, AT_HIGH = Phrase("answer at low", "取下限时的结论"), Phrase("answer at high", "取上限时的结论")


def changes_table(changes: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a change, in the order of the plan: those that carry farthest first."""
    rows = []
    for change in changes:
        name = change_name(change["name"], lang())
        far = MISSING if change["carries_to"] is None else _value(change["carries_to"])
        rows.append(
            (
                text(DROPS, change=name) if change["drops_tokens"] else name,
                text(OF, held=change["held"], trials=change["trials"]),
                text(OR_MORE, value=far) if change["at_least"] else far,
            )
        )
    return pd.DataFrame(rows, columns=[text(CHANGE), text(HELD), text(CARRIES)])


def figures_table(figures: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a figure whose range moves the answer."""
    rows = [
        (
            text(WORDS[one["name"]]) if one["name"] in WORDS else one["name"],
            *(figure_text(one["name"], one[end]) for end in ("low", "value", "high")),
            _value(one["answer_at_low"]),
            _value(one["answer_at_high"]),
        )
        for one in figures
    ]
    return pd.DataFrame(rows, columns=[text(title) for title in (FIGURE, LOW, VALUE, HIGH, AT_LOW, AT_HIGH)])


def _value(value: float | None) -> str:
    return text(NO_VALUE) if value is None else f"{value:,}"
