"""What is wrong with a question of the Capacity, Fit and run pages, in both languages: grids, loads, promises, flags.

The English is what :mod:`hbmtwin.sim.sweep.grid`, :mod:`hbmtwin.sim.capacity` and :mod:`hbmtwin.sim.fit` raise.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

CAPACITY = (
    # --grid
    Phrase(
        "write key=a,b,c or key=start:stop:step, e.g. kv_cache.preset=paged,doubling or workload.users=10:200:10",
        "请写成 key=a,b,c 或 key=start:stop:step，如 kv_cache.preset=paged,doubling 或 workload.users=10:200:10",
    ),
    Phrase("is given twice; write all its values in one word, {form}", "写了两次；请把全部取值写在一处：{form}"),
    Phrase("--grid varies it; leave it out of one of the two", "扫描参数中已有此项；两处只能留一处"),
    Phrase(
        "seeds are not an axis; use --seeds N, and --seed for the first",
        "随机种子不是扫描参数；请用“随机种子数”，首个种子用 seed",
    ),
    Phrase("a {letter} is missing", "缺少 {letter}"),
    Phrase("a value is missing beside a comma", "逗号旁缺少取值"),
    Phrase(
        "{part} is no range; write start:stop:step as three numbers with one unit, e.g. 10:200:10 or 32GiB:64GiB:8GiB",
        "{part} 不是范围；请写 start:stop:step 三个数，单位相同，如 10:200:10 或 32GiB:64GiB:8GiB",
    ),
    Phrase(
        "{part} has no values; the step must be above 0, and stop at least start",
        "{part} 没有取值；步长须大于 0，终点不小于起点",
    ),
    Phrase(
        "{part} has {count} values; at most {most}: take a larger step",
        "{part} 有 {count} 个取值；最多 {most} 个：请增大步长",
    ),
    Phrase("all {count} combinations are illegal, the first: {said}", "{count} 个组合全部不合法，第一个：{said}"),
    # --load
    Phrase(
        "write it as users=10:200:10 (or :x1.5 for steps by a factor, or users=10,20,50)",
        "请写成 users=10:200:10（按倍数写 :x1.5，或写 users=10,20,50）",
    ),
    Phrase(
        "a trace gets denser as time_scale falls; write rate_scale, which is 1 / time_scale",
        "time_scale 越小 trace 越密；请写 rate_scale，即 1 / time_scale",
    ),
    Phrase("{name} is no load; did you mean {near}?", "{name} 不是负载；是否指 {near}？"),
    Phrase("{name} is no load; known are {known}", "{name} 不是负载；可用 {known}"),
    Phrase("{word} are whole numbers, and {value} is none; {cure}", "{word} 须为整数，{value} 不是；{cure}"),
    Phrase("{part} is no number; {cure}", "{part} 不是数值；{cure}"),
    Phrase("it ends below where it begins; write the smaller load first", "终点小于起点；请先写较小的负载"),
    Phrase("a load that grows takes a factor above 1, not x{factor}", "负载递增的倍数须大于 1，不能是 x{factor}"),
    Phrase("{count} values; at most {most}: take larger steps", "有 {count} 个取值；最多 {most} 个：请增大步长"),
    Phrase(
        "loads and steps are above 0, at least {least} and at most {most}, not {value}",
        "负载和步长须大于 0，至少 {least}，最多 {most}，不能是 {value}",
    ),
    Phrase("concerns a trace or a model; here the load is {other}", "只用于 trace 或流量模型；此处的负载是 {other}"),
    Phrase("{key} says who asks when; here the load is rate_scale", "{key} 已说明到达时间；此处的负载是 rate_scale"),
    Phrase("workload.users makes a closed loop; here the load is users", "workload.users 为闭环；此处的负载是 users"),
    Phrase(
        "workload.request_rate makes an open loop; here the load is request_rate",
        "workload.request_rate 为开环；此处的负载是 request_rate",
    ),
    # --slo, --survive, --target
    Phrase(
        "{file} has {total} requests behind the first {skipped}, of which {count} windows of {each} do not fit side "
        "by side; at most {most}, or set a smaller workload.num_prompts",
        "{file} 有 {total} 条请求（跳过前 {skipped} 条之后），放不下 {count} 个各 {each} 条的窗口；最多 {most} 个，或"
        "减小 workload.num_prompts",
    ),
    Phrase(
        "{file} has {total} requests behind the first {skipped}, of which {count} windows of {each} do not fit side "
        "by side; set a smaller workload.num_prompts",
        "{file} 有 {total} 条请求（跳过前 {skipped} 条之后），放不下 {count} 个各 {each} 条的窗口；请减小 "
        "workload.num_prompts",
    ),
    Phrase(
        "{file} has {total} requests, of which {count} windows of {each} do not fit side by side; at most {most}, or "
        "set a smaller workload.num_prompts",
        "{file} 有 {total} 条请求，放不下 {count} 个各 {each} 条的窗口；最多 {most} 个，或减小 workload.num_prompts",
    ),
    Phrase(
        "{file} has {total} requests, of which {count} windows of {each} do not fit side by side; set a smaller "
        "workload.num_prompts",
        "{file} 有 {total} 条请求，放不下 {count} 个各 {each} 条的窗口；请减小 workload.num_prompts",
    ),
    Phrase("write it as ttft_p99=2s,tpot_p99=80ms", "请写成 ttft_p99=2s,tpot_p99=80ms"),
    Phrase("empty; write it as ttft_p99=2s,tpot_p99=80ms", "为空；请写成 ttft_p99=2s,tpot_p99=80ms"),
    Phrase(
        "{name} is no percentile of a latency ({latencies} with _p50, _p90, _p95 or _p99); did you mean {near}?",
        "{name} 不是时延分位数（{latencies}，后接 _p50、_p90、_p95 或 _p99）；是否指 {near}？",
    ),
    Phrase(
        "{name} is no percentile of a latency ({latencies} with _p50, _p90, _p95 or _p99); known are {known}",
        "{name} 不是时延分位数（{latencies}，后接 _p50、_p90、_p95 或 _p99）；可用 {known}",
    ),
    Phrase("{name} is given twice", "{name} 写了两次"),
    Phrase(
        "a time is a number and its unit, such as 2s or 80ms, not {value}",
        "时间须为数值加单位，如 2s、80ms，不能是 {value}",
    ),
    Phrase("a time is above 0, and at most 1e9 s", "时间须大于 0，最多 1e9 s"),
    Phrase(
        "workload.{name} makes an open loop, where nobody waits for an answer; plan --target request_rate, or leave "
        "{key} out",
        "workload.{name} 为开环，没有人等待回答；请规划最高请求速率，或删去 {key}",
    ),
    Phrase("workload.ramp_up_strategy makes an open loop; leave it out", "workload.ramp_up_strategy 为开环；请删去"),
    Phrase(
        "workload.users makes a closed loop, which has no rate; plan --target users, or put workload.request_rate in "
        "its place",
        "workload.users 为闭环，没有速率；请规划最多用户数，或改用 workload.request_rate",
    ),
    Phrase(
        "{key} has rates of its own; put one workload.request_rate in its place",
        "{key} 有自己的速率；请改用一个 workload.request_rate",
    ),
    # flags of fit
    Phrase(
        "{engine} is not known; did you mean {near}? known: {known}",
        "没有引擎 {engine}；是否指 {near}？可用 {known}",
    ),
    Phrase("{engine} is not known; known: {known}", "没有引擎 {engine}；可用 {known}"),
    Phrase("{engine} does not serve on {device}; use one of {known}", "{engine} 不支持 {device}；请用 {known} 之一"),
    Phrase(
        "{model} has no experts, and vLLM refuses it so; leave it out",
        "{model} 没有专家层，vLLM 会拒绝此项；请删去",
    ),
    Phrase(
        "{engine} has no such option ({engines} has); use {flag}",
        "{engine} 没有此选项（{engines} 有）；请用 {flag}",
    ),
    Phrase(
        "{batch} is less than --max-num-seqs {seqs}, and {engine} refuses to start so; raise it, or lower "
        "--max-num-seqs",
        "{batch} 小于 --max-num-seqs {seqs}，{engine} 拒绝启动；请增大，或减小 --max-num-seqs",
    ),
    Phrase(
        "{batch} is less than --max-model-len {length}, and without chunked prefill {engine} refuses to start so; "
        "leave it out, or add --enable-chunked-prefill",
        "{batch} 小于 --max-model-len {length}，未开启 chunked prefill 时 {engine} 拒绝启动；请删去，或加 "
        "--enable-chunked-prefill",
    ),
    Phrase("a share is above 0 and at most 1, not {value}", "占比须大于 0 且不超过 1，不能是 {value}"),
    Phrase("from {least} to {most}, not {value}", "须在 {least} 到 {most} 之间，不能是 {value}"),
    # jobs of the app
    Phrase(
        "{count} runs wait already: try again when some have ended",
        "已有 {count} 个任务在排队：请等部分任务结束后再试",
    ),
)
"""Whole sentences behind the option that they name, the special before the general."""
