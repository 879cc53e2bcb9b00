"""Which combinations are refused, by name and with the reason, and which settings are told to have no effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.sim import legality
from hbmtwin.sim.kv_policy import named_by_users
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError
from hbmtwin.sim.scheduler import schedulers

CONTIGUOUS = "kv_cache.policy=contiguous"
ALLOCATORS, POLICIES, SCHEDULERS = map(", ".join, (device_allocators.names(), named_by_users(), schedulers.names()))

ASYNC = "scheduler.async_scheduling=true"
VIRTUAL = "kv_cache.policy=virtual"
V0 = ("kv_cache.version=v0", "scheduler.policy=vllm_v0")

ILLEGAL: list[tuple[list[str], str]] = [
    (
        ["memory.general=cachng"],
        "memory.general: no device allocator is called 'cachng' (there are " + ALLOCATORS + "); "
        "did you mean 'caching'?",
    ),
    (
        ["memory.kv_arena=pool"],
        "memory.kv_arena: no device allocator is called 'pool' (there are " + ALLOCATORS + "); did you mean 'pooled'?",
    ),
    (
        ["kv_cache.policy=pagd"],
        "kv_cache.policy: no KV policy is called 'pagd' (there are " + POLICIES + "); did you mean 'paged'?",
    ),
    (["scheduler.policy=sjf"], "scheduler.policy: no scheduler is called 'sjf' (there are " + SCHEDULERS + ")"),
    (
        ["memory.general=pooled"],
        "memory.general: 'pooled' takes one region at start and cannot hold the weights beside another arena; "
        "use it as memory.kv_arena",
    ),
    (
        ["kv_cache.retention=forget(10, 3)"],
        "kv_cache.retention: forget(10, 3) drops tokens together, where a block goes as soon as all of its tokens may; "
        "use truncate(10), or kv_cache.policy = 'contiguous'",
    ),
    (
        [CONTIGUOUS, "kv_cache.retention=truncte(9)"],
        "kv_cache.retention: 'truncte(9)' is no retention; write one of full, truncate(n), forget(over, drop), "
        "sliding_window(window), sink_recent(sinks, recent); did you mean truncate(n)?",
    ),
    (
        ["engine.attention=standard"],
        "engine.attention: standard reads K and V of a sequence as one tensor, which paged does not keep; use "
        "flash, or kv_cache.policy = 'contiguous'",
    ),
    (
        ["scheduler.policy=static_batch"],
        "scheduler.policy: static_batch is how servers form batches whose KV lies in one piece a sequence; use "
        "vllm, or kv_cache.policy = 'contiguous'",
    ),
    (
        [CONTIGUOUS, "scheduler.policy=static_batch", "session.between_turns=keep"],
        "session.between_turns: a batch that is padded has padding among its tokens, which no next turn can go on "
        "from; use drop, or scheduler.batching = 'variable'",
    ),
    (
        [CONTIGUOUS, "scheduler.policy=static_batch", "kv_cache.retention=truncate(9)"],
        "kv_cache.retention: a batch that is padded has padding in front, which would be dropped for tokens; "
        "use full, or scheduler.batching = 'variable'",
    ),
    (
        [CONTIGUOUS, "memory.general=direct", "engine.task_queue_enable=2"],
        "engine.task_queue_enable: 2 takes workspaces from torch_npu's workspace allocator, which memory.general = "
        "'direct' does not have; use 1, or memory.general = 'caching'",
    ),
    (
        ["session.between_turns=prefix_cache"],
        "session.between_turns: prefix_cache needs kv_cache.policy = 'paged' or 'radix' with "
        "kv_cache.enable_prefix_caching = true; use drop",
    ),
    (
        [CONTIGUOUS, "session.between_turns=prefix_cache"],
        "session.between_turns: contiguous buffers have no prefix cache; use keep (buffers wait for the next turn) "
        "or drop",
    ),
    (
        ["kv_cache.version=0.22", "kv_cache.watermark=0.1"],
        "kv_cache.watermark: vLLM 0.22 has none, it came with 0.27; leave it out",
    ),
    (
        ["kv_cache.policy=paged_v0"],
        "kv_cache.policy: write 'paged' with kv_cache.version = 'v0', not 'paged_v0'",
    ),
    (
        ["kv_cache.version=v0"],
        "scheduler.policy: 'vllm' does not know the rules of kv_cache.version = 'v0'; use vllm_v0, or a later version",
    ),
    (
        ["scheduler.policy=vllm_v0"],
        "scheduler.policy: 'vllm_v0' swaps and forks blocks, which paged of 0.27 does not; use vllm, or "
        "kv_cache.policy = 'paged' with kv_cache.version = 'v0'",
    ),
    (
        ["scheduler.policy=sglang"],
        "scheduler.policy: 'sglang' counts the slots of SGLang's pool, which paged of 0.27 does not have; use vllm, or "
        "kv_cache.policy = 'radix'",
    ),
    (
        ["scheduler.policy=guaranteed_no_evict", "kv_cache.policy=radix"],
        "scheduler.policy: 'guaranteed_no_evict' counts the blocks of TensorRT-LLM's pool, which radix does not have; "
        "use vllm, or kv_cache.policy = 'paged'",
    ),
    (
        ["scheduler.policy=max_utilization", "memory.oom=reject"],
        "memory.oom: max_utilization pauses requests, which is not what 'reject' says; use preempt, or "
        "scheduler.policy = 'guaranteed_no_evict'",
    ),
    (
        [ASYNC, "scheduler.policy=prefill_first"],
        "scheduler.async_scheduling: 'prefill_first' does not plan a step before the last one is done; use vllm",
    ),
    (
        [ASYNC, "kv_cache.policy=radix"],
        "scheduler.async_scheduling: vLLM plans ahead over its blocks, whose keys follow, which radix does not have; "
        "leave it out, or use kv_cache.policy = 'paged'",
    ),
    (
        [ASYNC, "engine.pipeline_parallel_size=2"],
        "scheduler.async_scheduling: vLLM then has 3 batches under way in a pipeline of 2 stages, or 2 with its first "
        "model runner, which is not simulated; leave it out, or use engine.pipeline_parallel_size = 1",
    ),
    (
        [ASYNC, "memory.oom=reject"],
        "memory.oom: vLLM preempts, and a step planned ahead (scheduler.async_scheduling) cannot be undone, as "
        "'reject' asks; use preempt",
    ),
    (
        ["workload.samples=4", "workload.users=2"],
        "workload.samples: 4 answers to a prompt leave no one answer to go on with; give workload.request_rate instead "
        "of workload.users, or samples = 1",
    ),
    (
        ["workload.samples=4"],
        "workload.samples: 4 answers to a prompt leave no one answer to go on with; set session.turns = 1, or samples "
        "= 1",
    ),
    (
        ["workload.samples=4", "workload.multi_turn=conversations.json"],
        "workload.samples: 4 answers to a prompt leave no one answer to go on with; leave workload.multi_turn out, or "
        "samples = 1",
    ),
    (
        ["workload.samples=4", "session.turns=1", "workload.max_concurrency=2"],
        "workload.max_concurrency: 4 samples of a prompt come together, and a client lets requests in one by one; "
        "leave it out, or set samples = 1",
    ),
    (
        ["workload.samples=4", "session.turns=1", "session.between_turns=keep"],
        "workload.samples: 4 answers to a prompt leave no one answer to go on with; set session.between_turns = "
        "'drop', or samples = 1",
    ),
    (
        [*V0, "workload.samples=4", "session.turns=1", "scheduler.max_num_seqs=3"],
        "workload.samples: 4 of a prompt run together in v0, and scheduler.max_num_seqs is 3; raise that, or take "
        "fewer",
    ),
    (
        [*V0, "workload.samples=4", "session.turns=1", "scheduler.preemption_mode=recompute"],
        "scheduler.preemption_mode: recompute is for single sequences, v0 stops where a prompt has several samples; "
        "use auto or swap",
    ),
    (
        ["kv_cache.policy=paged_groups"],
        "kv_cache.policy: write 'paged'; a model with sliding windows or Mamba states makes it 'paged_groups'",
    ),
    (
        [CONTIGUOUS, "memory.oom=reject"],
        "memory.oom: 'reject' is illegal with kv_cache.growth = 'exact' and copy_scope = 'tensor': a step in which "
        "some tensors have been replaced cannot be undone; use stop",
    ),
    (
        [CONTIGUOUS, "kv_cache.growth=doublng"],
        "kv_cache.growth: no growth rule is called 'doublng' (there are static, exact, doubling, step, hybrid); "
        "did you mean 'doubling'?",
    ),
    (
        ["kv_cache.options={num_block=9}"],
        "kv_cache.options: 'num_block' is no further setting of the policy 'paged'; did you mean 'num_blocks'?",
    ),
    (
        ["kv_cache.options={max_model_len=12}"],
        "kv_cache.options: 'max_model_len' has a key of its own; write it as engine.max_model_len",
    ),
    (
        ["kv_cache.options={num_blocks=1.5}"],
        "kv_cache.options: num_blocks: input should be a valid integer, not 1.5",
    ),
    (
        ["kv_cache.options={block_size=9}"],
        "kv_cache.options: 'block_size' has a key of its own; write it as kv_cache.block_size",
    ),
    (
        [VIRTUAL],
        "kv_cache.policy: 'virtual' needs pages, which memory.kv_arena = 'caching' does not offer; allocators that do: "
        "direct",
    ),
    (
        [VIRTUAL, "memory.kv_arena=direct", "kv_cache.retention=sliding_window(9)"],
        "kv_cache.retention: virtual keeps every token; use full, or kv_cache.policy = 'contiguous'",
    ),
    (
        [VIRTUAL, "memory.kv_arena=direct", "memory.admission=reserve"],
        "memory.admission: virtual has no reserve, it admits what fits: leave it none",
    ),
    (
        [CONTIGUOUS, "kv_cache.retention=forget(10, 11)"],
        "kv_cache.retention: forget(over, drop): drop must be from 1 to 10, not 11",
    ),
    (
        [CONTIGUOUS, "kv_cache.growth=hybrid", "kv_cache.decode_growth=hybrid"],
        "kv_cache.decode_growth: must be one of static, exact, doubling, step, not 'hybrid'",
    ),
    (
        ["kv_cache.growth=doublng"],
        "kv_cache.growth: no growth rule is called 'doublng' (there are static, exact, doubling, step, hybrid); "
        "did you mean 'doubling'?",
    ),
    (
        ["kv_cache.decode_growth=stp"],
        "kv_cache.decode_growth: must be one of static, exact, doubling, step, not 'stp'; did you mean 'step'?",
    ),
    (
        [CONTIGUOUS, "kv_cache.decode_growth=foo"],
        "kv_cache.decode_growth: must be one of static, exact, doubling, step, not 'foo'",
    ),
    (
        ["kv_cache.retention=foo"],
        "kv_cache.retention: 'foo' is no retention; write one of full, truncate(n), forget(over, drop), "
        "sliding_window(window), sink_recent(sinks, recent)",
    ),
    (
        ["memory.alignment_bytes=3"],
        "memory.alignment_bytes: must be a power of two, not 3; use 2 or 4 (512 is torch's unit)",
    ),
    (
        ["kv_cache.preset=paged", CONTIGUOUS],
        "memory.oom: 'preempt', set by the preset 'paged', is illegal with kv_cache.growth = 'exact' and copy_scope = "
        "'tensor': a step in which some tensors have been replaced cannot be undone; use stop",
    ),
    (
        ["kv_cache.preset=paged", CONTIGUOUS, "memory.oom=preempt"],
        "memory.oom: 'preempt' is illegal with kv_cache.growth = 'exact' and copy_scope = 'tensor': a step in which "
        "some tensors have been replaced cannot be undone; use stop",
    ),
    (
        [CONTIGUOUS, "memory.oom=preempt", "kv_cache.growth=doubling"],
        "memory.oom: 'preempt' is illegal with kv_cache.growth = 'doubling' and copy_scope = 'tensor': a step in which "
        "some tensors have been replaced cannot be undone; use stop",
    ),
    (
        ["kv_cache.options={zzz=9}"],
        "kv_cache.options: 'zzz' is no further setting of the policy 'paged'",
    ),
]


def refusal(settings: list[str]) -> pytest.ExceptionInfo[ScenarioError]:
    scenario = Scenario.load(overrides=settings)
    with pytest.raises(ScenarioError) as caught:
        legality.check(scenario)
    return caught


@pytest.mark.parametrize(("settings", "said"), ILLEGAL)
def test_an_illegal_combination_is_refused_by_name(settings: list[str], said: str) -> None:
    assert str(refusal(settings).value) == said


@pytest.fixture
def stubborn() -> Iterator[str]:
    """A policy that can neither preempt nor reject."""

    class Stubborn(PagedPolicy):
        name = "stubborn"
        offers = frozenset()

    kv_policies.register("stubborn")(Stubborn)
    yield "stubborn"
    kv_policies.unregister("stubborn")


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_what_a_policy_does_not_offer_is_refused_by_name(stubborn: str, oom: str) -> None:
    assert str(refusal([f"kv_cache.policy={stubborn}", f"memory.oom={oom}"]).value) == (
        f"memory.oom: '{oom}' is not offered by the policy 'stubborn'; use stop, or kv_cache.policy = 'paged'"
    )
    legality.check(Scenario.load(overrides=[f"kv_cache.policy={stubborn}"]))
    assert legality.effective_oom(Scenario.load(overrides=[f"kv_cache.policy={stubborn}"])) == "stop"


def test_every_refusal_of_the_code_has_a_case(stubborn: str) -> None:
    source = Path(legality.__file__)
    written = {
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    }
    cases = [settings for settings, _ in ILLEGAL] + [[f"kv_cache.policy={stubborn}", "memory.oom=reject"]]
    raised = [[entry.lineno + 1 for entry in refusal(case).traceback if entry.path == source][-1] for case in cases]
    assert len(written) >= 18
    assert [lines for lines in written if not any(line in lines for line in raised)] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_are_legal_and_without_remark(preset: str) -> None:
    scenario = Scenario.load(preset=preset)
    legality.check(scenario)
    assert legality.notes(scenario) == ()
    assert legality.effective_oom(scenario) == {"paged": "preempt"}.get(preset, "stop")


@pytest.mark.parametrize(
    "settings",
    [
        ["memory.oom=stop"],
        ["memory.oom=reject"],
        ["memory.kv_arena=pooled"],
        ["kv_cache.options={num_blocks=9, reserve_full_sequence=false}"],
        [CONTIGUOUS, "memory.admission=reserve"],
        [CONTIGUOUS, "memory.oom=preempt", "kv_cache.copy_scope=step"],
        [CONTIGUOUS, "memory.oom=preempt", "kv_cache.growth=static"],
        [CONTIGUOUS, "kv_cache.retention=forget(4096, 1024)", "session.between_turns=keep"],
        [CONTIGUOUS, "engine.attention=standard", "memory.activations=per_layer"],
        [CONTIGUOUS, "scheduler.policy=static_batch", "scheduler.batching=variable", "session.between_turns=keep"],
        ["memory.activations=peak", "memory.general=direct"],
        [CONTIGUOUS, "kv_cache.growth=static", "session.between_turns=keep"],
        [VIRTUAL, "memory.kv_arena=direct", "memory.oom=reject", "session.between_turns=keep"],
        [VIRTUAL, "memory.kv_arena=direct", "scheduler.policy=static_batch"],
    ],
)
def test_legal_combinations_pass(settings: list[str]) -> None:
    legality.check(Scenario.load(overrides=settings))


def test_what_happens_out_of_memory_depends_on_the_policy() -> None:
    assert legality.effective_oom(Scenario.load(overrides=[CONTIGUOUS])) == "stop"
    assert legality.effective_oom(Scenario.load(overrides=["kv_cache.policy=paged"])) == "preempt"
    assert legality.effective_oom(Scenario.load(overrides=[VIRTUAL])) == "preempt"
    assert legality.effective_oom(Scenario.load(overrides=["memory.oom=reject"])) == "reject"


@pytest.mark.parametrize(
    ("settings", "remarks"),
    [
        (
            ["kv_cache.growth=static", "kv_cache.tensors=merged", "kv_cache.initial_tokens=9"],
            [
                "kv_cache.growth does not concern the policy 'paged'",
                "kv_cache.tensors does not concern the policy 'paged'",
                "kv_cache.initial_tokens does not concern the policy 'paged'",
            ],
        ),
        (
            [CONTIGUOUS, "kv_cache.block_size=16", "kv_cache.watermark=0.1"],
            [
                "kv_cache.block_size does not concern the policy 'contiguous'",
                "kv_cache.watermark does not concern the policy 'contiguous'",
            ],
        ),
        (["memory.fit=first"], ["memory.fit concerns the allocators pooled only"]),
        ([CONTIGUOUS, "memory.kv_arena=pooled", "memory.fit=first"], []),
        (
            ["scheduler.max_num_batched_tokens=255"],
            [
                "scheduler.max_num_batched_tokens = 255 is less than max_num_seqs = 256: vLLM refuses to start so; "
                "here a step serves the first of the running sequences"
            ],
        ),
        (["scheduler.max_num_batched_tokens=256"], []),
        (["scheduler.max_num_batched_tokens=64", "scheduler.enable_chunked_prefill=false"], []),
        ([CONTIGUOUS, "scheduler.max_num_batched_tokens=255"], []),
        ([*V0, "engine.max_model_len=2048"], []),
        (["scheduler.preemption_mode=swap"], ["scheduler.preemption_mode concerns the scheduler 'vllm_v0' only"]),
        ([CONTIGUOUS, "scheduler.enable_chunked_prefill=false", "scheduler.long_prefill_token_threshold=9"], []),
        (
            [
                CONTIGUOUS,
                "scheduler.policy=static_batch",
                "scheduler.batching=variable",
                "scheduler.enable_chunked_prefill=false",
                "scheduler.long_prefill_token_threshold=9",
                "scheduler.scheduling_policy=priority",
                "workload.priorities=[1, 1]",
            ],
            [
                "scheduler.enable_chunked_prefill concerns the scheduler 'vllm' only",
                "scheduler.long_prefill_token_threshold concerns the scheduler 'vllm' only",
                "scheduler.scheduling_policy concerns the scheduler 'vllm' only",
                "workload.priorities has an effect with scheduler.scheduling_policy = 'priority' only",
            ],
        ),
        (
            ["workload.priorities=[1, 1]"],
            ["workload.priorities has an effect with scheduler.scheduling_policy = 'priority' only"],
        ),
        (["scheduler.scheduling_policy=priority", "workload.priorities=[1, 1]"], []),
        (["kv_cache.swap_space_bytes=0"], ["kv_cache.swap_space_bytes concerns kv_cache.version = 'v0' only"]),
        (
            ["results.cache_events=true"],
            ["results.cache_events finds none without kv_cache.enable_prefix_caching = true"],
        ),
        (["scheduler.batching=sorted"], ["scheduler.batching concerns the scheduler 'static_batch' only"]),
        (
            ["engine.task_queue_enable=2"],
            ["engine.task_queue_enable has an effect with memory.activations = 'per_layer' only"],
        ),
        ([CONTIGUOUS, "kv_cache.step_tokens=9"], ["kv_cache.step_tokens does not concern growth = 'exact'"]),
        ([CONTIGUOUS, "kv_cache.growth=hybrid", "kv_cache.decode_growth=step", "kv_cache.step_tokens=9"], []),
        (
            ["session.between_turns=keep"],
            ["session.between_turns = keep: paged parks nothing, and drops KV between turns"],
        ),
        ([CONTIGUOUS, "session.between_turns=keep"], []),
        (
            ["workload.trace=a.csv", "workload.users=3", "workload.burstiness=2", "session.turns=2"],
            [
                "workload.users does not concern a trace",
                "workload.burstiness does not concern a trace",
                "session.turns does not concern a trace",
            ],
        ),
        (["workload.trace=a.csv", "workload.time_scale=2", "workload.num_prompts=5"], []),
        (["workload.time_scale=2"], ["workload.time_scale concerns a trace or a model only"]),
        (["workload.users=3", "workload.burstiness=2"], ["workload.burstiness does not concern a closed loop"]),
        (["workload.request_rate=3", "workload.burstiness=2"], []),
    ],
)
def test_settings_without_effect_are_told(settings: list[str], remarks: list[str]) -> None:
    assert list(legality.notes(Scenario.load(overrides=settings))) == remarks
