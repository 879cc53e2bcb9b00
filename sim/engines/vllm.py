"""vLLM on CUDA: a share of the whole device, less what a profiling run took.

::

    release       sampler's copies    non-torch, 1 rank / more    graphs                        default utilisation
    0.5 to 0.7    38 bytes a logit    0.13 / 0.30 GiB             35 sizes, once                0.90    V0
    0.8 to 0.10   38                  0.13 / 0.45                 67 sizes, piecewise           0.90
    0.11          38                  0.13 / 0.45                 67 sizes, piecewise + full    0.90
    0.12 to 0.16  38                  0.13 / 0.45                 51 sizes, piecewise + full    0.90
    0.17          14 and a scratch    0.13 / 0.45                 as before                     0.90
    0.18          14 and a scratch    0.25 / 0.45                 as before                     0.90
    0.19, 0.20    14 and a scratch    0.25 / 2.08                 as before                     0.90
    0.21 on       14 and a scratch    0.25 / 2.08                 subtracted, estimated         0.92

V0 computes prompts whole unless told otherwise, and so profiles a batch of ``max_model_len`` tokens; above 32,768 it
turns chunked prefill on by itself and profiles 2,048 (512 before 0.6.5). That hybrids need a block a sequence is of
early 2026 (issue 34094): from which release on was not read, 0.17 is supposed. Read: vLLM 0.27.1 (``gpu_worker.py``,
``arg_utils.py``, ``config/vllm.py``, ``config/compilation.py``), ``arg_utils.py`` of the V0 line.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import GIB, MIB, hundredths
from hbmtwin.sim.engines.rules import Account, Division, EngineRules
from hbmtwin.sim.engines.settings import BatchRule, EngineArgs, Settings, or_else

LONG_CONTEXT = 32_768
"""V0: above it chunked prefill turns itself on."""
V0_BATCH = 2048
LARGE_DEVICE_BYTES = 70 * GIB
"""From here on the larger batches are the default, except on an A100."""


def divide(a: Account) -> Division:
    """``utilisation * total``, rounded up to a byte, less what is charged."""
    usable = math.ceil(a.total * a.fraction)
    return Division(usable, usable - a.weights - a.activations - a.non_torch - a.graphs)


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of ``vllm serve`` with the V1 engine: chunked prefill and prefix caching on, batches by device memory."""
    large = device.memory_bytes >= LARGE_DEVICE_BYTES and "a100" not in device.name.lower()
    return batches(rules, model, args, tokens=8192 if large else 2048, seqs=1024 if large else 256)


def batches(rules: EngineRules, model: ModelShape, args: EngineArgs, *, tokens: int, seqs: int) -> Settings:
    """V1's settings with these defaults of ``max_num_batched_tokens`` and ``max_num_seqs``.

    Without chunked prefill a batch holds at least one longest prompt; never more than all sequences at full length.
    """
    length = or_else(args.max_model_len, model.max_position_embeddings)
    chunked = or_else(args.enable_chunked_prefill, True)
    rule = None if chunked or args.max_num_batched_tokens is not None else BatchRule(tokens)
    most_seqs = or_else(args.max_num_seqs, seqs)
    default = tokens if rule is None else rule.tokens(length)
    batched = or_else(args.max_num_batched_tokens, min(default, most_seqs * length))
    return Settings(
        gpu_memory_utilization=or_else(args.gpu_memory_utilization, rules.fraction),
        max_model_len=length,
        max_num_seqs=or_else(args.max_num_seqs, min(seqs, batched)),
        max_num_batched_tokens=batched,
        block_size=or_else(args.block_size, rules.block_size),
        enable_prefix_caching=or_else(args.enable_prefix_caching, True),
        enable_chunked_prefill=chunked,
        enforce_eager=or_else(args.enforce_eager, False),
        batch_rule=rule,
    )


