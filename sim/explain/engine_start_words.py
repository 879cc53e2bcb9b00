"""What is said of a failed start, in English and Chinese side by side."""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

TOO_LONG = Phrase(
    "one request of max_model_len {length} tokens needs {need} of KV cache on each rank, and {have} are left for it",
    "一条 max_model_len {length} token 的请求每卡需要 {need} KV 缓存，而只剩 {have}",
)
TOO_LONG_TOKENS = Phrase(
    "one request of max_model_len {length} tokens does not fit: the KV cache holds {tokens} tokens in all",
    "一条 max_model_len {length} token 的请求放不下：KV 缓存总共只能容纳 {tokens} 个 token",
)
NOTHING_LEFT = Phrase(
    "nothing is left for the KV cache: weights and the profiling run take all that the engine may use",
    "没有显存留给 KV 缓存：权重和 profile 阶段的峰值已用完全部可用额度",
)
OVERDRAWN = Phrase(
    "nothing is left for the KV cache: weights and the profiling run take {over} more than the engine may use",
    "没有显存留给 KV 缓存：权重和 profile 阶段的峰值超出可用额度 {over}",
)
NOT_FREE = Phrase(
    "the engine wants {usable} ({utilization} of {total}) and {free} are free: {held} of the device are held already",
    "引擎要求 {usable}（{total} 的 {utilization}），而空闲只有 {free}：设备上已有 {held} 被占用",
)
RELEASED = Phrase(
    "free memory grew from {before} to {after} while the engine measured: another process gave memory back, so the "
    "measurement is void",
    "引擎测量期间空闲显存从 {before} 变为 {after}：另一个进程释放了显存，测量结果作废",
)
STATES = Phrase(
    "a hybrid model keeps one state block for each sequence: max_num_seqs {seqs} wants as many, and the pool has "
    "{blocks}",
    "混合模型的每条序列占用一个状态块：max_num_seqs {seqs} 需要同样多的块，而池中只有 {blocks} 个",
)
SAMPLER = Phrase(
    "the sampler's warm-up ran out of memory: logits of {seqs} sequences x vocabulary, several copies, come after the "
    "KV cache was placed",
    "采样器预热时显存不足：{seqs} 条序列 × 词表大小的 logits 及其多份副本，是在 KV 缓存分配之后才申请的",
)
BATCH_BELOW_LENGTH = Phrase(
    "prompts may not be cut into chunks, and a batch of {batch} tokens is below max_model_len {length}: a rule of the "
    "engine, no shortage of memory",
    "未开启 chunked prefill，而 max_num_batched_tokens {batch} 小于 max_model_len {length}："
    "这是引擎的规则，不是显存不足",
)
BATCH_BELOW_SEQS = Phrase(
    "a batch of {batch} tokens cannot have {seqs} sequences: a rule of the engine, no shortage of memory",
    "max_num_batched_tokens {batch} 小于 max_num_seqs {seqs}：这是引擎的规则，不是显存不足",
)
POSITIONS = Phrase(
    "max_model_len {length} is above the {positions} positions of the model: a rule of the engine, no shortage of "
    "memory",
    "max_model_len {length} 超过模型的 {positions} 个位置：这是引擎的规则，不是显存不足",
)

NEED_LESS_HAVE = Phrase("{need} needed - {have} left for KV = {short} short", "需要 {need} - 剩余 {have} = 缺 {short}")
TOKEN = Phrase(
    "{need} / {length} tokens = {token} bytes of KV a token on each rank (to the printed digits)",
    "{need} ÷ {length} token = 每卡每 token {token} 字节 KV（按打印精度）",
)
FREE_BOOKS = Phrase(
    "{total} in all - {free} free = {held} held before the engine began",
    "总量 {total} - 空闲 {free} = 启动前已占用 {held}",
)
SHORT_BY = Phrase("{usable} wanted - {free} free = {short} short", "要求 {usable} - 空闲 {free} = 缺 {short}")
TOKENS_SHORT = Phrase(
    "{length} tokens - {tokens} = {short} tokens short", "{length} - {tokens} = 缺 {short} 个 token 的位置"
)
MOST_OF_IT = Phrase("{share} of the request would fit", "这条请求只放得下 {share}")

