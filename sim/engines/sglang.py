"""SGLang: a share of what is free before loading, and no profiling run.

::

    KV = free after loading - (1 - mem_fraction_static) x free before loading

Activations and graphs must live in what the fraction leaves. Its default keeps 512 MiB, 1.5 MiB a token of the largest
chunk, 1/8 GiB a rank and 2 MiB a sequence of the largest captured batch, at least 10 GiB on a large device. What
libraries take after loading lives in the rest too. Read: SGLang 0.5.23; other releases differ.
"""

from __future__ import annotations

import math

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import GIB, MIB, hundredths
from hbmtwin.sim.engines.rules import Account, Division, EngineRules
from hbmtwin.sim.engines.settings import EngineArgs, Settings, or_else

_CUDA_ROWS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_ASCEND_ROWS = ((32, 4096, 16, 64), (64, 8192, 64, 256))
"""Device memory in GiB (up to), chunked_prefill_size, largest captured batch below 4 ranks and from there on."""
_LARGE = (16_384, 512, 512)
SAFE_FRACTION = 0.95


def divide(a: Account) -> Division:
    """``mem_fraction_static`` of what is free before loading, less the weights."""
    free = a.total - a.tenants - a.context
    usable = free - math.ceil((1 - a.fraction) * free)
    return Division(usable, usable - a.weights)


def batch_limits(device: DeviceSpec, tensor_parallel_size: int) -> tuple[int, int]:
    """``chunked_prefill_size`` and the largest captured decode batch, by device memory."""
    gib = device.memory_bytes / GIB
    rows = _CUDA_ROWS
    if device.vendor == "ascend":
        row = next((row for row in _ASCEND_ROWS if gib <= row[0]), None)
        if row is not None:
            return row[1], row[2] if tensor_parallel_size < 4 else row[3]
    row = next((row for row in rows if gib < row[0]), None)
    chunk, few, many = _LARGE if row is None else row[1:]
    return chunk, few if tensor_parallel_size < 4 else many


def default_fraction(device: DeviceSpec, *, chunk: int, largest_batch: int, ranks: int) -> float:
    """``mem_fraction_static`` where nobody says one: what is left when the engine's own reserve is taken."""
    total_mib = device.memory_bytes / MIB
    reserved = 512 + 1.5 * max(chunk, 2048) + ranks / 8 * 1024 + 2 * largest_batch
    if total_mib > 60 * 1024:
        reserved = max(reserved, 10_240.0)
    return max(0.0, round((total_mib - reserved) / total_mib, 3))


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of 0.5.23. ``max_num_seqs`` is the largest captured batch; how many may run follows from the pool."""
    chunk, largest = batch_limits(device, args.tensor_parallel_size)
    tokens = or_else(args.max_num_batched_tokens, chunk)
    seqs = or_else(args.max_num_seqs, largest)
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    return Settings(
        gpu_memory_utilization=or_else(
            args.gpu_memory_utilization,
            default_fraction(device, chunk=tokens, largest_batch=largest, ranks=ranks),
        ),
        max_model_len=or_else(args.max_model_len, model.max_position_embeddings),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=or_else(args.block_size, 128 if device.vendor == "ascend" else rules.block_size),
        enable_prefix_caching=or_else(args.enable_prefix_caching, True),
        enable_chunked_prefill=or_else(args.enable_chunked_prefill, True),
        enforce_eager=or_else(args.enforce_eager, False),
    )


SGLANG = EngineRules(
    engine="sglang",
    version="0.5",
    since=(0,),
    name="SGLang 0.5",
    vendors=("nvidia", "ascend"),
    fraction_name="mem_fraction_static",
    divide=divide,
    defaults=defaults,
    fraction=SAFE_FRACTION,
    block_size=1,
    claims_free=False,
    profiles=False,
    logits_value_bytes=14,
    sampler_scratch=False,
    persistent_bytes=GIB // 20,
    activation_spread=0.5,
    moe_activation_spread=0.5,
    capture_sizes=(1, 2, 4, *range(8, 513, 8)),
    piecewise_graphs=False,
    full_graphs=True,
    graph_base_bytes=3 * GIB // 10,
    graph_layer_bytes=(17 * MIB // 100, 8 * MIB // 100, MIB // 2),
    non_torch_bytes={1: hundredths(25, 0, 50), 2: hundredths(45, 0, 210)},
    pipeline_non_torch_bytes=hundredths(7, 0, 50),
    group_context_bytes=GIB,
    sources={
        "activations": "vLLM's formula; SGLang profiles nothing, and needs it when it serves (L)",
        "non_torch": "as vLLM's before 0.19 on CUDA; no figure of SGLang's own (L)",
        "late": "none counted",
        "graphs": "vLLM's 0.30 GiB + 0.17 MiB x graphs x layers; no figure of SGLang's own (L)",
        "no_graphs": "disable_cuda_graph: nothing is captured",
        "sampler": "counted with the activations",
    },
)

PROFILES = (SGLANG,)
