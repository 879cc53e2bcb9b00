"""What streaming the weights of routed experts costs in a step, beside those that every token passes.

::

    tokens of a step       1     8    64   512      Mixtral-8x7B: 8 experts, 2 a token
    experts that are read  2   7.2     8     8      8 (1 - (1 - 2/8)^tokens), of every layer

A step reads the experts that some token of its batch is routed to; their expected number stands for it, as if tokens
chose independently and all experts alike. A leap's steps have equally many tokens, so they are alike in this.
"""

from __future__ import annotations

from functools import lru_cache

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import DeviceSpec, Experts, ModelShape
from hbmtwin.kernels.weights import expert_bytes

EXPERT_BANDWIDTH = 0.65
"""Share of a dense matrix's bandwidth at which grouped matrices stream; range 0.4 to 0.9, confidence L: no table of ops
was found, dense figures are about a third too good for few tokens."""
SHARE_BITS = 48
"""Of the fixed point in which the share of experts is worked out, alike on every machine."""


class ExpertCost:
    """Time of the routed experts of one tensor-parallel rank, in ticks; 0 for a model without any."""

    def __init__(self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int) -> None:
        self.experts = model.experts if model.num_expert_layers else None
        self._all_ticks = 0
        if self.experts is not None:
            bandwidth = device.memory_bandwidth_bytes_per_s * device.weight_bandwidth_efficiency * EXPERT_BANDWIDTH
            read = expert_bytes(model, tensor_parallel_size) * self.experts.num_experts
            self._all_ticks = ticks(read / bandwidth * 1e9)

    def stream_ticks(self, tokens: int) -> int:
        """Of a step with so many tokens. O(log tokens), once for each number."""
        if self.experts is None:
            return 0
        return self._all_ticks * touched_share(self.experts, tokens) >> SHARE_BITS


@lru_cache(maxsize=1 << 14)
def touched_share(e: Experts, tokens: int) -> int:
    """Expected share of the experts of a layer that so many tokens are routed to, times ``2 ** SHARE_BITS``."""
    one = 1 << SHARE_BITS
    missed, missed_by_one = one, one * (e.num_experts - e.experts_per_token) // e.num_experts
    while tokens:  # missed_by_one to the power of tokens, by squaring
        if tokens & 1:
            missed = missed * missed_by_one >> SHARE_BITS
        missed_by_one = missed_by_one * missed_by_one >> SHARE_BITS
        tokens >>= 1
    return one - missed
