"""A description of traffic in words and tables, the same on the command line and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.dashboard.verdict import MISSING, number_text, percent_text, seconds_text
from hbmtwin.workloads.statistics.arrivals import ArrivalStatistics, WindowCounts
from hbmtwin.workloads.statistics.describe import Description
from hbmtwin.workloads.statistics.lengths import QUANTILES, LengthStatistics
from hbmtwin.workloads.statistics.reuse import ReuseStatistics
from hbmtwin.workloads.statistics.sessions import SessionStatistics


class Rows(NamedTuple):
    """A table, the first column of which names its rows."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]


def headline(d: Description) -> str:
    """How many requests, in what time."""
    count = f"{d.requests:,} requests" if d.requests > 1 else "1 request"
    rate = d.arrivals.request_rate
    if rate is None:
        return f"{count}, no time between them"
    return f"{count} in {seconds_text(d.arrivals.span_s)}, {rate:,.2f} a second"


def facts(d: Description) -> list[tuple[str, str]]:
    """What is one number or two, a line each: what it is, and how much."""
    return [
        *_arrival_facts(d.arrivals),
        ("prompts and outputs", _correlation(d)),
        *((f"{name} that stand out", _mass(side)) for name, side in _sides(d) if side.mass_points),
        *_tenant_facts(d),
        *(_session_facts(d.sessions) if d.sessions is not None else []),
        *_reuse_facts(d),
    ]


def lengths_table(d: Description) -> Rows:
    """Mean, spread and quantiles of both lengths."""
    header = ("tokens", "mean", "CV", "least", *(f"p{100 * q:g}" for q in QUANTILES), "most")
    cells = [
        (
            name,
            f"{side.mean:,.1f}",
            f"{side.cv:.2f}",
            f"{side.least:,}",
            *(f"{q:,.0f}" for q in side.quantiles),
            f"{side.most:,}",
        )
        for name, side in _sides(d)
    ]
    return Rows("Lengths", header, cells)


def windows_table(d: Description) -> Rows:
    """Counts in windows, by the width of the window."""
    cells = [
        (
            f"{w.width_s:,} s",
            number_text(w.idc, 1, 2),
            number_text(w.idc_whole, 1, 2),
            *(_whole(count, w, d) for count in (w.fewest, w.most)),
        )
        for w in d.arrivals.windows
    ]
    return Rows(
        "Arrivals in windows", ("window", "IDC", "IDC of whole\nwindows", "fewest\nrequests", "most\nrequests"), cells
    )


def _whole(count: int, w: WindowCounts, d: Description) -> str:
    return f"{count:,}" if d.arrivals.tick_s is None or d.arrivals.tick_s <= w.width_s else MISSING


def reuse_table(reuse: ReuseStatistics) -> Rows:
    """What a prefix cache of each size hits."""
    references, size = reuse.curve.references, reuse.block_size
    cells = []
    for capacity, hits, other in zip(reuse.curve.capacities, reuse.curve.hits, reuse.first_to_last.hits, strict=True):
        cells.append(
            (
                "endless" if capacity is None else f"{capacity:,}",
                MISSING if capacity is None else f"{capacity * size:,}",
                f"{hits:,}",
                percent_text(hits / references),
                f"{other:,}",
                percent_text(other / references),
            )
        )
    header = ("capacity\n(blocks)", "capacity\n(tokens)", *_HITS)
    return Rows(f"Blocks of {size} tokens that a prefix cache hits, of {references:,}", header, cells)


_HITS = ("hits, touched\nlast to first", "share", "hits, touched\nfirst to last", "share of\nthese")


def _sides(d: Description) -> Sequence[tuple[str, LengthStatistics]]:
    return (("prompts", d.prompt_tokens), ("outputs", d.output_tokens))


def _arrival_facts(a: ArrivalStatistics) -> list[tuple[str, str]]:
    if a.tick_s is not None:
        return [
            (
                "between arrivals",
                f"mean {seconds_text(a.iat_mean_s)}; times are ticks of {a.tick_s:g} s, which most requests share: "
                "a CV would be the clock's and is not computed (jitter spreads them over their tick)",
            )
        ]
    if a.iat_cv is None:
        return []
    found = [("between arrivals", f"mean {seconds_text(a.iat_mean_s)}, CV {a.iat_cv:.2f} (1: Poisson)")]
    if (cv := a.iat_cv_windows) is not None:
        windows = f"{cv.windows:,} windows" if cv.windows > 1 else "1 window"
        spread = f" (p10 {cv.p10:.2f}, p90 {cv.p90:.2f})" if cv.windows > 1 else ""
        found.append(("within 5 minutes", f"CV {cv.p50:.2f}{spread}, of {windows}"))
    if a.peak_second is not None:
        found.append(("busiest second", f"{a.peak_second:.1f} times the mean"))
    return found


def _correlation(d: Description) -> str:
    if d.pearson is None or d.spearman is None:
        return "one of the two is always the same, so they are not correlated"
    about = "" if d.spearman_exact else " (of lengths to their leading bits)"
    pearson, spearman = (round(value, 2) + 0.0 for value in (d.pearson, d.spearman))  # no "-0.00"
    return f"correlation {pearson:.2f} (Pearson), {spearman:.2f} of ranks (Spearman){about}"


def _mass(side: LengthStatistics) -> str:
    return ", ".join(f"{point.tokens:,} ({percent_text(point.share)})" for point in side.mass_points[:8])


def _tenant_facts(d: Description) -> list[tuple[str, str]]:
    t = d.tenants
    if t is None:
        return []
    top_10 = f"the first ten {percent_text(t.top_10)}; " if t.tenants > 10 else ""
    return [
        (
            "clients",
            f"{t.tenants:,}: the first sends {percent_text(t.top_1)}; {top_10}{t.make_90_percent:,} make 90 %",
        )
    ]


def _session_facts(s: SessionStatistics) -> list[tuple[str, str]]:
    made = " (made out from prompts that begin with a whole earlier one)" if s.inferred else ""
    found = [
        ("sessions", f"{s.sessions:,}{made}"),
        (
            "turns of a session",
            f"mean {s.turns_mean:.2f}, p50 {s.turns_p50:g}, p95 {s.turns_p95:g}, most {s.turns_most:,}",
        ),
        (
            "turn of a request",
            f"mean {s.turn_mean:.2f}, p95 {s.turn_p95:g}; {percent_text(s.later_turns_share)} are no first turn",
        ),
    ]
    if s.gap_mean_s is not None:
        gaps = ", ".join(
            f"{name} {seconds_text(value)}"
            for name, value in (("mean", s.gap_mean_s), ("p50", s.gap_p50_s), ("p95", s.gap_p95_s))
        )
        found.append(("between two turns", gaps))
    return found


def _reuse_facts(d: Description) -> list[tuple[str, str]]:
    r = d.reuse
    if r is None:
        return [("shared beginnings", "none: the trace tells of no prompt that begins as another does")]
    return [
        (
            "shared beginnings",
            f"{percent_text(r.reused_references_share)} of the blocks of prompts are in several; "
            f"{percent_text(r.used_once_share)} of the {r.curve.distinct:,} different ones are in one only; "
            f"the commonest is in {percent_text(r.commonest_share)} of the requests",
        ),
        (
            "of an endless cache",
            f"{percent_text(r.half_cached_share)} of the requests find more than half of their blocks, "
            f"{percent_text(r.nine_tenths_cached_share)} more than nine tenths",
        ),
    ]
