"""Attention as before FlashAttention: matmul, softmax, matmul, the scores in memory between them. The baseline.

::

    scores   (Nkv, rows, kv_len) in q's dtype    written by matmul, read and written by softmax, read by matmul
    rows     the N / Nkv query heads of a KV head times q_len

As the usual code, softmax is in float32 and its result again in q's dtype. Heads are shared by laying their queries
below each other, and sequences go one by one: K and V are not copied, as matmul does with those of several sequences
whose heads are not their first dimension. The same ops on every device that torch knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hbmtwin.kernels.attention.by_sequence import BySequence
from hbmtwin.kernels.attention.interface import AttentionKernels, Backend

if TYPE_CHECKING:
    from torch import Tensor


class StandardKernels(BySequence):
    """Attention with its scores materialised."""

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        import torch

        q_len, kv_len, num_kv_heads = q.size(2), k.size(2), k.size(1)
        back = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None] - torch.arange(kv_len, device=q.device)
        hidden = (back < 0) | (back >= window) if window else back < 0
        scores = self._scores(q.reshape(1, num_kv_heads, -1, q.size(-1)), k, scale)
        scores = scores.unflatten(2, (-1, q_len)).masked_fill_(hidden, float("-inf")).flatten(2, 3)
        return self._weighted(scores, v).view(1, -1, q_len, v.size(-1))

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        import torch

        each = zip(q, k, v, strict=True)
        return torch.stack([self._weighted(self._scores(q_one, k_one, scale), v_one) for q_one, k_one, v_one in each])

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        return q.matmul(k.transpose(-1, -2)).mul_(scale)

    @staticmethod
    def _weighted(scores: Tensor, v: Tensor) -> Tensor:
        import torch

        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype).matmul(v)


def kernels(backend: Backend) -> AttentionKernels:
    """Standard attention on any backend."""
    return StandardKernels(f"{backend}-standard", backend)
