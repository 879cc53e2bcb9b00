"""The matrices and vectors of one layer on one rank, as vLLM makes them: their shapes, not yet their bytes.

::

    self_attn       qkv_proj, o_proj            or, of latent attention (MLA): q_a, q_b, kv_a, kv_b, o
    mamba           conv1d, in_proj, out_proj, a few vectors                              instead of attention
    mlp             gate_up_proj, down_proj                                               split over ranks
    mlp, experts    gate (the router)                                                     whole on every rank
                    experts.w13, experts.w2     matrices of all experts of the rank       split, or whole experts
                    shared_experts.*            every token passes them                   split, or whole

Projections that read the same input are one tensor (``qkv_proj``, ``gate_up_proj``, ``in_proj``, ``w13``). Rows are
output channels. Who is split how is the rule of vLLM 0.19 to 0.27.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hbmtwin.kernels.records import Experts, LayerType, Mamba2, ModelShape

FP32_BYTES = 4
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Weight(NamedTuple):
    """One tensor of parameters."""

    name: str
    rows: int
    columns: int = 1
    copies: int = 1
    """Matrices of that shape in it: experts."""
    linear: bool = False
    """Whether it is a projection, which a quantised model may store in fewer bits."""
    element_bytes: int = 0
    """0: the model's dtype."""

    @property
    def elements(self) -> int:
        """Of all its matrices."""
        return self.rows * self.columns * self.copies


