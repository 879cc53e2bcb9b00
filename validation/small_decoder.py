"""A real decoder with random weights: the layer that benchmarks time, and the steps of a simulated schedule served.

::

    norm -> qkv -> rotary -> KV to its blocks -> attention -> output -> + -> norm -> gate, up -> silu -> down -> +

Llama's layer in torch's own ops, whatever the device. Nothing is trained: tokens are random, times are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pandas as pd

from hbmtwin.kernels.attention.interface import AttentionKernels
from hbmtwin.kernels.records import BatchShape, ModelShape

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5


class Timer(Protocol):
    """Times calls, as :mod:`hbmtwin.validation.bench.kernels` does."""

    def time_ns(self, call: Any, calls: int) -> float:
        """Of one call, when so many are made in a row."""
        ...


class LayerShape(NamedTuple):
    """Sizes of one layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_size(self) -> int:
        """Rows of the matrix that makes queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of its four matrices."""
        wide, hidden = self.intermediate_size, self.hidden_size
        return (
            (self.qkv_size, hidden),
            (hidden, self.num_heads * self.head_dim),
            (2 * wide, hidden),
            (hidden, wide),
        )


def shape_of(model: ModelShape) -> LayerShape:
    """The layer of a model."""
    return LayerShape(
        model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_kv_heads, model.head_dim
    )


class Layer(NamedTuple):
    """Weights of one layer: (out, in) each, as ``torch.nn.functional.linear`` takes them."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    """(2, hidden)."""


def attention_inputs(layer: Layer, shape: LayerShape, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of packed tokens *x* (tokens, hidden); *rotary* is :func:`rotary_table`'s."""
    from torch.nn.functional import linear, rms_norm

    normed = rms_norm(x, (shape.hidden_size,), layer.norms[0], EPSILON)
    heads = linear(normed, layer.qkv).view(x.size(0), -1, shape.head_dim)
    rotated = shape.num_heads + shape.num_kv_heads
    turned = _rotated(heads[:, :rotated], rotary)
    return turned[:, : shape.num_heads], turned[:, shape.num_heads :], heads[:, rotated:]


