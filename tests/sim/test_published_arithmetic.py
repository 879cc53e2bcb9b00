"""The arithmetic of published logs comes out to their last digit, from their figures alone, through what ``fit`` asks.

Blocks, tokens and concurrency are counts: nothing here is estimated, so nothing is near, all is equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hbmtwin.kernels.records import Experts, ModelShape
from hbmtwin.sim.fit.fit import fit

GIB = 1 << 30

QWEN3_235B = ModelShape(
    *("qwen3-vl-235b-a22b", 94, 4096, 12288, 64, 4, 128, 151_936, 262_144),
    experts=Experts(num_experts=128, experts_per_token=8, intermediate_size=1536),
)
QWEN3_30B = ModelShape(
    *("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151_936, 40_960),
    experts=Experts(num_experts=128, experts_per_token=8, intermediate_size=768),
)
DEEPSEEK_V3 = ModelShape(
    *("deepseek-v3", 61, 7168, 18_432, 128, 128, 192, 129_280, 163_840),
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


def answer(*named: ModelShape | str, **options: Any) -> dict[str, Any]:
    """What ``fit --json`` says."""
    return fit(*named, **options).to_dict()


@pytest.mark.parametrize(
    ("kv_bytes_per_token", "block_size", "available", "max_model_len", "blocks", "tokens", "concurrency"),
    [
        (48_128, 128, 11_381_826_560, 32_768, 1_847, 236_416, "7.21"),
        (49_152, 128, 53_405_099_008, 4_096, 8_488, 1_086_464, "265.25"),
    ],
)
def test_tokens_and_concurrency_of_a_boot_log(
    kv_bytes_per_token: int,
    block_size: int,
    available: int,
    max_model_len: int,
    blocks: int,
    tokens: int,
    concurrency: str,
) -> None:
    said = answer(
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
        available_kv_bytes=available,
        max_model_len=max_model_len,
        total_memory_bytes=65_452_113_920,
    )
    assert said["fits"]
    assert said["block_bytes"] == kv_bytes_per_token * block_size
    assert said["num_gpu_blocks"] == blocks
    assert said["kv_tokens"] == tokens
    assert f"{said['max_concurrency']:.2f}" == concurrency
    assert said["available_kv_bytes"] == available


@pytest.mark.parametrize(
    ("model", "tensor_parallel_size", "kv_bytes_per_token"),
    [(QWEN3_235B, 4, 48_128), (QWEN3_235B, 8, 48_128), (QWEN3_30B, 2, 49_152)],
    ids=["235b over 4", "235b over 8: its 4 KV heads are on every rank, each twice", "30b over 2"],
)
def test_bytes_of_a_token_on_a_rank(model: ModelShape, tensor_parallel_size: int, kv_bytes_per_token: int) -> None:
    said = answer(
        *(model, "ascend-910b2"),
        tensor_parallel_size=tensor_parallel_size,
        block_size=128,
        max_model_len=32_768,
        available_kv_bytes=11_381_826_560,
    )
    assert said["kv_bytes_per_token"] == kv_bytes_per_token
    if kv_bytes_per_token == 48_128:
        assert (said["kv_tokens"], f"{said['max_concurrency']:.2f}") == (236_416, "7.21")


def test_more_ranks_than_kv_heads_spare_no_kv() -> None:
    def token_bytes(tp: int) -> int:
        size: int = answer(QWEN3_235B, "ascend-910b2", tensor_parallel_size=tp, available_kv_bytes=GIB)[
            "kv_bytes_per_token"
        ]
        return size

    assert [token_bytes(tp) for tp in (1, 2, 4, 8)] == [192_512, 96_256, 48_128, 48_128]


def test_llama_3_1_8b_needs_16_gib_for_131_072_tokens() -> None:
    said = answer("llama-3.1-8b", "rtx-3090", max_model_len=131_072)
    assert not said["fits"]
    assert "needs 16.00 GiB of KV" in said["reason"]
    just = answer("llama-3.1-8b", "h100-80gb", max_model_len=131_072, available_kv_bytes=16 * GIB)
    assert (just["fits"], just["kv_tokens"], just["max_concurrency"]) == (True, 131_072, 1.0)
    assert not answer("llama-3.1-8b", "h100-80gb", max_model_len=131_072, available_kv_bytes=16 * GIB - 1)["fits"]


def test_1_381_blocks_of_16_are_10_79_requests_of_2_048() -> None:
    said = answer("llama-2-7b", "a100-80gb", block_size=16, max_model_len=2_048, num_gpu_blocks_override=1_381)
    assert said["num_gpu_blocks"] == 1_381
    assert said["kv_tokens"] == 22_096
    assert f"{said['max_concurrency']:.2f}" == "10.79"


@pytest.mark.parametrize("tensor_parallel_size", [1, 8, 16])
def test_a_latent_has_576_elements_a_layer_and_is_not_divided(tensor_parallel_size: int) -> None:
    said = answer(
        *(DEEPSEEK_V3, "h200"), tensor_parallel_size=tensor_parallel_size, available_kv_bytes=GIB, max_model_len=4096
    )
    assert said["kv_bytes_per_token"] == 61 * 576 * 2
    half = answer(
        *(DEEPSEEK_V3, "h200"),
        tensor_parallel_size=tensor_parallel_size,
        available_kv_bytes=GIB,
        max_model_len=4096,
        kv_cache_dtype="fp8",
    )
    assert half["kv_bytes_per_token"] == 61 * 576


def test_the_sampler_of_1_024_rows_takes_1_739_gib() -> None:
    said = answer(replace(QWEN3_30B, experts=None), "ascend-910b2", max_num_seqs=1024, max_num_batched_tokens=8192)
    (sampler,) = [line for line in said["breakdown"] if line["item"] == "run-time sampler"]
    assert sampler["bytes"] == 1024 * 151_936 * 12 == 1_866_989_568
    assert f"{sampler['bytes'] / GIB:.3f}" == "1.739"
