"""What would have helped one failed request, and which usual advice would not: each with its numbers.

==========================  ===========================================================================================
cause                       what changes it
==========================  ===========================================================================================
external_fragmentation      expandable segments; room outside the KV cache
shortage                    depends on the moment: weights, profile, KV cache, capture, warm-up, step want other things
other_tenant                the other process, or a share of what it leaves
never_fits                  the request itself
allocator_rule              the rule; a memory that was free again when the message was written
runtime_peak                less in flight at once
none (a driver's word)      room outside of torch: communication buffers, libraries
==========================  ===========================================================================================

Sizing rules of the engines: the KV cache takes what utilisation leaves after the profile, so graphs, the sampler at run
time and late communication buffers live in the rest; weights and the profile come before it and are not bounded by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hbmtwin.allocators.oom import Cause
from hbmtwin.allocators.size_text import format_size
from hbmtwin.sim.explain.circumstances import When
from hbmtwin.sim.explain.failure import EXABYTE, Failure
from hbmtwin.sim.explain.printed import shown
from hbmtwin.sim.phrases import Phrase, Said

EXPANDABLE = Phrase(
    "{variable}=expandable_segments:True: the {cached} that are reserved but unallocated could then serve {asked}",
    "{variable}=expandable_segments:True：已预留未分配的 {cached} 就能拼起来满足 {asked}",
)
EXPANDABLE_NPU = Phrase(
    "vllm-ascend sets it by itself unless sleep mode, max_split_size_mb or garbage_collection_threshold is on: "
    "torch_npu refuses the latter two together with it",
    "vllm-ascend 默认已打开，除非用了 sleep mode、max_split_size_mb 或 garbage_collection_threshold"
    "（后两者 torch_npu 不允许同时设置）",
)
EXPANDABLE_ON = Phrase(
    "expandable_segments: it is on already; the hint is printed all the same",
    "expandable_segments：已经打开，报错里的提示是固定打印的",
)
EXPANDABLE_USELESS = Phrase(
    "expandable_segments, max_split_size_mb: they only join what is reserved but unallocated, {cached}, and with the "
    "{free} free that is less than {asked}: defragmenting cannot help",
    "expandable_segments、max_split_size_mb：只能整理已预留未分配的 {cached}，加上空闲 {free} 仍小于 {asked}，"
    "整理碎片没有用",
)
EXPANDABLE_UNKNOWN = Phrase(
    "expandable_segments, max_split_size_mb: not a cure for this by itself; they join pieces and make no memory",
    "expandable_segments、max_split_size_mb：只能整理碎片，不会增加显存",
)
EMPTY_CACHE = Phrase(
    "empty_cache(): the allocator has given back all that was wholly free before it failed; the {cached} left are "
    "parts of segments in use",
    "empty_cache()：报错之前分配器已经释放过所有完全空闲的段，剩下的 {cached} 在仍被使用的段里，释放不掉",
)
WITHOUT_1G_PAGES = Phrase(
    "without page_size:1g: every large segment is a whole number of GiB then, so that {asked} were asked of the "
    "driver, and {cached} lie in segments that are in use",
    "去掉 page_size:1g：打开后每个大段都是整数个 GiB，所以向驱动申请了 {asked}，而在用的段里空着 {cached}",
)
GRAPH_POOLS = Phrase(
    "fewer captured graph sizes, or enforce_eager: {private} lie free in graphs' private pools",
    "减少图捕获档位，或 enforce_eager：图的私有显存池里空闲着 {private}",
)
LOWER_UTILIZATION = Phrase(
    "gpu_memory_utilization lower by {step} (SGLang: mem-fraction-static): the KV cache gives up {bytes}, which with "
    "the {free} free covers {asked}",
    "gpu_memory_utilization 调低 {step}（SGLang：mem-fraction-static）：KV 缓存让出 {bytes}，"
    "加上空闲 {free} 够 {asked} 用",
)
LOWER_UTILIZATION_IF = Phrase(
    "if this came after the KV cache was placed (graph capture, warm-up, serving): gpu_memory_utilization lower by "
    "{step} frees {bytes}; while weights load or the profile runs it changes nothing",
    "如果发生在 KV 缓存分配之后（图捕获、预热、推理）：gpu_memory_utilization 调低 {step} 可让出 {bytes}；"
    "如果发生在加载权重或 profile 阶段则没有作用",
)
RAISE_UTILIZATION = Phrase(
    "gpu_memory_utilization higher: the KV cache grows and leaves less for what failed here",
    "调高 gpu_memory_utilization：KV 缓存变大，留给本次申请的更少",
)
UTILIZATION_EARLY = Phrase(
    "gpu_memory_utilization, up or down: it only sizes the KV cache, which is placed later",
    "调高或调低 gpu_memory_utilization：它只决定之后才分配的 KV 缓存，对这一步没有影响",
)
SHORTER_CONTEXT = Phrase(
    "max_model_len: the KV cache takes its whole share of memory whatever the length",
    "减小 max_model_len：KV 缓存总会占满分给它的显存，与长度无关",
)
FEWER_TOKENS = Phrase(
    "max_num_batched_tokens lower: the peak of activations is proportional to the tokens of one step",
    "减小 max_num_batched_tokens：激活峰值与单步 token 数成正比",
)
FEWER_SEQS = Phrase(
    "max_num_seqs lower: logits and the sampler take max_num_seqs x vocabulary, graphs one pool per batch size",
    "减小 max_num_seqs：logits 和采样占 max_num_seqs x 词表，图捕获按批大小档位占用",
)
FEWER_GRAPHS = Phrase(
    "fewer graph sizes (cudagraph_capture_sizes, max_num_seqs), or enforce_eager: graphs come after the KV cache and "
    "live in what it leaves",
    "减少图捕获档位（cudagraph_capture_sizes、max_num_seqs），或 enforce_eager：图在 KV 缓存之后捕获，只能用剩余显存",
)
SMALLER_WEIGHTS = Phrase(
    "less weights on a device: larger tensor_parallel_size or pipeline_parallel_size, a quantised checkpoint, or a "
    "larger device",
    "减少单卡权重：增大 tensor_parallel_size 或 pipeline_parallel_size、使用量化权重，或换更大显存",
)
STOP_PROCESS = Phrase(
    "stop process {pid}: it holds {bytes}, and {short} were short", "结束进程 {pid}：它占用 {bytes}，本次只缺 {short}"
)
STOP_OTHER = Phrase("stop process {pid}: it holds {bytes}", "结束进程 {pid}：它占用 {bytes}")
FIND_PROCESS = Phrase(
    "see with {tool} which process holds about {bytes} on this device, and stop it or take another device",
    "用 {tool} 查看该设备上是哪个进程占了约 {bytes}，结束它或换一张卡",
)
FIND_HOLDER = Phrase(
    "see with {tool} who holds the {outside} outside of PyTorch: more than PyTorch holds itself",
    "用 {tool} 查看是谁占用了 PyTorch 之外的 {outside}：比 PyTorch 自己占用的还多",
)
SHARE = Phrase(
    "gpu_memory_utilization {most} at most while they stay: {left} of {total} are left beside them",
    "如果它们必须保留：gpu_memory_utilization 最多 {most}，除它们之外只剩 {left} / {total}",
)
SMALLER_REQUEST = Phrase(
    "a smaller request: fewer tokens or images a step, a kernel that does not build the whole attention matrix, or the "
    "tensor split over devices",
    "减小本次申请：减少单步 token/图片数，使用不展开整个注意力矩阵的算子，或把张量切到多卡",
)
OTHERS_USELESS = Phrase(
    "stopping other processes, empty_cache(), allocator settings: even alone on the device it has only {limit}",
    "结束其他进程、empty_cache()、分配器参数：独占设备也只有 {limit}",
)
CHECK_SHAPES = Phrase(
    "look for the shape or length behind it: print the tensor's sizes before the failing operator, and run with the "
    "launches blocking",
    "检查 shape 或长度：在出错算子之前打印张量大小，并打开同步下发定位"
    "（ASCEND_LAUNCH_BLOCKING=1 / CUDA_LAUNCH_BLOCKING=1）",
)
MEMORY_USELESS = Phrase(
    "any memory setting, any larger device: no device has an exbibyte", "任何显存参数或更大的卡：没有设备有 1 EiB"
)
RAISE_CAP = Phrase(
    "a higher memory fraction (set_per_process_memory_fraction): {left} are left under the cap, and {free} are free on "
    "the device",
    "提高显存比例上限（set_per_process_memory_fraction）：上限内只剩 {left}，而设备空闲 {free}",
)
NO_PREEMPTION = Phrase(
    "the cap refused it before the driver was asked: raise per_process_memory_fraction, or turn throw_on_npumalloc_oom "
    "off so that cached memory is tried first",
    "是比例上限在询问驱动之前就拒绝了：提高 per_process_memory_fraction，"
    "或关闭 throw_on_npumalloc_oom 让分配器先用缓存",
)
TRY_AGAIN = Phrase(
    "look who gives back and takes memory at that moment (another server starting, a watcher, a test): {free} are "
    "free, and the same request would be served now",
    "查看当时是否有进程反复占用和释放显存（另一个服务在启动等）：现在空闲 {free}，同样的申请此刻能成功",
)
LESS_MEMORY_USELESS = Phrase(
    "a smaller model or batch by itself: {free} free are more than {asked}",
    "单纯减小模型或批大小：空闲 {free} 本来就大于 {asked}",
)
LESS_IN_FLIGHT = Phrase(
    "fewer streams or steps in flight: {pending} were freed but another stream still uses them",
    "减少并行的流或在途步数：{pending} 已释放但其他流还在使用",
)
TASK_QUEUE = Phrase(
    "TASK_QUEUE_ENABLE=1: workspaces then come from the caching allocator, which can reuse what it has reserved",
    "TASK_QUEUE_ENABLE=1：workspace 改从缓存分配器申请，可以复用已预留的显存",
)
TASK_QUEUE_ON = Phrase(
    "TASK_QUEUE_ENABLE: it is {value} already, so this workspace was asked by an operator that always uses its own",
    "TASK_QUEUE_ENABLE：已经是 {value}，该算子总是使用独立 workspace",
)
WORKSPACE_SETTINGS = Phrase(
    "PYTORCH_NPU_ALLOC_CONF: a workspace is one piece of driver memory of its own, outside of the caching allocator",
    "PYTORCH_NPU_ALLOC_CONF：workspace 直接向驱动申请一整块，不经过缓存分配器",
)
BUFFERS = Phrase(
    "HCCL_BUFFSIZE smaller: every communication group takes it twice, {bytes} a group at {mib} MB",
    "减小 HCCL_BUFFSIZE：每个通信域占两份，{mib} MB 时每个通信域 {bytes}",
)
DRIVER_SETTINGS = Phrase(
    "{variable}: what failed was asked of the driver outside of torch's allocator",
    "{variable}：失败的申请不经过 torch 的分配器，直接来自驱动层",
)
DRIVER_ROOM = Phrase(
    "leave more outside the KV cache: gpu_memory_utilization lower by 0.02 to 0.05 (SGLang: mem-fraction-static)",
    "给 KV 缓存之外多留显存：gpu_memory_utilization 调低 0.02 到 0.05（SGLang：mem-fraction-static）",
)
SEE_DEVICE = Phrase(
    "see with {tool} what the device held: this text does not tell", "用 {tool} 查看设备占用：这段文本没有给出"
)

_EARLY = ("weights", "profile")
_DEFAULT_HCCL_MIB = 200
_MOST_PROCESSES = 3
_MOST_HUNDREDTHS = 30
"""Of the device that a KV cache may be asked to give up for one request; beyond it the request is the trouble."""
_WORTH_STOPPING = 0.05
"""A share of the device: what others hold beyond it is worth asking for, whatever the cause."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What advice depends on besides the figures."""

    cause: Cause | None
    when: When | None
    phase: str
    """weights, profile, kv_cache, capture, warm_up, step; empty: not told."""
    expandable_on: bool
    page_1g: bool
    hccl_buffsize_mib: int | None
    task_queue: int | None


