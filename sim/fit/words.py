"""What ``fit`` says of its numbers, in English and in Chinese side by side.

::

    title      what is planned on what                     formula    how blocks become tokens and requests
    labels     who holds bytes of the device               verdict    does it start, for whom knows no KV cache
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hbmtwin.sim.budget.memory_budget import BudgetLine, GroupNeed
from hbmtwin.sim.budget.ranges import REMAINDERS
from hbmtwin.sim.fit.advice import Advice
from hbmtwin.sim.fit.report import Fit
from hbmtwin.sim.fit.unknown import GIVEN as GIVEN_SIZES
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

LABELS: Mapping[str, Phrase] = {
    "other tenants": Phrase("other processes", "其他进程"),
    "context": Phrase("context", "运行时上下文"),
    "weights": Phrase("weights", "权重"),
    "activations": Phrase("activation peak", "激活峰值"),
    "non-torch": Phrase("outside torch", "非 torch 显存"),
    "graphs": Phrase("graphs", "图捕获"),
    "late buffers": Phrase("late buffers", "后续通信缓冲"),
    "run-time sampler": Phrase("sampler at run time", "推理时采样"),
    "operators": Phrase("kept for operators", "算子 workspace 预留"),
    "KV cache": Phrase("KV cache", "KV 缓存"),
    "unplanned": Phrase("left over", "未规划余量"),
}
"""By the item of a budget line."""
DEVICE_SUM = Phrase("the device", "整卡显存")

TITLE = Phrase("{model} on {devices}, {engine}: {verdict}", "{model}，{devices}，{engine}：{verdict}")
NUMBERS_ALONE = Phrase("{model}, {engine}: {verdict}", "{model}，{engine}：{verdict}")
SHORT_STARTS = Phrase("starts", "可以启动")
SHORT_MAY_NOT = Phrase("may not start", "可能无法启动")
SHORT_DOES_NOT = Phrase("does not start", "无法启动")
GIVEN_NUMBERS = Phrase("The numbers that were given", "按给定数值")
DEVICE_GIVEN = Phrase("a device of that memory", "给定显存的设备")
DEVICES = Phrase("{count} x {device}", "{count} × {device}")
BUILT_IN = Phrase(
    "No model or device was named, so these are the built-in ones; name yours with --model and --device "
    "(hbmtwin catalog lists them).",
    "未指定模型和设备，以下按内置的模型和设备计算；请用 --model 和 --device 指定（hbmtwin catalog 可列出全部）。",
)
SETTINGS_GIVEN = Phrase("Given: {settings}", "已给定：{settings}")
SETTINGS_DEFAULT = Phrase("By default: {settings}", "默认值：{settings}")
WHERE = Phrase(
    "Where the memory of one device goes, in GiB (2^30 bytes)",
    "单卡显存去向，单位 GiB（2^30 字节）",
)
ONLY_KV = Phrase(
    "Only what is left for the KV cache is known, {kv}: there is no subtraction to show.",
    "只给定了 KV 缓存可用显存 {kv}，因此没有显存扣减明细。",
)
WHERE_OF_RANK = Phrase(
    "Where the memory of one device goes, in GiB (2^30 bytes): rank {rank}, which has room for the fewest blocks",
    "单卡显存去向，单位 GiB（2^30 字节）：rank {rank}，可容纳的块最少，由它决定",
)
MEASURED = ("given", "measured", "num_gpu_blocks_override", "kv_cache_memory_bytes")
EXACT = Phrase("exact", "精确值")
GIVEN = Phrase("given", "已给定")
PROFILED = Phrase("measured, {profile}", "实测，{profile}")
PROFILED_BETWEEN = Phrase("{low} to {high}, partly measured, {profile}", "{low} 至 {high}，部分实测，{profile}")
REMAINDER = Phrase("the rest", "剩余")
ESTIMATED = Phrase("estimated, {low} to {high}", "估算，{low} 至 {high}")
BETWEEN = Phrase("{low} to {high}", "{low} 至 {high}")
REST_BETWEEN = Phrase("the rest, {low} to {high}", "剩余，{low} 至 {high}")

SOURCES = Phrase(
    "Estimates are fits to public boot logs; --json has the source of every line.",
    "估算值由公开启动日志拟合得到；--json 给出每一行的来源。",
)
STAGES = Phrase(
    "Stages of the pipeline: all have as many blocks as the one with the fewest", "流水线各级：块数取各级最小值"
)
STAGE = Phrase(
    "stage {stage}, layers {first} to {last}: weights {weights}, KV cache {kv}, {blocks} blocks",
    "第 {stage} 级，第 {first} 至 {last} 层：权重 {weights}，KV 缓存 {kv}，{blocks} 块",
)
STAGE_DECIDES = Phrase(
    "stage {stage}, layers {first} to {last}: weights {weights}, KV cache {kv}, {blocks} blocks; decides",
    "第 {stage} 级，第 {first} 至 {last} 层：权重 {weights}，KV 缓存 {kv}，{blocks} 块；由它决定",
)
LOG = Phrase("The engine would write in its log", "引擎启动日志将打印")
HOW = Phrase("How blocks become tokens and requests", "块数、token 数与并发的换算")
BLOCKS = Phrase(
    "{kv} bytes for KV / {block} bytes a block = {count} blocks",
    "KV 缓存 {kv} 字节 ÷ 每块 {block} 字节 = {count} 块",
)
BLOCK = Phrase(
    "a block: {size} tokens x {token} bytes a token = {block} bytes",
    "每块：{size} 个 token × 每 token {token} 字节 = {block} 字节",
)
REQUEST = Phrase(
    "one request of {length} tokens: {length} / {size} = {blocks} blocks, rounded up",
    "一条 {length} token 的请求：{length} ÷ {size} = {blocks} 块（向上取整）",
)
REQUEST_OF_GROUPS = Phrase(
    "one request of {length} tokens: {blocks} blocks, over all groups of layers",
    "一条 {length} token 的请求：各层组合计 {blocks} 块",
)
GROUP = Phrase(
    "  {layers} layers that see all: {blocks}, of {size} tokens each",
    "  {layers} 层全注意力：{blocks} 块，每块 {size} 个 token",
)
WINDOW_GROUP = Phrase(
    "  {layers} layers with a window of {window}: {blocks}, of {size} tokens each",
    "  {layers} 层滑动窗口（窗口 {window}）：{blocks} 块，每块 {size} 个 token",
)
STATE_GROUP = Phrase("  {layers} layers with a state: {blocks}", "  {layers} 层状态（Mamba）：{blocks} 块")
ALIKE = Phrase("{group}; {count} such groups", "{group}；共 {count} 组")
CONCURRENCY = Phrase(
    "{count} blocks / {blocks} = {ratio} such requests at once; x {length} = {tokens} tokens",
    "{count} 块 ÷ {blocks} 块 = 可同时容纳 {ratio} 条；× {length} = {tokens} 个 token",
)

STARTS_MANY = Phrase(
    "It starts. {requests} requests of {length} tokens (prompt and answer together) fit in memory at once; more if "
    "they are shorter, and what does not fit waits in a queue.",
    "可以启动。显存可同时容纳 {requests} 条 {length} token（输入加输出）的请求；"
    "请求更短则可容纳更多，放不下的请求排队等待。",
)
STARTS_ONE = Phrase(
    "It starts. {requests} request of {length} tokens (prompt and answer together) fits in memory at once; more if "
    "they are shorter, and what does not fit waits in a queue.",
    "可以启动。显存只能同时容纳 {requests} 条 {length} token（输入加输出）的请求；"
    "请求更短则可容纳更多，放不下的请求排队等待。",
)
CAPPED = Phrase(
    "It starts. {requests} requests of {length} tokens (prompt and answer together) would fit in memory at once; "
    "max_num_seqs lets {seqs} run.",
    "可以启动。显存可同时容纳 {requests} 条 {length} token（输入加输出）的请求；max_num_seqs 限制同时运行 {seqs} 条。",
)
MAY_NOT = Phrase(
    "It may not start. By the figures it does, and {requests} of {length} tokens (prompt and answer together) would "
    "fit in memory at once; but these are estimates, and at the far end of their ranges {why}.",
    "可能无法启动。按估算值可以启动，显存可同时容纳 {requests} {length} token（输入加输出）的请求；"
    "但估算有误差，取到误差上限时{why}。",
)
REQUESTS = Phrase("{requests} requests", "{requests} 条")
REQUEST_ALONE = Phrase("{requests} request", "{requests} 条")
DOES_NOT = Phrase("It does not start: {why}.", "无法启动：{why}。")
NO_KERNEL = Phrase("It does not start so, whatever the memory: {why}.", "无法这样启动，与显存无关：{why}。")
MEMORY_WOULD = Phrase("Memory would suffice.", "显存足够。")
MEMORY_NOR = Phrase("Nor would memory suffice.", "显存也不够。")
MAY = Phrase(
    "Estimates decide it: at the near end of their range it would start.",
    "结论取决于估算误差：取到误差下限时可以启动。",
)
LONGEST = Phrase(
    "It starts with a max_model_len of {length}: a single request may have {length} tokens, prompt and answer "
    "together.",
    "可以启动，max_model_len 取 {length}：单条请求最多 {length} 个 token（输入加输出）。",
)

SMALLEST = Phrase("Any one of these changes alone makes it start", "以下任意一项改动即可启动")
SMALLEST_FOR_MEMORY = Phrase(
    "For memory alone, any one of these changes would do", "仅就显存而言，以下任意一项改动即可"
)
RESULT = Phrase("{tokens} tokens = {ratio} x {length}", "{tokens} 个 token = {ratio} × {length}")
RESULT_BY_FIGURES = Phrase("{result}, if the estimates hold", "{result}（以估算值为准）")
TOGETHER = Phrase(
    "No single change makes it start; two of them together do", "任何单项改动都不足以启动；以下两项同时改动即可"
)
NOT_ALONE = Phrase("Not enough alone: {names}.", "单独改动以下参数仍不够：{names}。")
NOTHING = Phrase(
    "No single change makes it start: take a smaller model, or more memory.",
    "任何单项改动都不足以启动：请换用更小的模型或更大的显存。",
)
NOTHING_RUNS = Phrase(
    "No single change makes it run: take another model or another device.",
    "任何单项改动都无法使其运行：请换用其他模型或其他设备。",
)
NOTE = Phrase("note: {text}", "提示：{text}")


def title(fit: Fit) -> Said:
    """What is planned on what, and whether it starts."""
    q = fit.question
    model: object = Said.of(GIVEN_NUMBERS) if q.model.name == GIVEN_SIZES else q.model.name
    device: object = Said.of(DEVICE_GIVEN) if q.device.name == GIVEN_SIZES else q.device.name
    ranks = q.ranks.tensor * q.ranks.pipeline * q.ranks.data
    devices = Said.of(DEVICES, count=ranks, device=device) if ranks > 1 else device
    short = SHORT_DOES_NOT if not fit.fits else SHORT_MAY_NOT if fit.may_not_start is not None else SHORT_STARTS
    phrase = NUMBERS_ALONE if q.device.name == GIVEN_SIZES and not q.rules.claims_free else TITLE
    return Said.of(phrase, model=model, devices=devices, engine=_engine(fit), verdict=Said.of(short))


def _engine(fit: Fit) -> str:
    """As people write it: with the release that was named, or the first one of the rules."""
    given = next((a.value for a in fit.arguments if a.name == "engine_version"), None)
    return f"{fit.budget.engine} {given or fit.budget.version + '+'}"


def settings(fit: Fit) -> list[Said]:
    """What was given and what the engine's defaults add to it, but for model and device."""
    found = []
    for phrase, default in ((SETTINGS_GIVEN, False), (SETTINGS_DEFAULT, True)):
        chosen = [
            f"{a.name} {a.value}"
            for a in fit.arguments
            if (a.origin == "default") == default and a.name not in ("model", "device", "engine", "engine_version")
            if not default or (a.value not in (0, 1, "auto") and not _is_of_graphs(fit, a.name))
        ]
        if chosen:
            found.append(Said.of(phrase, settings=", ".join(chosen)))
    return found


