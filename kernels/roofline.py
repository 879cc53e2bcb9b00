"""The default cost model: a roofline over weights, KV, FLOPs, communication and host time."""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.kernels.attention_cost import ATTENTION, AttentionCost
from hbmtwin.kernels.expert_cost import ExpertCost
from hbmtwin.kernels.fixed_point import FRACTION_BITS, TICKS_PER_NS, ticks
from hbmtwin.kernels.mamba_cost import MambaCost
from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.kernels.weights import check_tensor_parallel, expert_bytes, head_bytes, streamed_bytes

EIGHT_BIT_SPEEDUP = 1.2
"""FLOPs of matrices with 8-bit activations over those in 16 bit: 0.35 of an int8 peak that is twice the 16-bit one,
against 0.58 for all of prefill; range 0.9 to 1.9, confidence L (two systems on Ascend, other work included)."""
SERIAL_ONE = 1 << 20
"""Of the fixed point of the share that a device does not overlap."""
FP8_FAMILIES = frozenset({"ada", "hopper", "blackwell_rtx"})
"""Devices that multiply FP8; others unpack such weights to 16 bit."""


class RooflineCost:
    """Step time of one tensor-parallel rank of a model, or of a pipeline's stage, from the figures of a device.

    ``t = max(t_host, t_dev)``, as with asynchronous scheduling, and ``t_dev`` is the sum of

    - a fixed part per step and per layer, and what small ops take per token where the device has a figure;
    - the matrices: the longer of streaming the weights once and of their FLOPs (2 per weight and token; the head works
      for one row a sequence), and of the shorter what a device does not overlap (``matmul_overlap``). Of routed
      experts those count that the batch reads (:mod:`hbmtwin.kernels.expert_cost`) and that a token passes; quantised
      weights are read as they are stored;
    - attention: launches, KV read by decode, prefill (:mod:`hbmtwin.kernels.attention_cost`);
    - states of Mamba-2 layers: launches, reading and writing, prefill (:mod:`hbmtwin.kernels.mamba_cost`);
    - an all-reduce behind every attention, mixer and MLP: a latency, and the bytes over the link as a ring sends them.

    ``t_host`` is a floor: per step where decode replays one graph, per layer where the step prefills. All is in ticks
    (:mod:`hbmtwin.kernels.fixed_point`), and linear in the step index of a leap.

    *kv_token_bytes* are the bytes of one token's KV on this rank, all layers. Raise ValueError for a kind of attention,
    a split or a tensor-parallel size without figures.
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceSpec,
        *,
        tensor_parallel_size: int = 1,
        kv_token_bytes: int,
        attention: str = "flash",
    ) -> None:
        tp = tensor_parallel_size
        check_tensor_parallel(model, tp)
        if attention not in ATTENTION:
            raise ValueError(f"no cost model of attention {attention!r}; there are: {', '.join(ATTENTION)}")
        if kv_token_bytes < 1:
            raise ValueError(f"kv_token_bytes must be at least 1, not {kv_token_bytes}")
        self.basis = device.basis
        layers = model.num_blocks / 2  # overheads are those of layers with a mixer and an MLP
        bandwidth = device.memory_bandwidth_bytes_per_s * device.weight_bandwidth_efficiency
        flops_per_s = device.peak_flops_per_s * device.prefill_flops_efficiency * _speedup(model, device)
        streamed, head = streamed_bytes(model, tp), head_bytes(model, tp)
        plain = replace(model, quantization=None)
        passed = streamed_bytes(plain, tp) - head
        if model.experts is not None:
            passed += model.experts.experts_per_token * expert_bytes(plain, tp)

        self.attention = AttentionCost(attention, model, device, tp, kv_token_bytes)
        self.mamba = MambaCost(model, device, tp)
        self.step_ticks = ticks(device.step_overhead_ns)
        """What each step takes besides, whatever the model."""
        self._weights = ticks(streamed / bandwidth * 1e9)
        self._experts = ExpertCost(model, device, tp) if model.experts is not None else None
        self._token = ticks(2 * passed / model.dtype_bytes / flops_per_s * 1e9)
        self._row = ticks(2 * head / model.dtype_bytes / flops_per_s * 1e9)
        allreduce, self._allreduce_token = _allreduce_ticks(model, device, tp)
        self._launch = self.mamba.launch_ticks + self.attention.launch_ticks
        self._read, self._window_read = self.attention.decode_token_ticks, self.attention.window_token_ticks
        self._fixed = self.step_ticks + ticks(device.layer_overhead_ns * layers) + allreduce + self._launch
        self._token_row = self._token + self._row
        self._row_sequence = self.attention.sequence_ticks + self.mamba.sequence_ticks
        self._each_token = self._allreduce_token + _small_ops_ticks(model, device, tp)
        self._sequence = self._each_token + self._row_sequence
        self._serial = round((1 - device.matmul_overlap) * SERIAL_ONE)
        self._host_decode = max(TICKS_PER_NS, ticks(device.host_step_ns))
        self._host_prefill = max(self._host_decode, ticks(device.host_layer_ns * layers))

        self._driver_call = ticks(device.driver_call_ns)
        self._sync = ticks(device.sync_ns)
        self._copied_byte = ticks(2 / bandwidth * 1e9)
        host = device.host_bandwidth_bytes_per_s
        self._swapped_byte = ticks(1 / host * 1e9) if host else None

    def steps(self, b: BatchShape) -> StepTimes:
        """Times of the batch's steps. O(number of prefilling sequences), and none of them is repeated."""
        floor, start, rise = self.line(b)
        return StepTimes(floor, start, rise)

    def line(self, b: BatchShape) -> tuple[int, int, int]:
        """Ticks of the batch's steps: the host's floor, the device's first step, and how each next one is longer."""
        prefill, count, read, growth, window_read, window_growth = b
        if prefill:
            return self._host_prefill, self._mixed(b), 0
        if not count:
            return self._host_decode, self.step_ticks, 0
        matrices = count * self._token_row
        device = self._fixed + count * self._sequence
        streamed = self._weights if self._experts is None else self._weights + self._experts.stream_ticks(count)
        device += matrices if matrices > streamed else streamed
        if self._serial:
            device += (streamed if matrices > streamed else matrices) * self._serial // SERIAL_ONE
        device += read * self._read + window_read * self._window_read
        rise = growth * self._read + window_growth * self._window_read
        return self._host_decode, device, rise

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        """Time that memory management adds to a step; a copied byte is read and written in device memory.

        Raise ValueError when bytes are swapped and the device has no figure for its link to the host.
        """
        total = driver_calls * self._driver_call + syncs * self._sync + copied_bytes * self._copied_byte
        if swapped_bytes:
            if self._swapped_byte is None:
                raise ValueError("host_bandwidth_bytes_per_s of the device is 0: give a figure to swap over that link")
            total += swapped_bytes * self._swapped_byte
        return total >> FRACTION_BITS

    def _mixed(self, b: BatchShape) -> int:
        """Ticks of the device for a step in which somebody prefills."""
        prefill, count, read, _, window_read, _ = b
        prompts = attention = 0
        for new, context in prefill:
            prompts += new
            attention += self.attention.prefill_ticks(new, context)
        tokens, rows = count + prompts, count + len(prefill)
        streamed = self._weights if self._experts is None else self._weights + self._experts.stream_ticks(tokens)
        matrices = tokens * self._token + rows * self._row
        total = self._fixed + max(streamed, matrices) + min(streamed, matrices) * self._serial // SERIAL_ONE
        total += tokens * self._each_token + rows * self._row_sequence
        total += prompts * self.mamba.prefill_token_ticks
        if count:
            total += self._launch + read * self._read + window_read * self._window_read
        return total + attention


