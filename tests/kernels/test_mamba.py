"""Mamba-2 layers: parameters as published, states by hand, what they hold and what they cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hbmtwin.kernels.activations import ActivationModel, mixer_peak_bytes
from hbmtwin.kernels.mamba_cost import MambaCost, prefill_token_flops
from hbmtwin.kernels.records import BatchShape, Mamba2, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.kernels.weights import (
    layer_tensors,
    layer_weight_bytes,
    rotary_table_bytes,
    streamed_bytes,
    weight_bytes,
    weight_bytes_per_rank,
    weight_tensors,
)
from hbmtwin.sim.catalog import device

ASCEND, CUDA = device("ascend-910b2"), device("a100-80gb")
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp"}


def types(pattern: str) -> tuple[str, ...]:
    return tuple(LETTERS[letter] for letter in pattern)


GRANITE = ModelShape(
    *("granite-4.0-h-micro", 40, 2048, 8192, 32, 8, 64, 100352, 131072),
    tie_word_embeddings=True,
    rotary_dim=0,
    mamba=Mamba2(n_heads=64, d_head=64, d_state=128),
    layer_types=types("MMMMM*MMMMMMMMM*MMMMMMMMM*MMMMMMMMM*MMMM"),
)
NEMOTRON = ModelShape(
    *("nemotron-nano-9b-v2", 56, 4480, 15680, 40, 8, 128, 131072, 131072),
    gated_mlp=False,
    rotary_dim=0,
    mamba=Mamba2(n_heads=128, d_head=80, d_state=128, n_groups=8, chunk_size=128, ssm_dtype_bytes=4),
    layer_types=types("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
    mlp_in_layer=False,
)
BAMBA = ModelShape(
    *("bamba-9b", 32, 4096, 14336, 32, 8, 128, 128256, 4096),
    rotary_dim=64,
    mamba=Mamba2(n_heads=128, d_head=64, d_state=128),
    layer_types=tuple("attention" if i in (9, 18, 27) else "mamba" for i in range(32)),
)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parameters", "heads"),
    [(GRANITE, 3_191_396_096, 36 * 64), (NEMOTRON, 8_888_227_328, 27 * 128), (BAMBA, 9_780_235_392, 29 * 128)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters_are_those_of_the_checkpoint(shape: ModelShape, parameters: int, heads: int) -> None:
    """At 2 bytes each, but for A of each head of each mixer: fp32 in vLLM."""
    assert weight_bytes(shape) == 2 * parameters + 2 * heads


def test_the_tensors_of_a_mixer_on_one_rank_and_on_two() -> None:
    """In: gate and input of 4,096, B and C of 128, a step for each of 64 heads. Two ranks: half of all but B and C."""
    assert dict(layer_tensors(GRANITE, 1, "mamba")) == {
        "mamba.conv1d": 4352 * 4 * 2,
        "mamba.conv1d.bias": 4352 * 2,
        "mamba.in_proj": 8512 * 2048 * 2,
        "mamba.A": 64 * 4,
        "mamba.D": 64 * 2,
        "mamba.dt_bias": 64 * 2,
        "mamba.out_proj": 2048 * 4096 * 2,
        "mamba.norm": 4096 * 2,
        "mlp.gate_up_proj": 16384 * 2048 * 2,
        "mlp.down_proj": 2048 * 8192 * 2,
        "input_layernorm": 2048 * 2,
        "post_attention_layernorm": 2048 * 2,
    }
    two = dict(layer_tensors(GRANITE, 2, "mamba"))
    assert two["mamba.in_proj"] == (2 * 2048 + 2 * 128 + 32) * 2048 * 2
    assert two["mamba.conv1d"] == (2048 + 2 * 128) * 4 * 2
    eight_groups = dict(layer_tensors(NEMOTRON, 2, "mamba"))
    assert eight_groups["mamba.in_proj"] == dict(layer_tensors(NEMOTRON, 1, "mamba"))["mamba.in_proj"] // 2


def test_a_layer_of_nemotron_is_one_of_three_with_one_norm() -> None:
    kinds = Counter(name.split(".")[2] for name, _ in weight_tensors(NEMOTRON) if name.startswith("layers."))
    assert kinds["norm"] == 56
    assert kinds["self_attn"] == 2 * 4
    assert kinds["mlp"] == 2 * 25
    assert "input_layernorm" not in kinds
    assert dict(layer_tensors(NEMOTRON, 1, "mlp")) == {
        "mlp.up_proj": 15680 * 4480 * 2,
        "mlp.down_proj": 15680 * 4480 * 2,
        "norm": 4480 * 2,
    }


def test_without_rotation_there_is_no_table() -> None:
    assert (rotary_table_bytes(GRANITE), rotary_table_bytes(BAMBA)) == (0, 4096 * 64 * 2)
    assert "rotary_emb" not in dict(weight_tensors(GRANITE))
    assert weight_bytes_per_rank(GRANITE) == weight_bytes(GRANITE)


def test_what_a_step_streams_is_all_but_the_embedding_and_the_last_norm() -> None:
    assert streamed_bytes(GRANITE) == weight_bytes(GRANITE) - 2 * 2048
    assert streamed_bytes(NEMOTRON) == weight_bytes(NEMOTRON) - 2 * 4480 - 2 * 131072 * 4480


def test_ranks_must_divide_the_heads_of_mamba_too_and_several_groups() -> None:
    with pytest.raises(ValueError, match=r"64 Mamba heads and intermediate_size 8208 must divide"):
        weight_bytes_per_rank(replace(GRANITE, num_attention_heads=96, num_kv_heads=96, intermediate_size=8208), 3)
    with pytest.raises(ValueError, match=r"128 Mamba heads, 8 groups and intermediate_size"):
        weight_bytes_per_rank(replace(NEMOTRON, num_attention_heads=64, intermediate_size=8192), 16)
    assert layer_weight_bytes(GRANITE, 32, "mamba") > layer_weight_bytes(GRANITE, 1, "mamba") // 32


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_by_hand() -> None:
    """Granite: 3 x (64 x 64 + 2 x 128) inputs and 64 x 64 x 128 of the recurrence, 16 bit; Nemotron's is fp32."""
    granite, nemotron = GRANITE.mamba, NEMOTRON.mamba
    assert granite is not None
    assert nemotron is not None
    assert (granite.conv_state_bytes(), granite.ssm_state_bytes()) == (26_112, 1_048_576)
    assert GRANITE.mamba_state_bytes() == 1_074_688
    assert (nemotron.conv_state_bytes(), nemotron.ssm_state_bytes()) == (73_728, 5_242_880)
    assert BAMBA.mamba_state_bytes() == 2_147_840
    plain = replace(BAMBA, mamba=None, layer_types=())
    assert (plain.mamba_state_bytes(), plain.num_mamba_layers, plain.num_attention_layers) == (0, 0, 32)


