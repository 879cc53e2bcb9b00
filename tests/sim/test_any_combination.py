"""Any combination of settings serves to the end with closed books, or is refused with a key's name; nothing else.

First the small enumerations, every combination of them, with the legal ones told by other words than the program's.
Then settings of all kinds at once, in leaps and in single steps, whose rows must be equal; ``legal_scenarios`` draws
more of them, none of which is illegal.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, islice, product
from random import Random
from typing import Any

import pytest

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.allocators.retention import RETENTIONS
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.kv_policy import CHOSEN_BY_MODEL, CHOSEN_BY_RELEASE
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError, known_keys
from hbmtwin.sim.scheduler import schedulers

from .legal_scenarios import differences, uniform

SMALL = {
    "engine.max_model_len": 256,
    "engine.gpu_memory_utilization": 0.445,
    "workload.users": 4,
    "workload.num_prompts": 8,
    "workload.prompt_tokens": 60,
    "workload.output_tokens": 30,
    "workload.system_prompt_tokens": 3,
    "session.turns": 2,
    "session.think_time_s": 0.1,
    "results.interval_s": 0.2,
    "kv_cache.block_size": 16,
}
"""Eight requests, four at a time, of 93 and then 183 tokens; 231 MiB are left for them, room for 463 tokens."""
RETENTION_TEXTS = ("full", "truncate(100)", "forget(100, 30)", "sliding_window(100)", "sink_recent(4, 90)")
SCHEDULERS = (
    {"scheduler.policy": "vllm"},
    {"scheduler.policy": "prefill_first"},
    {"scheduler.policy": "sglang"},
    {"scheduler.policy": "guaranteed_no_evict"},
    {"scheduler.policy": "max_utilization"},
    *(
        {"scheduler.policy": "static_batch", "scheduler.batching": batching}
        for batching in ("padded", "sorted", "buckets", "variable")
    ),
    {"scheduler.policy": "vllm_v0"},
)
Keys = dict[str, Any]


def scenario(keys: Keys) -> Scenario:
    """From dotted keys; those of no preset."""
    return Scenario.of(SMALL | keys)


def refused_key(error: ScenarioError) -> str:
    """The key that a refusal begins with; behind it stands a reason."""
    key, _, reason = str(error).partition(": ")
    assert key in known_keys(), error
    assert reason
    return key


def outcome(keys: Keys) -> Result | str:
    """The result, or the key that the refusal begins with."""
    try:
        result = Twin(scenario(keys)).run()  # checks the books at every row, and every party at the end
    except ScenarioError as error:
        return refused_key(error)
    completed, rejected, failed, unfinished = (
        result.summary["requests_completed"],
        sum(result.summary["requests_rejected"].values()),
        result.summary["requests_failed"],
        result.summary["requests_unfinished"],
    )
    assert completed + rejected + failed + unfinished == 8
    assert (failed > 0) == (result.summary["oom"] is not None), "every request is answered, or the server died"
    assert not unfinished or failed or rejected, "a turn is never made where the one before was not answered"
    return result


def refusals(s: Scenario) -> set[str]:
    """Keys that a refusal may name: none if the scenario is legal. The rules once more, in a row and by name."""
    kv, memory, batch = s.kv_cache, s.memory, s.scheduler
    contiguous, padded = kv.policy == "contiguous", batch.policy == "static_batch" and batch.batching != "variable"
    in_blocks, v0 = kv.policy in ("paged", "radix"), kv.policy == "paged" and kv.version == "v0"
    windows = kv.policy == "paged" and kv.retention != "full"
    trt = batch.policy in ("guaranteed_no_evict", "max_utilization")
    rules = {
        "memory.general": memory.general in ("buddy", "bump", "pooled", "tlsf"),
        "kv_cache.policy": kv.policy == "virtual" and memory.kv_arena != "direct",
        "kv_cache.retention": kv.retention != "full"
        and (padded or kv.policy in ("radix", "virtual") or (windows and kv.retention.startswith("forget"))),
        "kv_cache.version": windows and kv.version != "0.27",
        "kv_cache.watermark": kv.policy == "paged" and (kv.watermark or 0) > 0 and kv.version in ("0.18", "0.22"),
        "kv_cache.enable_prefix_caching": windows
        and kv.enable_prefix_caching
        and not kv.retention.startswith("sliding_window"),
        "engine.attention": s.engine.attention == "standard" and in_blocks,
        "engine.task_queue_enable": s.engine.task_queue_enable == 2 and memory.general != "caching",
        "memory.admission": memory.admission == "reserve" and (windows or v0 or kv.policy in ("radix", "virtual")),
        "memory.oom": (
            memory.oom in ("reject", "preempt") and (contiguous and kv.copy_scope == "tensor" and kv.growth != "static")
        )
        or (batch.policy == "max_utilization" and memory.oom in ("reject", "stop")),
        "scheduler.policy": (batch.policy == "static_batch" and in_blocks)
        or (batch.policy == "vllm_v0") != v0
        or (batch.policy == "sglang" and kv.policy != "radix")
        or (trt and (kv.policy != "paged" or windows)),
        "scheduler.max_num_batched_tokens": batch.policy == "sglang"
        and batch.max_num_batched_tokens % (kv.block_size or 128) > 0,
        "session.between_turns": (
            s.session.between_turns == "prefix_cache" and not (in_blocks and kv.enable_prefix_caching)
        )
        or (padded and s.session.between_turns == "keep"),
    }
    return {key for key, broken in rules.items() if broken}


def run_all(**choices: Any) -> Counter[str]:
    """Run every combination of ``section__key=values``, or of dictionaries of keys under any other name.

    Count refusals by key, and how runs ended.
    """
    seen: Counter[str] = Counter()
    for values in product(*choices.values()):
        keys: Keys = {}
        for name, value in zip(choices, values, strict=True):
            keys |= value if isinstance(value, dict) else {name.replace("__", "."): value}
        found, illegal = outcome(keys), refusals(scenario(keys))
        if isinstance(found, str):
            assert found in illegal, keys
            seen[found] += 1
            continue
        assert not illegal, keys
        seen["ran"] += 1
        seen["died"] += found.summary["oom"] is not None
        seen["preempted"] += found.summary["preemptions"] > 0
        seen["rejected"] += "out_of_memory" in found.summary["requests_rejected"]
    return seen


POLICIES = (
    {"kv_cache.policy": "contiguous"},
    {"kv_cache.policy": "paged"},
    {"kv_cache.policy": "virtual", "memory.kv_arena": "direct"},
    {"kv_cache.policy": "radix"},
)
"""Each with an arena that is legal for it."""


def test_the_matrices_know_all_policies_that_the_package_brings() -> None:
    assert {keys["kv_cache.policy"] for keys in POLICIES} == {
        name for name, cls in kv_policies if cls.__module__.startswith("hbmtwin.")
    } - {*CHOSEN_BY_MODEL, *CHOSEN_BY_RELEASE}
    assert len(RETENTION_TEXTS) == len(RETENTIONS)
    assert {keys["scheduler.policy"] for keys in SCHEDULERS} == set(schedulers.names())


def test_oom_by_policy_growth_and_copy_scope() -> None:
    answers = (None, "stop", "reject", "preempt")
    seen = run_all(
        policy=POLICIES[:1], memory__oom=answers, kv_cache__copy_scope=("tensor", "step"), kv_cache__growth=GROWTH_RULES
    )
    assert (seen["memory.oom"], seen["ran"]) == (8, 32)
    seen += run_all(policy=POLICIES[1:], memory__oom=answers, kv_cache__copy_scope=("tensor", "step"))
    assert (seen["memory.oom"], seen["ran"]) == (8, 56)
    assert min(seen["died"], seen["preempted"], seen["rejected"]) >= 3, "memory was short"


def test_retention_by_policy_and_growth() -> None:
    growths = ("static", "exact", "step")
    seen = run_all(policy=POLICIES, kv_cache__retention=RETENTION_TEXTS, kv_cache__growth=growths)
    assert (seen["kv_cache.retention"], seen["ran"]) == ((1 + 4 + 4) * 3, (5 + 4 + 1 + 1) * 3)


def test_attention_by_policy_and_activations() -> None:
    kinds = ("none", "peak", "per_layer")
    seen = run_all(policy=POLICIES, engine__attention=("flash", "standard"), memory__activations=kinds)
    assert (seen["engine.attention"], seen["ran"]) == (6, 18)


def test_schedulers_by_policy_and_what_stays_between_turns() -> None:
    seen = run_all(
        policy=POLICIES,
        scheduler=SCHEDULERS,
        session__between_turns=("keep", "drop", "prefix_cache"),
        kv_cache__retention=("full", "sliding_window(100)"),
    )
    refused = {key: seen[key] for key in ("session.between_turns", "kv_cache.retention", "scheduler.policy")}
    assert refused == {"session.between_turns": 60, "kv_cache.retention": 32, "scheduler.policy": 106}
    assert seen["ran"] == 240 - sum(refused.values())


def test_allocators_of_weights_and_cache_by_policy() -> None:
    names = ("buddy", "bump", "caching", "direct", "pooled", "tlsf")
    assert set(names) <= set(device_allocators.names())
    seen = run_all(
        policy=({"kv_cache.policy": keys["kv_cache.policy"]} for keys in POLICIES),
        memory__general=names,
        memory__kv_arena=names,
        engine__gpu_memory_utilization=(0.47,),  # a pool of blocks rounded up by buddy needs room
    )
    assert seen["memory.general"] == 4 * 4 * 6
    assert seen["kv_cache.policy"] == 2 * 5
    assert seen["ran"] == 2 * (6 + 6 + 1 + 6)


def test_a_combination_that_ends_in_another_exception_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def undo_nothing(policy: ContiguousPolicy) -> None:
        raise RuntimeError("cannot be undone")

    monkeypatch.setattr(ContiguousPolicy, "abort_step", undo_nothing)
    with pytest.raises(RuntimeError, match="cannot be undone"):
        test_oom_by_policy_growth_and_copy_scope()


@pytest.mark.parametrize("arena", ["bump", "pooled", "tlsf"])
def test_a_pool_is_made_for_the_region_that_there_is(arena: str) -> None:
    """Not for the bytes that the region was cut from, to whole pages: blocks of 7 tokens found the difference."""
    result = outcome({"kv_cache.policy": "paged", "memory.kv_arena": arena, "kv_cache.block_size": 7})
    assert isinstance(result, Result)


# All at once, in leaps and in single steps

DRAWN: dict[str, tuple[Any, ...]] = {
    "engine.gpu_memory_utilization": (0.443, 0.444, 0.445, 0.445, 0.445, 0.46),
    "engine.attention": ("flash", "flash", "standard"),
    "engine.task_queue_enable": (0, 1, 2),
    "scheduler.policy": ("vllm", "vllm", *schedulers.names()),
    "scheduler.preemption_mode": ("auto", "swap"),
    "scheduler.batching": ("padded", "sorted", "buckets", "variable"),
    "scheduler.max_num_seqs": (1, 3, 256, 256),
    "scheduler.max_num_batched_tokens": (16, 100, 2048),
    "memory.general": ("caching", "caching", "direct"),
    "memory.kv_arena": device_allocators.names(),
    "memory.activations": ("none", "peak", "per_layer"),
    "memory.activation_bytes": (200 << 20,),  # as much as 2,048 tokens take, also for steps of fewer
    "memory.oom": (None, "stop", "reject", "preempt"),
    "memory.admission": ("none", "none", "none", "reserve"),
    "kv_cache.policy": ("contiguous", "contiguous", "paged", "paged", "radix", "virtual"),
    "kv_cache.version": ("0.27", "0.27", "0.22", "0.18", "v0"),
    "kv_cache.enable_prefix_caching": (True, False),
    "kv_cache.watermark": (None, None, 0.1),
    "kv_cache.growth": tuple(GROWTH_RULES),
    "kv_cache.decode_growth": tuple(name for name in GROWTH_RULES if name != "hybrid"),
    "kv_cache.step_tokens": (7, 64),
    "kv_cache.retention": ("full", "full", *RETENTION_TEXTS),
    "kv_cache.tensors": ("per_layer", "merged"),
    "kv_cache.copy_scope": ("tensor", "step"),
    "kv_cache.dtype": ("auto", "auto", "int8_per_token"),
    "kv_cache.block_size": (None, 7),
    "device.other_tenant_bytes": (0, 0, 1 << 30),
    "session.between_turns": ("keep", "drop", "drop", "prefix_cache"),
    "session.turns": (1, 2, 3),
    "workload.users": (None,),
    "workload.request_rate": (0.5, 50.0, 1000.0, 1000.0, 1000.0),
    "workload.prompt_tokens": tuple(map(uniform, (9, 60, 120, 120))),
    "workload.output_tokens": tuple(map(uniform, (1, 40, 100, 100))),
    "results.interval_s": (0.001, 0.07, 1.0, 100.0),
}
"""Settings of every kind, legal and illegal together, on a device with little memory or with enough."""


def drawn(seed: int) -> Keys:
    random = Random(seed)
    return {"seed": seed} | {key: random.choice(values) for key, values in DRAWN.items()}


def test_leaps_and_steps_leave_equal_rows_whatever_is_combined() -> None:
    """The same draws in every run: the first 30 as they come, then the first 24 of the further ones that are legal."""
    ended: Counter[str] = Counter()
    legal = (keys for keys in map(drawn, count(30)) if not refusals(scenario(keys)))
    for keys in (*map(drawn, range(30)), *islice(legal, 24)):
        illegal = refusals(scenario(keys))
        try:
            leaps = outcome(keys)
        except DoesNotFit:
            ended["does not fit"] += 1
            continue
        if isinstance(leaps, str):
            assert leaps in illegal, keys
            ended["refused"] += 1
            continue
        assert not illegal, keys
        assert differences(leaps, Twin(scenario(keys)).run(step_mode=True)) == [], keys
        ended["ran"] += 1
        ended["ran short"] += leaps.summary["oom"] is not None or leaps.summary["preemptions"] > 0
    assert (ended["refused"], ended["ran"] + ended["does not fit"]) == (30, 24)
    assert ended["ran"] >= 12
    assert ended["ran short"] >= 3


def test_a_leap_that_takes_a_nanosecond_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"kv_cache.policy": "contiguous", "kv_cache.growth": "static", "workload.users": 1}
    steps = Twin(scenario(keys)).run(step_mode=True)
    assert differences(Twin(scenario(keys)).run(), steps) == []
    honest = StepTimes.total_ns
    monkeypatch.setattr(StepTimes, "total_ns", lambda self, k: honest(self, k) + (k > 1))
    assert "requests" in differences(Twin(scenario(keys)).run(), steps)
