"""Agents as sessions: a task first, then many calls a second apart whose tool outputs pile up, as mini-SWE's do."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hbmtwin.workloads import Arrivals, Conversations, LogNormalTime, OpenLoop, Quantiles, Request

TRACE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "lmcache_agent_miniswe_lengths.csv.gz"
SHARES = (0.05, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95)
CHARS_PER_TOKEN = 4
TASKS = (1271, 1354, 1477, 1993, 2229, 2452, 2860)
TOOL_OUTPUTS = (12, 12, 27, 185, 491, 696, 2654)
ANSWERS = (53, 81, 98, 123, 160, 191, 230)
AGENTS = Conversations(
    first_prompt_tokens=Quantiles(SHARES, TASKS),
    prompt_tokens=Quantiles(SHARES, TOOL_OUTPUTS),
    output_tokens=Quantiles(SHARES, ANSWERS),
    turns=Quantiles((0.05, 0.25, 0.5, 0.75), (6, 11, 22, 30)),
    think_time=LogNormalTime(1.2, 0.4),
)


def played(play: Callable[..., Any]) -> dict[int, list[tuple[Request, int]]]:
    source = OpenLoop(AGENTS, Arrivals(0.5), num_prompts=12_000)
    sessions: dict[int, list[tuple[Request, int]]] = defaultdict(list)
    for served in play(source, 2 * 10**9):
        sessions[served.request.session].append((served.request, served.end_ns))
    return dict(list(sessions.items())[:-1])  # the last may be cut


def test_sessions_of_agents_have_the_shape_of_the_trace(play: Callable[..., Any]) -> None:
    sessions = played(play)
    calls = [len(session) for session in sessions.values()]
    assert np.mean(calls) == pytest.approx(20.1, abs=1)  # the trace's 402 calls in 20 sessions
    gaps_s = [
        (after.arrival_ns - end_ns) / 1e9
        for session in sessions.values()
        for (_, end_ns), (after, _) in pairwise(session)
    ]
    assert np.mean(gaps_s) == pytest.approx(1.2, rel=0.03)
    tokens = sum(r.prompt_tokens for session in sessions.values() for r, _ in session)
    said_before = sum(r.prompt_tokens - r.spans[-1][2] for session in sessions.values() for r, _ in session)
    assert said_before / tokens == pytest.approx(0.94, abs=0.02)
    answers = sum(
        n
        for r, _ in (call for session in sessions.values() for call in session)
        for s, _, n in r.spans
        if "out/" in str(s)
    )
    # The trace's prompts, 24,065 characters in the mean, are without the answers before them.
    assert (tokens - answers) / sum(calls) == pytest.approx(6016, rel=0.15)


def test_the_figures_are_the_traces() -> None:
    if not TRACE.exists():
        pytest.skip("the shared traces are not here")
    sessions: dict[str, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(TRACE, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            sessions[row["session"]].append(row)

    def tokens(chars: list[int]) -> list[float]:
        return [round(float(q)) for q in np.quantile(chars, SHARES) / CHARS_PER_TOKEN]

    calls = [row for rows in sessions.values() for row in rows]
    new = [int(r["input_chars"]) - int(r["shared_prefix_chars"]) for rows in sessions.values() for r in rows[1:]]
    assert tokens([int(rows[0]["input_chars"]) for rows in sessions.values()]) == [*TASKS]
    assert tokens(new) == [*TOOL_OUTPUTS]
    assert tokens([int(row["output_chars"]) for row in calls]) == [*ANSWERS]
    shared = sum(int(row["shared_prefix_chars"]) for row in calls) / sum(int(row["input_chars"]) for row in calls)
    assert shared == pytest.approx(0.936, abs=0.001)
