"""What is said of a plan, in English and in Chinese; :mod:`~hbmtwin.sim.capacity.plan_words` chooses among it.

Names of constraints, of changes and of figures stand in results in English: the tables here are by those.
"""

from __future__ import annotations

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.explain.words import NAMES
from hbmtwin.sim.phrases import Lang, Phrase, Said

COMMA, SEMICOLON = Phrase(", ", "，"), Phrase("; ", "；")
LIST_COMMA = Phrase(", ", "、")

# -- values ----------------------------------------------------------------------------------------------------------

COUNTED = {
    "users": Phrase("{value} users", "{value} 个用户"),
    "sessions a second": Phrase("{value} sessions a second", "每秒 {value} 个会话"),
    "times the recorded rate": Phrase("{value} times the recorded rate", "录制速率的 {value} 倍"),
    "times the learned rate": Phrase("{value} times the learned rate", "模型速率的 {value} 倍"),
    "tokens": Phrase("{value} tokens", "{value} 个 token"),
    "devices": Phrase("{value} devices", "{value} 个设备"),
    "devices a stage": Phrase("{value} devices a stage", "每级 {value} 个设备"),
}
"""Values of a target, by its unit."""
TARGET_ENDS = {
    "all positions of the model": Phrase("all positions of the model", "已是模型的全部位置"),
    "there are no fewer": Phrase("there are no fewer", "不能再少"),
}
NO_VALUE = Phrase("none", "无解")

# -- the verdict -----------------------------------------------------------------------------------------------------

FOUND = Phrase(
    "{value}, {best} at which at least {survive:.12g} % of runs hold ({shown}); {beyond}. Both ends are right together "
    "with a confidence of {confidence:.12g} %.",
    "{value}，是至少 {survive:.12g} % 的运行满足目标的{best}（{shown}）；{beyond}。两端同时成立的置信度为 "
    "{confidence:.12g} %。",
)
SMALLEST, MOST = Phrase("the smallest", "最小值"), Phrase("the most", "最大值")
FEWEST = Phrase("the fewest", "最少数量")
SEEN = Phrase("{held:,} of {trials:,} did", "{trials:,} 次中 {held:,} 次满足")
DO_NOT = Phrase("{value} do not ({shown}){between}", "{value}则不满足（{shown}）{between}")
DOES_NOT = Phrase("{value} does not ({shown}){between}", "{value}则不满足（{shown}）{between}")
BETWEEN = Phrase("; between them {values} could not be decided", "；其间 {values} 无法判定")
NONE_BEYOND = Phrase("none beyond was shown to fail{undecided}", "更远的值都没有被证明不满足{undecided}")
UNDECIDED = Phrase(
    "; {values} could not be decided, for which it takes more --seeds", "；{values} 无法判定，需要更大的 --seeds"
)
UNBOUNDED = Phrase(
    "up to {value}, as far as was looked, everything holds: no answer, but a bound from below. {why}",
    "到 {value}（搜索范围的尽头）为止全部满足：这只是下界，不是答案。{why}",
)
NOT_WORSE = Phrase(
    "Nothing that is promised gets worse with the load: who waits meets any TPOT; promise a ttft_p99 or an e2e_p99 as "
    "well",
    "所承诺的指标不随负载变差：排队的请求也满足 TPOT；请同时承诺 ttft_p99 或 e2e_p99",
)
NOT_FELT = Phrase(
    "Nothing that is promised is missed up to there: promise more, or let runs be longer (workload.num_prompts)",
    "到此为止所承诺的指标都满足：请承诺更多，或让运行更长（workload.num_prompts）",
)
NO_PROMISE = Phrase(
    "Nothing was promised that a load breaks: add --slo, or --max-preemptions",
    "没有承诺会被负载打破的指标：请加上 --slo 或 --max-preemptions",
)
NO_SLO = Phrase("Nothing was promised that a load breaks: add --slo", "没有承诺会被负载打破的指标：请加上 --slo")
ONCE = Phrase(
    "{value}: the last value that holds. One run decides: this traffic has no chance in it, so there is no confidence "
    "to state",
    "{value}：满足目标的最后一个值。一次运行即可判定：负载没有随机性，因此没有置信度可言",
)
NOT_SHOWN = Phrase(
    "not shown even at {value}: {shown}, which shows neither that {survive:g} % hold nor that they do not; allow more "
    "--seeds, or a lower --survive",
    "即使 {value}也没有结论：{shown}，既不能证明 {survive:g} % 满足，也不能证明不满足；请增大 --seeds 或减小 --survive",
)
NOTHING_HOLDS = Phrase(
    "nothing holds: even at {value} {shown}{why}{reached}", "没有满足目标的值：即使 {value}，{shown}{why}{reached}"
)
LEAVES_LESS = Phrase(
    "nothing holds: {serves:g}, the smallest that serves the traffic, leaves {left} of the device, and the margin is "
    "{margin}; a larger one leaves less",
    "没有满足目标的值：{serves:g} 是能处理该负载的最小值，但设备只剩 {left}，要求的余量为 {margin}；更大的值剩得更少",
)
WHY = Phrase(": {broken}", "：{broken}")
SO_MANY = Phrase("{count} {broke}", "{count} 次{broke}")
REACHED = Phrase(". The best that was reached there: {best}; wanted is {slos}", "。此时最好达到 {best}；目标为 {slos}")
BROKEN = {
    "out_of_memory": Phrase("ran out of memory", "显存耗尽"),
    "does_not_fit": Phrase("did not start", "无法启动"),
    "standstill": Phrase("came to a standstill", "死锁或活锁"),
    "rejected": Phrase("rejected requests for want of memory", "因显存不足拒绝请求"),
    "unfinished": Phrase("did not serve all requests", "未处理完所有请求"),
    "preemptions": Phrase("preempted more than they may", "抢占次数超限"),
    "margin": Phrase("left less than the margin", "余量不足"),
}
MISSED = Phrase("missed {slo}", "未达到 {slo}")

