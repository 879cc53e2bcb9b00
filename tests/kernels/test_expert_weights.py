"""Weights of mixtures of experts on one rank: by hand, against a second model, and what vLLM refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.layer_shapes import Split
from hbmtwin.kernels.records import Experts, ModelShape, Quantization
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.kernels.weights import (
    can_split,
    check_tensor_parallel,
    expert_bytes,
    streamed_bytes,
    weight_bytes,
    weight_bytes_per_rank,
    weight_tensors,
)

MIXTRAL = ModelShape(
    *("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768),
    experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=14336),
)
QWEN_30B = ModelShape(
    *("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, 40960),
    experts=Experts(num_experts=128, experts_per_token=8, intermediate_size=768),
)
LITE = ModelShape(
    *("deepseek-v2-lite", 27, 2048, 10944, 16, 16, 192, 102400, 163840),
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    experts=Experts(
        num_experts=64, experts_per_token=6, intermediate_size=1408, shared_intermediate_size=2816, dense_layers=(0,)
    ),
)
QWEN_MOE = ModelShape(
    *("qwen1.5-moe-a2.7b", 24, 2048, 5632, 16, 16, 128, 151936, 32768),
    experts=Experts(
        num_experts=60, experts_per_token=4, intermediate_size=1408, shared_intermediate_size=5632, shared_gate=True
    ),
)
ALL = (MIXTRAL, QWEN_30B, LITE, QWEN_MOE)


def test_a_layer_of_mixtral_by_hand() -> None:
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    layer = attention + 8 * 4096 + 8 * 3 * 4096 * 14336 + 2 * 4096
    assert weight_bytes(MIXTRAL) == 2 * (32 * layer + 2 * 32000 * 4096 + 4096) == 2 * 46_702_792_704


def test_the_first_layer_of_deepseek_is_dense_and_the_others_have_shared_experts() -> None:
    tensors = dict(weight_tensors(LITE))
    assert tensors["layers.0.mlp.gate_up_proj"] == 2 * 2 * 10944 * 2048
    assert "layers.0.mlp.gate" not in tensors
    assert tensors["layers.1.mlp.gate"] == 2 * 64 * 2048
    assert tensors["layers.1.mlp.shared_experts.gate_up_proj"] == 2 * 2 * 2816 * 2048
    assert tensors["layers.1.mlp.experts.w13"] == 2 * 64 * 2 * 1408 * 2048
    assert tensors["layers.26.mlp.experts.w2"] == 2 * 64 * 1408 * 2048
    assert "layers.26.mlp.gate_up_proj" not in tensors
    assert weight_bytes(LITE) == 2 * 15_706_484_224


def test_a_shared_expert_may_have_a_gate_and_a_router_another_dtype_and_a_bias() -> None:
    assert QWEN_MOE.experts is not None
    assert dict(weight_tensors(QWEN_MOE))["layers.5.mlp.shared_expert_gate"] == 2 * 2048
    corrected = replace(QWEN_MOE.experts, shared_gate=False, router_dtype_bytes=4, correction_bias=True)
    tensors = dict(weight_tensors(replace(QWEN_MOE, experts=corrected)))
    assert tensors["layers.5.mlp.gate"] == 4 * 60 * 2048
    assert tensors["layers.5.mlp.gate.e_score_correction_bias"] == 4 * 60
    assert "layers.5.mlp.shared_expert_gate" not in tensors


def test_latent_attention_keeps_its_absorbed_halves_beside_the_parameters() -> None:
    absorbed = [size for name, size in weight_tensors(LITE, 2) if name.endswith("absorbed")]
    assert absorbed == [2 * 8 * 256 * 512] * 27
    assert not [name for name, _ in weight_tensors(replace(LITE, latent_cache=False)) if "absorbed" in name]


# -- splits ----------------------------------------------------------------------------------------------------------


def naive_rank(m: ModelShape, tp: int, *, expert_parallel: bool, dp: int) -> int:
    """Parameters of the fullest rank, written from vLLM's rules with whole numbers of heads, columns and experts."""
    e = m.experts
    assert e is not None
    if m.kv_lora_rank:
        heads = m.num_attention_heads // tp
        attention = heads * 192 * m.hidden_size + (512 + 64) * m.hidden_size + 512
        attention += heads * 256 * 512 + m.hidden_size * heads * 128
    else:
        kv = max(m.num_kv_heads / tp, 1)
        attention = int((m.num_attention_heads / tp * 2 + 2 * kv) * m.head_dim * m.hidden_size)
    ranks = tp * dp
    one = 3 * m.hidden_size * e.intermediate_size
    if expert_parallel and ranks > 1:
        most = max(len(range(rank, e.num_experts, ranks)) for rank in range(ranks))
        routed, shared_ranks = most * one, 1 if dp > 1 and tp > 1 else tp
    else:
        routed, shared_ranks = e.num_experts * one // ranks, tp
    shared = 3 * m.hidden_size * e.shared_intermediate_size // shared_ranks
    experts = routed + shared + m.hidden_size * (e.num_experts + e.shared_gate)
    dense = len(e.dense_layers)
    total = m.num_layers * (attention + 2 * m.hidden_size) + (m.num_layers - dense) * experts
    total += dense * 3 * m.hidden_size * m.intermediate_size // tp
    return total + 2 * m.vocab_size * m.hidden_size // tp + m.hidden_size


