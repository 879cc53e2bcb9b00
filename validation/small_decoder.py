"""A real decoder with random weights: the layer that benchmarks time, and the steps of a simulated schedule.

::

    norm -> qkv -> rotary -> KV to its blocks -> attention -> output -> + -> norm -> gate, up -> silu -> down -> +

Llama's layer in torch's own ops, whatever the device, and what its relatives have besides: biases, norms of queries and
keys, norms behind attention and MLP (Gemma) or one for both (Cohere), an MLP without a gate, heads that are rotated in
part, windows, a head tied to the embedding. Nothing is trained: weights are one piece of random values again and again,
so that many gigabytes take seconds; times do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pandas as pd

from hbmtwin.kernels.attention.interface import AttentionKernels
from hbmtwin.kernels.records import BatchShape, ModelShape, SmallParts

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5
PIECE = (1 << 20) - 3
"""Values that weights repeat: a prime, so that no two rows of a matrix are equal."""


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
    gated: bool = True
    rotary_dim: int | None = None
    """Elements of a head that are rotated; None: all."""
    parts: SmallParts = SmallParts()

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
            ((1 + self.gated) * wide, hidden),
            (hidden, wide),
        )


def shape_of(model: ModelShape) -> LayerShape:
    """The layer of a model."""
    return LayerShape(
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        model.num_kv_heads,
        model.head_dim,
        model.gated_mlp,
        model.rotary_dim,
        model.parts,
    )


class Layer(NamedTuple):
    """Weights of one layer: (out, in) each, as ``torch.nn.functional.linear`` takes them."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    """Without a gate the first of an MLP's two."""
    down: Tensor
    norms: Tensor
    """(norms, hidden), in the order in which they are applied."""
    norm_biases: Tensor | None = None
    """None: root mean square alone."""
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None)
    """Of the four matrices."""
    head_norms: tuple[Tensor, Tensor] | None = None
    """Of queries and of keys: as long as a head, or as all of them."""


def attention_inputs(layer: Layer, shape: LayerShape, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of packed tokens *x* (tokens, hidden); *rotary* is :func:`rotary_table`'s."""
    from torch.nn.functional import linear

    heads = linear(_normed(layer, 0, x), layer.qkv, layer.biases[0]).view(x.size(0), -1, shape.head_dim)
    rotated = shape.num_heads + shape.num_kv_heads
    if layer.head_norms is not None:
        heads = _heads_normed(layer.head_norms, shape, heads)
    turned = _rotated(heads[:, :rotated], rotary)
    return turned[:, : shape.num_heads], turned[:, shape.num_heads :], heads[:, rotated:]


def after_attention(layer: Layer, shape: LayerShape, x: Tensor, attended: Tensor) -> Tensor:
    """The residual stream behind the layer."""
    from torch.nn.functional import linear

    attended = linear(attended.reshape(x.size(0), -1), layer.output, layer.biases[1])
    norms = shape.parts.norms
    if norms == 1:  # attention and MLP side by side, behind one norm
        return x + attended + _mlp(layer, shape, _normed(layer, 0, x))
    if norms == 4:
        x = x + _normed(layer, 1, attended)
        return x + _normed(layer, 3, _mlp(layer, shape, _normed(layer, 2, x)))
    x = x + attended
    return x + _mlp(layer, shape, _normed(layer, 1, x))


def _mlp(layer: Layer, shape: LayerShape, x: Tensor) -> Tensor:
    from torch.nn.functional import gelu, linear, silu

    wide = linear(x, layer.gate_up, layer.biases[2])
    if not shape.gated:
        return linear(gelu(wide), layer.down, layer.biases[3])
    gate, up = wide.chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down, layer.biases[3])


def _normed(layer: Layer, which: int, x: Tensor) -> Tensor:
    from torch.nn.functional import layer_norm, rms_norm

    if layer.norm_biases is not None:
        return layer_norm(x, x.shape[-1:], layer.norms[which], layer.norm_biases[which], EPSILON)
    return rms_norm(x, x.shape[-1:], layer.norms[which], EPSILON)


def _heads_normed(norms: tuple[Tensor, Tensor], shape: LayerShape, heads: Tensor) -> Tensor:
    import torch
    from torch.nn.functional import rms_norm

    parts = list(heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1))
    for i, weight in enumerate(norms):
        wide = parts[i] if weight.size(0) == shape.head_dim else parts[i].flatten(1)
        parts[i] = rms_norm(wide, weight.shape, weight, EPSILON).view_as(parts[i])
    return torch.cat(parts, dim=1)


def _rotated(heads: Tensor, rotary: Tensor) -> Tensor:
    import torch

    width = rotary.size(-1)
    if width < heads.size(-1):
        return torch.cat((_rotated(heads[..., :width], rotary), heads[..., width:]), dim=-1) if width else heads
    half = width // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * rotary[0] + turned * rotary[1]


