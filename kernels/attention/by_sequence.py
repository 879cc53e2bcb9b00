"""Ragged and paged attention from an op that knows neither: sequence by sequence, over keys cut or gathered for it.

::

    prefill         | seq 0 | seq 1    | seq 2 |        one call each, causal
    decode          kv_lens 7 7 7 9 9 4                 one call for each run of neighbours of one length: 3 calls
    paged           table row -> its blocks, gathered to one piece (INT8: times its scales) -> the same as above;
                    a sequence at a time on a CPU, whose cache then holds it, a run at a time where calls are dear

Nothing padded is ever computed, so no mask hides padding. In decode the N / Nkv query heads of one KV head are rows of
one matrix against its keys, which are then read once: 3 to 10 times faster on a CPU than a call with ``enable_gqa``.
A gather copies the context (read, write, and read again by attention), which an op with a block table does not: times
of paged calls here are those of gather and attention together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class BySequence(ABC):
    """Kernels of which a subclass gives attention over one sequence, and over rows that see all keys."""

    gathers_runs: ClassVar[bool] = False
    """Whether paged decode gathers a run of sequences of one length at once."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device

    @abstractmethod
    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """(1, N, q_len, D) over (1, Nkv, kv_len, D), causal and right-aligned; *window* 0 or below kv_len."""

    @abstractmethod
    def _rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(B, Nkv, rows, D) over (B, Nkv, S, D): every row sees every key."""

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
        out = q.new_empty(q.size(0), q.size(1), v.size(-1))
        at = 0
        for mine, (q_len, kv_len) in zip(_spans(q_lens), zip(q_lens, kv_lens, strict=True), strict=True):
            out[mine] = self._sequence(q[mine], k[at : at + kv_len], v[at : at + kv_len], q_len, scale, window)
            at += kv_len
        return out

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> Tensor:
        """Attention of one new token per sequence over padded keys."""
        out = q.new_empty(q.size(0), q.size(1), v.size(-1))
        for rows, kv_len in _runs(kv_lens):
            seen = slice(max(0, kv_len - window) if window else 0, kv_len)
            out[rows] = self._tokens(q[rows], k[rows, seen], v[rows, seen], scale)
        return out

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
        out = q.new_empty(q.size(0), q.size(1), v_cache.size(-1))
        for i, (mine, q_len, length) in enumerate(zip(_spans(q_lens), q_lens, context_lens, strict=True)):
            oldest = max(0, length - q_len - window + 1) if window else 0
            one = block_table[i : i + 1]
            k, v = _gathered(k_cache, one, oldest, length)[0], _gathered(v_cache, one, oldest, length)[0]
            out[mine] = self._sequence(q[mine], k, v, q_len, scale, window)
        return out

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
        out = q.new_empty(q.size(0), q.size(1), v_cache.size(-1))
        singles = ((slice(i, i + 1), length) for i, length in enumerate(context_lens))
        for rows, length in _runs(context_lens) if self.gathers_runs else singles:
            oldest = max(0, length - window) if window else 0
            k, v = (
                _gathered(cache, block_table[rows], oldest, length)
                if scales is None
                else _dequantised(cache, scales, block_table[rows], oldest, length).to(q.dtype)
                for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
            )
            out[rows] = self._tokens(q[rows], k, v, scale)
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> None:
        """Write new keys and values to their slots, in place."""
        at = slots.long()
        k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, at, k)
        v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, at, v)

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor, q_len: int, scale: float, window: int) -> Tensor:
        """(q_len, N, D) over (kv_len, Nkv, D)."""
        kv_len = k.size(0)
        if q_len == 1:
            k, v = (k[-window:], v[-window:]) if window else (k, v)
            return self._tokens(q, k[None], v[None], scale)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return self._causal(q, k, v, scale, window if window < kv_len else 0)[0].transpose(0, 1)

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(B, N, D) over (B, S, Nkv, D), all of whose keys are seen."""
        num_heads, num_kv_heads = q.size(1), k.size(2)
        rows = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        return self._rows(rows, k.transpose(1, 2), v.transpose(1, 2), scale).flatten(1, 2)


def _spans(lens: Sequence[int]) -> Iterator[slice]:
    """Where each of the sequences that lie one behind the other is."""
    at = 0
    for length in lens:
        yield slice(at, at + length)
        at += length


def _runs(lens: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Neighbours of one length, which go in one call without a copy."""
    at = 0
    for length, same in groupby(lens):
        count = sum(1 for _ in same)
        yield slice(at, at + count), length
        at += count


def _gathered(cache: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """Tokens *start* to *stop* of the sequences of *block_table*, (B, tokens, ...); only their blocks are read."""
    block_size = cache.size(1)
    first = start // block_size
    blocks = block_table[:, first : -(-stop // block_size)]
    tokens = cache.index_select(0, blocks.flatten()).unflatten(0, tuple(blocks.shape)).flatten(1, 2)
    return tokens[:, start - first * block_size : stop - first * block_size]


def _dequantised(cache: Tensor, scales: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """The same of an INT8 cache, in float32: times a scale per token, or per token and head."""
    per_token = scales[:, :, None] if scales.dim() == 2 else scales.transpose(1, 2)
    return (
        _gathered(cache, block_table, start, stop).float() * _gathered(per_token, block_table, start, stop)[..., None]
    )
