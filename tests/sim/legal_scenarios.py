"""One generator of legal scenarios for all tests that hold runs against runs: every key that can matter is drawn.

::

    kind        kv_cache.policy                                  scheduler.policy
    paged       paged 0.27, 0.22, 0.18                           vllm prefill_first guaranteed_no_evict max_utilization
    v0          paged v0                                         vllm_v0
    windows     paged: windows of the model, or by a retention   vllm prefill_first
    states      paged: Mamba-2 layers                            vllm prefill_first
    radix       radix                                            vllm prefill_first sglang
    contiguous  contiguous                                       vllm prefill_first static_batch
    virtual     virtual                                          vllm prefill_first

Models are tiny, so that a run takes milliseconds; pools hold one longest request and little more. What goes together is
drawn together: a draw that is refused is a bug of this file, and :mod:`tests.sim.test_legal_scenarios` counts them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pandas as pd
from hypothesis import strategies as st

from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.sim.result import TABLES, Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

Keys = dict[str, Any]
TINY = Path(__file__).parent / "tiny"
LONGEST = 384
"""Of a request, prompt and answer."""


class Pick(Protocol):
    """Chooses one of the values; what is chosen first is simplest."""

    def __call__(self, *values: Any) -> Any: ...


# -- drawing -----------------------------------------------------------------------------------------------------------


def legal_keys(pick: Pick) -> Keys:
    """The dotted keys of one scenario that is served, or in which the server dies; it is never refused."""
    kind = pick(*KINDS)
    keys = (
        {"seed": pick(0, 1, 2, 3, 5, 8), "engine.max_model_len": LONGEST}
        | _machine(pick)
        | KINDS[kind](pick)
        | _results(pick)
        | _slo(pick)
    )
    short = pick(True, False)
    """Whether many come at once to a pool that holds few of them."""
    keys |= _scheduler(pick, keys, short)
    keys |= _traffic(pick, keys, short)
    keys |= _out_of_memory(pick, keys)
    return keys | _pool(pick, keys, short)


@st.composite
def legal_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios of :func:`legal_keys`, drawn by Hypothesis."""
    return Scenario.of(legal_keys(lambda *values: draw(st.sampled_from(values))))


def numbered(seed: int, **given: str) -> Keys:
    """The keys of one fixed scenario; *given*: its ``kind``, or ``scheduler``, where it is to be that one.

    Each choice has a generator of its own, so that a key that is added later leaves the others as they are.
    """
    seen: Counter[str] = Counter()

    def pick(*values: Any) -> Any:
        place = repr(values)
        seen[place] += 1
        wanted = [value for value in values if value in given.values()]
        return Random(f"{seed} {seen[place]} {place}").choice(wanted or values)

    return legal_keys(pick)


def _machine(pick: Pick) -> Keys:
    general, stages = pick("caching", "caching", "direct"), pick(1, 1, 1, 2)
    return {
        "model.name": str(TINY / "plain.json"),
        "device.name": pick("a100-80gb", "a100-80gb", "ascend-910b4"),
        "device.memory_bytes": pick(None, 16 << 30),
        "device.other_tenant_bytes": pick(0, 0, 1 << 30),
        "engine.tensor_parallel_size": pick(1, 1, 1, 2),
        "engine.pipeline_parallel_size": stages,
        "engine.layer_partition": pick(None, [1, 2], [2, 1]) if stages == 2 else None,
        "engine.task_queue_enable": pick(1, 0, 2) if general == "caching" else 1,
        "memory.general": general,
        "memory.kv_arena": pick("caching", "caching", "buddy", "bump", "direct", "pooled", "tlsf"),
        "memory.fit": pick("best", "first", "next", "worst"),
        "memory.coalescing": pick("immediate", "deferred"),
        "memory.alignment_bytes": pick(None, 4096),
        "memory.alloc_conf": pick("", "", "expandable_segments:True", "garbage_collection_threshold:0.6"),
        "memory.activations": pick("none", "none", "none", "peak", "per_layer"),
        "memory.activation_bytes": pick(8 << 20, 64 << 20),
    }


def _blocks(pick: Pick) -> Keys:
    return {"kv_cache.block_size": pick(16, 4, 7, 1, 64), "kv_cache.enable_prefix_caching": pick(True, True, False)}


