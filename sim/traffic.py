"""The traffic of a scenario: a trace, users in a closed loop, arrivals in an open one, or the built-in workload."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

from hbmtwin.sim.arrivals import arrivals_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import LengthSpec
from hbmtwin.workloads.builtin import (
    NUM_PROMPTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SYSTEM_PROMPT_TOKENS,
    THINK_TIME,
    TURNS,
)
from hbmtwin.workloads.closed_loop import ClosedLoop
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.lengths import Length, length_from
from hbmtwin.workloads.multi_turn import MultiTurn, read_multi_turn
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.priorities import Priorities
from hbmtwin.workloads.records import Source, WorkloadError
from hbmtwin.workloads.replay import Replay
from hbmtwin.workloads.samples import Samples
from hbmtwin.workloads.think_times import ThinkTime, think_time_from
from hbmtwin.workloads.traces import open_trace


def source_of(scenario: Scenario) -> Source:
    """Build a scenario's traffic. Raise ScenarioError for its settings, WorkloadError for a bad file.

    ``workload.trace`` wins, then ``workload.multi_turn``; else ``workload.users`` makes a closed loop and
    ``workload.request_rate`` an open one; with none of them the built-in workload runs. What the workload keys leave
    open is the built-in workload's.
    ``workload.samples`` sends each prompt as often, and ``workload.priorities`` ranks sessions.
    """
    samples = scenario.workload.samples
    source = _source_of_prompts(scenario)
    if samples > 1 and isinstance(source, Replay) and source.has_turns:
        raise ScenarioError(
            f"workload.samples: sessions of {scenario.workload.trace} have several turns, and {samples} answers to a "
            "prompt leave no one answer to go on with; take a trace of single requests, or samples = 1"
        )
    if (weights := scenario.workload.priorities) is not None:
        try:
            source = Priorities(source, weights, seed=scenario.seed)
        except WorkloadError as error:
            raise ScenarioError(f"workload.priorities: {error}") from None
    return Samples(source, samples) if samples > 1 else source


def trace_notes(source: Source) -> tuple[str, ...]:
    """What a run has to tell of the trace behind its traffic, a sentence each; nothing without one."""
    while isinstance(source, Priorities | Samples):
        source = source.source
    return tuple(f"workload.trace: {note}" for note in source.notes) if isinstance(source, Replay) else ()


def _source_of_prompts(scenario: Scenario) -> Source:
    w = scenario.workload
    if w.trace is not None:
        try:
            return open_trace(
                Path(w.trace),
                format=w.trace_format,
                time_scale=w.time_scale,
                num_prompts=w.num_prompts,
                block_size=w.trace_block_size,
                jitter=w.trace_jitter,
                skip_bad_lines=w.skip_bad_lines,
                keep_failed=w.keep_failed,
                seed=scenario.seed,
            )
        except WorkloadError as error:
            raise WorkloadError(f"workload.trace: {error}") from None
    if w.multi_turn is not None:
        return _multi_turn(scenario, w.multi_turn)
    if w.users is not None and w.request_rate is not None:
        raise ScenarioError("workload.users: a closed loop has no request_rate; give one of the two")
    num_prompts = NUM_PROMPTS if w.num_prompts is None else w.num_prompts
    try:
        conversations = _conversations(scenario)
        if w.users is not None:
            return ClosedLoop(conversations, users=w.users, num_prompts=num_prompts)
        return OpenLoop(conversations, arrivals_of(w), num_prompts=num_prompts)
    except WorkloadError as error:
        raise ScenarioError(str(error)) from None


def _multi_turn(scenario: Scenario, file: str) -> Source:
    w = scenario.workload
    plan = read_multi_turn(Path(file))
    rate = None if w.request_rate == inf else w.request_rate
    try:
        return MultiTurn(
            plan, seed=scenario.seed, num_clients=w.users or 1, max_num_requests=w.num_prompts, request_rate=rate
        )
    except WorkloadError as error:
        raise ScenarioError(
            f"workload.multi_turn: {error} (workload.users are clients, num_prompts requests)"
        ) from None


def _conversations(scenario: Scenario) -> Conversations:
    w, session = scenario.workload, scenario.session
    return Conversations(
        seed=scenario.seed,
        prompt_tokens=_length("workload.prompt_tokens", w.prompt_tokens, PROMPT_TOKENS),
        first_prompt_tokens=(
            None
            if w.first_prompt_tokens is None
            else length_from(w.first_prompt_tokens, "workload.first_prompt_tokens")
        ),
        output_tokens=_length("workload.output_tokens", w.output_tokens, OUTPUT_TOKENS),
        turns=_length("session.turns", session.turns, TURNS),
        think_time=_think_time(session.think_time_s),
        system_prompt_tokens=(SYSTEM_PROMPT_TOKENS if w.system_prompt_tokens is None else w.system_prompt_tokens),
    )


def _length(key: str, spec: LengthSpec | None, default: Length) -> Length:
    return default if spec is None else length_from(spec, key)


def _think_time(spec: float | dict[str, Any] | None) -> ThinkTime:
    return THINK_TIME if spec is None else think_time_from(spec, "session.think_time_s")
