"""The tables of a scenario file: each key with its type, its default, what bounds it, and what it means.

::

    model  device  engine                  what is served, on what, and how it is laid out
    scheduler  memory  kv_cache            who runs, who places which bytes, how sequences get room
    slo                                    what was promised
    results  calibration                   what is kept, where times come from

Who asks stands in :mod:`hbmtwin.sim.traffic_sections`. Keys that two settings or a model must agree on are checked
elsewhere (:mod:`hbmtwin.sim.legality`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from hbmtwin.sim.catalog import CatalogError, device_name, model_name
from hbmtwin.sim.sizes import parse_bytes


def _release(value: object) -> object:
    """A release that was written as a number, as ``--set kv_cache.version=0.27`` does."""
    return str(value) if isinstance(value, float) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
MAX_BYTES = 2**44
"""16 TiB: beyond any device, and small enough that a slip of the unit does not run for hours."""

MAX_ALIGNMENT_BYTES = 2**30
"""The largest page that a driver maps (512 x 2 MiB): no address is aligned to more."""
MAX_GROWTH_FACTOR = 1024
"""From the first 64 tokens, one jump reaches half the positions of the longest models: beyond it lies a slip."""


def _device_id(name: str) -> str:
    """The catalog's id of a device that is called so; an unknown one stays, and is refused where it is looked up."""
    try:
        return device_name(name)
    except CatalogError:
        return name


