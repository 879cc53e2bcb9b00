"""What an engine writes of its KV, from the figures of published logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.budget.memory_budget import budget_of
from hbmtwin.sim.budget.question import BudgetQuestion, Measured
from hbmtwin.sim.catalog import device, model
from hbmtwin.sim.engines import engine_rules
from hbmtwin.sim.engines.boot_lines import boot_lines
from hbmtwin.sim.kv_layout import kv_layout

LLAMA, A100, B2 = model("llama-3.1-8b"), device("a100-80gb"), device("ascend-910b2")


def lines(
    engine: str, version: str | None = None, *, on: DeviceSpec = A100, shape: ModelShape = LLAMA, **changes: Any
) -> tuple[str, ...]:
    rules = engine_rules(engine, version)
    asked: dict[str, Any] = {
        "gpu_memory_utilization": 0.9,
        "max_model_len": 32_768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": rules.block_size,
        **changes,
    }
    q = BudgetQuestion(
        model=shape, device=on, rules=rules, layout=kv_layout(shape), layers=(range(shape.num_layers),), **asked
    )
    return boot_lines(q, budget_of(q))


def measured(available_kv_bytes: int, kv_bytes_per_token: int | None = None) -> Measured:
    return Measured(available_kv_bytes=available_kv_bytes, kv_bytes_per_token=kv_bytes_per_token)


def test_vllm_rounds_as_its_log_does() -> None:
    # 8.11 GiB and 48 KiB a token in blocks of 16: 11,072 blocks; 40,960 tokens take 2,560.
    assert lines("vllm", max_model_len=40_960, measured=measured(8_708_046_192, 49_152)) == (
        "Available KV cache memory: 8.11 GiB",
        "GPU KV cache size: 177,152 tokens",
        "Maximum concurrency for 40,960 tokens per request: 4.33x",
    )
    assert lines("vllm", measured=measured(8 << 30))[0] == "Available KV cache memory: 8.0 GiB"
    assert lines("vllm", "0.19", measured=measured(8 << 30))[0] == "Available KV cache memory: 8.00 GiB"


def test_vllm_ascend_as_published() -> None:
    # 48,128 bytes a token and rank, blocks of 128: 236,416 tokens, 7.21x at 32,768.
    assert lines("vllm-ascend", on=B2, measured=measured(11_381_826_560, 48_128)) == (
        "Available KV cache memory: 10.6 GiB",
        "GPU KV cache size: 236,416 tokens",
        "Maximum concurrency for 32,768 tokens per request: 7.21x",
    )
    # 49,152 bytes: 1,086,464 tokens, 265.25x at 4,096; older releases wrote bytes.
    older = lines("vllm-ascend", "0.11", on=B2, max_model_len=4096, measured=measured(53_405_099_008, 49_152))
    assert older == (
        "Available memory: 53405099008, total memory: 65452113920",
        "GPU KV cache size: 1,086,464 tokens",
        "Maximum concurrency for 4,096 tokens per request: 265.25x",
    )


def test_v0_counts_blocks_on_both_sides() -> None:
    # 1,381 blocks of 16 tokens are 10.79x at 2,048; 4 GiB of host memory hold 2,048 blocks of 2 MiB.
    assert lines("vllm", "V0", max_model_len=2048, num_gpu_blocks_override=1381) == (
        "the rest of the memory reserved for KV Cache is 2.70GiB.",
        "# cuda blocks: 1381, # CPU blocks: 2048",
        "Maximum concurrency for 2048 tokens per request: 10.79x",
    )


def test_sglang_counts_tokens() -> None:
    assert lines("sglang", measured=measured(12 << 30), max_num_batched_tokens=8192) == (
        "KV Cache is allocated. #tokens: 98304, K size: 6.00 GB, V size: 6.00 GB",
        "max_total_num_tokens=98304, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, "
        "context_len=32768",
    )
    latent = lines("sglang", shape=model("youtu-llm-2b"), measured=measured(36 << 30))
    assert latent[0] == "KV Cache is allocated. #tokens: 1048576, KV size: 36.00 GB"
    assert "max_running_requests=4096" in lines("sglang", measured=measured(64 << 30), max_model_len=4096)[1]
    assert "max_running_requests=500," in lines("sglang", measured=measured(1000 * 131_072), max_model_len=128)[1]


def test_tensorrt_llm_counts_blocks() -> None:
    # A public log: 220,480 tokens of 128 KiB are 26.91 GiB.
    assert lines("tensorrt-llm", block_size=64, measured=measured(220_480 * 131_072)) == (
        "[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 3445",
        "[TensorRT-LLM][INFO] Number of tokens per block: 64.",
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).",
    )


def test_what_is_not_known_is_not_made_up() -> None:
    assert lines("mindie", on=B2) == ()
    assert lines("vllm", on=replace(A100, memory_bytes=1 << 30)) == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_the_lines_are_those_of_the_budget(engine: str) -> None:
    rules = engine_rules(engine)
    q = BudgetQuestion(
        model=LLAMA,
        device=A100,
        rules=rules,
        layout=kv_layout(LLAMA),
        layers=(range(32),),
        gpu_memory_utilization=0.9,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        block_size=rules.block_size,
    )
    b = budget_of(q)
    said = "\n".join(boot_lines(q, b))
    tokens = b.num_blocks * b.block_size
    assert (f"{b.kv_tokens:,} tokens" in said) if engine == "vllm" else (str(tokens) in said)