def helps(failure: Failure, s: Situation) -> tuple[Said, ...]:
    """What would have served the request, the surest first."""
    said: list[Said] = []
    if failure.asked is not None and failure.asked >= EXABYTE:
        return (Said.of(CHECK_SHAPES),)
    if failure.finding.words.get("refused") == "preempted":
        return (Said.of(NO_PREEMPTION),)
    if _capped(failure):
        left = format_size(failure.cap_left or 0)
        said.append(Said.of(RAISE_CAP, left=left, free=format_size(failure.free or 0)))
    if s.cause is Cause.NEVER_FITS:
        return (*said, Said.of(SMALLER_REQUEST), *_weights_advice(s))
    if s.cause is Cause.OTHER_TENANT:
        return (*said, *_tenants_advice(failure))
    if s.cause is Cause.ALLOCATOR_RULE:
        return (*said, Said.of(TRY_AGAIN, free=format_size(failure.free or 0)))
    if s.cause is Cause.RUNTIME_PEAK:
        said.append(Said.of(LESS_IN_FLIGHT, pending=format_size(failure.facts.pending_bytes)))
    if failure.finding.kind == "npu_workspace_oom" and s.task_queue != 1:
        said.append(Said.of(TASK_QUEUE))
    if failure.mostly_others:
        said += _tenants_advice(failure)
    if s.cause is Cause.EXTERNAL_FRAGMENTATION or (s.cause is None and len(failure.causes) > 1):
        said += _defragment(failure, s)
    if s.page_1g and failure.cached is not None and failure.asked is not None:
        values = {"asked": format_size(failure.asked), "cached": shown(failure.cached)}
        said.append(Said.of(WITHOUT_1G_PAGES, **values))
    if failure.mostly_outside:
        said.append(Said.of(FIND_HOLDER, tool=_tool(failure), outside=format_size(failure.outside or 0)))
    if not failure.mostly_others and failure.facts.tenants_bytes > _WORTH_STOPPING * failure.facts.capacity_bytes:
        said += _tenants_advice(failure)
    if failure.finding.kind.endswith("driver_oom"):
        said += _driver_advice(failure, s)
    else:
        said += _room(failure, s)
    return tuple(said)


