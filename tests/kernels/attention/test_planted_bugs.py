"""Bugs that such kernels have, planted one by one: the comparison with the reference must see each of them.

Padding, free blocks and the rest of a last block are ones here, not NaN: what reads them is caught by its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.kernels.attention.cpu import CpuKernels
from hbmtwin.kernels.attention.interface import AttentionKernels, AttentionShape
from hbmtwin.kernels.attention.standard import StandardKernels

Differs = Callable[[AttentionKernels, str, dict[str, Any]], float]
Batch = dict[str, Any]

CPU = CpuKernels("cpu-flash", "cpu")


class UpperLeft(CpuKernels):
    """Causal from the first key on, as SDPA's ``is_causal`` is: right only where nothing was cached."""

    def _right_aligned(self, q: Any, k: Any, v: Any, scale: float) -> Any:
        return self._sdpa(q, k, v, scale, causal=True)


class OneKeyTooMany(CpuKernels):
    """A mask that shows the key after a query's own."""

    def _sdpa(self, q: Any, k: Any, v: Any, scale: float, *, mask: Any = None, causal: bool = False) -> Any:
        if mask is not None:
            mask = mask | mask.roll(1, dims=1)
        return super()._sdpa(q, k, v, scale, mask=mask, causal=causal)


class OneKeyTooFew(StandardKernels):
    """A mask that hides a query's own key, unless it is the only one."""

    def _causal(self, q: Any, k: Any, v: Any, scale: float, window: int) -> Any:
        out = super()._causal(q, k, v, scale, window)
        out[:, :, 1:] = super()._causal(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], scale, window)
        return out


class HeadsInterleaved(CpuKernels):
    """Query head n reads KV head n % Nkv."""

    def _tokens(self, q: Any, k: Any, v: Any, scale: float) -> Any:
        group, kv_heads = q.size(1) // k.size(2), k.size(2)
        order = q.unflatten(1, (group, kv_heads)).transpose(1, 2).flatten(1, 2)
        out = super()._tokens(order, k, v, scale)
        return out.unflatten(1, (kv_heads, group)).transpose(1, 2).flatten(1, 2)


class ScaleTwice(StandardKernels):
    """Scores multiplied with the scale before and after the product."""

    def _rows(self, q: Any, k: Any, v: Any, scale: float) -> Any:
        return super()._rows(q, k, v, scale * scale)


class FirstHeadsScales(CpuKernels):
    """One head's scales for all heads."""

    def paged_decode(self, *args: Any, **batch: Any) -> Any:
        return super().paged_decode(*args, **{**batch, "k_scale": batch["k_scale"][:, :1].expand_as(batch["k_scale"])})


def _lens(batch: Batch, name: str, by: int) -> Batch:
    return {**batch, name: [length + by for length in batch[name]]}


def _with_padding(batch: Batch) -> Batch:
    return {**batch, "kv_lens": [batch["k"].size(1)] * len(batch["kv_lens"])}


def _next_block(batch: Batch) -> Batch:
    return {**batch, "block_table": (batch["block_table"] + 1) % batch["k_cache"].size(0)}


def _rows_swapped(batch: Batch) -> Batch:
    return {**batch, "block_table": batch["block_table"].roll(1, dims=0).clamp(min=0)}


def _without(name: str) -> Callable[[Batch], Batch]:
    return lambda batch: {**batch, name: batch[name] * 0 + 1 / 40}


def _scales_of_next_token(batch: Batch) -> Batch:
    return {**batch, "v_scale": batch["v_scale"].roll(1, dims=-1)}


class Altered:
    """The CPU's kernels, called with other arguments than they were given."""

    name, device = "cpu-flash", "cpu"

    def __init__(self, altered: Callable[[Batch], Batch]) -> None:
        self.altered = altered

    def __getattr__(self, method: str) -> Any:
        return lambda **batch: getattr(CPU, method)(**self.altered(batch))