def test_ranks_share_heads_and_repeat_a_single_group() -> None:
    granite, nemotron = GRANITE.mamba, NEMOTRON.mamba
    assert granite is not None
    assert nemotron is not None
    assert granite.ssm_state_bytes(4) == 1_048_576 // 4
    assert granite.conv_state_bytes(4) == 3 * (4096 // 4 + 2 * 128) * 2
    assert nemotron.state_bytes(8) == nemotron.state_bytes() // 8
    assert not nemotron.can_split(16)
    assert granite.can_split(16)


def test_each_group_and_each_input_of_the_convolution_is_in_its_state() -> None:
    granite = GRANITE.mamba
    assert granite is not None
    assert replace(granite, n_groups=2).conv_state_bytes() == 26_112 + 3 * 2 * 128 * 2
    assert replace(granite, d_conv=5).conv_state_bytes() == 4 * 4352 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ()}, "layer_types belong to a model with Mamba-2 layers"),
        ({"mamba": None}, "layer_types belong to a model with Mamba-2 layers"),
        ({"layer_types": types("M*")}, "has 40 layers and 2 layer_types"),
        ({"layer_types": types("M" * 40)}, "attention and of Mamba-2 are computed together only"),
        ({"layer_types": types("M*-" * 13 + "M")}, "an MLP is a layer of its own, or in every layer"),
        ({"layer_windows": (64,) * 40}, "windows and latent attention"),
    ],
)
def test_bad_shapes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GRANITE, **changes)