# -- the sentences ---------------------------------------------------------------------------------------------------

HEADINGS = {
    "margin": Phrase("margin", "余量"),
    "refused": Phrase("refused", "拒绝"),
    "range": Phrase("range", "范围"),
    "binding": Phrase("binding", "瓶颈"),
    "one more": Phrase("one more", "增加一个"),
    "next": Phrase("next", "下一步"),
    "leans on": Phrase("leans on", "最敏感的假设"),
    "order": Phrase("order", "单调性"),
}
MARGIN = Phrase(
    "at the fullest of its runs {usage:.0f} % of {budget} of KV were held ({kv_left} left) and {device_left} of the "
    "device were free; the margin is {margin}",
    "最满的一次运行占用了 {budget} KV 预算的 {usage:.0f} %（剩余 {kv_left}），设备空闲 {device_left}；要求的余量为 "
    "{margin}",
)
REFUSED = Phrase(
    "up to {refused:,} of the {requests:,} requests of a run are longer than max_model_len and were refused, which is "
    "no want of memory",
    "单次运行 {requests:,} 条请求中最多有 {refused:,} 条长于 max_model_len 而被拒绝，这不算显存不足",
)
RANGE = Phrase(
    "holds from {answer:g} up to {upper:g}, which still leaves {margin} of the device",
    "{answer:g} 至 {upper:g} 都满足，且设备仍留有 {margin}",
)
BINDING = Phrase("{constraint}:{where} {broken}{causes}{relaxed}", "{constraint}：{where}{broken}{causes}{relaxed}")
DOUBLED = Phrase(". With one thing doubled: {relaxed}", "。{relaxed}")
AT = Phrase(" at {value}", "{value}时，")
OF = Phrase("{count} of {trials} {broke}", "{trials} 次中 {count} 次{broke}")
CAUSES = Phrase(" ({causes})", "（{causes}）")
OF_CAUSE = Phrase("{count} of {cause}", "{cause} {count} 次")
RELAXED = Phrase("{change}, {held} of {trials} hold", "{change}：{trials} 次中 {held} 次满足")
CONSTRAINTS = {
    "KV": Phrase("KV", "KV 容量"),
    "fragmentation": Phrase("fragmentation", "显存碎片"),
    "growth copies": Phrase("growth copies", "增长缓冲区的旧副本"),
    "reserved KV that nobody fills": Phrase("reserved KV that nobody fills", "预留未用的 KV"),
    "parked histories": Phrase("parked histories", "保留的历史会话"),
    "activation peak": Phrase("activation peak", "激活峰值"),
    "other processes on the device": Phrase("other processes on the device", "设备上的其他进程"),
    "a rule of the allocator": Phrase("a rule of the allocator", "分配器规则"),
    "compute": Phrase("compute", "算力"),
    "several at once": Phrase("several at once", "多个因素同时"),
}
TWICE = {
    "twice the device's memory": Phrase("twice the device's memory", "设备显存加倍"),
    "a device twice as fast": Phrase("a device twice as fast", "设备速度加倍"),
}
OTHER_CAUSES = {
    "does_not_fit": "放不下",
    "kv_capacity": "KV 容量不足",
    "out_of_memory": "显存不足",
    "live_lock": "活锁",
    "deadlock": "死锁",
}
"""Beside those of the allocators."""
ONE_MORE = Phrase(
    "one more user takes {kv} of KV at the peak, {tpot:+.2f} ms of tpot_p99, {ttft:+.1f} ms of ttft_p99 (between "
    "{first:,} and {last:,})",
    "每增加一个用户，KV 峰值增加 {kv}，tpot_p99 {tpot:+.2f} ms，ttft_p99 {ttft:+.1f} ms（{first:,} 与 {last:,} 之间）",
)
SO_MUCH_MORE = Phrase(
    "{by} more takes {kv} of KV at the peak, {tpot:+.2f} ms of tpot_p99, {ttft:+.1f} ms of ttft_p99 (between "
    "{first:,} and {last:,})",
    "每增加{by}，KV 峰值增加 {kv}，tpot_p99 {tpot:+.2f} ms，ttft_p99 {ttft:+.1f} ms（{first:,} 与 {last:,} 之间）",
)
THEN = Phrase("{one}; at {value} {breaks}", "{one}；{value}时，{breaks}")
NONE_BREAKS = Phrase("none of {trials} runs breaks yet", "{trials} 次运行仍都满足")
NO_CHANGE = Phrase("none of {count} single changes holds there", "{count} 个单项改动都不满足")
DRAW, DRAWS = Phrase("1 draw", "1 个样本"), Phrase("{count} draws", "{count} 个样本")
CHANGES_TOLD = Phrase("{told}; each with {draws}: plan what you choose again", "{told}；各用 {draws}：选定后请重新规划")
CARRIES = Phrase("{change} carries to {value}{drops}", "{change}：到 {value}{drops}")
CARRIES_BEYOND = Phrase("{change} carries to or beyond {value}{drops}", "{change}：到 {value}（或更多）{drops}")
DROPS = Phrase(" (drops parts of conversations)", "（丢弃部分对话）")
CHANGES = {
    "twice the sequences at once": Phrase("twice the sequences at once", "并发序列数加倍"),
    "half the sequences at once": Phrase("half the sequences at once", "并发序列数减半"),
    "twice the tokens a step": Phrase("twice the tokens a step", "每步 token 数加倍"),
    "half the tokens a step": Phrase("half the tokens a step", "每步 token 数减半"),
    "prefix caching": Phrase("prefix caching", "前缀缓存"),
    "continuous batching": Phrase("continuous batching", "连续批处理"),
    "continuous batching and paged KV": Phrase("continuous batching and paged KV", "连续批处理加分页 KV"),
    "paged KV": Phrase("paged KV", "分页 KV"),
    "pages on demand": Phrase("pages on demand", "按需映射物理页"),
    "a pool for KV": Phrase("a pool for KV", "KV 使用独立显存池"),
    "old copies die one by one": Phrase("old copies die one by one", "旧副本逐个释放"),
    "buffers per layer": Phrase("buffers per layer", "逐层缓冲区"),
    "expandable segments": Phrase("expandable segments", "开启 expandable_segments"),
    "INT8 KV": Phrase("INT8 KV", "KV 用 INT8"),
    "half of the history": Phrase("half of the history", "历史减半"),
    "a sliding window": Phrase("a sliding window", "滑动窗口"),
    "no KV between turns": Phrase("no KV between turns", "轮次之间不保留 KV"),
    "admission at full length": Phrase("admission at full length", "按最大长度准入"),
    "preempt": Phrase("preempt", "抢占"),
    "less of the device": Phrase("less of the device", "使用更少设备显存"),
    "more of the device": Phrase("more of the device", "使用更多设备显存"),
}
KINDS_OF_CHANGE = {
    "devices": Phrase("{which} devices", "{which} 个设备"),
    "growth": Phrase("{which} growth", "缓冲区按 {which} 增长"),
    "batches": Phrase("{which} batches", "按 {which} 组批"),
}
"""By the last word of those that have a number or the value of a setting in front."""
LEANS = Phrase(
    "{name}, {words}: {how} ({value:g}). The answer is {low} at {low_end:g}, {high} at {high_end:g}, and {answer} as "
    "it is, by {draws}; with all figures at their worse ends at once {worst}",
    "{name}（{words}）：{how}（{value:g}）。取 {low_end:g} 时结论为 {low}，取 {high_end:g} 时为 {high}，按现值为 "
    "{answer}，各用 {draws}；所有参数同时取较差的一端时为 {worst}",
)
CALIBRATED, DEFAULT = Phrase("calibrated", "已校准"), Phrase("a default, uncalibrated", "默认值，未校准")
STILL = Phrase("no uncertain figure moves it within its range", "不确定的参数在各自范围内都不改变结论")
IN_ORDER = Phrase(
    "none of the values that were run held less often than a harder one: {checked}; what lies between was not run",
    "运行过的值 {checked} 中，没有比更难的值满足得更少的；其间的值没有运行",
)
OUT_OF_ORDER = Phrase(
    "more load is not always worse here: {pairs}. Only what lies below the first that fails is answered",
    "这里负载更大不一定更差：{pairs}。结论只取第一个不满足的值以下的部分",
)
LESS_OFTEN = Phrase("{easier:,} holds less often than {harder:,}", "{easier:,} 满足的次数少于 {harder:,}")

