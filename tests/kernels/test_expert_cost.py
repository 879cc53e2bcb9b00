"""Step times of experts and of quantised weights: what a batch reads, and what it computes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.expert_cost import EXPERT_BANDWIDTH, SHARE_BITS, ExpertCost, touched_share
from hbmtwin.kernels.fixed_point import FRACTION_BITS
from hbmtwin.kernels.records import BatchShape, DeviceSpec, Experts, ModelShape, Quantization
from hbmtwin.kernels.roofline import EIGHT_BIT_SPEEDUP, RooflineCost

DEVICE = DeviceSpec(
    name="round",
    vendor="nvidia",
    memory_bytes=80 << 30,
    memory_bandwidth_bytes_per_s=2e12,
    peak_flops_per_s=400e12,
    weight_bandwidth_efficiency=0.5,
    kv_bandwidth_efficiency=0.5,
    prefill_flops_efficiency=0.5,
    attention_launch_ns=0,
    layer_overhead_ns=0,
    step_overhead_ns=1000,
)
DENSE = ModelShape("dense", 4, 1024, 4096, 8, 8, 128, 32000, 4096)
EXPERTS = Experts(num_experts=16, experts_per_token=2, intermediate_size=2048)
MIXTURE = replace(DENSE, name="mixture", experts=EXPERTS)
W8A8 = Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8, scale_bytes=4)
FP8 = replace(W8A8, method="fp8", weight_type="float", group_size=-1)
W4A16 = Quantization(method="gptq", weight_bits=4, group_size=128)


def cost(model: ModelShape, device: DeviceSpec = DEVICE) -> RooflineCost:
    return RooflineCost(model, device, kv_token_bytes=1)


def decode(sequences: int) -> BatchShape:
    return BatchShape(decode_count=sequences, kv_read_tokens=sequences, kv_read_growth=sequences)


@given(num_experts=st.integers(1, 512), per_token=st.integers(1, 16), tokens=st.integers(0, 20_000))
def test_the_expected_share_of_experts_is_that_of_exact_fractions(
    num_experts: int, per_token: int, tokens: int
) -> None:
    e = Experts(num_experts=num_experts, experts_per_token=min(per_token, num_experts), intermediate_size=1)
    found = Fraction(touched_share(e, tokens), 1 << SHARE_BITS)
    exact = 1 - float(Fraction(num_experts - e.experts_per_token, num_experts)) ** tokens
    assert abs(float(found) - exact) < 1e-9
    assert touched_share(e, tokens) <= touched_share(e, tokens + 1) <= 1 << SHARE_BITS


def test_the_table_of_the_docstring() -> None:
    mixtral = Experts(num_experts=8, experts_per_token=2, intermediate_size=14336)
    read = [8 * touched_share(mixtral, tokens) / (1 << SHARE_BITS) for tokens in (0, 1, 8, 64, 512)]
    assert [round(number, 1) for number in read] == [0.0, 2.0, 7.2, 8.0, 8.0]


def test_one_token_reads_as_many_experts_as_it_passes_at_their_own_speed() -> None:
    two_experts = 2 * 4 * 3 * 1024 * 2048 * 2
    ns = two_experts / (2e12 * 0.5 * EXPERT_BANDWIDTH) * 1e9
    assert ExpertCost(MIXTURE, DEVICE, 1).stream_ticks(1) >> FRACTION_BITS == pytest.approx(ns, abs=1)
    assert ExpertCost(DENSE, DEVICE, 1).stream_ticks(1) == 0
    no_layer = replace(MIXTURE, experts=replace(EXPERTS, dense_layers=(0, 1, 2, 3)))
    assert ExpertCost(no_layer, DEVICE, 1).stream_ticks(1) == 0


def test_a_decode_step_by_hand() -> None:
    attention = 4 * 4 * 1024 * 1024
    norms_router_head = 2 * 4 * 1024 + 4 * 16 * 1024 + 32000 * 1024
    plain = 2 * (attention + norms_router_head) / (2e12 * 0.5)
    two = 2 * 2 * 4 * 3 * 1024 * 2048 / (2e12 * 0.5 * EXPERT_BANDWIDTH)
    kv = 1 / (2e12 * 0.5)
    assert cost(MIXTURE).steps(decode(1)).first_ns == pytest.approx(1000 + (plain + two + kv) * 1e9, abs=2)


def test_more_sequences_read_more_experts_and_a_dense_model_reads_as_much_for_one_as_for_many() -> None:
    one, two = (cost(MIXTURE).steps(decode(n)).first_ns for n in (1, 2))
    assert two - one > 0.8 * (one - 1000) * 0.3
    one, two = (cost(DENSE).steps(decode(n)).first_ns for n in (1, 2))
    assert two - one < 10


def test_a_token_computes_the_experts_that_it_passes_and_no_others() -> None:
    long = BatchShape(prefill=((4096, 0),))
    two_dense_widths = replace(DENSE, intermediate_size=2 * 2048)
    gap = cost(MIXTURE).steps(long).first_ns - cost(two_dense_widths).steps(long).first_ns
    router = 2 * 4 * 16 * 1024 * 4096 / 200e12 * 1e9
    assert gap == pytest.approx(router, abs=5)


@given(sequences=st.integers(1, 300), k=st.integers(1, 400))
def test_a_leap_is_the_sum_of_its_steps(sequences: int, k: int) -> None:
    times = cost(MIXTURE).steps(decode(sequences))
    total = 0
    for i in range(k):
        read = sequences + sequences * i
        step = BatchShape(decode_count=sequences, kv_read_tokens=read, kv_read_growth=sequences)
        total += cost_of_mixture.steps(step).first_ns
    assert times.total_ns(k) == total


cost_of_mixture = cost(MIXTURE)


# -- quantised weights -----------------------------------------------------------------------------------------------


def test_decode_streams_weights_as_they_are_stored() -> None:
    layers, head = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096), 2 * 32000 * 1024
    norms = 2 * 4 * 2 * 1024
    for q, size in ((None, 2 * layers), (W4A16, layers // 2 + layers // 128 * 2)):
        ns = (size + head + norms + 1) / 1e12 * 1e9 + 1000
        assert cost(replace(DENSE, quantization=q)).steps(decode(1)).first_ns == pytest.approx(ns, abs=2)


def test_prefill_in_w4a16_computes_as_in_16_bit() -> None:
    long = BatchShape(prefill=((4096, 0),))
    assert cost(replace(DENSE, quantization=W4A16)).steps(long).first_ns == cost(DENSE).steps(long).first_ns


@pytest.mark.parametrize(
    ("q", "family", "speedup"),
    [
        (W8A8, "ampere", EIGHT_BIT_SPEEDUP),
        (W8A8, "a2", EIGHT_BIT_SPEEDUP),
        (FP8, "hopper", EIGHT_BIT_SPEEDUP),
        (FP8, "blackwell_rtx", EIGHT_BIT_SPEEDUP),
        (FP8, "ampere", 1.0),  # vLLM unpacks FP8 to 16 bit there
        (FP8, "a2", 1.0),
    ],
)
def test_prefill_with_8_bit_activations_is_faster_where_the_device_multiplies_them(
    q: Quantization, family: str, speedup: float
) -> None:
    long = BatchShape(prefill=((40960, 0),))
    device = replace(DEVICE, family=family)
    plain = cost(DENSE, device).steps(long).first_ns - cost(replace(DENSE, quantization=q), device).steps(long).first_ns
    matrices = 2 * 40960 * 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096) / 200e12 * 1e9
    assert plain == pytest.approx(matrices * (1 - 1 / speedup), rel=0.01, abs=5)
