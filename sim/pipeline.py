"""The stages of a pipeline: what a step costs, the memory of each, which one decides, and what is not simulated.

::

    stage   layers     weights   activations   ...   KV      blocks    spare
    0        0 to 15   7.51      1.04                65.99   67,574    0.97       room for more blocks than there are
    1       16 to 31   7.51      2.01                65.02   66,582    -          has room for the fewest: decides
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hbmtwin.allocators.records import KVLayout
from hbmtwin.kernels.pipeline_cost import PipelineCost
from hbmtwin.kernels.records import CostModel, DeviceSpec, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.kernels.stages import stage_shapes
from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.scenario import Scenario

NODE_RANKS = 8
"""Devices of one node, whose links the catalog has figures for."""


def step_cost(
    model: ModelShape, device: DeviceSpec, layers: Sequence[range], layout: KVLayout, *, attention: str
) -> CostModel:
    """The default cost of a step of *model*, whose *layers* are cut into stages; *layout* is that of all of them.

    Raise ValueError as :class:`RooflineCost` and :class:`PipelineCost` do.
    """
    tp = layout.tensor_parallel_size
    if len(layers) == 1:
        return RooflineCost(
            model, device, tensor_parallel_size=tp, kv_token_bytes=layout.token_bytes, attention=attention
        )
    stages = stage_shapes(model, layers)
    sizes = [layout.layer_token_bytes * stage.num_attention_layers for stage in stages]
    return PipelineCost(stages, device, tensor_parallel_size=tp, kv_token_bytes=sizes, attention=attention)


def stage_rows(budget: MemoryBudget) -> list[dict[str, Any]]:
    """A row for each stage, in bytes of one of its ranks; none without a pipeline.

    ``spare_bytes`` are the blocks that it has room for besides, and the stage that decides has not.
    """
    return [
        {
            "stage": b.stage,
            "decides": b.stage == budget.stage,
            "first_layer": b.layers.start,
            "num_layers": len(b.layers),
            "weights_bytes": b.weights_bytes,
            "activation_bytes": b.activation_bytes,
            "context_bytes": b.context_bytes,
            "non_torch_bytes": b.non_torch_bytes,
            "late_bytes": b.late_bytes,
            "graph_bytes": b.graph_bytes,
            "kv_bytes": b.kv_bytes,
            "kv_block_bytes": b.block_bytes,
            "num_blocks": b.num_blocks,
            "spare_bytes": (b.num_blocks - budget.num_blocks) * b.block_bytes,
        }
        for b in budget.stages
    ]


def pipeline_notes(scenario: Scenario, budget: MemoryBudget) -> tuple[str, ...]:
    """Which stage was simulated, and how far times are from those of an engine that keeps all stages busy."""
    stages = len(budget.stages)
    if not stages:
        return ()
    engine, (first, last) = scenario.engine, (budget.layers.start, budget.layers.stop - 1)
    others = sorted({b.num_blocks for b in budget.stages if b.stage != budget.stage})
    room = f"{others[0]:,}" if len(others) == 1 else f"{others[0]:,} to {others[-1]:,}"
    found = [
        f"engine.pipeline_parallel_size = {stages}: the memory is that of a rank of stage {budget.stage} (layers "
        f"{first} to {last}), the first with room for the fewest blocks, {budget.num_blocks:,}; the others have room "
        f"for {room}",
        f"engine.pipeline_parallel_size = {stages}: one batch at a time passes through the stages, and vLLM keeps "
        f"{stages} under way: with more than one request, times are too long and throughput is too low, by a factor "
        f"between 1 (decoding that streams weights) and {stages} (prefill, or reading KV)",
    ]
    uneven = len({len(b.layers) for b in budget.stages}) > 1
    if scenario.scheduler.policy == "sglang" and engine.layer_partition is None and uneven:
        found.append(
            "engine.pipeline_parallel_size: SGLang gives the layers that remain to the last stages, and here they are "
            "divided as vLLM does: write engine.layer_partition"
        )
    if (ranks := stages * engine.tensor_parallel_size) > NODE_RANKS:
        found.append(
            f"engine.pipeline_parallel_size: {ranks} ranks are more than the {NODE_RANKS} of a node; links between "
            "nodes are slower than the figures used here"
        )
    return tuple(found)
