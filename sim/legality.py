"""Which combinations of policies are legal, and why the others are not.

A refusal names the keys, the reason and the cure; settings that have no effect on a run are told as notes, so that
nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hbmtwin.allocators.growth import growth_rule
from hbmtwin.allocators.registry import Registry, device_allocators, kv_policies
from hbmtwin.allocators.retention import Forget, retention_rule
from hbmtwin.sim.idle_settings import config_fields, idle_reason
from hbmtwin.sim.kv_policy import CHOSEN_BY_MODEL, CHOSEN_BY_RELEASE, is_v0, kv_policy, named_by_users, told
from hbmtwin.sim.scenario import Scenario, ScenarioError, known_keys
from hbmtwin.sim.scheduler import schedulers

KEYS_ELSEWHERE = {
    "admission": "memory.admission",
    "max_model_len": "engine.max_model_len",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
}
"""Settings of KV policies that are no keys of ``[kv_cache]``: the whole server must have the same."""

COUNT_BLOCKS = ("guaranteed_no_evict", "max_utilization")
"""Schedulers that count blocks, all of which keep the whole context."""


def effective_oom(scenario: Scenario) -> Literal["stop", "reject", "preempt"]:
    """``memory.oom`` with its default: a server preempts where its KV policy offers that; naive ones, whose buffers are
    contiguous, die unless told otherwise."""
    if scenario.memory.oom is not None:
        return scenario.memory.oom
    policy = scenario.kv_cache.policy
    return "preempt" if policy != "contiguous" and "preempt" in kv_policy(scenario).offers else "stop"


def check(scenario: Scenario) -> None:
    """Refuse what cannot be run. Raise ScenarioError naming keys, reason and cure."""
    _known("memory.general", scenario.memory.general, device_allocators)
    _known("memory.kv_arena", scenario.memory.kv_arena, device_allocators)
    _named_by_users(scenario)
    _known("kv_cache.policy", scenario.kv_cache.policy, kv_policies, named_by_users())
    _known("scheduler.policy", scenario.scheduler.policy, schedulers)
    _check_rules(scenario)
    general = device_allocators.get(scenario.memory.general)
    if "region" in general.features:
        raise ScenarioError(
            f"memory.general: {scenario.memory.general!r} takes one region at start and cannot hold the weights "
            "beside another arena; use it as memory.kv_arena"
        )
    _check_release(scenario)
    _check_scheduler(scenario)
    _check_samples(scenario)
    arena = device_allocators.get(scenario.memory.kv_arena)
    policy = kv_policy(scenario)
    missing = policy.requires - arena.features
    if missing:
        able = ", ".join(name for name, cls in device_allocators if policy.requires <= cls.features)
        cure = f"allocators that do: {able}" if able else "no allocator offers all that it needs"
        raise ScenarioError(
            f"kv_cache.policy: {scenario.kv_cache.policy!r} needs {', '.join(sorted(missing))}, which "
            f"memory.kv_arena = {scenario.memory.kv_arena!r} does not offer; {cure}"
        )
    _check_options(scenario)
    if scenario.kv_cache.policy == "contiguous":
        _check_contiguous(scenario)
    else:
        _check_not_contiguous(scenario)
    oom = effective_oom(scenario)
    if oom != "stop" and oom not in policy.offers:
        raise ScenarioError(
            f"memory.oom: {_oom_said(scenario)} is not offered by the policy {scenario.kv_cache.policy!r}; use stop, "
            "or kv_cache.policy = 'paged'"
        )
    _check_one_piece(scenario)
    _check_batching(scenario)
    if scenario.engine.task_queue_enable == 2 and "workspace" not in general.features:
        raise ScenarioError(
            f"engine.task_queue_enable: 2 takes workspaces from torch_npu's workspace allocator, which "
            f"memory.general = {scenario.memory.general!r} does not have; use 1, or memory.general = 'caching'"
        )


def notes(scenario: Scenario) -> tuple[str, ...]:
    """Remarks on settings that were given and have no effect, or gave way to a preset.

    Raise ScenarioError as :func:`check` does.
    """
    check(scenario)
    standard = Scenario()
    given = [key for key in known_keys() if _value(scenario, key) != _value(standard, key)]
    found = [f"{key} {reason}" for key in given if (reason := idle_reason(scenario, key))]
    policy, memory = scenario.kv_cache.policy, scenario.memory
    if scenario.session.between_turns == "keep" and "park" not in kv_policy(scenario).offers:
        found.append(f"session.between_turns = keep: {policy} parks nothing, and drops KV between turns")
    if scenario.scheduler.policy == "static_batch" and scenario.scheduler.batching != "variable":
        found.append(
            "scheduler.max_num_batched_tokens does not bound the prefill of a padded batch; it sizes the activation "
            "reserve as before: make it max_num_seqs x the longest prompt to plan for the whole batch"
        )
    scheduler = scenario.scheduler
    of_vllm = scheduler.policy == "vllm" and scheduler.enable_chunked_prefill  # else it is raised to max_model_len
    if (
        policy == "paged"
        and (of_vllm or scheduler.policy == "vllm_v0")
        and scheduler.max_num_batched_tokens < scheduler.max_num_seqs
    ):
        found.append(
            f"scheduler.max_num_batched_tokens = {scheduler.max_num_batched_tokens} is less than max_num_seqs = "
            f"{scheduler.max_num_seqs}: vLLM refuses to start so; here a step serves the first of the running sequences"
        )
    if memory.activations == "per_layer" and memory.activation_bytes is not None:
        found.append(
            "memory.activation_bytes is left free, not held: with per_layer the forward pass takes what it needs"
        )
    return (*scenario.overridden, *found)


def _value(scenario: Scenario, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(scenario, section) if section else scenario, name)


def _check_options(scenario: Scenario) -> None:
    own = {name: f"kv_cache.{name}" for name in type(scenario.kv_cache).model_fields} | KEYS_ELSEWHERE
    further = config_fields(kv_policy(scenario)) - own.keys()
    for name in sorted(scenario.kv_cache.options.keys() - further):
        if name in own:
            raise ScenarioError(f"kv_cache.options: {name!r} has a key of its own; write it as {own[name]}")
        near = difflib.get_close_matches(name, further, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ScenarioError(
            f"kv_cache.options: {name!r} is no further setting of the policy {scenario.kv_cache.policy!r}{hint}"
        )
    policy: Any = kv_policy(scenario)
    kinds = get_type_hints(policy.Config)
    for name, value in scenario.kv_cache.options.items():
        try:
            TypeAdapter(kinds[name]).validate_python(value, strict=True)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise ScenarioError(f"kv_cache.options: {name}: {said[0].lower()}{said[1:]}, not {value!r}") from None


def _check_rules(scenario: Scenario) -> None:
    """Refuse rules that do not exist, whether the policy asks for them or not."""
    kv = scenario.kv_cache
    settings = kv.model_dump()
    try:
        growth_rule("hybrid", settings)
    except ValueError as error:
        raise ScenarioError(f"kv_cache.decode_growth: {str(error).removeprefix('decode_growth ')}") from None
    try:
        growth_rule(kv.growth, settings)
    except ValueError as error:
        raise ScenarioError(f"kv_cache.growth: {error}") from None
    try:
        retention_rule(kv.retention)
    except ValueError as error:
        raise ScenarioError(f"kv_cache.retention: {error}") from None
    unit = scenario.memory.alignment_bytes
    if unit is not None and unit & (unit - 1):
        raise ScenarioError(
            f"memory.alignment_bytes: must be a power of two, not {unit}; use {1 << unit.bit_length() - 1} or "
            f"{1 << unit.bit_length()} (512 is torch's unit)"
        )


def _oom_said(scenario: Scenario) -> str:
    """What happens out of memory, and who said so where it was not the user."""
    oom, preset = effective_oom(scenario), scenario.oom_preset
    return f"{oom!r}" if preset is None else f"{oom!r}, set by the preset {preset!r},"


def _check_contiguous(scenario: Scenario) -> None:
    kv, oom = scenario.kv_cache, effective_oom(scenario)
    if scenario.session.between_turns == "prefix_cache":
        raise ScenarioError(
            "session.between_turns: contiguous buffers have no prefix cache; use keep (buffers wait for the next "
            "turn) or drop"
        )
    if oom != "stop" and kv.copy_scope == "tensor" and kv.growth != "static":
        raise ScenarioError(
            f"memory.oom: {_oom_said(scenario)} is illegal with kv_cache.growth = {kv.growth!r} and copy_scope = "
            "'tensor': a step in which some tensors have been replaced cannot be undone; use stop"
        )


def _check_not_contiguous(scenario: Scenario) -> None:
    kv, policy = scenario.kv_cache, kv_policy(scenario)
    if scenario.session.between_turns == "prefix_cache" and not (
        "prefix_cache" in policy.offers and kv.enable_prefix_caching
    ):
        raise ScenarioError(
            "session.between_turns: prefix_cache needs kv_cache.policy = 'paged' or 'radix' with "
            "kv_cache.enable_prefix_caching = true; use drop"
        )
    if scenario.memory.admission == "reserve" and "admission" not in config_fields(policy):
        raise ScenarioError(f"memory.admission: {told(scenario)} has no reserve, it admits what fits: leave it none")
    if kv.policy == "paged" and kv.version in ("0.18", "0.22") and kv.watermark:
        raise ScenarioError(f"kv_cache.watermark: vLLM {kv.version} has none, it came with 0.27; leave it out")
    if kv.policy == "paged" and isinstance(rule := retention_rule(kv.retention), Forget):
        raise ScenarioError(
            f"kv_cache.retention: {rule} drops tokens together, where a block goes as soon as all of its tokens may; "
            f"use truncate({rule.over}), or kv_cache.policy = 'contiguous'"
        )
    if kv.retention != "full" and kv.policy != "paged" and "retention" not in config_fields(policy):
        raise ScenarioError(
            f"kv_cache.retention: {kv.policy} keeps every token; use full, or kv_cache.policy = 'contiguous'"
        )


def _check_one_piece(scenario: Scenario) -> None:
    """Refuse naive kernels and naive batches over KV that lies in blocks."""
    policy = scenario.kv_cache.policy
    if "one_piece" in kv_policy(scenario).offers:
        return
    if scenario.engine.attention == "standard":
        raise ScenarioError(
            "engine.attention: standard reads K and V of a sequence as one tensor, which "
            f"{policy} does not keep; use flash, or kv_cache.policy = 'contiguous'"
        )
    if scenario.scheduler.policy == "static_batch":
        raise ScenarioError(
            "scheduler.policy: static_batch is how servers form batches whose KV lies in one piece a sequence; use "
            "vllm, or kv_cache.policy = 'contiguous'"
        )


def _check_batching(scenario: Scenario) -> None:
    scheduler = scenario.scheduler
    if scheduler.policy != "static_batch":
        return
    if scheduler.batching == "variable":
        return
    if scenario.kv_cache.retention != "full":
        raise ScenarioError(
            f"kv_cache.retention: a batch that is {scheduler.batching} has padding in front, which would be dropped "
            "for tokens; use full, or scheduler.batching = 'variable'"
        )
    if scenario.session.between_turns == "keep":
        raise ScenarioError(
            f"session.between_turns: a batch that is {scheduler.batching} has padding among its tokens, which no next "
            "turn can go on from; use drop, or scheduler.batching = 'variable'"
        )


def _named_by_users(scenario: Scenario) -> None:
    """Refuse classes that a release or a model chooses."""
    name = scenario.kv_cache.policy
    if name in CHOSEN_BY_RELEASE:
        raise ScenarioError(f"kv_cache.policy: write 'paged' with {CHOSEN_BY_RELEASE[name]}, not {name!r}")
    if name in CHOSEN_BY_MODEL:
        raise ScenarioError(f"kv_cache.policy: write 'paged'; {CHOSEN_BY_MODEL[name]} makes it {name!r}")


def _check_release(scenario: Scenario) -> None:
    """The old engine's blocks and its scheduler speak to each other, and to nobody else."""
    scheduler, of_v0 = scenario.scheduler, is_v0(scenario)
    if of_v0 and scheduler.policy != "vllm_v0":
        raise ScenarioError(
            f"scheduler.policy: {scheduler.policy!r} does not know the rules of kv_cache.version = 'v0'; use vllm_v0, "
            "or a later version"
        )
    if scheduler.policy == "vllm_v0" and not of_v0:
        raise ScenarioError(
            f"scheduler.policy: 'vllm_v0' swaps and forks blocks, which {told(scenario)} does not; use vllm, or "
            "kv_cache.policy = 'paged' with kv_cache.version = 'v0'"
        )


