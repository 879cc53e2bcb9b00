"""What attention costs: the part of a cost model that depends on how the kernel works.

A kind of attention is one class with four numbers, chosen by name (:data:`ATTENTION`). Times are in ticks
(:mod:`hbmtwin.kernels.fixed_point`), for all layers of one tensor-parallel rank.
"""

from __future__ import annotations

from typing import Protocol

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import DeviceSpec, ModelShape


class AttentionCost(Protocol):
    """Time of the attention of one step. Decode is linear in the KV tokens read, so that leaps are exact sums."""

    decode_token_ticks: int
    """Per KV token that decode reads."""
    launch_ticks: int
    """Per kind of call in a step, prefill and decode apart."""

    def prefill_ticks(self, new_tokens: int, context_tokens: int) -> int:
        """*new_tokens* of one sequence over themselves (causally) and *context_tokens* before them."""
        ...


class FlashAttention:
    """Scores stay on the chip: decode reads each K and V once; prefill is bound by its FLOPs, or by that reading.

    A query sees 4 * heads * head_dim FLOPs per key (two products, multiply and add), and causally half of its own
    block. Prefill's FLOPs run at the efficiency of its matrix products.
    """

    def __init__(self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int, kv_token_bytes: int) -> None:
        bandwidth = device.memory_bandwidth_bytes_per_s * device.kv_bandwidth_efficiency
        flops_per_s = device.peak_flops_per_s * device.prefill_flops_efficiency
        heads = model.num_attention_heads // tensor_parallel_size
        pair_flops = 4 * heads * model.head_dim * model.num_layers
        self.decode_token_ticks = ticks(kv_token_bytes / bandwidth * 1e9)
        self.launch_ticks = ticks(device.attention_launch_ns * model.num_layers)
        self._pair_ticks = ticks(pair_flops / flops_per_s * 1e9)

    def prefill_ticks(self, new_tokens: int, context_tokens: int) -> int:
        """The longer of computing the pairs of query and key and of reading K and V once."""
        pairs = new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
        read = new_tokens + context_tokens
        return max(pairs * self._pair_ticks, read * self.decode_token_ticks)


ATTENTION: dict[str, type[FlashAttention]] = {"flash": FlashAttention}
"""Kinds of attention by name."""
