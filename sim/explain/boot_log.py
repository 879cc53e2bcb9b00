"""What vLLM and vllm-ascend print while they start: the subtraction, and the three lines that everybody looks for.

=============  ====================================================================================================
0.4 - 0.6      # GPU blocks: B, # CPU blocks: C
0.6 - v0 end   the current vLLM instance can use total_gpu_memory (T) x gpu_memory_utilization (u) = U / model weights
               take W; non_torch_memory takes N; PyTorch activation peak memory takes A; the rest of the memory reserved
               for KV Cache is K / # cuda blocks: B, # CPU blocks: C / Maximum concurrency for L tokens per request: X
v1             Model loading took W / Available KV cache memory: K / GPU KV cache size: T tokens / Maximum concurrency
               for L tokens per request: X / Graph capturing finished in s secs, took G
0.11 and on    Free memory on device (F/T GiB) on startup. Desired GPU memory utilization is (u, U GiB). Actual usage is
               ..., then two values for --kv-cache-memory
vllm-ascend    until 0.13 bytes: Available memory: K, total memory: T; from 0.18 the same with NPU graph memory
=============  ====================================================================================================

Sources: worker.py, gpu_worker.py, kv_cache_utils.py of those releases; vllm-ascend's worker.py; public logs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import form, joined, read_forms

VLLM_BOOT = (
    form("boot_version", "vLLM API server version {version:w}", engine="vllm"),
    form("boot_weights", "Model loading took {weights_bytes}"),
    form("boot_weights", "Loading model weights took {weights_bytes}"),
    form(
        "boot_share",
        "the current vLLM instance can use total_gpu_memory ({total_bytes}) x gpu_memory_utilization "
        "({gpu_memory_utilization}) = {usable_bytes}",
        engine="vllm",
    ),
    form(
        "boot_profile",
        "model weights take {weights_bytes}; non_torch_memory takes {non_torch_bytes}; PyTorch activation peak memory "
        "takes {activation_bytes}; the rest of the memory reserved for KV Cache is {available_kv_bytes}",
        engine="vllm",
    ),
    form(
        "boot_profile",
        "Total non KV cache memory: {non_kv_bytes}; torch peak memory increase: {activation_bytes}; "
        "[non-torch forward increase memory: {non_torch_bytes}; ][total consumed (from mem_get_info): "
        "{consumed_bytes}; ]weights memory: {weights_bytes}",
    ),
    form("boot_available_kv", "Available KV cache memory: {available_kv_bytes}"),
    form(
        "boot_available_kv",
        "Available memory: {available_kv_bytes:B}, total memory: {total_bytes:B}",
        engine="vllm-ascend",
    ),
    form("boot_kv_tokens", "GPU KV cache size: {kv_tokens} tokens"),
    form("boot_kv_tokens", "NPU KV cache size: {kv_tokens} tokens", engine="vllm-ascend"),
    form(
        "boot_concurrency", "Maximum concurrency for {max_model_len} tokens per request: {max_concurrency}x", reach=120
    ),
    form("boot_blocks", "# GPU blocks: {num_gpu_blocks}, # CPU blocks: {num_cpu_blocks}", reach=80),
    form("boot_blocks", "# cuda blocks: {num_gpu_blocks}, # CPU blocks: {num_cpu_blocks}", reach=80),
    form("boot_blocks", "# CUDA blocks: {num_gpu_blocks}, # CPU blocks: {num_cpu_blocks}", reach=80),
    form("boot_blocks", "# npu blocks: {num_gpu_blocks}, # CPU blocks: {num_cpu_blocks}", reach=80),
    form("boot_blocks", "# NPU blocks: {num_gpu_blocks}, # CPU blocks: {num_cpu_blocks}", reach=80),
    form("boot_override", "Overriding num_gpu_blocks={num_gpu_blocks} with num_gpu_blocks_override={override}"),
    form("boot_graphs", "Graph capturing finished in {seconds} secs, took {graph_bytes}"),
    form("boot_graph_estimate", "Estimated CUDA graph memory: {graph_estimate_bytes} total"),
    form(
        "boot_graph_pool",
        "CUDA graph pool memory: {graph_bytes} (actual), {graph_estimate_bytes} (estimated)",
    ),
    form(
        "boot_graph_share",
        "CUDA graph memory profiling is enabled (default since v{since:w}). The current --gpu-memory-utilization="
        "{gpu_memory_utilization} is equivalent to --gpu-memory-utilization={without_graphs} without",
        engine="vllm",
    ),
    form("boot_padding", "Add {padding_layers} padding layers, may waste at most {padding_share:%}% KV cache memory"),
    form(
        "boot_warm_up",
        "Free memory on device ({free_bytes:G}/{total_bytes}) on startup. Desired GPU memory utilization is "
        "({gpu_memory_utilization}, {usable_bytes}). Actual usage{*}{weights_bytes} for weight{*}{activation_bytes} "
        "for peak activation{*}{non_torch_bytes} for non-torch memory{*}{graph_bytes} for {*}--kv-cache-memory="
        "{suggested_kv_bytes:B}",
    ),
    form(
        "boot_warm_up",
        "Free memory on device ({free_bytes:G}/{total_bytes}) on startup. Desired GPU memory utilization is "
        "({gpu_memory_utilization}, {usable_bytes}). Actual usage is {consumed_bytes} for consumed memory{*}"
        "{activation_bytes} for peak activation{*}{graph_bytes} for {*}--kv-cache-memory={suggested_kv_bytes:B}",
    ),
    form("boot_kv_placed", "Current KV cache memory: {available_kv_bytes}", engine="vllm-ascend"),
    form(
        "boot_kv_given",
        "Initial free memory {free_bytes}, reserved {kv_cache_memory_bytes} [memory ]for KV Cache as specified by",
    ),
    form("boot_length", "Using max model len {max_model_len}"),
    form("boot_batch", "Chunked prefill is enabled with max_num_batched_tokens={max_num_batched_tokens}"),
    form(
        "boot_auto_length",
        "Auto-fit max_model_len: reduced from {positions} to {max_model_len} to fit in available GPU memory "
        "({available_kv_bytes} available for KV cache)",
    ),
)
"""Of vLLM and vllm-ascend."""


def read(lines: Sequence[Line]) -> list[Finding]:
    """Kinds ``boot_...``. O(characters)."""
    return read_forms(joined(lines), VLLM_BOOT)