def _is_of_graphs(fit: Fit, name: str) -> bool:
    """SGLang's default stands for the largest batch of a graph; how many run follows from the pool."""
    return name == "max_num_seqs" and fit.budget.engine == "sglang"


def only_kv(fit: Fit) -> Said | None:
    """That there is nothing to subtract, where nothing is known but what is left; None where there is."""
    if fit.question.device.name != GIVEN_SIZES or fit.budget.total_bytes != fit.budget.kv_bytes:
        return None
    return Said.of(ONLY_KV, kv=Size(fit.budget.kv_bytes))


def label(item: str) -> Said:
    """What people call the holder of a budget line."""
    return Said.of(LABELS.get(item, Phrase(item, item)))


def how_known(line: BudgetLine, *, short: bool = False) -> Said:
    """Exact, given, measured by a profile, or estimated within a range, in GiB; *short*: only the range."""
    low, high = f"{line.low / 2**30:.2f}", f"{line.high / 2**30:.2f}"
    rest = line.item in REMAINDERS
    if (profile := line.profile) and not rest and not short:
        return Said.of(PROFILED if line.low == line.high else PROFILED_BETWEEN, profile=profile, low=low, high=high)
    if line.low != line.high:
        return Said.of(BETWEEN if short else REST_BETWEEN if rest else ESTIMATED, low=low, high=high)
    return Said.of(GIVEN if line.source.startswith(MEASURED) else REMAINDER if rest else EXACT)