def small_op_values(hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Values that a layer's small ops read and write for a token: two norms and two sums, the activation, rotary."""
    return 10 * hidden_size + 3 * intermediate_size + 2 * (num_heads + num_kv_heads) * head_dim


def _small_ops_ticks(model: ModelShape, device: DeviceSpec, tp: int) -> int:
    """Of one token in all layers; 0 without a figure."""
    if not device.elementwise_bytes_per_s:
        return 0
    e, wide = model.experts, model.intermediate_size
    if e is not None:
        wide = e.experts_per_token * e.intermediate_size + e.shared_intermediate_size
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.num_kv_heads // tp)
    values = small_op_values(model.hidden_size, wide // tp, heads, kv_heads, model.head_dim) * model.num_blocks / 2
    return ticks(values * model.dtype_bytes / device.elementwise_bytes_per_s * 1e9)


def _speedup(model: ModelShape, device: DeviceSpec) -> float:
    """Of matrices whose activations are quantised too, where the device multiplies such numbers."""
    q = model.quantization
    if q is None or q.activation_bits >= 16 or (q.weight_type == "float" and device.family not in FP8_FAMILIES):
        return 1.0
    return EIGHT_BIT_SPEEDUP


def _allreduce_ticks(model: ModelShape, device: DeviceSpec, tp: int) -> tuple[int, int]:
    """Latency of a step's all-reduces, and what each token adds: 2 (tp - 1) / tp of its bytes, as a ring sends.

    The gated norm of a Mamba-2 mixer with one group has its sums reduced besides: a number a token, so a latency.
    """
    if tp == 1:
        return 0, 0
    if tp not in device.allreduce_ns or not device.link_bandwidth_bytes_per_s:
        known = ", ".join(str(size) for size in sorted(device.allreduce_ns)) or "none"
        raise ValueError(
            f"{device.name} has no all-reduce time for tensor_parallel_size {tp}; known sizes: 1, {known}. "
            "Use one of them, or add a measured figure to the device"
        )
    calls = model.num_blocks
    sums = model.num_mamba_layers if model.mamba is not None and model.mamba.n_groups == 1 else 0
    token_bytes = model.hidden_size * model.dtype_bytes * 2 * (tp - 1) / tp
    latency = ticks((calls + sums) * device.allreduce_ns[tp])
    return latency, ticks(calls * token_bytes / device.link_bandwidth_bytes_per_s * 1e9)
