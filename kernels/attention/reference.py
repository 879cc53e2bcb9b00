"""Attention in float64, as its definition is written: a loop over sequences, queries and KV heads, and no mask.

::

    query i of a sequence    p = kv_len - q_len + i        sees keys max(0, p - window + 1) .. p, or 0 .. p
    query head n             reads KV head n // (N / Nkv)
    out                      sum of exp(s - max s) v / sum of exp(s - max s), s = scale * (k . q)

The keys that a query sees are cut out, token by token through the block table where there is one. Nothing is shared
with the kernels that are held to it. Tensors of any device and dtype; answers are float64 on the CPU.

Complexity: O(sum of q_len * kv_len), at a few microseconds of Python a query and head: for hundreds of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hbmtwin.kernels.attention.interface import AttentionKernels

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceKernels:
    """What every kernel's answers are compared with."""

    name = "reference"
    device = "cpu"

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
        k, v = _double(k), _double(v)
        keys, values, at = [], [], 0
        for kv_len in kv_lens:
            keys.append(k[at : at + kv_len])
            values.append(v[at : at + kv_len])
            at += kv_len
        return _attention(_double(q), keys, values, q_lens, scale, window)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> Tensor:
        """Attention of one new token per sequence over padded keys."""
        k, v = _double(k), _double(v)
        keys = [k[i, :kv_len] for i, kv_len in enumerate(kv_lens)]
        values = [v[i, :kv_len] for i, kv_len in enumerate(kv_lens)]
        return _attention(_double(q), keys, values, [1] * len(kv_lens), scale, window)

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
        keys = _tokens(k_cache, None, block_table, context_lens)
        values = _tokens(v_cache, None, block_table, context_lens)
        return _attention(_double(q), keys, values, q_lens, scale, window)

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
        keys = _tokens(k_cache, k_scale, block_table, context_lens)
        values = _tokens(v_cache, v_scale, block_table, context_lens)
        return _attention(_double(q), keys, values, [1] * len(context_lens), scale, window)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> None:
        """Write new keys and values to their slots, one token after the other."""
        for new, cache in ((k, k_cache), (v, v_cache)):
            for token, slot in zip(new, slots.tolist(), strict=True):
                cache[slot // cache.size(1), slot % cache.size(1)] = token


def kernels() -> AttentionKernels:
    """The reference, as one more kind of kernels."""
    return ReferenceKernels()


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _tokens(cache: Tensor, scales: Tensor | None, block_table: Tensor, context_lens: Sequence[int]) -> list[Tensor]:
    """The tokens of each sequence, (context_len, Nkv, D), fetched one by one."""
    import torch

    cache, block_size = _double(cache), cache.size(1)
    sequences = []
    for blocks, length in zip(block_table.tolist(), context_lens, strict=True):
        tokens = []
        for position in range(length):
            block, offset = blocks[position // block_size], position % block_size
            token = cache[block, offset]
            if scales is not None and scales.dim() == 2:
                token = token * float(scales[block, offset])
            elif scales is not None:
                token = token * _double(scales[block, :, offset])[:, None]
            tokens.append(token)
        sequences.append(torch.stack(tokens))
    return sequences


def _attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], q_lens: Sequence[int], scale: float, window: int
) -> Tensor:
    """(tokens, N, D) over the keys and values of each sequence."""
    out = q.new_zeros(q.size(0), q.size(1), values[0].size(-1))
    token = 0
    for k, v, q_len in zip(keys, values, q_lens, strict=True):
        group = q.size(1) // k.size(1)
        for i in range(q_len):
            position = k.size(0) - q_len + i
            oldest = max(0, position - window + 1) if window else 0
            for head in range(k.size(1)):
                mine = slice(head * group, (head + 1) * group)
                scores = scale * (q[token, mine] @ k[oldest : position + 1, head].T)
                weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
                out[token, mine] = (weights @ v[oldest : position + 1, head]) / weights.sum(dim=1, keepdim=True)
            token += 1
    return out