# -- what the scenario left open -------------------------------------------------------------------------------------

REQUESTS_EACH = Phrase(
    "each user sends {count} requests: set workload.users and workload.num_prompts to say",
    "每个用户发送 {count} 条请求：可由 workload.users 与 workload.num_prompts 指定",
)
REQUESTS_OF = Phrase(
    "requests of {seconds:,.0f} s, as at {rate:g} sessions a second",
    "请求数相当于 {seconds:,.0f} s，按每秒 {rate:g} 个会话计",
)
TRACE_CLOCK = Phrase(
    "a trace has no users: its clock is made faster, and think times with it",
    "trace 没有用户数：加快的是它的时钟，思考时间随之缩短",
)
MODEL_CLOCK = Phrase(
    "a model has no users: its clock is made faster, and think times with it",
    "流量模型没有用户数：加快的是它的时钟，思考时间随之缩短",
)
LONGER = Phrase(
    "requests that are longer are refused at any load, which is no want of memory",
    "更长的请求在任何负载下都被拒绝，这不算显存不足",
)
ONE_REPLICA = Phrase(
    "devices are the ranks of one replica (tensor_parallel_size); N replicas need N times as many, and each has its "
    "share of the traffic",
    "设备数是一个副本的 rank 数（tensor_parallel_size）；N 个副本需要 N 倍，各承担一份流量",
)
EACH_STAGE = Phrase("each of the {stages} pipeline stages has so many", "{stages} 个流水级各有这么多")