def _paged(pick: Pick) -> Keys:
    version = pick("0.27", "0.27", "0.22", "0.18")
    return {
        **_blocks(pick),
        "kv_cache.policy": "paged",
        "kv_cache.version": version,
        "kv_cache.watermark": pick(None, None, 0.1) if version == "0.27" else None,
        "memory.admission": pick("none", "none", "none", "reserve"),
        "kv_cache.options": pick({}, {}, {"reserve_full_sequence": False}) if version == "0.27" else {},
        "scheduler.policy": pick("vllm", "vllm", "prefill_first", "guaranteed_no_evict", "max_utilization"),
    }


def _v0(pick: Pick) -> Keys:
    return {
        **_blocks(pick),
        "kv_cache.policy": "paged",
        "kv_cache.version": "v0",
        "engine.pipeline_parallel_size": 1,  # v0 has a scheduler for each stage
        "engine.layer_partition": None,
        "kv_cache.watermark": pick(None, None, 0.1, 0.0),
        "kv_cache.swap_space_bytes": pick(4 << 30, 4 << 30, 0, 4 << 20),
        "scheduler.policy": "vllm_v0",
        "scheduler.preemption_mode": pick("auto", "swap", "recompute"),
    }


def _windows(pick: Pick) -> Keys:
    own = pick("windows", "windows_and_full", None)
    whole = pick(False, False, False, True) if own else False
    retention = "full" if own else pick("sliding_window(40)", "truncate(100)", "sink_recent(4, 60)")
    keys = {
        **_blocks(pick),
        "model.name": str(TINY / f"{own or 'plain'}.json"),
        "kv_cache.policy": "paged",
        "kv_cache.retention": retention,
        "kv_cache.watermark": pick(None, None, 0.1),
        "kv_cache.disable_hybrid_kv_cache_manager": whole,
        "kv_cache.options": pick({}, {}, {"reserve_full_sequence": False}),
        "scheduler.policy": pick("vllm", "vllm", "prefill_first"),
    }
    if retention != "full" and not retention.startswith("sliding_window"):
        keys["kv_cache.enable_prefix_caching"] = False
    return keys


def _states(pick: Pick) -> Keys:
    mode = pick(None, "all", "align", "align")
    return {
        "model.name": str(TINY / "states.json"),
        "device.name": "a100-80gb",  # vllm-ascend wants a state to fill a block
        "engine.tensor_parallel_size": 1,
        "engine.pipeline_parallel_size": 1,  # one of its layers is attention, which no stage may lack
        "engine.layer_partition": None,
        "kv_cache.policy": "paged",
        "kv_cache.block_size": pick(16, 32),
        "kv_cache.enable_prefix_caching": mode is not None,
        "kv_cache.mamba_cache_mode": mode,
        "kv_cache.watermark": pick(None, None, 0.1),
        "scheduler.policy": "vllm" if mode == "align" else pick("vllm", "vllm", "prefill_first"),
    }


def _radix(pick: Pick) -> Keys:
    return {
        **_blocks(pick),
        "kv_cache.policy": "radix",
        "scheduler.policy": pick("sglang", "sglang", "vllm", "prefill_first"),
        "scheduler.schedule_conservativeness": pick(1.0, 0.0, 0.1, 3.0),
        "kv_cache.options": {"eviction_policy": pick("lru", "lfu", "slru")},
    }


def _contiguous(pick: Pick) -> Keys:
    return {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": pick(*GROWTH_RULES),
        "kv_cache.decode_growth": pick(*(name for name in GROWTH_RULES if name != "hybrid")),
        "kv_cache.tensors": pick("merged", "per_layer"),
        "kv_cache.copy_scope": pick("step", "step", "tensor"),
        "kv_cache.initial_tokens": pick(64, 7),
        "kv_cache.growth_factor": pick(2, 3),
        "kv_cache.step_tokens": pick(64, 7),
        "kv_cache.dtype": pick("auto", "auto", "int8_per_token"),
        "kv_cache.v_dtype": pick(None, None, "int8_per_token"),
        "kv_cache.retention": pick(
            *("full", "full", "truncate(100)", "forget(100, 30)", "sliding_window(100)", "sink_recent(4, 90)")
        ),
        "engine.attention": pick("flash", "flash", "standard"),
        "memory.admission": pick("none", "none", "none", "reserve"),
        "scheduler.policy": pick("vllm", "prefill_first", "static_batch", "static_batch"),
    }


