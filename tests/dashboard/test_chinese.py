"""What figures and verdicts say in Chinese: no English word is left, and every function that speaks is held to it."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
import pytest

import hbmtwin.dashboard
from hbmtwin.api import RULES, Result, Scenario, run
from hbmtwin.dashboard import (
    address_map,
    bench_figure,
    figures,
    remarks,
    run_replay_page,
    server_figure,
    settings,
    standstill,
    verdict,
    workload_figure,
    workload_words,
)
from hbmtwin.dashboard.rules_in_chinese import RULES_IN_CHINESE
from hbmtwin.sim.unfinished import AFTER_EITHER, AFTER_FAILURE, AFTER_REJECTION, NOT_SENT
from hbmtwin.validation.run_replay.kernels import KernelReplay
from hbmtwin.workloads.statistics.describe import Description, describe

from ..validation.test_calibrate import bench
from . import chinese_of_capacity, chinese_of_error_bars, test_remarks, test_standstill, test_verdict
from .test_workload_figure import traffic

GIB = 2**30
HAN = re.compile("[\u4e00-\u9fff]")
ALLOWED = {
    *("TTFT", "TPOT", "SLO", "KV", "HBM", "OOM", "CV", "IDC", "Poisson", "Pearson", "Spearman", "Mamba", "FLOP"),
    *("GiB", "MiB", "KiB", "B", "s", "ms", "us", "GFLOP", "token", "trace", "id", "x", "jitter", "workspace"),
    *("prefill", "decode", "attention", "p10", "p50", "p90", "p95", "p99", "p1", "p5", "p25", "p75", "p99.9"),
    *("doubling", "paged", "caching", "pooled", "vllm", "reserve", "few", "cpu", "ascend-910b4", "tokens"),
    *("max_num_seqs", "max_model_len", "swap_space", "summary.json", "json"),
    *chinese_of_capacity.WORDS,
    *chinese_of_error_bars.WORDS,
}
"""Words that stay: units, names of the API, of the field and of these runs."""
SETTING = re.compile(r"(engine|scheduler|memory|kv_cache|workload|session|results|slo)\.\s?\w+")
TEXTS = {"text", "name", "hovertemplate", "hovertext", "texttemplate", "label", "ticktext", "title", "customdata"}
"""Where a figure's JSON has what is read."""
GOODPUT = {"requests_per_s": 1.5, "requests_met": 1234, "share_met": 0.9, "attained": False}


def english_in(text: str) -> list[str]:
    """English words of *text* that should be Chinese: outside of Plotly's places and tags."""
    plain = re.sub(r"%\{[^}]*\}|<[^>]*>", " ", text)
    words = re.findall(r"[A-Za-z][\w.-]*", SETTING.sub(" ", plain), re.ASCII)
    return [word for word in words if word.rstrip(".") not in ALLOWED]