def parameters_of_rank(m: ModelShape, tp: int, *, expert_parallel: bool, dp: int) -> int:
    ranks = tp * dp if expert_parallel else 1
    tensors = weight_tensors(m, tp, expert_ranks=ranks, data_parallel_size=dp)
    return sum(size for name, size in tensors if name != "rotary_emb" and not name.endswith("absorbed")) // 2


@given(
    m=st.sampled_from(ALL),
    tp=st.sampled_from((1, 2, 4, 8, 16)),
    dp=st.sampled_from((1, 2, 3, 4)),
    expert_parallel=st.booleans(),
)
def test_a_rank_has_what_the_naive_model_gives_it(m: ModelShape, tp: int, dp: int, expert_parallel: bool) -> None:
    if not can_split(m, tp, expert_ranks=tp * dp if expert_parallel else 1):
        return
    assert m.experts is not None
    if not expert_parallel and m.experts.intermediate_size % (tp * dp):
        with pytest.raises(ValueError, match="expert intermediate_size"):
            parameters_of_rank(m, tp, expert_parallel=False, dp=dp)
        return
    found = parameters_of_rank(m, tp, expert_parallel=expert_parallel, dp=dp)
    assert found == naive_rank(m, tp, expert_parallel=expert_parallel, dp=dp)


def test_a_planted_split_of_the_router_is_noticed() -> None:
    assert MIXTRAL.experts is not None
    wrong = parameters_of_rank(MIXTRAL, 2, expert_parallel=False, dp=1) - 32 * 8 * 4096 // 2
    assert wrong != naive_rank(MIXTRAL, 2, expert_parallel=False, dp=1)


def test_experts_that_do_not_divide_over_ranks_go_to_the_first_ones() -> None:
    assert QWEN_MOE.experts is not None
    assert [Split(1, ranks).local_experts(QWEN_MOE.experts) for ranks in (2, 7, 8, 59, 64)] == [30, 9, 8, 2, 1]


def test_expert_parallelism_keeps_as_many_bytes_where_experts_divide() -> None:
    for tp in (2, 4, 8):
        assert weight_bytes_per_rank(QWEN_30B, tp, expert_ranks=tp) == weight_bytes_per_rank(QWEN_30B, tp)


def test_without_expert_parallelism_experts_are_cut_over_data_parallel_ranks_too() -> None:
    alone = dict(weight_tensors(QWEN_30B))["layers.0.mlp.experts.w2"]
    assert dict(weight_tensors(QWEN_30B, 2, data_parallel_size=2))["layers.0.mlp.experts.w2"] == alone // 4


def test_shared_experts_are_whole_where_tokens_are_shared_out_in_a_group() -> None:
    name = "layers.1.mlp.shared_experts.down_proj"
    whole = dict(weight_tensors(LITE))[name]
    assert dict(weight_tensors(LITE, 4, expert_ranks=4))[name] == whole // 4
    assert dict(weight_tensors(LITE, 4, expert_ranks=8, data_parallel_size=2))[name] == whole


@pytest.mark.parametrize(
    ("model", "tp", "fault"),
    [
        (replace(MIXTRAL, num_kv_heads=6, num_attention_heads=36), 4, "6 KV heads over 4 ranks"),
        (QWEN_30B, 64, "32 heads over 64 ranks"),
        (replace(MIXTRAL, num_kv_heads=9, num_attention_heads=36), 3, "vocabulary over 3 ranks"),
        (LITE, 3, "16 heads over 3 ranks"),
        (
            replace(QWEN_30B, quantization=Quantization(method="fp8", weight_bits=8, block=(128, 128))),
            4,
            "192 of expert intermediate_size a rank are no multiple of the 128 that share a scale",
        ),
    ],
    ids=["KV heads", "heads", "vocabulary", "odd", "blocks"],
)
def test_what_vllm_refuses_is_refused_with_the_size_at_fault(model: ModelShape, tp: int, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel_size {tp}.*possible sizes are .*\(at fault: {fault}\)"):
        check_tensor_parallel(model, tp)


def test_the_width_of_a_dense_mlp_that_no_layer_has_does_not_count() -> None:
    assert can_split(replace(QWEN_30B, intermediate_size=6145), 2)
    assert not can_split(replace(LITE, intermediate_size=10945), 2)


def test_stages_know_which_of_their_layers_are_dense() -> None:
    first, last = stage_shapes(LITE, stage_layers(27, 2))
    assert (first.first_layer, last.first_layer) == (0, 14)
    assert (first.num_expert_layers, last.num_expert_layers) == (13, 13)
    whole = weight_bytes_per_rank(LITE) + 163840 * 64 * 2
    assert weight_bytes_per_rank(first) + weight_bytes_per_rank(last) == whole


def test_what_a_step_streams_leaves_experts_to_the_batch() -> None:
    routed = 32 * 8 * 3 * 4096 * 14336 * 2
    assert expert_bytes(MIXTRAL) * 8 == routed
    assert streamed_bytes(MIXTRAL) + routed == weight_bytes(MIXTRAL) - 2 * 32000 * 4096 - 2 * 4096
    assert expert_bytes(replace(MIXTRAL, experts=None)) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_experts": 0}, "at least 1"),
        ({"experts_per_token": 9}, "at most all 8 experts, not 9"),
        ({"shared_intermediate_size": -1}, "at least 0, not -1"),
    ],
)
def test_sizes_of_experts_that_make_no_sense(wrong: dict[str, int], message: str) -> None:
    assert MIXTRAL.experts is not None
    with pytest.raises(ValueError, match=message):
        replace(MIXTRAL.experts, **wrong)
