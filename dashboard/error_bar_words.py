"""Error bars in words and rows: what the terminal and the app say of them, in English or in Chinese.

::

    sentences          of one run: what was moved, how it ended at the ends, what moves TTFT most
    bar_rows           of one run: a row a number under bar_header
    compared_rows      of several: a row a number, "5.25 s (1.24 s to 19.45 s)" a run
    order_sentences    of several: whose TTFT is below whose, and at which ends that turns

All take what :func:`hbmtwin.sim.capacity.error_bars.error_bars_to_dicts` made, as the JSON of a run has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hbmtwin.dashboard.figure_text import figure_text
from hbmtwin.dashboard.verdict import (
    DEADLOCKED,
    DIED,
    HELD,
    LIST_COMMA,
    LIVE_LOCKED,
    MISSING,
    SEMICOLON,
    bytes_text,
    cause_text,
    joined,
    number_text,
    seconds_text,
)
from hbmtwin.sim.capacity.assumptions import WORDS
from hbmtwin.sim.phrases import Lang, Phrase, Said

Told = Mapping[str, Any]

MOST_TOLD = 3
"""Ends that a sentence names; the JSON and the table of all ends have the others."""
MEASURES = {
    "requests_completed": Phrase("completed requests", "已完成请求"),
    "ttft_p50_s": Phrase("TTFT p50", "TTFT p50"),
    "ttft_p99_s": Phrase("TTFT p99", "TTFT p99"),
    "tpot_p50_s": Phrase("TPOT p50", "TPOT p50"),
    "tpot_p99_s": Phrase("TPOT p99", "TPOT p99"),
    "e2e_p99_s": Phrase("end to end p99", "端到端 p99"),
    "output_tokens_per_s": Phrase("output tokens/s", "每秒输出 token 数"),
    "goodput_requests_per_s": Phrase("goodput (requests/s)", "达标吞吐（请求/s）"),
    "preemptions": Phrase("preemptions", "抢占次数"),
    "peak_reserved_bytes": Phrase("peak reserved", "预留峰值"),
    "died_at_s": Phrase("early end", "提前结束时刻"),
}
FIRST = ("ttft_p99_s", "tpot_p99_s", "output_tokens_per_s", "peak_reserved_bytes", "died_at_s")
MOVER = (*FIRST, *(measure for measure in MEASURES if measure not in FIRST))
"""Of the first of these that moves at all it is told what moves it most."""
HEADER = (
    *(Phrase("number", "指标"), Phrase("least", "最小"), Phrase("the run", "本次运行"), Phrase("most", "最大")),
    *(Phrase("least at", "最小时取值"), Phrase("most at", "最大时取值")),
)
END_HEADER = (
    Phrase("figure", "参数"),
    Phrase("at", "取值"),
    Phrase("instead of", "现值"),
    Phrase("the run", "运行结果"),
)
STILL = Phrase("does not move", "不变")
SPAN = Phrase("{value} ({least} to {most})", "{value}（{least} 至 {most}）")
AT = Phrase("{figure}: {value}", "{figure}：{value}")
NONE = Phrase("No figure behind this run has a range.", "本次运行所依据的参数均没有误差范围。")
ONE_AT_A_TIME = Phrase(
    "One uncertain figure at a time at its low or its high end, {ends} ends in all: errors that come together may add "
    "up to more.",
    "每次只把一个不确定的参数取到下限或上限，共 {ends} 种取值：多个误差同时出现时，偏差可能更大。",
)
NO_START = Phrase("does not start", "无法启动")
SO_AT_ALL = Phrase("{name}: {how}, and so at all {ends} ends.", "{name}：{how}，全部 {ends} 种取值下均如此。")
SO_AT_SOME = Phrase(
    "{name}: {how}, and so at {alike} of {ends} ends. Not so: {others}.",
    "{name}：{how}，{ends} 种取值中有 {alike} 种如此。例外：{others}。",
)
ENDED_EARLY = Phrase("ended early", "提前结束")
SERVED_NOTHING = Phrase("served nothing", "未处理任何请求")
AND_MORE = Phrase("{told} and {more} more", "{told}及另外 {more} 种")
WHERE = Phrase("{figure} {value}: {how}", "{figure} {value}：{how}")
MOVES_MOST = Phrase(
    "What moves {measure} most is {figure}: {least} to {most}.",
    "对 {measure} 影响最大的参数：{figure}（{least} 至 {most}）。",
)
NOTHING_MOVES = Phrase("No end changes any of these numbers.", "任何取值都不改变这些数字。")
ORDER = Phrase("{measure}: {order}.", "{measure}：{order}。")
BELOW_AT_ALL = Phrase("{order} at all {ends} ends", "{order}，全部 {ends} 种取值下均成立")
BELOW_AS_RUN = Phrase("{order} as they are", "按现值 {order}")
TURNS = Phrase(
    "{a} and {b} change places at {count} of {ends} ends ({where})",
    "{ends} 种取值中有 {count} 种使 {a} 与 {b} 的次序颠倒（{where}）",
)
LEVEL_AT = Phrase("{a} and {b} are level at {count} of {ends} ends", "{ends} 种取值中有 {count} 种使 {a} 与 {b} 持平")
PART_AT = Phrase(
    "{a} and {b} differ at {count} of {ends} ends ({where})",
    "{ends} 种取值中有 {count} 种使 {a} 与 {b} 不再持平（{where}）",
)
NOT_AT = Phrase(
    "{a} and {b} cannot be compared at {count} of {ends} ends", "{ends} 种取值中有 {count} 种使 {a} 与 {b} 无法比较"
)
LEFT_OUT = Phrase("not among them: {names}, which ended early", "未参与排序：{names}（提前结束）")
WITHOUT = Phrase("not among them: {names}, without such a number", "未参与排序：{names}（没有该指标）")
NO_ORDER = Phrase(
    "Not put in order, as fewer than two runs went to their end and have such a number: {measures}.",
    "跑完全程且有该指标的运行不足两个，不作排序：{measures}。",
)


def measure_text(measure: str, value: float | None) -> str:
    """A number with its unit, or a dash."""
    if value is None:
        return MISSING
    if measure.endswith("_bytes"):
        return bytes_text(int(value))
    if measure.endswith("_per_s"):
        return number_text(value, 1, 3 if measure.startswith("goodput") else 1)
    return seconds_text(value) if measure.endswith("_s") else f"{value:,}"


def figure_words(figure: str, lang: Lang = "en") -> str:
    """What a figure is, in words."""
    return Said.of(WORDS[figure]).text(lang) if figure in WORDS else figure


def shown(told: Told) -> list[str]:
    """The numbers that the run has, or has at some end, in order."""
    return [name for name in MEASURES if told["bars"][name]["least"] is not None]


def bar_header(lang: Lang = "en") -> tuple[str, ...]:
    """Titles of the columns of :func:`bar_rows`."""
    return tuple(Said.of(title).text(lang) for title in HEADER)


def bar_rows(told: Told, lang: Lang = "en", *, names: bool = False) -> list[tuple[str, ...]]:
    """A row a number; with *names* its figures are called as in JSON."""
    rows = []
    for measure in shown(told):
        bar = told["bars"][measure]
        values = [measure_text(measure, bar[key]) for key in ("least", "value", "most")]
        ends = [_extreme_at(bar[f"{key}_at"], lang, names) for key in ("least", "most")]
        if _still(bar):
            ends = [Said.of(STILL).text(lang), ""]
        rows.append((Said.of(MEASURES[measure]).text(lang), *values, *ends))
    return rows


def _still(bar: Told) -> bool:
    """Not so where the run itself has no such number, as of a death at one end only."""
    return bool(bar["least"] == bar["value"] == bar["most"])


def _extreme_at(end: Told | None, lang: Lang, names: bool) -> str:
    if end is None:
        return Said.of(HEADER[2]).text(lang)
    if end["at"] is None:
        return str(end["figure"])
    value = figure_text(end["figure"], end["at"])
    return f"{end['figure']} {value}" if names else _said_at(end, value, lang)


def _said_at(end: Told, value: str, lang: Lang) -> str:
    return Said.of(AT, figure=figure_words(end["figure"], lang), value=value).text(lang)


def end_header(lang: Lang = "en") -> tuple[str, ...]:
    """Titles of the columns of :func:`end_rows`: the figure, the ends, how it ended, and each number."""
    return tuple(Said.of(title).text(lang) for title in (*END_HEADER, *MEASURES.values()))


def end_rows(told: Told, lang: Lang = "en") -> list[tuple[str, ...]]:
    """A row an end: all that was run."""
    return [
        (
            figure_words(end["figure"], lang),
            *(MISSING if end[key] is None else figure_text(end["figure"], end[key]) for key in ("at", "value")),
            how_it_ended(end, lang),
            *(measure_text(measure, end[measure]) for measure in MEASURES),
        )
        for end in told["ends"]
    ]


def how_it_ended(end: Told, lang: Lang = "en") -> str:
    """How the run at an end ended."""
    time_s = end.get("died_at_s")
    match end["outcome"]:
        case "held":
            said = Said.of(HELD)
        case "out_of_memory":
            said = Said.of(DIED, time_s=time_s, cause=cause_text({"cause": end["cause"]}, lang))
        case "standstill":
            said = Said.of(LIVE_LOCKED if end["cause"] == "live_lock" else DEADLOCKED, time_s=time_s)
        case _:
            said = Said.of(NO_START)
    return said.text(lang)


def sentences(told: Told, name: str, lang: Lang = "en") -> list[str]:
    """Of one run: that one figure at a time was moved, how it ended at the ends, and what moves it most."""
    if not told["ends"]:
        return [Said.of(NONE).text(lang)]
    one = Said.of(ONE_AT_A_TIME, ends=len(told["ends"])).text(lang)
    return [one, fate_sentence(told, name, lang), *filter(None, [most_sentence(told, lang)])]


def fate_sentence(told: Told, name: str, lang: Lang = "en") -> str:
    """How the run ended, and at which ends it ends in another way."""
    ends = told["ends"]
    others = [end for end in ends if end["outcome"] != told["outcome"]]
    idle = told["bars"]["requests_completed"]["most"] == 0
    how = Said.of(ENDED_EARLY if told["outcome"] != "held" else SERVED_NOTHING if idle else HELD)
    if not others:
        return Said.of(SO_AT_ALL, name=name, how=how, ends=len(ends)).text(lang)
    places = [
        Said.of(WHERE, figure=figure_words(e["figure"], lang), value=_value(e), how=how_it_ended(e, lang)).text(lang)
        for e in others
    ]
    alike, listed = len(ends) - len(others), _some(places, lang)
    return Said.of(SO_AT_SOME, name=name, how=how, alike=alike, ends=len(ends), others=listed).text(lang)


def _value(end: Told) -> str:
    return str(end["end"]) if end["at"] is None else figure_text(end["figure"], end["at"])


def _some(places: Sequence[str], lang: Lang) -> str:
    said = joined(places[:MOST_TOLD], SEMICOLON, lang)
    more = len(places) - MOST_TOLD
    return Said.of(AND_MORE, told=said, more=more).text(lang) if more > 0 else said


def mover_of(told: Told) -> tuple[str, str] | None:
    """A number, and the figure that moves it most; None where nothing moves."""
    moved = ((measure, told["bars"][measure]["moved_most_by"]) for measure in MOVER)
    return next(((measure, figure) for measure, figure in moved if figure is not None), None)


def origin_text(told: Told) -> str:
    """Where the figure that moves it most comes from, as the catalog or the profile has it; empty if nothing moves."""
    mover = mover_of(told)
    bases = [end["basis"] for end in told["ends"] if mover is not None and end["figure"] == mover[1]]
    return f"{mover[1]}: {bases[0]}" if mover is not None and bases and bases[0] is not None else ""


def most_sentence(told: Told, lang: Lang = "en") -> str:
    """Which figure moves TTFT p99 most, and how far; of another number where that does not move.

    Empty where numbers do not move, and yet a run ends in another way: that sentence tells it.
    """
    mover = mover_of(told)
    if mover is None:
        alike = all(end["outcome"] == told["outcome"] for end in told["ends"])
        return Said.of(NOTHING_MOVES).text(lang) if alike else ""
    measure, figure = mover
    found = [told["bars"][measure]["value"], *(end[measure] for end in told["ends"] if end["figure"] == figure)]
    there = [value for value in found if value is not None]
    return Said.of(
        MOVES_MOST,
        measure=Said.of(MEASURES[measure]),
        figure=figure_words(figure, lang),
        least=measure_text(measure, min(there)),
        most=measure_text(measure, max(there)),
    ).text(lang)


def compared_rows(named: Mapping[str, Told], lang: Lang = "en") -> list[tuple[str, ...]]:
    """A row a number, a cell a run: its number, and the least and the most of it."""
    wanted = [measure for measure in MEASURES if any(measure in shown(told) for told in named.values())]
    return [
        (
            Said.of(MEASURES[measure]).text(lang),
            *(_span(measure, told["bars"][measure], lang) for told in named.values()),
        )
        for measure in wanted
    ]


def _span(measure: str, bar: Told, lang: Lang) -> str:
    value, least, most = (measure_text(measure, bar[key]) for key in ("value", "least", "most"))
    if least == most == value:
        return value
    return Said.of(SPAN, value=value, least=least, most=most).text(lang)


def order_sentences(named: Mapping[str, Told], lang: Lang = "en") -> list[str]:
    """For each number by which runs are compared: who is below whom, and at which ends that is not so."""
    said, unordered = [], list[Said]()
    for measure in next(iter(named.values()))["order"]:
        ranked = _ranked(measure, named)
        if len(ranked) < 2:
            unordered.append(Said.of(MEASURES[measure]))
            continue
        parts = [*_pairs(measure, named, ranked, lang), *_left_out(named, ranked, lang)]
        order = joined(parts, SEMICOLON, lang)
        said.append(Said.of(ORDER, measure=Said.of(MEASURES[measure]), order=order).text(lang))
    if not unordered:
        return said
    measures = joined([measure.text(lang) for measure in unordered], LIST_COMMA, lang)
    return [*said, Said.of(NO_ORDER, measures=measures).text(lang)]


def _left_out(named: Mapping[str, Told], ranked: Sequence[str], lang: Lang) -> Iterator[str]:
    """Who is not in an order, and why: a run that held may have completed nothing, too."""
    out = [name for name in named if name not in ranked]
    early = [name for name in out if named[name]["outcome"] != "held"]
    for phrase, names in ((LEFT_OUT, early), (WITHOUT, [name for name in out if name not in early])):
        if names:
            yield Said.of(phrase, names=joined(names, LIST_COMMA, lang)).text(lang)


def _ranked(measure: str, named: Mapping[str, Told]) -> list[str]:
    """Those that have such a number, the least first; of times only those that went to their end."""
    value = {name: told["bars"][measure]["value"] for name, told in named.items()}
    early = {name for name, told in named.items() if measure.endswith("_s") and told["outcome"] != "held"}
    return sorted((name for name in named if value[name] is not None and name not in early), key=lambda n: value[n])


def _pairs(measure: str, named: Mapping[str, Told], ranked: Sequence[str], lang: Lang) -> Iterator[str]:
    """Neighbours are enough: where each is below the next one at every end, all are in order at every end."""
    ends = len(named[ranked[0]]["ends"])
    orders = [(a, b, named[a]["order"][measure][b]) for a, b in pairwise(ranked)]
    chain = ranked[0] + "".join(f" {'=' if order['run'] == 'level' else '<'} {b}" for _, b, order in orders)
    turned = [(a, b, order) for a, b, order in orders if order["otherwise"]]
    yield Said.of(BELOW_AS_RUN if turned else BELOW_AT_ALL, order=chain, ends=ends).text(lang)
    for a, b, order in turned:
        yield from _not_so(a, b, order, named, ends, lang)


def _not_so(a: str, b: str, order: Told, named: Mapping[str, Told], ends: int, lang: Lang) -> Iterable[str]:
    at = {(end["figure"], end["end"]): end for name in (b, a) for end in named[name]["ends"] if end["at"] is not None}
    apart = {"below", "above"} - {order["run"]}
    turned = [at.get((e["figure"], e["end"]), {**e, "at": None}) for e in order["otherwise"] if e["relation"] in apart]
    if turned:
        where = _some([f"{figure_words(e['figure'], lang)} {_value(e)}" for e in turned], lang)
        phrase = PART_AT if order["run"] == "level" else TURNS
        yield Said.of(phrase, a=a, b=b, count=len(turned), ends=ends, where=where).text(lang)
    if order["run"] != "level" and order["level"]:
        yield Said.of(LEVEL_AT, a=a, b=b, count=order["level"], ends=ends).text(lang)
    if order["none"]:
        yield Said.of(NOT_AT, a=a, b=b, count=order["none"], ends=ends).text(lang)
