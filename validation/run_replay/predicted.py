"""What was predicted for a step, and for which device: held to what is measured here.

::

    attention of a step    launches + sequences + KV read by decode + prefill, by the roofline's own coefficients
    the same device        of that vendor, and called so by its runtime; a CPU is any: its profile says which
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.kernels.fixed_point import FRACTION_BITS
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.catalog.device_table import devices_called
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.run_replay.program import batch_shape
from hbmtwin.validation.run_replay.sampling import Batch

Ints = NDArray[np.int64]

VENDORS = {"npu": "ascend", "cuda": "nvidia", "cpu": "cpu"}


def is_it(device: DeviceSpec, backend: Backend, name: str) -> bool:
    """The device of a scenario is the one that calls itself *name*; a CPU is where one was calibrated for."""
    if device.vendor != VENDORS[backend]:
        return False
    return backend == "cpu" or device.name in devices_called(name)


def predicted_attention(plan: ServerPlan, batches: Sequence[Batch]) -> Ints | None:
    """Of all layers, in ns; None where the cost model does not tell it apart. O(sequences)."""
    cost = plan.cost
    if not isinstance(cost, RooflineCost):
        return None
    found = []
    for b in batches:
        shape, ticks = batch_shape(b.new_tokens, b.context_tokens), 0
        if shape.decode_count:
            windowed = sum(
                min(c + 1, plan.window) for n, c in zip(b.new_tokens, b.context_tokens, strict=True) if n == 1
            )
            ticks += cost.attention.launch_ticks + shape.kv_read_tokens * cost.attention.decode_token_ticks
            ticks += cost.attention.sequence_ticks * shape.decode_count
            ticks += windowed * cost.attention.window_token_ticks
        if shape.prefill:
            ticks += cost.attention.launch_ticks + cost.attention.sequence_ticks * len(shape.prefill)
            ticks += sum(cost.attention.prefill_ticks(new, context) for new, context in shape.prefill)
        found.append(ticks >> FRACTION_BITS)
    return np.array(found, np.int64)