def does_not_help(failure: Failure, s: Situation) -> tuple[Said, ...]:
    """Usual advice that would not have served the request, and why."""
    asked, free, cached = failure.asked, failure.servable, failure.cached
    if asked is not None and asked >= EXABYTE:
        return (Said.of(MEMORY_USELESS),)
    if s.cause is Cause.NEVER_FITS:
        return (Said.of(OTHERS_USELESS, limit=format_size(failure.facts.limit_bytes - failure.facts.weights_bytes)),)
    said: list[Said] = []
    if s.cause is Cause.ALLOCATOR_RULE and asked is not None:
        return (Said.of(LESS_MEMORY_USELESS, free=format_size(free or 0), asked=format_size(asked)),)
    if failure.finding.kind == "npu_workspace_oom":
        said.append(Said.of(WORKSPACE_SETTINGS))
        if s.task_queue == 1:
            said.append(Said.of(TASK_QUEUE_ON, value=s.task_queue))
    elif failure.finding.kind.endswith("driver_oom"):
        said.append(Said.of(DRIVER_SETTINGS, variable=_variable(failure)))
    elif s.cause is Cause.EXTERNAL_FRAGMENTATION and not failure.graphs_keep_it:
        if s.expandable_on:
            said.append(Said.of(EXPANDABLE_ON))
    elif asked is not None and free is not None and cached is not None and s.cause is not None:
        values = {"cached": shown(cached), "free": shown(free), "asked": format_size(asked)}
        said.append(Said.of(EXPANDABLE_USELESS, **values))
    elif len(failure.causes) <= 1:
        said.append(Said.of(EXPANDABLE_UNKNOWN))
    if cached is not None and failure.finding.kind in ("torch_oom", "npu_oom"):
        said.append(Said.of(EMPTY_CACHE, cached=shown(cached)))
    if s.cause is not Cause.OTHER_TENANT:
        said += _utilization_not(s)
    return tuple(said)


