"""How many bytes the weights of a dense decoder take on one tensor-parallel rank.

Split as vLLM splits: attention heads, the MLP and the vocabulary over ranks; norms, and the down projections of
latent attention (MLA), on every rank; KV heads replicated where there are fewer than ranks. The vocabulary is padded to
64, and must divide like the heads (vLLM asserts it), so that the ranks of a stage are alike. Mamba-2 layers are split
by heads, a single group of B and C replicated. Bias vectors of projections and per-head norms, below 0.1 % of any model
here, are left out. A pipeline stage (:mod:`hbmtwin.kernels.stages`) has its layers, and of the ends what is on it; a
head that is tied to the embedding has that table on the last stage too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hbmtwin.kernels.records import LayerType, Mamba2, ModelShape

VOCABULARY_PADDING = 64
DECAY_BYTES = 4
"""Of one head's A: vLLM keeps it as -exp(A_log) in fp32."""


def can_split(model: ModelShape, tensor_parallel_size: int) -> bool:
    """Whether heads, MLP and padded vocabulary divide over so many ranks, which makes them alike; KV heads may also be
    replicated evenly."""
    tp, heads = tensor_parallel_size, model.num_kv_heads
    if tp < 1 or model.num_attention_heads % tp or model.intermediate_size % tp or _padded_vocabulary(model) % tp:
        return False
    if model.mamba is not None and not model.mamba.can_split(tp):
        return False
    return heads % tp == 0 or tp % heads == 0


def check_tensor_parallel(model: ModelShape, tensor_parallel_size: int) -> None:
    """Raise ValueError, with the sizes that work, when *model* cannot be split over so many ranks."""
    if not can_split(model, tensor_parallel_size):
        possible = [str(tp) for tp in range(1, 65) if can_split(model, tp)]
        raise ValueError(
            f"{model.name} cannot be split over tensor_parallel_size {tensor_parallel_size}: "
            f"{model.num_attention_heads} attention heads, {model.num_kv_heads} KV heads{_mamba_sizes(model)} and "
            f"intermediate_size {model.intermediate_size} must divide, and the vocabulary padded to "
            f"{_padded_vocabulary(model)}; possible sizes are {', '.join(possible)}"
        )


def _mamba_sizes(model: ModelShape) -> str:
    if model.mamba is None:
        return ""
    groups = f", {model.mamba.n_groups} groups" if model.mamba.n_groups > 1 else ""
    return f", {model.mamba.n_heads} Mamba heads{groups}"


