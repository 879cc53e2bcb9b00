"""What is learned of a trace: windows, gaps, minutes, lengths, clients and sharing, each from traffic that is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hbmtwin.workloads import Request, WorkloadError, output_stream, user_stream
from hbmtwin.workloads.learned.learn import learn, learn_lengths
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import Client, LengthWindow, Sharing, TrafficModel, Window
from hbmtwin.workloads.learned.traffic import ModelTraffic

SECOND = 10**9
LENGTHS = LengthWindow(0.0, Measured((0.0, 1.0), (50, 4000)), (Measured((0.0, 1.0), (1, 90)),))


def request(id: int, time_s: float, prompt: int = 100, output: int = 10, **keys: Any) -> Request:
    spans = keys.pop("spans", ((user_stream(id, 0), 0, prompt),))
    session, turn, time_ns = keys.pop("session", id), keys.pop("turn", 0), round(time_s * SECOND)
    return Request(id, session, turn, time_ns, prompt, output, output, spans, **keys)


def made(*windows: Window, span_s: float, seed: int = 0, **keys: Any) -> list[Request]:
    client = Client(0, windows, (LENGTHS,), **keys)
    return list(ModelTraffic(TrafficModel("known", span_s, 300.0, (client,)), seed=seed).requests())


def test_rates_of_windows_by_hand() -> None:
    times = [0, 1, 2, 3, 299, 300, 301, 700]
    model = learn((request(id, time) for id, time in enumerate(times)), source="x.csv")
    assert (model.source, model.span_s, model.window_s) == ("x.csv", 700.0, 300.0)
    (client,) = model.clients
    assert [w.start_s for w in client.windows] == [0.0, 300.0, 600.0]
    assert [w.request_rate for w in client.windows] == pytest.approx([5 / 300, 2 / 300, 1 / 100])
    assert {w.shape for w in client.windows} == {1.0}, "so few gaps say nothing"
    assert client.sharing is None
    assert client.minute_cv == 0
    assert model.expected_requests(model.clients) == pytest.approx(8)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_the_cv_of_gaps_comes_back(shape: float) -> None:
    windows = [Window(300.0 * i, 10.0, "gamma", shape) for i in range(8)]
    (client,) = learn(made(*windows, span_s=2400.0)).clients
    cvs = []
    for window in client.windows:
        assert window.family == client.windows[0].family
        if window.family == "gamma":
            cvs.append(window.shape**-0.5)
        else:
            from hbmtwin.workloads.gaps import weibull_cv

            cvs.append(weibull_cv(window.shape))
    assert np.median(cvs) == pytest.approx(shape**-0.5, rel=0.06)


@pytest.mark.parametrize("family", ["gamma", "weibull"])
def test_the_family_of_gaps_comes_back(family: Any) -> None:
    windows = [Window(300.0 * i, 20.0, family, 0.5) for i in range(8)]
    (client,) = learn(made(*windows, span_s=2400.0)).clients
    assert {window.family for window in client.windows} == {family}


def test_the_drift_of_minutes_comes_back() -> None:
    windows = [Window(300.0 * i, 30.0, "gamma", 1.0) for i in range(20)]
    (calm,) = learn(made(*windows, span_s=6_000.0)).clients
    (drifting,) = learn(made(*windows, span_s=6_000.0, minute_cv=0.3)).clients
    assert calm.minute_cv == 0
    assert drifting.minute_cv == pytest.approx(0.3, rel=0.25)


def test_ticks_of_a_clock_are_no_bursts() -> None:
    requests = made(Window(0.0, 5.0, "gamma", 1.0), span_s=300.0)
    ticks = [r._replace(arrival_ns=r.arrival_ns // (3 * SECOND) * 3 * SECOND) for r in requests]
    model = learn(ticks)
    assert [window.shape for window in model.clients[0].windows] == [1.0]
    assert "coarse ticks" in model.notes[0]


def test_outputs_go_by_the_prompt_only_where_they_do() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 5000, 4000)
    free = rng.integers(1, 500, 4000)
    tied = prompts // 10 + rng.integers(1, 20, 4000)

    def lengths(outputs: Any) -> LengthWindow:
        requests = (
            request(id, float(id), int(prompt), int(output))
            for id, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        )
        return learn(requests).clients[0].lengths[0]

    assert len(lengths(free).output_tokens) == 1
    found = lengths(tied)
    assert len(found.output_tokens) == len(found.prompt_below) + 1 == 8
    means = [table.at(0.5) for table in found.output_tokens]
    assert means == sorted(means)


def test_tenants_are_clients() -> None:
    requests = [request(id, float(id), 10 if id % 3 else 900, tenant=7 if id % 3 else 2) for id in range(900)]
    model = learn(requests)
    assert [client.id for client in model.clients] == [0, 1], "in the order of the tenants' numbers"
    rates = [model.expected_requests((client,)) for client in model.clients]
    assert rates == pytest.approx([300, 600], abs=1)
    assert [client.lengths[0].prompt_tokens.at(0.5) for client in model.clients] == [900, 10]


def sessions() -> Iterator[Request]:
    """Every 2 s a session opens; 30 s later its second turn repeats prompt and answer, and adds 64 tokens."""
    opened = [request(i, 2.0 * i, 320, 32, session=i, has_next=True) for i in range(1000)]
    events = [(r.arrival_ns, r) for r in opened]
    for r in opened:
        spans = (*r.spans, (output_stream(r.session, 0), 0, 32), (user_stream(r.session, 1), 0, 64))
        later = request(1000 + r.id, 2.0 * r.id + 30, 416, 32, session=r.session, turn=1, spans=spans)
        events.append((later.arrival_ns, later))
    events.sort(key=lambda event: event[0])
    return (r for _, r in events)


def test_sessions_are_learned_as_sharing() -> None:
    sharing = learn(sessions(), block_size=16).clients[0].sharing
    assert sharing is not None
    assert (sharing.block_size, sharing.system_prompt_tokens) == (16, 0)
    assert sharing.follow_share[0] == 0.0
    assert sharing.follow_share[-1] == pytest.approx(1.0, abs=0.02)
    assert sharing.follow_after_s[0] == sharing.follow_after_s[-1] == 30.0
    # 20 of 26 blocks: the answer's are new, as no prompt had them.
    assert set(sharing.shared_part[-1]) == {round(20 / 26, 4)}


def test_the_system_prompt_is_what_nearly_all_have() -> None:
    def prompts() -> Iterator[Request]:
        for id in range(300):
            own = (user_stream(id, 0), 0, 100)
            spans = (("system", 0, 64), own) if id % 50 else (own,)
            yield request(id, float(id), sum(n for *_, n in spans), spans=spans)

    sharing = learn(prompts(), block_size=16).clients[0].sharing
    assert sharing is not None
    assert sharing.system_prompt_tokens == 64
    assert set(sharing.follow_share) == {0.0}


def test_waits_are_weighted_by_who_could_show_them() -> None:
    """In a model where half go on after up to 400 s, an hour shows fewer long waits than there are."""
    known = Sharing(128, 0, (0.5,), ((0.3, 0.9),), tuple(float(w) for w in range(0, 1600, 40)))
    windows = [Window(300.0 * i, 3.0, "gamma", 1.0) for i in range(12)]
    sharing = learn(made(*windows, span_s=3600.0, sharing=known), block_size=128).clients[0].sharing
    assert sharing is not None
    assert np.mean(sharing.follow_share) == pytest.approx(0.5, abs=0.05)
    assert sharing.follow_after_s[20] == pytest.approx(780, rel=0.1)


def test_lengths_alone_are_poisson() -> None:
    model = learn_lengths([(10, 1), (20, 2), (20, 2), (30, 3)], request_rate=2.0, source="lengths.csv")
    assert model.span_s == 2.0
    assert model.clients[0].windows == (Window(0.0, 2.0, "gamma", 1.0),)
    assert model.clients[0].lengths[0].prompt_tokens.at(0.5) == 20
    assert model.notes == ("the trace has no times: arrivals are Poisson's, at 2 a second",)
    with pytest.raises(WorkloadError, match="there are no lengths to learn from"):
        learn_lengths([], request_rate=2.0)
    with pytest.raises(WorkloadError, match="request_rate is above 0"):
        learn_lengths([(1, 1)], request_rate=0.0)


@pytest.mark.parametrize(
    ("requests", "keys", "said"),
    [
        ([], {}, "0 requests over 0 s tell no rate"),
        ([request(0, 5.0)], {}, "1 request over 0 s tell no rate"),
        ([request(0, 5.0), request(1, 5.0)], {}, "2 requests over 0 s tell no rate"),
        ([request(0, 5.0), request(1, 4.0)], {}, "request 1 arrives before the one above it"),
        ([], {"window_s": 0.5}, "a window is from 1 to 1e6 seconds, not 0.5"),
    ],
)
def test_what_tells_nothing(requests: list[Request], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        learn(requests, **keys)
