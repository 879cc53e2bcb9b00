"""Which combinations of policies are legal, and why the others are not.

A refusal names the keys, the reason and the cure; settings that have no effect on a run are told as notes, so that
nothing is ignored in silence.
"""

from __future__ import annotations

from typing import Any, Literal

from hbmtwin.allocators.registry import Registry, UnknownPolicy, device_allocators, kv_policies
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.scheduler import schedulers

CONTIGUOUS_KEYS = ("growth", "tensors", "copy_scope", "initial_tokens", "growth_factor")
PAGED_KEYS = ("block_size", "watermark")


def effective_oom(scenario: Scenario) -> Literal["stop", "reject", "preempt"]:
    """``memory.oom`` with its default: a paged server preempts, one with contiguous buffers dies."""
    if scenario.memory.oom is not None:
        return scenario.memory.oom
    return "preempt" if scenario.kv_cache.policy == "paged" else "stop"


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
    missing = kv_policies.get(scenario.kv_cache.policy).requires - arena.features
    if missing:
        raise ScenarioError(
            f"kv_cache.policy: {scenario.kv_cache.policy!r} needs {', '.join(sorted(missing))}, which "
            f"memory.kv_arena = {scenario.memory.kv_arena!r} does not offer"
        )
    if scenario.kv_cache.policy == "contiguous":
        _check_contiguous(scenario)
    if scenario.kv_cache.policy == "paged" and scenario.memory.admission == "reserve":
        raise ScenarioError(
            "memory.admission: reserve concerns contiguous policies; paged admits what fits its pool: leave it none"
        )


def notes(scenario: Scenario) -> tuple[str, ...]:
    """Remarks on settings that were given and have no effect."""
    kv = scenario.kv_cache
    found = []
    idle = CONTIGUOUS_KEYS if kv.policy == "paged" else PAGED_KEYS if kv.policy == "contiguous" else ()
    found += [
        f"kv_cache.{key} does not concern the policy {kv.policy!r}"
        for key in idle
        if key in kv.model_fields_set and getattr(kv, key) != type(kv).model_fields[key].default
    ]
    if scenario.session.between_turns == "keep" and kv.policy == "paged":
        found.append("session.between_turns = keep: paged has no parked buffers, and drops KV between turns")
    if scenario.workload.trace is not None:
        ignored = ("users", "request_rate", "prompt_tokens", "output_tokens", "system_prompt_tokens")
        given = [key for key in ignored if key in scenario.workload.model_fields_set]
        found += [f"workload.{key} does not concern a trace" for key in given]
    return tuple(found)


def _check_contiguous(scenario: Scenario) -> None:
    kv, oom = scenario.kv_cache, effective_oom(scenario)
    if scenario.session.between_turns == "prefix_cache":
        raise ScenarioError(
            "session.between_turns: contiguous buffers have no prefix cache; use keep (buffers wait for the next "
            "turn) or drop"
        )
    if oom == "stop":
        return
    if kv.copy_scope == "tensor" and kv.growth != "static":
        raise ScenarioError(
            f"memory.oom: {oom!r} is illegal with kv_cache.growth = {kv.growth!r} and copy_scope = 'tensor': a step "
            "in which some tensors have been replaced cannot be undone; use stop"
        )
    raise ScenarioError(
        f"memory.oom: {oom!r} for contiguous policies is not in this release; use stop, or kv_cache.policy = 'paged'"
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
