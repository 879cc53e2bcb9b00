"""How many bytes the weights of a decoder take on one rank.

Split as vLLM splits: attention heads, the MLP and the vocabulary over ranks; norms, routers, and the down projections
of latent attention (MLA), on every rank; KV heads replicated where there are fewer than ranks. The vocabulary is padded
to 64, and must divide like the heads (vLLM asserts it), so that the ranks of a stage are alike. Experts are cut like an
MLP, or, with expert parallelism, whole (:mod:`hbmtwin.kernels.layer_shapes`). Mamba-2 layers are split by heads, a
single group of B and C replicated. A pipeline stage (:mod:`hbmtwin.kernels.stages`) has its layers, and of the ends
what is on it; a head that is tied to the embedding has that table on the last stage too.

Beside the parameters a rank keeps the rotary table, and of latent attention the two halves of ``kv_b_proj`` once more
in 16 bit: decode multiplies by them, and no kernel reads them quantised. What a log says of loading is a little more
still: the caching allocator's blocks (:mod:`hbmtwin.sim.budget.loaded_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from hbmtwin.kernels.layer_shapes import Split, Weight, layer_shapes, norm_shapes
from hbmtwin.kernels.quantized_weights import tensor_bytes
from hbmtwin.kernels.records import LayerType, ModelShape

VOCABULARY_PADDING = 64


def can_split(model: ModelShape, tensor_parallel_size: int, *, expert_ranks: int = 1) -> bool:
    """Whether heads, MLP and padded vocabulary divide over so many ranks, which makes them alike; KV heads may also be
    replicated evenly."""
    return not _what_does_not_divide(model, Split(tensor_parallel_size, expert_ranks))


def check_tensor_parallel(model: ModelShape, tensor_parallel_size: int, *, expert_ranks: int = 1) -> None:
    """Raise ValueError, with the sizes that work, when *model* cannot be split over so many ranks."""
    _check(model, Split(tensor_parallel_size, expert_ranks))


def _check(model: ModelShape, split: Split) -> None:
    if bad := _what_does_not_divide(model, split):
        possible = [str(tp) for tp in range(1, 65) if can_split(model, tp, expert_ranks=split.expert_ranks)]
        raise ValueError(
            f"{model.name} cannot be split over tensor_parallel_size {split.tensor}: {_sizes(model, split)}; "
            f"possible sizes are {', '.join(possible) or 'none'} (at fault: {bad})"
        )


def _sizes(model: ModelShape, split: Split) -> str:
    sizes = [f"{model.num_attention_heads} attention heads", f"{model.num_kv_heads} KV heads"]
    if model.mamba is not None:
        sizes.append(f"{model.mamba.n_heads} Mamba heads")
        if model.mamba.n_groups > 1:
            sizes.append(f"{model.mamba.n_groups} groups")
    sizes += [f"{name} {size}" for name, size, _ in _inner_sizes(model, split)]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} must divide, and the vocabulary padded to {_padded(model)}"


def _what_does_not_divide(model: ModelShape, split: Split) -> str:
    """The first size that stands against the split, as vLLM finds it; empty if none does."""
    tp, heads, kv_heads = split.tensor, model.num_attention_heads, model.num_kv_heads
    if tp < 1 or heads % tp:
        return f"{heads} heads over {tp} ranks"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads over {tp} ranks"
    if _padded(model) % tp:
        return f"vocabulary over {tp} ranks"
    if model.mamba is not None and not model.mamba.can_split(tp):
        return f"Mamba-2 over {tp} ranks"
    for name, size, cut in _inner_sizes(model, split):
        if size % cut:
            return f"{name} {size} over {cut} ranks"
        if (unit := _unit(model)) and size // cut % unit:
            return f"{size // cut} of {name} a rank are no multiple of the {unit} that share a scale"
    width = heads // tp * (model.v_head_dim or model.head_dim)
    if (unit := _unit(model)) and tp > 1 and width % unit:
        return f"{width} outputs of attention a rank are no multiple of the {unit} that share a scale"
    return ""


def _unit(model: ModelShape) -> int:
    """Channels that share a scale, so that a rank must have whole ones: what vLLM's FP8 blocks, AWQ and GPTQ assert."""
    q = model.quantization
    if q is None:
        return 0
    return q.block[0] if q.block is not None else max(0, q.group_size)


def _inner_sizes(model: ModelShape, split: Split) -> Iterator[tuple[str, int, int]]:
    """Widths of MLPs, and into how many parts each is cut."""
    e = model.experts
    if e is None or model.num_expert_layers < model.num_layers:
        yield "intermediate_size", model.intermediate_size, split.tensor
    if e is not None and model.num_expert_layers:
        yield "expert intermediate_size", e.intermediate_size, split.expert_cut
        if e.shared_intermediate_size:
            yield "shared intermediate_size", e.shared_intermediate_size, split.shared_cut


