"""From the keys of a scenario to what is said in its sessions: lengths, turns, prefixes, and each client's own.

::

    [workload]  system_prompt_tokens | client's system_prompt_tokens | prefix_tokens, prefix_buckets | prompt_tokens
    shared_prefix       inference-perf's words for one bucket and prompts that repeat
    prefix_repetition   vLLM's words for one bucket

What is not given is the built-in workload's.
"""

from __future__ import annotations

from typing import Any

from hbmtwin.sim.arrivals import curve_of, shape_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic_sections import ClientSection, LengthSpec, PrefixBucketSection, WorkloadSection
from hbmtwin.workloads.arrivals import Arrivals
from hbmtwin.workloads.builtin import (
    NUM_PROMPTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SYSTEM_PROMPT_TOKENS,
    THINK_TIME,
    TURNS,
)
from hbmtwin.workloads.clients import Client, Clients
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.gaps import Pattern
from hbmtwin.workloads.lengths import Length, length_from
from hbmtwin.workloads.prefixes import PrefixBucket, Prefixes
from hbmtwin.workloads.tables import naming
from hbmtwin.workloads.think_times import ThinkTime, think_time_from

_SAID = (
    "prompt_tokens",
    "first_prompt_tokens",
    "output_tokens",
    "system_prompt_tokens",
    "prefix_tokens",
    "prefix_count",
    "prefix_buckets",
    "distinct_prompts",
    "clients",
)
"""Of ``[workload]``: what a set of prompts says by itself."""
_NOT_OF_CLIENTS = ("users", "request_rate", "ramp_up_strategy", "rescale_gaps")


def spelled_out(scenario: Scenario) -> Scenario:
    """The same traffic with ``shared_prefix`` and ``prefix_repetition`` said in other keys. Raise ScenarioError."""
    w = scenario.workload
    if w.shared_prefix is None and w.prefix_repetition is None:
        return scenario
    key = "workload.shared_prefix" if w.shared_prefix is not None else "workload.prefix_repetition"
    if w.shared_prefix is not None and w.prefix_repetition is not None:
        raise ScenarioError(f"{key}: workload.prefix_repetition says other prompts; give one of the two")
    for name in _SAID:
        if getattr(w, name) is not None:
            raise ScenarioError(f"{key}: it says workload.{name} by itself; give one of the two")
    if scenario.session.turns not in (None, 1):
        raise ScenarioError(f"{key}: its sessions have one turn; leave session.turns out")
    said: dict[str, Any]
    if (s := w.shared_prefix) is not None:
        prompts = s.num_groups * s.num_prompts_per_group
        bucket = PrefixBucketSection(prefix_tokens=s.system_prompt_len, prefix_count=s.num_groups)
        said = {"prompt_tokens": s.question_len, "output_tokens": s.output_len, "distinct_prompts": prompts}
        said["num_prompts"] = prompts if w.num_prompts is None else w.num_prompts
    elif (p := w.prefix_repetition) is not None:
        bucket = PrefixBucketSection(prefix_tokens=p.prefix_len, prefix_count=p.num_prefixes)
        said = {"prompt_tokens": p.suffix_len, "output_tokens": p.output_len}
    said |= {"system_prompt_tokens": 0, "prefix_buckets": [bucket], "shared_prefix": None, "prefix_repetition": None}
    turns = scenario.session.model_copy(update={"turns": 1})
    return scenario.model_copy(update={"workload": w.model_copy(update=said), "session": turns})


