"""Kernels whose arguments are held to the rules first.

::

    caller --arguments--> Checked --check_*--> refused: KernelArgumentError
                             '----------------> the kernels it was made of
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hbmtwin.kernels.attention import validator
from hbmtwin.kernels.attention.interface import AttentionKernels

if TYPE_CHECKING:
    from torch import Tensor


class Checked:
    """Attention kernels behind the validator. Every method raises KernelArgumentError; checks wait for the device."""

    def __init__(self, kernels: AttentionKernels) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self.device = kernels.device

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
        validator.check_prefill(q, k, v, q_lens=q_lens, kv_lens=kv_lens, scale=scale, window=window, device=self.device)
        return self.kernels.prefill(q, k, v, q_lens=q_lens, kv_lens=kv_lens, scale=scale, window=window)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> Tensor:
        """Attention of one new token per sequence over padded keys."""
        validator.check_decode(q, k, v, kv_lens=kv_lens, scale=scale, window=window, device=self.device)
        return self.kernels.decode(q, k, v, kv_lens=kv_lens, scale=scale, window=window)

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
        """Causal attention of packed new tokens over blocks."""
        validator.check_paged_prefill(
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            q_lens=q_lens,
            context_lens=context_lens,
            scale=scale,
            window=window,
            device=self.device,
        )
        return self.kernels.paged_prefill(
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            q_lens=q_lens,
            context_lens=context_lens,
            scale=scale,
            window=window,
        )

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
        """Attention of one new token per sequence over blocks, INT8 ones with their scales."""
        validator.check_paged_decode(
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            context_lens=context_lens,
            scale=scale,
            window=window,
            k_scale=k_scale,
            v_scale=v_scale,
            device=self.device,
        )
        return self.kernels.paged_decode(
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            context_lens=context_lens,
            scale=scale,
            window=window,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> None:
        """Write new keys and values to their slots, in place."""
        validator.check_write_kv(k, v, k_cache, v_cache, slots=slots, device=self.device)
        self.kernels.write_kv(k, v, k_cache, v_cache, slots=slots)