MORE_TOKENS = Phrase(
    "gpu_memory_utilization higher, where other processes leave room: {length} tokens in place of {tokens} take "
    "{ratio} times the memory for KV",
    "若卡上还有余量，调高 gpu_memory_utilization：从 {tokens} 增加到 {length} 个 token 需要 {ratio} 倍的 KV 显存",
)
FP8_TOKENS = Phrase(
    "kv_cache_dtype fp8, where the device has it: half the bytes a token, about {tokens} tokens",
    "设备支持时用 kv_cache_dtype fp8：每 token 字节减半，约可容纳 {tokens} 个 token",
)
SHORTER = Phrase(
    "max_model_len {length}: the longest that fits (the engine says so itself)",
    "max_model_len {length}：能放下的最长长度（引擎自己给出）",
)
SHORTER_ABOUT = Phrase(
    "max_model_len about {length}: {have} / {need} of {old}, in whole blocks",
    "max_model_len 约 {length}：{old} × {have} ÷ {need}，按整块取",
)
SHORTER_TOKENS = Phrase(
    "max_model_len {length}: as many tokens as the KV cache holds",
    "max_model_len {length}：KV 缓存能容纳的 token 数",
)
FP8_KV = Phrase(
    "kv_cache_dtype fp8: half the bytes a token, {half} for this length, which fits in {have}",
    "kv_cache_dtype fp8：每 token 字节减半，该长度需要 {half}，{have} 放得下",
)
FP8_KV_NOT = Phrase(
    "kv_cache_dtype fp8: half the bytes a token, {half} for this length, is still more than {have}",
    "kv_cache_dtype fp8：每 token 字节减半，该长度仍需 {half}，大于 {have}",
)
FP8_KV_ASCEND = Phrase(
    "kv_cache_dtype fp8: Ascend A2, A3 and 310P have no FP8", "kv_cache_dtype fp8：昇腾 A2、A3、310P 不支持 FP8"
)
MORE_RANKS = Phrase(
    "tensor_parallel_size {new}: KV and weights are split over the ranks, {half} for this length (not the KV of MLA "
    "models such as DeepSeek, nor below one KV head a rank)",
    "tensor_parallel_size {new}：KV 与权重按卡切分（DeepSeek 等 MLA 模型的 KV 不切分；每卡至少一个 KV 头）："
    "该长度每卡 {half}",
)
FEWER_SEQS_NOT = Phrase(
    "max_num_seqs lower: this is one request alone; fewer at once do not shrink it",
    "减小 max_num_seqs：这里放不下的是单条请求，减少并发数不会让它变小",
)
OTHERS_AWAY = Phrase(
    "end what holds the {held} (npu-smi info or nvidia-smi names the processes): then {usable} fit",
    "结束占用 {held} 的进程（用 npu-smi info 或 nvidia-smi 查看）：之后 {usable} 即可满足",
)
SHARE_THE_REST = Phrase(
    "gpu_memory_utilization {new}: at most {free} / {total} of the device, if the others are to stay; the KV cache "
    "becomes {less} smaller",
    "gpu_memory_utilization {new}：若其他进程要保留，最多取 {free} ÷ {total}；KV 缓存会减少 {less}",
)
SHARES_ADD = Phrase(
    "a second server on the same device counts in the first one's memory: its gpu_memory_utilization is a share of the "
    "whole device, so both shares together must stay below 1",
    "同一张卡上跑第二个服务时，gpu_memory_utilization 都是相对整卡的比例，两者之和必须小于 1",
)
LENGTH_NOT = Phrase(
    "max_model_len, max_num_seqs, quantisation: nothing is loaded yet, the check is on free memory alone",
    "max_model_len、max_num_seqs、量化：此时还没有加载任何内容，检查的只是空闲显存",
)
AGAIN_ALONE = Phrase(
    "start it again while nobody else starts or stops on this device", "等该设备上没有其他进程启动或退出时重新启动"
)
FIXED_KV = Phrase(
    "kv_cache_memory_bytes: sets the KV cache without measuring",
    "kv_cache_memory_bytes：直接指定 KV 缓存大小，不再测量",
)
FEWER_SEQS = Phrase("max_num_seqs {seqs} or fewer", "max_num_seqs 不超过 {seqs}")
MORE_BLOCKS = Phrase(
    "gpu_memory_utilization higher: {seqs} blocks in place of {blocks} take {ratio} times the memory for KV",
    "调高 gpu_memory_utilization：从 {blocks} 块到 {seqs} 块需要 {ratio} 倍的 KV 显存",
)
FEWER_SEQS_SAMPLER = Phrase(
    "max_num_seqs lower than {seqs}: the logits shrink with it", "减小 max_num_seqs（当前 {seqs}）：logits 随之变小"
)
LOWER_UTILIZATION = Phrase(
    "gpu_memory_utilization lower: the sampler lives in what the plan leaves; each 0.01 is {step}",
    "调低 gpu_memory_utilization：采样器用的是规划之外的余量，每 0.01 即 {step}",
)
LOWER_UTILIZATION_BARE = Phrase(
    "gpu_memory_utilization lower: the sampler lives in what the plan leaves",
    "调低 gpu_memory_utilization：采样器用的是规划之外的余量",
)
HIGHER_NOT = Phrase(
    "gpu_memory_utilization higher, the usual cure of a failed start: it makes the KV cache larger and what is left "
    "smaller",
    "调高 gpu_memory_utilization（启动失败时常见的建议）：KV 缓存变大，余量反而更小",
)
LENGTH_NOT_SAMPLER = Phrase(
    "max_model_len shorter: the logits depend on sequences and vocabulary, not on their length",
    "减小 max_model_len：logits 只与序列数和词表大小有关，与长度无关",
)
CHUNKED = Phrase("enable_chunked_prefill: prompts are then cut", "开启 chunked prefill：长提示词会被切块")
BATCH_UP = Phrase(
    "max_num_batched_tokens {length}: the profiled batch grows, and with it the activation peak",
    "max_num_batched_tokens {length}：profile 的批变大，激活峰值随之增大",
)
LENGTH_DOWN = Phrase("max_model_len {length} or less", "max_model_len 不超过 {length}")
SEQS_DOWN = Phrase("max_num_seqs {seqs} or fewer", "max_num_seqs 不超过 {seqs}")
MEMORY_NOT = Phrase(
    "gpu_memory_utilization, quantisation, more devices: memory is not what is missing",
    "gpu_memory_utilization、量化、增加设备：缺的不是显存",
)
TAKE_LESS = Phrase(
    "less for weights: quantised weights, a smaller model, or a larger tensor_parallel_size",
    "减少权重占用：量化权重、更小的模型，或增大 tensor_parallel_size",
)
LARGER_SHARE = Phrase(
    "gpu_memory_utilization higher, as far as {safe}, where other processes leave room",
    "在其他进程允许的前提下调高 gpu_memory_utilization，最高到 {safe}",
)
SMALLER_BATCH = Phrase(
    "max_num_batched_tokens and max_num_seqs lower: the activation peak is measured with a full batch",
    "减小 max_num_batched_tokens 和 max_num_seqs：激活峰值是按满批测得的",
)
LENGTH_NOT_YET = Phrase(
    "max_model_len shorter: not one block is left, however short a request",
    "减小 max_model_len：连一个块都放不下，请求再短也没用",
)

STATES_SHORT = Phrase(
    "{seqs} sequences - {blocks} blocks = {short} state blocks short",
    "{seqs} 条序列 - {blocks} 块 = 缺 {short} 个状态块",
)
CUT_SHORT = Phrase(
    "one longest request (max_model_len {length}) needs more KV cache than there is; the message is cut off before its "
    "figures",
    "一条最长请求（max_model_len {length}）需要的 KV 缓存超过可用量；报错在数字之前被截断",
)
CUT_SHORT_HELPS = Phrase("paste the whole line: it names both figures", "请粘贴完整的一行，其中有两个数字")
