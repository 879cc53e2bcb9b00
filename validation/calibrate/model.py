"""Times of benchmark cases by the cost model's own formulas, all of them at once, as a function of its coefficients.

::

    matmul         launch + the longer of bytes / weights and FLOPs / flops, + serial of the shorter
    layer          4 launches + extra + the same of four matrices + tokens * values / elementwise
    paged_decode   attention + sequences * sequence + bytes / kv
    step           step + layers * (layer's + in_step + attention's) + the head's matrix
    prefill        attention + sequences * sequence + the longer of FLOPs / attention_flops and bytes / kv, where
                   those FLOPs count that blocks of block_tokens keys compute behind the mask

The names on the right are fitted; ``device_of`` turns them into the fields of a :class:`DeviceSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hbmtwin.kernels.roofline import small_op_values
from hbmtwin.validation.bench.records import Case, Op, work_of

Floats = npt.NDArray[np.float64]

MATRICES = 4
"""Of a layer, each of which is launched."""


class Parameter(NamedTuple):
    """One number that is fitted, and within what."""

    name: str
    start: float
    low: float
    high: float


MATMUL = (
    Parameter("launch_ns", 5e3, 1.0, 1e8),
    Parameter("weight_bytes_per_ns", 1e2, 1e-4, 1e6),
    Parameter("flops_per_ns", 1e3, 1e-3, 1e8),
    Parameter("serial", 0.5, 1e-3, 1.0),
)
LAYER = (Parameter("extra_ns", 2e4, 1.0, 1e9), Parameter("elementwise_bytes_per_ns", 1e1, 1e-4, 1e7))
ATTENTION = (
    Parameter("attention_ns", 1e4, 1.0, 1e8),
    Parameter("sequence_ns", 1e3, 1e-1, 1e8),
    Parameter("kv_bytes_per_ns", 1e2, 1e-5, 1e6),
)
STEP = (Parameter("step_ns", 1e5, 1.0, 1e10), Parameter("in_step_ns", 1e4, 1.0, 1e9))
"""``in_step_ns``: what a layer takes more between others than when it is timed alone, its code and small tensors
being in no cache by then."""
BLOCKS = (0, 64, 128, 256, 512, 1024)
"""What ``block_tokens`` is tried as."""
PREFILL = (Parameter("attention_flops_per_ns", 1e2, 1e-4, 1e8),)


class Cases:
    """The sizes of some cases of one op, in columns."""

    def __init__(self, op: Op, cases: Sequence[Case], dtype_bytes: int) -> None:
        self.op, self.dtype_bytes = op, dtype_bytes
        work = [work_of(case, dtype_bytes) for case in cases]
        named = [case.named() for case in cases]
        self.layers = np.array([n.get("num_layers", 1) for n in named], np.float64)
        self.bytes = np.array([w.read_bytes for w in work], np.float64)
        self.flops = np.array([w.flops for w in work], np.float64)
        self.sequences = np.array([n.get("batch", 0) for n in named], np.float64)
        self.new_tokens = np.array([n.get("new_tokens", 0) for n in named], np.float64)
        self.pair_flops = np.array([4 * n.get("num_heads", 0) * n.get("head_dim", 0) for n in named], np.float64)
        small = op in ("layer", "step")
        self.small_bytes = np.array([_small_bytes(n, dtype_bytes) if small else 0 for n in named], np.float64)
        kv = [2 * n.get("num_kv_heads", 0) * n.get("head_dim", 0) * dtype_bytes for n in named]
        tokens = [n.get("batch", 0) * (n.get("context_tokens", 0) + n.get("new_tokens", 0)) for n in named]
        self.kv_bytes = np.array(kv, np.float64) * np.array(tokens, np.float64)

    def times_ns(self, c: Mapping[str, float]) -> Floats:
        """Of each case."""
        if self.op == "step":
            return self._steps_ns(c)
        if self.op in ("matmul", "layer"):
            streamed, multiplied = self.bytes / c["weight_bytes_per_ns"], self.flops / c["flops_per_ns"]
            times = np.maximum(streamed, multiplied) + c["serial"] * np.minimum(streamed, multiplied)
            if self.op == "matmul":
                return c["launch_ns"] + times
            return MATRICES * c["launch_ns"] + c["extra_ns"] + times + self.small_bytes / c["elementwise_bytes_per_ns"]
        read = self.kv_bytes / c["kv_bytes_per_ns"]
        if self.op == "prefill":
            masked = self.new_tokens * np.minimum(c["block_tokens"], self.new_tokens) / 2
            masked = np.minimum(masked, self.new_tokens * (self.new_tokens - 1) / 2)
            flops = self.flops + self.sequences * self.pair_flops * masked
            read = np.maximum(read, flops / c["attention_flops_per_ns"])
        return c["attention_ns"] + self.sequences * c["sequence_ns"] + read

    def _steps_ns(self, c: Mapping[str, float]) -> Floats:
        attended = c["attention_ns"] + self.sequences * c["sequence_ns"] + self.kv_bytes / c["kv_bytes_per_ns"]
        weights = self.bytes - self.layers * self.kv_bytes
        streamed = weights / c["weight_bytes_per_ns"]
        multiplied = 2 * weights / self.dtype_bytes * self.sequences / c["flops_per_ns"]
        matrices = np.maximum(streamed, multiplied) + c["serial"] * np.minimum(streamed, multiplied)
        small = self.small_bytes / c["elementwise_bytes_per_ns"]
        fixed = MATRICES * c["launch_ns"] + c["extra_ns"] + c["in_step_ns"]
        return c["step_ns"] + matrices + self.layers * (fixed + small + attended)


def _small_bytes(n: Mapping[str, int], dtype_bytes: int) -> int:
    sizes = [n[name] for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")]
    return n.get("tokens", n.get("batch", 0)) * small_op_values(*sizes) * dtype_bytes
