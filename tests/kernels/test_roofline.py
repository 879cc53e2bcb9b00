"""The default cost model: leaps are exact sums, time rises with work, and its numbers are those that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.records import BatchShape, CostModel, DeviceSpec, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.catalog import device, model

LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
QWEN3_8B = ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960)
QWEN3_32B = ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960)
LLAMA_7B = ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
LLAMA_70B = ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096)
YOUTU_2B = model("youtu-llm-2b")
GEMMA_9B = model("gemma-2-9b")

B2 = device("ascend-910b2")
A100 = device("a100-80gb")


def cost(model: ModelShape = LLAMA_8B, on: DeviceSpec = B2, tp: int = 1, attention: str = "flash") -> RooflineCost:
    elements = model.latent_dim or 2 * max(1, model.num_kv_heads // tp) * model.head_dim
    return RooflineCost(
        model, on, tensor_parallel_size=tp, kv_token_bytes=model.num_layers * elements * 2, attention=attention
    )


def decode(count: int, context: int) -> BatchShape:
    return BatchShape(decode_count=count, kv_read_tokens=count * context, kv_read_growth=count)


def later(b: BatchShape, steps: int) -> BatchShape:
    """The batch of the leap's step number *steps*."""
    return b._replace(
        kv_read_tokens=b.kv_read_tokens + steps * b.kv_read_growth,
        window_read_tokens=b.window_read_tokens + steps * b.window_read_growth,
    )


batches = st.builds(
    lambda count, context, window, growth: decode(count, context)._replace(
        window_read_tokens=count * min(context, window), window_read_growth=min(count, growth)
    ),
    st.integers(1, 256),
    st.integers(1, 20_000),
    st.integers(1, 5_000),
    st.integers(0, 256),
)
models_of_cost = st.sampled_from(
    [
        cost(),
        cost(QWEN3_8B, A100),
        cost(QWEN3_32B, B2, 4),
        cost(LLAMA_8B, replace(B2, host_step_ns=17_000_000)),
        cost(YOUTU_2B),
        cost(LLAMA_7B, A100, attention="standard"),
        cost(YOUTU_2B, A100, attention="standard"),
        cost(GEMMA_9B),
        cost(GEMMA_9B, A100, attention="standard"),
        cost(
            GEMMA_9B,
            replace(
                A100,
                matmul_overlap=0.3,
                attention_flops_efficiency=0.2,
                attention_sequence_ns=5_000,
                attention_block_tokens=256,
                elementwise_bytes_per_s=1e10,
            ),
        ),
    ]
)


def test_it_is_a_cost_model_and_says_how_far_to_trust_it() -> None:
    model: CostModel = cost()
    assert model.basis == "default, uncalibrated"


@given(models_of_cost, batches, st.integers(0, 120))
def test_a_leap_is_exactly_the_sum_of_its_steps(model: RooflineCost, b: BatchShape, k: int) -> None:
    assert model.steps(b).total_ns(k) == sum(model.steps(later(b, i)).first_ns for i in range(k))


def test_what_only_a_profile_sets_adds_what_its_words_say() -> None:
    """In plain floats: the shorter of weights and FLOPs by what does not overlap, a time per sequence and layer, and
    attention's products at their own share of the peak."""
    b, prompt = decode(64, 1000), BatchShape(((512, 1536),))
    own = {"matmul_overlap": 0.25, "attention_sequence_ns": 3_000, "attention_flops_efficiency": 0.31}
    plain, measured = cost(LLAMA_8B, A100), cost(LLAMA_8B, replace(A100, **own))
    weights = 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256 + 65 * 4096)
    streamed = weights / (A100.memory_bandwidth_bytes_per_s * A100.weight_bandwidth_efficiency) * 1e9
    flops_per_s = A100.peak_flops_per_s * A100.prefill_flops_efficiency
    multiplied = weights * 64 / flops_per_s * 1e9
    more = measured.steps(b).first_ns - plain.steps(b).first_ns
    assert more == pytest.approx(0.75 * min(streamed, multiplied) + 64 * 32 * 3_000, rel=1e-3)
    pairs = 512 * 1536 + 512 * 513 // 2
    attended = 4 * 32 * 128 * 32 * pairs / A100.peak_flops_per_s * 1e9
    slower = attended * (1 / 0.31 - 1 / A100.prefill_flops_efficiency)
    more = measured.steps(prompt).first_ns - plain.steps(prompt).first_ns
    assert more == pytest.approx(0.75 * streamed + slower + 32 * 3_000, rel=1e-3)
    blocks = cost(LLAMA_8B, replace(A100, attention_block_tokens=128))
    more = blocks.steps(prompt).first_ns - plain.steps(prompt).first_ns
    assert more == pytest.approx(attended / A100.prefill_flops_efficiency * 512 * 64 / pairs, rel=1e-3)
    passes = cost(LLAMA_8B, replace(A100, elementwise_bytes_per_s=1e9))
    values = 10 * 4096 + 3 * 14336 + 2 * 40 * 128
    for batch, tokens in ((b, 64), (prompt, 512)):
        more = passes.steps(batch).first_ns - plain.steps(batch).first_ns
        assert more == pytest.approx(tokens * 32 * values * 2, rel=1e-6)


