"""What an engine writes into its log of the memory that it found, in its own words.

::

    vllm, V0            # cuda blocks: 1381, # CPU blocks: 2048    (V0 has blocks in host memory too: 4 GiB)
    vllm, V1            Available KV cache memory: 8.11 GiB
                        GPU KV cache size: 178,880 tokens
                        Maximum concurrency for 40,960 tokens per request: 4.37x
    vllm-ascend         the same; before 0.18 the first in bytes, with the total
    sglang              KV Cache is allocated. #tokens: 97503, K size: 5.95 GB, V size: 5.95 GB      (GB: 2^30 bytes)
    tensorrt-llm        [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).
    mindie, vllm-cpu    no line of their own is known

Sources: ``gpu_worker.py`` and ``kv_cache_utils.py`` of vLLM 0.27.1; public logs of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hbmtwin.sim.engines.figures import GIB

if TYPE_CHECKING:
    from hbmtwin.sim.budget.memory_budget import MemoryBudget
    from hbmtwin.sim.budget.question import BudgetQuestion

V0_SWAP_BYTES = 4 * GIB
"""V0's ``swap_space`` a device, by default."""


def boot_lines(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    """The lines about KV of the start that *b* plans; none where the engine has none that is known, or no block."""
    if b.num_blocks < 1:
        return ()
    return _FORMS[q.rules.engine](q, b)


def _vllm(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    if b.version == "V0":
        return _v0(q, b)
    size = f"{round(b.kv_bytes / GIB, 2)}" if q.rules.since >= (0, 21) else _gib(b.kv_bytes)
    return f"Available KV cache memory: {size} GiB", *_capacity(q, b)


def _v0(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    tokens = b.num_blocks * b.block_size
    return (
        f"the rest of the memory reserved for KV Cache is {_gib(b.kv_bytes)}GiB.",
        f"# cuda blocks: {b.num_blocks}, # CPU blocks: {V0_SWAP_BYTES // b.block_bytes}",
        f"Maximum concurrency for {q.max_model_len} tokens per request: {tokens / q.max_model_len:.2f}x",
    )


def _vllm_ascend(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    if q.rules.since < (0, 18):
        return f"Available memory: {b.kv_bytes}, total memory: {b.total_bytes}", *_capacity(q, b)
    return _vllm(q, b)


def _capacity(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, str]:
    """The two lines that vLLM's engine core writes for every worker."""
    return (
        f"GPU KV cache size: {b.kv_tokens:,} tokens",
        f"Maximum concurrency for {q.max_model_len:,} tokens per request: {b.max_concurrency:.2f}x",
    )


def _sglang(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    tokens = b.num_blocks * b.block_size
    size = tokens * b.kv_bytes_per_token
    if q.model.latent_dim:
        sizes = f"KV size: {_gib(size)} GB"
    else:
        sizes = f"K size: {_gib(size // 2)} GB, V size: {_gib(size // 2)} GB"
    most = min(tokens // 2, min(max(tokens * 512 // q.max_model_len, 2048), 4096))
    return (
        f"KV Cache is allocated. #tokens: {tokens}, {sizes}",
        f"max_total_num_tokens={tokens}, chunked_prefill_size={q.max_num_batched_tokens}, max_prefill_tokens=16384, "
        f"max_running_requests={most}, context_len={q.max_model_len}",
    )


def _tensorrt_llm(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    tokens = b.num_blocks * b.block_size
    return (
        f"[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: {b.num_blocks}",
        f"[TensorRT-LLM][INFO] Number of tokens per block: {b.block_size}.",
        f"[TensorRT-LLM][INFO] [MemUsageChange] Allocated {_gib(b.num_blocks * b.block_bytes)} GiB for max tokens in "
        f"paged KV cache ({tokens}).",
    )


def _unknown(q: BudgetQuestion, b: MemoryBudget) -> tuple[str, ...]:
    return ()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


_FORMS = {
    "vllm": _vllm,
    "vllm-ascend": _vllm_ascend,
    "vllm-cpu": _unknown,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "mindie": _unknown,
}
