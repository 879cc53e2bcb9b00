"""Bytes of KV per token: the arithmetic of the claims (docs/claims.md), asserted to the byte."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.records import KVDtype, KVLayout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LLAMA_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128)
LLAMA_70B = KVLayout(num_layers=80, num_kv_heads=8, head_dim=128)
LLAMA_70B_AS_MHA = KVLayout(num_layers=80, num_kv_heads=64, head_dim=128)
LLAMA_70B_AS_MQA = KVLayout(num_layers=80, num_kv_heads=1, head_dim=128)


def test_claim_a2_a_token_of_the_7b_takes_16_kib_a_layer() -> None:
    assert LLAMA_7B.layer_token_bytes == 16 * KIB
    assert LLAMA_7B.tensor_bytes == (8 * KIB, 8 * KIB)
    assert LLAMA_7B.token_bytes == 512 * KIB


@pytest.mark.parametrize(("tokens", "layer_mib"), [(1024, 16), (4096, 64), (16_384, 256)])
def test_claim_a2_layers_of_the_7b(tokens: int, layer_mib: int) -> None:
    assert tokens * LLAMA_7B.layer_token_bytes == layer_mib * MIB


def test_claim_a2_4096_tokens_over_32_layers_take_2_gib() -> None:
    assert 4096 * LLAMA_7B.token_bytes == 2 * GIB


@pytest.mark.parametrize(("turn", "mib"), [(1, 5), (2, 10), (20, 100), (100, 500)])
def test_claim_a3_ten_tokens_a_turn(turn: int, mib: int) -> None:
    assert 10 * turn * LLAMA_7B.token_bytes == mib * MIB


def test_claim_a9_is_wrong_by_its_own_formula() -> None:
    claimed = (2 * MIB, 256 * MIB)
    assert (4096 * LLAMA_7B.layer_token_bytes, 512 * LLAMA_7B.layer_token_bytes) == (64 * MIB, 8 * MIB) != claimed


def test_claim_c2_counts_the_70b_as_mha() -> None:
    assert 2048 * LLAMA_70B_AS_MHA.token_bytes == 5_368_709_120 == 5 * GIB
    assert 4 * 2048 * LLAMA_70B_AS_MHA.token_bytes == 20 * GIB
    assert 2048 * LLAMA_70B.token_bytes == 671_088_640 == 5 * GIB // 8


def test_claim_b7_gqa_is_8_times_and_mqa_64_times_smaller() -> None:
    assert LLAMA_70B_AS_MHA.token_bytes == 8 * LLAMA_70B.token_bytes == 64 * LLAMA_70B_AS_MQA.token_bytes


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_heads_are_split_over_ranks_and_replicated_when_there_are_too_few(ranks: int, heads: int) -> None:
    layout = KVLayout(num_layers=80, num_kv_heads=8, head_dim=128, tensor_parallel_size=ranks)
    assert layout.kv_heads_per_rank == heads
    assert layout.token_bytes == 80 * 2 * heads * 128 * 2


def test_a_one_byte_cache_takes_half() -> None:
    assert 2 * KVLayout(32, 32, 128, KVDtype(8)).token_bytes == LLAMA_7B.token_bytes


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size"])
def test_nothing_can_be_zero(name: str) -> None:
    shape = {"num_layers": 32, "num_kv_heads": 32, "head_dim": 128, "tensor_parallel_size": 1}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        KVLayout(**shape | {name: 0})


def test_ranks_and_heads_must_divide_each_other() -> None:
    with pytest.raises(ValueError, match="num_kv_heads 8 and tensor_parallel_size 3 do not divide each other"):
        KVLayout(80, 8, 128, tensor_parallel_size=3)