def texts_in(value: object, key: str = "") -> Iterator[str]:
    """All that is read in a figure's JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_in(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner, key)
    elif isinstance(value, str) and key in TEXTS:
        yield value


def read_in(figure: go.Figure) -> list[str]:
    return [text for text in texts_in(json.loads(figure.to_json())) if text]


CROWD = ("workload.num_prompts=60", "workload.request_rate=8", "workload.prompt_tokens=400", "session.turns=3")
LIMITS = ("results.alert_kv_usage=0.8", "results.alert_hit_rate=0.9", "results.alert_kv_used_bytes=1GiB")
TIGHT = (*CROWD, *LIMITS, "kv_cache.options={num_blocks=24}", "engine.max_model_len=1024", "session.turns=1")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    doubling = ["workload.output_tokens=150", "session.think_time_s=2"]
    return {
        "doubling": run(Scenario.load(preset="doubling", overrides=[*CROWD, *doubling])),
        "few": run(Scenario.load(overrides=TIGHT)),
    }


@pytest.fixture(scope="module")
def traffic_of() -> Description:
    return describe(traffic())


def memory_replay() -> Any:
    """One that differs at its fourth step, where memory runs out, with what the figure reads."""
    steps = np.arange(5)
    names = ("reserved", "allocated", "requested", "driver_free")
    return SimpleNamespace(
        steps=steps,
        measured=dict.fromkeys(names, steps * GIB),
        predicted=dict.fromkeys(names, steps * GIB + (steps == 3)),
        oom=SimpleNamespace(step=3),
    )


def kernel_replay() -> KernelReplay:
    steps = np.arange(3)
    return KernelReplay(
        measured_on="cpu",
        predicted_for="ascend-910b4",
        basis="",
        same_device=False,
        steps=steps,
        kinds=("prefill", "mixed", "decode"),
        predicted_step_ns=steps + 1,
        predicted_attention_ns=steps + 1,
        measured_ns=steps + 1,
        num_layers=1,
        total_steps=3,
        left_out=0,
        notes=(),
    )


Drawn = Callable[[dict[str, Result], Description], list[go.Figure]]
FIGURES: dict[Callable[..., object], Drawn] = {
    figures.memory_over_time: lambda r, _: [figures.memory_over_time(r, "zh")],
    figures.kv_utilization: lambda r, _: [figures.kv_utilization(r, "zh")],
    figures.kv_monitor_over_time: lambda r, _: [figures.kv_monitor_over_time(r, "zh")],
    figures.latency_by_turn: lambda r, _: [
        figures.latency_by_turn(some, "zh") for some in (r, {"few": r["few"]}, {"doubling": none_of(r["doubling"])})
    ],
    server_figure.server_over_time: lambda r, _: [server_figure.server_over_time(r, "zh")],
    address_map.address_map: lambda r, _: [address_map.address_map(one, 6 * 10**9, "zh") for one in r.values()],
    bench_figure.bench_figure: lambda r, _: [bench_figure.bench_figure(plain_bench(), "zh")],
    run_replay_page.memory_by_step: lambda r, _: [run_replay_page.memory_by_step(memory_replay(), "zh")],
    run_replay_page.attention_by_step: lambda r, _: [run_replay_page.attention_by_step(kernel_replay(), "zh")],
    workload_figure.arrivals_at_two_scales: lambda _, d: [workload_figure.arrivals_at_two_scales(d, "zh")],
    workload_figure.length_distributions: lambda _, d: [workload_figure.length_distributions(d, "zh")],
    workload_figure.reuse_by_capacity: lambda _, d: [
        workload_figure.reuse_by_capacity(d.reuse, "zh") for _ in [0] if d.reuse is not None
    ],
    **{drawn: lambda _r, _d, shown=shown: shown() for drawn, shown in chinese_of_capacity.FIGURES.items()},
}


def none_of(result: Result) -> Result:
    """The run before anything was completed."""
    return Result(result.scenario, result.summary, result.timeline, result.requests.iloc[:0], result.checkpoints)


def plain_bench() -> Any:
    return bench(0.02)


OPS = {"matmul", "layer", "step", "prefill", "decode", "paged_decode", "copy"}
"""Kinds of kernels: points and legend of a benchmark call them as its files do."""


@pytest.mark.parametrize("drawn", FIGURES, ids=lambda drawn: drawn.__name__)
def test_no_figure_has_an_english_word(
    drawn: Callable[..., object], results: dict[str, Result], traffic_of: Description
) -> None:
    shown = FIGURES[drawn](results, traffic_of)
    assert shown
    for figure in shown:
        texts = read_in(figure)
        if drawn is bench_figure.bench_figure:
            texts = [text for text in texts if text.split()[0] not in OPS]
        assert any(HAN.search(text) for text in texts)
        assert [text for text in texts if english_in(text)] == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda figure: figure.update_yaxes(title_text="queue (s)"),
        lambda figure: figure.data[0].update(name="Weights"),
        lambda figure: figure.data[0].update(hovertemplate="%{y:.2f} ms, %{customdata} requests"),
        lambda figure: figure.add_annotation(text="out of<br>memory"),
        lambda figure: figure.update_layout(updatemenus=[{"buttons": [{"label": "whole run (40 s)"}]}]),
    ],
)
def test_a_planted_english_word_is_found(edit: Callable[[go.Figure], object], results: dict[str, Result]) -> None:
    figure = figures.memory_over_time(results, "zh")
    edit(figure)
    assert any(english_in(text) for text in read_in(figure))


LOCKED = test_standstill.summary(standstill=test_standstill.LOCK)
THRASHED = test_standstill.summary(thrashing={"minutes": 3, "first_s": 60, "worst_s": 1200, "worst_share": 0.953})
DEAD = test_verdict.summary(oom=test_verdict.record("growth_copy"))
IDLE = test_verdict.summary(requests_completed=0, requests_rejected={"max_model_len": 239, "kv_capacity": 2})
BUSY = test_verdict.summary(preemptions=4321, requests_rejected={"swap_space": 2}, turns_with_dropped_tokens=17)
SHORT = "engine.max_model_len=1024"
OFTEN = test_remarks.summary(alerts=5)
ALERT = test_remarks.alert()

SENTENCES: dict[Callable[..., object], tuple[Callable[[], object], object]] = {
    verdict.fate: (lambda: verdict.fate(BUSY, "zh"), "跑完全程，抢占 4,321 次，拒绝 2 条，17 轮丢失 token"),
    verdict.short_fate: (lambda: verdict.short_fate(DEAD, "zh"), "81.2 s 时 OOM：增长缓冲区的旧副本"),
    verdict.cause_text: (lambda: verdict.cause_text({"cause": "reservation"}, "zh"), "预留未用"),
    verdict.headline: (
        lambda: verdict.headline({"a": DEAD, "b": BUSY, "c": BUSY, "d": BUSY, "e": IDLE, "f": LOCKED}, "zh"),
        "b、c 和 d 跑完全程；a 在 81.2 s 时 OOM（增长缓冲区的旧副本）；e 未处理任何请求（全部 241 条请求被拒绝）；"
        "f 在 12.5 s 时活锁。",
    ),
    verdict.oom_in_words: (
        lambda: verdict.oom_in_words(test_verdict.record("allocator_rule", rule="stream"), "zh"),
        "81.250 s 时 OOM，原因：分配器规则。请求 70 申请 663.00 MiB（KV），须为一整块。空闲共 4.00 GiB，最大的一块 "
        "648.00 MiB。有足够大的空闲块，但分配器规则不允许使用：有足够大的缓存块，但属于另一个 stream。",
    ),
    verdict.server_log: (
        lambda: verdict.server_log({"torch_message": "NPU out of memory."}, "zh"),
        "服务日志将打印：“NPU out of memory.”",
    ),
    verdict.header: (
        lambda: verdict.header("zh")[:6],
        ("策略", "结果", "已完成", "KV 利用率\n（%）", "内部碎片\n（%）", "显存碎片\n（%）"),
    ),
    verdict.rows: (lambda: verdict.rows({"paged": DEAD}, "zh")[0][1], "81.2 s 时 OOM：增长缓冲区的旧副本"),
    verdict.same_traffic: (
        lambda: verdict.same_traffic({"a": few_requests(1), "b": few_requests(2)}, "zh"),
        "各次运行的负载不同，区别在于 seed。",
    ),
    verdict.rejections_text: (
        lambda: verdict.rejections_text(IDLE, "zh"),
        "超过 max_model_len：239 条，KV 容量不足：2 条",
    ),
    verdict.goodput_text: (
        lambda: verdict.goodput_text({**GOODPUT, "share_met_by_slo": {"ttft_s": 0.95, "e2e_s": 0.91}}, "zh"),
        "1.500 条请求/s，1,234 条满足 SLO（90.0 %）：TTFT 95.0 %，端到端 91.0 %；未达标",
    ),
    verdict.dropped_text: (
        lambda: verdict.dropped_text(test_verdict.summary(dropped_tokens=12345, turns_with_dropped_tokens=67), "zh"),
        "12,345 个，涉及 67 轮",
    ),
    verdict.joined: (lambda: verdict.joined("ab", verdict.LIST_COMMA, "zh"), "a、b"),
    standstill.standstill_in_words: (
        lambda: standstill.standstill_in_words(LOCKED, "zh"),
        "自 10.250 s 起活锁：请求 1、2、3、4、5 及另外 2 条互相抢占，到 12.500 s 共 7,000 次，反复重计算，没有一条再"
        "生成 token：相同的状态一再出现。它们达到最大长度时需要 7.00 GiB（14,000 个 token），而 KV 共有 3.00 GiB。"
        "解决办法：scheduler.policy = 'vllm'，总能让其中一条继续；scheduler.max_num_seqs = 3；KV 策略支持时用 "
        "memory.admission = 'reserve'；或增大显存（engine.gpu_memory_utilization）。",
    ),
    standstill.recomputed_text: (
        lambda: standstill.recomputed_text(
            {"recomputed_tokens": 1120, "computed_tokens": 2320, "recomputed_share": 0.483}, "zh"
        ),
        "计算的 2,320 个中有 1,120 个（48.3 %）",
    ),
    standstill.thrashing_text: (
        lambda: standstill.thrashing_text(THRASHED, "zh"),
        "抢占抖动共 3 分钟，首次从 60 s 起：计算量中至少一半是重计算（从 1,200 s 起的一分钟内为 95.3 %）；减小 "
        "scheduler.max_num_seqs、用 memory.admission = 'reserve' 或给 KV 更多显存即可避免",
    ),
    standstill.unfinished_text: (
        lambda: standstill.unfinished_text({"unfinished_because": {NOT_SENT: 1200, AFTER_REJECTION: 1}}, "zh"),
        "1,200 条未完成：运行结束时尚未发出；1 条未完成：会话中更早的一轮被拒绝",
    ),
    remarks.alert_text: (
        lambda: remarks.alert_text(ALERT, "zh"),
        "KV 使用率高于 90.0 %：12.3 s 至 1,040.0 s，最高 97.5 %",
    ),
    remarks.alert_lines: (
        lambda: list(remarks.alert_lines(OFTEN, "zh"))[3:],
        ["另有 2 条告警，全部见 summary.json 和 --json 输出"],
    ),
    remarks.remarks: (
        lambda: remarks.remarks({"a": test_remarks.summary(alerts=1), "b": test_remarks.summary()}, "zh"),
        ["a：KV 使用率高于 90.0 %：0.0 s 至 1,040.0 s，最高 97.5 %"],
    ),
    settings.settings_table: (
        lambda: settings.settings_table({"a": Scenario.load(), "b": Scenario.load(overrides=[SHORT])}, "zh"),
        (["策略", "engine.\nmax_model_len"], [("a", "默认"), ("b", "1024")]),
    ),
    settings.setting_text: (lambda: settings.setting_text({"num_blocks": None}, "zh"), "num_blocks 默认"),
    workload_words.headline: (
        lambda: workload_words.headline(describe(traffic(100)), "zh").split(" 内 ")[1].split("，")[0],
        "100 条请求",
    ),
    workload_words.facts: (
        lambda: workload_words.facts(describe(traffic(100)), "zh")[-1],
        ("缓存容量无限时", "0.0 % 的请求命中一半以上的块，0.0 % 的请求命中九成以上"),
    ),
    workload_words.lengths_table: (
        lambda: workload_words.lengths_table(describe(traffic(100)), "zh").header[:4],
        ("token 数", "均值", "CV", "最小"),
    ),
    workload_words.windows_table: (
        lambda: workload_words.windows_table(describe(traffic(100)), "zh").header[3:],
        ("最少\n请求数", "最多\n请求数"),
    ),
    workload_words.reuse_table: (
        lambda: workload_words.reuse_table(cast(Any, describe(traffic(100)).reuse), "zh").cells[-1][0],
        "无限",
    ),
    **chinese_of_capacity.SENTENCES,
    **chinese_of_error_bars.SENTENCES,
}
"""Each function that speaks: what it is asked here, and its answer letter by letter."""


def few_requests(seed: int) -> Result:
    few = ["workload.num_prompts=6", "workload.prompt_tokens=100", "workload.output_tokens=10", "session.turns=1"]
    return run(Scenario.load(overrides=[*few, f"seed={seed}"]))


def called(says: Callable[..., object]) -> str:
    return f"{says.__module__.rpartition('.')[2]}.{says.__name__}"


@pytest.mark.parametrize("says", SENTENCES, ids=called)
def test_a_sentence_of_each_function(says: Callable[..., object]) -> None:
    asked, answer = SENTENCES[says]
    assert asked() == answer


def test_every_function_that_speaks_is_held_to_it() -> None:
    names = [f"hbmtwin.dashboard.{found.name}" for found in pkgutil.iter_modules(hbmtwin.dashboard.__path__)]
    modules = [importlib.import_module(name) for name in names if not name.endswith(".app")]
    speaking = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
        if "lang" in inspect.signature(function).parameters
    }
    assert speaking == set(SENTENCES) | set(FIGURES)


def parts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from parts_of(inner)


@pytest.mark.parametrize("says", [says for says in SENTENCES if says is not verdict.server_log], ids=called)
def test_no_sentence_has_an_english_word(says: Callable[..., object]) -> None:
    """But for what repeats the log of a server."""
    names = {"a", "b", "c", "d", "e", "f", "seed", "stream", "num_blocks"}  # of runs, keys, and of a rule's thing
    said = list(parts_of(SENTENCES[says][0]()))
    assert said
    assert [text for text in said if set(english_in(text)) - names] == []


def test_every_rule_of_the_allocator_is_explained_in_chinese_by_the_words_of_the_rule() -> None:
    assert list(RULES_IN_CHINESE) == list(RULES)
    for rule, chinese in RULES_IN_CHINESE.items():
        assert HAN.search(chinese)
        words = re.findall(r"[A-Za-z_][\w#:=]*", chinese, re.ASCII)
        assert [word for word in words if word not in RULES[rule] and word not in ALLOWED] == []
        assert set(re.findall(r"\d+", chinese)) == set(re.findall(r"\d+", RULES[rule]))


def test_every_reason_to_be_unfinished_is_known() -> None:
    told = [why.en for why in standstill.WHY_UNFINISHED]
    assert sorted(told) == sorted((NOT_SENT, AFTER_REJECTION, AFTER_FAILURE, AFTER_EITHER))


def test_a_cause_that_is_not_known_is_called_as_it_is() -> None:
    assert verdict.cause_text({"cause": "does_not_fit"}, "zh") == "does not fit"
