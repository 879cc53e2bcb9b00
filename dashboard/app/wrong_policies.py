"""Which policies do not go together, in both languages: of memory, of scheduling, and with several answers to a prompt.

The English is what :mod:`hbmtwin.sim.legality` raises.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

POLICIES = (
    # policies of memory
    Phrase(
        "{name} takes one region at start and cannot hold the weights beside another arena; use it as memory.kv_arena",
        "{name} 在启动时占用一整块区域，不能在另一个区域之外存放权重；请将它用作 memory.kv_arena",
    ),
    Phrase(
        "{policy} needs pages, which memory.kv_arena = {arena} does not offer; allocators that do: {able}",
        "{policy} 需要按页映射的显存，而 memory.kv_arena = {arena} 不提供；提供它的分配器：{able}",
    ),
    Phrase(
        "2 takes workspaces from torch_npu's workspace allocator, which memory.general = {general} does not have; "
        "use 1, or memory.general = 'caching'",
        "2 从 torch_npu 的 workspace 分配器取得 workspace，而 memory.general = {general} 没有；请用 1，或 "
        "memory.general = 'caching'",
    ),
    Phrase(
        "contiguous buffers have no prefix cache; use keep (buffers wait for the next turn) or drop",
        "连续缓冲区没有前缀缓存；请用 keep（缓冲区留到下一轮）或 drop",
    ),
    Phrase(
        "{oom}, set by the preset {preset}, is illegal with kv_cache.growth = {growth} and copy_scope = 'tensor': a "
        "step in which some tensors have been replaced cannot be undone; use stop",
        "{oom}（由预设 {preset} 设定）不能与 kv_cache.growth = {growth} 及 copy_scope = 'tensor' 同用：部分张量已替换"
        "的步无法撤销；请用 stop",
    ),
    Phrase(
        "{oom} is illegal with kv_cache.growth = {growth} and copy_scope = 'tensor': a step in which some tensors "
        "have been replaced cannot be undone; use stop",
        "{oom} 不能与 kv_cache.growth = {growth} 及 copy_scope = 'tensor' 同用：部分张量已替换的步无法撤销；请用 stop",
    ),
    Phrase(
        "prefix_cache needs kv_cache.policy = 'paged' or 'radix' with kv_cache.enable_prefix_caching = true; use drop",
        "prefix_cache 需要 kv_cache.policy = 'paged' 或 'radix'，且 kv_cache.enable_prefix_caching = true；请用 drop",
    ),
    Phrase(
        "{policy} of {version} has no reserve, it admits what fits: leave it none",
        "{policy} {version} 没有 reserve，放得下即接纳：请保留 none",
    ),
    Phrase(
        "{policy} has no reserve, it admits what fits: leave it none",
        "{policy} 没有 reserve，放得下即接纳：请保留 none",
    ),
    Phrase("vLLM {version} has none, it came with 0.27; leave it out", "vLLM {version} 没有此项，0.27 才引入；请删去"),
    Phrase(
        "{rule} drops tokens together, where a block goes as soon as all of its tokens may; use truncate({over}), or "
        "kv_cache.policy = 'contiguous'",
        "{rule} 成批丢弃 token，而块在其全部 token 可丢弃时即释放；请用 truncate({over})，或 kv_cache.policy = "
        "'contiguous'",
    ),
    Phrase(
        "{policy} keeps every token; use full, or kv_cache.policy = 'contiguous'",
        "{policy} 保留全部 token；请用 full，或 kv_cache.policy = 'contiguous'",
    ),
    Phrase(
        "standard reads K and V of a sequence as one tensor, which {policy} does not keep; use flash, or "
        "kv_cache.policy = 'contiguous'",
        "standard 把一条序列的 K 和 V 各作为一个张量读取，而 {policy} 不这样存放；请用 flash，或 kv_cache.policy = "
        "'contiguous'",
    ),
    Phrase(
        "static_batch is how servers form batches whose KV lies in one piece a sequence; use vllm, or "
        "kv_cache.policy = 'contiguous'",
        "static_batch 用于每条序列的 KV 为一整块的服务；请用 vllm，或 kv_cache.policy = 'contiguous'",
    ),
    Phrase(
        "a batch that is {batching} has padding in front, which would be dropped for tokens; use full, or "
        "scheduler.batching = 'variable'",
        "{batching} 的批在前面有填充，会被当作 token 丢弃；请用 full，或 scheduler.batching = 'variable'",
    ),
    Phrase(
        "a batch that is {batching} has padding among its tokens, which no next turn can go on from; use drop, or "
        "scheduler.batching = 'variable'",
        "{batching} 的批在 token 之间有填充，下一轮无法接续；请用 drop，或 scheduler.batching = 'variable'",
    ),
    Phrase("write 'paged' with {version}, not {name}", "请写 'paged' 并设置 {version}，不能写 {name}"),
    Phrase(
        "write 'paged'; a model with sliding windows or Mamba states makes it {name}",
        "请写 'paged'；模型有滑动窗口或 Mamba 状态时会自动成为 {name}",
    ),
    # schedulers
    Phrase(
        "{scheduler} does not know the rules of kv_cache.version = 'v0'; use vllm_v0, or a later version",
        "{scheduler} 不适用 kv_cache.version = 'v0' 的规则；请用 vllm_v0，或更新的版本",
    ),
    Phrase(
        "'vllm_v0' swaps and forks blocks, which {policy} of {version} does not; use vllm, or kv_cache.policy = "
        "'paged' with kv_cache.version = 'v0'",
        "'vllm_v0' 会换出和复制块，而 {policy} {version} 不会；请用 vllm，或 kv_cache.policy = 'paged' 且 "
        "kv_cache.version = 'v0'",
    ),
    Phrase(
        "'vllm_v0' swaps and forks blocks, which {policy} does not; use vllm, or kv_cache.policy = 'paged' with "
        "kv_cache.version = 'v0'",
        "'vllm_v0' 会换出和复制块，而 {policy} 不会；请用 vllm，或 kv_cache.policy = 'paged' 且 kv_cache.version = "
        "'v0'",
    ),
    Phrase(
        "'sglang' counts the slots of SGLang's pool, which {policy} of {version} does not have; use vllm, or "
        "kv_cache.policy = 'radix'",
        "'sglang' 按 SGLang 的 KV 池计数，而 {policy} {version} 没有；请用 vllm，或 kv_cache.policy = 'radix'",
    ),
    Phrase(
        "'sglang' counts the slots of SGLang's pool, which {policy} does not have; use vllm, or kv_cache.policy = "
        "'radix'",
        "'sglang' 按 SGLang 的 KV 池计数，而 {policy} 没有；请用 vllm，或 kv_cache.policy = 'radix'",
    ),
    Phrase(
        "{scheduler} counts the blocks of TensorRT-LLM's pool, which {policy} does not have; use vllm, or "
        "kv_cache.policy = 'paged'",
        "{scheduler} 按 TensorRT-LLM 的块池计数，而 {policy} 没有；请用 vllm，或 kv_cache.policy = 'paged'",
    ),
    Phrase(
        "max_utilization pauses requests, which is not what {oom}, set by the preset {preset}, says; use preempt, or "
        "scheduler.policy = 'guaranteed_no_evict'",
        "max_utilization 会暂停请求，与 {oom}（由预设 {preset} 设定）不符；请用 preempt，或 scheduler.policy = "
        "'guaranteed_no_evict'",
    ),
    Phrase(
        "max_utilization pauses requests, which is not what {oom} says; use preempt, or scheduler.policy = "
        "'guaranteed_no_evict'",
        "max_utilization 会暂停请求，与 {oom} 不符；请用 preempt，或 scheduler.policy = 'guaranteed_no_evict'",
    ),
    Phrase(
        "{scheduler} does not plan a step before the last one is done; use vllm",
        "{scheduler} 不会在上一步完成之前规划下一步；请用 vllm",
    ),
    Phrase(
        "vLLM plans ahead over its blocks, whose keys follow, which {policy} does not have; leave it out, or use "
        "kv_cache.policy = 'paged'",
        "vLLM 的提前规划基于其块及块的键，而 {policy} 没有；请删去，或用 kv_cache.policy = 'paged'",
    ),
    Phrase(
        "vLLM then has {batches} batches under way in a pipeline of {stages} stages, or {fewer} with its first model "
        "runner, which is not simulated; leave it out, or use engine.pipeline_parallel_size = 1",
        "此时 vLLM 在 {stages} 级流水线中同时有 {batches} 个批（首个 model runner 为 {fewer} 个），尚未仿真；请删去，"
        "或用 engine.pipeline_parallel_size = 1",
    ),
    Phrase(
        "vLLM preempts, and a step planned ahead ({key}) cannot be undone, as {oom}, set by the preset {preset}, "
        "asks; use preempt",
        "vLLM 会抢占，而提前规划的步（{key}）无法按 {oom}（由预设 {preset} 设定）的要求撤销；请用 preempt",
    ),
    Phrase(
        "vLLM preempts, and a step planned ahead ({key}) cannot be undone, as {oom} asks; use preempt",
        "vLLM 会抢占，而提前规划的步（{key}）无法按 {oom} 的要求撤销；请用 preempt",
    ),
    Phrase(
        "{scheduler} counts blocks by tokens, and layers with a window (of {model} or by kv_cache.retention) or a "
        "state hold others; use vllm",
        "{scheduler} 按 token 计块，而带窗口的层（{model} 自带或由 kv_cache.retention 设定）或状态层的块数不同；请用 "
        "vllm",
    ),
    Phrase(
        "sglang cuts prompts at whole pages; use a multiple of {page}, not {tokens}, or another kv_cache.block_size",
        "sglang 按整页切分提示词；请用 {page} 的倍数，不能是 {tokens}，或更换 kv_cache.block_size",
    ),
    # answers to one prompt
    Phrase(
        "{samples} answers to a prompt leave no one answer to go on with; leave workload.multi_turn out, or samples "
        "= 1",
        "一条提示词有 {samples} 个回答，没有唯一的回答可以接续；请删去 workload.multi_turn，或设 samples = 1",
    ),
    Phrase(
        "{samples} answers to a prompt leave no one answer to go on with; give workload.request_rate instead of "
        "workload.users, or samples = 1",
        "一条提示词有 {samples} 个回答，没有唯一的回答可以接续；请用 workload.request_rate 代替 workload.users，或设 "
        "samples = 1",
    ),
    Phrase(
        "{samples} answers to a prompt leave no one answer to go on with; set session.turns = 1, or samples = 1",
        "一条提示词有 {samples} 个回答，没有唯一的回答可以接续；请设 session.turns = 1，或 samples = 1",
    ),
    Phrase(
        "{samples} answers to a prompt leave no one answer to go on with; set session.between_turns = 'drop', or "
        "samples = 1",
        "一条提示词有 {samples} 个回答，没有唯一的回答可以接续；请设 session.between_turns = 'drop'，或 samples = 1",
    ),
    Phrase(
        "{samples} samples of a prompt come together, and a client lets requests in one by one; leave it out, or set "
        "samples = 1",
        "一条提示词的 {samples} 个采样同时到达，而客户端逐条放行请求；请删去，或设 samples = 1",
    ),
    Phrase(
        "{samples} of a prompt run together in v0, and scheduler.max_num_seqs is {seqs}; raise that, or take fewer",
        "v0 中一条提示词的 {samples} 个采样同时运行，而 scheduler.max_num_seqs 为 {seqs}；请增大后者，或减少采样",
    ),
    Phrase(
        "recompute is for single sequences, v0 stops where a prompt has several samples; use auto or swap",
        "recompute 只用于单条序列，一条提示词有多个采样时 v0 会停止；请用 auto 或 swap",
    ),
)
"""Whole sentences behind the key that they name, the special before the general."""