class Section(BaseModel):
    """One table of the scenario file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(Section):
    """What is served."""

    name: Annotated[str, AfterValidator(model_name)] = Field(
        "llama-2-7b", description="catalog id, its id at Hugging Face, or a path to a config.json"
    )


class DeviceSection(Section):
    """What it is served on."""

    name: Annotated[str, AfterValidator(_device_id)] = Field(
        "ascend-910b4", description="catalog id, or what the runtime calls it"
    )
    memory_bytes: Bytes | None = Field(
        None, gt=0, le=MAX_BYTES, description="total memory; default: what the device reports"
    )
    other_tenant_bytes: Bytes = Field(0, ge=0, le=MAX_BYTES, description="held by other processes on the device")


class EngineSection(Section):
    """How the model is laid over devices, and how it computes."""

    tensor_parallel_size: int = Field(1, ge=1, description="ranks that share each layer; one rank is simulated")
    pipeline_parallel_size: int = Field(
        1, ge=1, description="stages that have layers of their own; the one that has room for the fewest is simulated"
    )
    layer_partition: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="layers of each stage, as VLLM_PP_LAYER_PARTITION; default: as vLLM divides them"
    )
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1, description="share of total memory that may be used")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt + output; default: the model's limit")
    attention: Literal["flash", "standard"] = Field("flash", description="standard: the score matrix is materialised")
    task_queue_enable: Literal[0, 1, 2] = Field(
        1, description="Ascend, TASK_QUEUE_ENABLE: 2 takes workspace outside torch's allocator; per_layer only"
    )


class SchedulerSection(Section):
    """How much runs at once."""

    policy: str = Field("vllm", description="scheduler: see `hbmtwin catalog policies`")
    max_num_seqs: int = Field(256, ge=1, description="most sequences that run at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens that one step computes")
    batching: Literal["padded", "sorted", "buckets", "variable"] = Field(
        "padded", description="static_batch only: who shares a batch, and whether to pad to its longest"
    )
    bucket_tokens: int = Field(256, ge=1, description="static_batch, buckets: width of a bucket of prompt lengths")
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto", description="vllm_v0 only: how requests give way; auto: swap where several samples of a prompt run"
    )
    enable_chunked_prefill: bool = Field(
        True, description="vllm only: prompts in chunks; false: whole, and a step may compute max_model_len tokens"
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="vllm only: most tokens that one request computes in a step; 0: no such bound"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="vllm only: who comes first and who gives way; priority: see workload.priorities"
    )
    async_scheduling: bool = Field(
        False, description="vllm only: plan a step while the one before it is computed; vLLM's own default since 0.14"
    )
    schedule_conservativeness: float = Field(
        1.0, ge=0, le=1e6, description="sglang only: factor on the room that is kept for tokens to come"
    )


class MemorySection(Section):
    """Who places which bytes, and what happens when they run out."""

    general: str = Field("caching", description="device allocator of weights and activations")
    kv_arena: str = Field("caching", description="device allocator of the KV cache")
    fit: Literal["best", "first", "next", "worst"] = Field("best", description="how `pooled` chooses among free runs")
    coalescing: Literal["immediate", "deferred"] = Field(
        "immediate", description="`pooled`: when free neighbours merge: at once, or when a request finds no room"
    )
    alignment_bytes: Bytes | None = Field(
        None,
        ge=1,
        le=MAX_ALIGNMENT_BYTES,
        description="unit of sizes and addresses of region allocators; default: their own",
    )
    alloc_conf: str = Field("", description="settings of `caching`, as in PYTORCH_NPU_ALLOC_CONF")
    activations: Literal["none", "peak", "per_layer"] = Field(
        "none", description="none: their estimated peak is set aside for the whole run"
    )
    activation_bytes: Bytes | None = Field(None, ge=0, le=MAX_BYTES, description="activation peak; default: estimated")
    oom: Literal["stop", "reject", "preempt"] | None = Field(
        None, description="when memory is out: stop, reject or preempt; default: preempt for paged, else stop"
    )
    admission: Literal["none", "reserve"] = Field(
        "none",
        description="reserve admits while all fit at full length (contiguous: in bytes if not in one piece; paged: as "
        "TensorRT-LLM's GUARANTEED_NO_EVICT)",
    )


class KVCacheSection(Section):
    """How sequences get room for their tokens."""

    preset: str | None = Field(None, description="caching, pooled, doubling or paged; none given: paged")
    policy: str = Field("paged", description="KV policy: see `hbmtwin catalog policies`")
    version: Annotated[Literal["0.27", "0.22", "0.18", "v0"], BeforeValidator(_release)] = Field(
        "0.27", description="paged only: the release of vLLM whose rules it follows"
    )
    growth: str = Field("exact", description="contiguous only: static, exact, doubling, step or hybrid")
    tensors: Literal["per_layer", "merged"] = Field("per_layer", description="contiguous only: buffers per sequence")
    copy_scope: Literal["tensor", "step"] = Field("tensor", description="contiguous only: how long old copies live")
    initial_tokens: int = Field(64, ge=1, description="doubling: first capacity")
    growth_factor: int = Field(2, ge=2, le=MAX_GROWTH_FACTOR, description="doubling: factor")
    step_tokens: int = Field(256, ge=1, description="step: tokens that a buffer grows by")
    decode_growth: str = Field("doubling", description="hybrid: the rule for decode; prefill is exact")
    page_bytes: Bytes = Field(
        2 << 20, ge=1 << 16, le=MAX_BYTES, description="virtual only: bytes of a physical page; drivers give 2MiB"
    )
    block_size: int | None = Field(None, ge=1, description="paged, radix: tokens a block; default: 128 Ascend, 16 CUDA")
    enable_prefix_caching: bool = Field(
        False,
        description="paged, radix: full blocks stay for later requests with the same prefix (vLLM's own default: on)",
    )
    watermark: float | None = Field(
        None, ge=0, lt=1, description="paged only: share of blocks kept free at admission; default: 0, of v0 0.01"
    )
    swap_space_bytes: Bytes = Field(
        4 << 30, ge=0, le=MAX_BYTES, description="paged of v0 only: host memory for requests that are swapped out"
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False, description="paged only: layers with a sliding window keep the whole context, as vLLM's flag"
    )
    mamba_cache_mode: Literal["none", "align", "all"] | None = Field(
        None, description="paged only: states that later requests find; default: all with a prefix cache, else none"
    )
    retention: str = Field(
        "full",
        description="contiguous: full, truncate(n), forget(over, drop), sliding_window(w), sink_recent(sinks, n); "
        "paged: these but forget, in whole blocks (research: no engine does so to a model trained on all)",
    )
    dtype: str = Field(
        "auto", description="vLLM's kv_cache_dtype: auto, float16, bfloat16, fp8, int8_per_token_head ..."
    )
    v_dtype: str | None = Field(None, description="dtype of V where it differs from K's; default: as dtype")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of a policy from another package")


class SloSection(Section):
    """What was promised to whoever asks: the objectives that goodput counts."""

    ttft_s: float | None = Field(None, gt=0, le=1e9, description="longest time to the first token (TTFT); none: any")
    tpot_s: float | None = Field(None, gt=0, le=1e9, description="longest time per output token (TPOT); none: any")
    e2e_s: float | None = Field(
        None, gt=0, le=1e9, description="longest time from arrival to the last token; none: any"
    )
    attainment: float = Field(
        0.9, gt=0, le=1, description="share of requests that must meet them all; less, and --fail-on-slo exits with 3"
    )


class ResultsSection(Section):
    """What is stored."""

    interval_s: float = Field(1.0, gt=0, le=1e9, description="simulated seconds between timeline rows, at most")
    steps: bool = Field(False, description="store every step")
    memory_trace: bool = Field(False, description="store every operation on the allocators")
    cache_events: bool = Field(
        False, description="store every key that the prefix cache stored, removed or cleared, as vLLM's KV events"
    )
    alert_kv_used_bytes: Bytes | None = Field(
        None, ge=1, le=MAX_BYTES, description="report when KV takes more bytes than this; none: never"
    )
    alert_kv_usage: float | None = Field(
        None, gt=0, le=1, description="report when KV takes more than this share of its budget; none: never"
    )
    alert_hit_rate: float | None = Field(
        None, gt=0, le=1, description="report when the KV hit rate falls below this; none: never"
    )
    checkpoint_s: float = Field(
        0.0, ge=0, le=1e9, description="simulated seconds between address maps; 0: about 16 in all"
    )


class CalibrationSection(Section):
    """Where the cost model's coefficients come from."""

    profile: str | None = Field(
        None,
        min_length=1,
        description="file that `hbmtwin calibrate` writes, or the name of a profile that comes along; none: default "
        "coefficients, uncalibrated",
    )
