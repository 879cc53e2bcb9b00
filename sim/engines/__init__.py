"""Serving engines, one a file: how each divides the device, what it takes when nothing is said, and its figures.

::

    engine         what may be used                             what is subtracted before KV
    vllm           utilisation x total, rounded up              weights, activations, non-torch; graphs from 0.21
    vllm-ascend    utilisation x total, rounded down            weights, activations, non-torch; on 310P half is kept
    vllm-cpu       utilisation x total, rounded up              weights, activations, non-torch
    sglang         mem_fraction_static x what is free           weights
    mindie         NPU_MEMORY_FRACTION x total, or npuMemSize   weights, activations, non-torch
    tensorrt-llm   everything that is free                      weights, activations, non-torch; then a fraction of it
"""

from hbmtwin.sim.engines.choose import ENGINES, engine_rules, rules_for
from hbmtwin.sim.engines.figures import GIB, MIB, Estimate
from hbmtwin.sim.engines.overheads import (
    Ranks,
    activation_peak,
    context,
    graph_pool,
    late_buffers,
    non_torch,
    run_time_sampler,
)
from hbmtwin.sim.engines.rules import Account, Division, EngineRules
from hbmtwin.sim.engines.settings import BatchRule, EngineArgs, Settings, settings_of

__all__ = [
    "ENGINES",
    "GIB",
    "MIB",
    "Account",
    "BatchRule",
    "Division",
    "EngineArgs",
    "EngineRules",
    "Estimate",
    "Ranks",
    "Settings",
    "activation_peak",
    "context",
    "engine_rules",
    "graph_pool",
    "late_buffers",
    "non_torch",
    "rules_for",
    "run_time_sampler",
    "settings_of",
]
