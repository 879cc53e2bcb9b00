"""In which settings the runs of a comparison differ, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from hbmtwin.api import Scenario, differences
from hbmtwin.dashboard.verdict import MISSING
from hbmtwin.sim.phrases import Lang, Phrase, Said

POLICY = Phrase("policy", "策略")
DEFAULT = Phrase("default", "默认")


def settings_table(scenarios: Mapping[str, Scenario], lang: Lang = "en") -> tuple[list[str], list[tuple[str, ...]]]:
    """In what runs differ: a header, and a row a run; no columns but the name where they do not.

    A dash stands where a key does not concern a run.
    """
    table = differences(scenarios)
    header = [Said.of(POLICY).text(lang), *(key.replace(".", ".\n", 1) for key in table)]
    rows = [
        (name, *(setting_text(row[name], lang) if name in row else MISSING for row in table.values()))
        for name in scenarios
    ]
    return header, rows


def setting_text(value: object, lang: Lang = "en") -> str:
    """The value of a key on screen."""
    if value is None or value == "":
        return Said.of(DEFAULT).text(lang)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting_text(inner, lang)}" for key, inner in value.items())
    return str(value)
