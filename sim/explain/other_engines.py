"""What TensorRT-LLM and MindIE print about their KV caches.

::

    TensorRT-LLM   Max KV cache blocks per sequence: M [window size=w], tokens per block=b, primary blocks=P, ...
                   Number of blocks in KV cache primary pool: P / Number of tokens per block: b
                   [MemUsageChange] Allocated A GiB for max tokens in paged KV cache (T)
    MindIE         Warmup failed, because of ... out of memory when `maxInputTokenLen` set to L
                   "npuMemSize": G in its config.json

Sources: kvCacheManager.cpp in public copies; public threads of GPUStack and MindIE.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import form, joined, read_forms

OTHERS = (
    form(
        "trt_blocks",
        "Max KV cache blocks per sequence: {blocks_per_request}{*}tokens per block={block_size}, primary blocks="
        "{num_gpu_blocks}[, secondary blocks={secondary_blocks}][, max sequence length={max_model_len}]",
        reach=300,
        engine="tensorrt-llm",
    ),
    form(
        "trt_primary_blocks",
        "Number of blocks in KV cache primary pool: {num_gpu_blocks}",
        reach=80,
        engine="tensorrt-llm",
    ),
    form("trt_block_size", "Number of tokens per block: {block_size}", reach=50, engine="tensorrt-llm"),
    form(
        "trt_kv",
        "Allocated {available_kv_bytes} for max tokens in paged KV cache ({kv_tokens})",
        reach=120,
        engine="tensorrt-llm",
    ),
    form("trt_kv_bytes", "Allocate {available_kv_bytes:B} bytes for k/v cache", engine="tensorrt-llm"),
    form("trt_tokens", "Using {kv_tokens} tokens in paged KV cache", engine="tensorrt-llm"),
    form(
        "trt_free",
        "Memory usage when calculating max tokens in paged kv cache: total: {total_bytes}, available: {free_bytes}",
        engine="tensorrt-llm",
    ),
    form(
        "trt_too_few_tokens",
        "maxTokensInPagedKvCache must be large enough to process at least 1 sequence",
        engine="tensorrt-llm",
    ),
    form(
        "mindie_warmup",
        "Warmup failed, because of{*}out of memory when `maxInputTokenLen` set to {max_input_tokens}",
        engine="mindie",
    ),
    form("mindie_config", '"npuMemSize" : {npu_mem_size}', reach=40, engine="mindie"),
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Kinds ``trt_...`` and ``mindie_...``. O(characters)."""
    return read_forms(joined(lines), OTHERS)
