"""A description in one pass against the same statistics over whole arrays, on random small traces; and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.workloads import Request
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.records import user_stream
from hbmtwin.workloads.statistics import arrivals, describe, lengths, sessions
from hbmtwin.workloads.statistics.lengths import PairMeter
from hbmtwin.workloads.statistics.reuse import ReuseMeter
from hbmtwin.workloads.statistics.reuse_curve import reuse_curve

from . import naive_statistics as naive

GAPS_NS = st.sampled_from([0, 0, 1, 10**6, 4 * 10**8, 10**9, 7 * 10**9, 61 * 10**9, 250 * 10**9, 10**12]) | st.integers(
    0, 3 * 10**10
)
LENGTHS = st.integers(1, 6) | st.sampled_from([40, 40, 41, 200])
PROMPTS = st.lists(st.tuples(st.sampled_from(["system", "a", "b", "own"]), st.integers(1, 5)), min_size=1, max_size=3)
LINES = st.lists(
    st.tuples(GAPS_NS, PROMPTS, LENGTHS, st.integers(0, 9), st.booleans(), st.integers(0, 12)), min_size=1, max_size=60
)


def requests_of(lines: list[tuple[int, list[tuple[str, int]], int, int, bool, int]]) -> list[Request]:
    """A line's session is one of ten, or new; its stream ``own`` is its user's."""
    requests: list[Request] = []
    turns: dict[int, int] = {}
    time_ns = 0
    for id, (gap_ns, pieces, output, session, single, tenant) in enumerate(lines):
        time_ns += gap_ns
        session = 10 + id if single else session
        turn = turns.get(session, 0)
        turns[session] = turn + 1
        own = user_stream(session, turn)
        spans = tuple((own if stream == "own" else stream, 0, length) for stream, length in pieces)
        prompt = sum(length for _, _, length in spans)
        requests.append(Request(id, session, turn, 5 * 10**18 + time_ns, prompt, output, output, spans, tenant))
    return [r._replace(has_next=r.turn + 1 < turns[r.session]) for r in requests]


def agree(requests: list[Request], block_size: int = 2) -> None:
    """Every family of statistics."""
    d = describe.describe(requests, block_size=block_size)
    for family in FAMILIES:
        family(d, requests)
    naive.reuse_agrees(d, requests, block_size)


FAMILIES: list[Callable[[Any, list[Request]], None]] = [
    naive.arrivals_agree,
    naive.windows_agree,
    naive.pictures_agree,
    naive.lengths_agree,
    naive.mass_points_agree,
    naive.correlations_agree,
    naive.tenants_agree,
    naive.sessions_agree,
]


@settings(deadline=None, max_examples=150)
@given(lines=LINES, block_size=st.integers(1, 4))
def test_one_pass_tells_what_whole_arrays_do(lines: list[Any], block_size: int) -> None:
    agree(requests_of(lines), block_size)


def many(seed: int = 3, n: int = 1500) -> list[Request]:
    """A trace with some of everything: half an hour, a quiet end, a mass point, tenants, sessions, sharing."""
    draw = np.random.default_rng(seed)
    gaps_ns = (draw.gamma(0.5, 2.0, n) * 1e9).astype(int)
    gaps_ns[-20:] *= 60
    return requests_of(
        [
            (
                int(gap_ns),
                [("system", 3), (("a", "b", "own")[draw.integers(3)], int(draw.integers(1, 30)))],
                400 if draw.random() < 0.1 else int(draw.integers(300, 600)),
                int(draw.integers(10)) + 10 * (i // 40),
                bool(draw.random() < 0.5),
                int(draw.zipf(1.5)) % 50,
            )
            for i, gap_ns in enumerate(gaps_ns)
        ]
    )


def test_a_trace_with_some_of_everything_agrees() -> None:
    requests = many()
    d = describe.describe(requests, block_size=2)
    assert None not in (d.tenants, d.sessions, d.reuse, d.arrivals.iat_cv_windows, d.arrivals.windows[3].idc_whole)
    assert [p.tokens for p in d.output_tokens.mass_points] == [400]
    agree(requests)


def lower_quantiles(values: list[int], counts: list[int]) -> tuple[float, ...]:
    all_of_them = np.repeat(values, counts)
    return tuple(np.quantile(all_of_them, naive.LEVELS, method="lower").astype(float))


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "the variance of a sample in a CV": (
        arrivals,
        "_cv",
        lambda n, s, sq: ((n * sq - s * s) / (s * s) * n / (n - 1)) ** 0.5 if n > 1 else None,
    ),
    "the variance of a sample in an IDC": (
        arrivals,
        "_idc",
        lambda k, n, sq: (k * sq - n * n) / (k * n) * k / (k - 1) if k > 1 else None,
    ),
    "windows of the CV one second too long": (arrivals, "CV_WINDOW_S", 301),
    "windows with few gaps have a CV as well": (arrivals, "LEAST_GAPS", 2),
    "more bars than a picture has room for": (arrivals, "BARS", 5000),
    "quantiles that are lengths": (lengths, "_quantiles", lower_quantiles),
    "mass points of half of the requests only": (lengths, "MASS_SHARE", 0.5),
    "equal lengths ranked in order of appearance": (
        lengths,
        "_centred_ranks",
        lambda lengths, count: np.argsort(np.argsort(lengths)) - len(lengths) / 2,
    ),
    "a client left out": (
        describe,
        "tenant_statistics",
        lambda counted: sessions.tenant_statistics(dict(list(counted.items())[1:])),
    ),
    "quantiles of turns one off": (
        sessions,
        "quantile",
        lambda counted, q, real=sessions.quantile: real(counted, q) + 1,
    ),
    "every prompt is private": (describe, "_private", lambda r: r.turn == 0),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_would_be_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong = PLANTED[bug]
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        agree(many())


@given(
    lines=LINES,
    block_size=st.integers(1, 3),
    capacities=st.lists(st.integers(0, 12), max_size=3, unique=True),
)
def test_private_prompts_take_room_as_kept_ones_do(lines: list[Any], block_size: int, capacities: list[int]) -> None:
    requests = requests_of(lines)
    meter = ReuseMeter(block_size, [*capacities, None])
    private = [describe._private(r) for r in requests]
    for r, alone in zip(requests, private, strict=True):
        if alone:
            meter.add_private(r.spans)
        else:
            meter.add(meter.chain(r.spans))
    found = meter.statistics()
    chains = [block_chain(r.spans, block_size, partial=True) for r in requests]
    if found is None:
        assert all(private)
        return
    assert found.curve == reuse_curve(chains, [*capacities, None])
    assert found.first_to_last == reuse_curve(chains, [*capacities, None], last_to_first=False)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), min_size=2, max_size=200),
    max_pairs=st.integers(150, 250),
)
def test_coarse_ranks_are_those_of_the_leading_bits(pairs: list[tuple[int, int]], max_pairs: int) -> None:
    exact, coarse = PairMeter(), PairMeter(max_pairs)
    for x, y in pairs:
        exact.add(x, y)
        coarse.add(x, y)
    assert exact.exact
    assert coarse.exact == (len(set(pairs)) <= max_pairs)
    assert coarse.pearson() == exact.pearson()
    if coarse.exact:
        assert coarse.spearman() == exact.spearman()


def test_ranks_of_more_pairs_than_are_kept_are_close() -> None:
    draw = np.random.default_rng(1)
    x = draw.integers(1, 10_000, 4000)
    y = x + draw.integers(1, 10_000, 4000)
    exact, coarse = PairMeter(), PairMeter(1000)
    for one, other in zip(x.tolist(), y.tolist(), strict=True):
        exact.add(one, other)
        coarse.add(one, other)
    assert (exact.exact, coarse.exact) == (True, False)
    assert exact.spearman() == pytest.approx(0.69, abs=0.02)
    assert coarse.spearman() == pytest.approx(exact.spearman(), abs=0.005)
