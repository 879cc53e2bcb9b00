"""Requests of a learned model: its rates, gaps and lengths, keyed, and what goes on from what."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Request, WorkloadError, draws, output_stream
from hbmtwin.workloads.draws import Purpose
from hbmtwin.workloads.learned.arrivals import arrivals_in, requests_in, window_key
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import Client, LengthWindow, Sharing, TrafficModel, Window
from hbmtwin.workloads.learned.traffic import ModelTraffic

PROMPTS = Measured((0.0, 1.0), (50, 500))
OUTPUTS = Measured((0.0, 1.0), (1, 90))
LENGTHS = LengthWindow(0.0, PROMPTS, (OUTPUTS,))
SHARING = Sharing(
    block_size=16,
    system_prompt_tokens=32,
    follow_share=(0.2, 0.9),
    shared_part=((0.1, 0.5), (0.5, 1.0)),
    follow_after_s=(1.0, 3.0, 20.0),
    prompt_below=(200,),
)


def client(id: int, *windows: Window) -> Client:
    return Client(id, windows, (LENGTHS,))


def model(*clients: Client, span_s: float = 250.0) -> TrafficModel:
    return TrafficModel("made up", span_s, 100.0, clients)


STEADY = client(0, Window(0.0, 2.0, "gamma", 1.0), Window(100.0, 0.5, "weibull", 0.7), Window(200.0, 1.0, "gamma", 4.0))
SPARSE = client(5, Window(100.0, 0.3, "gamma", 0.05))
BOTH = model(STEADY, SPARSE)


def made(m: TrafficModel, **keys: Any) -> list[Request]:
    return list(ModelTraffic(m, **keys).requests())


def test_each_window_has_the_requests_of_its_rate() -> None:
    counts = Counter((r.tenant, r.arrival_ns // (100 * 10**9)) for r in made(BOTH))
    assert counts == {(0, 0): 200, (0, 1): 50, (0, 2): 50, (5, 1): 30}


def test_requests_are_in_order_and_numbered() -> None:
    requests = made(BOTH, seed=3)
    assert [r.id for r in requests] == list(range(330))
    times = [r.arrival_ns for r in requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 250 * 10**9
    assert all(50 <= r.prompt_tokens <= 500 and 1 <= r.output_tokens <= 90 for r in requests)
    assert all(r.max_tokens == r.output_tokens and sum(n for *_, n in r.spans) == r.prompt_tokens for r in requests)


def test_the_same_seed_makes_the_same_and_fewer_are_the_first_ones() -> None:
    whole = made(BOTH, seed=1)
    assert made(BOTH, seed=1) == whole != made(BOTH, seed=2)
    assert made(BOTH, seed=1, num_prompts=70) == whole[:70]
    assert made(BOTH, seed=1, duration_s=120.0) == [r for r in whole if r.arrival_ns < 120 * 10**9]


def test_past_its_span_a_model_begins_anew_with_other_draws() -> None:
    requests = made(BOTH, num_prompts=660)
    again = [r for r in requests if r.arrival_ns >= 250 * 10**9]
    assert len(again) == 330
    assert Counter((r.arrival_ns - 250 * 10**9) // (100 * 10**9) for r in again) == {0: 200, 1: 80, 2: 50}
    first = [r.arrival_ns for r in requests[:330]]
    assert [r.arrival_ns - 250 * 10**9 for r in again] != first


def test_lengths_do_not_move_arrivals_nor_one_client_another() -> None:
    longer = replace(STEADY, lengths=(LengthWindow(0.0, Measured((0.0, 1.0), (9, 9)), (OUTPUTS,)),))
    plain = made(BOTH, seed=4)
    assert [r.arrival_ns for r in made(model(longer, SPARSE), seed=4)] == [r.arrival_ns for r in plain]
    outputs = [r.output_tokens for r in made(model(longer, SPARSE), seed=4)]
    assert outputs == [r.output_tokens for r in plain]
    alone = [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in made(model(SPARSE), seed=4)]
    assert alone == [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in plain if r.tenant == 5]


def test_sharing_moves_neither_arrivals_nor_lengths() -> None:
    def columns(requests: list[Request]) -> list[tuple[int, int, int]]:
        return [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in requests]

    assert columns(made(model(replace(STEADY, sharing=SHARING)))) == columns(made(model(STEADY)))


@given(st.integers(0, 2**32), st.floats(0.02, 5.0), st.sampled_from([0.003, 0.5, 1.0, 3.0]))
def test_a_window_by_single_draws(seed: int, rate: float, shape: float) -> None:
    """Weibull gaps have a closed form, so that a window can be told from the rule alone."""
    window = Window(0.0, rate, "weibull", max(shape, 0.3))
    key = window_key(2, 9)
    expected = rate * 40
    count = requests_in(window, 40.0, 1.0, seed=seed, key=key)
    assert count in (math.floor(expected), math.ceil(expected), round(expected))
    gaps = []
    for index in range(count + 1):
        u = draws.uniform(seed, Purpose.ARRIVAL, key + index, 0)
        gaps.append((-math.log(u)) ** (1 / window.shape))
    total, naive = 0.0, []
    for gap in gaps[:-1]:
        total += gap
        naive.append(total / sum(gaps) * 40)
    assert arrivals_in(window, count, 40.0, 0.0, seed=seed, key=key) == pytest.approx(naive, rel=1e-9)


def test_a_fraction_of_a_request_is_one_as_often_as_it_is_large() -> None:
    window = Window(0.0, 0.0025, "gamma", 1.0)
    counts = [requests_in(window, 100.0, 1.0, seed=0, key=window_key(0, index)) for index in range(4000)]
    assert set(counts) == {0, 1}
    assert np.mean(counts) == pytest.approx(0.25, abs=0.03)
    assert requests_in(Window(0.0, 0.421667, "gamma", 1.0), 600.0, 1.0, seed=0, key=0) == 253


def test_the_burstiest_gamma_keeps_its_ratios() -> None:
    """Its gaps underflow as numbers; equal ones would be no burst at all."""
    window = Window(0.0, 3.0, "gamma", 1e-6)
    times = arrivals_in(window, 300, 100.0, 0.0, seed=1, key=window_key(0, 0))
    gaps = np.diff(np.concatenate(([0.0], times, [100.0])))
    assert gaps.max() > 90
    assert np.median(gaps) < 1e-6


def test_minutes_of_a_window_run_at_their_own_pace() -> None:
    window = Window(0.0, 50.0, "gamma", 1.0)
    spreads = []
    for cv in (0.0, 0.5):
        counts = np.concatenate(
            [
                np.bincount((arrivals_in(window, 30_000, 600.0, cv, seed=s, key=window_key(0, s)) // 60).astype(int))
                for s in range(40)
            ]
        )
        assert counts.sum() == 40 * 30_000
        spreads.append(counts.std() / counts.mean())
    assert spreads[0] == pytest.approx(1 / math.sqrt(3000), rel=0.15)
    assert spreads[1] == pytest.approx(0.5 * math.sqrt(0.9), rel=0.15)


def test_rate_scale_and_clients() -> None:
    assert len(made(BOTH, rate_scale=2.0)) == 660
    chosen = Counter(next(ModelTraffic(BOTH, num_clients=1, seed=seed).requests()).tenant for seed in range(200))
    assert 70 < chosen[0] < 130
    assert chosen[0] + chosen[5] == 200


def test_lengths_are_those_of_their_window_and_class() -> None:
    def fixed(value: int) -> Measured:
        return Measured((0.0, 1.0), (value, value))

    halves = Measured((0.0, 0.5, 0.5, 1.0), (10, 10, 90, 90))
    early = LengthWindow(0.0, halves, (fixed(1), fixed(2)), (50,))
    late = LengthWindow(200.0, fixed(70), (fixed(3),))
    requests = made(model(replace(STEADY, lengths=(early, late))))
    seen = {(r.arrival_ns // (200 * 10**9), r.prompt_tokens, r.output_tokens) for r in requests}
    assert seen == {(0, 10, 1), (0, 90, 2), (1, 70, 3)}


def test_prompts_go_on_from_earlier_ones() -> None:
    requests = made(model(replace(STEADY, sharing=SHARING)), num_prompts=3000)
    by_turn = {(r.session, r.turn): r for r in requests}
    assert len(by_turn) == 3000
    carried = shared = 0
    for r in requests:
        stream, start, length = r.spans[0]
        assert (stream, start) == ("system/0", 0)
        assert length == min(32, r.prompt_tokens)
        assert sum(n for *_, n in r.spans) == r.prompt_tokens
        if r.turn:
            before = by_turn[r.session, r.turn - 1]
            assert before.arrival_ns < r.arrival_ns <= before.arrival_ns + 200 * 10**9
            shared += len(r.spans) > 1 and r.spans[1][0] == before.spans[1][0]
            carried += any(s == output_stream(before.session, before.turn) for s, _, _ in r.spans)
    turns = Counter(r.turn for r in requests)
    assert turns[1] > 300
    assert shared > 0.9 * (3000 - turns[0])
    assert carried > 0.2 * (3000 - turns[0])


def test_memory_of_prompts_is_that_of_the_longest_wait() -> None:
    from hbmtwin.workloads.learned.prompts import Prompts

    prompts = Prompts(0, SHARING, 0)
    for id in range(30_000):
        prompts.next(id, id, id * 10**7, 300, 10)
    assert len(prompts._sent) < 3 * 4096 + 2000


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, not 0"),
        ({"duration_s": 0.0}, "a duration is above 0 and up to 1e9 seconds, not 0.0"),
        ({"duration_s": math.nan}, "a duration is above 0"),
        ({"rate_scale": -1.0}, "a rate scale is above 0 and up to 1e6, not -1.0"),
        ({"num_clients": 3}, "the model has 2 clients that send something; ask for 1 to 2, not 3"),
        ({"rate_scale": 1e-300, "num_prompts": 10}, r"rate_scale 1e-300: 10 requests at that times .* over 146 years"),
        ({"rate_scale": 1e-9, "num_prompts": 10**6}, r"rate_scale 1e-09: 1,000,000 requests at that times"),
    ],
)
def test_figures_that_make_no_sense(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        ModelTraffic(BOTH, **keys)


def test_one_client_is_one() -> None:
    with pytest.raises(WorkloadError, match="the model has 1 client that sends something; ask for 1 to 1, not 2"):
        ModelTraffic(model(client(0, Window(0.0, 1.0, "gamma", 1.0))), num_clients=2)


def test_a_rate_far_below_one_request_a_window_is_kept_over_many_windows() -> None:
    """Fractions below a hundredth were once taken for the rounding of a file, and no such client ever sent anything."""
    seldom = model(client(0, Window(0.0, 1e-5, "gamma", 1.0)), span_s=100.0)  # 0.001 a window
    times_s = [r.arrival_ns / 1e9 for r in ModelTraffic(seldom, num_prompts=400).requests()]
    assert 400 / times_s[-1] == pytest.approx(1e-5, rel=0.15)  # three standard deviations


def test_a_rate_so_low_that_the_keys_of_windows_begin_anew_meanwhile_still_sends() -> None:
    seldom = model(client(0, Window(0.0, 2e-8, "gamma", 1.0)), span_s=100.0)  # one in 500,000 windows; 2^18 have keys
    times_s = [r.arrival_ns / 1e9 for r in ModelTraffic(seldom, num_prompts=3).requests()]
    assert len(times_s) == 3
    assert 2**18 * 100 < times_s[-1] < 4e9


def test_too_many_requests_at_once() -> None:
    dense = model(client(0, Window(0.0, 1e6, "gamma", 1.0)))
    with pytest.raises(WorkloadError, match=r"100,000,000 requests of one client in one window .* lower rate_scale"):
        next(ModelTraffic(dense).requests())
