"""Attention over packed, padded and paged tensors: one contract for every device, and the names of its arguments.

::

    prefill         q (sum of q_lens, N, D)     k, v (sum of kv_lens, Nkv, D or Dv), one sequence behind the other
    decode          q (B, N, D), one token each k, v (B, S, Nkv, D or Dv), kv_lens tokens of each row, then padding
    paged_prefill   q (sum of q_lens, N, D)     caches (blocks, block_size, Nkv, D or Dv), block_table (B, columns)
    paged_decode    q (B, N, D), one token each caches and table alike; INT8 caches with their scales
    write_kv        k, v (tokens, Nkv, D or Dv) caches; token i goes to slots[i] = block * block_size + offset

    all but write_kv give (tokens of q, N, Dv) in q's dtype

Causal, right-aligned: of a sequence with q_len new tokens and kv_len tokens in all, query i stands at position
p = kv_len - q_len + i and sees keys 0..p, so that the last query sees all of them. A window w > 0 leaves the last w
of these, its own key among them: keys p - w + 1..p, as vLLM's ``sliding_window``. Query head n reads KV head
n // (N / Nkv). Lengths are ints of the host, per sequence and never cumulative; what an op wants else is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["cpu", "cuda", "npu"]
Kind = Literal["flash", "standard"]
"""``flash`` is the device's fused kernel; ``standard`` writes the scores to memory, as before FlashAttention."""


class AttentionShape(NamedTuple):
    """What one layer's attention is made of, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    """torch's name of q's: ``float16``, ``bfloat16``, ``float32``."""


class AttentionKernels(Protocol):
    """Attention and KV writes of one backend. Tensors are on its device; nothing waits for the device."""

    @property
    def name(self) -> str:
        """Backend and kind, ``cpu-flash``: how reports call it."""
        ...

    @property
    def device(self) -> str:
        """torch's name of the device that the tensors are on: ``cpu``, ``cuda``, ``npu``."""
        ...

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Causal attention of packed sequences."""
        ...

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> Tensor:
        """Attention of one new token per sequence over padded keys."""
        ...

    def paged_prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor,
        q_lens: Sequence[int],
        context_lens: Sequence[int],
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Causal attention of packed new tokens over blocks; *context_lens* are all tokens, the new ones among them."""
        ...

    def paged_decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor,
        context_lens: Sequence[int],
        scale: float,
        window: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one new token per sequence over blocks.

        INT8 caches come with *k_scale* and *v_scale*, float32: (blocks, block_size) for a scale per token, or (blocks,
        Nkv, block_size) for one per token and head; a value is int8 times scale (FIA's antiquant modes 4 and 5).
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> None:
        """Write new keys and values to their slots (int32 or int64, 1-D, on the device), in place."""
        ...