def test_leaps_that_multiply_or_that_floor_once_are_caught() -> None:
    model, b, k = cost(), decode(64, 1000), 1000
    exact = sum(model.steps(later(b, i)).first_ns for i in range(k))
    first, last = model.steps(b).first_ns, model.steps(later(b, k - 1)).first_ns
    assert model.steps(b).total_ns(k) == exact
    assert k * first != exact
    assert k * (first + last) // 2 != exact


@given(models_of_cost, batches, st.integers(1, 10**9), st.integers(1, 10**9))
def test_leaps_add_up_however_they_are_cut(model: RooflineCost, b: BatchShape, j: int, k: int) -> None:
    assert model.steps(b).total_ns(j + k) == model.steps(b).total_ns(j) + model.steps(later(b, j)).total_ns(k)


@given(models_of_cost, batches, st.integers(-5, 10**13))
def test_steps_covering_is_the_smallest(model: RooflineCost, b: BatchShape, dt_ns: int) -> None:
    k = model.steps(b).reaching(dt_ns)[0]
    assert k >= 1
    assert model.steps(b).total_ns(k) >= dt_ns
    assert k == 1 or model.steps(b).total_ns(k - 1) < dt_ns


def test_steps_covering_meets_a_step_end_exactly() -> None:
    model, b = cost(), decode(8, 500)
    end = model.steps(b).total_ns(37)
    assert model.steps(b).reaching(end)[0] == 37
    assert model.steps(b).reaching(end + 1)[0] == 38


@given(models_of_cost, batches, st.integers(0, 64), st.integers(0, 5000))
def test_more_work_never_takes_less_time(model: RooflineCost, b: BatchShape, more: int, longer: int) -> None:
    context = b.kv_read_tokens // b.decode_count
    larger = decode(b.decode_count + more, context + longer)._replace(window_read_tokens=b.window_read_tokens + more)
    assert model.steps(larger).first_ns >= model.steps(b).first_ns >= 1
    prefill = BatchShape(prefill=((more + 1, longer),))
    assert model.steps(BatchShape(prefill=((more + 2, longer + 1),))).first_ns >= model.steps(prefill).first_ns
    assert model.steps(b._replace(prefill=prefill.prefill)).first_ns >= model.steps(b).first_ns


def test_decode_of_qwen3_8b_is_within_the_range_of_the_measured_step() -> None:
    # xLLM pull request 2053: 14.74 ms per token at batch 1, 2048 tokens in and 1024 out, so 2560 on average.
    figure = cost(QWEN3_8B).steps(decode(1, 2560)).first_ns / 1e6
    fastest = cost(QWEN3_8B, replace(B2, weight_bandwidth_efficiency=0.84, layer_overhead_ns=30_000))
    slowest = cost(QWEN3_8B, replace(B2, weight_bandwidth_efficiency=0.625, layer_overhead_ns=80_000))
    assert fastest.steps(decode(1, 2560)).first_ns < 14_740_000 < slowest.steps(decode(1, 2560)).first_ns
    assert figure == pytest.approx(14.74, rel=0.07)


def test_prefill_of_qwen3_8b_is_near_the_measured_time_to_first_token() -> None:
    # The same source: 134.8 ms for 2048 tokens.
    assert cost(QWEN3_8B).steps(BatchShape(prefill=((2048, 0),))).first_ns / 1e6 == pytest.approx(134.8, rel=0.05)