def stages(fit: Fit) -> list[Said]:
    """What each stage of a pipeline alone would have room for; none where there is no pipeline."""
    return [
        Said.of(
            STAGE_DECIDES if stage.stage == fit.budget.stage else STAGE,
            stage=stage.stage,
            first=stage.layers.start,
            last=stage.layers.stop - 1,
            weights=Size(stage.weights_bytes),
            kv=Size(stage.kv_bytes),
            blocks=Count(stage.num_blocks),
        )
        for stage in fit.budget.stages
    ]


def formula(fit: Fit) -> list[Said]:
    """From bytes to blocks, to tokens and requests, as the engine computes them."""
    b, length, kv = fit.budget, Count(fit.budget.max_model_len), Count(fit.budget.kv_bytes)
    found = [Said.of(BLOCKS, kv=kv, block=Count(b.block_bytes), count=Count(b.num_blocks))] if b.num_blocks else []
    if not b.groups:
        token = Count(b.kv_bytes_per_token)
        found.append(Said.of(BLOCK, size=b.block_size, token=token, block=Count(b.block_bytes)))
        found.append(Said.of(REQUEST, length=length, size=b.block_size, blocks=Count(b.request_blocks)))
    else:
        found.append(Said.of(REQUEST_OF_GROUPS, length=length, blocks=Count(b.request_blocks)))
        for group, count in Counter(b.groups).items():
            found.append(Said.of(ALIKE, group=_group(group), count=count) if count > 1 else _group(group))
    if b.num_blocks:
        concurrency = Said.of(
            CONCURRENCY,
            count=Count(b.num_blocks),
            blocks=Count(b.request_blocks),
            ratio=f"{b.max_concurrency:.2f}",
            length=length,
            tokens=Count(b.kv_tokens),
        )
        found.append(concurrency)
    return found


