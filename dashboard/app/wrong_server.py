"""What a server cannot be made of, in both languages: models over devices, windows and states, and their memory.

The English is what the checks of a :class:`~hbmtwin.sim.server_plan.ServerPlan`, the budget and the allocators raise.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

SERVER = (
    # a model on devices
    Phrase(
        "{wanted} is more than the {positions} positions of {model}; take at most that",
        "{wanted} 超过 {model} 的 {positions} 个位置；最多为此值",
    ),
    Phrase(
        "{rule} keeps {bound} tokens, more than max_model_len {length}: keep fewer, or raise engine.max_model_len",
        "{rule} 保留 {bound} 个 token，超过 max_model_len {length}：请减少保留，或增大 engine.max_model_len",
    ),
    Phrase(
        "{model} cannot be split over tensor_parallel_size {ranks}: {what} must divide, and the vocabulary padded to "
        "{vocabulary}; possible sizes are {known} (at fault: {why})",
        "{model} 无法按 tensor_parallel_size {ranks} 切分：{what}以及补齐为 {vocabulary} 的词表都须能整除；可用 "
        "{known}（问题在于：{why}）",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads and intermediate_size {size}",
        "{heads} 个注意力头、{kv} 个 KV 头、intermediate_size {size} ",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads and expert intermediate_size {size}",
        "{heads} 个注意力头、{kv} 个 KV 头、专家的 intermediate_size {size} ",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads, expert intermediate_size {expert} and shared intermediate_size "
        "{shared}",
        "{heads} 个注意力头、{kv} 个 KV 头、专家的 intermediate_size {expert}、共享专家的 intermediate_size {shared} ",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads, intermediate_size {size}, expert intermediate_size {expert} and "
        "shared intermediate_size {shared}",
        "{heads} 个注意力头、{kv} 个 KV 头、intermediate_size {size}、专家的 intermediate_size {expert}、共享专家的 "
        "intermediate_size {shared} ",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads, {mamba} Mamba heads and intermediate_size {size}",
        "{heads} 个注意力头、{kv} 个 KV 头、{mamba} 个 Mamba 头、intermediate_size {size} ",
    ),
    Phrase(
        "{heads} attention heads, {kv} KV heads, {mamba} Mamba heads, {groups} groups and intermediate_size {size}",
        "{heads} 个注意力头、{kv} 个 KV 头、{mamba} 个 Mamba 头、{groups} 组、intermediate_size {size} ",
    ),
    Phrase("{heads} KV heads over {ranks} ranks", "{heads} 个 KV 头分到 {ranks} 张卡"),
    Phrase("{heads} heads over {ranks} ranks", "{heads} 个注意力头分到 {ranks} 张卡"),
    Phrase("vocabulary over {ranks} ranks", "词表分到 {ranks} 张卡"),
    Phrase("intermediate_size {size} over {ranks} ranks", "intermediate_size {size} 分到 {ranks} 张卡"),
    Phrase(
        "{width} outputs of attention a rank are no multiple of the {unit} that share a scale",
        "每张卡 attention 的输出宽度 {width} 不是共用一个量化系数的 {unit} 的倍数",
    ),
    Phrase(
        "{width} of expert intermediate_size a rank are no multiple of the {unit} that share a scale",
        "每张卡专家 intermediate_size 的 {width} 不是共用一个量化系数的 {unit} 的倍数",
    ),
    Phrase(
        "{width} of shared intermediate_size a rank are no multiple of the {unit} that share a scale",
        "每张卡共享专家 intermediate_size 的 {width} 不是共用一个量化系数的 {unit} 的倍数",
    ),
    Phrase(
        "{width} of intermediate_size a rank are no multiple of the {unit} that share a scale",
        "每张卡 intermediate_size 的 {width} 不是共用一个量化系数的 {unit} 的倍数",
    ),
    Phrase(
        "{device} has no all-reduce time for tensor_parallel_size {ranks}; known sizes: {known}. Use one of them, or "
        "add a measured figure to the device",
        "{device} 没有 tensor_parallel_size {ranks} 的 AllReduce 时间；已知 {known}。请选用其一，或为设备补充实测值",
    ),
    Phrase(
        "{device} has no figures for a message between stages (send_ns, send_bandwidth_bytes_per_s): add them to the "
        "device, or use engine.tensor_parallel_size",
        "{device} 没有流水级之间消息的数据（send_ns、send_bandwidth_bytes_per_s）：请为设备补充，或使用 "
        "engine.tensor_parallel_size",
    ),
    Phrase(
        "v0 deals requests and blocks out to one scheduler a stage, which is not computed; use 1, or "
        "scheduler.policy = 'vllm' with a later kv_cache.version",
        "v0 把请求和块分给每级各自的调度器，尚未计算；请用 1，或 scheduler.policy = 'vllm' 并选更新的 kv_cache.version",
    ),
    Phrase(
        "{layers} layers make 1 to {most} stages, not {stages}",
        "{layers} 层可分为 1 到 {most} 级，不能是 {stages}",
    ),
    Phrase(
        "a partition {sizes} does not cut {layers} layers into {stages} stages: write one number above 0 a stage, "
        "all layers together",
        "划分 {sizes} 不能把 {layers} 层分成 {stages} 级：请每级写一个大于 0 的数，合计为全部层数",
    ),
    Phrase(
        "stage {number} of {stages} of {model} (layers {first} to {last}) has no layer of {kinds}, which is not "
        "computed",
        "{model} 的第 {number} 级（共 {stages} 级，第 {first} 至 {last} 层）没有 {kinds} 层，尚未计算",
    ),
    Phrase(
        "'per_layer' makes the tensors of a step one by one, and those of experts ({model}) are not known; use "
        "'peak' or 'none'",
        "'per_layer' 逐个生成一步的张量，而专家层（{model}）的张量未知；请用 'peak' 或 'none'",
    ),
    Phrase(
        "'per_layer' makes the tensors of a step one by one, and those of matrices quantised as {method} ({model}) "
        "are not known; use 'peak' or 'none'",
        "'per_layer' 逐个生成一步的张量，而按 {method} 量化的矩阵（{model}）的张量未知；请用 'peak' 或 'none'",
    ),
    Phrase(
        "{dtype} where {model} keeps one latent tensor and no V (MLA); leave it out",
        "不能设 {dtype}：{model} 只保存一个 latent 张量，没有 V（MLA）；请删去",
    ),
    Phrase(
        "the latent tensor of {model} (MLA) cannot be stored as {dtype}; use one of {known}",
        "{model} 的 latent 张量（MLA）不能存为 {dtype}；请用 {known} 之一",
    ),
    # windows and states
    Phrase(
        "{model} has sliding windows of {window} tokens of its own; use full, or a model whose layers see the whole "
        "context",
        "{model} 自带 {window} 个 token 的滑动窗口；请用 full，或换用全注意力的模型",
    ),
    Phrase(
        "how {version} shares a pool for {whose} is not known; use 0.27, or {cure}",
        "{version} 如何为{whose}共用块池未知；请用 0.27，或{cure}",
    ),
    Phrase(
        "reserve knows no pool for {whose}; leave it none, or {cure}",
        "reserve 没有{whose}的块池；请保留 none，或{cure}",
    ),
    Phrase("reserve knows no pool for {whose}; leave it none", "reserve 没有{whose}的块池；请保留 none"),
    Phrase(
        "under {whose} a key would promise KV that was computed without what has been dropped; use retention = "
        "sliding_window(w), or no prefix caching",
        "在{whose}下，前缀缓存的键会指向缺少已丢弃内容的 KV；请用 retention = sliding_window(w)，或关闭前缀缓存",
    ),
    Phrase("the windows of {model}", " {model} 的窗口"),
    Phrase("the states of the {count} Mamba-2 layers of {model}", " {model} 的 {count} 个 Mamba-2 层的状态"),
    Phrase("retention = {rule}", "保留规则 {rule} "),
    Phrase("set kv_cache.disable_hybrid_kv_cache_manager = true", "设 kv_cache.disable_hybrid_kv_cache_manager = true"),
    Phrase("use retention = full", "用 retention = full"),
    Phrase("{policy} has no place for {whose}; use paged", "{policy} 无处存放{whose}；请用 paged"),
    Phrase("how {version} keeps {whose} is not known; use 0.27", "{version} 如何保存{whose}未知；请用 0.27"),
    Phrase(
        "{rule} drops tokens, and {whose} have taken in every one; use full",
        "{rule} 会丢弃 token，而{whose}已包含全部 token；请用 full",
    ),
    Phrase(
        "without groups there is no place for {whose}, and vLLM does not start; leave it false",
        "没有分组就无处存放{whose}，vLLM 无法启动；请保留 false",
    ),
    Phrase(
        "with kv_cache.mamba_cache_mode = 'align' chunks end where states are kept, so there must be chunks: leave "
        "it true, or use all",
        "kv_cache.mamba_cache_mode = 'align' 时提示词在保存状态处分块，必须分块：请保留 true，或用 all",
    ),
    Phrase(
        "{mode} keeps states for later requests, and kv_cache.enable_prefix_caching is false: set that to true, or "
        "use none",
        "{mode} 为后续请求保存状态，而 kv_cache.enable_prefix_caching 为 false：请设为 true，或用 none",
    ),
    Phrase(
        "none keeps no state for later requests, so that kv_cache.enable_prefix_caching finds nothing: use all or "
        "align, or set that to false",
        "none 不为后续请求保存状态，kv_cache.enable_prefix_caching 无从命中：请用 all 或 align，或将其设为 false",
    ),
    Phrase(
        "align ends chunks of a prompt at states, and {scheduler} does not; use all, or scheduler.policy = 'vllm'",
        "align 在状态处切分提示词，而 {scheduler} 不会；请用 all，或 scheduler.policy = 'vllm'",
    ),
    Phrase(
        "vllm-ascend refuses this model: a recurrent state of {state} bytes must fill the K of a block, and {tokens} "
        "tokens of {each} bytes are {all}; change tensor_parallel_size or the state's dtype, so that they are equal",
        "vllm-ascend 不支持此模型：{state} 字节的循环状态须恰好填满一块的 K，而 {tokens} 个各 {each} 字节的 token 为 "
        "{all} 字节；请调整 tensor_parallel_size 或状态的 dtype，使两者相等",
    ),
    # memory, once it is placed
    Phrase(
        "{policy} of {version} reports none; leave it false, or use kv_cache.policy = 'paged' of 0.27, 0.22 or 0.18 "
        "with kv_cache.enable_prefix_caching = true",
        "{policy} {version} 不报告缓存事件；请保留 false，或用 kv_cache.policy = 'paged'（0.27、0.22 或 0.18）且 "
        "kv_cache.enable_prefix_caching = true",
    ),
    Phrase(
        "{policy} reports none; leave it false, or use kv_cache.policy = 'paged' of 0.27, 0.22 or 0.18 with "
        "kv_cache.enable_prefix_caching = true",
        "{policy} 不报告缓存事件；请保留 false，或用 kv_cache.policy = 'paged'（0.27、0.22 或 0.18）且 "
        "kv_cache.enable_prefix_caching = true",
    ),
    Phrase(
        "{unit} is more than the whole region of memory.kv_arena = {arena}, {bytes} bytes; use less (512 is torch's "
        "unit)",
        "{unit} 超过 memory.kv_arena = {arena} 的整个区域（{bytes} 字节）；请减小（torch 的单位是 512）",
    ),
    Phrase(
        "weights and activations do not fit once they are rounded ({oom}): raise gpu_memory_utilization",
        "权重和激活取整后放不下（{oom}）：请增大 gpu_memory_utilization",
    ),
    Phrase(
        "one request of max_model_len {length} needs {need} GiB in pages of {page} bytes, {tensors} tensors with "
        "pages of their own; {left} GiB are left for KV: take a smaller kv_cache.page_bytes, or shorten max_model_len",
        "一条 max_model_len {length} 的请求需要 {need} GiB（每页 {page} 字节，{tensors} 个张量各有自己的页）；KV 缓存"
        "可用 {left} GiB：请减小 kv_cache.page_bytes，或缩短 max_model_len",
    ),
    Phrase(
        "one request of max_model_len {length} needs {need} blocks; the pool has {blocks}, one of them the null "
        "block, once its tensors are rounded: raise num_blocks, or shorten max_model_len or block_size",
        "一条 max_model_len {length} 的请求需要 {need} 块；张量取整后块池有 {blocks} 块（其中一块为空块）：请增大 "
        "num_blocks，或减小 max_model_len 或 block_size",
    ),
    Phrase(
        "one request of max_model_len {length} needs {need} blocks; the pool has {blocks}, one of them the null "
        "block, once its tensors are rounded: raise gpu_memory_utilization, or shorten max_model_len or block_size",
        "一条 max_model_len {length} 的请求需要 {need} 块；张量取整后块池有 {blocks} 块（其中一块为空块）：请增大 "
        "gpu_memory_utilization，或减小 max_model_len 或 block_size",
    ),
    Phrase(
        "one request of max_model_len {length} needs {need} blocks; the pool has {blocks} once its tensors are "
        "rounded: raise num_blocks, or shorten max_model_len or block_size",
        "一条 max_model_len {length} 的请求需要 {need} 块；张量取整后块池有 {blocks} 块：请增大 num_blocks，或减小 "
        "max_model_len 或 block_size",
    ),
    Phrase(
        "one request of max_model_len {length} needs {need} blocks; the pool has {blocks} once its tensors are "
        "rounded: raise gpu_memory_utilization, or shorten max_model_len or block_size",
        "一条 max_model_len {length} 的请求需要 {need} 块；张量取整后块池有 {blocks} 块：请增大 "
        "gpu_memory_utilization，或减小 max_model_len 或 block_size",
    ),
    Phrase("{why}. Any one of these would start: {changes}", "{why}。以下任意一项改动即可启动：{changes}"),
    Phrase(
        "{why}. No single change of length, utilisation, batch or ranks would start: take a smaller model or more "
        "memory",
        "{why}。只改变长度、显存占比、批或并行数中的任意一项都不足以启动：请换用更小的模型或更大的显存",
    ),
    Phrase(
        "this takes more than {most} GiB of memory: ask for fewer requests (workload.num_prompts)",
        "需要超过 {most} GiB 的主机内存：请减少请求数（workload.num_prompts）",
    ),
    Phrase(
        "{wanted} is more than the {most} of a run here; ask for fewer",
        "{wanted} 超过此处单次运行的上限 {most}；请减少",
    ),
)
"""Whole sentences behind the key that they name, the special before the general."""