def _padded_vocabulary(model: ModelShape) -> int:
    return -(-model.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING


def embedding_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """The embedding table of one rank; an untied head has the same size."""
    return -(-_padded_vocabulary(model) // tensor_parallel_size) * model.hidden_size * model.dtype_bytes


def layer_tensors(
    model: ModelShape, tensor_parallel_size: int = 1, layer_type: LayerType = "attention"
) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of the parameters of a layer of that type on one rank, in the order in which vLLM makes
    them.

    Projections that read the same input are one tensor there (``qkv_proj``, ``gate_up_proj``, ``in_proj``).
    """
    tp, width = tensor_parallel_size, model.dtype_bytes
    shapes: Iterator[tuple[str, int, int]] = iter(())
    if layer_type == "mamba":
        assert model.mamba is not None
        yield from _mamba(model, model.mamba, tp)
    elif layer_type == "attention":
        shapes = (_latent_attention if model.kv_lora_rank else _attention)(model, tp)
    norms = ["input_layernorm", "post_attention_layernorm"] if model.mlp_in_layer else ["norm"]
    mlp = _mlp(model, tp) if model.mlp_in_layer or layer_type == "mlp" else ()
    for name, rows, columns in (*shapes, *mlp, *((norm, model.hidden_size, 1) for norm in norms)):
        yield name, rows * columns * width


def layer_weight_bytes(model: ModelShape, tensor_parallel_size: int = 1, layer_type: LayerType = "attention") -> int:
    """One layer of one rank: usually the attention's projections, the MLP, two norms."""
    return sum(size for _, size in layer_tensors(model, tensor_parallel_size, layer_type))


def _types(model: ModelShape) -> tuple[LayerType, ...]:
    attention: LayerType = "attention"
    return model.layer_types or (attention,) * model.num_layers


def _mlp(model: ModelShape, tp: int) -> Iterator[tuple[str, int, int]]:
    inner = model.intermediate_size // tp
    if model.gated_mlp:
        yield "mlp.gate_up_proj", 2 * inner, model.hidden_size
    else:
        yield "mlp.up_proj", inner, model.hidden_size
    yield "mlp.down_proj", model.hidden_size, inner


def _mamba(model: ModelShape, m: Mamba2, tp: int) -> Iterator[tuple[str, int]]:
    """Names and bytes of a Mamba-2 mixer: the input projection makes gate, input, B, C and a time step a head."""
    inner, heads, channels, width = m.inner_size // tp, m.n_heads // tp, m.conv_channels(tp), model.dtype_bytes
    yield "mamba.conv1d", channels * m.d_conv * width
    if m.conv_bias:
        yield "mamba.conv1d.bias", channels * width
    yield "mamba.in_proj", (inner + channels + heads) * model.hidden_size * width
    yield "mamba.A", heads * DECAY_BYTES
    yield "mamba.D", heads * width
    yield "mamba.dt_bias", heads * width
    yield "mamba.out_proj", model.hidden_size * inner * width
    yield "mamba.norm", inner * width


def _attention(model: ModelShape, tp: int) -> Iterator[tuple[str, int, int]]:
    """Names, rows and columns of query, key, value and output projections."""
    query = model.num_attention_heads // tp * model.head_dim
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    yield "self_attn.qkv_proj", query + 2 * kv, model.hidden_size
    yield "self_attn.o_proj", model.hidden_size, query


def _latent_attention(model: ModelShape, tp: int) -> Iterator[tuple[str, int, int]]:
    """The same of MLA: down projections with a norm each (q_a, kv_a), up projections of a rank's heads (q_b, kv_b), o.

    Decoding over the latent multiplies by the two halves of kv_b instead of by kv_b: the same weights, other views.
    """
    heads, rank = model.num_attention_heads // tp, model.kv_lora_rank
    if model.q_lora_rank:
        yield "self_attn.q_a_proj", model.q_lora_rank, model.hidden_size
        yield "self_attn.q_a_layernorm", model.q_lora_rank, 1
        yield "self_attn.q_b_proj", heads * model.head_dim, model.q_lora_rank
    else:
        yield "self_attn.q_proj", heads * model.head_dim, model.hidden_size
    yield "self_attn.kv_a_proj_with_mqa", rank + model.qk_rope_head_dim, model.hidden_size
    yield "self_attn.kv_a_layernorm", rank, 1
    yield "self_attn.kv_b_proj", heads * (model.qk_nope_head_dim + model.v_head_dim), rank
    yield "self_attn.o_proj", model.hidden_size, heads * model.v_head_dim


def weight_tensors(model: ModelShape, tensor_parallel_size: int = 1) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of what one rank keeps, tensor by tensor in the order in which vLLM makes them: the
    embedding, each layer's, the last norm, the head, and the rotary table.

    Raise ValueError when the model cannot be split so.
    """
    check_tensor_parallel(model, tensor_parallel_size)
    first, last = model.first_stage or not model.split_ends, model.last_stage or not model.split_ends
    if first or (last and model.tie_word_embeddings):
        yield "embed_tokens", embedding_bytes(model, tensor_parallel_size)
    for i, layer_type in enumerate(_types(model)):
        for name, size in layer_tensors(model, tensor_parallel_size, layer_type):
            yield f"layers.{i}.{name}", size
    if last:
        yield "norm", model.hidden_size * model.dtype_bytes
    if last and not model.tie_word_embeddings:
        yield "lm_head", embedding_bytes(model, tensor_parallel_size)
    if table := rotary_table_bytes(model):
        yield "rotary_emb", table


def weight_bytes_per_rank(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Everything that loading leaves on one rank, as vLLM logs it. Raise ValueError when it cannot be split so."""
    return sum(size for _, size in weight_tensors(model, tensor_parallel_size))


def weight_bytes(model: ModelShape) -> int:
    """The parameters of the whole model."""
    return weight_bytes_per_rank(model) - rotary_table_bytes(model)


def streamed_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """What one step reads on one rank: the layers and the head (the embedding table itself when both are tied).

    Of an embedding table that is no head only a row a token is looked up.
    """
    layers = Counter(_types(model)).items()
    streamed = sum(count * layer_weight_bytes(model, tensor_parallel_size, layer_type) for layer_type, count in layers)
    return streamed + head_bytes(model, tensor_parallel_size)


def head_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """What one rank reads to make logits; 0 on a pipeline stage before the last, which makes none."""
    return embedding_bytes(model, tensor_parallel_size) if model.last_stage else 0


def rotary_table_bytes(model: ModelShape) -> int:
    """The table of cosines and sines that vLLM keeps beside the weights on every rank, and logs with them.

    It is the whole difference between the 14.96 GiB of Llama-3.1-8B's weights and the 14.99 GiB in the logs.
    """
    rotated = (model.qk_rope_head_dim or model.head_dim) if model.rotary_dim is None else model.rotary_dim
    return model.max_position_embeddings * rotated * model.dtype_bytes
