"""vllm-ascend: vLLM's plan on an NPU, with what differs there.

::

    utilisation x total, rounded down     checked before HCCL and weights; 0.92 from 0.21 as vLLM, 0.90 before
    activations                           the profiled sampler makes 16-bit logits and nothing else: 2 bytes each
    non-torch                             0.15 GiB, HCCL's two buffers a group, 0.1 GiB for ATB with several ranks
    graphs                                captured behind the plan, not subtracted (a switch: it was on in July 2026)
    at run time                           the sampler's 12 bytes a logit, and ATB's tiling, for which asc keeps 150 MiB
    310P                                  half of what is left is kept for operators

Read: vllm-ascend 182b75e (2026-08-22), ``utils.py`` for the bound on captured sizes. "asc" in a source is
vllm-project/vllm-ascend, issue or pull request.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import GIB, MIB, Span, hundredths
from hbmtwin.sim.engines.rules import Account, Division, EngineRules
from hbmtwin.sim.engines.settings import EngineArgs, Settings
from hbmtwin.sim.engines.vllm import SIZES_51, batches

BLOCK_SIZE = 128
"""Where prefix caching or chunked prefill is on, whatever was asked for; beside states the pool finds its own."""
STREAMS = 1920
"""Of a 910B, which all captured graphs share."""


def divide(a: Account) -> Division:
    """``utilisation * total``, rounded down, less what is charged."""
    usable = math.floor(a.total * a.fraction)
    return Division(usable, usable - a.weights - a.activations - a.non_torch - a.graphs)


def divide_310p(a: Account) -> Division:
    """The same, and half of what is left is kept for operators' workspaces."""
    usable, left, _ = divide(a)
    kv = left // 2 if left > 0 else left
    return Division(usable, kv, left - kv)


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """vLLM's for a small device, whatever its memory: the platform does not report it early enough."""
    settings = batches(rules, model, args, tokens=2048, seqs=256)
    if model.mamba is None and (settings.enable_prefix_caching or settings.enable_chunked_prefill):
        return settings._replace(block_size=BLOCK_SIZE)
    return settings


VLLM_ASCEND = EngineRules(
    engine="vllm-ascend",
    version="0.21",
    since=(0, 21),
    name="vllm-ascend, 0.21 or later",
    vendors=("ascend",),
    fraction_name="gpu_memory_utilization",
    divide=divide,
    defaults=defaults,
    fraction=0.92,
    block_size=BLOCK_SIZE,
    logits_value_bytes=2,
    sampler_scratch=False,
    persistent_bytes=GIB // 50,
    activation_spread=0.25,
    moe_activation_spread=0.25,
    run_time_sampler_bytes=12,
    charges_graphs=False,
    capture_sizes=SIZES_51,
    largest_capture_per_seq=1,
    graph_streams=STREAMS,
    graph_base_bytes=GIB // 20,
    graph_layer_bytes=(MIB // 5, 4 * MIB // 100, MIB // 2),
    non_torch_bytes={1: hundredths(15, 0, 20), 2: hundredths(64, 50, 110)},
    pipeline_non_torch_bytes=hundredths(15, 0, 20),
    data_group_bytes=Span(100 * MIB, 50 * MIB, 400 * MIB),
    expert_group_bytes=hundredths(196, 39, 256),
    late_bytes=Span(0, 0, 150 * MIB),
    late_group_bytes=Span(39 * GIB // 100, 195 * GIB // 1000, 39 * GIB // 100),
    sources={
        "activations": "the formula of CUDA with the logits that vllm-ascend makes; two points on NPU (L)",
        "non_torch": "0.15 GiB, with ranks + 2 x 0.195 per HCCL group + 0.1 for ATB: asc 11514, 10122, 14300; with "
        "expert parallelism 2 to 3.2 in public logs, as the MC2 group takes HCCL_BUFFSIZE twice (M)",
        "late": "the pipeline's HCCL buffers, 2 x 0.195 GiB: the profile sends nothing, so no budget has them (L); "
        "for ATB's tiling asc keeps 150 MiB, asc 14300",
        "graphs": "0.05 GiB + 0.2 MiB x sizes x layers: asc 2125, 3879, 4807 (M)",
        "no_graphs": "enforce_eager: nothing is captured",
        "sampler": "12 bytes a logit, which the profile of vllm-ascend leaves out (L)",
    },
)

VLLM_ASCEND_0_7 = replace(
    VLLM_ASCEND,
    version="0.7",
    since=(0,),
    name="vllm-ascend, before 0.18",
    fraction=0.9,
)

VLLM_ASCEND_0_18 = replace(VLLM_ASCEND_0_7, version="0.18", since=(0, 18), name="vllm-ascend, 0.18 to 0.20")

PROFILES = (VLLM_ASCEND_0_7, VLLM_ASCEND_0_18, VLLM_ASCEND)
"""From the oldest to the newest."""


def on_device(rules: EngineRules, device: DeviceSpec) -> EngineRules:
    """*rules* on a 310P, which keeps half and has no MC2 group, and where the pool is measured in its own way."""
    if device.family != "310p":
        return rules
    return replace(rules, name=f"{rules.name}, on 310P", divide=divide_310p, expert_group_bytes=hundredths(39, 19, 50))
