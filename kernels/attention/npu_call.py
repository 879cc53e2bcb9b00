"""One call of a torch_npu op as data, so that what is checked without a device is what runs on one.

::

    tensors --builder--> NpuCall(op, arguments by name, shape) --run--> tensor of that shape
                            |--npu_validator.check_call--> refused, with the argument, the rule and the cure
                            '--meta tensors------------> the real torch_npu's own shape (tests)

Builders stand in ``npu_fia``, ``npu_310p``, ``npu_mla``, ``npu_cache``. An argument is left out where its default is
meant. Nothing of this package has run on an NPU: signatures and shapes are held to the real torch_npu 2.13 over an
emulated driver, which computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

COMPRESSED_MASK = 2048
"""Rows and columns of the mask that sparse modes 2, 3 and 4 take in place of one of the scores' size."""
ALL_TOKENS = 2147483647
"""Of pre_tokens and next_tokens: no bound."""
ATB = ("_npu_paged_attention", "_npu_reshape_and_cache", "npu_multi_head_latent_attention")
"""Ops of namespace ``atb`` that are known here; they need the NNAL package. All others are of ``npu``."""


class NpuCall(NamedTuple):
    """An op, its arguments by name, and the shape of the tensor that comes of it; () where it writes in place."""

    op: str
    """Its name in torch_npu."""
    arguments: dict[str, Any]
    shape: tuple[int, ...]

    def signature(self) -> tuple[Any, ...]:
        """All that the limits look at, hashable: shapes, dtypes, devices, lengths, settings; no tensor's values."""
        parts: list[Any] = [self.op]
        for name, value in self.arguments.items():
            if hasattr(value, "is_contiguous"):
                parts.append((name, value.shape, value.dtype, value.device.type, value.is_contiguous()))
            else:
                parts.append((name, tuple(value) if isinstance(value, list) else value))
        return tuple(parts)

    def run(self) -> Any:
        """Call the op on the device; its first result, or what it was told to write into. Does not wait."""
        made = getattr(import_module("torch_npu"), self.op)(**self.arguments)
        if "out" in self.arguments:
            return self.arguments["out"]
        return made[0] if isinstance(made, tuple) else made


def namespace_of(op: str) -> str:
    """Where torch registers the op: ``torch.ops.npu`` or ``torch.ops.atb``."""
    return "atb" if op in ATB else "npu"


def cumulative(lens: Sequence[int]) -> list[int]:
    """``[2, 2, 3]`` as ``[2, 4, 7]``: what packed layouts take."""
    return list(accumulate(lens))


def compressed_mask(device: Any) -> Tensor:
    """True above the diagonal: True is what an op leaves out. 4 MiB; make it once."""
    import torch

    return torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool, device=device).triu(1)


def full_mask(q_len: int, kv_len: int, window: int, device: Any) -> Tensor:
    """(q_len, kv_len), True where a right-aligned causal query does not look. O(q_len x kv_len) bytes."""
    import torch

    at = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device).unsqueeze(0)
    outside = key > at
    return outside | (key <= at - window) if window else outside


def window_mask(kv_lens: Sequence[int], columns: int, window: int, device: Any) -> Tensor:
    """(B, 1, 1, columns), True outside the last *window* tokens of each row.

    For one query per sequence, where the ops ignore sparse_mode, so that a band does nothing.
    """
    import torch

    end = torch.tensor(list(kv_lens), device=device).unsqueeze(1)
    key = torch.arange(columns, device=device).unsqueeze(0)
    return ((key >= end) | (key < end - window))[:, None, None, :]
