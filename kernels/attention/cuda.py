"""Flash attention of a CUDA device through SDPA: FlashAttention where it goes, the memory-efficient kernel elsewhere.

::

    causal, q_len = kv_len    FlashAttention (float16, bfloat16; head_dim to 256), which shares KV heads by itself
    causal, q_len < kv_len    the same through causal_lower_right
    window                    memory-efficient kernel with a mask, KV heads repeated: it takes no fewer than q's
    float32                   memory-efficient kernel, KV heads repeated

Without a device only the arithmetic can be held to the reference, with tensors on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hbmtwin.kernels.attention.interface import AttentionKernels, Backend
from hbmtwin.kernels.attention.sdpa import SdpaKernels

if TYPE_CHECKING:
    from torch import Tensor


class CudaKernels(SdpaKernels):
    """SDPA with its two fused kernels let in."""

    gathers_runs: ClassVar[bool] = True
    fused: ClassVar[tuple[str, ...]] = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION")

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        if q.element_size() > 2 or window:
            k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), 1) for tensor in (k, v))
        return super()._causal(q, k, v, scale, window)

    def _right_aligned(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right

        return self._sdpa(q, k, v, scale, mask=causal_lower_right(q.size(2), k.size(2)))


def kernels(backend: Backend) -> AttentionKernels:
    """The CUDA device's kernels."""
    return CudaKernels(f"{backend}-flash", backend)
