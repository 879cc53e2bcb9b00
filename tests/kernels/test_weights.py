"""Bytes of weights: against checkpoints and against what vLLM logs after loading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbmtwin.kernels.records import ModelShape
from hbmtwin.kernels.weights import (
    layer_weight_bytes,
    rotary_table_bytes,
    streamed_bytes,
    weight_bytes,
    weight_bytes_per_rank,
    weight_tensors,
)

GIB = 1 << 30

LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
LLAMA_7B = ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
LLAMA_70B = ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096)
YOUTU_2B = ModelShape(
    *("youtu-llm-2b", 32, 2048, 6144, 16, 16, 192, 128256, 131072),
    tie_word_embeddings=True,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
MINICPM3_4B = ModelShape(
    *("minicpm3-4b", 62, 2560, 6400, 40, 40, 96, 73448, 32768),
    tie_word_embeddings=True,
    kv_lora_rank=256,
    q_lora_rank=768,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_7B, 6_738_415_616),
        (LLAMA_70B, 68_976_648_192),
        (YOUTU_2B, 1_961_560_064),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters_are_those_of_the_checkpoint(model: ModelShape, parameters: int) -> None:
    assert weight_bytes(model) == 2 * parameters


def test_what_vllm_logs_is_the_parameters_and_the_rotary_table() -> None:
    assert round(weight_bytes(LLAMA_8B) / GIB, 2) == 14.96
    assert rotary_table_bytes(LLAMA_8B) == 32 << 20
    assert round(weight_bytes_per_rank(LLAMA_8B) / GIB, 2) == 14.99
    assert round(weight_bytes_per_rank(LLAMA_8B, 2) / GIB, 2) == 7.51


def test_code_llama_as_logged() -> None:
    code_llama = replace(LLAMA_7B, vocab_size=32016, max_position_embeddings=16384)
    assert round(weight_bytes_per_rank(code_llama) / GIB, 2) == 12.56


def test_vocabulary_is_padded_to_64() -> None:
    assert weight_bytes(replace(LLAMA_7B, vocab_size=32016)) == weight_bytes(replace(LLAMA_7B, vocab_size=32064))


def test_a_tied_head_is_stored_once_and_still_streamed() -> None:
    tied = replace(LLAMA_8B, tie_word_embeddings=True)
    assert weight_bytes(LLAMA_8B) - weight_bytes(tied) == 128256 * 4096 * 2
    assert streamed_bytes(tied) == streamed_bytes(LLAMA_8B)
    assert streamed_bytes(LLAMA_8B) == weight_bytes(LLAMA_8B) - 128256 * 4096 * 2 - 4096 * 2


def test_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    model = replace(LLAMA_8B, num_kv_heads=4)
    split = layer_weight_bytes(model, 4) * 2
    replicated = layer_weight_bytes(model, 8) * 2
    one_kv_head_both = 2 * 128 * 4096 * 2
    norms = 2 * 4096 * 2
    assert split == layer_weight_bytes(model, 2) + norms
    assert replicated == layer_weight_bytes(model, 4) + one_kv_head_both + norms


def test_an_mlp_without_gate_has_two_matrices() -> None:
    plain = replace(LLAMA_7B, gated_mlp=False)
    assert layer_weight_bytes(LLAMA_7B) - layer_weight_bytes(plain) == 11008 * 4096 * 2


def test_tensors_in_loading_order_sum_to_the_rank() -> None:
    tensors = list(weight_tensors(LLAMA_8B, 2))
    assert [name for name, _ in tensors[:7]] == [
        "embed_tokens",
        "layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.mlp.gate_up_proj",
        "layers.0.mlp.down_proj",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
    ]
    assert [name for name, _ in tensors[-3:]] == ["norm", "lm_head", "rotary_emb"]
    assert len(tensors) == 4 + 6 * 32
    assert sum(size for _, size in tensors) == weight_bytes_per_rank(LLAMA_8B, 2)


def test_a_split_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"cannot be split over tensor_parallel_size 3.*possible sizes are 1, 2, 4, 8"):
        weight_bytes_per_rank(LLAMA_8B, 3)


def test_minicpm3_is_the_4_billion_parameters_of_its_shapes_and_the_padding_of_its_vocabulary() -> None:
    attention = 2560 * 768 + 768 + 768 * 40 * 96 + 2560 * 288 + 256 + 256 * 40 * 128 + 40 * 64 * 2560
    layer = attention + 3 * 2560 * 6400 + 2 * 2560
    parameters = 62 * layer + 73448 * 2560 + 2560
    assert parameters == 4_073_875_968
    assert weight_bytes(MINICPM3_4B) == 2 * (parameters + 24 * 2560)


def test_ranks_split_the_heads_of_latent_attention_and_repeat_its_down_projections() -> None:
    one, two = layer_weight_bytes(YOUTU_2B), layer_weight_bytes(YOUTU_2B, 2)
    on_every_rank = 2048 * 1536 + 1536 + 2048 * (512 + 64) + 512 + 2 * 2048
    assert 2 * two - one == 2 * on_every_rank
    assert weight_bytes_per_rank(YOUTU_2B, 16) > weight_bytes_per_rank(YOUTU_2B) // 16
    assert layer_weight_bytes(YOUTU_2B, 16) == 2 * (
        on_every_rank + 1536 * 192 + 512 * 256 + 128 * 2048 + 3 * 2048 * 6144 // 16
    )


def test_splitting_the_down_projections_too_is_caught() -> None:
    assert layer_weight_bytes(YOUTU_2B, 2) != layer_weight_bytes(YOUTU_2B) // 2


def test_a_query_without_down_projection_is_one_matrix() -> None:
    direct = replace(YOUTU_2B, q_lora_rank=0)
    low_rank = 2048 * 1536 + 1536 + 1536 * 16 * 192
    assert layer_weight_bytes(YOUTU_2B) - layer_weight_bytes(direct) == 2 * (low_rank - 2048 * 16 * 192)


def test_only_the_rotary_part_of_a_latent_head_is_in_the_table() -> None:
    assert rotary_table_bytes(YOUTU_2B) == 131072 * 64 * 2
