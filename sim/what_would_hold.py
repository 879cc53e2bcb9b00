"""What would have held: after a server ran out of memory, the same traffic under single changes of its scenario.

Which change helps is found by running it. Each is one thing that an operator could do, on the same device with the
same model and traffic; what is illegal for the scenario, or is so already, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.kernels.capability_use import SIXTEEN_BIT
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.experiment import in_processes
from hbmtwin.sim.fit.options import SAFE_UTILIZATION
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin, run
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError
from hbmtwin.sim.sections import Section

SHORTAGES = ("kv_capacity", "out_of_memory", "swap_space")
"""Reasons of a rejection for want of memory."""
QUIET = {
    "results.steps": False,
    "results.memory_trace": False,
    "results.alert_kv_used_bytes": None,
    "results.alert_kv_usage": None,
    "results.alert_hit_rate": None,
}
"""Nothing but its row is wanted of an alternative."""


class Alternative(NamedTuple):
    """One change: what it is called, the keys that it sets, and the scenario with them."""

    name: str
    keys: dict[str, Any]
    scenario: Scenario


def ran_short(summary: Mapping[str, Any]) -> bool:
    """Whether a run died of memory, came to a standstill, or rejected a request for want of memory."""
    early = summary["oom"] is not None or summary.get("standstill") is not None
    return early or any(reason in summary["requests_rejected"] for reason in SHORTAGES)


def what_would_hold(
    result: Result, *, jobs: int = -1, finished: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """Run every alternative to a run that ran short of memory; return a row each, the best first.

    A row says ``change``, ``keys``, ``held`` (the server lived, and rejected nothing for want of memory), ``died_at_s``
    and ``cause`` where it died (or ``does_not_fit``: it would not start), and what it cost. Those that held come first:
    without dropped tokens before with, then by completed requests, preemptions and end-to-end time; then the others, by
    how long they lived. Empty for a run that did not run short: there is nothing to cure. *jobs* and *finished* as in
    :func:`hbmtwin.sim.experiment.compare`.
    """
    if not ran_short(result.summary):
        return []
    tried = alternatives(result.scenario, int(result.timeline["running"].max()))
    told = (lambda place: finished(tried[place].name)) if finished is not None else None
    outcomes = in_processes(_outcome, [a.scenario for a in tried], jobs=jobs, finished=told)
    rows = [{"change": a.name, "keys": a.keys, **outcome} for a, outcome in zip(tried, outcomes, strict=True)]
    return sorted(rows, key=_badness)


def alternatives(scenario: Scenario, most_running: int | None = None) -> list[Alternative]:
    """The legal single changes of a scenario, without those that change nothing.

    *most_running* is how many sequences ran at once: half of it, not of a limit that was never reached, is tried as
    ``max_num_seqs``.
    """
    found: list[Alternative] = []
    seen = [_effective(scenario)]
    for name, keys in _changes(scenario, most_running):
        try:
            changed = _with(scenario, {**keys, **QUIET})
            Twin(changed)
        except (ScenarioError, CatalogError):
            continue
        except DoesNotFit:
            pass  # legal, and a row that says so
        if (effective := _effective(changed)) not in seen:
            seen.append(effective)
            found.append(Alternative(name, keys, changed))
    return found


def _changes(s: Scenario, most_running: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be changed, legal or not; only what could have an effect."""
    kv, memory = s.kv_cache, s.memory
    contiguous = kv.policy == "contiguous"
    batches = s.scheduler.policy == "static_batch"
    gate = {"memory.admission": "none"} if memory.admission != "none" else {}  # which no other policy has
    if batches:
        yield "continuous batching", {"scheduler.policy": "vllm"}
        yield "continuous batching and paged KV", {"scheduler.policy": "vllm", **PRESETS["paged"], **gate}
        for batching in ("variable", "buckets", "sorted"):
            yield f"{batching} batches", {"scheduler.batching": batching}
    elif kv.policy != "paged":
        yield "paged KV", {**PRESETS["paged"], **gate}
    if kv.policy != "virtual":
        pages = {"kv_cache.policy": "virtual", "memory.kv_arena": "direct", "memory.oom": "preempt"}
        yield "pages on demand", {**pages, **gate}
    if contiguous:
        yield "a pool for KV", {"memory.kv_arena": "pooled"}
        for growth in GROWTH_RULES:
            yield f"{growth} growth", {"kv_cache.growth": growth}
        yield "old copies die one by one", {"kv_cache.copy_scope": "tensor"}
        yield "buffers per layer", {"kv_cache.tensors": "per_layer"}
    if memory.kv_arena == "caching" and (contiguous or memory.activations != "none"):
        yield "expandable segments", {"memory.alloc_conf": _expandable(memory.alloc_conf)}
    if {kv.dtype, kv.v_dtype or kv.dtype} <= set(SIXTEEN_BIT):
        apart = {} if kv.v_dtype is None else {"kv_cache.v_dtype": None}
        yield "INT8 KV", {"kv_cache.dtype": "int8_per_token_head", **apart}
    if contiguous and kv.retention == "full":
        half = _longest(s) // 2
        yield "half of the history", {"kv_cache.retention": f"truncate({half})"}
        yield "a sliding window", {"kv_cache.retention": f"sliding_window({half})"}
    if s.session.between_turns == "keep":
        yield "no KV between turns", {"session.between_turns": "drop"}
    yield "admission at full length", {"memory.admission": "reserve"}
    yield "preempt", {"memory.oom": "preempt"}
    running = min(s.scheduler.max_num_seqs, most_running or s.scheduler.max_num_seqs)
    if running > 1:
        yield "half the sequences at once", {"scheduler.max_num_seqs": running // 2}
    if memory.activations != "none" and s.scheduler.max_num_batched_tokens > 1:
        yield "half the tokens a step", {"scheduler.max_num_batched_tokens": s.scheduler.max_num_batched_tokens // 2}
    if s.engine.gpu_memory_utilization < SAFE_UTILIZATION:
        yield "more of the device", {"engine.gpu_memory_utilization": SAFE_UTILIZATION}


def _expandable(alloc_conf: str) -> str:
    others = [part for part in alloc_conf.split(",") if part and not part.strip().startswith("expandable_segments")]
    return ",".join([*others, "expandable_segments:True"])


def _longest(s: Scenario) -> int:
    return s.engine.max_model_len or catalog.model(s.model.name).max_position_embeddings


def _keys(s: Scenario) -> dict[str, Any]:
    """Every key of a scenario by its dotted name."""
    keys: dict[str, Any] = {}
    for name in type(s).model_fields:
        value = getattr(s, name)
        if isinstance(value, Section):
            keys.update({f"{name}.{key}": getattr(value, key) for key in type(value).model_fields})
        else:
            keys[name] = value
    return keys


def _with(s: Scenario, keys: Mapping[str, Any]) -> Scenario:
    return Scenario.of({**_keys(s), "kv_cache.preset": None, **keys})


def _effective(s: Scenario) -> dict[str, Any]:
    """What a run depends on: neither the preset's name, nor whether a default was spelt out, nor what is stored."""
    return {**_keys(s), **QUIET, "kv_cache.preset": None, "memory.oom": effective_oom(s)}


def _outcome(scenario: Scenario) -> dict[str, Any]:
    try:
        summary = run(scenario).summary
    except DoesNotFit:
        return {"held": False, "died_at_s": None, "cause": "does_not_fit", **dict.fromkeys(_COSTS)}
    oom, standstill = summary["oom"], summary["standstill"]
    end = oom or standstill
    return {
        "held": not ran_short(summary),
        "died_at_s": None if end is None else end["time_s"],
        "cause": oom["cause"] if oom is not None else standstill["kind"] if standstill is not None else None,
        "requests_completed": summary["requests_completed"],
        "requests_rejected": sum(summary["requests_rejected"].values()),
        "preemptions": summary["preemptions"],
        "dropped_tokens": summary["dropped_tokens"],
        "peak_reserved_bytes": summary["peak_reserved_bytes"],
        "tpot_p50_s": summary["tpot_s"]["p50"],
        "e2e_p50_s": summary["e2e_s"]["p50"],
    }


_COSTS = (
    "requests_completed",
    "requests_rejected",
    "preemptions",
    "dropped_tokens",
    "peak_reserved_bytes",
    "tpot_p50_s",
    "e2e_p50_s",
)


def _badness(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order of the rows, the best first; equal ones stay in the order of the alternatives."""
    started = row["cause"] != "does_not_fit"
    lived = math.inf if row["died_at_s"] is None else row["died_at_s"]
    return (
        not row["held"],
        not started,
        0 if row["held"] else -lived,
        bool(row["dropped_tokens"]),
        -(row["requests_completed"] or 0),
        row["preemptions"] or 0,
        math.inf if row["e2e_p50_s"] is None else row["e2e_p50_s"],
    )