def _check_scheduler(scenario: Scenario) -> None:
    """Schedulers that count the blocks of one policy go with no other."""
    policy = scenario.scheduler.policy
    if policy == "sglang" and scenario.kv_cache.policy != "radix":
        raise ScenarioError(
            f"scheduler.policy: 'sglang' counts the slots of SGLang's pool, which {told(scenario)} does not have; use "
            "vllm, or kv_cache.policy = 'radix'"
        )
    if policy in COUNT_BLOCKS and scenario.kv_cache.policy != "paged":
        raise ScenarioError(
            f"scheduler.policy: {policy!r} counts the blocks of TensorRT-LLM's pool, which {told(scenario)} does not "
            "have; use vllm, or kv_cache.policy = 'paged'"
        )
    if scenario.scheduler.async_scheduling:
        _check_async(scenario)
    if policy == "max_utilization" and effective_oom(scenario) != "preempt":
        raise ScenarioError(
            f"memory.oom: max_utilization pauses requests, which is not what {_oom_said(scenario)} says; use preempt, "
            "or scheduler.policy = 'guaranteed_no_evict'"
        )


def _check_async(scenario: Scenario) -> None:
    """Planning ahead is vLLM's, over blocks, with two batches under way."""
    key, stages = "scheduler.async_scheduling", scenario.engine.pipeline_parallel_size
    if scenario.scheduler.policy != "vllm":
        raise ScenarioError(
            f"{key}: {scenario.scheduler.policy!r} does not plan a step before the last one is done; use vllm"
        )
    if "plan_ahead" not in kv_policy(scenario).offers:
        raise ScenarioError(
            f"{key}: vLLM plans ahead over its blocks, whose keys follow, which {told(scenario)} does not have; leave "
            "it out, or use kv_cache.policy = 'paged'"
        )
    if stages > 1:
        raise ScenarioError(
            f"{key}: vLLM then has {stages + 1} batches under way in a pipeline of {stages} stages, or {stages} with "
            "its first model runner, which is not simulated; leave it out, or use engine.pipeline_parallel_size = 1"
        )
    if effective_oom(scenario) != "preempt":
        raise ScenarioError(
            f"memory.oom: vLLM preempts, and a step planned ahead ({key}) cannot be undone, as {_oom_said(scenario)} "
            "asks; use preempt"
        )


