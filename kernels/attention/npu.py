"""Attention kernels on Ascend NPUs: which op does what on which family of devices, behind the one contract.

::

    family   prefill                     decode                 paged prefill          paged decode   write
    a2, a3   FIA, TND or BNSD            FIA, BSND              FIA, TND or BNSD       FIA            scatter
    310p     PFA, one sequence a call    IFA, BSND              gather, then PFA       IFA            reshape (ATB)
    910a     none: no fused attention op is documented for it

FIA takes few sizes of heads in the packed layout TND; others go in BNSD, a call for each run of equal lengths.
``NpuKernels(family, choice)`` takes another choice: version 2 of FIA, ``npu_fusion_attention`` for prefill,
``_npu_paged_attention`` for paged decode, ``_npu_reshape_and_cache`` for the write. Sources:
op-plugin 517f2e7d, torch_npu's own documents of its ops; what vllm-ascend 182b75e calls.

**None of this has run on an NPU.** Calls, names and shapes are held to the real torch_npu over an emulated driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hbmtwin.kernels.attention import npu_310p, npu_cache, npu_fia, npu_mla
from hbmtwin.kernels.attention.backends import BackendUnavailable
from hbmtwin.kernels.attention.interface import AttentionKernels
from hbmtwin.kernels.attention.npu_310p import IFA, PFA
from hbmtwin.kernels.attention.npu_cache import PAGED_ATTENTION, RESHAPE_AND_CACHE, SCATTER
from hbmtwin.kernels.attention.npu_call import NpuCall, compressed_mask
from hbmtwin.kernels.attention.npu_choice import NpuChoice, choice_for, family_of
from hbmtwin.kernels.attention.npu_fia import FIA, FIA_V2, FUSION
from hbmtwin.kernels.attention.npu_validator import check_call

if TYPE_CHECKING:
    from torch import Tensor

MAX_HELD = 4096
"""Calls that are remembered as legal, since looking at one again costs the host as much as an op: 0.3 ms."""


def kernels(backend: str) -> AttentionKernels:
    """Those of the device at hand. Raises BackendUnavailable for a family without attention ops.

    Ops come ready compiled from now on in this process, as engines have it: a 310P would else compile each new shape.
    """
    npu: Any = getattr(import_module("torch"), backend)
    family = family_of(npu.get_device_name(0))
    npu.set_compile_mode(jit_compile=False)
    return NpuKernels(family, choice_for(family))


class NpuKernels:
    """Attention and KV writes by torch_npu's ops. Every call is held to the op's limits before it is first made.

    New tokens that are views, as those split off one product are, are copied, since the ops take none. Caches are not.

    Raises KernelArgumentError for what the op does not take, BackendUnavailable for an op of ATB without NNAL.
    """

    name = "npu-flash"
    device = "npu"

    def __init__(self, family: str, choice: NpuChoice) -> None:
        self.family = family
        self.choice = choice
        self._mask: Tensor | None = None
        self._held: set[tuple[Any, ...]] = set()

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
        calls = self.prefill_calls(q, k, v, q_lens=q_lens, kv_lens=kv_lens, scale=scale, window=window)
        return self._tokens(calls, q, v.shape[-1])

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> Tensor:
        """Attention of one new token per sequence over padded keys."""
        call = self.decode_call(q, k, v, kv_lens=kv_lens, scale=scale, window=window)
        return self._tokens([call], q, v.shape[-1])

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
        calls = self.paged_prefill_calls(
            *(q, k_cache, v_cache),
            block_table=block_table,
            q_lens=q_lens,
            context_lens=context_lens,
            scale=scale,
            window=window,
        )
        return self._tokens(calls, q, v_cache.shape[-1])

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
        """Attention of one new token per sequence over blocks; INT8 caches by FIA alone."""
        call = self.paged_decode_call(
            *(q, k_cache, v_cache),
            block_table=block_table,
            context_lens=context_lens,
            scale=scale,
            window=window,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return self._tokens([call], q, v_cache.shape[-1])

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> None:
        """Write new keys and values to their slots, in place."""
        self._run(self.write_call(k, v, k_cache, v_cache, slots=slots))

    def write_kv_int8(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        *,
        slots: Tensor,
    ) -> None:
        """Quantise per token, or per token and head where the scales have a dimension of heads, and write both."""
        quantised = []
        block_size = k_cache.shape[1]
        block, offset = slots.long() // block_size, slots.long() % block_size
        for new, scales in ((k, k_scale), (v, v_scale)):
            rows = new.flatten(1) if scales.ndim == 2 else new
            call = npu_cache.dynamic_quant(rows)
            check_call(call.op, call.arguments, family=self.family)
            values, scale = getattr(import_module("torch_npu"), call.op)(**call.arguments)
            if scales.ndim == 2:
                scales[block, offset] = scale
            else:
                scales[block, :, offset] = scale
            quantised.append(values.view(new.shape))
        self.write_kv(quantised[0], quantised[1], k_cache, v_cache, slots=slots)

    def mla_prefill(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        scale: float,
    ) -> Tensor:
        """MLA with expanded heads, packed: (T, N, Dv)."""
        call = npu_mla.prompt(
            *(q, q_rope, k, k_rope, v), q_lens=q_lens, kv_lens=kv_lens, scale=scale, mask=self._mask_on(q)
        )
        return self._tokens([self._of(self.choice.prefill, call)], q, v.shape[-1])

    def mla_paged_decode(
        self,
        q: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        *,
        block_table: Tensor,
        context_lens: Sequence[int],
        scale: float,
    ) -> Tensor:
        """MLA of one new token per sequence over latent blocks: (B, N, latent)."""
        call = npu_mla.latent(
            *(q, q_rope, latent_cache, rope_cache), block_table=block_table, context_lens=context_lens, scale=scale
        )
        return self._tokens([self._of(self.choice.paged_decode, call)], q, latent_cache.shape[-1])

    def prefill_calls(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        scale: float,
        window: int = 0,
    ) -> Iterator[NpuCall]:
        """The calls that :meth:`prefill` makes, in order."""
        op, (_, heads, head_dim), v_dim = self.choice.prefill, q.shape, v.shape[2]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        causal = npu_fia.causal(self._mask_on(q), window)
        lens = {"q_lens": q_lens, "kv_lens": kv_lens}
        if op == FUSION:
            yield npu_fia.fusion(q, k, v, scale=scale, mask=self._mask_on(q), window=window, **lens)
        elif op == PFA:
            for (start, end), (k_start, k_end) in zip(_spans(q_lens), _spans(kv_lens), strict=True):
                piece = q[start:end], k[k_start:k_end], v[k_start:k_end]
                yield npu_310p.prompt(*piece, scale=scale, window=window)
        elif npu_fia.packs(head_dim, v_dim, grouped=heads != k.shape[1]):
            yield self._of(op, npu_fia.packed(q, k, v, scale=scale, **lens, **causal))
        else:
            for first, last, (start, end), (k_start, k_end) in _runs(q_lens, kv_lens):
                count = last - first
                q_run, k_run, v_run = q[start:end], k[k_start:k_end], v[k_start:k_end]
                if end - start == count:
                    keys, values = (x.view(count, -1, *x.shape[1:]) for x in (k_run, v_run))
                    call = npu_fia.one(*(q_run, keys, values), kv_lens=kv_lens[first:last], scale=scale, window=window)
                else:
                    pieces = (_heads_first(x, count) for x in (q_run, k_run, v_run))
                    call = npu_fia.padded(*pieces, scale=scale, **causal)
                yield self._of(op, call)

    def decode_call(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0
    ) -> NpuCall:
        """The call that :meth:`decode` makes."""
        q = q.contiguous()
        if self.choice.decode == IFA:
            return npu_310p.incre(q, k, v, kv_lens=kv_lens, scale=scale, window=window)
        return self._of(self.choice.decode, npu_fia.one(q, k, v, kv_lens=kv_lens, scale=scale, window=window))

    def paged_prefill_calls(
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
    ) -> Iterator[NpuCall]:
        """The calls that :meth:`paged_prefill` makes, in order."""
        op, (_, heads, head_dim), (_, _, kv_heads, v_dim) = self.choice.paged_prefill, q.shape, v_cache.shape
        q = q.contiguous()
        causal = npu_fia.causal(self._mask_on(q), window)
        ones = all(length == 1 for length in q_lens)
        if op == PFA:
            for row, (start, end) in enumerate(_spans(q_lens)):
                keys, values = (
                    npu_310p.gathered(cache, block_table[row], context_lens[row]) for cache in (k_cache, v_cache)
                )
                yield npu_310p.prompt(q[start:end], keys, values, scale=scale, window=window)
        elif npu_fia.packs(head_dim, v_dim, grouped=heads != kv_heads) and not (ones and window):
            call = npu_fia.packed_paged(
                *(q, k_cache, v_cache),
                block_table=block_table,
                q_lens=q_lens,
                context_lens=context_lens,
                scale=scale,
                **causal,
            )
            yield self._of(op, call)
        else:
            for first, last, (start, end), _ in _runs(q_lens, q_lens):
                count = last - first
                paged: dict[str, Any] = {
                    "block_table": block_table[first:last],
                    "context_lens": context_lens[first:last],
                    "scale": scale,
                }
                if end - start == count:
                    call = npu_fia.one_paged(q[start:end], k_cache, v_cache, window=window, **paged)
                else:
                    q_run = _heads_first(q[start:end], count)
                    call = npu_fia.padded_paged(q_run, k_cache, v_cache, **paged, **causal)
                yield self._of(op, call)

    def paged_decode_call(
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
    ) -> NpuCall:
        """The call that :meth:`paged_decode` makes."""
        op, q = self.choice.paged_decode, q.contiguous()
        paged: dict[str, Any] = {"block_table": block_table, "context_lens": context_lens, "scale": scale}
        if op in (FIA, FIA_V2):
            call = npu_fia.one_paged(q, k_cache, v_cache, window=window, k_scale=k_scale, v_scale=v_scale, **paged)
            return self._of(op, call)
        if k_scale is not None:
            raise BackendUnavailable(f"npu: {op} takes no scales of an INT8 cache; use {FIA}, on Atlas A2 or A3")
        if op == IFA:
            return npu_310p.incre_paged(q, k_cache, v_cache, window=window, **paged)
        if window:
            raise BackendUnavailable(f"npu: {op} takes no mask and so no window; use {IFA} or {FIA}")
        return npu_cache.paged_attention(q, k_cache, v_cache, **paged)

    def write_call(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor) -> NpuCall:
        """The call that :meth:`write_kv` makes."""
        build = npu_cache.scatter if self.choice.write == SCATTER else npu_cache.reshape_and_cache
        return build(k.contiguous(), v.contiguous(), k_cache, v_cache, slots)

    def _of(self, op: str, call: NpuCall) -> NpuCall:
        return npu_fia.as_v2(call) if op == FIA_V2 else call

    def _mask_on(self, q: Tensor) -> Tensor:
        if self._mask is None or self._mask.device != q.device:
            self._mask = compressed_mask(q.device)
        return self._mask

    def _run(self, call: NpuCall) -> Any:
        if call.op in (PAGED_ATTENTION, RESHAPE_AND_CACHE) and "ATB_HOME_PATH" not in os.environ:
            raise BackendUnavailable(
                f"npu: {call.op} is of ATB, and ATB_HOME_PATH is not set; install NNAL and source its set_env.sh"
            )
        signature = call.signature()
        if signature not in self._held:
            check_call(call.op, call.arguments, family=self.family)
            if len(self._held) == MAX_HELD:
                self._held.clear()
            self._held.add(signature)
        return call.run()

    def _tokens(self, calls: Any, q: Tensor, v_dim: int) -> Tensor:
        """What the calls give, as (tokens, N, Dv)."""
        torch: Any = import_module("torch")
        heads = q.shape[1]
        parts = []
        for call in calls:
            part = self._run(call)
            layout = call.arguments.get("input_layout")
            part = part.transpose(1, 2) if layout == "BNSD" else part
            parts.append(part.reshape(-1, heads, v_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spans(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First token of each sequence and the one after its last."""
    start = 0
    for length in lens:
        yield start, start + length
        start += length


def _runs(q_lens: Sequence[int], kv_lens: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """Neighbours of equal lengths: first sequence and the one after the last, their tokens of q, of kv."""
    first = start = k_start = 0
    for (q_len, kv_len), same in groupby(zip(q_lens, kv_lens, strict=True)):
        count = sum(1 for _ in same)
        end, k_end = start + count * q_len, k_start + count * kv_len
        yield first, first + count, (start, end), (k_start, k_end)
        first, start, k_start = first + count, end, k_end


def _heads_first(x: Tensor, batch: int) -> Tensor:
    """(B * S, N, D) as (B, N, S, D): a copy."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2).contiguous()
