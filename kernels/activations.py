"""The tensors of one forward pass: what a decoder asks memory for, in which order, and when it lets go.

::

    once         | hidden |
    each layer   | normed | qkv | KV grows | workspace or scores | attention out | o_proj | ...
                 | normed | gate and up    | activated           | down          |
    Mamba-2      | normed | projected | out | convolved | states of chunks | gated | out_proj |     instead of attention
    once         | rows   | logits | fp32 logits | probabilities | noise |
    stages       | received | ... | sent |                                   of a pipeline, instead of what they lack

Lifetimes are those of the usual PyTorch code: a function's tensors die when it returns, an argument lives as long as
its caller holds it. At the MLP's last product that is 3 intermediate sizes and 3 hidden ones a token, which is where
the fit to boot logs finds the peak of a layer (3 I / tp + 3.4 H). The sampler's copies are 2 + 4 + 4 + 4 bytes a logit.
On Ascend the dummy run of the engine makes the first of them only, so the other 12 bytes are in no budget. What a
Mamba-2 mixer holds is read from vLLM's code, not fitted (confidence L).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from hbmtwin.kernels.records import BatchShape, DeviceSpec, LayerType, Mamba2, ModelShape

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
    """What one step does: *before* once, then layer by layer, *after* once. Everything it takes it gives back."""

    before: tuple[Instruction, ...]
    layers: tuple[tuple[Instruction, ...], ...]
    """Those of one type are one object."""
    after: tuple[Instruction, ...]
    peak_bytes: int
    """Most bytes that are live at once, workspace included. KV is not."""


class ActivationModel:
    """Makes the program of a step from its batch, for one tensor-parallel rank, or one of a pipeline's stage.

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
        prefill = b.tokens - b.decode_count if self.model.mamba is not None else 0
        if self.attention == "flash":
            return self._program(b.tokens, rows, 0, 0, prefill)
        pairs = b.kv_read_tokens + sum(new * (context + new) for new, context in b.prefill)
        keys = b.kv_read_tokens + sum(new + context for new, context in b.prefill)
        return self._program(b.tokens, rows, pairs, keys, prefill)

    def _make(self, tokens: int, rows: int, pairs: int, keys: int, prefill_tokens: int) -> StepProgram:
        m, width = self.model, self.model.dtype_bytes
        hidden = tokens * m.hidden_size * width
        # Hidden states and residual, held all along: the first stage's boot log shows a layer's peak and those on top.
        received = () if m.first_stage else (Instruction("malloc", "received", 2 * hidden),)
        sent = () if m.last_stage else (Instruction("malloc", "sent", 2 * hidden),)
        before = (*received, *sent, Instruction("malloc", "hidden", hidden))
        mlp = tuple(self._mlp(tokens, hidden))
        behind = mlp if m.mlp_in_layer else ()
        programs: dict[LayerType, tuple[Instruction, ...]] = {
            "attention": (*self._attention(tokens, hidden, pairs, keys), *behind)
        }
        if m.mamba is not None:
            programs["mamba"] = (*self._mamba(m.mamba, tokens, hidden, prefill_tokens), *behind)
            programs["mlp"] = mlp
        layers = tuple(programs[kind] for kind in m.layer_types) or (programs["attention"],) * m.num_layers
        after = tuple(self._head(rows, hidden)) if m.last_stage else (Instruction("free", "hidden"),)
        after += tuple(Instruction("free", passed.name) for passed in (*sent, *received))
        peak = _peak(chain(before, *(programs[kind] for kind in programs), after))
        return StepProgram(before, layers, after, peak)

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

    def _mamba(self, m: Mamba2, tokens: int, hidden: int, prefill_tokens: int) -> Iterator[Instruction]:
        mixer = tuple(_mixer(m, tokens, prefill_tokens, self.model.dtype_bytes, self._tp))
        yield Instruction("malloc", "normed", hidden)
        yield from mixer[:-3]
        yield Instruction("malloc", "out_proj", hidden)
        yield from mixer[-3:]
        yield Instruction("free", "normed")
        yield Instruction("free", "out_proj")  # added to the residual stream, in place

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


def mixer_peak_bytes(m: Mamba2, tokens: int, width: int, tensor_parallel_size: int) -> int:
    """Most bytes that a Mamba-2 mixer holds at once in a prefill of so many tokens, hidden states not counted."""
    mixer = tuple(_mixer(m, tokens, tokens, width, tensor_parallel_size))
    return _peak(iter(mixer))


def _mixer(m: Mamba2, tokens: int, prefill_tokens: int, width: int, tp: int) -> Iterator[Instruction]:
    """The projection's gate is read at the end, so it stays; a prefill's chunks have their states in fp32, and C with
    B, every token of a chunk with every other."""
    inner, channels = m.inner_size // tp, m.conv_channels(tp)
    chunks = -(-prefill_tokens // m.chunk_size)
    groups = m.group_elements(tp) // m.d_state
    yield Instruction("malloc", "projected", tokens * (inner + channels + m.n_heads // tp) * width)
    yield Instruction("malloc", "mixed", tokens * inner * width)
    yield Instruction("malloc", "convolved", tokens * channels * width)
    if chunks:
        yield Instruction("malloc", "chunk_states", chunks * inner * m.d_state * 4)
        yield Instruction("malloc", "chunk_products", chunks * groups * m.chunk_size**2 * 4)
        yield Instruction("free", "chunk_products")
        yield Instruction("free", "chunk_states")
    yield Instruction("free", "convolved")
    yield Instruction("malloc", "gated", tokens * inner * width)
    for name in ("gated", "mixed", "projected"):  # not before the mixer returns, behind its out_proj
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
