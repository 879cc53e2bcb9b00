"""Which combinations of policies are legal, and why the others are not.

A refusal names the keys, the reason and the cure; settings that have no effect on a run are told as notes, so that
nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal

from hbmtwin.allocators.growth import growth_rule
from hbmtwin.allocators.registry import Registry, UnknownPolicy, device_allocators, kv_policies
from hbmtwin.sim.scenario import Scenario, ScenarioError, Section
from hbmtwin.sim.scheduler import schedulers

CONTIGUOUS_KEYS = ("growth", "tensors", "copy_scope", "initial_tokens", "growth_factor")
PAGED_KEYS = ("block_size", "watermark")
GENERATOR_KEYS = ("users", "request_rate", "burstiness", "prompt_tokens", "output_tokens", "system_prompt_tokens")
"""Of ``[workload]``: a trace has its own."""


def effective_oom(scenario: Scenario) -> Literal["stop", "reject", "preempt"]:
    """``memory.oom`` with its default: a server preempts where its KV policy offers that, and dies elsewhere."""
    if scenario.memory.oom is not None:
        return scenario.memory.oom
    return "preempt" if "preempt" in kv_policies.get(scenario.kv_cache.policy).offers else "stop"


def check(scenario: Scenario) -> None:
    """Refuse what cannot be run. Raise ScenarioError naming keys, reason and cure."""
    _known("memory.general", scenario.memory.general, device_allocators)
    _known("memory.kv_arena", scenario.memory.kv_arena, device_allocators)
    _known("kv_cache.policy", scenario.kv_cache.policy, kv_policies)
    _known("scheduler.policy", scenario.scheduler.policy, schedulers)
    _later(scenario)
    general = device_allocators.get(scenario.memory.general)
    if "region" in general.features:
        raise ScenarioError(
            f"memory.general: {scenario.memory.general!r} takes one region at start and cannot hold the weights "
            "beside another arena; use it as memory.kv_arena"
        )
    arena = device_allocators.get(scenario.memory.kv_arena)
    policy = kv_policies.get(scenario.kv_cache.policy)
    missing = policy.requires - arena.features
    if missing:
        raise ScenarioError(
            f"kv_cache.policy: {scenario.kv_cache.policy!r} needs {', '.join(sorted(missing))}, which "
            f"memory.kv_arena = {scenario.memory.kv_arena!r} does not offer"
        )
    _check_options(scenario)
    if scenario.kv_cache.policy == "contiguous":
        _check_contiguous(scenario)
    oom = effective_oom(scenario)
    if oom != "stop" and oom not in policy.offers:
        raise ScenarioError(
            f"memory.oom: the policy {scenario.kv_cache.policy!r} does not offer {oom!r} in this release; use stop, or "
            "kv_cache.policy = 'paged'"
        )
    if scenario.kv_cache.policy == "paged" and scenario.memory.admission == "reserve":
        raise ScenarioError(
            "memory.admission: reserve concerns contiguous policies; paged admits what fits its pool: leave it none"
        )


def notes(scenario: Scenario) -> tuple[str, ...]:
    """Remarks on settings that were given and have no effect, or gave way to a preset."""
    kv, workload, session = scenario.kv_cache, scenario.workload, scenario.session
    idle = CONTIGUOUS_KEYS if kv.policy == "paged" else PAGED_KEYS if kv.policy == "contiguous" else ()
    found = [f"kv_cache.{key} does not concern the policy {kv.policy!r}" for key in _given(kv, idle)]
    if "pooled" not in (scenario.memory.kv_arena, scenario.memory.general):
        found += [f"memory.{key} concerns the allocator 'pooled' only" for key in _given(scenario.memory, ("fit",))]
    if session.between_turns == "keep" and kv.policy == "paged":
        found.append("session.between_turns = keep: paged has no parked buffers, and drops KV between turns")
    if workload.trace is not None:
        found += [f"workload.{key} does not concern a trace" for key in _given(workload, GENERATOR_KEYS)]
        found += [f"session.{key} does not concern a trace" for key in _given(session, ("turns", "think_time_s"))]
    else:
        found += [f"workload.{key} concerns a trace only" for key in _given(workload, ("time_scale",))]
        if workload.users is not None:
            found += [f"workload.{key} does not concern a closed loop" for key in _given(workload, ("burstiness",))]
    return (*scenario.overridden, *found)


def _given(section: Section, keys: Iterable[str]) -> list[str]:
    """Those of *keys* whose value is not the default."""
    return [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]


def _check_options(scenario: Scenario) -> None:
    policy: Any = kv_policies.get(scenario.kv_cache.policy)
    keys = type(scenario.kv_cache).model_fields.keys()
    further = {f.name for f in fields(policy.Config)} - keys
    for name in sorted(scenario.kv_cache.options.keys() - further):
        if name in keys:
            raise ScenarioError(f"kv_cache.options: {name!r} has a key of its own; write it as kv_cache.{name}")
        near = difflib.get_close_matches(name, further, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ScenarioError(
            f"kv_cache.options: {name!r} is no further setting of the policy {scenario.kv_cache.policy!r}{hint}"
        )


def _check_contiguous(scenario: Scenario) -> None:
    kv, oom = scenario.kv_cache, effective_oom(scenario)
    try:
        growth_rule(kv.growth, kv.model_dump())
    except ValueError as error:
        raise ScenarioError(f"kv_cache.growth: {error}") from None
    if scenario.session.between_turns == "prefix_cache":
        raise ScenarioError(
            "session.between_turns: contiguous buffers have no prefix cache; use keep (buffers wait for the next "
            "turn) or drop"
        )
    if oom != "stop" and kv.copy_scope == "tensor" and kv.growth != "static":
        raise ScenarioError(
            f"memory.oom: {oom!r} is illegal with kv_cache.growth = {kv.growth!r} and copy_scope = 'tensor': a step "
            "in which some tensors have been replaced cannot be undone; use stop"
        )


def _later(scenario: Scenario) -> None:
    """Settings of the design that a later release brings are refused by name."""
    wanted = {
        "memory.activations": (scenario.memory.activations, "none"),
        "kv_cache.retention": (scenario.kv_cache.retention, "full"),
        "calibration.profile": (scenario.calibration.profile, None),
    }
    for key, (value, only) in wanted.items():
        if value != only:
            raise ScenarioError(
                f"{key}: {value!r} is not in this release; {'leave it out' if only is None else f'use {only!r}'}"
            )
    if scenario.session.between_turns == "prefix_cache" and scenario.kv_cache.policy == "paged":
        raise ScenarioError("session.between_turns: prefix_cache is not in this release of paged; use 'drop'")


def _known(key: str, name: str, registry: Registry[Any]) -> None:
    try:
        registry.get(name)
    except UnknownPolicy as error:
        raise ScenarioError(f"{key}: {error}") from None