class Split(NamedTuple):
    """Over how many ranks what is split. Without expert parallelism an expert is cut like an MLP, and over the ranks
    of data parallelism too; with it each rank has whole experts."""

    tensor: int = 1
    expert_ranks: int = 1
    """Ranks that share out whole experts; 1: no expert parallelism."""
    data: int = 1

    @property
    def expert_cut(self) -> int:
        """Into how many parts each expert is cut."""
        return self.tensor * self.data if self.expert_ranks == 1 else 1

    @property
    def shared_cut(self) -> int:
        """The same of shared experts, which are whole where tokens are shared out to the ranks of a group instead
        (vLLM's sequence-parallel experts: expert, tensor and data parallelism together)."""
        return 1 if self.expert_ranks > self.tensor > 1 else self.tensor

    def local_experts(self, experts: Experts) -> int:
        """Experts on the rank that has most: the first ranks take one more where they do not divide."""
        return -(-experts.num_experts // self.expert_ranks)


def layer_shapes(model: ModelShape, split: Split, layer_type: LayerType, *, experts: bool) -> Iterator[Weight]:
    """Yield the tensors of a layer of that type, with *experts* or a single MLP, in the order in which vLLM makes them.

    O(tensors of a layer).
    """
    if layer_type == "mamba":
        assert model.mamba is not None
        yield from _mamba(model, model.mamba, split.tensor)
    elif layer_type == "attention":
        yield from (_latent_attention if model.kv_lora_rank else _attention)(model, split.tensor)
    if experts:
        assert model.experts is not None
        yield from _experts(model, model.experts, split)
    elif model.mlp_in_layer or layer_type == "mlp":
        yield from mlp_shapes("mlp", model, model.intermediate_size // split.tensor)
    for name in NORMS[: model.parts.norms] if model.mlp_in_layer else ("norm",):
        yield from norm_shapes(name, model)


def mlp_shapes(name: str, model: ModelShape, inner: int) -> Iterator[Weight]:
    """One MLP whose part on this rank is *inner* wide."""
    first, rows = ("gate_up_proj", 2 * inner) if model.gated_mlp else ("up_proj", inner)
    yield from _linear(f"{name}.{first}", rows, model.hidden_size, model.parts.mlp_bias)
    yield from _linear(f"{name}.down_proj", model.hidden_size, inner, model.parts.mlp_bias)


def norm_shapes(name: str, model: ModelShape) -> Iterator[Weight]:
    """A norm of the hidden states."""
    yield Weight(name, model.hidden_size)
    if model.parts.norm_bias:
        yield Weight(f"{name}.bias", model.hidden_size)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[Weight]:
    yield Weight(name, rows, columns, linear=True)
    if bias:
        yield Weight(f"{name}.bias", rows)


def _experts(model: ModelShape, e: Experts, split: Split) -> Iterator[Weight]:
    """Router, shared experts and routed ones; a gated expert has three matrices, two of them in w13."""
    hidden, local = model.hidden_size, split.local_experts(e)
    yield Weight("mlp.gate", e.num_experts, hidden, element_bytes=e.router_dtype_bytes)
    if e.correction_bias:
        yield Weight("mlp.gate.e_score_correction_bias", e.num_experts, element_bytes=FP32_BYTES)
    if e.shared_intermediate_size:
        yield from mlp_shapes("mlp.shared_experts", model, e.shared_intermediate_size // split.shared_cut)
        if e.shared_gate:
            yield Weight("mlp.shared_expert_gate", 1, hidden)
    inner = e.intermediate_size // split.expert_cut
    yield Weight("mlp.experts.w13", (2 if model.gated_mlp else 1) * inner, hidden, local, linear=True)
    yield Weight("mlp.experts.w2", hidden, inner, local, linear=True)


def _attention(model: ModelShape, tp: int) -> Iterator[Weight]:
    """Query, key, value and output projections."""
    query = model.num_attention_heads // tp * model.head_dim
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    yield from _linear("self_attn.qkv_proj", query + 2 * kv, model.hidden_size, model.parts.qkv_bias)
    yield from _linear("self_attn.o_proj", model.hidden_size, query, model.parts.output_bias)
    if model.parts.query_key_norm != "none":
        per_head = model.parts.query_key_norm == "head"
        yield Weight("self_attn.q_norm", model.head_dim if per_head else query)
        yield Weight("self_attn.k_norm", model.head_dim if per_head else kv)


def _latent_attention(model: ModelShape, tp: int) -> Iterator[Weight]:
    """The same of MLA: down projections with a norm each (q_a, kv_a), up projections of a rank's heads (q_b, kv_b), o.

    Decoding over the latent multiplies by the two halves of kv_b instead of by kv_b: the same weights, other views.
    """
    heads, rank = model.num_attention_heads // tp, model.kv_lora_rank
    if model.q_lora_rank:
        yield from _linear("self_attn.q_a_proj", model.q_lora_rank, model.hidden_size)
        yield Weight("self_attn.q_a_layernorm", model.q_lora_rank)
        yield from _linear("self_attn.q_b_proj", heads * model.head_dim, model.q_lora_rank)
    else:
        yield from _linear("self_attn.q_proj", heads * model.head_dim, model.hidden_size)
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + model.qk_rope_head_dim, model.hidden_size)
    yield Weight("self_attn.kv_a_layernorm", rank)
    yield from _linear("self_attn.kv_b_proj", heads * (model.qk_nope_head_dim + model.v_head_dim), rank)
    yield from _linear("self_attn.o_proj", model.hidden_size, heads * model.v_head_dim)


def _mamba(model: ModelShape, m: Mamba2, tp: int) -> Iterator[Weight]:
    """A Mamba-2 mixer: the input projection makes gate, input, B, C and a time step a head; vLLM keeps A as
    -exp(A_log) in fp32."""
    inner, heads, channels = m.inner_size // tp, m.n_heads // tp, m.conv_channels(tp)
    yield Weight("mamba.conv1d", channels, m.d_conv)
    if m.conv_bias:
        yield Weight("mamba.conv1d.bias", channels)
    yield from _linear("mamba.in_proj", inner + channels + heads, model.hidden_size)
    yield Weight("mamba.A", heads, element_bytes=FP32_BYTES)
    yield Weight("mamba.D", heads)
    yield Weight("mamba.dt_bias", heads)
    yield from _linear("mamba.out_proj", model.hidden_size, inner)
    yield Weight("mamba.norm", inner)