# -- the screen ------------------------------------------------------------------------------------------------------

PROMISE, LATENCY, RUNS = Phrase("promise", "目标"), Phrase("latency", "延迟"), Phrase("runs", "运行次数")
PROMISED = Phrase(
    "no death, nothing rejected for want of memory, all served; {promised}",
    "显存不耗尽，不因显存不足拒绝，全部处理完；{promised}",
)
THE_MARGIN = Phrase("margin {margin}", "余量 {margin}")
AT_MOST, NOBODY = Phrase("at most {count:,} preemptions", "抢占至多 {count:,} 次"), Phrase("nobody preempted", "无抢占")
MEANS = Phrase("{latencies} (means of its runs; {basis})", "{latencies}（各次运行的均值；{basis}）")
BASES = {"default, uncalibrated": Phrase("default, uncalibrated", "默认值，未校准")}
ANSWERS = Phrase("{target}: at least {survive:.12g} % of runs hold", "{target}：至少 {survive:.12g} % 的运行满足目标")
POLICY = Phrase("policy", "策略")
ANSWER_COLUMNS = (
    Phrase("holds", "满足"),
    Phrase("does not", "不满足"),
    Phrase("binding", "瓶颈"),
    Phrase("KV left (GiB)", "KV 剩余 (GiB)"),
    Phrase("leans most on", "最敏感的假设"),
)
NOT_ASKED = Phrase("not asked", "未求")
SINGLE_CHANGES = Phrase("single changes, run at {value}", "单项改动，在 {value}时运行")
CHANGE_COLUMNS = Phrase("change", "改动"), Phrase("held", "满足"), Phrase("carries to", "可到")
HELD_OF = Phrase("{held} of {trials}", "{held} / {trials}")
DROPS_TOKENS = Phrase("{change} (drops tokens)", "{change}（丢弃 token）")
UNCERTAIN = Phrase("uncertain figures, with {draws} each", "不确定的参数，各用 {draws}")
FIGURE_COLUMNS = (
    Phrase("figure", "参数"),
    Phrase("low", "低"),
    Phrase("value", "取值"),
    Phrase("high", "高"),
    Phrase("answer at low", "取低时结论"),
    Phrase("at high", "取高时结论"),
    Phrase("known by", "依据"),
)
ALL_WORSE = Phrase("all at the worse end", "全部取较差的一端")
NOTE = Phrase("note: {note}", "注：{note}")


def cause_name(cause: str, lang: Lang) -> str:
    """What a run died of; in English its identifier."""
    if lang == "en":
        return cause
    if cause in {known.value for known in Cause}:
        return Said.of(NAMES[Cause(cause)]).text(lang)
    return OTHER_CAUSES.get(cause, cause)


def change_name(name: str, lang: Lang) -> str:
    """A change of a plan, by what results call it."""
    which, _, kind = name.rpartition(" ")
    if name in CHANGES:
        return Said.of(CHANGES[name]).text(lang)
    return Said.of(KINDS_OF_CHANGE[kind], which=which).text(lang) if kind in KINDS_OF_CHANGE else name
