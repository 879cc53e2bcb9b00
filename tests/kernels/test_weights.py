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


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(LLAMA_8B, 8_030_261_248), (LLAMA_7B, 6_738_415_616), (LLAMA_70B, 68_976_648_192)],
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
    assert [name for name, _ in tensors[:2]] == ["embed_tokens", "layers.0"]
    assert [name for name, _ in tensors[-3:]] == ["norm", "lm_head", "rotary_emb"]
    assert len(tensors) == 36
    assert sum(size for _, size in tensors) == weight_bytes_per_rank(LLAMA_8B, 2)


def test_a_split_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"cannot be split over tensor_parallel_size 3.*possible sizes are 1, 2, 4, 8"):
        weight_bytes_per_rank(LLAMA_8B, 3)