CAUGHT_BY: list[tuple[str, Any, str, str]] = [
    ("causal from the upper left", UpperLeft("cpu-flash", "cpu"), "prefill", "plain"),
    ("causal from the upper left", UpperLeft("cpu-flash", "cpu"), "paged_prefill", "plain"),
    ("mask one key too far", OneKeyTooMany("cpu-flash", "cpu"), "prefill", "plain"),
    ("mask one key short", OneKeyTooFew("cpu-standard", "cpu"), "prefill", "plain"),
    ("window one key wider", Altered(lambda b: {**b, "window": b["window"] + 1}), "prefill", "window"),
    ("window one key wider", Altered(lambda b: {**b, "window": b["window"] + 1}), "paged_decode", "window"),
    ("window forgotten", Altered(lambda b: {**b, "window": 0}), "decode", "window"),
    ("window forgotten", Altered(lambda b: {**b, "window": 0}), "paged_prefill", "window"),
    ("wrong KV head", HeadsInterleaved("cpu-flash", "cpu"), "decode", "plain"),
    ("wrong KV head", HeadsInterleaved("cpu-flash", "cpu"), "paged_decode", "plain"),
    ("padding seen", Altered(_with_padding), "decode", "plain"),
    ("last token not seen", Altered(lambda b: _lens(b, "kv_lens", -1)), "decode", "plain"),
    ("rest of the last block seen", Altered(lambda b: _lens(b, "context_lens", 1)), "paged_decode", "plain"),
    ("last token not seen", Altered(lambda b: _lens(b, "context_lens", -1)), "paged_decode", "plain"),
    ("table shifted by a block", Altered(_next_block), "paged_decode", "plain"),
    ("table of the next sequence", Altered(_rows_swapped), "paged_prefill", "plain"),
    ("scale twice", ScaleTwice("cpu-standard", "cpu"), "decode", "plain"),
    ("scale forgotten", Altered(lambda b: {**b, "scale": 1.0}), "prefill", "plain"),
    ("scales of K missing", Altered(_without("k_scale")), "paged_decode", "per token"),
    ("scales of V missing", Altered(_without("v_scale")), "paged_decode", "per token and head"),
    ("scales of the next token", Altered(_scales_of_next_token), "paged_decode", "per token"),
    ("scales of the first head", FirstHeadsScales("cpu-flash", "cpu"), "paged_decode", "per token and head"),
]


def _batch(batches: Any, dtype: str, method: str, kind: str) -> Batch:
    shape = AttentionShape(8, 2, 32, 32, dtype)
    q_lens, lens = [9, 30, 2], [40, 30, 21]
    window = 6 if kind == "window" else 0
    if method == "prefill":
        return batches.packed(shape, q_lens, lens, window)
    if method == "decode":
        return batches.padded(shape, lens, window, garbage=1.0)
    paged = batches.paged(shape, lens, 16, q_lens if method == "paged_prefill" else None, window, garbage=1.0)
    return batches.int8(paged, per_head=kind == "per token and head") if kind.startswith("per token") else paged


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("bug", "kernels", "method", "kind"), CAUGHT_BY, ids=[f"{c[0]}, {c[2]}" for c in CAUGHT_BY])
def test_a_planted_bug_is_caught(
    bug: str, kernels: Any, method: str, kind: str, dtype: str, batches: Any, differs: Differs
) -> None:
    batch = _batch(batches, dtype, method, kind)
    assert differs(CPU, method, batch) <= 1
    assert differs(kernels, method, batch) > 3, f"{bug} is not seen"


def test_a_slot_that_is_off_by_one_is_caught(torch: Any) -> None:
    k = torch.randn(3, 2, 8)
    right, wrong = torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8)
    slots = torch.tensor([4, 17, 30])
    CPU.write_kv(k, k, right, right.clone(), slots=slots)
    CPU.write_kv(k, k, wrong, wrong.clone(), slots=slots + 1)
    assert not right.equal(wrong)
    assert right[1, 1].equal(k[1])
