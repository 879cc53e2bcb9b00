"""A sweep in words and rows: what the terminal, the report and the app all say of it, in English or in Chinese."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hbmtwin.dashboard import verdict
from hbmtwin.dashboard.verdict import COMMA, LIST_COMMA, MISSING, REASONS, joined, number_text, seconds_text
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.sim.sweep.points import PointSummary, Spread, pareto

LATENCIES = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99"}
"""What a sweep is judged by, beside what it serves."""
GIB = 2**30

USERS_SERVED = Phrase("users served", "服务的用户数")
RATE_SERVED = Phrase("requests served per second", "每秒完成请求数")
HELD = Phrase("{held:,} of {runs:,} runs held", "{runs:,} 次运行中 {held:,} 次跑完全程")
NO_POINT = Phrase("{held}; no combination held with every seed.", "{held}；没有组合在所有种子下都跑完全程。")
MOST = Phrase(
    "{held}. The most with every seed: {point}{latencies}.",
    "{held}。所有种子都跑完全程的组合中，承载最多的是 {point}{latencies}。",
)
AS_FAST_AS = Phrase(" ({told})", "（{told}）")
COLUMNS = (
    Phrase("held", "跑完全程"),
    Phrase("share that held\n(95 %)", "跑完比例\n（95 %）"),
    Phrase("requests\nper s", "每秒\n请求数"),
    Phrase("TTFT p99\n(s)", "TTFT p99\n（s）"),
    Phrase("TPOT p99\n(ms)", "TPOT p99\n（ms）"),
    Phrase("of the others", "其余运行"),
)
"""Behind those of the settings."""
SHARE = Phrase("{share:.0f} % ({low:.0f} to {high:.0f})", "{share:.0f} %（{low:.0f} 至 {high:.0f}）")
OF_CAUSE = Phrase("{count:,} {cause}", "{cause} {count:,} 次")
ENDS = {
    "held": Phrase("held", "跑完全程"),
    "does_not_fit": Phrase("did not fit", "放不下"),
    "illegal": Phrase("illegal", "参数冲突"),
    "live_lock": Phrase("live lock", "活锁"),
    "deadlock": Phrase("deadlock", "死锁"),
    "ProcessDied": Phrase("ProcessDied", "进程被终止"),
    "OtherRelease": Phrase("OtherRelease", "版本或文件不一致"),
}
"""How a run of a sweep ended; what it died of and why it rejected are told in other words, an error by its type."""


def short_key(key: str) -> str:
    """The last word of a key."""
    return key.rpartition(".")[2]


def value_text(key: str, value: object) -> str:
    """The value of a setting; bytes in GiB where they are whole ones."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / GIB:g} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def point_name(settings: Mapping[str, Any], lang: Lang = "en") -> str:
    """A combination in words."""
    return joined((f"{short_key(key)} {value_text(key, value)}" for key, value in settings.items()), LIST_COMMA, lang)


def capacity_name(points: Sequence[PointSummary], lang: Lang = "en") -> str:
    """What is counted as capacity, in words."""
    by_users = any(isinstance(point.settings.get("workload.users"), int) for point in points)
    return Said.of(USERS_SERVED if by_users else RATE_SERVED).text(lang)


def headline(points: Sequence[PointSummary], about: Mapping[str, Any], lang: Lang = "en") -> str:
    """The sweep in a sentence: how many runs held, and what serves the most."""
    held = Said.of(HELD, held=about["outcomes"].get("held", 0), runs=about["runs"])
    front = pareto(points, "ttft_p99_s") or pareto(points, "tpot_p99_s")
    if not front:
        return Said.of(NO_POINT, held=held).text(lang)
    most = front[-1]
    point = point_name(most.settings, lang)
    return Said.of(MOST, held=held, point=point, latencies=_as_fast_as(most, lang)).text(lang)


def _as_fast_as(point: PointSummary, lang: Lang) -> str:
    told = [
        f"{name} {seconds_text(point.measured[key].median)}" for key, name in LATENCIES.items() if key in point.measured
    ]
    return Said.of(AS_FAST_AS, told=joined(told, COMMA, lang)).text(lang) if told else ""


def summary_rows(points: Sequence[PointSummary], lang: Lang = "en") -> tuple[list[str], list[list[str]]]:
    """A header, and a row a combination."""
    keys = list(points[0].settings)
    header = [*(key.replace(".", ".\n", 1) for key in keys), *(Said.of(title).text(lang) for title in COLUMNS)]
    return header, [
        [*(value_text(key, value) for key, value in point.settings.items()), *_cells(point, lang)] for point in points
    ]


def _cells(point: PointSummary, lang: Lang) -> list[str]:
    share = point.survival
    return [
        f"{point.held:,} / {point.runs:,}" if point.runs else MISSING,
        MISSING if share is None else share_text(share, lang),
        _middle(point, "requests_per_s", 1, 3),
        _middle(point, "ttft_p99_s", 1, 2),
        _middle(point, "tpot_p99_s", 1000, 1),
        ends_text({cause: count for cause, count in point.outcomes.items() if cause != "held"}, lang),
    ]


def share_text(share: Spread, lang: Lang = "en") -> str:
    """A share with its bounds, in percent."""
    return Said.of(SHARE, share=100 * share.median, low=100 * share.low, high=100 * share.high).text(lang)


def ends_text(outcomes: Mapping[str, int], lang: Lang = "en") -> str:
    """How runs ended, and how many of them so."""
    said = (
        Said.of(OF_CAUSE, count=count, cause=cause_text(cause, lang)).text(lang) for cause, count in outcomes.items()
    )
    return joined(said, COMMA, lang)


def cause_text(cause: str, lang: Lang = "en") -> str:
    """What ended a run, as it stands beside a number."""
    known = ENDS.get(cause) or (REASONS.get(cause) if lang != "en" else None)
    return verdict.cause_text({"cause": cause}, lang) if known is None else Said.of(known).text(lang)


def _middle(point: PointSummary, column: str, factor: float, digits: int) -> str:
    found = point.measured.get(column)
    small = found is not None and found.median * factor < 0.1
    return number_text(None if found is None else found.median, factor, max(digits, 3) if small else digits)