def _padded(model: ModelShape) -> int:
    return -(-model.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING


def embedding_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """The embedding table of one rank; an untied head has the same size."""
    return -(-_padded(model) // tensor_parallel_size) * model.hidden_size * model.dtype_bytes


def layer_tensors(
    model: ModelShape, tensor_parallel_size: int = 1, layer_type: LayerType = "attention"
) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of the parameters of a layer of that type on one rank, in the order in which vLLM makes
    them. Of a model with experts it is a layer that has them."""
    return _layer(model, Split(tensor_parallel_size), layer_type, model.first_layer, experts=model.experts is not None)


def _layer(
    model: ModelShape, split: Split, layer_type: LayerType, number: int, *, experts: bool
) -> Iterator[tuple[str, int]]:
    for weight in layer_shapes(model, split, layer_type, experts=experts):
        yield from tensor_bytes(weight, model.dtype_bytes, model.quantization, number)


def layer_weight_bytes(model: ModelShape, tensor_parallel_size: int = 1, layer_type: LayerType = "attention") -> int:
    """One layer of one rank: usually the attention's projections, the MLP, two norms."""
    return sum(size for _, size in layer_tensors(model, tensor_parallel_size, layer_type))


def weight_tensors(
    model: ModelShape, tensor_parallel_size: int = 1, *, expert_ranks: int = 1, data_parallel_size: int = 1
) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of what one rank keeps, tensor by tensor in the order in which vLLM makes them: the
    embedding, each layer's, the last norm, the head, and what is no parameter.

    *expert_ranks* are the ranks of tensor and data parallelism together where ``enable_expert_parallel`` gives each
    whole experts; of an uneven share it is the rank that has most. O(tensors). Raise ValueError when the model cannot
    be split so.
    """
    split = Split(tensor_parallel_size, expert_ranks, data_parallel_size)
    _check(model, split)
    first, last = model.first_stage or not model.split_ends, model.last_stage or not model.split_ends
    if first or (last and model.tie_word_embeddings):
        yield "embed_tokens", embedding_bytes(model, tensor_parallel_size)
    for i in range(model.num_layers):
        for name, size in _numbered_layer(model, split, i):
            yield f"layers.{i}.{name}", size
    if last:
        yield from _vectors(norm_shapes("norm", model), model)
        if not model.tie_word_embeddings:
            yield "lm_head", embedding_bytes(model, tensor_parallel_size)
        if model.parts.head_bias:
            yield "lm_head.bias", -(-_padded(model) // tensor_parallel_size) * model.dtype_bytes
    yield from _tables(model, tensor_parallel_size)


def _tables(model: ModelShape, tp: int) -> Iterator[tuple[str, int]]:
    """What a rank keeps beside parameters.

    vLLM calls the 16-bit halves of kv_b_proj copies; the 29.43 GiB that its 0.19 logs for DeepSeek-V2-Lite have room
    for them, and without them 0.11 GiB would be unexplained (confidence M).
    """
    if table := rotary_table_bytes(model):
        yield "rotary_emb", table
    if model.latent_dim:
        rows = model.num_attention_heads // tp * (model.qk_nope_head_dim + model.v_head_dim)
        for i in range(model.num_layers):
            yield f"layers.{i}.self_attn.absorbed", rows * model.kv_lora_rank * model.dtype_bytes


def _numbered_layer(model: ModelShape, split: Split, i: int) -> Iterator[tuple[str, int]]:
    layer_type = model.layer_types[i] if model.layer_types else "attention"
    return _layer(model, split, layer_type, model.first_layer + i, experts=model.has_experts(i))


def _vectors(weights: Iterator[Weight], model: ModelShape) -> Iterator[tuple[str, int]]:
    return ((weight.name, weight.elements * model.dtype_bytes) for weight in weights)


@lru_cache(maxsize=256)  # a plan that does not fit is tried in some hundred variants, with the same weights mostly
def weight_bytes_per_rank(
    model: ModelShape, tensor_parallel_size: int = 1, *, expert_ranks: int = 1, data_parallel_size: int = 1
) -> int:
    """The parameters of one rank, and what it keeps beside them. Raise ValueError when it cannot be split so.

    The arguments are those of :func:`weight_tensors`.
    """
    tensors = weight_tensors(
        model, tensor_parallel_size, expert_ranks=expert_ranks, data_parallel_size=data_parallel_size
    )
    return sum(size for _, size in tensors)


def weight_bytes(model: ModelShape) -> int:
    """The parameters of the whole model."""
    return weight_bytes_per_rank(model) - sum(size for _, size in _tables(model, 1))


def streamed_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """What one step reads on one rank: the layers and the head (the embedding table itself when both are tied), routed
    experts left out, of which it depends on the batch (:func:`expert_bytes`).

    Of an embedding table that is no head only a row a token is looked up.
    """
    split = Split(tensor_parallel_size)
    layers = (_numbered_layer(model, split, i) for i in range(model.num_layers))
    streamed = sum(size for layer in layers for name, size in layer if not name.startswith("mlp.experts."))
    return streamed + head_bytes(model, tensor_parallel_size)


def expert_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """One routed expert of every layer that has some, as much of them as one rank has; 0 without experts."""
    if model.experts is None:
        return 0
    split = Split(tensor_parallel_size)
    layers = (_numbered_layer(model, split, i) for i in range(model.num_layers))
    routed = sum(size for layer in layers for name, size in layer if name.startswith("mlp.experts."))
    return routed // model.experts.num_experts


def head_bytes(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """What one rank reads to make logits; 0 on a pipeline stage before the last, which makes none."""
    return embedding_bytes(model, tensor_parallel_size) if model.last_stage else 0


def rotary_table_bytes(model: ModelShape) -> int:
    """The table of cosines and sines that vLLM keeps beside the weights on every rank, and logs with them.

    It is the whole difference between the 14.96 GiB of Llama-3.1-8B's weights and the 14.99 GiB in the logs.
    """
    rotated = (model.qk_rope_head_dim or model.head_dim) if model.rotary_dim is None else model.rotary_dim
    width = model.rotary_dtype_bytes or model.dtype_bytes
    return model.rotary_tables * model.max_position_embeddings * rotated * width
