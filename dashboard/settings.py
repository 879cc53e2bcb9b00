"""In which settings the runs of a comparison differ, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from hbmtwin.api import Scenario, differences
from hbmtwin.dashboard.verdict import MISSING


def settings_table(scenarios: Mapping[str, Scenario]) -> tuple[list[str], list[tuple[str, ...]]]:
    """In what runs differ: a header, and a row a run; no columns but the name where they do not.

    A dash stands where a key does not concern a run.
    """
    table = differences(scenarios)
    header = ["policy", *(key.replace(".", ".\n", 1) for key in table)]
    rows = [
        (name, *(setting_text(row[name]) if name in row else MISSING for row in table.values())) for name in scenarios
    ]
    return header, rows


def setting_text(value: object) -> str:
    """The value of a key on screen."""
    if value is None or value == "":
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting_text(inner)}" for key, inner in value.items())
    return str(value)
