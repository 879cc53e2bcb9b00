"""How a serving engine divides the device at start: the rules and figures of one engine version.

The figures are fits to boot logs (mostly vLLM 0.17 to 0.19 on H100, two points on Ascend); each stands with its
range. They move between versions: the same command lost 3.4 GiB of activation peak from vLLM 0.16 to 0.17, when the
sampler's sort gave way to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hbmtwin.kernels.activations import mixer_peak_bytes
from hbmtwin.kernels.records import DeviceSpec, ModelShape

GIB = 1 << 30
MIB = 1 << 20


class Estimate(NamedTuple):
    """A figure with the range that its source allows, in bytes."""

    bytes: int
    low: int
    high: int
    source: str


@dataclass(frozen=True, slots=True)
class EngineRules:
    """What an engine subtracts from the device before it places the KV cache."""

    name: str
    logits_value_bytes: int
    """Bytes per logit at the peak: every copy that the profiled sampler makes of the logits."""
    persistent_bytes: int
    """Workspace and input buffers that the profile counts as activations."""
    activation_spread: float
    """Relative error of the activation formula."""
    rounds_up: bool
    """Whether utilisation times total is rounded up to a byte."""
    charges_graphs: bool
    """Whether the graph pool is subtracted before the KV cache is placed; else it must fit in the unplanned rest."""
    graphs_per_size: int
    """CUDA captures each batch size twice, piecewise and in full."""
    largest_capture_per_seq: int
    graph_base_bytes: int
    graph_layer_bytes: tuple[int, int, int]
    """Per graph and layer: figure, low, high."""
    non_torch_bytes: dict[int, tuple[int, int, int]]
    """Growth outside torch while profiling, charged to the utilisation: by tensor-parallel size (the largest that is
    not above), figure, low, high."""
    pipeline_non_torch_bytes: tuple[int, int, int]
    """The same of a pipeline without tensor parallelism: its communicator does nothing in the profile."""
    group_context_bytes: int
    """What a communicator holds before profiling; like the context it is not charged to the utilisation."""
    late_group_bytes: tuple[int, int, int]
    """What a communicator takes when it is first used, where the profile does not use it: figure, low, high."""
    sources: dict[str, str]


VLLM = EngineRules(
    name="vLLM on CUDA, 0.21 or later",
    logits_value_bytes=14,
    persistent_bytes=GIB // 20,
    activation_spread=0.03,
    rounds_up=True,
    charges_graphs=True,
    graphs_per_size=2,
    largest_capture_per_seq=2,
    graph_base_bytes=3 * GIB // 10,
    graph_layer_bytes=(17 * MIB // 100, 14 * MIB // 100, 21 * MIB // 100),
    non_torch_bytes={
        1: (GIB // 4, 7 * GIB // 100, 46 * GIB // 100),
        2: (208 * GIB // 100, 3 * GIB // 10, 21 * GIB // 10),
        4: (217 * GIB // 100, 5 * GIB // 10, 22 * GIB // 10),
    },
    pipeline_non_torch_bytes=(7 * GIB // 100, 7 * GIB // 100, 46 * GIB // 100),
    group_context_bytes=GIB,
    late_group_bytes=(0, 0, 0),
    sources={
        "activations": "fit to 30 boot logs of vLLM, 1.2 % mean error (confidence H for dense models)",
        "non_torch": "growth in profiling, boot logs of vLLM 0.19 on H100, llm-d-planner d3121e05 (H)",
        "late": "none counted: vLLM's communicators come before profiling; torch's, which sends, has no known figure",
        "graphs": "0.30 GiB + 0.17 MiB x graphs x layers, boot logs of vLLM 0.19 (H)",
    },
)

VLLM_ASCEND = EngineRules(
    name="vllm-ascend, 0.20 or later",
    logits_value_bytes=2,
    persistent_bytes=GIB // 50,
    activation_spread=0.25,
    rounds_up=False,
    charges_graphs=False,
    graphs_per_size=1,
    largest_capture_per_seq=1,
    graph_base_bytes=GIB // 20,
    graph_layer_bytes=(MIB // 5, 8 * MIB // 100, MIB // 2),
    non_torch_bytes={
        1: (15 * GIB // 100, 0, GIB // 5),
        2: (64 * GIB // 100, GIB // 2, 11 * GIB // 10),
    },
    pipeline_non_torch_bytes=(15 * GIB // 100, 0, GIB // 5),
    group_context_bytes=0,
    late_group_bytes=(39 * GIB // 100, 195 * GIB // 1000, 39 * GIB // 100),
    sources={
        "activations": "the formula of CUDA with the logits that vllm-ascend makes; two points on NPU (L)",
        "non_torch": "0.15 GiB, with ranks + 2 x 0.195 per HCCL group + 0.1 for ATB: asc 11514, 10122, 14300 (M)",
        "late": "the pipeline's HCCL buffers, 2 x 0.195 GiB: the profile sends nothing, so no budget has them (L)",
        "graphs": "0.05 GiB + 0.2 MiB x sizes x layers: asc 2125, 3879, 4807 (M)",
    },
)


def rules_for(device: DeviceSpec) -> EngineRules:
    """The rules of the engine that serves on *device*. Raise ValueError for a vendor without any."""
    rules = {"nvidia": VLLM, "ascend": VLLM_ASCEND}.get(device.vendor)
    if rules is None:
        raise ValueError(f"{device.name}: no engine rules for vendor {device.vendor!r}; known: ascend, nvidia")
    return rules


def activation_peak(
    rules: EngineRules,
    model: ModelShape,
    device: DeviceSpec,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Estimate:
    """Rise of torch's peak above the weights in the profiling run of a dense model.

    The larger of two moments: inside a layer, the MLP's gate, up and product beside 3.4 hidden states; at the head,
    all copies of the logits (four scratch rows per multiprocessor among them) beside one hidden state. Logits are
    gathered in full width, so that more ranks do not shrink them. A Mamba-2 mixer may hold more than an MLP: what its
    code makes, beside as many hidden states, is not fitted (confidence L).

    A pipeline stage holds the hidden states and residual that it sends and receives besides, and without the head no
    logits: 1.04 GiB for a first stage whose log says 1.10 (L).
    """
    tokens, hidden, width = max_num_batched_tokens, model.hidden_size, model.dtype_bytes
    mlp = (3 if model.gated_mlp else 2) * model.intermediate_size // tensor_parallel_size
    layer = width * tokens * (10 * mlp + 34 * hidden) // 10
    source = rules.sources["activations"]
    if model.mamba is not None:
        mixer = mixer_peak_bytes(model.mamba, tokens, width, tensor_parallel_size)
        layer = max(layer, mixer + width * tokens * 34 * hidden // 10)
        source += "; Mamba-2 mixers as vLLM's code makes them, not fitted (L)"
    logits = min(max_num_seqs, tokens) * model.vocab_size * rules.logits_value_bytes
    scratch = 4 * device.multiprocessor_count * model.vocab_size
    head = logits + scratch + width * tokens * hidden if model.last_stage else 0
    passed = (not model.first_stage) + (not model.last_stage)
    size = rules.persistent_bytes + max(layer, head) + passed * 2 * width * tokens * hidden
    spread = round(size * rules.activation_spread)
    return Estimate(size, size - spread, size + spread, source)


def non_torch(rules: EngineRules, *, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> Estimate:
    """What libraries take outside torch while the engine profiles."""
    if tensor_parallel_size == 1 and pipeline_parallel_size > 1:
        return Estimate(*rules.pipeline_non_torch_bytes, rules.sources["non_torch"])
    size = max(tp for tp in rules.non_torch_bytes if tp <= tensor_parallel_size)
    return Estimate(*rules.non_torch_bytes[size], rules.sources["non_torch"])


def context(
    rules: EngineRules, device: DeviceSpec, *, tensor_parallel_size: int, pipeline_parallel_size: int = 1
) -> Estimate:
    """What the runtime, and with several ranks a communicator for each way to split, holds before profiling."""
    groups = (tensor_parallel_size > 1) + (pipeline_parallel_size > 1)
    size = device.context_bytes + groups * rules.group_context_bytes
    return Estimate(size, size * 4 // 5, size * 7 // 5, device.sources.get("context_bytes", "given"))


def late_buffers(rules: EngineRules, *, pipeline_parallel_size: int) -> Estimate:
    """What the pipeline's communicator takes after the plan was made, from what the utilisation leaves."""
    figures = rules.late_group_bytes if pipeline_parallel_size > 1 else (0, 0, 0)
    return Estimate(*figures, rules.sources["late"])


def graph_pool(rules: EngineRules, model: ModelShape, *, max_num_seqs: int) -> Estimate:
    """Memory of captured graphs, at vLLM's default batch sizes: 1, 2, 4, by 8 below 256, then by 16 up to 512."""
    largest = min(rules.largest_capture_per_seq * max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    graphs = rules.graphs_per_size * sum(size <= largest for size in sizes)
    figure, low, high = (
        rules.graph_base_bytes + per_layer * graphs * model.num_blocks // 2 for per_layer in rules.graph_layer_bytes
    )
    return Estimate(figure, low, high, rules.sources["graphs"])
