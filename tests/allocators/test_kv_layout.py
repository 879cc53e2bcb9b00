"""Bytes of KV per token: the arithmetic of the claims (docs/claims.md), asserted to the byte."""

from __future__ import annotations

from dataclasses import replace

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


def spec_page_bytes(block_size: int, kv_heads: int, head_dim: int, bits: int, *, scales: bool) -> int:
    """A block of one layer by vLLM's formula: K and V, and one fp32 a token and head for each."""
    return 2 * block_size * kv_heads * head_dim * bits // 8 + (2 * block_size * kv_heads * 4 if scales else 0)


@pytest.mark.parametrize(
    ("dtype", "layer_bytes"),
    [
        (KVDtype(16), 16_384),
        (KVDtype(8, "tensor"), 8_192),
        (KVDtype(8, "channel"), 8_192),
        (KVDtype(8, "token"), 8_200),
        (KVDtype(8, "token_head"), 8_448),
        (KVDtype(4, "channel"), 4_096),
        (KVDtype(4, "token"), 4_104),
        (KVDtype(4, "token_head"), 4_352),
    ],
    ids=str,
)
def test_a_token_of_the_7b_in_one_layer_by_dtype(dtype: KVDtype, layer_bytes: int) -> None:
    layout = KVLayout(32, 32, 128, dtype)
    assert layout.layer_token_bytes == layer_bytes
    assert layout.token_bytes == 32 * layer_bytes
    if dtype.scale != "token":
        page = spec_page_bytes(16, 32, 128, dtype.bits, scales=dtype.scale == "token_head")
        assert 16 * layout.layer_token_bytes == page


def test_claim_b4_int8_saves_a_little_under_half_and_int4_a_little_under_three_quarters() -> None:
    def saved(dtype: KVDtype) -> float:
        return 100 - 100 * KVLayout(32, 32, 128, dtype).token_bytes / LLAMA_7B.token_bytes

    assert saved(KVDtype(8)) == 50
    assert saved(KVDtype(4)) == 75
    assert saved(KVDtype(8, "token")) == 49.951171875
    assert saved(KVDtype(8, "token_head")) == 48.4375
    assert saved(KVDtype(4, "token_head")) == 73.4375


def test_claim_c10_quantising_only_v_saves_a_quarter_at_int8_and_three_eighths_at_int4() -> None:
    def saved(v_dtype: KVDtype) -> float:
        return 100 - 100 * KVLayout(80, 8, 128, v_dtype=v_dtype).token_bytes / LLAMA_70B.token_bytes

    assert saved(KVDtype(8)) == 25
    assert saved(KVDtype(4)) == 37.5
    assert saved(KVDtype(8, "token_head")) == 24.21875
    assert saved(KVDtype(4, "token_head")) == 36.71875


def test_tensors_of_a_layer_in_order_k_v_and_the_scales_of_k_and_of_v() -> None:
    assert KVLayout(32, 32, 128, KVDtype(8, "token_head")).tensor_bytes == (4096, 4096, 128, 128)
    assert KVLayout(32, 32, 128, KVDtype(8, "token")).tensor_bytes == (4096, 4096, 4, 4)
    assert KVLayout(32, 32, 128, v_dtype=KVDtype(4, "token_head")).tensor_bytes == (8192, 2048, 128)
    assert KVLayout(32, 32, 128, KVDtype(8, "channel"), v_dtype=KVDtype(8, "token")).tensor_bytes == (4096, 4096, 4)
    assert KVLayout(32, 32, 192, v_head_dim=128).tensor_bytes == (12_288, 8_192)


def test_constant_scales_are_loaded_and_do_not_grow() -> None:
    assert KVLayout(32, 32, 128, KVDtype(8, "tensor")).constant_scales == (("k_scale", 4), ("v_scale", 4))
    channel = KVLayout(32, 32, 128, KVDtype(8, "channel"))
    assert channel.constant_scales == (("k_scale", 8192), ("v_scale", 8192))
    assert replace(channel, tensor_parallel_size=4).constant_scales == (("k_scale", 2048), ("v_scale", 2048))
    assert KVLayout(32, 32, 128, v_dtype=KVDtype(8, "channel")).constant_scales == (("v_scale", 8192),)
    for dtype in (KVDtype(16), KVDtype(8, "token"), KVDtype(8, "token_head")):
        assert KVLayout(32, 32, 128, dtype).constant_scales == ()


def test_a_scale_per_head_is_split_over_ranks_and_one_per_token_is_not() -> None:
    per_head = KVLayout(32, 32, 128, KVDtype(8, "token_head"), tensor_parallel_size=8)
    per_token = KVLayout(32, 32, 128, KVDtype(8, "token"), tensor_parallel_size=8)
    assert per_head.tensor_bytes == (512, 512, 16, 16)
    assert per_token.tensor_bytes == (512, 512, 4, 4)


DEEPSEEK = {"num_layers": 61, "num_kv_heads": 1, "head_dim": 512 + 64, "v_head_dim": 0}


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_mla_keeps_one_tensor_of_576_elements_on_every_rank(ranks: int) -> None:
    layout = KVLayout(**DEEPSEEK, tensor_parallel_size=ranks)
    assert layout.tensor_bytes == (1152,)
    assert layout.token_bytes == 61 * 1152 == 70_272
    assert KVLayout(**DEEPSEEK, dtype=KVDtype(8, "tensor")).tensor_bytes == (576,)
    assert KVLayout(**DEEPSEEK, dtype=KVDtype(8, "tensor")).constant_scales == (("k_scale", 4),)


def test_a_layout_that_doubles_or_divides_the_latent_is_caught() -> None:
    doubled = KVLayout(61, 1, 576)
    assert doubled.token_bytes == 2 * KVLayout(**DEEPSEEK).token_bytes
    with pytest.raises(ValueError, match="v_head_dim 0 means one latent tensor: it has one head, and no v_dtype"):
        KVLayout(61, 128, 576, v_head_dim=0)
    with pytest.raises(ValueError, match="no v_dtype"):
        KVLayout(**DEEPSEEK, v_dtype=KVDtype(8))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(1, None), (127, None), (128, 65)])
def test_a_head_must_be_whole_bytes(head_dim: int, v_head_dim: int | None) -> None:
    with pytest.raises(ValueError, match=r"a head of \d+ elements of 4 bits is no whole number of bytes"):
        KVLayout(1, 1, head_dim, KVDtype(4), v_head_dim=v_head_dim)


class ForgetsScales(KVLayout):
    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, KVDtype(self.dtype.bits)).tensor_bytes


class DividesItsLatent(KVLayout):
    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        return tuple(size // self.tensor_parallel_size for size in KVLayout(**DEEPSEEK).tensor_bytes)


def test_a_layout_that_forgets_the_scales_or_divides_the_latent_is_caught() -> None:
    dtype = KVDtype(8, "token_head")
    page = spec_page_bytes(16, 32, 128, 8, scales=True)
    assert 16 * KVLayout(32, 32, 128, dtype).layer_token_bytes == page
    assert 16 * ForgetsScales(32, 32, 128, dtype).layer_token_bytes != page
    assert KVLayout(**DEEPSEEK, tensor_parallel_size=8).token_bytes == 70_272
    assert DividesItsLatent(**DEEPSEEK, tensor_parallel_size=8).token_bytes != 70_272