def _group(group: GroupNeed) -> Said:
    phrase = {"full": GROUP, "mamba": STATE_GROUP}.get(group.kind, WINDOW_GROUP)
    return Said.of(
        phrase,
        layers=group.num_layers,
        window=Count(group.window),
        blocks=Count(group.request_blocks),
        size=Count(group.block_size),
    )


def verdict(fit: Fit) -> list[Said]:
    """Whether it starts, in sentences for people who know nothing of KV caches."""
    q, b = fit.question, fit.budget
    if fit.refused is not None:
        return [Said.of(NO_KERNEL, why=fit.refused), Said.of(MEMORY_WOULD if b.fits else MEMORY_NOR)]
    if b.why is not None:
        return [Said.of(DOES_NOT, why=b.why), *([Said.of(MAY)] if fit.may_start else [])]
    requests, length = Count(b.max_concurrency), Count(q.max_model_len)
    if fit.may_not_start is not None:
        counted = Said.of(REQUEST_ALONE if requests == 1 else REQUESTS, requests=requests)
        return [Said.of(MAY_NOT, requests=counted, length=length, why=fit.may_not_start)]
    if fit.auto_length and requests == 1:
        return [Said.of(LONGEST, length=length)]
    capped = requests > q.max_num_seqs and (b.engine != "sglang" or fit.given("max_num_seqs"))
    phrase = CAPPED if capped else STARTS_ONE if requests == 1 else STARTS_MANY
    return [Said.of(phrase, requests=requests, length=length, seqs=Count(q.max_num_seqs))]


def result(advice: Advice) -> Said:
    """What fits after a change."""
    length, b = Count(advice.question.max_model_len), advice.budget
    said = Said.of(RESULT, tokens=Count(b.kv_tokens), ratio=f"{b.max_concurrency:.2f}", length=length)
    return said if advice.certain else Said.of(RESULT_BY_FIGURES, result=said)
