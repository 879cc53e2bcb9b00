"""A step through the stages of a pipeline: worked by hand, exact in leaps, and never faster than one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.pipeline_cost import PipelineCost
from hbmtwin.kernels.records import BatchShape, CostModel, DeviceSpec, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.sim.catalog import device, model
from hbmtwin.sim.kv_layout import kv_layout

LLAMA_8B, GEMMA_9B, LLAMA_70B = model("llama-3.1-8b"), model("gemma-2-9b"), model("llama-2-70b")
A100, B2 = device("a100-80gb"), device("ascend-910b2")
BARE = replace(A100, host_step_ns=0, host_layer_ns=0)


def pipeline(shape: ModelShape = LLAMA_8B, on: DeviceSpec = BARE, pp: int = 2, tp: int = 1) -> PipelineCost:
    stages = stage_shapes(shape, stage_layers(shape.num_layers, pp))
    sizes = [kv_layout(stage, tensor_parallel_size=tp).token_bytes for stage in stages]
    return PipelineCost(stages, on, tensor_parallel_size=tp, kv_token_bytes=sizes)


def roofline(shape: ModelShape = LLAMA_8B, on: DeviceSpec = BARE, tp: int = 1) -> RooflineCost:
    size = kv_layout(shape, tensor_parallel_size=tp).token_bytes
    return RooflineCost(shape, on, tensor_parallel_size=tp, kv_token_bytes=size)


def decode(count: int, context: int) -> BatchShape:
    return BatchShape(decode_count=count, kv_read_tokens=count * context, kv_read_growth=count)


def sends_ns(cost: PipelineCost, b: BatchShape, one: RooflineCost) -> int:
    return cost.steps(b).first_ns - one.steps(b).first_ns


def test_between_two_stages_lie_two_messages() -> None:
    # 64 tokens, hidden states and residual of 4096 values of 2 bytes: 1 MiB each way over 205 GB/s, twice 21 us.
    cost: CostModel = pipeline()
    assert cost.basis == "default, uncalibrated"
    assert sends_ns(pipeline(), decode(64, 1000), roofline()) == pytest.approx(2 * 21_000 + 1_048_576 / 205, abs=2)
    assert sends_ns(pipeline(pp=4), decode(64, 1000), roofline()) == pytest.approx(
        3 * (2 * 21_000 + 1_048_576 / 205), abs=4
    )


def test_ranks_of_a_stage_send_a_share_each_and_gather() -> None:
    # A half of the MiB over 205 GB/s to the peer, the other half from the neighbour over its bus, also 205 GB/s here;
    # and beside each of two messages a gather, 4.4 us.
    added = sends_ns(pipeline(tp=2), decode(64, 1000), roofline(tp=2))
    assert added == pytest.approx(2 * (21_000 + 4_400) + 1_048_576 / 205, abs=3)


def test_prefill_pays_for_each_of_its_tokens() -> None:
    one, long = BatchShape(prefill=((2048, 0),)), BatchShape(prefill=((4096, 0),))
    more = sends_ns(pipeline(on=B2), long, roofline(on=B2)) - sends_ns(pipeline(on=B2), one, roofline(on=B2))
    assert B2.host_layer_ns * 32 < roofline(on=B2).steps(one).first_ns, "the device is the longer one"
    assert more == pytest.approx(2048 * 2 * 4096 * 2 / 19.6, rel=1e-3)


def test_the_hosts_floor_and_the_step_count_once() -> None:
    slow = replace(BARE, host_step_ns=10**9, host_layer_ns=10**8)
    assert pipeline(on=slow).steps(decode(1, 10)).first_ns == 10**9
    assert pipeline(on=slow).steps(BatchShape(prefill=((8, 0),))).first_ns == 32 * 10**8
    empty = BatchShape()
    assert pipeline(pp=4).steps(empty).first_ns == roofline().steps(empty).first_ns


batches = st.builds(
    lambda count, context, window, growth: decode(count, context)._replace(
        window_read_tokens=count * min(context, window), window_read_growth=min(count, growth)
    ),
    st.integers(1, 256),
    st.integers(1, 20_000),
    st.integers(1, 5_000),
    st.integers(0, 256),
)
costs = st.sampled_from(
    [pipeline(), pipeline(pp=3, on=B2), pipeline(GEMMA_9B, pp=4), pipeline(LLAMA_70B, B2, pp=2, tp=8)]
)


@given(costs, batches, st.integers(1, 60))
def test_a_leap_is_exactly_the_sum_of_its_steps(cost: PipelineCost, b: BatchShape, k: int) -> None:
    def later(i: int) -> BatchShape:
        return b._replace(
            kv_read_tokens=b.kv_read_tokens + i * b.kv_read_growth,
            window_read_tokens=b.window_read_tokens + i * b.window_read_growth,
        )

    assert cost.steps(b).total_ns(k) == sum(cost.steps(later(i)).first_ns for i in range(k))


@given(batches, st.sampled_from([2, 3, 4]), st.sampled_from([LLAMA_8B, GEMMA_9B]))
def test_stages_together_take_as_long_as_the_model_and_the_messages(b: BatchShape, pp: int, shape: ModelShape) -> None:
    added = sends_ns(pipeline(shape, pp=pp), b, roofline(shape))
    token_ns = 2 * shape.hidden_size * 2 / 205
    assert added == pytest.approx((pp - 1) * (42_000 + b.decode_count * token_ns), rel=0.001, abs=50)


def test_a_step_that_forgets_a_stage_or_counts_its_overheads_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    b = decode(64, 1000)
    expected = (42_000 + 64 * 2 * 4096 * 2 / 205,)
    broken = pipeline()
    monkeypatch.setattr(broken, "stages", broken.stages[:1])
    assert sends_ns(broken, b, roofline()) != pytest.approx(*expected, rel=0.01)
    broken = pipeline()
    monkeypatch.setattr(broken, "_once", 0)
    assert sends_ns(broken, b, roofline()) != pytest.approx(*expected, rel=0.01)


def test_a_device_without_a_figure_for_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="a100-80gb has no figures for a message between stages"):
        pipeline(on=replace(A100, send_ns=0))
    with pytest.raises(ValueError, match="has no all-reduce time for tensor_parallel_size 16"):
        pipeline(LLAMA_70B, tp=16)
