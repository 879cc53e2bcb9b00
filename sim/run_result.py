"""What is left of a run: its summary and its tables, as one result."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hbmtwin.allocators.contract import CountsPrefixes, KVPolicy
from hbmtwin.sim import legality, summary
from hbmtwin.sim.calibration import memory_notes
from hbmtwin.sim.engine import Engine
from hbmtwin.sim.model_states import state_notes
from hbmtwin.sim.model_windows import window_notes
from hbmtwin.sim.monitor import alerts, kv_monitor, limits_of
from hbmtwin.sim.pipeline import pipeline_notes, stage_rows
from hbmtwin.sim.resolve import batch_notes, device_notes, matrix_notes
from hbmtwin.sim.result import Result
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.slo import goodput
from hbmtwin.sim.token_gaps import pads_batches, token_gaps
from hbmtwin.sim.traffic import trace_notes
from hbmtwin.sim.unfinished import unfinished_because
from hbmtwin.sim.workload_presets import context_notes


def result_of(plan: ServerPlan, memory: ServerMemory, engine: Engine) -> Result:
    """The result of a run that has ended. O(rows of its tables)."""
    scenario, recorder, source, scheduler = plan.scenario, engine.recorder, engine.source, engine.scheduler
    validity = engine.config.validity
    timeline, requests = recorder.timeline(), recorder.requests()
    steps = recorder.steps()
    gaps = None if steps is None else token_gaps(requests, steps, padded=pads_batches(scenario))
    stats = [a.stats() for a in memory.allocators]
    counts = summary.request_counts(requests, source.total_requests)
    makespan_s = max(0, int(requests["end_ns"].max()) if len(requests) else 0) / 1e9
    limits = limits_of(scenario.results)
    return Result(
        scenario=scenario,
        summary={
            **counts,
            "unfinished_because": unfinished_because(requests, source.total_requests),
            "preemptions": engine.preemptions,
            **engine.recompute.summary(scheduler.running_tokens, (u.sequence for u in scheduler.unfinished())),
            "standstill": _standstill(plan, memory, engine),
            **summary.dropped(requests),
            "prefix_cache": _prefix_cache(scenario, engine.kv),
            "oom": None if engine.oom is None else engine.oom.to_dict(),
            "capacity_bytes": memory.driver.capacity_bytes,
            "kv_budget_bytes": memory.kv_budget_bytes,
            "kv_block_bytes": memory.block_bytes,
            "peak_reserved_bytes": sum(x["reserved_bytes.all.peak"] for x in stats),
            "peak_requested_bytes": sum(x["requested_bytes.all.peak"] for x in stats),
            "num_alloc_retries": sum(x.get("num_alloc_retries", 0) for x in stats),
            **summary.memory_means(timeline, memory.kv_budget_bytes),
            "alerts": alerts(kv_monitor(timeline, memory.kv_budget_bytes), limits) if limits else [],
            **summary.latencies(requests),
            "itl_s": None if gaps is None else gaps.percentiles(),
            "goodput": goodput(requests, scenario.slo, counts["requests_total"], makespan_s),
            "makespan_s": makespan_s,
            "simulated_output_tokens": int(requests["output_tokens"].sum()),
            "stages": stage_rows(plan.budget),
            "basis": engine.cost.basis,
            "calibration": None if validity is None else validity.summary(),
            "seed": scenario.seed,
            "version": version("hbmtwin"),
            "notes": [
                *trace_notes(scenario, source),
                *legality.notes(scenario),
                *device_notes(scenario, plan.model, plan.device),
                *matrix_notes(plan.model),
                *pipeline_notes(scenario, plan.budget),
                *(() if validity is None else validity.notes()),
                *memory_notes(plan.budget),
                *batch_notes(scenario, plan.max_model_len),
                *context_notes(scenario.workload.preset, source, plan.longest_request),
                *window_notes(scenario, plan.model, plan.kept_model),
                *state_notes(scenario, plan.model, plan.pool, plan.block_size),
            ],
        },
        timeline=timeline,
        requests=requests,
        checkpoints=recorder.checkpoints(),
        steps=steps,
        memory_trace=recorder.memory_trace(),
        cache_events=recorder.cache_events(),
    )


def _standstill(plan: ServerPlan, memory: ServerMemory, engine: Engine) -> dict[str, Any] | None:
    if engine.standstill is None:
        return None
    usage = engine.kv.usage()
    in_blocks = usage.held + usage.cached + usage.pool  # as many as were made, which may not be what was planned
    pool_bytes = memory.kv_budget_bytes if memory.block_bytes is None else in_blocks
    return engine.standstill.to_dict(plan.pool.token_bytes, pool_bytes)


def _prefix_cache(scenario: Scenario, kv: KVPolicy) -> dict[str, Any] | None:
    """What the prefix cache was asked for and found, by the rules of the release; None without one."""
    if not (scenario.kv_cache.enable_prefix_caching and isinstance(kv, CountsPrefixes)):
        return None
    stats = kv.prefix_stats()
    return {**stats._asdict(), "hit_rate": stats.hits / stats.queries if stats.queries else None}
