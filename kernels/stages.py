"""How a model is cut into pipeline stages, as vLLM cuts it (``get_pp_indices`` and the models' classes of its 0.27).

::

    stage               0            1            2            3
    61 layers           15           15           16           15      layers that remain go to the last stage but one,
    30 layers           7            8            8            7       and from there backwards: the last has the head
    tensors besides     embedding                              norm, head (the embedding, if they are tied)
    passed on           ------- hidden states and residual ------->

A stage is a :class:`~hbmtwin.kernels.records.ModelShape` of its own: fewer layers, and it knows which ends it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hbmtwin.kernels.records import ModelShape


def stage_sizes(num_layers: int, pipeline_parallel_size: int) -> tuple[int, ...]:
    """Layers of each stage, in turn. Raise ValueError where a stage would have none."""
    stages = pipeline_parallel_size
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{num_layers} layers make 1 to {num_layers} stages, not {stages}")
    sizes = [num_layers // stages] * stages
    for place in range(2, num_layers % stages + 2):
        sizes[-place] += 1
    return tuple(sizes)


def stage_layers(
    num_layers: int, pipeline_parallel_size: int, layer_partition: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage; *layer_partition* says how many, as VLLM_PP_LAYER_PARTITION does.

    Raise ValueError for a partition that does not give every layer to one stage, and a layer to every stage.
    """
    sizes = stage_sizes(num_layers, pipeline_parallel_size) if layer_partition is None else tuple(layer_partition)
    if len(sizes) != pipeline_parallel_size or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(
            f"a partition {list(sizes)} does not cut {num_layers} layers into {pipeline_parallel_size} stages: write "
            "one number above 0 a stage, all layers together"
        )
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def stage_shapes(model: ModelShape, layers: Sequence[range]) -> tuple[ModelShape, ...]:
    """Each stage of *model* as a model: *layers* are those of :func:`stage_layers`. One stage: the model itself.

    Raise ValueError, naming the stage, where it would lack a kind of layer that its others have: which groups of KV
    blocks it has then is not computed.
    """
    if len(layers) == 1:
        return (model,)
    return tuple(_stage(model, number, len(layers), own) for number, own in enumerate(layers))


def _stage(model: ModelShape, number: int, stages: int, layers: range) -> ModelShape:
    types = model.layer_types[layers.start : layers.stop]
    lacking = {"attention", "mamba"} - set(types) if types else ()
    if lacking:
        raise ValueError(
            f"stage {number} of {stages} of {model.name} (layers {layers.start} to {layers.stop - 1}) has no layer of "
            f"{' or '.join(sorted(lacking))}, which is not computed"
        )
    return replace(
        model,
        num_layers=len(layers),
        layer_types=types,
        layer_windows=model.layer_windows[layers.start : layers.stop],
        first_layer=model.first_layer + layers.start,
        first_stage=number == 0,
        last_stage=number == stages - 1,
    )
