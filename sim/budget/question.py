"""What the memory budget is asked: a model, a device, an engine and its settings, and what was measured instead."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.allocators.records import KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_shapes
from hbmtwin.kernels.weights import check_tensor_parallel
from hbmtwin.sim.engines import BatchRule, EngineRules, Ranks
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
    communicator_bytes: int | None = None
    """Of one group of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetQuestion:
    """One start of an engine on one kind of device."""

    model: ModelShape
    device: DeviceSpec
    rules: EngineRules
    layout: KVLayout
    """Of the KV of all layers on one rank; it tells over how many ranks each layer is split."""
    gpu_memory_utilization: float
    """Or the engine's own fraction in its place (``rules.fraction_name``)."""
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
    """Draft tokens that the target model verifies with each sequence; the draft model's own weights are not counted."""
    kv_cache_memory_bytes: int | None = None
    """Replaces the whole subtraction, as the engine's own option does."""
    num_gpu_blocks_override: int | None = None
    async_scheduling: bool = False
    """Whether a step is planned while the last is computed, so that two batches are under way at once."""
    batch_rule: BatchRule | None = None
    """Set where ``max_num_batched_tokens`` was not given and follows from ``max_model_len``."""
    measured: Measured = Measured()
    profiled: frozenset[str] = frozenset()
    """Names of what the device's calibration profile measured, of :class:`Measured`."""

    @property
    def ranks(self) -> Ranks:
        """Over how many ranks the model is split, and how."""
        return Ranks(
            self.layout.tensor_parallel_size, len(self.layers), self.data_parallel_size, self.enable_expert_parallel
        )

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
            max_num_batched_tokens=self.max_num_batched_tokens * (2 if self.async_scheduling else len(self.layers)),
            sinks=self.sinks,
            mamba_mode=self.mamba_mode,
            ascend=self.device.vendor == "ascend",
        )

    @property
    def pools(self) -> list[BlockPool]:
        """Of each stage."""
        pool = self.pool
        return [pool.on_stage(own) for own in self.layers] if len(self.layers) > 1 else [pool]

    def at_length(self, max_model_len: int) -> BudgetQuestion:
        """The same start with another ``max_model_len``; the batch follows where the engine lets it."""
        if self.batch_rule is None:
            return replace(self, max_model_len=max_model_len)
        tokens = self.batch_rule.tokens(max_model_len)
        return replace(self, max_model_len=max_model_len, max_num_batched_tokens=tokens)


def check_question(q: BudgetQuestion) -> None:
    """Raise ValueError for a number out of range, or a model that cannot be split so."""
    if not 0 < q.gpu_memory_utilization <= 1:
        raise ValueError(f"{q.rules.fraction_name} must be above 0 and at most 1, not {q.gpu_memory_utilization}")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "data_parallel_size"):
        if getattr(q, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(q, name)}")
    for name in ("other_tenant_bytes", "num_speculative_tokens"):
        if getattr(q, name) < 0:
            raise ValueError(f"{name} must be at least 0, not {getattr(q, name)}")
    for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if (given := getattr(q, name)) is not None and given < 1:
            raise ValueError(f"{name} must be at least 1, not {given}")
    for name in (
        *("weights_bytes", "activation_bytes", "non_torch_bytes", "graph_bytes", "available_kv_bytes"),
        "communicator_bytes",
    ):
        if (given := getattr(q.measured, name)) is not None and given < 0:
            raise ValueError(f"{name} must be at least 0, not {given}")
    if (token := q.measured.kv_bytes_per_token) is not None and token < 1:
        raise ValueError(f"kv_bytes_per_token must be at least 1, not {token}")
    check_tensor_parallel(q.model, q.ranks.tensor, expert_ranks=q.ranks.of_whole_experts)
