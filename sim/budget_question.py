"""What the memory budget is asked: a model, a device, an engine and its settings, and what was measured instead."""

from __future__ import annotations

from dataclasses import dataclass

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.allocators.records import KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_shapes
from hbmtwin.kernels.weights import check_tensor_parallel
from hbmtwin.sim.engine_rules import EngineRules
from hbmtwin.sim.layer_groups import BlockPool, block_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes on one rank that somebody measured, each in place of an estimate; None: not measured."""

    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    available_kv_bytes: int | None = None
    """What is left for KV, in place of the whole subtraction."""
    kv_bytes_per_token: int | None = None
    """In all layers of the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetQuestion:
    """One start of an engine on one kind of device."""

    model: ModelShape
    device: DeviceSpec
    rules: EngineRules
    layout: KVLayout
    """Of the KV of all layers on one rank; it tells over how many ranks each layer is split."""
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    other_tenant_bytes: int = 0
    sinks: int = 0
    mamba_mode: MambaMode = "none"
    layers: tuple[range, ...]
    """Of each pipeline stage."""
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    num_speculative_tokens: int = 0
    kv_cache_memory_bytes: int | None = None
    """Replaces the whole subtraction, as the engine's own option does."""
    num_gpu_blocks_override: int | None = None
    measured: Measured = Measured()

    @property
    def stages(self) -> tuple[ModelShape, ...]:
        """What is on each pipeline stage."""
        return stage_shapes(self.model, self.layers)

    @property
    def pool(self) -> BlockPool:
        """The pool of blocks of the whole model. Raise ValueError where its layers cannot share one."""
        return block_pool(
            self.model,
            self.layout,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens * len(self.layers),
            sinks=self.sinks,
            mamba_mode=self.mamba_mode,
            ascend=self.device.vendor == "ascend",
        )

    @property
    def pools(self) -> list[BlockPool]:
        """Of each stage."""
        return [self.pool.on_stage(own) for own in self.layers] if len(self.layers) > 1 else [self.pool]


def check_question(q: BudgetQuestion) -> None:
    """Raise ValueError for a number out of range, or a model that cannot be split so."""
    if not 0 < q.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {q.gpu_memory_utilization}")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(q, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(q, name)}")
    if q.other_tenant_bytes < 0:
        raise ValueError(f"other_tenant_bytes must be at least 0, not {q.other_tenant_bytes}")
    if (q.measured.activation_bytes or 0) < 0:
        raise ValueError(f"activation_bytes must be at least 0, not {q.measured.activation_bytes}")
    check_tensor_parallel(q.model, q.layout.tensor_parallel_size)
