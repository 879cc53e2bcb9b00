"""What a text says, in sentences for somebody who has never read such a log.

::

    boot_available_kv  TP0 3.04 GiB, TP1 3.11 GiB   ->   3.04 GiB are left for the KV cache (line 12; TP0 has the least)
    boot_concurrency   40,960 tokens, 4.37x         ->   4.37 requests of 40,960 tokens fit at once (line 20)

One sentence a kind: of ranks that differ the one with the least (or, of what is held, the most) is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.printed import Printed
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

ENGINES = {
    "vllm": Phrase("vLLM", "vLLM"),
    "vllm-ascend": Phrase("vLLM on Ascend (vllm-ascend)", "昇腾上的 vLLM（vllm-ascend）"),
    "sglang": Phrase("SGLang", "SGLang"),
    "tensorrt-llm": Phrase("TensorRT-LLM", "TensorRT-LLM"),
    "mindie": Phrase("MindIE", "MindIE"),
}
SERVER = Phrase("a server: {engine}{version}", "服务：{engine}{version}")
SERVER_MODEL = Phrase("a server: {engine}{version} with {model}", "服务：{engine}{version}，模型 {model}")
SETTINGS = Phrase("its settings: {settings}", "参数：{settings}")

AT = Phrase("{said} (line {line})", "{said}（第 {line} 行）")
AT_RANK = Phrase("{said} (line {line}, {rank})", "{said}（第 {line} 行，{rank}）")
AT_RANKS = Phrase(
    "{said} (line {line}, {rank}; {count} ranks say so of themselves, from {low} to {high})",
    "{said}（第 {line} 行，{rank}；共 {count} 个 rank，{low} 到 {high}）",
)


class Telling(NamedTuple):
    """How a kind is told: of which number, and whether the least or the most of it counts."""

    phrase: Phrase
    number: str
    most: bool = False


TELLINGS: dict[str, Telling] = {
    "boot_weights": Telling(
        Phrase("the weights take {weights_bytes} on a rank", "每卡权重占用 {weights_bytes}"), "weights_bytes", True
    ),
    "boot_share": Telling(
        Phrase(
            "the engine may use {usable_bytes}: {gpu_memory_utilization} of {total_bytes}",
            "引擎可用 {usable_bytes}：{total_bytes} 的 {gpu_memory_utilization}",
        ),
        "usable_bytes",
    ),
    "boot_available_kv": Telling(
        Phrase("{available_kv_bytes} are left for the KV cache", "留给 KV 缓存 {available_kv_bytes}"),
        "available_kv_bytes",
    ),
    "boot_kv_given": Telling(
        Phrase(
            "{kv_cache_memory_bytes} are set for the KV cache by kv_cache_memory_bytes; nothing was measured",
            "kv_cache_memory_bytes 直接指定 KV 缓存 {kv_cache_memory_bytes}，没有测量",
        ),
        "kv_cache_memory_bytes",
    ),
    "boot_kv_tokens": Telling(
        Phrase("the KV cache holds {kv_tokens} tokens", "KV 缓存可容纳 {kv_tokens} 个 token"), "kv_tokens"
    ),
    "boot_blocks": Telling(
        Phrase("the KV cache has {num_gpu_blocks} blocks", "KV 缓存共 {num_gpu_blocks} 块"), "num_gpu_blocks"
    ),
    "boot_concurrency": Telling(
        Phrase(
            "{max_concurrency} requests of {max_model_len} tokens fit at once",
            "可同时容纳 {max_concurrency} 条 {max_model_len} token 的请求",
        ),
        "max_concurrency",
    ),
    "boot_graphs": Telling(
        Phrase("captured graphs took {graph_bytes}", "图捕获占用 {graph_bytes}"), "graph_bytes", True
    ),
    "boot_graph_estimate": Telling(
        Phrase("graphs are estimated at {graph_estimate_bytes}", "图捕获预计占用 {graph_estimate_bytes}"),
        "graph_estimate_bytes",
        True,
    ),
    "boot_graph_share": Telling(
        Phrase(
            "graphs are charged to the utilisation: {gpu_memory_utilization} leaves as much for KV as {without_graphs} "
            "did before 0.21",
            "图捕获计入 gpu_memory_utilization：现在的 {gpu_memory_utilization} 相当于 0.21 之前的 {without_graphs}",
        ),
        "without_graphs",
    ),
    "boot_padding": Telling(
        Phrase(
            "layers of unlike kinds share pages: {padding_layers} padding layers, up to {padding_share} of the KV "
            "cache is wasted",
            "不同类型的层共用同样大小的页：补齐 {padding_layers} 层，最多浪费 KV 缓存的 {padding_share}",
        ),
        "padding_layers",
    ),
    "boot_warm_up": Telling(
        Phrase(
            "{free_bytes} of {total_bytes} were free at the start, and the engine may use {usable_bytes}",
            "启动时 {total_bytes} 中空闲 {free_bytes}，引擎可用 {usable_bytes}",
        ),
        "free_bytes",
    ),
    "boot_auto_length": Telling(
        Phrase(
            "max_model_len was cut from {positions} to {max_model_len} so that it fits",
            "max_model_len 自动从 {positions} 降到 {max_model_len} 以放下",
        ),
        "max_model_len",
    ),
    "sglang_load_end": Telling(
        Phrase("{load_end_bytes} were free once the weights were loaded", "加载权重后空闲 {load_end_bytes}"),
        "load_end_bytes",
    ),
    "sglang_pool_end": Telling(
        Phrase("{pool_end_bytes} are left beside the token pool", "token 池之外剩余 {pool_end_bytes}"),
        "pool_end_bytes",
    ),
    "sglang_pool": Telling(
        Phrase(
            "the token pool holds {kv_tokens} tokens; a request has at most {max_model_len}",
            "token 池可容纳 {kv_tokens} 个 token；单条请求最长 {max_model_len}",
        ),
        "kv_tokens",
    ),
    "sglang_graphs": Telling(
        Phrase("captured graphs took {graph_bytes}", "图捕获占用 {graph_bytes}"), "graph_bytes", True
    ),
    "trt_kv": Telling(
        Phrase(
            "the KV cache takes {available_kv_bytes} and holds {kv_tokens} tokens",
            "KV 缓存占用 {available_kv_bytes}，可容纳 {kv_tokens} 个 token",
        ),
        "kv_tokens",
    ),
    "trt_tokens": Telling(
        Phrase("the KV cache holds {kv_tokens} tokens", "KV 缓存可容纳 {kv_tokens} 个 token"), "kv_tokens"
    ),
    "trt_free": Telling(
        Phrase(
            "{free_bytes} of {total_bytes} were free when the KV cache was sized",
            "确定 KV 缓存大小时 {total_bytes} 中空闲 {free_bytes}",
        ),
        "free_bytes",
    ),
    "trt_blocks": Telling(
        Phrase(
            "the KV cache has {num_gpu_blocks} blocks of {block_size} tokens",
            "KV 缓存共 {num_gpu_blocks} 块，每块 {block_size} 个 token",
        ),
        "num_gpu_blocks",
    ),
    "mindie_config": Telling(
        Phrase(
            "npuMemSize {npu_mem_size}: GiB for KV on each NPU (-1: automatic)",
            "npuMemSize {npu_mem_size}：每卡 KV 的 GiB 数（-1 为自动）",
        ),
        "npu_mem_size",
    ),
    "torch_oom": Telling(
        Phrase("PyTorch could not get {asked_bytes} on a device", "PyTorch 在设备上申请 {asked_bytes} 失败"),
        "asked_bytes",
        True,
    ),
    "npu_oom": Telling(
        Phrase("torch_npu could not get {asked_bytes} on an NPU", "torch_npu 在 NPU 上申请 {asked_bytes} 失败"),
        "asked_bytes",
        True,
    ),
    "npu_workspace_oom": Telling(
        Phrase(
            "torch_npu could not get {asked_bytes} of workspace on an NPU",
            "torch_npu 在 NPU 上申请 {asked_bytes} workspace 失败",
        ),
        "asked_bytes",
        True,
    ),
    "npu_driver_oom": Telling(
        Phrase("CANN could not get {asked_bytes} from the driver", "CANN 向驱动申请 {asked_bytes} 失败"),
        "asked_bytes",
        True,
    ),
    "npu_smi_device": Telling(
        Phrase(
            "npu-smi: {used_bytes} of {total_bytes} in use on the fullest device listed",
            "npu-smi：占用最多的卡已用 {used_bytes}，共 {total_bytes}",
        ),
        "used_bytes",
        True,
    ),
    "nvidia_smi_device": Telling(
        Phrase(
            "nvidia-smi: {used_bytes} of {total_bytes} in use on the fullest device listed",
            "nvidia-smi：占用最多的卡已用 {used_bytes}，共 {total_bytes}",
        ),
        "used_bytes",
        True,
    ),
    "memory_summary": Telling(
        Phrase(
            "memory_summary(): {allocated_bytes} in tensors, {reserved_bytes} reserved",
            "memory_summary()：张量占用 {allocated_bytes}，预留 {reserved_bytes}",
        ),
        "reserved_bytes",
        True,
    ),
}
_SHOWN_SETTINGS = (
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_dtype",
    "quantization",
)


def told(findings: Sequence[Finding], server: Server) -> list[Said]:
    """A sentence for the server, and one for each kind that has one, in the order of the text. O(findings)."""
    said = _server(server)
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        telling = TELLINGS.get(finding.kind)
        if telling is not None and telling.number in finding.numbers:
            by_kind.setdefault(finding.kind, []).append(finding)
    return [*said, *(sentence for kind, own in by_kind.items() if (sentence := _sentence(TELLINGS[kind], own)))]


def _server(server: Server) -> list[Said]:
    if not server.engine:
        return []
    version = f" {server.version}" if server.version else ""
    engine = Said.of(ENGINES[server.engine])
    phrase = SERVER_MODEL if server.model else SERVER
    said = [Said.of(phrase, engine=engine, version=version, model=server.model)]
    values = {**server.words, **server.numbers}
    shown = [f"{name} {values[name]}" for name in _SHOWN_SETTINGS if name in values]
    return [*said, Said.of(SETTINGS, settings=", ".join(shown))] if shown else said


def _sentence(telling: Telling, own: Sequence[Finding]) -> Said | None:
    """The one that counts, and over how many ranks; None where it lacks a number that the sentence has."""
    choose = max if telling.most else min
    one = choose(own, key=lambda finding: finding.numbers[telling.number])
    values = {name: _value(name, number) for name, number in one.numbers.items()}
    try:
        said = Said.of(telling.phrase, **values)
        said.text("en")
    except KeyError:
        return None
    numbers = [finding.numbers[telling.number] for finding in own]
    ranks = {finding.rank for finding in own}
    low, high = _value(telling.number, min(numbers)), _value(telling.number, max(numbers))
    if len(ranks) > 1 and f"{low}" != f"{high}":
        rank = one.rank or "-"
        return Said.of(AT_RANKS, said=said, line=one.line, rank=rank, count=len(ranks), low=low, high=high)
    if one.rank:
        return Said.of(AT_RANK, said=said, line=one.line, rank=one.rank)
    return Said.of(AT, said=said, line=one.line)


def _value(name: str, value: object) -> object:
    """As people read it: a size, a count, or as it is."""
    if name.endswith("_bytes") and isinstance(value, int):
        return Size(value)
    if isinstance(value, Printed):
        return Size(value)
    if isinstance(value, int):
        return Count(value)
    return f"{value:g}" if isinstance(value, float) else value
