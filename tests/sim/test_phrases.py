"""Every phrase of the package, wherever it stands: two languages, the same places, one word for one thing in Chinese.

They are read from the source, so that one inside a function or a record is found as well.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from string import Formatter

import pytest

import hbmtwin.dashboard
import hbmtwin.sim
import hbmtwin.validation
from hbmtwin.dashboard.rules_in_chinese import RULES_IN_CHINESE
from hbmtwin.kernels.capability_rows import ROWS
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.words import label
from hbmtwin.sim.phrases import Phrase, Said

HAN = re.compile("[\u4e00-\u9fff]")
WORDS = {
    "KV 缓存": r"KV ?cache|KV缓存|键值缓存|缓存池",
    "显存": r"(?<!主机)内存|显卡内存",
    "运行时上下文": r"(?<![a-z_-])context(?![a-z_])|(?<!运行时)上下文",
    "非 torch 显存": r"(?<!Py)torch 之外",
    "workspace": r"工作区|工作空间",
    "通信缓冲": r"通信缓冲区|通信缓存",
    "图捕获": r"捕获图形|图录制|batch 档位",
    "profile": r"预跑|试运行",
    "推理阶段": r"运行阶段|服务运行时|运行时采样",
    "显存碎片": r"外部碎片|碎片化",
    "提示词": r"(?<!的)提示(?=[与被不会长])",
    "prefill": r"预填充",
    "批": r"(?<![A-Za-z_-])batch(?![a-z_-])",
    "条序列": r"个序列",
    "token": r"令牌|词元",
    "减小": r"调小",
    "结束进程": r"停掉|杀掉",
    "权重": r"权值|模型参数",
    "激活": r"激活值|中间激活",
    "预留": r"保留显存|已保留",
}
"""The word for a thing, and others for it that must not be used: as the Chinese pages of vllm-ascend write it."""

NAMES = {
    *("vLLM", "SGLang", "TensorRT-LLM", "MindIE", "HBM", "KV", "TTFT", "TPOT", "CV", "IDC", "GFLOP/s"),
    *("workspace", "prefill", "decode", "GiB", "MiB", "s", "ms", "p50", "p99", "x", "y", "/", "-"),
    "MAPE",
    "SLO",
    "p95",
}
"""What is called so in Chinese too; names of settings have an underline."""


def sources() -> Iterator[tuple[str, str]]:
    """Modules of ``hbmtwin.sim`` with their text, and the others that speak; none of these is imported."""
    for found in pkgutil.walk_packages(hbmtwin.sim.__path__, "hbmtwin.sim."):
        if not found.ispkg:
            spec = find_spec(found.name)
            assert spec is not None
            assert spec.origin is not None
            yield found.name, Path(spec.origin).read_text(encoding="utf-8")
    for package in (hbmtwin.dashboard, hbmtwin.validation):
        (folder,) = map(Path, package.__path__)
        for path in sorted(folder.rglob("*.py")):
            if "Phrase(" in (text := path.read_text(encoding="utf-8")):
                yield ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts)), text


def calls_in(text: str) -> list[ast.Call]:
    """Where a module makes a phrase."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Phrase"]


def written_out(call: ast.Call) -> bool:
    return all(isinstance(argument, ast.Constant) for argument in call.args)


def phrases_in(text: str) -> list[Phrase]:
    """All that a module says, from its source."""
    return [Phrase(*map(ast.literal_eval, call.args)) for call in calls_in(text) if written_out(call)]


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def wrong_words(chinese: str) -> list[str]:
    """Words of the glossary that should stand in the place of others in *chinese*, outside of its places."""
    plain = re.sub(r"\{\w+\}", "", chinese)
    return [word for word, others in WORDS.items() if re.search(others, plain)]


ALL = [(name, phrase) for name, text in sources() for phrase in phrases_in(text)]
CHINESE = [
    *((name, phrase.zh) for name, phrase in ALL),
    *((row.key, row.zh) for row in ROWS),
    *RULES_IN_CHINESE.items(),
]


def test_the_whole_package_is_walked() -> None:
    put_together = [name for name, text in sources() for call in calls_in(text) if not written_out(call)]
    assert [name.rpartition(".")[2] for name in put_together] == ["engine_names", "kernels", "words"]  # of given words
    told = {name.removeprefix("hbmtwin.").rpartition(".")[0] for name, _ in ALL}
    assert told - {"dashboard.app"} == {
        "sim.fit",
        "sim.budget",
        "sim.explain",
        "sim.capacity",
        "dashboard",
        "validation.bench",
    }
    assert len(ALL) > 350
    assert len(CHINESE) > len(ALL) + 30


def test_both_languages_of_every_phrase_have_the_same_places() -> None:
    assert [(name, p.en) for name, p in ALL if places(p.en) != places(p.zh)] == []


def test_both_languages_of_every_phrase_say_something() -> None:
    assert [(name, p) for name, p in ALL if not p.en.strip() or not p.zh.strip()] == []
    assert [(name, p.en) for name, p in ALL if not p.en.isascii()] == []


def test_what_has_no_chinese_is_made_of_names() -> None:
    alike = [
        (name, p, set(re.findall(r"[\w/-]+", re.sub(r"%?\{.*?\}+", "", p.zh))))
        for name, p in ALL
        if not HAN.search(p.zh)
    ]
    assert [(name, p) for name, p, words in alike if not all(word in NAMES or "_" in word for word in words)] == []


def test_one_thing_has_one_word_in_chinese() -> None:
    assert [(name, zh, wrong) for name, zh in CHINESE if (wrong := wrong_words(zh))] == []


def test_every_line_of_a_budget_has_a_label() -> None:
    budget = fit("qwen3-8b", "ascend-910b4", max_model_len=8192).budget
    assert [line.item for line in budget.lines if not HAN.search(label(line.item).text("zh"))] == []
    assert label("KV cache") == Said.of(Phrase("KV cache", "KV 缓存"))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("KV cache 变大", "KV 缓存"),
        ("图的私有内存池", "显存"),
        ("context 和通信库", "运行时上下文"),
        ("停掉进程 {pid}", "结束进程"),
        ("减小模型或 batch", "批"),
        ("长提示会被切块", "提示词"),
    ],
)
def test_another_word_is_found(wrong: str, word: str) -> None:
    assert word in wrong_words(wrong)


@pytest.mark.parametrize(
    "right", ["换出到主机内存", "减小 max_batch_size", "报错里的提示是固定打印的", "PyTorch 之外", "--context-length"]
)
def test_what_is_another_thing_is_left_alone(right: str) -> None:
    assert wrong_words(right) == []


def test_a_phrase_inside_a_function_is_found_and_its_missing_place() -> None:
    two, one = phrases_in('def f():\n    return {1: (Phrase("{a}", "{b}"),)}\nX = Phrase("a" "b", "甲")')
    assert (places(one.en), places(one.zh), two) == ({"a"}, {"b"}, Phrase("ab", "甲"))