def test_decode_of_qwen3_32b_on_four_ranks_is_near_the_measured_step() -> None:
    # asc 11266: 34.2 ms per token with 8 in flight a replica, 16384 tokens in and 2048 out, full decode graph.
    assert cost(QWEN3_32B, tp=4).steps(decode(8, 17_408)).first_ns / 1e6 == pytest.approx(34.2, rel=0.15)


def test_a_short_decode_step_waits_for_the_host_and_a_prefill_for_each_layer() -> None:
    small = ModelShape("small", 4, 512, 2048, 8, 8, 64, 32000, 4096)
    assert cost(small).steps(decode(1, 10)).first_ns == 8_000_000
    many_layers = replace(small, num_layers=24)
    assert cost(many_layers).steps(BatchShape(prefill=((16, 0),))).first_ns == 24 * 650_000


def test_few_tokens_cost_the_same_until_their_flops_outlast_the_weights() -> None:
    # Peak over bandwidth: about 172 rows with the default efficiencies.
    model = cost(QWEN3_8B, replace(B2, host_layer_ns=0))
    alone = model.steps(BatchShape(decode_count=1)).first_ns
    assert model.steps(BatchShape(decode_count=150)).first_ns == alone
    assert model.steps(BatchShape(decode_count=400)).first_ns > 1.5 * alone


def test_a_late_chunk_of_a_long_prompt_is_bound_by_reading_its_context() -> None:
    model = cost(LLAMA_8B, replace(B2, host_layer_ns=0))
    near = model.steps(BatchShape(prefill=((2, 0),))).first_ns
    far = model.steps(BatchShape(prefill=((2, 100_000),))).first_ns
    assert (far - near) / 1e6 == pytest.approx(100_000 * 131_072 / 0.8e12 * 1e3, rel=1e-3)


def test_a_mixed_step_makes_two_kinds_of_attention_call() -> None:
    model = cost(LLAMA_8B, replace(A100, attention_launch_ns=1_000_000, weight_bandwidth_efficiency=1e-3))
    chunk, batch = ((4, 0),), decode(2, 10)
    mixed = model.steps(batch._replace(prefill=chunk)).first_ns
    apart = model.steps(batch).first_ns
    assert mixed - apart == pytest.approx(32_000_000, rel=1e-3)


def test_ranks_share_the_weights_and_pay_for_their_all_reduces() -> None:
    one, two = cost(tp=1).steps(decode(1, 100)).first_ns, cost(tp=2).steps(decode(1, 100)).first_ns
    assert one / 2 < two < one
    free = replace(B2, allreduce_ns={2: 0}, link_bandwidth_bytes_per_s=1e18)
    assert two - cost(on=free, tp=2).steps(decode(1, 100)).first_ns == pytest.approx(64 * 30_000, rel=0.01)


def test_ranks_without_a_figure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no all-reduce time for tensor_parallel_size 16; known sizes: 1, 2, 4, 8"):
        cost(tp=16)


def test_unknown_attention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no cost model of attention 'paged'; there are: flash, standard"):
        RooflineCost(LLAMA_8B, B2, kv_token_bytes=131_072, attention="paged")
    with pytest.raises(ValueError, match="kv_token_bytes must be at least 1, not 0"):
        RooflineCost(LLAMA_8B, B2, kv_token_bytes=0)


def test_an_empty_batch_costs_the_fixed_part_of_a_step() -> None:
    assert cost(on=A100).steps(BatchShape()).first_ns == 500_000


def test_memory_management_is_charged_per_call_sync_and_byte() -> None:
    model = cost()
    assert model.work_ns(driver_calls=3, syncs=2, copied_bytes=0, swapped_bytes=0) == 3 * 200_000 + 2 * 250_000
    copied = model.work_ns(driver_calls=0, syncs=0, copied_bytes=1 << 30, swapped_bytes=0)
    assert copied / 1e6 == pytest.approx(2 * (1 << 30) / 1.248e12 * 1e3, rel=1e-3)
    swapped = model.work_ns(driver_calls=0, syncs=0, copied_bytes=0, swapped_bytes=1 << 30)
    assert swapped / 1e6 == pytest.approx((1 << 30) / 25e9 * 1e3, rel=1e-3)
    assert model.work_ns(driver_calls=0, syncs=0, copied_bytes=0, swapped_bytes=0) == 0


