"""Clients of unequal rate: shares, order, sessions of their own, and draws that no other client moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from hbmtwin.workloads import Arrivals, Conversations, ExponentialTime, Fixed, Request, Uniform, WorkloadError
from hbmtwin.workloads.clients import Client, Clients
from hbmtwin.workloads.rates import Ramp, RateCurve

Play = Callable[..., list[Any]]


def client(tenant: int, rate: float, prompt: int = 10, turns: int = 1, **arrivals: Any) -> Client:
    said = Conversations(
        prompt_tokens=Fixed(prompt),
        output_tokens=Uniform(1, 50),
        turns=Uniform(1, turns),
        think_time=ExponentialTime(0.5),
        tenant=tenant,
    )
    return Client(Arrivals(rate, **arrivals), said)


HEAVY, BURSTY, RARE = client(0, 28.6, 100), client(1, 6.0, 200, burstiness=0.05), client(2, 1.0, 300)


def opened(*clients: Client, num_prompts: int = 20_000, seed: int = 0) -> list[Request]:
    return list(Clients(clients, num_prompts=num_prompts, seed=seed).open())


def test_clients_come_in_order_of_time_each_with_its_share_and_lengths() -> None:
    requests = opened(HEAVY, BURSTY, RARE)
    assert [r.id for r in requests] == list(range(20_000))
    assert all(a.arrival_ns <= b.arrival_ns for a, b in pairwise(requests))
    shares = Counter(r.tenant for r in requests)
    assert [shares[c] / 20_000 for c in range(3)] == pytest.approx([0.803, 0.169, 0.028], abs=0.02)
    assert {(r.tenant, r.prompt_tokens) for r in requests} == {(0, 100), (1, 200), (2, 300)}
    assert {r.session // 2**32 == r.tenant for r in requests} == {True}
    assert len({r.session for r in requests}) == 20_000


def test_each_client_has_the_cv_that_it_was_given() -> None:
    requests = opened(HEAVY, BURSTY, RARE, num_prompts=60_000)
    for tenant, cv in ((0, 1.0), (1, math.sqrt(20))):
        gaps = np.diff([r.arrival_ns for r in requests if r.tenant == tenant])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_a_sum_of_bursty_clients_is_burstier_than_one_stream_of_the_same_rate() -> None:
    def idc_10_s(requests: list[Request]) -> float:
        counts = np.bincount([r.arrival_ns // 10**10 for r in requests])[:-1]
        return float(counts.var() / counts.mean())

    pooled = opened(client(0, 12.0))
    clients = opened(*(client(c, rate, burstiness=0.05) for c, rate in enumerate((8.0, 3.0, 1.0))))
    assert idc_10_s(pooled) == pytest.approx(1, abs=0.15)
    assert idc_10_s(clients) > 8


def test_a_client_that_is_added_behind_moves_no_other() -> None:
    def facts(requests: list[Request], tenant: int) -> list[tuple[Any, ...]]:
        return [(r.arrival_ns, r.session, r.prompt_tokens, r.output_tokens) for r in requests if r.tenant == tenant]

    two, three = opened(HEAVY, BURSTY), opened(HEAVY, BURSTY, client(2, 50.0))
    for tenant in (0, 1):
        found = facts(three, tenant)
        assert len(found) > 1000
        assert facts(two, tenant)[: len(found)] == found


def test_a_client_that_comes_once_in_months_does_not_stop_the_others() -> None:
    """Its next thousand sessions, drawn ahead, would be beyond the clock; none of them is asked for."""
    alone, with_seldom = opened(HEAVY, num_prompts=2000), opened(HEAVY, client(1, 1e-7), num_prompts=2000)
    assert with_seldom == alone
    both = opened(client(0, 2e-7), client(1, 1e-7), num_prompts=90)
    assert Counter(r.tenant for r in both)[1] == pytest.approx(30, abs=13)
    assert both[-1].arrival_ns / 1e9 == pytest.approx(90 / 3e-7, rel=0.35)


def test_other_lengths_of_a_client_move_nothing_else() -> None:
    longer = opened(client(0, 28.6, 999), BURSTY, RARE)
    for a, b in zip(opened(HEAVY, BURSTY, RARE), longer, strict=True):
        assert a._replace(prompt_tokens=0, spans=()) == b._replace(prompt_tokens=0, spans=())


def test_a_curve_lets_all_clients_swing_alike() -> None:
    swing = RateCurve(((0, 2), (50, 2), (50, 0), (100, 0)))
    requests = opened(client(0, 9.0, curve=swing), client(1, 3.0, curve=swing), num_prompts=5000)
    assert max(r.arrival_ns % 10**11 for r in requests) <= 50 * 10**9
    assert requests[-1].arrival_ns / 1e9 == pytest.approx(5000 / 12, rel=0.15)


def test_turns_are_counted_and_the_last_session_is_cut(play: Play) -> None:
    source = Clients([client(0, 5.0, turns=4), client(1, 2.0, turns=2)], num_prompts=301)
    assert source.total_requests == 301
    served = [s.request for s in play(source, 10**8)]
    assert sorted(r.id for r in served) == list(range(301))
    by_session: dict[int, list[Request]] = {}
    for r in served:
        by_session.setdefault(r.session, []).append(r)
    for turns in by_session.values():
        assert [r.turn for r in turns] == list(range(len(turns)))
        assert [r.has_next for r in turns] == [True] * (len(turns) - 1) + [False]
        assert [r.id for r in turns] == list(range(turns[0].id, turns[0].id + len(turns)))
        assert {r.tenant for r in turns} == {turns[0].session // 2**32}


def test_the_same_every_time_and_by_seed() -> None:
    assert opened(HEAVY, RARE, num_prompts=99) == opened(HEAVY, RARE, num_prompts=99)
    assert [r.arrival_ns for r in opened(HEAVY, num_prompts=9)] != [
        r.arrival_ns for r in opened(HEAVY, num_prompts=9, seed=1)
    ]
    hundreds = Clients([client(c, 1.0) for c in range(300)], num_prompts=10**9)  # read as far as it is asked for
    assert len(list(islice(hundreds.open(), 50))) == 50


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Clients([], num_prompts=1), "give one client or more"),
        (lambda: Clients([HEAVY], num_prompts=0), "num_prompts must be at least 1, not 0"),
        (lambda: Clients([HEAVY], num_prompts=2**32 + 1), "num_prompts of clients is up to 2^32, not 4294967297"),
        (lambda: Clients([client(0, math.inf)], num_prompts=1), "a client has a finite request_rate, and neither"),
        (
            lambda: Clients([client(0, math.inf, ramp=Ramp("linear", 1, 2))], num_prompts=1),
            "a client has a finite request_rate, and neither a ramp nor rescale_gaps",
        ),
        (lambda: Clients([client(0, 1.0, rescale_gaps=True)], num_prompts=1), "a client has a finite request_rate"),
    ],
)
def test_bad_clients_say_what_would_do(build: Any, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build()
    assert str(error.value).startswith(said)