def after_attention(layer: Layer, shape: LayerShape, x: Tensor, attended: Tensor) -> Tensor:
    """The residual stream behind the layer."""
    from torch.nn.functional import linear, rms_norm, silu

    x = x + linear(attended.reshape(x.size(0), -1), layer.output)
    gate_up = linear(rms_norm(x, (shape.hidden_size,), layer.norms[1], EPSILON), layer.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return x + linear(silu(gate) * up, layer.down)


def _rotated(heads: Tensor, rotary: Tensor) -> Tensor:
    import torch

    half = heads.size(-1) // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * rotary[0] + turned * rotary[1]


def rotary_table(torch: Any, positions: Tensor, head_dim: int, dtype: Any) -> Tensor:
    """cos and sin of the positions: (2, tokens, 1, head_dim)."""
    inverse = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = torch.outer(positions.float(), inverse).repeat(1, 2)
    table: Tensor = torch.stack((angles.cos(), angles.sin()))[:, :, None].to(dtype)
    return table


class Sequences(NamedTuple):
    """One step of a schedule: what each sequence computes, and behind how many tokens."""

    ids: Sequence[int]
    new_tokens: Sequence[int]
    context_tokens: Sequence[int]

    def batch(self) -> BatchShape:
        """As the cost model sees it."""
        both = list(zip(self.new_tokens, self.context_tokens, strict=True))
        decodes = [context + 1 for new, context in both if new == 1]
        return BatchShape(tuple(pair for pair in both if pair[0] > 1), len(decodes), sum(decodes), len(decodes))


class SmallDecoder:
    """A whole model in one process, its KV in blocks: each step takes packed tokens to one logit row a sequence."""

    def __init__(
        self, model: ModelShape, kernels: AttentionKernels, *, dtype: str, num_blocks: int, block_size: int, seed: int
    ) -> None:
        import torch

        self.model, self.kernels, self.shape = model, kernels, shape_of(model)
        self.block_size, self.num_blocks = block_size, num_blocks
        self._torch: Any = torch
        self._dtype = getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self.layers = [self._layer() for _ in range(model.num_layers)]
        self._embedding = self._random(model.vocab_size, model.hidden_size)
        self._head = self._random(model.vocab_size, model.hidden_size)
        self._norm = torch.ones(model.hidden_size, dtype=self._dtype, device=kernels.device)
        caches = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
        self._caches = [(self._zeros(*caches), self._zeros(*caches)) for _ in range(model.num_layers)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._scale = model.head_dim**-0.5

    def keep_only(self, ids: Sequence[int]) -> None:
        """Give back the blocks of all sequences but these."""
        for gone in self._blocks.keys() - set(ids):
            self._free += reversed(self._blocks.pop(gone))

    def step(self, s: Sequences) -> Tensor:
        """The next token of each sequence. Sequences that decode come behind those that prefill, as packed here."""
        import torch
        from torch.nn.functional import embedding, linear, rms_norm

        order = sorted(range(len(s.ids)), key=lambda i: s.new_tokens[i] == 1)
        ids = [s.ids[i] for i in order]
        new = [s.new_tokens[i] for i in order]
        lens = [s.context_tokens[i] + s.new_tokens[i] for i in order]
        device = self.kernels.device
        positions = torch.cat([torch.arange(length - n, length) for n, length in zip(new, lens, strict=True)])
        table, slots = self._tables(ids, new, lens)
        tokens = torch.zeros(len(positions), dtype=torch.int64, device=device)
        rotary = rotary_table(torch, positions.to(device), self.shape.head_dim, self._dtype)
        x = embedding(tokens, self._embedding)
        prompts = sum(n > 1 for n in new)
        for layer, (k_cache, v_cache) in zip(self.layers, self._caches, strict=True):
            q, k, v = attention_inputs(layer, self.shape, x, rotary)
            self.kernels.write_kv(k, v, k_cache, v_cache, slots=slots)
            x = after_attention(layer, self.shape, x, self._attend(q, k_cache, v_cache, table, new, lens, prompts))
        last = torch.tensor(new, device=device).cumsum(0) - 1
        return linear(rms_norm(x[last], (self.shape.hidden_size,), self._norm, EPSILON), self._head).argmax(-1)

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, new: list[int], lens: list[int], prompts: int
    ) -> Tensor:
        torch, parts, split = self._torch, [], sum(new[:prompts])
        if prompts:
            parts.append(
                self.kernels.paged_prefill(
                    q[:split],
                    k_cache,
                    v_cache,
                    block_table=table[:prompts],
                    q_lens=new[:prompts],
                    context_lens=lens[:prompts],
                    scale=self._scale,
                )
            )
        if prompts < len(new):
            parts.append(
                self.kernels.paged_decode(
                    q[split:],
                    k_cache,
                    v_cache,
                    block_table=table[prompts:],
                    context_lens=lens[prompts:],
                    scale=self._scale,
                )
            )
        attended: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended

    def _tables(self, ids: list[int], new: list[int], lens: list[int]) -> tuple[Tensor, Tensor]:
        """Block table of the sequences, and the slot of every new token."""
        torch, size = self._torch, self.block_size
        slots: list[int] = []
        for id_, n, length in zip(ids, new, lens, strict=True):
            own = self._blocks.setdefault(id_, [])
            while len(own) * size < length:
                own.append(self._free.pop())
            slots += [own[t // size] * size + t % size for t in range(length - n, length)]
        columns = max(-(-length // size) for length in lens)
        rows = [self._blocks[id_][:columns] for id_ in ids]
        table = torch.tensor([row + [0] * (columns - len(row)) for row in rows], dtype=torch.int32)
        return table.to(self.kernels.device), torch.tensor(slots, device=self.kernels.device)

    def _layer(self) -> Layer:
        qkv, output, gate_up, down = (self._random(*size) for size in self.shape.matrices())
        ones = self._torch.ones(2, self.shape.hidden_size, dtype=self._dtype, device=self.kernels.device)
        return Layer(qkv, output, gate_up, down, ones)

    def _random(self, rows: int, columns: int) -> Tensor:
        made = self._torch.randn(rows, columns, generator=self._generator) * columns**-0.5
        random: Tensor = made.to(self._dtype).to(self.kernels.device)
        return random

    def _zeros(self, *size: int) -> Tensor:
        zeros: Tensor = self._torch.zeros(*size, dtype=self._dtype, device=self.kernels.device)
        return zeros


class Served(NamedTuple):
    """Steps that were served, and how long each took."""

    steps: list[int]
    measured_ns: list[int]
    batches: list[BatchShape]


def serve(decoder: SmallDecoder, steps: pd.DataFrame, timer: Timer, *, warm_up: int = 3) -> Served:
    """Serve the table of a run's steps, step by step: leaps are taken apart. The first *warm_up* steps run twice, and
    count as they ran the second time.

    Raise ValueError where a sequence has no blocks left. O(steps).
    """
    served = Served([], [], [])
    columns = (steps[name] for name in ("step", "repeat", "seq_ids", "new_tokens", "context_tokens"))
    for number, repeat, ids, new, contexts in zip(*columns, strict=True):
        for i in range(int(repeat)):
            one = Sequences([int(s) for s in ids], [int(n) for n in new], [int(context) + i for context in contexts])
            if not one.ids:
                continue
            decoder.keep_only(one.ids)
            call = partial(decoder.step, one)
            if len(served.steps) < warm_up:
                call()
            served.measured_ns.append(round(timer.time_ns(call, 1)))
            served.steps.append(int(number) + i)
            served.batches.append(one.batch())
    return served
