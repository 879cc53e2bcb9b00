"""What can be said to ``fit``, in the words of the engines' own flags, and where each value came from.

::

    given on the command line, or by name  >  SCENARIO file  >  its calibration profile  >  the engine's default

Of a scenario file the keys that are about memory count: its model, its device, ``[engine]``, ``[scheduler]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from hbmtwin.kernels.records import DeviceSpec, ModelShape


class FitError(ValueError):
    """A question that cannot be answered: which option, what is wrong with it, and the cure."""


class FitOptions(TypedDict, total=False):
    """All that can be said; what is left out is the engine's default, or estimated."""

    scenario: Path
    model: str | ModelShape
    device: str | DeviceSpec
    engine: str
    engine_version: str

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    max_model_len: int
    """-1: as long as fits."""
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    block_size: int
    dtype: str
    """Of computing: auto, float16, bfloat16 or float32."""
    kv_cache_dtype: str
    quantization: str
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enforce_eager: bool
    kv_cache_memory_bytes: int
    num_gpu_blocks_override: int
    num_speculative_tokens: int

    mem_fraction_static: float
    """SGLang's name of its share."""
    free_gpu_memory_fraction: float
    """TensorRT-LLM's."""
    npu_mem_size: float
    """MindIE's ``npuMemSize``: GiB of KV, -1 for automatic."""

    total_memory_bytes: int
    available_kv_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    graph_bytes: int
    other_tenant_bytes: int
    kv_bytes_per_token: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


AUTO_LENGTH = -1
"""``max_model_len`` of vLLM's ``auto``."""

Origin = Literal["given", "scenario", "profile", "default"]


class Argument(NamedTuple):
    """A setting that the answer rests on."""

    name: str
    value: Any
    origin: Origin


AT_LEAST_ONE = frozenset(
    {
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs", "block_size"),
        *("max_num_batched_tokens", "num_gpu_blocks_override", "total_memory_bytes", "kv_bytes_per_token"),
        *("num_layers", "num_kv_heads", "head_dim", "kv_cache_memory_bytes", "available_kv_bytes", "weights_bytes"),
    }
)
AT_LEAST_ZERO = frozenset(
    {
        *("num_speculative_tokens", "activation_bytes", "non_torch_bytes", "graph_bytes", "other_tenant_bytes"),
    }
)
ENGINES_OF = {
    "gpu_memory_utilization": ("vllm", "vllm-ascend", "vllm-cpu", "mindie"),
    "mem_fraction_static": ("sglang",),
    "free_gpu_memory_fraction": ("tensorrt-llm",),
    "npu_mem_size": ("mindie",),
    "kv_cache_memory_bytes": ("vllm", "vllm-ascend", "vllm-cpu"),
    "num_gpu_blocks_override": ("vllm", "vllm-ascend", "vllm-cpu"),
}
"""Options that some engines have only. MindIE's NPU_MEMORY_FRACTION goes by vLLM's name."""
FRACTIONS = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
"""The share of the device, of which each engine has one."""
SAFE_UTILIZATION = 0.95
"""The most that is advised: above it nothing is left for what the engine allocates after its plan."""
LARGEST = 2**44
"""16 TiB, or as many tokens: beyond any device, and a slip of the unit lies there."""
MOST_COUNTED = 2**20
"""Ranks, layers, heads, sequences or draft tokens: beyond any server."""
COUNTED = frozenset(
    {
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs"),
        *("num_speculative_tokens", "num_layers", "num_kv_heads", "head_dim"),
    }
)

_A_VERSION = re.compile(r"\d|^(newest|latest|main|nightly)$")
"""A release, or a word for the newest rules."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise FitError for a name that is not known, and for a number out of range."""
    for name, value in options.items():
        if name not in FitOptions.__annotations__:
            near = get_close_matches(name, FitOptions.__annotations__, n=1)
            raise FitError(f"{flag(name)}: no such option" + (f"; did you mean {flag(near[0])}?" if near else ""))
        if name in FRACTIONS and not 0 < value <= 1:
            raise FitError(f"{flag(name)}: a share is above 0 and at most 1, not {value}")
        least = 1 if name in AT_LEAST_ONE else 0 if name in AT_LEAST_ZERO else None
        most = MOST_COUNTED if name in COUNTED else LARGEST
        if least is not None and not least <= value <= most:
            raise FitError(f"{flag(name)}: from {least} to {most}, not {value}")
    gib = options.get("npu_mem_size", -1)
    if gib != -1 and not 0 < gib <= LARGEST / 2**30:
        raise FitError(f"{flag('npu_mem_size')}: GiB of KV, above 0, or -1 for automatic, not {gib:g}")
    version = options.get("engine_version", "newest")
    if not _A_VERSION.search(version):
        raise FitError(f"{flag('engine_version')}: a release such as 0.18, or leave it out, not {version!r}")
    length = options.get("max_model_len", AUTO_LENGTH)
    if length != AUTO_LENGTH and not 1 <= length <= LARGEST:
        raise FitError(f"{flag('max_model_len')}: from 1 to {LARGEST}, or auto for as long as fits, not {length}")


def fraction_option(engine: str) -> str:
    """The option by which *engine*'s share of the device is set here."""
    return next(name for name in FRACTIONS if engine in ENGINES_OF[name])


def flag(name: str) -> str:
    """The option as it is typed on a command line."""
    return "--" + name.replace("_", "-")
