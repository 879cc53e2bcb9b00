"""Flash attention of a CPU: torch's blocked kernel, float32, bfloat16 and float16 (float64 too).

It takes boolean masks and unequal head counts by itself (seen with torch 2.13), so that all goes through one kernel,
``_scaled_dot_product_flash_attention_for_cpu``. Blocks that a mask hides are computed nonetheless; those that
``is_causal`` hides are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hbmtwin.kernels.attention.interface import AttentionKernels, Backend
from hbmtwin.kernels.attention.sdpa import SdpaKernels

if TYPE_CHECKING:
    from torch import Tensor


class CpuKernels(SdpaKernels):
    """SDPA with nothing but the flash kernel let in."""

    fused: ClassVar[tuple[str, ...]] = ("FLASH_ATTENTION",)

    def _right_aligned(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._pieces(q, k, v, scale, 0)


def kernels(backend: Backend) -> AttentionKernels:
    """The CPU's kernels."""
    return CpuKernels(f"{backend}-flash", backend)