def _capped(failure: Failure) -> bool:
    """Whether the device had room and a memory fraction did not let it be used."""
    left, asked, free = failure.cap_left, failure.asked, failure.free
    return None not in (left, asked, free) and (left or 0) < (asked or 0) <= (free or 0)


def _defragment(failure: Failure, s: Situation) -> list[Said]:
    said: list[Said] = []
    joins = not s.expandable_on and not failure.graphs_keep_it and failure.family != "XPU"
    if joins and failure.cached is not None and failure.asked is not None:
        values = {"cached": shown(failure.cached), "asked": format_size(failure.asked)}
        said.append(Said.of(EXPANDABLE, variable=_variable(failure), **values))
        if failure.family == "NPU":
            said.append(Said.of(EXPANDABLE_NPU))
    if private := failure.told("private_free_bytes"):
        said.append(Said.of(GRAPH_POOLS, private=format_size(private)))
    return said


def _room(failure: Failure, s: Situation) -> list[Said]:
    """What makes room, by the moment at which it was needed."""
    if s.phase == "weights":
        return [Said.of(SMALLER_WEIGHTS)]
    if s.phase == "profile":
        return [Said.of(FEWER_TOKENS), Said.of(FEWER_SEQS), Said.of(SMALLER_WEIGHTS)]
    said: list[Said] = []
    total, asked, free = failure.facts.capacity_bytes, failure.asked, failure.servable
    if total and asked is not None and free is not None:
        hundredths = max(1, math.ceil(100 * (asked.high - free.low) / total))
        if hundredths > _MOST_HUNDREDTHS:
            return [Said.of(SMALLER_REQUEST), Said.of(FEWER_TOKENS)]
        values = {"step": f"{hundredths / 100:.2f}", "bytes": format_size(hundredths * total // 100)}
        if s.phase or s.when == "run_time":
            both = {"free": format_size(free), "asked": format_size(asked)}
            said.append(Said.of(LOWER_UTILIZATION, **values, **both))
        else:
            said.append(Said.of(LOWER_UTILIZATION_IF, **values))
    if s.phase == "capture":
        return [*said, Said.of(FEWER_GRAPHS)]
    if s.phase == "warm_up":
        return [*said, Said.of(FEWER_SEQS)]
    if s.phase == "kv_cache":
        return said
    return [*said, Said.of(FEWER_TOKENS), Said.of(FEWER_SEQS)]


def _weights_advice(s: Situation) -> list[Said]:
    return [Said.of(SMALLER_WEIGHTS)] if s.phase in ("weights", "") else []


def _driver_advice(failure: Failure, s: Situation) -> list[Said]:
    """Nothing is known but that the driver had no memory: room, buffers, and where to look."""
    said = [Said.of(UTILIZATION_EARLY) if s.phase in _EARLY else Said.of(DRIVER_ROOM)]
    if s.phase in _EARLY:
        said = [Said.of(SMALLER_WEIGHTS)]
    if failure.family == "NPU":
        mib = _DEFAULT_HCCL_MIB if s.hccl_buffsize_mib is None else s.hccl_buffsize_mib
        said.append(Said.of(BUFFERS, mib=mib, bytes=format_size(2 * mib << 20)))
    return [*said, Said.of(SEE_DEVICE, tool=_tool(failure))]


def _tenants_advice(failure: Failure) -> list[Said]:
    said: list[Said] = []
    free, cached, total = failure.servable or 0, failure.cached or 0, failure.facts.capacity_bytes
    short = max(0, (failure.asked or 0) - free - cached)
    for tenant in failure.tenants[:_MOST_PROCESSES]:
        if tenant.pid and short:
            said.append(
                Said.of(STOP_PROCESS, pid=tenant.pid, bytes=format_size(tenant.bytes), short=format_size(short))
            )
        elif tenant.pid:
            said.append(Said.of(STOP_OTHER, pid=tenant.pid, bytes=format_size(tenant.bytes)))
        else:
            said.append(Said.of(FIND_PROCESS, tool=_tool(failure), bytes=format_size(tenant.bytes)))
    left = total - failure.facts.tenants_bytes
    if total and left > 0:
        most = f"{math.floor(100 * left / total) / 100:.2f}"
        said.append(Said.of(SHARE, most=most, left=format_size(left), total=format_size(total)))
    return said


def _utilization_not(s: Situation) -> list[Said]:
    if s.phase in _EARLY:
        return [Said.of(UTILIZATION_EARLY), Said.of(SHORTER_CONTEXT)][: 2 if s.phase == "weights" else 1]
    if s.phase or s.when == "run_time":
        return [Said.of(RAISE_UTILIZATION), Said.of(SHORTER_CONTEXT)]
    return []


def _variable(failure: Failure) -> str:
    return f"PYTORCH_{failure.family}_ALLOC_CONF" if failure.family in ("NPU", "HIP") else "PYTORCH_CUDA_ALLOC_CONF"


def _tool(failure: Failure) -> str:
    return {"NPU": "npu-smi info", "HIP": "rocm-smi", "XPU": "xpu-smi"}.get(failure.family, "nvidia-smi")
