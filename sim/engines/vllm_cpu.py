"""vLLM on a CPU: a share of the machine's memory, less what the process holds once it has warmed up.

::

    usable    gpu_memory_utilization x total memory of the NUMA node, rounded up ("despite its name": vLLM's own words)
    KV        usable - resident memory of the process (weights, libraries, what the warm-up left)

Releases before early 2026 take ``VLLM_CPU_KVCACHE_SPACE`` GiB for KV instead, 4 where nothing is said or half of a
node. Nothing is captured, blocks have 128 tokens, the cache keeps 16 bits. Read: ``v1/worker/cpu_worker.py`` and
``platforms/cpu.py`` of vLLM's main branch of 2026, ``arg_utils.py``. One rank is computed.
"""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import hundredths
from hbmtwin.sim.engines.rules import EngineRules
from hbmtwin.sim.engines.settings import EngineArgs, Settings
from hbmtwin.sim.engines.vllm import VLLM, batches

MAX_BATCHED_TOKENS, MAX_SEQS = 2048, 128
"""Of ``vllm serve``, a rank."""


def defaults(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """Those of ``vllm serve`` on a CPU, where everything runs eagerly."""
    return batches(rules, model, args, tokens=MAX_BATCHED_TOKENS, seqs=MAX_SEQS)._replace(enforce_eager=True)


VLLM_CPU = replace(
    VLLM,
    engine="vllm-cpu",
    version="2026",
    since=(0,),
    name="vLLM on a CPU, of 2026",
    vendors=("cpu",),
    defaults=defaults,
    block_size=128,
    sampler_scratch=False,
    activation_spread=0.5,
    moe_activation_spread=0.5,
    charges_graphs=False,
    capture_sizes=(),
    states_bound_sequences=False,
    graph_base_bytes=0,
    graph_layer_bytes=(0, 0, 0),
    graph_moe_bytes=(0, 0, 0),
    graph_mla_factor=1,
    non_torch_bytes={1: hundredths(60, 25, 150)},
    pipeline_non_torch_bytes=hundredths(0, 0, 0),
    expert_group_bytes=hundredths(0, 0, 0),
    group_context_bytes=0,
    moe_context_bytes=0,
    sources={
        **VLLM.sources,
        "activations": "vLLM's formula on CUDA; what a warm-up leaves resident on a CPU has no known figure (L)",
        "non_torch": "Python with its libraries: 0.23 GiB with torch alone, more with vLLM's, not measured (L)",
        "no_graphs": "a CPU has no graphs to capture",
    },
)

PROFILES = (VLLM_CPU,)
"""From the oldest to the newest."""
