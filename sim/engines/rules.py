"""How a serving engine divides the device at start: the rules and figures of one of its versions.

The figures are fits to boot logs (mostly vLLM 0.11 to 0.19 on H100, two points on Ascend); each stands with its
range. They move between versions: the same command lost 3.4 GiB of activation peak from vLLM 0.16 to 0.17, when the
sampler's sort gave way to a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import NOTHING, Span
from hbmtwin.sim.engines.settings import EngineArgs, Settings


class Account(NamedTuple):
    """What stands on one rank when the engine divides the device, in bytes."""

    total: int
    tenants: int
    fraction: float
    context: int
    weights: int
    activations: int
    non_torch: int
    graphs: int
    """As far as they are charged before KV is placed."""


class Division(NamedTuple):
    """What an engine makes of an account."""

    usable: int
    """What it lays claim to."""
    kv: int
    """What is left of that for KV; negative when the rest does not fit."""
    kept: int = 0
    """What it leaves aside for operators (310P)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What an engine subtracts from the device before it places the KV cache."""

    engine: str
    version: str
    """Of the first release with these rules: as text and, for comparison, as numbers (``since``)."""
    since: tuple[int, ...]
    name: str
    """As people read it."""
    vendors: tuple[str, ...]
    fraction_name: str
    """The engine's own option for the share of the device."""
    divide: Callable[[Account], Division]
    defaults: Callable[[EngineRules, ModelShape, DeviceSpec, EngineArgs], Settings]
    """What it takes where the user says nothing."""
    fraction: float = 0.9
    block_size: int = 16
    """Its default."""
    claims_free: bool = True
    """Whether it refuses to start when less is free than it lays claim to."""
    profiles: bool = True
    """Whether a profiling run measures activations before KV is placed; else they must fit in the unplanned rest."""

    logits_value_bytes: int = 14
    """Bytes per logit at the peak: every copy that the profiled sampler makes of 16-bit logits."""
    sampler_scratch: bool = True
    """Whether the sampler's kernel keeps four scratch rows per multiprocessor."""
    logits_rows: int | None = None
    """The most rows of logits at once where that is not ``max_num_seqs``."""
    persistent_bytes: int = 0
    """Workspace and input buffers that the profile counts as activations."""
    activation_spread: float = 0.03
    """Relative error of the activation formula; of a mixture of experts ``moe_activation_spread``."""
    moe_activation_spread: float = 0.08
    run_time_sampler_bytes: int = 0
    """Bytes per logit that sampling needs when the engine serves, and that no budget has."""

    charges_graphs: bool = False
    """Whether the graph pool is subtracted before the KV cache is placed; else it must fit in the unplanned rest."""
    capture_sizes: tuple[int, ...] = ()
    """Batch sizes that may be captured; empty: none is."""
    largest_capture_per_seq: int = 1
    piecewise_graphs: bool = True
    full_graphs: bool = False
    """Whether sizes up to ``max_num_seqs`` are captured in full too."""
    states_bound_sequences: bool = False
    """Whether graphs in full are captured only where the pool has a block, and so a Mamba state, a sequence."""
    graph_streams: int = 0
    """Streams that captured graphs share, which bounds the number of sizes (Ascend); 0: no such bound."""
    graph_base_bytes: int = 0
    graph_layer_bytes: tuple[int, int, int] = (0, 0, 0)
    """Per graph and layer: figure, low, high."""
    graph_moe_bytes: tuple[int, int, int] = (0, 0, 0)
    """More for a mixture of experts."""
    graph_mla_factor: int = 1

    non_torch_bytes: Mapping[int, Span]
    """Growth outside torch while profiling: by tensor-parallel size (the largest that is not above)."""
    pipeline_non_torch_bytes: Span = NOTHING
    """The same of a pipeline without tensor parallelism: its communicator does nothing in the profile."""
    data_group_bytes: Span = NOTHING
    """More with data-parallel ranks that compute experts together."""
    expert_group_bytes: Span = NOTHING
    """More with expert parallelism."""
    group_context_bytes: int = 0
    """What a communicator holds before profiling; like the context it is not charged to the utilisation."""
    moe_context_bytes: int = 0
    """More, of a mixture of experts over several ranks."""
    late_bytes: Span = NOTHING
    """What libraries take once KV is placed."""
    late_group_bytes: Span = NOTHING
    """What a pipeline's communicator takes when it is first used, where the profile does not use it."""
    sources: Mapping[str, str]
