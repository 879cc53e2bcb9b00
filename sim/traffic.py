"""The traffic of a scenario: a trace, a learned model, users in a closed loop, arrivals in an open one, or built in."""

from __future__ import annotations

from math import inf
from pathlib import Path

from hbmtwin.sim.arrivals import arrivals_of
from hbmtwin.sim.prompts import clients_of, conversations_of, spelled_out
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.workloads.builtin import NUM_PROMPTS
from hbmtwin.workloads.closed_loop import ClosedLoop
from hbmtwin.workloads.formats.multi_turn import MultiTurn, read_multi_turn
from hbmtwin.workloads.formats.replay import Replay
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.learned.source import open_model
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.priorities import Priorities
from hbmtwin.workloads.records import Source, WorkloadError
from hbmtwin.workloads.samples import Samples
from hbmtwin.workloads.tables import naming


def source_of(scenario: Scenario) -> Source:
    """Build a scenario's traffic. Raise ScenarioError for its settings, WorkloadError for a bad file.

    ``workload.trace`` wins, then ``workload.multi_turn``, then ``workload.clients``, and ``workload.model`` stands
    beside neither of the first two; else ``workload.users`` makes a closed loop and ``workload.request_rate`` an open
    one; with none of them the built-in workload runs. What the workload keys leave open is the built-in workload's.
    ``workload.samples`` sends each prompt as often, and ``workload.priorities`` ranks sessions.
    """
    if all(part is None for part in (scenario.workload.trace, scenario.workload.model, scenario.workload.multi_turn)):
        scenario = spelled_out(scenario)
    samples = scenario.workload.samples
    source = _source_of_prompts(scenario)
    if samples > 1 and isinstance(source, Replay) and source.has_turns:
        raise ScenarioError(
            f"workload.samples: sessions of {scenario.workload.trace or scenario.workload.model} have several turns, "
            f"and {samples} answers to a prompt leave no one answer to go on with; take a trace of single requests, or "
            "samples = 1"
        )
    if (weights := scenario.workload.priorities) is not None:
        try:
            source = Priorities(source, weights, seed=scenario.seed)
        except WorkloadError as error:
            raise ScenarioError(f"workload.priorities: {error}") from None
    return Samples(source, samples) if samples > 1 else source


def trace_notes(scenario: Scenario, source: Source) -> tuple[str, ...]:
    """What a run has to tell of the trace or model behind its traffic, a sentence each; nothing without one."""
    while isinstance(source, Priorities | Samples):
        source = source.source
    key = "workload.trace" if scenario.workload.model is None else "workload.model"
    return tuple(f"{key}: {note}" for note in source.notes) if isinstance(source, Replay) else ()


def _source_of_prompts(scenario: Scenario) -> Source:
    w = scenario.workload
    files = [key for key in ("model", "trace", "multi_turn") if getattr(w, key) is not None]
    if len(files) > 1:
        first, other = files[:2]
        raise ScenarioError(f"workload.{first}: workload.{other} says who asks for what as well; give one of the two")
    if w.trace is not None:
        try:
            return open_trace(
                Path(w.trace),
                format=w.trace_format,
                time_scale=w.time_scale,
                num_prompts=w.num_prompts,
                skip=w.trace_skip,
                block_size=w.trace_block_size,
                jitter=w.trace_jitter,
                skip_bad_lines=w.skip_bad_lines,
                keep_failed=w.keep_failed,
                seed=scenario.seed,
            )
        except WorkloadError as error:
            raise WorkloadError(f"workload.trace: {error}") from None
    if w.model is not None:
        try:
            return open_model(
                w.model,
                seed=scenario.seed,
                num_prompts=w.num_prompts,
                rate_scale=w.rate_scale,
                time_scale=w.time_scale,
            )
        except WorkloadError as error:
            raise WorkloadError(f"workload.model: {error}") from None
    if w.multi_turn is not None:
        return _multi_turn(scenario, w.multi_turn)
    if w.users is not None and w.request_rate is not None:
        raise ScenarioError("workload.users: a closed loop has no request_rate; give one of the two")
    num_prompts = NUM_PROMPTS if w.num_prompts is None else w.num_prompts
    try:
        if w.clients is not None:
            return clients_of(scenario, w.clients)
        conversations = conversations_of(scenario)
        if w.users is not None:
            return ClosedLoop(conversations, users=w.users, num_prompts=num_prompts)
        return OpenLoop(conversations, arrivals_of(w), num_prompts=num_prompts)
    except WorkloadError as error:
        raise ScenarioError(str(error)) from None


def _multi_turn(scenario: Scenario, file: str) -> Source:
    w = scenario.workload
    with naming("workload.multi_turn"):
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
