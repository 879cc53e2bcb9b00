"""What attention costs: the part of a cost model that depends on how the kernel works.

A kind of attention is one class, chosen by name (:data:`ATTENTION`), made once for the layers of one tensor-parallel
rank that see the whole context and once for those with a sliding window. Times are in ticks
(:mod:`hbmtwin.kernels.fixed_point`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import DeviceSpec, ModelShape

SCORE_BYTES = 16
"""Traffic of one score that is materialised: written and read by the products at 2 bytes (scores, then probabilities),
and by the softmax between them at 2, 4, 4 and 2, as the usual code casts to fp32 and back. Default, no measured source,
confidence L."""


class LayersCost(Protocol):
    """Time of the attention of some layers in one step. Decode is linear in the KV tokens read, so that leaps are exact
    sums."""

    decode_token_ticks: int
    """Per KV token that decode reads."""

    def prefill_ticks(self, pairs: int, all_pairs: int, context_tokens: int, new_tokens: int) -> int:
        """*new_tokens* of one sequence over themselves and *context_tokens* before them: *pairs* of a query and a key
        that it sees, *all_pairs* with those that a mask takes out."""
        ...


class AttentionCost:
    """Time of the attention of one step: of layers that see the whole context, and of those with a sliding window."""

    def __init__(
        self, kind: str, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int, kv_token_bytes: int
    ) -> None:
        layers, windowed = model.num_attention_layers, model.num_window_layers
        full = layers - windowed
        window_bytes = kv_token_bytes * windowed // layers
        full_bytes = kv_token_bytes - window_bytes
        make, tp = ATTENTION[kind], tensor_parallel_size
        self.launch_ticks = ticks(device.attention_launch_ns * layers)
        """Per kind of call in a step, prefill and decode apart."""
        self.sequence_ticks = ticks(device.attention_sequence_ns * layers)
        """Per sequence of a call."""
        self._window = model.window
        self._block = device.attention_block_tokens
        self._full = make(model, device, tp, full_bytes, full) if full else None
        self._windowed = make(model, device, tp, window_bytes, windowed) if windowed else None
        self.decode_token_ticks = self._full.decode_token_ticks if self._full else 0
        """Per KV token that decode reads in layers which see all."""
        self.window_token_ticks = self._windowed.decode_token_ticks if self._windowed else 0
        """Per KV token that decode reads in layers with a window."""

    def prefill_ticks(self, new_tokens: int, context_tokens: int) -> int:
        """*new_tokens* of one sequence over themselves (causally) and *context_tokens* before them. O(1)."""
        total = 0
        if self._full is not None:
            pairs = new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
            everything = new_tokens * (new_tokens + context_tokens)
            computed = min(everything, pairs + masked_pairs(new_tokens, self._block))
            total += self._full.prefill_ticks(computed, everything, context_tokens, new_tokens)
        if self._windowed is not None:
            context = min(context_tokens, self._window - 1)
            pairs = window_pairs(new_tokens, context_tokens, self._window)
            everything = new_tokens * min(new_tokens + context, self._window)
            computed = min(everything, pairs + masked_pairs(new_tokens, self._block))
            total += self._windowed.prefill_ticks(computed, everything, context, new_tokens)
        return total


def window_pairs(new_tokens: int, context_tokens: int, window: int) -> int:
    """Pairs of *new_tokens* queries and the keys in their *window*, behind *context_tokens*. O(1)."""
    growing = min(new_tokens, max(0, window - context_tokens))  # queries that still see everything before them
    return growing * context_tokens + growing * (growing + 1) // 2 + (new_tokens - growing) * window


def masked_pairs(new_tokens: int, block_tokens: int) -> int:
    """Pairs that a causal mask hides and that a kernel computes, in the blocks through which the mask's edge runs."""
    return new_tokens * min(block_tokens, new_tokens) // 2


