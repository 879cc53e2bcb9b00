"""What error bars say in Chinese, held to it by ``test_chinese``: rows by hand, their bars by the code."""

from __future__ import annotations

from collections.abc import Callable

from hbmtwin.dashboard import error_bar_words as words
from hbmtwin.sim.capacity.assumptions import Assumption, Ends
from hbmtwin.sim.capacity.error_bars import MEASURES, End, ErrorBars, Moved, Outcome, error_bars_to_dicts

WORDS = {"torch"}
"""The library's name."""
BANDWIDTH = Assumption("kv_bandwidth_efficiency", Ends(0.5, 0.31, 0.8), "default: a page (confidence L)")
LIBRARIES = Assumption("non_torch_bytes", Ends(150 << 20, 0, 200 << 20), "default: logs (M)")


def outcome(ttft_p99_s: float, **numbers: float) -> Outcome:
    counts = {"requests_completed": 10, "preemptions": 0, "peak_reserved_bytes": 14 << 30}
    return Outcome("held", None, {**dict.fromkeys(MEASURES), **counts, "ttft_p99_s": ttft_p99_s, **numbers})


def died(at_s: float) -> Outcome:
    return Outcome("out_of_memory", "growth_copy", {**outcome(0.5).numbers, "died_at_s": at_s})


NO_START = Outcome("does_not_start", "too small", dict.fromkeys(MEASURES))
LOCKED = Outcome("standstill", "live_lock", {**outcome(0.5).numbers, "died_at_s": 12.5})


def bars(own: Outcome, *at_ends: Outcome) -> ErrorBars:
    ends = [(BANDWIDTH, "low"), (BANDWIDTH, "high"), (LIBRARIES, "low"), (LIBRARIES, "high")]
    moved = (Moved(End(a.name, end), a, there) for (a, end), there in zip(ends, at_ends, strict=True))
    return ErrorBars(own, tuple(moved))


TOLD = error_bars_to_dicts(
    {
        "paged": bars(outcome(5), outcome(19), outcome(1.2), outcome(5, peak_reserved_bytes=15 << 30), outcome(5)),
        "doubling": bars(outcome(9), outcome(31), outcome(1.1), died(300), NO_START),
        "caching": bars(died(200), died(150), LOCKED, died(200), NO_START),
    }
)
STILL = error_bars_to_dicts({"paged": bars(outcome(5), *[outcome(5)] * 4)})["paged"]

SENTENCES: dict[Callable[..., object], tuple[Callable[[], object], object]] = {
    words.figure_words: (lambda: words.figure_words("non_torch_bytes", "zh"), "非 torch 显存"),
    words.bar_header: (
        lambda: words.bar_header("zh"),
        ("指标", "最小", "本次运行", "最大", "最小时取值", "最大时取值"),
    ),
    words.bar_rows: (
        lambda: words.bar_rows(TOLD["paged"], "zh"),
        [
            ("已完成请求", "10", "10", "10", "不变", ""),
            ("TTFT p99", "1.20 s", "5.00 s", "19.00 s", *(f"读取 KV 达到的带宽比例：{v} %" for v in ("80.0", "31.0"))),
            ("抢占次数", "0", "0", "0", "不变", ""),
            ("预留峰值", "14.00 GiB", "14.00 GiB", "15.00 GiB", "本次运行", "非 torch 显存：0 B"),
        ],
    ),
    words.end_header: (lambda: words.end_header("zh")[:5], ("参数", "取值", "现值", "运行结果", "已完成请求")),
    words.end_rows: (
        lambda: words.end_rows(TOLD["doubling"], "zh")[2][:5],
        ("非 torch 显存", "0 B", "150.00 MiB", "300.0 s 时 OOM：增长缓冲区的旧副本", "10"),
    ),
    words.how_it_ended: (
        lambda: [words.how_it_ended(end, "zh") for end in TOLD["caching"]["ends"][1::2]],
        ["12.5 s 时活锁", "无法启动"],
    ),
    words.sentences: (
        lambda: words.sentences(STILL, "a", "zh"),
        [
            "每次只把一个不确定的参数取到下限或上限，共 4 种取值：多个误差同时出现时，偏差可能更大。",
            "a：跑完全程，全部 4 种取值下均如此。",
            "任何取值都不改变这些数字。",
        ],
    ),
    words.fate_sentence: (
        lambda: words.fate_sentence(TOLD["doubling"], "doubling", "zh"),
        "doubling：跑完全程，4 种取值中有 2 种如此。例外：非 torch 显存 0 B：300.0 s 时 OOM：增长缓冲区的旧副本；"
        "非 torch 显存 200.00 MiB：无法启动。",
    ),
    words.most_sentence: (
        lambda: words.most_sentence(TOLD["paged"], "zh"),
        "对 TTFT p99 影响最大的参数：读取 KV 达到的带宽比例（1.20 s 至 19.00 s）。",
    ),
    words.compared_rows: (
        lambda: words.compared_rows(TOLD, "zh")[1],
        ("TTFT p99", "5.00 s（1.20 s 至 19.00 s）", "9.00 s（1.10 s 至 31.00 s）", "500.0 ms"),
    ),
    words.order_sentences: (
        lambda: words.order_sentences(TOLD, "zh")[1:],
        [
            "TTFT p99：按现值 paged < doubling；4 种取值中有 1 种使 paged 与 doubling 的次序颠倒（读取 KV 达到的带宽"
            "比例 80.0 %）；4 种取值中有 2 种使 paged 与 doubling 无法比较；未参与排序：caching（提前结束）。",
            "跑完全程且有该指标的运行不足两个，不作排序：TPOT p99、端到端 p99。",
        ],
    ),
}
