"""Notes and alerts of runs as lines: what a reader must know beside the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hbmtwin.dashboard.standstill import thrashing_text
from hbmtwin.dashboard.verdict import Summary, bytes_text, percent_text

METRICS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "used_bytes": ("KV in use", bytes_text),
    "usage": ("KV usage", percent_text),
    "hit_rate": ("KV hit rate", percent_text),
}
"""The series of the KV monitor: what they are called on screen, and how their values are written."""

MAX_ALERTS = 3
"""Alerts of one run that are told line by line."""


def remarks(summaries: Mapping[str, Summary]) -> list[str]:
    """Notes and alerts of a comparison, a line each; what does not hold for all runs begins with their names."""
    who: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        for note in summary["notes"]:
            who.setdefault(note, []).append(name)
    lines = [note if len(names) == len(summaries) else f"{', '.join(names)}: {note}" for note, names in who.items()]
    return lines + [f"{name}: {line}" for name, summary in summaries.items() for line in alert_lines(summary)]


def alert_lines(summary: Summary) -> Iterator[str]:
    """Thrashing, and the first alerts of a run, as sentences, then how many more there are."""
    if summary.get("thrashing"):
        yield thrashing_text(summary)
    alerts = summary["alerts"]
    for alert in alerts[:MAX_ALERTS]:
        yield alert_text(alert)
    if (more := len(alerts) - MAX_ALERTS) > 0:
        yield f"and {more:,} more {'alerts' if more > 1 else 'alert'}, all in summary.json and with --json"


def alert_text(alert: Summary) -> str:
    """One alert as a sentence: what passed which limit, when, and how far."""
    what, text = METRICS[alert["metric"]]
    until = "the end" if alert["cleared_s"] is None else f"{alert['cleared_s']:,.1f} s"
    farthest = "at most" if alert["kind"] == "above" else "down to"
    return (
        f"{what} {alert['kind']} {text(alert['threshold'])} from {alert['time_s']:,.1f} s to {until}, "
        f"{farthest} {text(alert['worst'])}"
    )