class FlashAttention:
    """Scores stay on the chip: decode reads each K and V once; prefill is bound by its FLOPs, or by that reading.

    A query sees 2 * heads * (width of K + width of V) FLOPs per key (two products, multiply and add), and causally half
    of its own block. Prefill's FLOPs run at the efficiency of its matrix products. Keys outside a window are skipped.

    Where the cache is a latent (MLA), decode multiplies by the latent itself, of which all heads of a rank share one:
    its FLOPs may outlast its reading. Prefill writes K and V out, for its context too, as vLLM does.
    """

    def __init__(
        self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int, kv_token_bytes: int, num_layers: int
    ) -> None:
        work = _work(model, tensor_parallel_size, num_layers)
        decode_flops = work.pair_flops
        if model.latent_dim:
            decode_flops = 2 * work.heads * (model.latent_dim + model.kv_lora_rank) * num_layers
        self.decode_token_ticks = max(_read_ticks(kv_token_bytes, device), _flops_ticks(decode_flops, device))
        self._read_ticks = _read_ticks(kv_token_bytes, device)
        self._pair_ticks = _flops_ticks(work.pair_flops, device)
        self._expand_ticks = _flops_ticks(work.expand_flops, device)

    def prefill_ticks(self, pairs: int, all_pairs: int, context_tokens: int, new_tokens: int) -> int:
        """The longer of computing the pairs of query and key and of reading K and V once, and writing out a latent."""
        read = new_tokens + context_tokens
        return max(pairs * self._pair_ticks, read * self._read_ticks) + context_tokens * self._expand_ticks


class StandardAttention:
    """Scores are a matrix in memory, as in code without a fused kernel; nothing overlaps, so all times are summed.

    Each step reads K and V as :class:`FlashAttention` does. Where query heads share them (GQA, MQA), or where the cache
    is a latent (MLA), it writes out 16-bit K and V for each query head and reads those. All scores of a query are made,
    the causally masked ones too. Copies and scores move at the speed of weights. The softmax between the two products
    adds no launch. All of this is the default, with no measured source, confidence L; it errs to the fast side, as real
    code adds passes for scale and mask.
    """

    def __init__(
        self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int, kv_token_bytes: int, num_layers: int
    ) -> None:
        work = _work(model, tensor_parallel_size, num_layers)
        bandwidth = device.memory_bandwidth_bytes_per_s * device.weight_bandwidth_efficiency
        copied_bytes = 0
        if model.latent_dim or model.num_attention_heads > model.num_kv_heads:
            copied_bytes = 2 * work.heads * work.kv_width * model.dtype_bytes * num_layers
        score_bytes = SCORE_BYTES * work.heads * num_layers
        self._read_ticks = (
            _read_ticks(kv_token_bytes, device)
            + ticks(copied_bytes / bandwidth * 1e9)
            + _flops_ticks(work.expand_flops, device)
        )
        self._pair_ticks = ticks(score_bytes / bandwidth * 1e9) + _flops_ticks(work.pair_flops, device)
        self.decode_token_ticks = self._read_ticks + self._pair_ticks

    def prefill_ticks(self, pairs: int, all_pairs: int, context_tokens: int, new_tokens: int) -> int:
        """All keys once, and all pairs of a query and a key, masked ones too."""
        return (new_tokens + context_tokens) * self._read_ticks + all_pairs * self._pair_ticks


class _Kind(Protocol):
    def __call__(
        self, model: ModelShape, device: DeviceSpec, tensor_parallel_size: int, kv_token_bytes: int, num_layers: int
    ) -> LayersCost: ...


ATTENTION: dict[str, _Kind] = {"flash": FlashAttention, "standard": StandardAttention}
"""Kinds of attention by name."""


class _Work(NamedTuple):
    heads: int
    """Query heads of one rank."""
    kv_width: int
    """Elements of K and V of one head."""
    pair_flops: int
    """A query and a key, all heads and layers."""
    expand_flops: int
    """Writing out K and V of one token from its latent; 0 without one."""


def _work(model: ModelShape, tensor_parallel_size: int, num_layers: int) -> _Work:
    heads = model.num_attention_heads // tensor_parallel_size
    padded = not model.latent_dim  # a cache without a latent holds V as wide as K
    kv_width = model.head_dim + (model.head_dim if padded else model.v_head_dim)
    expand = heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank if model.latent_dim else 0
    return _Work(heads, kv_width, 2 * heads * kv_width * num_layers, 2 * expand * num_layers)


def _read_ticks(size: int, device: DeviceSpec) -> int:
    return ticks(size / (device.memory_bandwidth_bytes_per_s * device.kv_bandwidth_efficiency) * 1e9)


def _flops_ticks(flops: int, device: DeviceSpec) -> int:
    efficiency = device.attention_flops_efficiency or device.prefill_flops_efficiency
    return ticks(flops / (device.peak_flops_per_s * efficiency) * 1e9)
