"""What is wrong with traffic, in both languages: arrivals, lengths, prefixes.

The English is what :mod:`hbmtwin.sim.traffic` and :mod:`hbmtwin.workloads` raise.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

TRAFFIC = (
    # who asks, and when
    Phrase("{key} says by itself who asks for what; give one of the two", "{key} 本身已说明全部流量；两者只能给一个"),
    Phrase("{key} says who asks for what as well; give one of the two", "{key} 也说明了全部流量；两者只能给一个"),
    Phrase("a closed loop has no request_rate; give one of the two", "闭环没有 request_rate；两者只能给一个"),
    Phrase(
        "a ramp is the rate itself; leave workload.request_rate out",
        "ramp 本身就是速率；请删去 workload.request_rate",
    ),
    Phrase("a ramp is the rate itself; give one of the two", "ramp 本身就是速率；两者只能给一个"),
    Phrase(
        "it multiplies workload.request_rate, which must then be finite",
        "它与 workload.request_rate 相乘，后者须为有限值",
    ),
    Phrase(
        "it needs workload.request_rate, without a ramp or a rate_curve: the span of other traffic is not "
        "num_prompts / request_rate",
        "需要 workload.request_rate，且没有 ramp 和 rate_curve：其他流量的时长不是 num_prompts / request_rate",
    ),
    Phrase("burstiness says the same; give one of the two", "与 burstiness 含义相同；两者只能给一个"),
    Phrase(
        "say linear or exponential, or leave out the rates of a ramp",
        "请写 linear 或 exponential，或删去 ramp 的速率",
    ),
    Phrase("a ramp needs ramp_up_start_rps and ramp_up_end_rps", "ramp 需要 ramp_up_start_rps 和 ramp_up_end_rps"),
    Phrase(
        "a ramp's {name} rate is above 0 a second and finite, not {rate}",
        "ramp 的 {name} 速率须为大于 0 的有限值，不能是 {rate}",
    ),
    Phrase(
        "burstiness is from {lowest} to 1e6 (1 is Poisson), or inf, not {value}",
        "burstiness 须在 {lowest} 到 1e6 之间（1 为 Poisson），或为 inf，不能是 {value}",
    ),
    Phrase(
        "{pattern} gaps have no burstiness; leave it 1, or take gamma or weibull",
        "{pattern} 间隔没有 burstiness；请保留 1，或用 gamma 或 weibull",
    ),
    Phrase(
        "{pattern} gaps have a CV of {cv}; take gamma or weibull",
        "{pattern} 间隔的 CV 为 {cv}；请用 gamma 或 weibull",
    ),
    Phrase(
        "cv of {pattern} gaps is from 0 to {highest} (1 is Poisson), not {cv}",
        "{pattern} 间隔的 cv 须在 0 到 {highest} 之间（1 为 Poisson），不能是 {cv}",
    ),
    Phrase(
        "a rate curve has two points or more, [seconds, factor], the first at 0 s",
        "速率曲线至少有两个点 [秒, 倍数]，第一个点在 0 s",
    ),
    Phrase("each point of a rate curve is [seconds, factor]", "速率曲线的每个点为 [秒, 倍数]"),
    Phrase(
        "times of a rate curve do not fall, and the last is from 1e-3 to 1e9 s",
        "速率曲线的时间不能减小，最后一个在 1e-3 到 1e9 s 之间",
    ),
    Phrase("factors of a rate curve are from 0 to 1e9", "速率曲线的倍数须在 0 到 1e9 之间"),
    Phrase(
        "the mean factor of a rate curve must be 1e-6 or more: else it is silent for ever",
        "速率曲线的平均倍数至少为 1e-6，否则永远没有请求",
    ),
    Phrase(
        "arrivals under this rate curve take over 146 years: raise its factors or the rate",
        "按此速率曲线到达需要超过 146 年：请增大倍数或速率",
    ),
    Phrase(
        "{count} sessions at a request_rate of {rate} take over 146 years: raise {key}, or take fewer "
        "workload.num_prompts",
        "{count} 个会话以 {rate} 的 request_rate 到达需要超过 146 年：请增大 {key}，或减小 workload.num_prompts",
    ),
    Phrase(
        "{count} sessions on a ramp from {start} to {end} a second take over 146 years: raise {key}, or take fewer "
        "workload.num_prompts",
        "{count} 个会话按每秒 {start} 到 {end} 的 ramp 到达需要超过 146 年：请增大 {key}，或减小 workload.num_prompts",
    ),
    Phrase("each has a request_rate of its own; leave {key} out", "每个客户端有自己的 request_rate；请删去 {key}"),
    Phrase("give one client or more", "workload.clients：至少给一个客户端"),
    Phrase(
        "priorities must be weights from 0 on, one of them above 0, not {weights}",
        "优先级权重须从 0 起，至少一个大于 0，不能是 {weights}",
    ),
    Phrase(
        "sessions of {file} have several turns, and {samples} answers to a prompt leave no one answer to go on with; "
        "take a trace of single requests, or samples = 1",
        "{file} 的会话有多轮，而一条提示词有 {samples} 个回答，没有唯一的回答可以接续；请用单轮的 trace，或设 "
        "samples = 1",
    ),
    Phrase(
        "turn {turn} of session {session} would be sent {at} s after the start, that is over 146 years: shorten "
        "session.think_time_s, or take fewer workload.num_prompts",
        "会话 {session} 的第 {turn} 轮要在开始后 {at} s 发出，超过 146 年：请缩短 session.think_time_s，或减小 "
        "workload.num_prompts",
    ),
    # what prompts begin with
    Phrase("say how long prefixes are, workload.prefix_tokens", "请用 workload.prefix_tokens 说明前缀长度"),
    Phrase(
        "they say prefix_tokens and prefix_count by themselves",
        "其中已说明 prefix_tokens 和 prefix_count，请删去后者",
    ),
    Phrase("give one bucket of prefixes or more", "至少给一组前缀"),
    Phrase("buckets may have {most} prefixes together, not {count}", "各组前缀合计不超过 {most} 个，不能是 {count}"),
    Phrase(
        "workload.prefix_repetition says other prompts; give one of the two",
        "workload.prefix_repetition 说明了另一种提示词；两者只能给一个",
    ),
    Phrase("it says {key} by itself; give one of the two", "其中已说明 {key}；两者只能给一个"),
    Phrase("its sessions have one turn; leave session.turns out", "其会话只有一轮；请删去 session.turns"),
    # lengths and times
    Phrase("the table needs a distribution: one of {known}", "表中须有 distribution：{known} 之一"),
    Phrase("no distribution {name}; did you mean {near}?", "没有分布 {name}；是否指 {near}？"),
    Phrase("no distribution {name}; known are {known}", "没有分布 {name}；可用 {known}"),
    Phrase("{distribution} has no {key}; did you mean {near}?", "{distribution} 没有 {key}；是否指 {near}？"),
    Phrase("{distribution} has no {key}; known are {known}", "{distribution} 没有 {key}；可用 {known}"),
    Phrase("{distribution} needs {key}", "{distribution} 需要 {key}"),
    Phrase("{key} must be a list of numbers, not {value}", "{key} 须为数值列表，不能是 {value}"),
    Phrase("{key} must be a whole number, not {value}", "{key} 须为整数，不能是 {value}"),
    Phrase("{key} must be a number, not {value}", "{key} 须为数值，不能是 {value}"),
    Phrase("a length is from 1 to 2^40, not {value}", "长度须在 1 到 2^40 之间，不能是 {value}"),
    Phrase("1 <= low <= high is needed, not {low}, {high}", "须满足 1 <= low <= high，不能是 {low}, {high}"),
    Phrase("1 <= min <= max is needed, not {low}, {high}", "须满足 1 <= min <= max，不能是 {low}, {high}"),
    Phrase("mean is above 0 and up to 2^40, not {value}", "mean 须大于 0 且不超过 2^40，不能是 {value}"),
    Phrase("mean is above 0, not {value}", "mean 须大于 0，不能是 {value}"),
    Phrase("sigma is from 0 to 10, not {value}", "sigma 须在 0 到 10 之间，不能是 {value}"),
    Phrase("alpha is from 0 to 10, not {value}", "alpha 须在 0 到 10 之间，不能是 {value}"),
    Phrase(
        "give exactly one of sigma, median and stddev beside mean, not {count}",
        "除 mean 外，sigma、median、stddev 须恰好给一个，不能是 {count} 个",
    ),
    Phrase(
        "the median of a log-normal is above 0 and not above its mean {mean}, not {value}",
        "对数正态分布的 median 须大于 0 且不超过 mean {mean}，不能是 {value}",
    ),
    Phrase(
        "as many values as probabilities, two or more, not {values} and {probabilities}",
        "values 与 probabilities 个数须相同且至少两个，不能是 {values} 和 {probabilities}",
    ),
    Phrase(
        "as many weights as values, one or more, not {weights} and {values}",
        "weights 与 values 个数须相同且至少一个，不能是 {weights} 和 {values}",
    ),
    Phrase("probabilities are from 0 to 1", "probabilities 须在 0 到 1 之间"),
    Phrase("probabilities must rise", "probabilities 须递增"),
    Phrase("values must not fall", "values 不能减小"),
    Phrase("values are from 1 to 2^40", "values 须在 1 到 2^40 之间"),
    Phrase("weights are from 0 on, and one of them is above 0", "weights 须从 0 起，至少一个大于 0"),
    Phrase("from min to max are at most {most} lengths", "min 到 max 之间最多 {most} 个长度"),
    Phrase("a think time is from 0 to {most} seconds, not {value}", "思考时间须在 0 到 {most} 秒之间，不能是 {value}"),
    Phrase("sigma of a think time is from 0 to 5, not {value}", "思考时间的 sigma 须在 0 到 5 之间，不能是 {value}"),
)
"""Whole sentences behind the key that they name, the special before the general."""
