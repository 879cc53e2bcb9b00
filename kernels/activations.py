"""The tensors of one forward pass: what a decoder asks memory for, in which order, and when it lets go.

::

    once         | hidden |
    each layer   | normed | qkv | KV grows | workspace or scores | attention out | o_proj | ...
                 | normed | gate and up    | activated           | down          |
    once         | rows   | logits | fp32 logits | probabilities | noise |

Lifetimes are those of the usual PyTorch code: a function's tensors die when it returns, an argument lives as long as
its caller holds it. At the MLP's last product that is 3 intermediate sizes and 3 hidden ones a token, which is where
the fit to boot logs finds the peak of a layer (3 I / tp + 3.4 H). The sampler's copies are 2 + 4 + 4 + 4 bytes a logit.
On Ascend the dummy run of the engine makes the first of them only, so the other 12 bytes are in no budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape

MIB = 1 << 20
WORKSPACE_RESERVE_BYTES = 16 * MIB
"""What every Ascend C operator asks for itself, whatever its shapes: the tilings of CANN's open attention operators
(ops-transformer, cann-ops-adv) add this constant."""
WORKSPACE_CORES = 24
WORKSPACE_TILE_KEYS = 8192
"""Keys that one core's tile of scores holds; a tile is kept in fp32 and once more at two bytes."""

Verb = Literal["malloc", "free", "workspace", "grow"]


class Instruction(NamedTuple):
    """One line of a program. ``workspace`` is taken for one operator and given back at once; ``grow`` is the place
    where the layer's KV gets its room."""

    verb: Verb
    name: str = ""
    size: int = 0


class StepProgram(NamedTuple):
    """What one step does: *before* once, *layer* for each layer, *after* once. Everything it takes it gives back."""

    before: tuple[Instruction, ...]
    layer: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    peak_bytes: int
    """Most bytes that are live at once, workspace included. KV is not."""


