"""The static answer: the engine's own subtraction, checked on its logs; lines that sum; cures that hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.kernels.weights import can_split
from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.catalog import device, devices, model, models
from hbmtwin.sim.engines import GIB, activation_peak, graph_pool, rules_for
from hbmtwin.sim.engines.vllm import VLLM
from hbmtwin.sim.engines.vllm_ascend import VLLM_ASCEND
from hbmtwin.sim.fit.fit import memory_budget
from hbmtwin.sim.kv_layout import kv_layout

LLAMA_8B = model("llama-3.1-8b")
LLAMA_7B = model("llama-2-7b")
B2, B4 = device("ascend-910b2"), device("ascend-910b4")
H100 = replace(device("a100-80gb"), name="h100", memory_bytes=round(79.19 * GIB), multiprocessor_count=132)
VLLM_0_19 = replace(VLLM, charges_graphs=False)


def budget(shape: Any = LLAMA_7B, on: Any = B4, **changes: Any) -> MemoryBudget:
    layout = kv_layout(shape, tensor_parallel_size=changes.pop("tensor_parallel_size", 1))
    asked: dict[str, Any] = {
        "layout": layout,
        "gpu_memory_utilization": 0.92,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": on.default_block_size,
    }
    return memory_budget(shape, on, **{**asked, **changes})


def gib(size: int) -> float:
    return round(size / GIB, 2)


def test_the_subtraction_is_that_of_the_logs() -> None:
    # vLLM 0.19 on an H100 logged 58.11 GiB for KV: 0.95 * 79.19 - 14.99 - 1.89 - 0.25.
    b = budget(
        LLAMA_8B,
        H100,
        gpu_memory_utilization=0.95,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        rules=VLLM_0_19,
    )
    assert [gib(x) for x in (b.weights_bytes, b.activation_bytes, b.non_torch_bytes, b.kv_bytes)] == [
        14.99,
        1.89,
        0.25,
        58.10,
    ]
    assert b.fits


def test_two_ranks_as_logged() -> None:
    # Logged 63.76 GiB: the activations do not shrink, the communicator's buffers come on top.
    b = budget(
        LLAMA_8B,
        H100,
        tensor_parallel_size=2,
        gpu_memory_utilization=0.95,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        rules=VLLM_0_19,
    )
    assert (gib(b.weights_bytes), gib(b.activation_bytes), gib(b.non_torch_bytes)) == (7.51, 1.89, 2.08)
    assert b.kv_bytes / GIB == pytest.approx(63.76, abs=0.02)


def peak(rules: Any, max_num_batched_tokens: int, max_num_seqs: int, on: Any = H100) -> float:
    estimate = activation_peak(
        rules,
        LLAMA_8B,
        on,
        tensor_parallel_size=1,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    return gib(estimate.bytes)


def test_the_activation_formula_on_its_worked_example() -> None:
    in_a_layer = replace(VLLM, persistent_bytes=0, logits_value_bytes=0)
    at_the_head = replace(VLLM, persistent_bytes=0)
    assert peak(in_a_layer, 8192, 1024) == 0.87
    assert peak(at_the_head, 8192, 1024) == 1.84
    assert peak(VLLM, 8192, 1024) == 1.89
    assert peak(in_a_layer, 2048, 256) == 0.22
    assert peak(at_the_head, 2048, 256) == 0.51
    assert peak(VLLM, 2048, 256) == 0.56


def test_the_old_sampler_needed_more() -> None:
    # vLLM 0.11 logged 4.76 GiB for the same command: the sort path holds 38 bytes a logit and no scratch.
    sort_path = replace(VLLM, logits_value_bytes=38)
    assert peak(sort_path, 8192, 1024, replace(H100, multiprocessor_count=0)) == 4.76


def test_the_graph_pool_near_its_logs() -> None:
    # 51 sizes, each captured twice, logged 0.91 GiB on an H100 at 32 layers.
    assert gib(graph_pool(VLLM, LLAMA_8B, max_num_seqs=1024, max_num_batched_tokens=8192).bytes) == 0.84
    # vllm-ascend captures 35 sizes at its default of 256 sequences, and caps the largest at 512.
    by_seqs = [
        graph_pool(VLLM_ASCEND, LLAMA_8B, max_num_seqs=n, max_num_batched_tokens=2048).bytes
        for n in (1, 256, 512, 4096)
    ]
    assert [round((size - GIB // 20) / 32 / (1 << 20) * 5) for size in by_seqs] == [1, 35, 51, 51]


def test_blocks_tokens_and_concurrency_as_vllm_prints_them() -> None:
    b = budget()
    assert (b.num_blocks, b.kv_tokens, b.max_concurrency) == (227, 29_056, 227 / 32)
    assert b.num_blocks == b.kv_bytes // (128 * 524_288)
    odd = budget(max_model_len=1000)
    assert odd.kv_tokens == 227 * 1000 // 8


def test_cuda_rounds_the_budget_up_and_ascend_down() -> None:
    assert budget(gpu_memory_utilization=0.93).usable_bytes == int(B4.memory_bytes * 0.93)
    cuda = device("a100-80gb")
    assert budget(on=cuda, gpu_memory_utilization=0.93).usable_bytes == int(cuda.memory_bytes * 0.93) + 1


def test_the_context_is_not_charged_to_the_utilisation_and_libraries_are() -> None:
    plain = budget(on=H100)
    heavier = budget(on=replace(H100, context_bytes=2 * GIB))
    assert heavier.kv_bytes == plain.kv_bytes
    assert heavier.lines[-1].bytes == plain.lines[-1].bytes - (2 * GIB - H100.context_bytes)
    assert plain.static_bytes == plain.context_bytes + plain.non_torch_bytes


@settings(deadline=None)
@given(
    name=st.sampled_from(models()),
    on=st.sampled_from(devices()),
    tp=st.sampled_from([1, 2, 4, 8]),
    util=st.floats(0.05, 1.0),
    length=st.integers(1, 200_000),
    seqs=st.integers(1, 2048),
    tokens=st.integers(1, 32_768),
    tenants=st.integers(0, 100 * GIB),
)
def test_the_lines_always_sum_to_the_device(
    name: str, on: str, tp: int, util: float, length: int, seqs: int, tokens: int, tenants: int
) -> None:
    shape = model(name)
    b = budget(
        shape,
        device(on),
        tensor_parallel_size=tp if can_split(shape, tp) else 1,
        gpu_memory_utilization=util,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        other_tenant_bytes=tenants,
    )
    assert sum(line.bytes for line in b.lines) == b.total_bytes
    assert all(line.low <= line.bytes <= line.high and line.source for line in b.lines)
    assert b.fits == (b.reason == "")
    assert not b.fits or b.max_concurrency >= 1


def test_a_model_too_large_for_the_card_says_how_many_ranks_would_do() -> None:
    b = budget(model("llama-2-70b"))
    assert not b.fits
    assert b.kv_bytes < 0
    assert b.num_blocks == 0
    assert b.reason.startswith("no memory is left for KV: weights 128.48 GiB")
    assert "Any one of these would start: tensor_parallel_size 8" in b.reason
    assert budget(model("llama-2-70b"), tensor_parallel_size=8).fits
    assert not budget(model("llama-2-70b"), tensor_parallel_size=4).fits


def test_a_length_that_does_not_fit_comes_with_the_longest_that_does() -> None:
    b = budget(LLAMA_8B, max_model_len=131_072)
    assert not b.fits
    assert "needs 16.00 GiB of KV and there are 11.76 GiB, room for 96,256 tokens" in b.reason
    # vLLM's arithmetic ends at 96,256; one block less lies in whole segments, and one of them is the null block.
    assert "max_model_len 96000" in b.reason
    assert budget(LLAMA_8B, max_model_len=96_000).fits
    assert budget(LLAMA_8B, max_model_len=96_256).fits
    assert not budget(LLAMA_8B, max_model_len=96_257).fits


def test_another_tenant_makes_the_start_fail_before_anything_is_loaded() -> None:
    b = budget(other_tenant_bytes=10 * GIB)
    assert not b.fits
    assert "gpu_memory_utilization 0.92 asks for 27.14 GiB and 19.50 GiB are free" in b.reason
    assert "gpu_memory_utilization 0.65" in b.reason
    assert "the device to itself" in b.reason
    assert budget(other_tenant_bytes=10 * GIB, gpu_memory_utilization=0.65).fits


def test_a_smaller_profile_is_advised_where_it_helps() -> None:
    b = budget(max_num_batched_tokens=1 << 18)
    assert not b.fits
    assert "max_num_batched_tokens 140544" in b.reason
    assert budget(max_num_batched_tokens=140_544).fits


def test_graphs_outside_the_utilisation_must_fit_in_what_it_leaves() -> None:
    b = budget(gpu_memory_utilization=1.0)
    assert not b.fits
    assert b.reason.startswith("the graph pool (0.27 GiB) is captured outside the utilisation")
    assert "gpu_memory_utilization 0.95" in b.reason


def test_a_length_above_the_models_positions() -> None:
    b = budget(max_model_len=8192)
    assert b.reason.startswith("max_model_len 8192 is above the model's 4096 positions")
    assert "max_model_len 4096" in b.reason


def test_when_nothing_helps_it_says_so() -> None:
    b = budget(model("llama-2-70b"), replace(B4, memory_bytes=GIB))
    assert b.reason.endswith("take a smaller model or more memory")


def test_given_activations_replace_the_estimate() -> None:
    b = budget(activation_bytes=GIB)
    assert b.activation_bytes == GIB
    assert next(line for line in b.lines if line.item == "activations").source == "measured"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be above 0 and at most 1, not 0.0"),
        ({"gpu_memory_utilization": 92}, "gpu_memory_utilization must be above 0 and at most 1, not 92"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"block_size": -16}, "block_size must be at least 1, not -16"),
        ({"other_tenant_bytes": -1}, "other_tenant_bytes must be at least 0, not -1"),
        ({"activation_bytes": -1}, "activation_bytes must be at least 0, not -1"),
        ({"tensor_parallel_size": 64}, "cannot be split over tensor_parallel_size 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(**changes)


def test_a_vendor_without_rules_is_refused() -> None:
    with pytest.raises(ValueError, match="no engine rules for vendor 'acme'; known: ascend, cpu, nvidia"):
        rules_for(replace(B4, vendor="acme"))


def test_half_the_bits_a_token_hold_nearly_twice_the_tokens() -> None:
    sixteen, eight = budget(), budget(layout=kv_layout(LLAMA_7B, dtype="int8_per_token_head"))
    assert eight.kv_bytes == sixteen.kv_bytes
    assert eight.num_blocks == eight.kv_bytes // (128 * 264 * 1024)
    assert eight.num_blocks / sixteen.num_blocks == pytest.approx(512 / 264, rel=0.02)


def test_more_ranks_do_not_shrink_the_latent_of_a_token() -> None:
    youtu = model("youtu-llm-2b")
    one, eight = (
        budget(youtu, B2, max_model_len=131072),
        budget(youtu, B2, max_model_len=131072, tensor_parallel_size=8),
    )
    assert one.num_blocks == one.kv_bytes // (128 * 36_864)
    assert eight.num_blocks == eight.kv_bytes // (128 * 36_864)