def _virtual(pick: Pick) -> Keys:
    return {
        "kv_cache.policy": "virtual",
        "kv_cache.page_bytes": pick(64 << 10, 2 << 20),
        "memory.kv_arena": "direct",
        "scheduler.policy": pick("vllm", "vllm", "prefill_first"),
    }


KINDS = {
    "paged": _paged,
    "radix": _radix,
    "windows": _windows,
    "states": _states,
    "v0": _v0,
    "contiguous": _contiguous,
    "virtual": _virtual,
}


def _results(pick: Pick) -> Keys:
    return {
        "results.steps": pick(True, True, False),
        "results.memory_trace": pick(False, True),
        "results.interval_s": pick(1.0, 0.1, 0.001, 100.0),
        "results.checkpoint_s": pick(0.0, 0.0, 0.3),
        "results.alert_kv_usage": pick(None, 0.5),
        "results.alert_hit_rate": pick(None, 0.5),
        "results.alert_kv_used_bytes": pick(None, 4 << 20),
    }


def _slo(pick: Pick) -> Keys:
    return {
        "slo.ttft_s": pick(None, 0.1),
        "slo.tpot_s": pick(None, 0.01),
        "slo.e2e_s": pick(None, 1.0),
        "slo.attainment": pick(0.9, 0.1),
    }


def _scheduler(pick: Pick, keys: Keys, short: bool) -> Keys:
    policy, size = keys["scheduler.policy"], keys.get("kv_cache.block_size", 1)
    chosen: Keys = {
        "scheduler.max_num_seqs": pick(256, 8) if short else pick(256, 8, 3, 1),
        "scheduler.max_num_batched_tokens": pick(2048, 100, 2048, 16, 5),
    }
    if policy == "vllm_v0":  # longer prompts, and preempted requests, are rejected
        chosen["scheduler.max_num_batched_tokens"] = pick(2048, LONGEST, 100)
    if policy == "sglang":
        chosen["scheduler.max_num_batched_tokens"] = size * pick(128, 8, 2, 1)
    if policy == "static_batch":
        batching = pick("padded", "sorted", "buckets", "variable")
        chosen |= {"scheduler.batching": batching, "scheduler.bucket_tokens": pick(256, 16)}
        if batching != "variable":
            chosen["kv_cache.retention"] = "full"
    if policy == "vllm":
        chunked = keys.get("kv_cache.mamba_cache_mode") == "align" or pick(True, True, False)
        chosen |= {
            "scheduler.enable_chunked_prefill": chunked,
            "scheduler.long_prefill_token_threshold": pick(0, 0, 40, 6),
            "scheduler.scheduling_policy": pick("fcfs", "priority"),
        }
        if keys["kv_cache.policy"] == "paged" and keys["engine.pipeline_parallel_size"] == 1:
            chosen["scheduler.async_scheduling"] = pick(False, True, True)
    if keys.get("kv_cache.enable_prefix_caching") and keys["kv_cache.policy"] == "paged" and policy != "vllm_v0":
        chosen["results.cache_events"] = pick(False, False, False, True)
    return chosen


