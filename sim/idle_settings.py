"""Which keys of a scenario have no effect on its run, and why: nothing that a user sets is ignored in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.sim.kv_policy import kv_policy
from hbmtwin.sim.scenario import Scenario

SHARED_KEYS = ("preset", "policy", "dtype", "v_dtype", "options")
"""Of ``[kv_cache]``: they concern every policy. Each other key concerns those whose ``Config`` has it."""
PAGED_KEYS = ("version", "retention", "disable_hybrid_kv_cache_manager", "mamba_cache_mode")
"""Of ``[kv_cache]``: with ``paged`` they choose its class, and what its groups keep."""
ALLOCATOR_KEYS = ("fit", "coalescing", "alignment_bytes", "alloc_conf")
"""Of ``[memory]``: they concern the allocators whose ``Config`` has them."""
SCHEDULER_KEYS = {
    "batching": "static_batch",
    "bucket_tokens": "static_batch",
    "preemption_mode": "vllm_v0",
    "enable_chunked_prefill": "vllm",
    "long_prefill_token_threshold": "vllm",
    "scheduling_policy": "vllm",
    "schedule_conservativeness": "sglang",
}
"""Of ``[scheduler]``: they concern one policy each."""
GAP_KEYS = (
    "arrival_pattern",
    "burstiness",
    "cv",
    "rate_curve",
    "ramp_up_strategy",
    "ramp_up_start_rps",
    "ramp_up_end_rps",
    "rescale_gaps",
)
"""Of ``[workload]``: when sessions arrive in an open loop."""
GENERATOR_KEYS = (
    *GAP_KEYS,
    "users",
    "request_rate",
    "prompt_tokens",
    "first_prompt_tokens",
    "output_tokens",
    "system_prompt_tokens",
    "prefix_tokens",
    "prefix_count",
    "prefix_buckets",
    "distinct_prompts",
    "shared_prefix",
    "prefix_repetition",
    "clients",
)
"""Of ``[workload]``: a trace, or a model, has its own."""
TRACE_KEYS = ("trace_format", "trace_block_size", "trace_jitter", "trace_skip", "skip_bad_lines", "keep_failed")
"""Of ``[workload]``: they concern a trace."""


def idle_reason(scenario: Scenario, key: str) -> str | None:
    """Why a dotted key has no effect on the scenario's run; None where it has, whatever its value. O(policies)."""
    section, _, name = key.partition(".")
    reason = _REASONS.get(section)
    return reason(scenario, name) if reason is not None else None


def config_fields(policy: Any) -> set[str]:
    """Names of the settings that a registered class knows."""
    return {field.name for field in fields(policy.Config)}


def _kv_cache(scenario: Scenario, name: str) -> str | None:
    kv = scenario.kv_cache
    if name in SHARED_KEYS:
        return None
    if name in PAGED_KEYS and kv.policy == "paged":
        return None
    if name not in config_fields(kv_policy(scenario)):
        if kv.policy == "paged" and name in config_fields(kv_policies.get("paged_v0")):
            return "concerns kv_cache.version = 'v0' only"
        return f"does not concern the policy {kv.policy!r}"
    knowing = {rule for rule, cls in GROWTH_RULES.items() if name in {field.name for field in fields(cls)}}
    growing = {kv.growth, kv.decode_growth} if kv.growth == "hybrid" else {kv.growth}
    return f"does not concern growth = {kv.growth!r}" if knowing and not knowing & growing else None


def _memory(scenario: Scenario, name: str) -> str | None:
    in_use = (scenario.memory.general, scenario.memory.kv_arena)
    if name not in ALLOCATOR_KEYS or any(name in config_fields(device_allocators.get(used)) for used in in_use):
        return None
    users = [allocator for allocator, cls in device_allocators if name in config_fields(cls)]
    return f"concerns the allocators {', '.join(users)} only"


def _scheduler(scenario: Scenario, name: str) -> str | None:
    concerned = SCHEDULER_KEYS.get(name, scenario.scheduler.policy)
    return None if concerned == scenario.scheduler.policy else f"concerns the scheduler {concerned!r} only"


def _engine(scenario: Scenario, name: str) -> str | None:
    if name != "task_queue_enable" or scenario.memory.activations == "per_layer":
        return None
    return "has an effect with memory.activations = 'per_layer' only"


def _workload(scenario: Scenario, name: str) -> str | None:
    if name == "priorities":
        scheduler = scenario.scheduler
        heeds = scheduler.policy == "vllm" and scheduler.scheduling_policy == "priority"
        return None if heeds else "has an effect with scheduler.scheduling_policy = 'priority' only"
    if scenario.workload.trace is not None:
        return "does not concern a trace" if name in (*GENERATOR_KEYS, "multi_turn", "rate_scale") else None
    if name in TRACE_KEYS:
        return "concerns a trace only"
    if scenario.workload.model is not None:
        return "is said by workload.model" if name in GENERATOR_KEYS else None
    if name == "rate_scale":
        return "concerns a model only"
    if name == "time_scale":
        return "concerns a trace or a model only"
    if scenario.workload.multi_turn is not None and name in GENERATOR_KEYS and name not in ("users", "request_rate"):
        return "is said by workload.multi_turn"
    if name in ("arrival_pattern", "burstiness", "cv") and scenario.workload.clients is not None:
        return "is said by each of workload.clients"
    if name in GAP_KEYS and scenario.workload.users is not None:
        return "does not concern a closed loop"
    return None


def _session(scenario: Scenario, name: str) -> str | None:
    if scenario.workload.trace is not None and name in ("turns", "think_time_s"):
        return "does not concern a trace"
    for key in ("model", "multi_turn"):
        if getattr(scenario.workload, key) is not None and name in ("turns", "think_time_s"):
            return f"is said by workload.{key}"
    return None


def _results(scenario: Scenario, name: str) -> str | None:
    if name != "cache_events" or scenario.kv_cache.enable_prefix_caching:
        return None
    return "finds none without kv_cache.enable_prefix_caching = true"


_REASONS: dict[str, Callable[[Scenario, str], str | None]] = {
    "kv_cache": _kv_cache,
    "memory": _memory,
    "scheduler": _scheduler,
    "engine": _engine,
    "workload": _workload,
    "session": _session,
    "results": _results,
}
