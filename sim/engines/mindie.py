"""MindIE on Ascend: ``npuMemSize`` GiB for KV, or what a fraction of the device leaves.

::

    npuMemSize = -1    total x NPU_MEMORY_FRACTION - weights - peak of the warm-up
    npuMemSize = n     n GiB (``kv_cache_memory_bytes`` here)

The fraction is 0.8 in the code of atb-models and 0.9 in the option list of a newer server; which release changed it is
not known, and guides set 0.92 to 0.98. Nothing is captured. Prompts are computed whole, up to ``maxPrefillTokens``.
"""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import hundredths
from hbmtwin.sim.engines.rules import EngineRules
from hbmtwin.sim.engines.settings import BatchRule, EngineArgs, Settings, or_else
from hbmtwin.sim.engines.vllm_ascend import VLLM_ASCEND, divide

MAX_PREFILL_TOKENS = 8192
MAX_BATCH_SIZE = 200


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of its configuration file. A longest prompt must fit into a prefill batch, which is whole."""
    length = or_else(args.max_model_len, model.max_position_embeddings)
    chunked = or_else(args.enable_chunked_prefill, False)  # split-fuse is a plug-in
    rule = None if chunked or args.max_num_batched_tokens is not None else BatchRule(MAX_PREFILL_TOKENS)
    default = MAX_PREFILL_TOKENS if rule is None else rule.tokens(length)
    return Settings(
        gpu_memory_utilization=or_else(args.gpu_memory_utilization, rules.fraction),
        max_model_len=length,
        max_num_seqs=or_else(args.max_num_seqs, MAX_BATCH_SIZE),
        max_num_batched_tokens=or_else(args.max_num_batched_tokens, default),
        block_size=or_else(args.block_size, rules.block_size),
        enable_prefix_caching=or_else(args.enable_prefix_caching, False),
        enable_chunked_prefill=chunked,
        enforce_eager=True,
        batch_rule=rule,
    )


MINDIE = replace(
    VLLM_ASCEND,
    engine="mindie",
    version="2.0",
    since=(2,),
    name="MindIE 2.0 or later",
    fraction_name="NPU_MEMORY_FRACTION",
    divide=divide,
    defaults=defaults,
    fraction=0.9,
    claims_free=False,
    capture_sizes=(),
    activation_spread=0.5,
    moe_activation_spread=0.5,
    run_time_sampler_bytes=0,
    logits_value_bytes=14,
    non_torch_bytes={1: hundredths(25, 0, 50), 2: hundredths(64, 50, 110)},
    sources={
        **VLLM_ASCEND.sources,
        "activations": "vLLM's formula for what the warm-up of MindIE computes; no figure of its own (L)",
        "no_graphs": "MindIE captures no graphs",
        "sampler": "counted with the warm-up",
    },
)
MINDIE_1 = replace(MINDIE, version="1.0", since=(0,), name="MindIE 1", fraction=0.8)

PROFILES = (MINDIE_1, MINDIE)
"""From the oldest to the newest."""
