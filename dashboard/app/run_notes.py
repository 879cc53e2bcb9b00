"""What a run tells beside its numbers, in both languages: settings without an effect, and how far it can be trusted.

The English is what :mod:`hbmtwin.sim.run_result` gathers in a summary's ``notes``.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

NOTES = (
    # settings that have no effect
    Phrase("{key} concerns kv_cache.version = 'v0' only", "{key} 只用于 kv_cache.version = 'v0'"),
    Phrase("{key} does not concern the policy {policy}", "{key} 与策略 {policy} 无关"),
    Phrase("{key} does not concern growth = {growth}", "{key} 与 growth = {growth} 无关"),
    Phrase("{key} concerns the allocators {known} only", "{key} 只用于分配器 {known}"),
    Phrase("{key} concerns the scheduler {scheduler} only", "{key} 只用于调度器 {scheduler}"),
    Phrase("{key} has an effect with {other} = {value} only", "{key} 只在 {other} = {value} 时有作用"),
    Phrase("{key} does not concern a trace", "{key} 与 trace 无关"),
    Phrase("{key} concerns a trace only", "{key} 只用于 trace"),
    Phrase("{key} concerns a model only", "{key} 只用于流量模型"),
    Phrase("{key} concerns a trace or a model only", "{key} 只用于 trace 或流量模型"),
    Phrase("{key} is said by each of {other}", "{key} 由 {other} 各自说明"),
    Phrase("{key} is said by {other}", "{key} 由 {other} 说明"),
    Phrase("{key} does not concern a closed loop", "{key} 与闭环无关"),
    Phrase(
        "{key} finds none without kv_cache.enable_prefix_caching = true",
        "{key} 在 kv_cache.enable_prefix_caching 未开启时没有事件",
    ),
    Phrase(
        "{key} = keep: {policy} parks nothing, and drops KV between turns",
        "{key} = keep：{policy} 不保留，轮次之间丢弃 KV",
    ),
    Phrase(
        "{key} does not bound the prefill of a padded batch; it sizes the activation reserve as before: make it "
        "max_num_seqs x the longest prompt to plan for the whole batch",
        "{key} 不限制填充批的 prefill，只决定激活预留的大小：要按整批规划，请设为 max_num_seqs × 最长提示词",
    ),
    Phrase(
        "{key} = {tokens} is less than max_num_seqs = {seqs}: vLLM refuses to start so; here a step serves the first "
        "of the running sequences",
        "{key} = {tokens} 小于 max_num_seqs = {seqs}：vLLM 会拒绝启动；此处每步只处理排在前面的运行序列",
    ),
    Phrase(
        "{key} is left free, not held: with per_layer the forward pass takes what it needs",
        "{key} 只留出而不占用：per_layer 时前向计算按需取用",
    ),
    Phrase("{key} has no effect: {model} has no sliding windows", "{key} 没有作用：{model} 没有滑动窗口"),
    Phrase("{key} has no effect: {model} has no Mamba-2 layers", "{key} 没有作用：{model} 没有 Mamba-2 层"),
    Phrase("{key} is Ascend's, and has no effect on {device}", "{key} 是昇腾的设置，对 {device} 没有作用"),
    # what becomes of some settings
    Phrase(
        "{key} = {tokens} is raised to max_model_len, {length}, for scheduler.enable_chunked_prefill is false",
        "{key} = {tokens} 增大为 max_model_len {length}，因为 scheduler.enable_chunked_prefill 为 false",
    ),
    Phrase(
        "{key} = {tokens} is raised to max_model_len, {length}, for prefill_first computes prompts whole",
        "{key} = {tokens} 增大为 max_model_len {length}，因为 prefill_first 整段计算提示词",
    ),
    Phrase(
        "{key} = {tokens} rejects longer prompts, and longer requests once they are preempted: v0 refuses to start "
        "with less than max_model_len, {length}",
        "{key} = {tokens} 会拒绝更长的提示词，以及被抢占后的更长请求：小于 max_model_len {length} 时 v0 拒绝启动",
    ),
    Phrase(
        "{key} = {size}: vllm-ascend makes it {own} where prefix caching or chunked prefill is on, as both are by "
        "default; here it stays",
        "{key} = {size}：前缀缓存或 chunked prefill 开启（默认均开启）时 vllm-ascend 会改为 {own}；此处保持不变",
    ),
    Phrase(
        "{key}: blocks have {tokens} tokens instead of {size}, so that a page of {page} bytes holds a state of {state}",
        "{key}：每块为 {tokens} 个 token 而不是 {size}，使 {page} 字节的页能容纳 {state} 字节的状态",
    ),
    Phrase(
        "{key}: vllm-ascend keeps states of mode all every {tokens} tokens only, so shorter prefixes are never "
        "found; align keeps them every block",
        "{key}：mode 为 all 时 vllm-ascend 每 {tokens} 个 token 才保存一次状态，更短的前缀不会命中；align 每块都保存",
    ),
    Phrase(
        "{windows} of {layers} layers of {model} see {window} tokens only; here they keep the whole context, and "
        "read their window",
        "{model} 的 {layers} 层中有 {windows} 层只看 {window} 个 token；此处保留全部 KV，只读取窗口",
    ),
    Phrase(
        "{key} = {rule} on paged is for research: a block goes when all of its tokens have, positions stay what they "
        "were, and a model that was trained on the whole context answers otherwise",
        "{key} = {rule} 用于 paged 仅供研究：块内 token 全部可丢弃时才释放，位置不变，按全文训练的模型回答会不同",
    ),
    # how far times can be trusted
    Phrase(
        "times of the {count} Mamba-2 layers of {model} are defaults without a measured source (confidence L)",
        "{model} 的 {count} 个 Mamba-2 层的时间为默认值，没有实测来源（置信度 L）",
    ),
    Phrase(
        "experts of {model}: a step reads as many as its tokens would choose on average, all alike, at 0.65 (0.4 to "
        "0.9) of a dense matrix's bandwidth, confidence L; sorting tokens by expert takes no time",
        "{model} 的专家层：每步读取其 token 平均会选中的专家数，各专家相同，带宽为稠密矩阵的 0.65（0.4 至 0.9），置信"
        "度 L；按专家排序不计时间",
    ),
    Phrase(
        "matrices of {model} in {method}: 1.2 (0.9 to 1.9) of the 16-bit FLOPs where the device multiplies such "
        "numbers, confidence L; quantising activations takes no time",
        "{model} 的 {method} 矩阵：设备支持该格式乘法时为 16 bit 算力的 1.2 倍（0.9 至 1.9），置信度 L；量化激活不计"
        "时间",
    ),
    Phrase(
        "{device}: torch takes a CPU's memory from the C library, which is not modelled; bytes are placed as CUDA's "
        "caching allocator would, so that sizes hold and addresses do not",
        "{device}：torch 从 C 库取得主机内存，尚未建模；字节按 CUDA 缓存分配器放置，大小成立而地址不成立",
    ),
    Phrase(
        "engine.pipeline_parallel_size = {stages}: the memory is that of a rank of stage {stage} (layers {first} to "
        "{last}), the first with room for the fewest blocks, {blocks}; the others have room for {low} to {high}",
        "engine.pipeline_parallel_size = {stages}：显存取自第 {stage} 级（第 {first} 至 {last} 层）的一张卡，其块数最"
        "少，为 {blocks}；其他级为 {low} 至 {high}",
    ),
    Phrase(
        "engine.pipeline_parallel_size = {stages}: the memory is that of a rank of stage {stage} (layers {first} to "
        "{last}), the first with room for the fewest blocks, {blocks}; the others have room for {room}",
        "engine.pipeline_parallel_size = {stages}：显存取自第 {stage} 级（第 {first} 至 {last} 层）的一张卡，其块数最"
        "少，为 {blocks}；其他级为 {room}",
    ),
    Phrase(
        "engine.pipeline_parallel_size = {stages}: one batch at a time passes through the stages, and vLLM keeps "
        "{many} under way: with more than one request, times are too long and throughput is too low, by a factor "
        "between 1 (decoding that streams weights) and {most} (prefill, or reading KV)",
        "engine.pipeline_parallel_size = {stages}：此处各级之间每次只有一个批，而 vLLM 同时有 {many} 个：多于一条请求"
        "时，时间偏长、吞吐偏低，倍数在 1（decode 读取权重）与 {most}（prefill 或读取 KV）之间",
    ),
    Phrase(
        "SGLang gives the layers that remain to the last stages, and here they are divided as vLLM does: write "
        "engine.layer_partition",
        "SGLang 把余下的层分给最后几级，此处按 vLLM 划分：请写 engine.layer_partition",
    ),
    Phrase(
        "{ranks} ranks are more than the {most} of a node; links between nodes are slower than the figures used here",
        "{ranks} 张卡超过一台服务器的 {most} 张；服务器之间的链路比此处所用的数据慢",
    ),
    Phrase(
        "{longer} of {what} requests are longer than max_model_len, {length} (up to {most} tokens), and are "
        "rejected, which ends their sessions: take a model of a longer context, or clip workload.prompt_tokens, "
        "first_prompt_tokens or session.turns. {why}",
        "{what}请求中有 {longer} 条超过 max_model_len {length}（最长 {most} 个 token），会被拒绝并结束其会话：请换用"
        "最大长度更大的模型，或限制 workload.prompt_tokens、first_prompt_tokens 或 session.turns。{why}",
    ),
    Phrase(
        "1 of {what} requests is longer than max_model_len, {length} (up to {most} tokens), and is rejected, which "
        "ends their sessions: take a model of a longer context, or clip workload.prompt_tokens, first_prompt_tokens "
        "or session.turns. {why}",
        "{what}请求中有 1 条超过 max_model_len {length}（最长 {most} 个 token），会被拒绝并结束其会话：请换用最大长度"
        "更大的模型，或限制 workload.prompt_tokens、first_prompt_tokens 或 session.turns。{why}",
    ),
    Phrase("its {count}", "全部 {count} 条"),
    Phrase("the first {count}", "前 {count} 条"),
    Phrase("99 % are of at most {tokens} tokens, and fit", "99 % 的请求不超过 {tokens} 个 token，放得下"),
    Phrase(
        "The p99, {tokens} tokens, is held by no model of the catalog",
        "p99 为 {tokens} 个 token，目录中没有模型能容纳",
    ),
    Phrase(
        "The p99, {tokens} tokens, is held by {names} and {count} larger ones",
        "p99 为 {tokens} 个 token，{names} 及另外 {count} 个更大的模型能容纳",
    ),
    Phrase(
        "The p99, {tokens} tokens, is held by {names} and {last}",
        "p99 为 {tokens} 个 token，{names} 和 {last} 能容纳",
    ),
    Phrase(
        "calibration.profile {name}: the model or its split lies outside of what was measured on {device}, so that "
        "all times are extrapolated: {what}",
        "calibration.profile {name}：模型或其切分超出在 {device} 上测量的范围，所有时间均为外推：{what}",
    ),
    Phrase(
        "calibration.profile {name}: all-reduces were measured of {counts} ranks; the latency of {ranks} is the "
        "catalog's",
        "calibration.profile {name}：AllReduce 只测了 {counts} 张卡；{ranks} 张卡的时延取自目录",
    ),
    Phrase(
        "calibration.profile {name}: {outside} of {steps} steps lie outside of what was measured on {device}, and "
        "their times are extrapolated: {what}",
        "calibration.profile {name}：{steps} 步中有 {outside} 步超出在 {device} 上测量的范围，其时间为外推：{what}",
    ),
    Phrase(
        "{key} {least} to {most} in {steps} (measured {low} to {high}); {what}",
        "{key} {steps} 步中 {least} 至 {most}（实测 {low} 至 {high}）；{what}",
    ),
    Phrase("{key} {value} (measured {low} to {high}), {what}", "{key} {value}（实测 {low} 至 {high}）；{what}"),
    Phrase("{key} {value} (measured {span}), {what}", "{key} {value}（实测 {span}）；{what}"),
    Phrase(
        "{key} {least} to {most} in {steps} (measured {low} to {high})",
        "{key} {steps} 步中 {least} 至 {most}（实测 {low} 至 {high}）",
    ),
    Phrase("{key} {value} (measured {low} to {high})", "{key} {value}（实测 {low} 至 {high}）"),
    Phrase("{key} {value} (measured {span})", "{key} {value}（实测 {span}）"),
    Phrase(
        "memory budget: {lines} measured, in whole or in part (calibration.profile {name})",
        "显存预算：{lines} 全部或部分为实测（calibration.profile {name}）",
    ),
    # a trace
    Phrase("{count} bad lines were skipped; the first: {what}", "跳过 {count} 个错误行；第一个：{what}"),
    Phrase("1 bad line was skipped; the first: {what}", "跳过 1 个错误行：{what}"),
    Phrase("{count} failed calls were dropped", "去掉 {count} 次失败的调用"),
    Phrase("1 failed call was dropped", "去掉 1 次失败的调用"),
    Phrase(
        "lengths are characters / 4, and sessions follow one another: the file does not say when each began",
        "长度为字符数 / 4，会话首尾相接：文件未说明各会话何时开始",
    ),
)
"""Whole sentences, the special before the general."""