def test_swapping_over_an_unknown_link_is_refused() -> None:
    model = cost(on=replace(B2, host_bandwidth_bytes_per_s=0.0))
    with pytest.raises(ValueError, match="host_bandwidth_bytes_per_s"):
        model.work_ns(driver_calls=0, syncs=0, copied_bytes=0, swapped_bytes=1)


def token_ns(c: RooflineCost) -> float:
    """What one more KV token adds to a decode step."""
    return c.attention.decode_token_ticks / 2**20


def test_standard_attention_moves_16_bytes_a_score_and_reads_k_and_v_once_where_heads_are_not_shared() -> None:
    flash, standard = cost(LLAMA_7B), cost(LLAMA_7B, attention="standard")
    scores = 32 * 32 * 16 / 1.248e12 * 1e9
    flops = 32 * 4 * 32 * 128 / (353.9e12 * B2.prefill_flops_efficiency) * 1e9
    assert token_ns(standard) - token_ns(flash) == pytest.approx(scores + flops, rel=0.01)


def test_standard_attention_writes_out_and_reads_k_and_v_of_every_query_head_where_they_are_shared() -> None:
    tp4 = {"tp": 4}
    flash, standard = cost(LLAMA_70B, **tp4), cost(LLAMA_70B, **tp4, attention="standard")
    copies = 80 * 2 * 16 * 256 * 2 / 1.248e12 * 1e9
    scores = 80 * 16 * 16 / 1.248e12 * 1e9
    flops = 80 * 4 * 16 * 128 / (353.9e12 * B2.prefill_flops_efficiency) * 1e9
    assert token_ns(standard) - token_ns(flash) == pytest.approx(copies + scores + flops, rel=0.01)
    assert token_ns(standard) > 11 * token_ns(flash)


def test_standard_prefill_makes_the_scores_that_causality_masks_too() -> None:
    model = cost(LLAMA_7B, replace(B2, host_layer_ns=0), attention="standard").attention
    square, rectangle = model.prefill_ticks(2048, 0), model.prefill_ticks(1, 2047)
    assert square - rectangle == 2047 * 2048 * (model.prefill_ticks(2, 0) - model.prefill_ticks(1, 1)) // 2
    assert square > 4 * cost(LLAMA_7B).attention.prefill_ticks(2048, 0)


def test_a_latent_is_read_once_whatever_the_heads() -> None:
    assert token_ns(cost(YOUTU_2B)) == pytest.approx(32 * 1152 / 0.8e12 * 1e9, rel=1e-3)
    written_out = replace(YOUTU_2B, latent_cache=False)
    assert token_ns(cost(written_out)) == pytest.approx(16 * 2 * 192 / 576 * token_ns(cost(YOUTU_2B)), rel=1e-3)


def test_many_heads_over_one_latent_are_bound_by_their_flops() -> None:
    many = replace(YOUTU_2B, num_attention_heads=256, num_kv_heads=256)
    flops = 32 * 2 * 256 * (576 + 512) / (353.9e12 * B2.prefill_flops_efficiency) * 1e9
    assert token_ns(cost(many)) == pytest.approx(flops, rel=0.01)
    assert token_ns(cost(many)) > 1.7 * token_ns(cost(YOUTU_2B))


def test_a_chunk_over_a_latent_context_writes_that_context_out_first() -> None:
    latent = cost(YOUTU_2B).attention.prefill_ticks
    kept = cost(replace(YOUTU_2B, latent_cache=False)).attention.prefill_ticks
    expand_ns = 4096 * 32 * 2 * 16 * 256 * 512 / (353.9e12 * B2.prefill_flops_efficiency) * 1e9
    pairs = 512 * 4096 + 512 * 513 // 2
    narrower_v = pairs * 32 * 2 * 16 * 64 / (353.9e12 * B2.prefill_flops_efficiency) * 1e9
    assert (latent(512, 4096) - kept(512, 4096)) / 2**20 == pytest.approx(expand_ns - narrower_v, rel=0.01)
    assert latent(512, 0) < kept(512, 0)
