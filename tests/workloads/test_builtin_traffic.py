"""The built-in workload: bursts, sessions, a shared system prompt, and lengths like real ones."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hbmtwin.workloads import Arrivals, builtin


def test_its_first_requests_never_change() -> None:
    first, second = list(builtin().open())[:2]
    assert (first.arrival_ns, first.prompt_tokens, first.output_tokens) == (4_304_202_371, 945, 433)
    assert (second.arrival_ns, second.prompt_tokens, second.output_tokens) == (11_707_935_110, 496, 624)
    assert first.spans == (("system", 0, 400), ("user/0/0", 0, 545))
    assert second.spans == (("system", 0, 400), ("user/1/0", 0, 96))


def test_its_bursts_are_those_of_the_azure_trace() -> None:
    """At the trace's rate. Its whole windows: dispersion 1.39, 3.86 and 16.1; CV 0.99 to 1.19, median 1.03."""
    source = builtin(num_prompts=150_000, request_rate=5.53)
    arrivals = np.array([r.arrival_ns for r in source.open()]) / 1e9
    dispersion = []
    for window_s in (1, 10, 60):
        counts = np.bincount((arrivals // window_s).astype(int))[:-1]
        dispersion.append(counts.var() / counts.mean())
    assert dispersion == [pytest.approx(1.3, abs=0.1), pytest.approx(4.2, abs=0.5), pytest.approx(19, abs=3)]
    windows = [arrivals[arrivals // 300 == k] for k in range(int(arrivals[-1] // 300))]
    cvs = [np.diff(w).std() / np.diff(w).mean() for w in windows]
    assert np.median(cvs) == pytest.approx(1.03, abs=0.03)
    assert np.quantile(cvs, [0.1, 0.9]).tolist() == [pytest.approx(0.98, abs=0.03), pytest.approx(1.1, abs=0.05)]
    sizes = sorted(len(w) for w in windows)
    assert 2 < sizes[-1] / sizes[0] < 3  # the mean drifts by 2-3 times


def test_one_rate_has_not_the_minutes_of_the_trace() -> None:
    """Planted: a stationary Poisson process passes the CV within minutes, and fails the dispersion of minutes."""
    arrivals = np.concatenate(list(Arrivals(5.53).times_ns(0, 60_000)))
    counts = np.bincount(arrivals // (60 * 10**9))[:-1]
    assert counts.var() / counts.mean() < 1.5


def test_answers_are_those_of_the_azure_trace_and_turns_are_short() -> None:
    requests = list(builtin(num_prompts=50_000).open())
    prompts = np.array([r.prompt_tokens - 400 for r in requests])
    outputs = np.array([r.output_tokens for r in requests])
    # The trace's answers: 211.1 in the mean, 129 in the middle. New tokens of a turn are our assumption.
    assert prompts.mean() == pytest.approx(286, rel=0.03)
    assert outputs.mean() == pytest.approx(211.1, rel=0.06)
    assert np.median(prompts) == pytest.approx(120, rel=0.08)
    assert np.median(outputs) == pytest.approx(129, rel=0.06)  # a steep place: 50 % is 129, 51 % is 140
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.03


def test_most_sessions_have_one_turn_and_a_few_have_many() -> None:
    source = builtin(num_prompts=50_000)
    firsts = list(source.open())
    ids = [r.id for r in firsts] + [50_000]
    turns = Counter(b - a for a, b in pairwise(ids))
    assert turns[1] / source.num_sessions == pytest.approx(0.58, abs=0.01)
    assert max(turns) == 20
    assert 50_000 / source.num_sessions == pytest.approx(2.47, rel=0.02)


def test_it_scales_in_length_and_rate() -> None:
    assert builtin(num_prompts=77).total_requests == 77
    slow, fast = (list(builtin(num_prompts=5_000, request_rate=rate).open()) for rate in (1.0, 10.0))
    assert [r.spans for r in slow] == [r.spans for r in fast]
    assert slow[-1].arrival_ns == pytest.approx(len(slow) * 1e9, rel=0.05)
    assert fast[-1].arrival_ns == pytest.approx(len(fast) * 1e8, abs=150e9)  # within its first lull
