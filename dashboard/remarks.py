"""Notes and alerts of runs as lines: what a reader must know beside the numbers. Notes are in English, as results have
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hbmtwin.dashboard.standstill import thrashing_text
from hbmtwin.dashboard.verdict import LIST_COMMA, Summary, bytes_text, joined, percent_text
from hbmtwin.sim.phrases import Lang, Phrase, Said

METRICS: dict[str, tuple[Phrase, Callable[[Any], str]]] = {
    "used_bytes": (Phrase("KV in use", "KV 用量"), bytes_text),
    "usage": (Phrase("KV usage", "KV 使用率"), percent_text),
    "hit_rate": (Phrase("KV hit rate", "KV 命中率"), percent_text),
}
"""The series of the KV monitor: what they are called on screen, and how their values are written."""

MAX_ALERTS = 3
"""Alerts of one run that are told line by line."""

OF_RUNS = Phrase("{names}: {line}", "{names}：{line}")
ABOVE = Phrase(
    "{what} above {limit} from {begin_s:,.1f} s to {end}, at most {worst}",
    "{what}高于 {limit}：{begin_s:,.1f} s 至{end}，最高 {worst}",
)
BELOW = Phrase(
    "{what} below {limit} from {begin_s:,.1f} s to {end}, down to {worst}",
    "{what}低于 {limit}：{begin_s:,.1f} s 至{end}，最低 {worst}",
)
UNTIL = Phrase("{time_s:,.1f} s", " {time_s:,.1f} s")
THE_END = Phrase("the end", "结束")
MORE_ALERTS = Phrase(
    "and {count:,} more alerts, all in summary.json and with --json",
    "另有 {count:,} 条告警，全部见 summary.json 和 --json 输出",
)
MORE_ALERT = Phrase(
    "and 1 more alert, all in summary.json and with --json", "另有 1 条告警，全部见 summary.json 和 --json 输出"
)


def remarks(summaries: Mapping[str, Summary], lang: Lang = "en") -> list[str]:
    """Notes and alerts of a comparison, a line each; what does not hold for all runs begins with their names."""
    who: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        for note in summary["notes"]:
            who.setdefault(note, []).append(name)
    lines = [
        note if len(names) == len(summaries) else _of(joined(names, LIST_COMMA, lang), note, lang)
        for note, names in who.items()
    ]
    return lines + [_of(name, line, lang) for name, summary in summaries.items() for line in alert_lines(summary, lang)]


def _of(names: str, line: str, lang: Lang) -> str:
    return Said.of(OF_RUNS, names=names, line=line).text(lang)


def alert_lines(summary: Summary, lang: Lang = "en") -> Iterator[str]:
    """Thrashing, and the first alerts of a run, as sentences, then how many more there are."""
    if summary.get("thrashing"):
        yield thrashing_text(summary, lang)
    alerts = summary["alerts"]
    for alert in alerts[:MAX_ALERTS]:
        yield alert_text(alert, lang)
    if (more := len(alerts) - MAX_ALERTS) > 0:
        yield Said.of(MORE_ALERTS if more > 1 else MORE_ALERT, count=more).text(lang)


def alert_text(alert: Summary, lang: Lang = "en") -> str:
    """One alert as a sentence: what passed which limit, when, and how far."""
    what, text = METRICS[alert["metric"]]
    cleared_s = alert["cleared_s"]
    return Said.of(
        ABOVE if alert["kind"] == "above" else BELOW,
        what=Said.of(what),
        limit=text(alert["threshold"]),
        begin_s=alert["time_s"],
        end=Said.of(THE_END) if cleared_s is None else Said.of(UNTIL, time_s=cleared_s),
        worst=text(alert["worst"]),
    ).text(lang)