@pytest.mark.parametrize("sizes", [{"n_heads": 0}, {"d_conv": 1}, {"n_groups": 3}])
def test_bad_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Mamba-2"):
        Mamba2(**{"n_heads": 64, "d_head": 64, "d_state": 128, **sizes})


# -- cost --------------------------------------------------------------------------------------------------------------


def cost(shape: ModelShape, tp: int = 1) -> RooflineCost:
    return RooflineCost(shape, ASCEND, tensor_parallel_size=tp, kv_token_bytes=shape.num_attention_layers * 2048)


def test_decode_reads_and_writes_the_states_of_each_sequence() -> None:
    def step(n: int) -> int:
        return cost(GRANITE).steps(BatchShape(decode_count=n, kv_read_tokens=64_000)).first_ns

    bandwidth = ASCEND.memory_bandwidth_bytes_per_s * ASCEND.kv_bandwidth_efficiency
    by_hand = 2 * 36 * 1_074_688 / bandwidth * 1e9
    assert step(20) - step(10) == pytest.approx(10 * by_hand, rel=0.001)


def test_a_state_costs_the_same_behind_any_context_and_attention_does_not() -> None:
    near = BatchShape(decode_count=8, kv_read_tokens=8 * 100, kv_read_growth=8)
    far = near._replace(kv_read_tokens=8 * 100_000)
    layers = replace(GRANITE, layer_types=types("*" + "M" * 39))
    rise = {
        s.name: cost(s).steps(far).first_ns - cost(s).steps(near).first_ns
        for s in (GRANITE, replace(layers, name="one"))
    }
    assert rise["granite-4.0-h-micro"] == pytest.approx(4 * rise["one"], rel=0.001)


@pytest.mark.parametrize("shape", [GRANITE, NEMOTRON], ids=lambda s: s.name)
def test_a_leap_is_the_exact_sum_of_its_steps(shape: ModelShape) -> None:
    model = cost(shape)
    b = BatchShape(decode_count=7, kv_read_tokens=7 * 900, kv_read_growth=7)
    steps = [model.steps(b._replace(kv_read_tokens=b.kv_read_tokens + 7 * i)).first_ns for i in range(300)]
    assert model.steps(b).total_ns(300) == pytest.approx(sum(steps), abs=300)
    assert model.steps(b).total_ns(300) == sum(
        model.steps(b).total_ns(i + 1) - model.steps(b).total_ns(i) for i in range(300)
    )


def test_flops_of_a_chunk_by_hand() -> None:
    """256 tokens: in each of 64 heads inputs of 64 and a state of 128, one group of B and C; a window of 4."""
    granite = GRANITE.mamba
    assert granite is not None
    with_all = 2 * 256 * 128 + 64 * 2 * 256 * 64
    state = 64 * (2 * 128 * 64 + 2 * 128 * 64)
    assert prefill_token_flops(granite) == with_all + state + 2 * 4 * 4352
    assert prefill_token_flops(granite, 2) == (with_all - 65536) // 2 + 65536 + state // 2 + 2 * 4 * (2048 + 256)


def test_prefill_is_linear_in_tokens() -> None:
    mamba = MambaCost(GRANITE, ASCEND, 1)
    flops_per_s = ASCEND.peak_flops_per_s * ASCEND.prefill_flops_efficiency
    granite = GRANITE.mamba
    assert granite is not None
    assert mamba.prefill_token_ticks == pytest.approx(
        36 * prefill_token_flops(granite) / flops_per_s * 1e9 * 2**20, rel=0.01
    )
    assert MambaCost(replace(BAMBA, mamba=None, layer_types=()), ASCEND, 1).launch_ticks == 0