def _traffic(pick: Pick, keys: Keys, short: bool) -> Keys:
    """Users in a closed loop, Poisson or bursty arrivals, the built-in bursts, a trace; at times several samples."""
    source = pick("rate", "users") if short else pick("rate", "users", "bursts", "trace")
    samples = pick(1, 1, 1, 2, 3) if source in ("rate", "bursts") else 1
    chosen = {
        "workload.num_prompts": pick(12, 12, 25),
        "workload.prompt_tokens": pick(uniform(9), 16, uniform(60), 48, uniform(100)),
        "workload.first_prompt_tokens": pick(None, None, 24),
        "workload.output_tokens": pick(120, uniform(120)) if short else pick(uniform(120), 100, uniform(40), 1),
        "workload.system_prompt_tokens": pick(32, 3, 0),
        "workload.samples": samples,
        "workload.max_concurrency": pick(None, None, 1, 5) if samples == 1 else None,
        "workload.priorities": pick(None, [1.0, 2.0, 3.0]),
        "session.turns": 1 if samples > 1 else pick(1, 2, uniform(3)),
        "session.think_time_s": pick(0.0, 0.001, 0.5, {"distribution": "exponential", "mean": 0.1}),
        "session.between_turns": _between_turns(pick, keys, samples),
    }
    if source == "users":
        chosen["workload.users"] = pick(8, 16) if short else pick(3, 1, 16)
    elif source != "trace":
        chosen |= _gaps(pick)
    if source == "trace":
        chosen |= {"workload.trace": str(TINY / "requests.csv"), "workload.time_scale": pick(1.0, 0.1)}
    if source == "rate":
        rate = pick(1000.0, float("inf")) if short else pick(50.0, 1000.0, 0.5)
        chosen |= {"workload.request_rate": rate} | _rates(pick, rate)
    if source == "rate" and pick("one stream", "one stream", "one stream", "clients") == "clients":
        chosen = {key: value for key, value in chosen.items() if key not in BY_CLIENT} | {
            "workload.clients": pick(CLIENTS, CLIENTS[::-1])
        }
    elif source != "trace":
        chosen |= _prefixes(pick)
    if keys["scheduler.policy"] == "vllm_v0" and samples > 1:
        chosen["scheduler.max_num_seqs"] = pick(256, 8, 3)
        chosen["scheduler.preemption_mode"] = pick("auto", "swap")
    return chosen


BY_CLIENT = {
    "workload.request_rate",
    "workload.arrival_pattern",
    "workload.burstiness",
    "workload.cv",
    "workload.ramp_up_strategy",
    "workload.ramp_up_start_rps",
    "workload.ramp_up_end_rps",
    "workload.rescale_gaps",
}
CLIENTS = [
    {"request_rate": 300.0, "prompt_tokens": 20, "system_prompt_tokens": 9},
    {"request_rate": 90.0, "cv": 3.0, "output_tokens": 40, "think_time_s": 0.01},
]


def _prefixes(pick: Pick) -> Keys:
    """Prefixes of groups; together with the longest prompts, three turns of them and answers still fit."""
    how = pick("none", "none", "none", "one kind", "buckets", "shared_prefix", "prefix_repetition", "again")
    if how == "one kind":
        return {"workload.prefix_tokens": pick(16, uniform(40)), "workload.prefix_count": pick(None, 3)}
    if how == "buckets":
        big = {"prefix_tokens": 32, "bucket_weight": pick(2.0, 1.0)}
        return {"workload.prefix_buckets": [big, {"prefix_tokens": 5, "prefix_count": 2}]}
    if how == "again":
        return {"workload.distinct_prompts": pick(4, 1)}
    if how in ("shared_prefix", "prefix_repetition"):
        alone = dict.fromkeys(("prompt_tokens", "first_prompt_tokens", "output_tokens", "system_prompt_tokens"))
        sets = {
            "shared_prefix": {"num_groups": 2, "num_prompts_per_group": pick(3, 1), "system_prompt_len": 40}
            | {"question_len": 20, "output_len": 30},
            "prefix_repetition": {"prefix_len": pick(64, 16), "suffix_len": 10, "num_prefixes": 3, "output_len": 25},
        }
        return {f"workload.{name}": value for name, value in (alone | {how: sets[how]}).items()} | {"session.turns": 1}
    return {}


def _gaps(pick: Pick) -> Keys:
    burstiness, pattern = pick(1.0, 0.2, 5.0), pick(None, "gamma", "weibull", "poisson", "constant")
    if pattern in ("poisson", "constant"):
        return {"workload.arrival_pattern": pattern}
    by_cv = {"workload.cv": pick(1.5, 0.7)} if pick("burstiness", "cv") == "cv" else {}
    return {"workload.arrival_pattern": pattern, "workload.burstiness": 1.0 if by_cv else burstiness} | by_cv


