"""Which runs the decoder of :mod:`hbmtwin.validation.small_decoder` can do again, step by step, and what it takes.

::

    done      dense decoders on one rank: GQA and MHA, gated MLP or not, biases, norms, windows, a tied head; 16-bit
              or 32-bit weights and KV, in blocks (paged, radix)
    refused   routed experts, MLA, state-space layers, quantised weights or KV, several ranks, KV in one piece a
              sequence, retention: by name, with the reason; attention alone may still be timed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hbmtwin.kernels.activations import ActivationModel
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.resolve import IN_BLOCKS
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.run_replay.program import batch_shape
from hbmtwin.validation.run_replay.room import Need
from hbmtwin.validation.run_replay.sampling import Batch
from hbmtwin.validation.small_decoder import PIECE, shape_of

SIXTEEN_BIT = ("auto", "float16", "bfloat16")


class NoDecoder(Exception):
    """Why a run's steps cannot be done whole here."""


def check_decoder(plan: ServerPlan) -> None:
    """Raise NoDecoder for a run that this decoder cannot do, with every reason."""
    reasons = list(_objections(plan))
    if reasons:
        raise NoDecoder("; ".join(reasons))


def _objections(plan: ServerPlan) -> Iterator[str]:
    m, s = plan.model, plan.scenario
    if m.experts is not None:
        yield f"{m.name} is a mixture of experts, and the decoder here has one MLP a layer"
    if m.kv_lora_rank:
        yield f"{m.name} has latent attention (MLA), which the decoder here has not"
    if m.mamba is not None:
        yield f"{m.name} has state-space layers (Mamba-2), which the decoder here has not"
    if m.quantization is not None:
        yield f"{m.name} has weights in {m.quantization.method}, and the decoder here multiplies what is not quantised"
    if m.v_head_dim not in (0, m.head_dim) and not m.kv_lora_rank:
        yield f"{m.name} has values of another width than keys"
    kv, engine = s.kv_cache, s.engine
    if any(dtype not in SIXTEEN_BIT for dtype in (kv.dtype, kv.v_dtype or "auto")):
        yield f"kv_cache.dtype = {kv.dtype!r}, and the decoder here keeps KV in 16 bits"
    for key, ranks in (("tensor", engine.tensor_parallel_size), ("pipeline", engine.pipeline_parallel_size)):
        if ranks > 1:
            yield f"engine.{key}_parallel_size = {ranks}, and one process measures no communication"
    if kv.policy not in IN_BLOCKS:
        yield f"kv_cache.policy = {kv.policy!r} keeps KV in one piece a sequence, and the decoder here in blocks"
    if kv.retention != "full":
        yield f"kv_cache.retention = {kv.retention!r}, and the decoder here forgets nothing"


def read_model(plan: ServerPlan) -> ModelShape:
    """The model, with windows only where the run reads through them."""
    model = plan.model
    return model if plan.window else replace(model, layer_windows=())


def layers_are_alike(model: ModelShape) -> bool:
    """Whether some layers tell the time of all."""
    return len(set(model.layer_windows)) < 2


def blocks_of(batches: Sequence[Batch], block_size: int) -> int:
    """Blocks of the step that needs most."""
    return max(
        (sum(-(-(n + c) // block_size) for n, c in zip(b.new_tokens, b.context_tokens, strict=True)) for b in batches),
        default=1,
    )


def need_of(plan: ServerPlan, model: ModelShape, batches: Sequence[Batch], dtype_bytes: int) -> Need:
    """Bytes for these steps, none of which is kept behind another."""
    shape = shape_of(model)
    weights = sum(rows * columns for rows, columns in shape.matrices()) + 4 * model.hidden_size
    token = 2 * model.num_kv_heads * model.head_dim
    slots = blocks_of(batches, plan.block_size) * plan.block_size
    ends = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2) + 2 * PIECE
    activations = ActivationModel(model, plan.device, tensor_parallel_size=1, attention=plan.scenario.engine.attention)
    programs = (activations.program(batch_shape(b.new_tokens, b.context_tokens)) for b in batches)
    return Need(
        ends=ends * dtype_bytes,
        layer=(weights + slots * token) * dtype_bytes,
        step=max((p.peak_bytes for p in programs), default=0) + 2 * slots * token * dtype_bytes,
    )
