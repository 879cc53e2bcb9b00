"""TensorRT-LLM: a fraction of what is left when weights and activations have been taken from all that is free.

::

    KV = free_gpu_memory_fraction x (total - peak of a profiling run, torch and non-torch)

Read: ``_util.py`` of the PyTorch flow and ``llm_args.py``. Graphs are captured behind the cache, in what the fraction
leaves. The profiling run has a small cache of its own, which is given back and counted as left.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import hundredths
from hbmtwin.sim.engines.rules import Account, Division, EngineRules
from hbmtwin.sim.engines.settings import EngineArgs, Settings, or_else
from hbmtwin.sim.engines.vllm import VLLM

MAX_NUM_TOKENS = 8192
MAX_BATCH_SIZE = 2048


def divide(a: Account) -> Division:
    """``free_gpu_memory_fraction`` of what is left; it lays claim to everything that is free."""
    usable = a.total - a.tenants - a.context
    left = usable - a.weights - a.activations - a.non_torch - a.graphs
    return Division(usable, math.floor(left * a.fraction) if left > 0 else left)


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of ``LlmArgs`` and ``KvCacheConfig``: reuse of blocks is on, prompts are computed whole."""
    tokens = or_else(args.max_num_batched_tokens, MAX_NUM_TOKENS)
    return Settings(
        gpu_memory_utilization=or_else(args.gpu_memory_utilization, rules.fraction),
        max_model_len=or_else(args.max_model_len, model.max_position_embeddings),
        max_num_seqs=or_else(args.max_num_seqs, MAX_BATCH_SIZE),
        max_num_batched_tokens=tokens,
        block_size=or_else(args.block_size, rules.block_size),
        enable_prefix_caching=or_else(args.enable_prefix_caching, True),
        enable_chunked_prefill=or_else(args.enable_chunked_prefill, False),
        enforce_eager=or_else(args.enforce_eager, False),
    )


TENSORRT_LLM = replace(
    VLLM,
    engine="tensorrt-llm",
    version="1.0",
    since=(0,),
    name="TensorRT-LLM, PyTorch flow",
    fraction_name="free_gpu_memory_fraction",
    divide=divide,
    defaults=defaults,
    fraction=0.9,
    block_size=32,
    claims_free=False,
    sampler_scratch=False,
    activation_spread=0.5,
    moe_activation_spread=0.5,
    charges_graphs=False,
    piecewise_graphs=False,
    full_graphs=True,
    states_bound_sequences=False,
    non_torch_bytes={1: hundredths(25, 0, 50), 2: hundredths(45, 0, 210)},
    sources={
        **VLLM.sources,
        "activations": "vLLM's formula; no figure of TensorRT-LLM's own (L)",
        "non_torch": "as vLLM's before 0.19; no figure of TensorRT-LLM's own (L)",
        "graphs": "vLLM's 0.30 GiB + 0.17 MiB x graphs x layers; no figure of TensorRT-LLM's own (L)",
        "no_graphs": "cuda_graph_config is off: nothing is captured",
    },
)

PROFILES = (TENSORRT_LLM,)