def _rates(pick: Pick, rate: float) -> Keys:
    """A rate that stays, or moves."""
    how = pick("steady", "steady", "steady", "curve", "ramp", "rescaled")
    if how == "ramp":
        return {
            "workload.request_rate": None,
            "workload.ramp_up_strategy": pick("linear", "exponential"),
            "workload.ramp_up_start_rps": pick(100.0, 2.0),
            "workload.ramp_up_end_rps": pick(1000.0, 20.0),
        }
    if how == "curve" and rate < float("inf"):
        return {"workload.rate_curve": pick([[0, 1], [0.1, 3], [0.1, 0], [0.2, 1]], [[0, 2], [0.5, 0.1]])}
    return {"workload.rescale_gaps": how == "rescaled"}


def _between_turns(pick: Pick, keys: Keys, samples: int) -> str:
    padded = keys["scheduler.policy"] == "static_batch" and keys["scheduler.batching"] != "variable"
    choices = ["drop"]
    if samples == 1 and not padded:
        choices.append("keep")
    if keys.get("kv_cache.enable_prefix_caching"):
        choices.append("prefix_cache")
    return str(pick(*choices))


def _out_of_memory(pick: Pick, keys: Keys) -> Keys:
    """What ``memory.oom`` may say; ``preempt`` is drawn more often than the others."""
    if keys["scheduler.policy"] == "max_utilization" or keys.get("scheduler.async_scheduling"):
        return {"memory.oom": "preempt"}
    cannot_undo = keys["kv_cache.policy"] == "contiguous" and keys["kv_cache.copy_scope"] == "tensor"
    if cannot_undo and keys["kv_cache.growth"] != "static":
        return {"memory.oom": "stop"}
    return {"memory.oom": pick("preempt", "preempt", "preempt", "stop", "reject")}


def _pool(pick: Pick, keys: Keys, short: bool) -> Keys:
    """A pool of so many longest requests: in blocks, or in bytes for policies that have none."""
    requests = pick(1.0, 1.2) if short else pick(1.5, 2.0, 1.0, 6.0)
    roomy = {"engine.gpu_memory_utilization": 0.5}
    twin = Twin(Scenario.of(keys | roomy))
    if "kv_cache.block_size" in keys:
        blocks = int(requests * twin.pool.request_blocks(LONGEST)) + 1
        if keys.get("kv_cache.version") == "v0":
            blocks += pick(0, 5)
        return roomy | {"kv_cache.options": {**keys.get("kv_cache.options", {}), "num_blocks": blocks}}
    tokens = int(requests * LONGEST) + 128  # the plan asks for whole blocks, of 128 tokens at most
    rounding = 16 if keys["kv_cache.policy"] == "virtual" else 0  # a page of 2 MiB for each tensor of a sequence
    wanted = tokens * twin.token_bytes + (rounding + pick(0, 8, 40)) * (1 << 20)
    less = twin.budget.kv_bytes - wanted
    return {"engine.gpu_memory_utilization": 0.5 - less / twin.budget.total_bytes}


def uniform(high: int) -> Keys:
    return {"distribution": "uniform", "low": 1, "high": high}


# -- comparing ---------------------------------------------------------------------------------------------------------


def per_step(steps: pd.DataFrame | None) -> list[tuple[Any, ...]] | None:
    """Rows of leaps, taken apart into their steps."""
    if steps is None:
        return None
    rows: list[tuple[Any, ...]] = []
    for row in steps.itertuples(index=False):
        start = row.start_ns
        assert (len(row.step_ends_ns), row.step_ends_ns[-1]) == (row.repeat, row.start_ns + row.duration_ns)
        for i, end in enumerate(row.step_ends_ns):
            contexts = [context + i for context in row.context_tokens]
            gone = [] if i else list(row.preempted)
            rows.append((row.step + i, start, end, list(row.seq_ids), list(row.new_tokens), contexts, gone))
            start = end
    return rows


def differences(leaps: Result, steps: Result) -> list[str]:
    """Names of the tables and of the summary's keys that differ; the table of steps is compared step by step."""
    found = [f"summary.{key}" for key in leaps.summary if leaps.summary[key] != steps.summary[key]]
    if leaps.summary.keys() != steps.summary.keys():
        found.append("summary")
    for name in TABLES:
        one, other = getattr(leaps, name), getattr(steps, name)
        if name == "steps":
            same = per_step(one) == per_step(other)
        else:
            same = (one is None) == (other is None) and (one is None or one.equals(other))
        if not same:
            found.append(name)
    return found
