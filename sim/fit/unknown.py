"""What stands in where a question names no model or no device, and only numbers of it are known.

::

    --num-layers 32 --num-kv-heads 8 --head-dim 128    a model whose KV is known, and whose weights must be given
    --total-memory-bytes 24GiB                         a device whose memory is known
    --available-kv-bytes 10GiB                         a device of which nothing is: no rule subtracts anything
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines import EngineRules
from hbmtwin.sim.engines.figures import NOTHING
from hbmtwin.sim.fit.options import FitError

GIVEN = "given sizes"
"""Name of a model or device of which only numbers are known."""


def without_a_device(rules: EngineRules) -> EngineRules:
    """*rules* where only what is left for KV is known: nothing is estimated of what lies beside it."""
    return replace(
        rules,
        claims_free=False,
        run_time_sampler_bytes=0,
        group_context_bytes=0,
        moe_context_bytes=0,
        late_bytes=NOTHING,
        late_group_bytes=NOTHING,
    )


def unknown_model(num_layers: int, num_kv_heads: int, head_dim: int, ranks: int) -> ModelShape:
    """A model of which only the KV is known: the rest of its sizes stand in, and what rests on them must be given.

    It has as many query heads as go over *ranks*. Raise FitError where its KV heads can be neither split nor copied.
    """
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise FitError(
            f"--tensor-parallel-size: {num_kv_heads} KV heads are split over a number of ranks that divides it, or "
            f"copied over a multiple of it, not over {ranks}"
        )
    query_heads = lcm(num_kv_heads, ranks)
    return ModelShape(
        name=GIVEN,
        num_layers=num_layers,
        hidden_size=query_heads * head_dim,
        intermediate_size=0,
        num_attention_heads=query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=0,
        max_position_embeddings=1 << 24,
        rotary_dim=0,
        source="given",
    )


def unknown_device(total_bytes: int, vendor: str) -> DeviceSpec:
    """A device of which only the memory is known, if that."""
    return DeviceSpec(
        name=GIVEN,
        vendor=vendor,
        memory_bytes=total_bytes,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s=1.0,
        weight_bandwidth_efficiency=1.0,
        kv_bandwidth_efficiency=1.0,
        prefill_flops_efficiency=1.0,
        attention_launch_ns=0,
        layer_overhead_ns=0,
        step_overhead_ns=0,
        sources={"context_bytes": "unknown: nothing was said of the device"},
    )