def rotary_table(torch: Any, positions: Tensor, head_dim: int, dtype: Any) -> Tensor:
    """cos and sin of the positions: (2, tokens, 1, head_dim), or as many elements of a head as are rotated."""
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
    """A whole model in one process, its KV in blocks: each step takes packed tokens to one logit row a sequence.

    *num_layers*: only the first so many are made.
    """

    def __init__(
        self,
        model: ModelShape,
        kernels: AttentionKernels,
        *,
        dtype: str,
        num_blocks: int,
        block_size: int,
        seed: int,
        num_layers: int | None = None,
    ) -> None:
        import torch

        self.model, self.kernels, self.shape = model, kernels, shape_of(model)
        self.block_size, self.num_blocks = block_size, num_blocks
        made = model.num_layers if num_layers is None else num_layers
        self._torch: Any = torch
        self._dtype = getattr(torch, dtype)
        self._piece = self._random_piece(seed)
        self.layers = [self._layer() for _ in range(made)]
        self._embedding = self._random(model.vocab_size, model.hidden_size)
        tied = model.tie_word_embeddings
        self._head = self._embedding if tied else self._random(model.vocab_size, model.hidden_size)
        self._norm = self._ones(model.hidden_size)
        caches = (num_blocks * block_size * model.num_kv_heads, model.head_dim)
        shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
        self._caches = [(self._random(*caches).view(shape), self._random(*caches).view(shape)) for _ in range(made)]
        self._windows = model.layer_windows[:made] or (0,) * made
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._scale = model.head_dim**-0.5

    def keep_only(self, ids: Sequence[int]) -> None:
        """Give back the blocks of all sequences but these."""
        for gone in self._blocks.keys() - set(ids):
            self._free += reversed(self._blocks.pop(gone))

    def place_in_turn(self, ids: Sequence[int], lens: Sequence[int]) -> None:
        """Give sequences the blocks of so many tokens, a block each in turn, as those that grow together have them."""
        counts = [-(-length // self.block_size) for length in lens]
        for column in range(max(counts, default=0)):
            for id_, count in zip(ids, counts, strict=True):
                if column < count:
                    self._blocks.setdefault(id_, []).append(self._free.pop())

    def step(self, s: Sequences, num_layers: int | None = None) -> Tensor:
        """The next token of each sequence, through the first *num_layers* or all. Sequences that decode come behind
        those that prefill, as packed here."""
        import torch
        from torch.nn.functional import embedding, linear, rms_norm

        order = sorted(range(len(s.ids)), key=lambda i: s.new_tokens[i] == 1)
        ids = [s.ids[i] for i in order]
        new = [s.new_tokens[i] for i in order]
        lens = [s.context_tokens[i] + s.new_tokens[i] for i in order]
        device = self.kernels.device
        positions = torch.cat([torch.arange(length - n, length) for n, length in zip(new, lens, strict=True)])
        table, slots = self._tables(ids, new, lens)
        tokens = (positions * 7919 % self.model.vocab_size).to(device)
        rotated = self.shape.head_dim if self.shape.rotary_dim is None else self.shape.rotary_dim
        rotary = rotary_table(torch, positions.to(device), rotated, self._dtype)
        x = embedding(tokens, self._embedding)
        prompts = sum(n > 1 for n in new)
        layers = zip(self.layers[:num_layers], self._caches[:num_layers], self._windows[:num_layers], strict=True)
        for layer, (k_cache, v_cache), window in layers:
            q, k, v = attention_inputs(layer, self.shape, x, rotary)
            self.kernels.write_kv(k, v, k_cache, v_cache, slots=slots)
            attended = self.attend(q, k_cache, v_cache, table, new, lens, prompts, window)
            x = after_attention(layer, self.shape, x, attended)
        last = torch.tensor(new, device=device).cumsum(0) - 1
        return linear(rms_norm(x[last], (self.shape.hidden_size,), self._norm, EPSILON), self._head).argmax(-1)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        new: list[int],
        lens: list[int],
        prompts: int,
        window: int,
    ) -> Tensor:
        """A layer's attention: of the first *prompts* sequences, then of those that decode."""
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
                    window=window,
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
                    window=window,
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
        shape, parts = self.shape, self.shape.parts
        sizes = shape.matrices()
        qkv, output, gate_up, down = (self._random(*size) for size in sizes)
        with_bias = (parts.qkv_bias, parts.output_bias, parts.mlp_bias, parts.mlp_bias)
        biases = [
            self._random(1, rows).view(-1) if there else None for (rows, _), there in zip(sizes, with_bias, strict=True)
        ]
        head_norms = None
        if parts.query_key_norm != "none":
            each = [1, 1] if parts.query_key_norm == "head" else [shape.num_heads, shape.num_kv_heads]
            head_norms = (self._ones(each[0] * shape.head_dim), self._ones(each[1] * shape.head_dim))
        return Layer(
            qkv,
            output,
            gate_up,
            down,
            self._ones(parts.norms, shape.hidden_size),
            self._random(parts.norms, shape.hidden_size) if parts.norm_bias else None,
            (biases[0], biases[1], biases[2], biases[3]),
            head_norms,
        )

    def _random_piece(self, seed: int) -> Tensor:
        generator = self._torch.Generator().manual_seed(seed)
        made: Tensor = self._torch.randn(PIECE, generator=generator).to(self._dtype).to(self.kernels.device)
        return made

    def _random(self, rows: int, columns: int) -> Tensor:
        made: Tensor = self._torch.empty(rows, columns, dtype=self._dtype, device=self.kernels.device)
        for part in made.view(-1).split(PIECE):
            part.copy_(self._piece[: part.numel()])
        return made.mul_(columns**-0.5)

    def _ones(self, *size: int) -> Tensor:
        ones: Tensor = self._torch.ones(*size, dtype=self._dtype, device=self.kernels.device)
        return ones


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
