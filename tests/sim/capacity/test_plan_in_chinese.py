"""A plan says in Chinese what it says in English: the same numbers, and no English word is left."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

import pytest

from hbmtwin.sim import what_would_hold
from hbmtwin.sim.capacity import binding, changes, plan_targets
from hbmtwin.sim.capacity.plan_phrases import CONSTRAINTS, COUNTED, TARGET_ENDS, TWICE, cause_name, change_name
from hbmtwin.sim.capacity.plan_words import broke, sentences, verdict

from .plans_by_hand import PLAN, PLANS

HAN = re.compile("[\u4e00-\u9fff]")
NAMES = {
    *("KV", "GiB", "MiB", "ms", "s", "INT8", "token", "torch", "TPOT", "doubling", "max_num_seqs", "non_torch_bytes"),
    "max_model_len",
    *("ttft_p99", "tpot_p99", "e2e_p99", "slo", "max-preemptions", "seeds", "survive", "workload", "num_prompts"),
}


def english_in(chinese: str) -> list[str]:
    words = re.findall(r"[A-Za-z][\w-]*", chinese, re.ASCII)
    return [word for word in words if word not in NAMES]


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"[a-z]+_p\d+|INT8", "", text)))


def test_a_plan_that_was_found() -> None:
    assert verdict(PLAN, "zh") == (
        "96 个用户，是至少 90 % 的运行满足目标的最大值（1,200 次中 1,178 次满足）；100 个用户则不满足"
        "（40 次中 20 次满足）；其间 98 无法判定。两端同时成立的置信度为 95 %。"
    )
    assert dict(sentences(PLAN, "zh")) == {
        "余量": "最满的一次运行占用了 16.00 GiB KV 预算的 97 %（剩余 50.0 MiB），设备空闲 0.50 GiB；要求的余量为 1 %",
        "瓶颈": "增长缓冲区的旧副本：100 个用户时，4 次中 3 次显存耗尽，4 次中 1 次未达到 ttft_p99（增长缓冲区的旧副本 "
        "2 次，KV 容量不足 1 次）。设备显存加倍：4 次中 4 次满足；max_num_seqs 512：4 次中 0 次满足",
        "增加一个": "每增加一个用户，KV 峰值增加 0.30 GiB，tpot_p99 +0.40 ms，ttft_p99 +12.0 ms（48 与 96 之间）；"
        "98 个用户时，4 次中 3 次显存耗尽",
        "下一步": "KV 用 INT8：到 240 个用户（或更多），缓冲区按 doubling 增长：到 196 个用户（丢弃部分对话），"
        "4 个设备：到 128 个用户；各用 4 个样本：选定后请重新规划",
        "最敏感的假设": "non_torch_bytes（非 torch 显存）：默认值，未校准（2）。取 1 时结论为 98，取 3 时为 无解，"
        "按现值为 96，各用 4 个样本；所有参数同时取较差的一端时为 无解",
        "单调性": "运行过的值 48、128 中，没有比更难的值满足得更少的；其间的值没有运行",
    }


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("nothing beyond", "更远的值都没有被证明不满足"),
        ("all but one", "更远的值都没有被证明不满足；98 无法判定，需要更大的 --seeds。"),
        ("all of it", "96 个 token，"),
        ("all of it", "；已是模型的全部位置。"),
        ("the fewest", "最少数量（1,200 次中 1,178 次满足）；1 个设备则不满足"),
        ("utilization", "0.9，是至少 90 % 的运行满足目标的最小值"),
        ("rate", "每秒 100 个会话则不满足"),
        ("trace", "录制速率的 96 倍，"),
        ("once", "96 个用户：满足目标的最后一个值。一次运行即可判定"),
        ("unbounded", "到 128 个用户（搜索范围的尽头）为止全部满足：这只是下界，不是答案。所承诺的指标不随负载变差"),
        ("nothing promised", "请加上 --slo 或 --max-preemptions"),
        (
            "nothing",
            "即使 1 个用户，40 次中 0 次满足：3 次显存耗尽，1 次未达到 ttft_p99。此时最好达到 ttft_p99 2.5 s；",
        ),
        ("less than the margin", "0.97 是能处理该负载的最小值，但设备只剩 0.50 GiB，要求的余量为 1 %"),
        ("unbounded though it waits", "请承诺更多，或让运行更长（workload.num_prompts）"),
        ("nothing promised but no preemption", "没有承诺会被负载打破的指标：请加上 --slo"),
        ("not shown", "即使 1 个用户也没有结论：40 次中 0 次满足，既不能证明 90 % 满足"),
    ],
)
def test_a_verdict_of_each_kind(which: str, said: str) -> None:
    assert said in verdict(PLANS[which], "zh")


@pytest.mark.parametrize("which", PLANS)
def test_no_english_word_and_the_same_numbers(which: str) -> None:
    plan = PLANS[which]
    pairs = [(("", verdict(plan)), ("", verdict(plan, "zh")))]
    pairs += zip(sentences(plan), sentences(plan, "zh"), strict=True)
    for (heading, english), (title, chinese) in pairs:
        assert HAN.search(chinese)
        assert english_in(title + chinese) == []
        if heading != "one more":  # "one" is a number in Chinese
            assert numbers_in(english) == numbers_in(chinese)


def constants_of(module: ModuleType, kind: type[ast.Yield] | type[ast.keyword], name: str = "") -> set[str]:
    """Strings that a module yields first in a tuple, or gives as the keyword *name*."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, kind) and (not name or getattr(node, "arg", "") == name):
            value = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
            found |= {
                one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return found


def test_whatever_results_call_by_an_english_name_has_a_chinese_one() -> None:
    names = constants_of(what_would_hold, ast.Yield) | constants_of(changes, ast.Yield)
    assert len(names) > 20
    whole = [f"4{name}" if name.startswith(" ") else name for name in names]
    assert [name for name in whole if not HAN.search(change_name(name, "zh"))] == []
    assert [name for name in whole if change_name(name, "en") != name] == []
    assert set(binding.OF_CAUSE.values()) <= CONSTRAINTS.keys()
    assert constants_of(plan_targets, ast.keyword, "unit") == {"", *COUNTED}
    assert constants_of(plan_targets, ast.keyword, "end") == TARGET_ENDS.keys()
    for table in (CONSTRAINTS, COUNTED, TARGET_ENDS, TWICE):
        assert [key for key, phrase in table.items() if phrase.en not in (key, f"{{value}} {key}")] == []


def test_other_names_stay() -> None:
    assert change_name("max_num_seqs 512", "zh") == "max_num_seqs 512"
    assert cause_name("max_model_len", "zh") == "max_model_len"
    assert cause_name("growth_copy", "en") == "growth_copy"
    assert broke("e2e_p99", "zh") == "未达到 e2e_p99"
