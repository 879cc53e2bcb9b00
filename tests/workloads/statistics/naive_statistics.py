"""The statistics of a trace once more, from section 3's definitions: whole arrays, nothing streamed.

Each function holds one family of a description to it, and fails where they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from hbmtwin.workloads import Request
from hbmtwin.workloads.statistics.describe import Description

LEVELS = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999]


def about(value: float | None) -> object:
    return None if value is None else pytest.approx(float(value), rel=1e-9, abs=1e-9)


def spread(x: Sequence[float]) -> float:
    return float(np.std(x) / np.mean(x))


def arrivals_agree(d: Description, requests: Sequence[Request]) -> None:
    times = np.array([r.arrival_ns for r in requests]) - requests[0].arrival_ns
    gaps = np.diff(times)
    span_s = times[-1] / 1e9
    assert d.requests == len(requests)
    assert d.arrivals.span_s == about(span_s)
    assert d.arrivals.request_rate == about(len(times) / span_s if span_s else None)
    assert d.arrivals.iat_mean_s == about(float(gaps.mean()) / 1e9 if len(gaps) else None)
    if d.arrivals.tick_s is not None:
        assert d.arrivals.iat_cv is d.arrivals.iat_cv_windows is None
        return
    assert d.arrivals.iat_cv == about(spread(gaps) if span_s else None)
    per_second = np.bincount(times // 10**9)
    assert d.arrivals.peak_second == about(per_second.max() * span_s / len(times) if span_s else None)


def windows_agree(d: Description, requests: Sequence[Request]) -> None:
    times = np.array([r.arrival_ns for r in requests]) - requests[0].arrival_ns
    tick_s = d.arrivals.tick_s or 0
    for found, width_s in zip(d.arrivals.windows, [1, 10, 60, 300], strict=True):
        counts = np.bincount(times // (width_s * 10**9))
        whole = counts[:-1]
        assert (found.width_s, found.fewest, found.most) == (width_s, counts.min(), counts.max())
        assert found.idc == about(None if tick_s > width_s or len(counts) == 1 else counts.var() / counts.mean())
        assert found.idc_whole == about(None if tick_s > width_s or len(whole) < 2 else whole.var() / whole.mean())
    inside = []
    for window in range(times[-1] // (300 * 10**9)):
        gaps = np.diff(times[times // (300 * 10**9) == window])
        if len(gaps) >= 10 and gaps.any():
            inside.append(spread(gaps))
    cv = d.arrivals.iat_cv_windows
    if not inside or tick_s:
        assert cv is None
    else:
        assert cv is not None
        assert (cv.windows, cv.least, cv.most) == (len(inside), about(min(inside)), about(max(inside)))
        assert [cv.p10, cv.p50, cv.p90] == [about(q) for q in np.quantile(inside, [0.1, 0.5, 0.9])]


def pictures_agree(d: Description, requests: Sequence[Request]) -> None:
    seconds = (np.array([r.arrival_ns for r in requests]) - requests[0].arrival_ns) // 10**9
    coarse, fine = d.arrivals.coarse, d.arrivals.fine
    assert list(coarse.counts) == list(np.bincount(seconds // coarse.width_s))
    assert len(coarse.counts) <= 600
    busiest = int(np.argmax(np.bincount(seconds // 300)))
    assert fine.start_s == 300 * busiest
    inside = np.bincount(seconds[seconds // 300 == busiest] - 300 * busiest, minlength=len(fine.counts))
    assert list(fine.counts) == list(inside)


def lengths_agree(d: Description, requests: Sequence[Request]) -> None:
    for found, lengths in (
        (d.prompt_tokens, [r.prompt_tokens for r in requests]),
        (d.output_tokens, [r.output_tokens for r in requests]),
    ):
        assert (found.mean, found.cv) == (about(np.mean(lengths)), about(spread(lengths)))
        assert (found.least, found.most) == (min(lengths), max(lengths))
        assert list(found.quantiles) == [about(q) for q in np.quantile(lengths, LEVELS)]
        assert dict(zip(found.values, found.counts, strict=True)) == Counter(lengths)


def mass_points_agree(d: Description, requests: Sequence[Request]) -> None:
    for found, lengths in (
        (d.prompt_tokens, [r.prompt_tokens for r in requests]),
        (d.output_tokens, [r.output_tokens for r in requests]),
    ):
        counted = Counter(lengths)
        heavy = {}
        for value, count in counted.items():
            reach = max(5, round(value / 20))
            around = range(max(min(lengths), value - reach), min(max(lengths), value + reach) + 1)
            others = [counted[other] for other in around if other != value]
            if count >= max(10, 0.01 * len(lengths)) and (not others or count >= 3 * np.mean(others)):
                heavy[value] = count / len(lengths)
        assert [p.share for p in found.mass_points] == sorted(heavy.values(), reverse=True)
        assert {p.tokens: p.share for p in found.mass_points} == heavy


def correlations_agree(d: Description, requests: Sequence[Request]) -> None:
    x = pd.Series([float(r.prompt_tokens) for r in requests])
    y = pd.Series([float(r.output_tokens) for r in requests])
    if x.nunique() == 1 or y.nunique() == 1:
        assert d.pearson is d.spearman is None
        return
    assert d.pearson == about(x.corr(y))
    assert d.spearman == about(x.rank().corr(y.rank()))


def tenants_agree(d: Description, requests: Sequence[Request]) -> None:
    held = sorted(Counter(r.tenant for r in requests).values(), reverse=True)
    if len(held) == 1:
        assert d.tenants is None
        return
    assert d.tenants is not None
    assert (d.tenants.tenants, d.tenants.top_1) == (len(held), about(held[0] / len(requests)))
    assert d.tenants.top_10 == about(sum(held[:10]) / len(requests))
    fewest = min(n for n in range(len(held) + 1) if sum(held[:n]) * 10 >= 9 * len(requests))
    assert d.tenants.make_90_percent == fewest


def sessions_agree(d: Description, requests: Sequence[Request]) -> None:
    """Of recorded sessions; without a later turn they may be made out."""
    sessions: dict[int, list[Request]] = {}
    for r in requests:
        sessions.setdefault(r.session, []).append(r)
    turns = [len(session) for session in sessions.values()]
    if max(turns) == 1:
        assert d.sessions is None or d.sessions.inferred
        return
    found = d.sessions
    assert found is not None
    assert not found.inferred
    assert (found.sessions, found.turns_most) == (len(turns), max(turns))
    assert [found.turns_mean, found.turns_p50, found.turns_p95] == [
        about(np.mean(turns)),
        *(about(q) for q in np.quantile(turns, [0.5, 0.95])),
    ]
    of_requests = [r.turn + 1 for r in requests]
    assert [found.turn_mean, found.turn_p95] == [about(np.mean(of_requests)), about(np.quantile(of_requests, 0.95))]
    assert found.later_turns_share == about(np.mean([r.turn > 0 for r in requests]))
    gaps = [b.arrival_ns - a.arrival_ns for session in sessions.values() for a, b in pairwise(session)]
    assert found.gap_mean_s == about(np.mean(gaps) / 1e9)
    for q, level in ((found.gap_p50_s, 0.5), (found.gap_p95_s, 0.95)):
        assert q == pytest.approx(np.quantile(gaps, level) / 1e9, rel=1 / 4096, abs=1e-9)


def reuse_agrees(d: Description, requests: Sequence[Request], block_size: int) -> None:
    """By the tokens themselves: a block is all tokens up to its end."""
    chains = []
    for r in requests:
        tokens = [(stream, start + i) for stream, start, length in r.spans for i in range(length)]
        ends = [*range(block_size, len(tokens), block_size), len(tokens)]
        chains.append([tuple(tokens[:end]) for end in ends])
    uses = Counter(block for chain in chains for block in chain)
    references, distinct = sum(uses.values()), len(uses)
    if d.reuse is None:
        assert references == distinct
        return
    assert d.reuse.used_once_share == about(sum(n == 1 for n in uses.values()) / distinct)
    assert d.reuse.reused_references_share == about(sum(n for n in uses.values() if n > 1) / references)
    assert d.reuse.commonest_share == about(max(uses.values()) / len(requests))
    seen: set[object] = set()
    shares = []
    for chain in chains:
        known = next((i for i, block in enumerate(chain) if block not in seen), len(chain))
        shares.append((known, len(chain)))
        seen.update(chain)
    assert d.reuse.half_cached_share == about(np.mean([2 * known > n for known, n in shares]))
    assert d.reuse.nine_tenths_cached_share == about(np.mean([10 * known > 9 * n for known, n in shares]))
    for curve in (d.reuse.curve, d.reuse.first_to_last):
        assert (curve.references, curve.distinct) == (references, distinct)
        assert curve.capacities == (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, None)
        assert curve.hits[-1] == sum(known for known, _ in shares)