def conversations_of(scenario: Scenario) -> Conversations:
    """What is said in all sessions alike. Raise ScenarioError, WorkloadError."""
    w, session = scenario.workload, scenario.session
    return Conversations(
        seed=scenario.seed,
        prompt_tokens=_length("workload.prompt_tokens", w.prompt_tokens, PROMPT_TOKENS),
        first_prompt_tokens=_length_or_none("workload.first_prompt_tokens", w.first_prompt_tokens),
        output_tokens=_length("workload.output_tokens", w.output_tokens, OUTPUT_TOKENS),
        turns=_length("session.turns", session.turns, TURNS),
        think_time=_think_time("session.think_time_s", session.think_time_s, THINK_TIME),
        system_prompt_tokens=SYSTEM_PROMPT_TOKENS if w.system_prompt_tokens is None else w.system_prompt_tokens,
        prefixes=_prefixes(w),
        distinct_prompts=w.distinct_prompts,
    )


def clients_of(scenario: Scenario, clients: list[ClientSection]) -> Clients:
    """The clients of ``workload.clients``. Raise ScenarioError, WorkloadError."""
    w = scenario.workload
    for name in _NOT_OF_CLIENTS:
        if getattr(w, name) not in (None, False):
            raise ScenarioError(f"workload.clients: each has a request_rate of its own; leave workload.{name} out")
    of_all, curve = conversations_of(scenario), curve_of(w)
    built = []
    for i, c in enumerate(clients):
        at = f"workload.clients.{i}"
        pattern: Pattern = c.arrival_pattern or "gamma"
        burstiness = shape_of(pattern, c.burstiness, c.cv, at)
        arrivals = Arrivals(c.request_rate, burstiness, None, pattern, curve, key=f"{at}.request_rate")
        said = Conversations(
            seed=scenario.seed,
            prompt_tokens=_length(f"{at}.prompt_tokens", c.prompt_tokens, of_all.prompt_tokens),
            first_prompt_tokens=(
                of_all.first_prompt_tokens
                if c.prompt_tokens is None and c.first_prompt_tokens is None
                else _length_or_none(f"{at}.first_prompt_tokens", c.first_prompt_tokens)
            ),
            output_tokens=_length(f"{at}.output_tokens", c.output_tokens, of_all.output_tokens),
            turns=_length(f"{at}.turns", c.turns, of_all.turns),
            think_time=_think_time(f"{at}.think_time_s", c.think_time_s, of_all.think_time),
            system_prompt_tokens=of_all.system_prompt_tokens,
            tenant=i,
            tenant_prompt_tokens=c.system_prompt_tokens,
            prefixes=of_all.prefixes,
            distinct_prompts=of_all.distinct_prompts,
        )
        built.append(Client(arrivals, said))
    return Clients(built, num_prompts=NUM_PROMPTS if w.num_prompts is None else w.num_prompts, seed=scenario.seed)


def _prefixes(w: WorkloadSection) -> Prefixes | None:
    if w.prefix_buckets is None:
        if w.prefix_tokens is None:
            if w.prefix_count is not None:
                raise ScenarioError("workload.prefix_count: say how long prefixes are, workload.prefix_tokens")
            return None
        length = length_from(w.prefix_tokens, "workload.prefix_tokens")
        with naming("workload.prefix_count"):
            return Prefixes((PrefixBucket(length, w.prefix_count or 1),))
    if w.prefix_tokens is not None or w.prefix_count is not None:
        raise ScenarioError("workload.prefix_buckets: they say prefix_tokens and prefix_count by themselves")
    with naming("workload.prefix_buckets"):
        return Prefixes(
            tuple(
                PrefixBucket(
                    length_from(bucket.prefix_tokens, f"{i}.prefix_tokens"), bucket.prefix_count, bucket.bucket_weight
                )
                for i, bucket in enumerate(w.prefix_buckets)
            )
        )


def _length(key: str, spec: LengthSpec | None, default: Length) -> Length:
    return default if spec is None else length_from(spec, key)


def _length_or_none(key: str, spec: LengthSpec | None) -> Length | None:
    return None if spec is None else length_from(spec, key)


def _think_time(key: str, spec: float | dict[str, Any] | None, default: ThinkTime) -> ThinkTime:
    return default if spec is None else think_time_from(spec, key)
