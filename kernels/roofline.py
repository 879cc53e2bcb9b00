"""The default cost model: a roofline over weights, KV, FLOPs, communication and host time."""

from __future__ import annotations

from hbmtwin.kernels.attention_cost import ATTENTION, AttentionCost
from hbmtwin.kernels.fixed_point import FRACTION_BITS, TICKS_PER_NS, sum_of_steps, ticks
from hbmtwin.kernels.mamba_cost import MambaCost
from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape
from hbmtwin.kernels.weights import check_tensor_parallel, embedding_bytes, streamed_bytes


class RooflineCost:
    """Step time of one tensor-parallel rank, from the coefficients of a :class:`DeviceSpec`.

    ``t = max(t_host, t_dev)``, as with asynchronous scheduling, and ``t_dev`` is the sum of

    - a fixed part per step and per layer;
    - the dense matrices: the longer of streaming the weights once and of their FLOPs (2 per weight and token; the
      head works for one row a sequence);
    - attention: launches, KV read by decode, prefill (:mod:`hbmtwin.kernels.attention_cost`);
    - states of Mamba-2 layers: launches, reading and writing, prefill (:mod:`hbmtwin.kernels.mamba_cost`);
    - an all-reduce behind every attention, mixer and MLP: a latency, and the bytes over the link as a ring sends them.

    ``t_host`` is a floor: per step where decode replays one graph, per layer where the step prefills. All is in ticks
    (:mod:`hbmtwin.kernels.fixed_point`), and linear in the step index of a leap.

    *kv_token_bytes* are the bytes of one token's KV on this rank, all layers. Raise ValueError for a kind of attention,
    a split or a tensor-parallel size without figures.
    """

    basis = "default, uncalibrated"

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
        layers = model.num_blocks / 2  # overheads are those of layers with a mixer and an MLP
        bandwidth = device.memory_bandwidth_bytes_per_s * device.weight_bandwidth_efficiency
        flops_per_s = device.peak_flops_per_s * device.prefill_flops_efficiency
        streamed, head = streamed_bytes(model, tp), embedding_bytes(model, tp)

        self.attention = AttentionCost(attention, model, device, tp, kv_token_bytes)
        self.mamba = MambaCost(model, device, tp)
        self._step = ticks(device.step_overhead_ns)
        self._layers = ticks(device.layer_overhead_ns * layers)
        self._weights = ticks(streamed / bandwidth * 1e9)
        self._token = ticks(2 * (streamed - head) / model.dtype_bytes / flops_per_s * 1e9)
        self._row = ticks(2 * head / model.dtype_bytes / flops_per_s * 1e9)
        self._allreduce, self._allreduce_token = _allreduce_ticks(model, device, tp)
        self._host_decode = max(TICKS_PER_NS, ticks(device.host_step_ns))
        self._host_prefill = max(self._host_decode, ticks(device.host_layer_ns * layers))

        self._driver_call = ticks(device.driver_call_ns)
        self._sync = ticks(device.sync_ns)
        self._copied_byte = ticks(2 / bandwidth * 1e9)
        host = device.host_bandwidth_bytes_per_s
        self._swapped_byte = ticks(1 / host * 1e9) if host else None

    def step_ns(self, b: BatchShape) -> int:
        """Time of one step, at least 1. O(number of prefilling sequences)."""
        return max(self._host(b), self._device(b)) >> FRACTION_BITS

    def leap_ns(self, b: BatchShape, k: int) -> int:
        """Exactly the sum of *k* consecutive steps; 0 for k = 0. O(log k).

        Raise ValueError when *k* is negative, or above 1 for a batch that prefills: that one cannot repeat.
        """
        if k < 0:
            raise ValueError(f"a leap has at least 0 steps, not {k}")
        if k > 1 and b.prefill:
            raise ValueError(f"a batch that prefills cannot be repeated {k} times")
        rise = b.kv_read_growth * self.attention.decode_token_ticks
        rise += b.window_read_growth * self.attention.window_token_ticks
        return sum_of_steps(k, self._host(b), self._device(b), rise)

    def steps_covering(self, b: BatchShape, dt_ns: int) -> int:
        """The smallest k >= 1 with ``leap_ns(b, k) >= dt_ns``. O(log^2).

        Steps of a leap never get shorter, which bounds k by that of steps which all last as long as the first.
        Raise ValueError as :meth:`leap_ns` does.
        """
        low, high = 1, max(1, -(-dt_ns // self.step_ns(b)))
        while low < high:
            middle = (low + high) // 2
            if self.leap_ns(b, middle) >= dt_ns:
                high = middle
            else:
                low = middle + 1
        return low

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

    def _host(self, b: BatchShape) -> int:
        return self._host_prefill if b.prefill else self._host_decode

    def _device(self, b: BatchShape) -> int:
        tokens = b.tokens
        if tokens == 0:
            return self._step
        rows = b.decode_count + len(b.prefill)
        total = self._step + self._layers
        total += max(self._weights, tokens * self._token + rows * self._row)
        total += self._allreduce + tokens * self._allreduce_token
        total += rows * self.mamba.sequence_ticks
        if b.decode_count:
            total += self.mamba.launch_ticks + self.attention.launch_ticks
            total += b.kv_read_tokens * self.attention.decode_token_ticks
            total += b.window_read_tokens * self.attention.window_token_ticks
        if b.prefill:
            total += self.mamba.launch_ticks + self.attention.launch_ticks
            total += (tokens - b.decode_count) * self.mamba.prefill_token_ticks
            total += sum(self.attention.prefill_ticks(new, context) for new, context in b.prefill)
        return total


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