def _check_samples(scenario: Scenario) -> None:
    """Refuse samples where turns follow, and where v0 could not run them."""
    w, samples, scheduler = scenario.workload, scenario.workload.samples, scenario.scheduler
    if samples == 1:
        return
    why = f"workload.samples: {samples} answers to a prompt leave no one answer to go on with; "
    recorded = w.trace is not None or w.model is not None
    if not recorded and w.multi_turn is not None:
        raise ScenarioError(f"{why}leave workload.multi_turn out, or samples = 1")
    if not recorded and w.users is not None:
        raise ScenarioError(f"{why}give workload.request_rate instead of workload.users, or samples = 1")
    if not recorded and scenario.session.turns != 1:
        raise ScenarioError(f"{why}set session.turns = 1, or samples = 1")
    if scenario.session.between_turns == "keep":
        raise ScenarioError(f"{why}set session.between_turns = 'drop', or samples = 1")
    if w.max_concurrency is not None:
        raise ScenarioError(
            f"workload.max_concurrency: {samples} samples of a prompt come together, and a client lets requests in one "
            "by one; leave it out, or set samples = 1"
        )
    if scheduler.policy != "vllm_v0":
        return
    if samples > scheduler.max_num_seqs:
        raise ScenarioError(
            f"workload.samples: {samples} of a prompt run together in v0, and scheduler.max_num_seqs is "
            f"{scheduler.max_num_seqs}; raise that, or take fewer"
        )
    if scheduler.preemption_mode == "recompute":
        raise ScenarioError(
            "scheduler.preemption_mode: recompute is for single sequences, v0 stops where a prompt has several "
            "samples; use auto or swap"
        )


def _known(key: str, name: str, registry: Registry[Any], names: list[str] | None = None) -> None:
    """Refuse a name that is not registered, or is none of *names*."""
    known = registry.names() if names is None else names
    if name not in known:
        raise ScenarioError(f"{key}: {registry.unknown(name, known)}")