def v0_defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of V0: prompts are computed whole up to a ``max_model_len`` of 32,768, nothing is cached.

    Models with a sliding window or states, and MLA, never turn chunked prefill on by themselves.
    """
    length = or_else(args.max_model_len, model.max_position_embeddings)
    alike = not model.window and model.mamba is None and not model.latent_dim
    by_itself = alike and length > LONG_CONTEXT
    chunked = or_else(args.enable_chunked_prefill, by_itself)
    rule = BatchRule(V0_BATCH)
    if args.enable_chunked_prefill is None and alike:
        rule = BatchRule(V0_BATCH, whole_up_to=LONG_CONTEXT, chunk_tokens=V0_BATCH)
    follows = args.max_num_batched_tokens is None and not args.enable_chunked_prefill
    batched = rule.tokens(length) if follows else or_else(args.max_num_batched_tokens, V0_BATCH)
    return Settings(
        gpu_memory_utilization=or_else(args.gpu_memory_utilization, rules.fraction),
        max_model_len=length,
        max_num_seqs=or_else(args.max_num_seqs, 256),
        max_num_batched_tokens=batched,
        block_size=or_else(args.block_size, rules.block_size),
        enable_prefix_caching=or_else(args.enable_prefix_caching, False),
        enable_chunked_prefill=chunked,
        enforce_eager=or_else(args.enforce_eager, False),
        batch_rule=rule if follows else None,
    )


SIZES_67 = (1, 2, 4, *range(8, 513, 8))
SIZES_51 = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))

_SOURCES = {
    "activations": "fit to 30 boot logs of vLLM, 1.2 % mean error (confidence H for dense models)",
    "non_torch": "growth in profiling, boot logs of vLLM 0.19 on H100, llm-d-planner d3121e05 (H)",
    "late": "none counted: vLLM's communicators come before profiling; torch's, which sends, has no known figure",
    "graphs": "0.30 GiB + 0.17 MiB x graphs x layers, boot logs of vLLM 0.19 (H)",
    "no_graphs": "enforce_eager: nothing is captured",
    "sampler": "profiled with the activations",
}

VLLM = EngineRules(
    engine="vllm",
    version="0.21",
    since=(0, 21),
    name="vLLM on CUDA, 0.21 or later",
    vendors=("nvidia",),
    fraction_name="gpu_memory_utilization",
    divide=divide,
    defaults=defaults,
    fraction=0.92,
    logits_value_bytes=14,
    persistent_bytes=GIB // 20,
    activation_spread=0.03,
    charges_graphs=True,
    capture_sizes=SIZES_51,
    largest_capture_per_seq=2,
    full_graphs=True,
    states_bound_sequences=True,
    graph_base_bytes=3 * GIB // 10,
    graph_layer_bytes=(17 * MIB // 100, MIB // 10, 24 * MIB // 100),
    graph_moe_bytes=hundredths(35, 0, 60),
    graph_mla_factor=2,
    non_torch_bytes={1: hundredths(25, 7, 46), 2: hundredths(208, 30, 210), 4: hundredths(217, 50, 220)},
    pipeline_non_torch_bytes=hundredths(7, 7, 46),
    expert_group_bytes=hundredths(0, 0, 100),
    group_context_bytes=GIB,
    moe_context_bytes=GIB // 2,
    sources=_SOURCES,
)

VLLM_0_19 = replace(
    VLLM,
    version="0.19",
    since=(0, 19),
    name="vLLM on CUDA, 0.19 or 0.20",
    fraction=0.9,
    charges_graphs=False,
    run_time_sampler_bytes=4,
    sources={
        **_SOURCES,
        "sampler": "4 bytes a logit are asked for when the sampler is warmed up, behind the graphs: a failed start of "
        "gpt-oss-20b, 786 MiB, llm-d-planner (M)",
    },
)
_BEFORE_0_19 = {
    **VLLM_0_19.sources,
    "non_torch": "growth in profiling, vLLM 0.11 to 0.18, llm-d-planner issue 194; several ranks 0.3 to 0.6 (M)",
}
VLLM_0_18 = replace(
    VLLM_0_19,
    version="0.18",
    since=(0, 18),
    name="vLLM on CUDA, 0.18",
    non_torch_bytes={1: hundredths(25, 7, 46), 2: hundredths(45, 30, 210)},
    sources=_BEFORE_0_19,
)
VLLM_0_17 = replace(
    VLLM_0_18,
    version="0.17",
    since=(0, 17),
    name="vLLM on CUDA, 0.17",
    non_torch_bytes={1: hundredths(13, 7, 25), 2: hundredths(45, 30, 60)},
)
VLLM_0_12 = replace(
    VLLM_0_17,
    version="0.12",
    since=(0, 12),
    name="vLLM on CUDA, 0.12 to 0.16",
    logits_value_bytes=38,
    states_bound_sequences=False,
    sampler_scratch=False,
    sources={
        **_BEFORE_0_19,
        "activations": "the sampler sorts: 38 bytes a logit, boot logs of vLLM 0.10 to 0.16 (H for dense models)",
    },
)
VLLM_0_11 = replace(VLLM_0_12, version="0.11", since=(0, 11), name="vLLM on CUDA, 0.11", capture_sizes=SIZES_67)
VLLM_0_8 = replace(
    VLLM_0_11,
    version="0.8",
    since=(0, 8),
    name="vLLM on CUDA, 0.8 to 0.10",
    full_graphs=False,
)
VLLM_V0 = replace(
    VLLM_0_8,
    version="V0",
    since=(0,),
    name="vLLM on CUDA, V0 (before 0.8)",
    defaults=v0_defaults,
    capture_sizes=(1, 2, 4, *range(8, 257, 8)),
    largest_capture_per_seq=1,
    non_torch_bytes={1: hundredths(13, 7, 46), 2: hundredths(30, 30, 60)},
)

PROFILES = (VLLM_V0, VLLM_0_8, VLLM_0_11, VLLM_0_12, VLLM_0_17, VLLM_0_18, VLLM_0_19, VLLM)
"""From the oldest to the newest."""
