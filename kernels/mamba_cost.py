"""What Mamba-2 layers cost in a step, beside their weights, which the roofline counts with all others.

Decode reads and writes the state of each running sequence, whatever its length, so a leap's steps are alike in this.
Prefill does so once a sequence, and computes a chunk at a time as matrices. All of it is the default, with no measured
source, confidence L; the numbers of bytes and FLOPs are those of the layer (Dao and Gu, 2024, section 6).
"""

from __future__ import annotations

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import DeviceSpec, Mamba2, ModelShape


class MambaCost:
    """Time of the Mamba-2 layers of one tensor-parallel rank in one step, in ticks; all 0 for a model without any."""

    def __init__(self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int) -> None:
        self.launch_ticks = self.sequence_ticks = self.prefill_token_ticks = 0
        if model.mamba is None:
            return
        layers = model.num_mamba_layers
        bandwidth = device.memory_bandwidth_bytes_per_s * device.kv_bandwidth_efficiency
        flops_per_s = device.peak_flops_per_s * device.prefill_flops_efficiency
        state_bytes = model.mamba.state_bytes(tensor_parallel_size) * layers
        flops = prefill_token_flops(model.mamba, tensor_parallel_size) * layers
        self.launch_ticks = ticks(device.attention_launch_ns * layers)
        """Per kind of call in a step, prefill and decode apart: as many launches as attention's."""
        self.sequence_ticks = ticks(2 * state_bytes / bandwidth * 1e9)
        """Per sequence of the step: its states are read and written, at the speed of KV."""
        self.prefill_token_ticks = ticks(flops / flops_per_s * 1e9)


def prefill_token_flops(m: Mamba2, tensor_parallel_size: int = 1) -> int:
    """FLOPs of a token of a whole chunk in one layer on one rank, multiplications and additions.

    Within a chunk every token meets every other, masked ones too: C with B in each group, then the inputs in each head.
    Between chunks a token adds to the state, and reads it. And the convolution.
    """
    tp = tensor_parallel_size
    inner = m.inner_size // tp
    within = 2 * m.chunk_size * (m.group_elements(tp) + inner)
    between = 4 * inner * m.d_state
    return within + between + 2 * m.d_conv * m.conv_channels(tp)
