"""What whoever starts the server should know beside the verdict: nothing here stops the start by itself."""

from __future__ import annotations

from collections.abc import Iterator

from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.fit.options import SAFE_UTILIZATION
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

TIGHT = Phrase(
    "outside the plan {low} to {high} are left; the sampler, late buffers and fragments must live there: {option} of "
    "at most {safe} leaves more",
    "规划之外只剩 {low} 至 {high}，采样器、后续通信缓冲和碎片都要占用这部分：{option} 不超过 {safe} 更稳妥",
)
OVER = Phrase(
    "at the far end of the estimates' ranges {over} more are needed outside the plan than the device has: memory may "
    "run out when the server runs; a lower {option} leaves more",
    "取到误差上限时，规划之外的需求超出显存 {over}：推理中可能显存不足；调低 {option} 可留出更多余量",
)
SHARE_OF_ALL = "gpu_memory_utilization"
"""Other engines' fractions are of something else, and their defaults may be higher."""
NULL_BLOCK = Phrase(
    "it starts, but a request of all {length} tokens can never run: of {blocks} blocks one is the engine's null block; "
    "shorten max_model_len to {shorter}",
    "可以启动，但 {length} token 的请求永远无法运行：{blocks} 块中有一块是引擎的空块；"
    "请将 max_model_len 缩短到 {shorter}",
)


def warnings_of(
    q: BudgetQuestion, b: MemoryBudget, *, auto_length: bool = False, only_kv: bool = False
) -> Iterator[Said]:
    """One sentence each; *auto_length*: ``max_model_len`` was left to the engine; *only_kv*: nothing is known of the
    device but what is left for KV."""
    rest, option = b.lines[-1], q.rules.fraction_name
    if only_kv:
        pass
    elif b.fits and not b.warnings and rest.low < 0:
        yield Said.of(OVER, over=Size(-rest.low), option=option)
    elif b.fits and not b.warnings and q.gpu_memory_utilization > SAFE_UTILIZATION and option == SHARE_OF_ALL:
        yield Said.of(TIGHT, low=Size(rest.low), high=Size(rest.high), safe=SAFE_UTILIZATION, option=option)
    has_null_block = q.rules.engine in ("vllm", "vllm-ascend", "vllm-cpu") and q.rules.version != "V0"
    if (
        has_null_block
        and b.fits
        and not auto_length
        and b.num_blocks == (need := q.pool.request_blocks(q.max_model_len))
    ):
        shorter = Count(q.pool.longest_request(need - 1, q.max_model_len))
        if shorter:
            length, blocks = Count(q.max_model_len), Count(b.num_blocks)
            yield Said.of(NULL_BLOCK, length=length, blocks=blocks, shorter=shorter)
