"""Flash attention through torch's ``scaled_dot_product_attention``: what a CPU and a CUDA device share.

::

    q_len = kv_len               is_causal                       the kernel leaves out what is masked
    q_len < kv_len (chunked)     right-aligned: by the device    is_causal is aligned to the upper left
    window                       masks over pieces of queries    (192, 192 + window) at most, never (q_len, kv_len)
    decode                       no mask

Only kernels that do not write the scores to memory are let in: where none takes the arguments torch raises, instead of
falling back to its ``math`` path, which is ``standard`` attention by another name. Flash kernels want one head_dim:
where K and V differ (MLA), a copy of the narrower is filled up with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from hbmtwin.kernels.attention.by_sequence import BySequence

if TYPE_CHECKING:
    from torch import Tensor

QUERY_PIECE: Final = 192
"""Queries under one mask. What the mask of a piece hides is computed, so small is good; from 192 on torch's CPU kernel
takes 64 rows at a time. Measured of 64 to 512: the least CPU time over chunks and windows, together."""


class SdpaKernels(BySequence):
    """Attention by SDPA's fused kernels."""

    fused: ClassVar[tuple[str, ...]]
    """Names in ``torch.nn.attention.SDPBackend`` of those that are let in."""

    @abstractmethod
    def _right_aligned(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of q_len < kv_len, heads first."""

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        if window:
            return self._pieces(q, k, v, scale, window)
        if q.size(2) < k.size(2):
            return self._right_aligned(q, k, v, scale)
        return self._sdpa(q, k, v, scale, causal=True)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._sdpa(q, k, v, scale)

    def _pieces(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """A mask for some queries at a time, over the keys that one of them sees."""
        import torch

        q_len, kv_len = q.size(2), k.size(2)
        out = []
        for start in range(0, q_len, QUERY_PIECE):
            piece = q[:, :, start : start + QUERY_PIECE]
            first = kv_len - q_len + start
            keys = slice(max(0, first - window + 1) if window else 0, first + piece.size(2))
            back = torch.arange(first, keys.stop, device=q.device)[:, None] - torch.arange(
                keys.start, keys.stop, device=q.device
            )
            seen = (back >= 0) & (back < window) if window else back >= 0
            out.append(self._sdpa(piece, k[:, :, keys], v[:, :, keys], scale, mask=seen))
        return torch.cat(out, dim=2)

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import pad, scaled_dot_product_attention

        head_dim, v_head_dim = q.size(-1), v.size(-1)
        width = max(head_dim, v_head_dim)
        if head_dim != v_head_dim:
            q, k, v = (pad(tensor, (0, width - tensor.size(-1))) for tensor in (q, k, v))
        with sdpa_kernel([getattr(SDPBackend, name) for name in self.fused]):
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
            )
        return out[..., :v_head_dim]