class ActivationModel:
    """Makes the program of a step from its batch, for one tensor-parallel rank.

    *attention* is ``flash`` (scores never leave the chip; on Ascend a workspace, on CUDA a sum of exponentials a query)
    or ``standard`` (the score matrix of all heads in memory three times over: 16-bit scores, fp32 softmax, 16-bit
    probabilities; K and V repeated for all query heads where heads share them).
    """

    def __init__(self, model: ModelShape, device: DeviceSpec, *, tensor_parallel_size: int, attention: str) -> None:
        self.model = model
        self.device = device
        self.attention = attention
        self._tp = tensor_parallel_size
        self._heads = model.num_attention_heads // tensor_parallel_size
        self._program = lru_cache(maxsize=4096)(self._make)

    @property
    def grows_with_context(self) -> bool:
        """Whether a decode step needs more than the one before it."""
        return self.attention == "standard"

    def program(self, b: BatchShape) -> StepProgram:
        """The program of a step. O(prefilling sequences), and once for each shape O(instructions of a layer)."""
        rows = b.decode_count + len(b.prefill)
        if self.attention == "flash":
            return self._program(b.tokens, rows, 0, 0)
        pairs = b.kv_read_tokens + sum(new * (context + new) for new, context in b.prefill)
        keys = b.kv_read_tokens + sum(new + context for new, context in b.prefill)
        return self._program(b.tokens, rows, pairs, keys)

    def _make(self, tokens: int, rows: int, pairs: int, keys: int) -> StepProgram:
        m, width = self.model, self.model.dtype_bytes
        hidden = tokens * m.hidden_size * width
        before = (Instruction("malloc", "hidden", hidden),)
        layer = (*self._attention(tokens, hidden, pairs, keys), *self._mlp(tokens, hidden))
        after = tuple(self._head(rows, hidden))
        peak = _peak(chain(before, layer, after))
        return StepProgram(before, layer, after, peak)

    def _attention(self, tokens: int, hidden: int, pairs: int, keys: int) -> Iterator[Instruction]:
        m, width = self.model, self.model.dtype_bytes
        out = tokens * self._heads * (m.v_head_dim or m.head_dim) * width
        yield Instruction("malloc", "normed", hidden)
        yield Instruction("malloc", "qkv", tokens * (self._heads * m.head_dim + self._kv_elements) * width)
        yield Instruction("grow")
        if self.attention == "flash":
            yield from self._flash(tokens, out)
        else:
            yield from self._standard(pairs * self._heads, keys, out)
        yield Instruction("malloc", "o_proj", hidden)
        yield Instruction("free", "attention")
        yield Instruction("free", "qkv")
        yield Instruction("free", "normed")
        yield Instruction("free", "o_proj")  # added to the residual stream, in place

    @property
    def _kv_elements(self) -> int:
        """Elements of a token's new K and V on this rank, or of the latent that stands for both."""
        m = self.model
        if m.latent_dim:
            return m.latent_dim
        if m.kv_lora_rank:  # written out head by head, V padded to K's width
            return 2 * self._heads * m.head_dim
        return 2 * max(1, m.num_kv_heads // self._tp) * m.head_dim

    def _flash(self, tokens: int, out: int) -> Iterator[Instruction]:
        yield Instruction("malloc", "attention", out)
        if self.device.vendor == "ascend":
            yield Instruction("workspace", "attention", self.workspace_bytes)
        else:
            yield Instruction("malloc", "softmax_lse", tokens * self._heads * 4)
            yield Instruction("free", "softmax_lse")

    @property
    def workspace_bytes(self) -> int:
        """Workspace of one flash attention call on Ascend; an estimate, 16 to 40 MiB in the open tilings.

        The operator's reserve, and per core a tile of scores (fp32 and 16-bit) of the query heads that share a KV head.
        """
        group = self._heads if self.model.latent_dim else self.model.num_attention_heads // self.model.num_kv_heads
        return WORKSPACE_RESERVE_BYTES + WORKSPACE_CORES * WORKSPACE_TILE_KEYS * group * 6

    def _standard(self, scores: int, keys: int, out: int) -> Iterator[Instruction]:
        m = self.model
        repeated = bool(m.latent_dim) or m.num_attention_heads > m.num_kv_heads
        if repeated:
            key_bytes = keys * self._heads * m.dtype_bytes
            yield Instruction("malloc", "repeated_k", key_bytes * m.head_dim)
            yield Instruction("malloc", "repeated_v", key_bytes * (m.v_head_dim or m.head_dim))
        yield Instruction("malloc", "scores", 2 * scores)
        yield Instruction("malloc", "softmax", 4 * scores)
        yield Instruction("malloc", "probabilities", 2 * scores)
        yield Instruction("free", "softmax")
        yield Instruction("free", "scores")
        yield Instruction("malloc", "attention", out)
        yield Instruction("free", "probabilities")
        if repeated:
            yield Instruction("free", "repeated_k")
            yield Instruction("free", "repeated_v")

    def _mlp(self, tokens: int, hidden: int) -> Iterator[Instruction]:
        m = self.model
        inner = tokens * (m.intermediate_size // self._tp) * m.dtype_bytes
        yield Instruction("malloc", "normed", hidden)
        yield Instruction("malloc", "gate_up", (2 if m.gated_mlp else 1) * inner)
        yield Instruction("malloc", "activated", inner)
        yield Instruction("malloc", "down", hidden)
        yield Instruction("free", "activated")
        yield Instruction("free", "gate_up")
        yield Instruction("free", "normed")
        yield Instruction("free", "down")  # added to the residual stream, in place

    def _head(self, rows: int, hidden: int) -> Iterator[Instruction]:
        """Logits are gathered in full width, so that more ranks do not shrink them."""
        m = self.model
        values = rows * m.vocab_size
        yield Instruction("malloc", "normed", hidden)
        yield Instruction("malloc", "rows", rows * m.hidden_size * m.dtype_bytes)
        yield Instruction("malloc", "logits", values * m.dtype_bytes)
        yield Instruction("free", "rows")
        yield Instruction("malloc", "float_logits", values * 4)
        yield Instruction("malloc", "sample_probabilities", values * 4)
        yield Instruction("malloc", "noise", values * 4)
        yield Instruction("malloc", "sampled", rows * 8)
        for name in ("noise", "sample_probabilities", "float_logits", "logits", "sampled", "normed", "hidden"):
            yield Instruction("free", name)


def _peak(program: Iterator[Instruction]) -> int:
    live: dict[str, int] = {}
    now = peak = 0
    for verb, name, size in program:
        if verb == "malloc":
            live[name] = size
            now += size
            peak = max(peak, now)
        elif verb == "free":
            now -= live.pop(name)
        elif verb == "workspace":
            peak = max(peak, now + size)
    assert not live, f"the program keeps {', '.join(live)}"
    return peak
