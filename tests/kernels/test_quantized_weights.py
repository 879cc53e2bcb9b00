"""Bytes of quantised matrices: by hand, method by method, and which names stay in 16 bit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.layer_shapes import Weight
from hbmtwin.kernels.quantized_weights import is_unquantized, tensor_bytes
from hbmtwin.kernels.records import Experts, ModelShape, Quantization
from hbmtwin.kernels.weights import check_tensor_parallel, weight_bytes, weight_tensors

LLAMA_70B = ModelShape("llama-3.3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072)
QWEN_72B = ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, 32768)
MATRIX = Weight("mlp.down_proj", 4096, 14336, linear=True)

CHANNEL = Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8, scale_bytes=4)
TENSOR = replace(CHANNEL, group_size=-1)
BLOCK = replace(CHANNEL, block=(128, 128))
AWQ = Quantization(method="awq", weight_bits=4, group_size=128, zero_points=True)
GPTQ = replace(AWQ, method="gptq", zero_points=False)
ACT_ORDER = replace(GPTQ, input_channel_bytes=8)
ASCEND = Quantization(method="ascend", weight_bits=8, output_channel_bytes=10, input_channel_bytes=6)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (None, {"": 2 * 4096 * 14336}),
        (CHANNEL, {"": 4096 * 14336, ".weight_scale": 4 * 4096}),
        (TENSOR, {"": 4096 * 14336, ".weight_scale": 4}),
        (BLOCK, {"": 4096 * 14336, ".weight_scale": 4 * 32 * 112}),
        (AWQ, {"": 4096 * 7168, ".weight_scale": 2 * 4096 * 112, ".zero_points": 4096 * 56}),
        (GPTQ, {"": 4096 * 7168, ".weight_scale": 2 * 4096 * 112}),
        (ACT_ORDER, {"": 4096 * 7168, ".weight_scale": 2 * 4096 * 112, ".channels": 8 * 14336}),
        (ASCEND, {"": 4096 * 14336, ".weight_scale": 2 * 4096, ".channels": 10 * 4096 + 6 * 14336}),
    ],
    ids=["16 bit", "channel", "tensor", "block", "awq", "gptq", "act order", "ascend"],
)
def test_a_matrix_by_hand(q: Quantization | None, expected: dict[str, int]) -> None:
    found = {name.removeprefix("mlp.down_proj"): size for name, size in tensor_bytes(MATRIX, 2, q)}
    assert found == expected


@given(
    rows=st.integers(1, 700),
    columns=st.integers(1, 700),
    copies=st.integers(1, 9),
    bits=st.sampled_from((2, 3, 4, 8)),
    group_size=st.sampled_from((-1, 0, 32, 128)),
    block=st.sampled_from((None, (128, 128), (64, 32))),
    zero_points=st.booleans(),
)
def test_any_matrix_has_what_counting_its_scales_one_by_one_gives(
    rows: int,
    columns: int,
    copies: int,
    bits: int,
    group_size: int,
    block: tuple[int, int] | None,
    zero_points: bool,
) -> None:
    q = Quantization(
        method="any", weight_bits=bits, group_size=group_size, block=block, scale_bytes=4, zero_points=zero_points
    )

    def scale_of(row: int, column: int) -> tuple[int, int]:
        if block is not None:
            return row // block[0], column // block[1]
        return (0, 0) if group_size == -1 else (row, column // group_size if group_size else 0)

    corners = {scale_of(r, c) for r in range(rows) for c in range(0, columns, 32)} if rows * columns < 60_000 else None
    found = dict(tensor_bytes(Weight("mlp.experts.w2", rows, columns, copies, linear=True), 2, q))
    assert found["mlp.experts.w2"] == copies * ceil(rows * columns * bits / 8)
    if corners is not None:
        assert found["mlp.experts.w2.weight_scale"] == copies * 4 * len(corners)
        if zero_points:
            assert found["mlp.experts.w2.zero_points"] == copies * ceil(len(corners) * bits / 8)


def test_a_planted_scale_too_few_is_noticed() -> None:
    odd = Weight("mlp.down_proj", 4096, 14337, linear=True)
    scales = dict(tensor_bytes(odd, 2, GPTQ))["mlp.down_proj.weight_scale"]
    assert scales != 2 * 4096 * (14337 // 128)
    assert scales == 2 * 4096 * ceil(14337 / 128)


def test_embedding_head_norms_and_routers_keep_their_dtype() -> None:
    mixture = replace(
        LLAMA_70B, quantization=AWQ, experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=14336)
    )
    plain = replace(mixture, quantization=None)
    before, after = dict(weight_tensors(plain)), dict(weight_tensors(mixture))
    for name in ("embed_tokens", "lm_head", "norm", "layers.3.input_layernorm", "layers.3.mlp.gate", "rotary_emb"):
        assert before[name] == after[name]
    for name in ("layers.3.self_attn.qkv_proj", "layers.3.mlp.experts.w13"):
        assert before[name] == 4 * after[name]


def test_llama_70b_in_w4a16_is_39_billion_bytes() -> None:
    layers = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672)
    rest = 2 * (2 * 128256 * 8192 + (2 * 80 + 1) * 8192)
    assert weight_bytes(replace(LLAMA_70B, quantization=GPTQ)) == layers // 2 + layers // 128 * 2 + rest


def test_groups_must_be_whole_on_each_rank_as_awq_and_gptq_assert() -> None:
    # The known refusal of Qwen2.5-72B in AWQ: 29,568 / 8 = 3,696 channels are no multiple of 128.
    check_tensor_parallel(replace(QWEN_72B, quantization=None), 8)
    check_tensor_parallel(replace(QWEN_72B, quantization=CHANNEL), 8)
    with pytest.raises(ValueError, match=r"3696 of intermediate_size a rank are no multiple of the 128"):
        check_tensor_parallel(replace(QWEN_72B, quantization=AWQ), 8)
    check_tensor_parallel(replace(QWEN_72B, quantization=AWQ, intermediate_size=29696), 8)


# -- names that stay in 16 bit -------------------------------------------------------------------------------------


def left_out(*unquantized: str) -> Quantization:
    return replace(CHANNEL, unquantized=unquantized)


@pytest.mark.parametrize(
    ("pattern", "name", "layer", "expected"),
    [
        ("mlp.down_proj", "mlp.down_proj", 7, True),
        ("down_proj", "mlp.down_proj", 7, True),
        ("layers.7.mlp.down_proj", "mlp.down_proj", 7, True),
        ("layers.7.mlp.down_proj", "mlp.down_proj", 17, False),
        ("layers.7", "self_attn.o_proj", 7, True),
        ("layers.7", "self_attn.o_proj", 70, False),
        ("gate", "mlp.gate_up_proj", 0, False),
        ("o_pro", "self_attn.o_proj", 0, False),
        ("*o_proj", "self_attn.o_proj", 0, True),
        ("*down*", "mlp.down_proj", 0, True),
        ("layers.*.self_attn*", "self_attn.o_proj", 3, True),
        ("layers.*.self_attn*", "mlp.down_proj", 3, False),
        ("*layers.1*", "mlp.down_proj", 12, True),
        ("*gate", "mlp.gate_up_proj", 0, False),
        ("experts", "mlp.experts.w13", 0, True),
        ("*shared_experts*", "mlp.shared_experts.down_proj", 0, True),
    ],
)
def test_a_name_matches_whole_parts_and_a_star_any_text(pattern: str, name: str, layer: int, expected: bool) -> None:
    assert is_unquantized(name, left_out("lm_head", pattern), layer) is expected


def test_a_fused_matrix_stays_in_16_bit_when_all_its_parts_do() -> None:
    assert not is_unquantized("self_attn.qkv_proj", left_out("q_proj", "k_proj"), 0)
    assert is_unquantized("self_attn.qkv_proj", left_out("q_proj", "k_proj", "v_proj"), 0)
    assert not is_unquantized("mlp.gate_up_proj", left_out("*gate*"), 0)
    assert is_unquantized("mlp.gate_up_proj", left_out("*mlp*"), 0)


def test_a_layer_left_out_weighs_as_before() -> None:
    whole = replace(LLAMA_70B, quantization=CHANNEL)
    but_one = replace(LLAMA_70B, quantization=left_out("layers.79.mlp.down_proj"))
    matrix = 8192 * 28672
    assert weight_bytes(but_one) - weight_bytes(whole) == matrix - 4 * 8192
