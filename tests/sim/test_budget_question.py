"""What a budget is asked beside sizes: releases, measured lines, KV that is given, ranks of experts, hybrids."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_layers
from hbmtwin.kernels.weights import can_split
from hbmtwin.sim.budget import memory_budget as budgets
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.budget.memory_budget import DoesNotFit, MemoryBudget, budget_of
from hbmtwin.sim.budget.question import BudgetQuestion, Measured, check_question
from hbmtwin.sim.catalog import device, devices, model, models
from hbmtwin.sim.engines import ENGINES, GIB, MIB, Division, EngineArgs, engine_rules, rules_for, settings_of
from hbmtwin.sim.kv_layout import kv_layout

LLAMA, GRANITE, QWEN_MOE = model("llama-3.1-8b"), model("granite-4.0-h-micro"), model("qwen3-30b-a3b")
RTX, A100, H100 = device("rtx-3090"), device("a100-80gb"), device("h100-80gb")
B2, B4, P310 = device("ascend-910b2"), device("ascend-910b4"), device("ascend-310p")


def question(
    shape: ModelShape = LLAMA,
    on: DeviceSpec = A100,
    engine: str | None = None,
    version: str | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    args: EngineArgs | None = None,
    **changes: Any,
) -> BudgetQuestion:
    rules = rules_for(on, engine, version)
    said = (args or EngineArgs())._replace(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    s = settings_of(rules, shape, on, said)
    asked: dict[str, Any] = {
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "max_model_len": s.max_model_len,
        "max_num_seqs": s.max_num_seqs,
        "max_num_batched_tokens": s.max_num_batched_tokens,
        "block_size": s.block_size,
        "batch_rule": s.batch_rule,
        **changes,
    }
    q = BudgetQuestion(
        model=shape,
        device=on,
        rules=rules,
        layout=kv_layout(shape, tensor_parallel_size=tp),
        layers=stage_layers(shape.num_layers, pp),
        **asked,
    )
    check_question(q)
    return q


def budget(*args: Any, **changes: Any) -> MemoryBudget:
    return budget_of(question(*args, **changes))


def sizes(b: MemoryBudget) -> dict[str, int]:
    return {line.item: line.bytes for line in b.lines}


# Releases


def on_rtx(length: int, version: str = "0.6.6") -> MemoryBudget:
    return budget(LLAMA, RTX, "vllm", version, args=EngineArgs(gpu_memory_utilization=0.9, max_model_len=length))


def test_a_longer_length_starts_where_a_shorter_does_not() -> None:
    # 0.9 x 23.69 GiB - 14.99 - 0.13 leave 6.2 GiB for activations and KV. Whole prompts take 111 KiB of activations a
    # token and 128 KiB of KV; from 32,769 on 2,048 tokens are profiled, and the sampler's sort decides: 1.23 GiB.
    starts = [on_rtx(length).fits for length in (20_000, 29_000, 32_768, 32_769, 35_000)]
    assert starts == [True, False, False, True, True]
    assert [round(on_rtx(n).activation_bytes / GIB, 2) for n in (20_000, 29_000, 35_000)] == [2.17, 3.13, 1.23]


def test_and_the_refusal_says_why() -> None:
    b = on_rtx(29_000)
    assert b.why is not None
    assert b.reason.startswith("one request of max_model_len 29000 needs 3.54 GiB of KV and there are ")
    assert "computes one whole prompt of 29,000 tokens, which takes 3.13 GiB of activations" in b.reason
    assert "up to max_model_len 32,768 this engine cuts no prompts" in b.reason
    assert "29,000 token" in b.why.text("zh")
    # Releases that always cut have no such reason, and start.
    assert on_rtx(29_000, "0.27").fits
    assert "whole prompt" not in on_rtx(120_000, "0.27").reason


def test_the_batch_follows_the_length_where_the_engine_lets_it() -> None:
    q = question(LLAMA, RTX, "vllm", "0.6.6", args=EngineArgs(max_model_len=29_000))
    assert (q.at_length(20_000).max_num_batched_tokens, q.at_length(40_000).max_num_batched_tokens) == (20_000, 2048)
    given = question(LLAMA, RTX, "vllm", "0.6.6", args=EngineArgs(max_model_len=29_000, max_num_batched_tokens=29_000))
    assert given.at_length(40_000).max_num_batched_tokens == 29_000


def test_the_sampler_of_0_17_gave_back_gigabytes() -> None:
    # llm-d-planner, issue 194: 5.64 GiB in 0.16 and 2.23 in 0.17.
    qwen = model("qwen3-14b")
    peaks = [budget(qwen, H100, "vllm", version).activation_bytes for version in ("0.16", "0.17")]
    assert [round(size / GIB, 2) for size in peaks] == [5.63, 2.23]


def test_graphs_are_charged_from_0_21_on_and_eager_has_none() -> None:
    old, new = budget(engine="vllm", version="0.20", gpu_memory_utilization=0.9), budget(gpu_memory_utilization=0.9)
    assert old.graph_bytes == new.graph_bytes
    assert old.kv_bytes == new.kv_bytes + new.graph_bytes
    eager = budget(gpu_memory_utilization=0.9, enforce_eager=True)
    assert (eager.graph_bytes, eager.kv_bytes) == (0, old.kv_bytes)


# Lines


@given(data=st.data())
def test_the_lines_of_every_engine_sum_to_the_device(data: st.DataObject) -> None:
    on = device(data.draw(st.sampled_from(devices())))
    engine = data.draw(st.sampled_from([n for n, p in ENGINES.items() if on.vendor in p[-1].vendors]))
    rules = data.draw(st.sampled_from(ENGINES[engine]))
    shape = model(data.draw(st.sampled_from(models())))
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    tp = next(n for n in (tp, 1, 2, 4, 8, 16) if can_split(shape, n))
    changes: dict[str, Any] = {
        "other_tenant_bytes": data.draw(st.integers(0, 64 * GIB)),
        "gpu_memory_utilization": data.draw(st.floats(0.05, 1.0)),
        "enforce_eager": data.draw(st.booleans()),
        "num_speculative_tokens": data.draw(st.integers(0, 3)),
    }
    given_kv = data.draw(st.sampled_from(["", "kv_cache_memory_bytes", "num_gpu_blocks_override"]))
    if given_kv:
        changes[given_kv] = data.draw(st.integers(1, 10**5)) * (MIB if given_kv == "kv_cache_memory_bytes" else 1)
    assume(shape.mamba is None or on.vendor != "ascend")  # where not every state fills a block
    b = budget(shape, on, engine, rules.version, tp=tp, **changes)
    assert sum(line.bytes for line in b.lines) == b.total_bytes == on.memory_bytes
    assert all(line.low <= line.bytes <= line.high and line.source for line in b.lines)
    assert b.fits == (b.why is None) == (b.reason == "")
    assert not b.fits or b.num_blocks >= b.request_blocks
    kv = next(line for line in b.lines if line.item == "KV cache")
    assert (b.kv_low_bytes, b.kv_high_bytes) == (kv.low, kv.high)


def test_bytes_that_an_engine_keeps_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_five(account: Any) -> Division:
        usable, kv, _ = engine_rules("vllm").divide(account)
        return Division(usable, kv - 5, 5)

    q = replace(question(), rules=replace(engine_rules("vllm"), divide=keeps_five))
    whole = budget_of(q)
    assert sizes(whole)["operators"] == 5
    assert sum(sizes(whole).values()) == A100.memory_bytes
    monkeypatch.setattr(budgets, "_is_given", lambda q: True)
    forgotten = budget_of(q)
    assert "operators" not in sizes(forgotten)
    assert sizes(forgotten)["unplanned"] == sizes(whole)["unplanned"] + 5


def test_310p_keeps_as_much_for_operators_as_for_kv() -> None:
    b = budget(model("qwen3-8b"), P310, max_model_len=4096)
    items = sizes(b)
    assert 0 <= items["operators"] - items["KV cache"] <= 1
    usable = int(P310.memory_bytes * 0.92)
    assert b.kv_bytes == (usable - b.weights_bytes - b.activation_bytes - b.non_torch_bytes) // 2


def test_sglang_needs_room_for_activations_when_it_serves() -> None:
    b = budget(LLAMA, H100, "sglang")
    free = H100.memory_bytes - b.context_bytes
    assert b.kv_bytes == pytest.approx(0.834 * free - b.weights_bytes, abs=2)
    assert (b.fits, b.warnings) == (True, ())
    tight = budget(LLAMA, H100, "sglang", gpu_memory_utilization=0.985)
    assert tight.fits
    assert str(tight.warnings[0]).startswith("this engine profiles nothing: a full batch needs 0.92 GiB")
    full = budget(LLAMA, H100, "sglang", gpu_memory_utilization=0.9999)
    assert "the shares need " in full.reason


def test_tensorrt_llm_leaves_a_tenth_of_what_is_left() -> None:
    b = budget(LLAMA, H100, "tensorrt-llm")
    left = H100.memory_bytes - b.context_bytes - b.weights_bytes - b.activation_bytes - b.non_torch_bytes
    assert b.kv_bytes == int(left * 0.9)
    assert sizes(b)["unplanned"] == left - b.kv_bytes - b.graph_bytes
    # It lays claim to what is free, whatever others hold.
    assert budget(LLAMA, H100, "tensorrt-llm", other_tenant_bytes=40 * GIB, max_model_len=8192).fits


def test_the_sampler_at_run_time_warns_where_it_has_no_room() -> None:
    roomy, tight = budget(LLAMA, B4, max_model_len=8192), budget(LLAMA, B4, max_num_seqs=2048, max_model_len=8192)
    assert sizes(roomy)["run-time sampler"] == 256 * 128_256 * 12
    assert roomy.warnings == ()
    assert tight.fits
    assert sizes(tight)["unplanned"] < 0
    (warning,) = tight.warnings
    assert str(warning).startswith("sampling a full batch of 2,048 sequences needs up to 2.94 GiB when the server runs")
    assert "2,048" in warning.text("zh")


def test_speculative_tokens_have_logits_in_the_profile() -> None:
    plain, drafts = (budget(LLAMA, H100, num_speculative_tokens=n) for n in (0, 3))
    # 3 x 1,024 rows more of 128,256 words, 14 bytes each.
    assert drafts.activation_bytes - plain.activation_bytes == 3 * 1024 * 128_256 * 14


# Measured, and given


def test_a_measured_line_stands_without_a_range() -> None:
    told = Measured(weights_bytes=5 * GIB, activation_bytes=GIB, non_torch_bytes=7 * MIB, graph_bytes=3 * MIB)
    b = budget(gpu_memory_utilization=0.5, max_model_len=8192, measured=told)
    for item, size in (("weights", 5 * GIB), ("activations", GIB), ("non-torch", 7 * MIB), ("graphs", 3 * MIB)):
        line = b.line(item)
        assert line is not None
        assert (line.bytes, line.low, line.high, line.source) == (size, size, size, "measured")
    assert b.kv_bytes == b.usable_bytes - 6 * GIB - 10 * MIB
    assert b.kv_low_bytes == b.kv_high_bytes == b.kv_bytes


def test_measured_kv_is_the_answer_whatever_the_rest_would_be() -> None:
    b = budget(max_model_len=8192, measured=Measured(available_kv_bytes=200 * GIB))
    assert (b.fits, b.kv_bytes, b.num_blocks) == (True, 200 * GIB, 200 * GIB // (16 * 131_072))
    none = budget(max_model_len=8192, measured=Measured(available_kv_bytes=0))
    assert none.reason.startswith("no memory is left for KV")


def test_measured_bytes_a_token_make_the_blocks() -> None:
    told = Measured(available_kv_bytes=11_381_826_560, kv_bytes_per_token=48_128)
    b = budget(LLAMA, B2, max_model_len=32_768, measured=told)
    assert (b.block_bytes, b.num_blocks, b.kv_tokens, round(b.max_concurrency, 2)) == (6_160_384, 1847, 236_416, 7.21)


def test_kv_cache_memory_bytes_replaces_the_subtraction_and_not_the_check_of_free_memory() -> None:
    b = budget(max_model_len=8192, kv_cache_memory_bytes=3 * GIB)
    assert (b.kv_bytes, b.num_blocks, b.fits) == (3 * GIB, 3 * GIB // (16 * 131_072), True)
    assert sizes(b)["unplanned"] > sizes(budget(max_model_len=8192))["unplanned"]
    assert "58.64 GiB are free" in budget(kv_cache_memory_bytes=GIB, other_tenant_bytes=20 * GIB).reason
    over = budget(max_model_len=8192, kv_cache_memory_bytes=70 * GIB)
    assert over.reason.startswith("the shares need ")
    assert "KV 70.00 GiB beside weights 14.99 GiB" in over.reason


def test_given_blocks_win_and_one_longest_request_is_still_checked() -> None:
    b = budget(max_model_len=8192, num_gpu_blocks_override=512)
    assert (b.num_blocks, b.kv_bytes, b.fits) == (512, 512 * 2 * MIB, True)
    short = budget(max_model_len=8192, num_gpu_blocks_override=511)
    assert "one request of max_model_len 8192 needs 1.00 GiB" in short.reason
    assert budget(max_model_len=8192, num_gpu_blocks_override=512, kv_cache_memory_bytes=GIB // 2).num_blocks == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, not 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be at least 0, not -1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1, not 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1, not 0"),
        ({"measured": Measured(weights_bytes=-1)}, "weights_bytes must be at least 0, not -1"),
        ({"measured": Measured(kv_bytes_per_token=0)}, "kv_bytes_per_token must be at least 1, not 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        question(**changes)


def test_the_engines_own_option_is_named() -> None:
    with pytest.raises(ValueError, match="mem_fraction_static must be above 0"):
        question(LLAMA, H100, "sglang", gpu_memory_utilization=1.5)


# Ranks


def test_experts_are_dealt_out_over_the_ranks_of_both_kinds() -> None:
    plain = budget(QWEN_MOE, H100, tp=2)
    dealt = budget(QWEN_MOE, H100, tp=2, data_parallel_size=4, enable_expert_parallel=True)
    assert plain.weights_bytes == loaded_weight_bytes(QWEN_MOE, "nvidia", 2)
    assert dealt.weights_bytes == loaded_weight_bytes(QWEN_MOE, "nvidia", 2, expert_ranks=8, data_parallel_size=4)
    # 48 layers of 128 experts of 3 x 2,048 x 768 values: half of them before, an eighth now.
    assert plain.weights_bytes - dealt.weights_bytes == 48 * 128 * 3 * 2048 * 768 * 2 * 3 // 8
    shared = budget(QWEN_MOE, H100, tp=2, data_parallel_size=4)
    assert shared.weights_bytes == dealt.weights_bytes
    # Whole experts have wider rows in the workspace: 8 of a token, 2 x 768 values instead of 2 x 96.
    assert dealt.activation_bytes - shared.activation_bytes == 2 * 8192 * 8 * 2 * (768 - 96)


def test_the_rank_that_binds_is_named() -> None:
    assert budget(tp=2).binding_rank == 0
    b = budget(pp=2, tp=2)
    assert b.binding_rank == b.stage * 2
    assert b.num_blocks == min(stage.num_blocks for stage in b.stages)


# Hybrids


def test_a_hybrid_tells_its_groups() -> None:
    b = budget(GRANITE, max_model_len=4096, max_num_seqs=64)
    assert [(need.kind, need.num_layers) for need in b.groups] == [("mamba", 4)] * 9 + [("full", 4)]
    assert sum(need.request_blocks for need in b.groups) == b.request_blocks
    assert {need.request_blocks for need in b.groups if need.kind == "mamba"} == {1}
    windowed = budget(model("gemma-2-9b"), max_model_len=8192)
    assert {(need.kind, need.window) for need in windowed.groups} == {("full", 0), ("sliding_window", 4096)}
    assert budget().groups == ()


def test_graphs_of_more_sequences_than_states_are_refused() -> None:
    few = question(GRANITE, max_model_len=512, num_gpu_blocks_override=40, max_num_seqs=40)
    assert budget_of(few).fits
    b = budget_of(replace(few, max_num_seqs=41))
    assert b.reason.startswith("max_num_seqs 41 exceeds the 40 blocks of the pool")
    assert b.why is not None
    assert "max_num_seqs 设为 40" in b.why.text("zh")
    assert budget_of(replace(few, max_num_seqs=41, enforce_eager=True)).fits
    assert budget_of(replace(few, max_num_seqs=41, rules=engine_rules("vllm", "0.16"))).fits
    # Windows keep no state.
    gemma = question(model("gemma-2-9b"), max_model_len=512, num_gpu_blocks_override=2000, max_num_seqs=4096)
    assert budget_of(gemma).fits


def test_a_budget_crosses_processes() -> None:
    b = budget(max_model_len=131_072, gpu_memory_utilization=0.3)
    assert pickle.loads(pickle.dumps(DoesNotFit(b))).budget == b