def test_overheads_of_nemotron_are_those_of_28_layers_with_a_mixer_and_an_mlp() -> None:
    assert (NEMOTRON.num_blocks, GRANITE.num_blocks) == (56, 80)
    empty = replace(ASCEND, attention_launch_ns=0, step_overhead_ns=0, host_step_ns=0, host_layer_ns=0)
    still = replace(empty, layer_overhead_ns=0)
    b = BatchShape(decode_count=1, kv_read_tokens=10)
    with_it, without = (
        RooflineCost(NEMOTRON, d, kv_token_bytes=4 * 4096).steps(b).first_ns
        for d in (replace(empty, layer_overhead_ns=1000), still)
    )
    assert with_it - without == pytest.approx(28_000, abs=1)


def test_the_sums_of_a_gated_norm_with_one_group_are_reduced_over_ranks() -> None:
    b = BatchShape(decode_count=1, kv_read_tokens=10)
    slow = replace(ASCEND, allreduce_ns={**ASCEND.allreduce_ns, 2: ASCEND.allreduce_ns[2] + 10_000})

    def rise(shape: ModelShape) -> int:
        return sum(
            sign * RooflineCost(shape, d, tensor_parallel_size=2, kv_token_bytes=4096).steps(b).first_ns
            for sign, d in ((1, slow), (-1, ASCEND))
        )

    assert rise(GRANITE) == pytest.approx((80 + 36) * 10_000, abs=2)
    assert rise(NEMOTRON) == pytest.approx(56 * 10_000, abs=2)


# -- activations -------------------------------------------------------------------------------------------------------


def test_programs_follow_the_types_of_the_layers() -> None:
    p = ActivationModel(NEMOTRON, ASCEND, tensor_parallel_size=1, attention="flash").program(
        BatchShape(prefill=((1000, 0),))
    )
    assert len(p.layers) == 56
    assert [sum(i.verb == "grow" for i in layer) for layer in p.layers].count(1) == 4
    assert len({id(layer) for layer in p.layers}) == 3
    names = [i.name for i in p.layers[0] if i.verb == "malloc"]
    assert names == [
        *("normed", "projected", "mixed", "convolved", "chunk_states", "chunk_products", "gated", "out_proj")
    ]
    for layer in p.layers:
        live = Counter(i.name for i in layer if i.verb == "malloc")
        live.subtract(i.name for i in layer if i.verb == "free")
        assert not any(live.values())


def test_what_a_mixer_holds_by_hand() -> None:
    """1,000 tokens of Granite: 4 chunks of 256; a decode step has none."""
    program = ActivationModel(GRANITE, CUDA, tensor_parallel_size=1, attention="flash").program
    sizes = {i.name: i.size for i in program(BatchShape(prefill=((1000, 0),))).layers[0] if i.verb == "malloc"}
    assert sizes["projected"] == 1000 * (4096 + 4352 + 64) * 2
    assert sizes["convolved"] == 1000 * 4352 * 2
    assert sizes["mixed"] == sizes["gated"] == 1000 * 4096 * 2
    assert sizes["chunk_states"] == 4 * 64 * 64 * 128 * 4
    assert sizes["chunk_products"] == 4 * 256 * 256 * 4
    decode = program(BatchShape(decode_count=10, kv_read_tokens=100)).layers[0]
    assert not any(i.name.startswith("chunk") for i in decode)
    granite = GRANITE.mamba
    assert granite is not None
    peak = 1000 * (8512 + 4096 + 4352) * 2 + 4 * 64 * 64 * 128 * 4 + 4 * 256 * 256 * 4
    assert mixer_peak_bytes(granite, 1000, 2, 1) == peak
