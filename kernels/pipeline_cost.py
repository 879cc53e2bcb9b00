"""The cost of a step that passes through the stages of a pipeline, one after the other.

::

    stage 0   |layers 0-15|                                          the device's time of a step is the sum of all:
                           |send|                                    stages, each as the roofline has it, and between
    stage 1                      |layers 16-31, head|                two of them hidden states and residual
    host      |<------------ floor of one step ------------>|

An engine that keeps several batches under way computes others meanwhile; that is not in here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.kernels.fixed_point import TICKS_PER_NS, ticks
from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.kernels.step_times import StepTimes

PASSED_TENSORS = 2
"""Hidden states and residual: vLLM's models pass both on, and add them behind."""


class PipelineCost:
    """Step time of a batch that passes through *stages*, each a part of the model (:mod:`hbmtwin.kernels.stages`).

    What a step takes besides its layers counts once, and so does the host's floor: every stage's worker is told of the
    step at once. Each rank sends its share of the two tensors to its peer, and the ranks of the next stage gather them.
    Linear in the step index of a leap, as each stage is.

    *kv_token_bytes* are those of each stage's KV. Raise ValueError as :class:`RooflineCost` does, and where the device
    has no figures for a message between stages.
    """

    def __init__(
        self,
        stages: Sequence[ModelShape],
        device: DeviceSpec,
        *,
        tensor_parallel_size: int = 1,
        kv_token_bytes: Sequence[int],
        attention: str = "flash",
    ) -> None:
        tp = tensor_parallel_size
        self.basis = device.basis
        self.stages = tuple(
            RooflineCost(stage, device, tensor_parallel_size=tp, kv_token_bytes=size, attention=attention)
            for stage, size in zip(stages, kv_token_bytes, strict=True)
        )
        latency, token = _send_ns(stages[0], device, tp)
        passes = len(stages) - 1
        self._passes, self._passed_token = ticks(passes * latency), ticks(passes * token)
        self._once = passes * self.stages[0].step_ticks
        layers = sum(stage.num_blocks for stage in stages) / 2
        host_step = max(TICKS_PER_NS, ticks(device.host_step_ns))
        self._host = {False: host_step, True: max(host_step, ticks(device.host_layer_ns * layers))}

    def steps(self, b: BatchShape) -> StepTimes:
        """Times of the batch's steps. O(stages * prefilling sequences)."""
        device, rise = -self._once, 0
        for stage in self.stages:
            _, start, more = stage.line(b)
            device += start
            rise += more
        if b.tokens:
            device += self._passes + b.tokens * self._passed_token
        return StepTimes(self._host[bool(b.prefill)], device, rise)

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        """Time that memory management adds to a step, on one rank: all do theirs at once. Raise ValueError as
        :class:`RooflineCost` does."""
        return self.stages[0].work_ns(
            driver_calls=driver_calls, syncs=syncs, copied_bytes=copied_bytes, swapped_bytes=swapped_bytes
        )


def _send_ns(model: ModelShape, device: DeviceSpec, tp: int) -> tuple[float, float]:
    """Latency of passing a step's tensors to the next stage, and what each token adds.

    A gather among the ranks of a stage is half of a ring's all-reduce in bytes, and taken as one in latency.
    """
    if not device.send_ns or not device.send_bandwidth_bytes_per_s:
        raise ValueError(f"{device.name} has no figures for a message between stages: send_ns and its bandwidth")
    token_bytes = PASSED_TENSORS * model.hidden_size * model.dtype_bytes
    latency, token = float(PASSED_TENSORS * device.send_ns), token_bytes / device.send_bandwidth_bytes_per_s
    if tp > 1 and model.hidden_size % tp == 0:
        latency += PASSED_TENSORS * device.allreduce_ns[tp]
        token = token / tp + token_bytes * (tp - 1) / tp / device.link_bandwidth_bytes_per_s
    return latency, token * 1e9
