"""Plans on the screen in Chinese: headings, tables and notes, with the numbers of the English ones."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hbmtwin.cli.plan_screen import PlanScreen
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan
from hbmtwin.sim.capacity.leaning import Leaning
from hbmtwin.sim.phrases import LANGUAGES, Lang

from ..sim.capacity.plans_by_hand import PLAN, PLANS

NAMES = {
    *("KV", "GiB", "MiB", "ms", "INT8", "token", "torch", "TPOT", "doubling", "max_num_seqs", "non_torch_bytes"),
    *("ttft_p99", "tpot_p99", "tpot_p50", "e2e_p99", "ttft_p50", "slo", "max-preemptions", "seeds", "survive"),
    *("max_model_len", "workload", "num_prompts", "default", "first", "second", "users"),
}
"""That stand in Chinese as well: of settings, of what is measured, and of plans; the source of a figure is quoted."""


def shown(plans: dict[str, CapacityPlan], lang: Lang) -> str:
    text = io.StringIO()
    PlanScreen(Console(file=text, width=400), lang).show(plans)
    return text.getvalue()


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"[a-z]+_p\d+|INT8", "", text)))


@pytest.mark.parametrize("which", PLANS)
def test_no_english_word_and_the_same_numbers(which: str) -> None:
    english, chinese = (shown({"": PLANS[which]}, lang) for lang in ("en", "zh"))
    assert [word for word in re.findall(r"[A-Za-z][\w-]+", chinese, re.ASCII) if word not in NAMES] == []
    assert numbers_in(english) == numbers_in(chinese)
    assert "promise " in english
    assert "目标" in chinese


def test_several_plans_have_a_table_of_answers() -> None:
    title, _, head, _, first, second = shown({"first": PLAN, "second": PLANS["nothing"]}, "zh").splitlines()[:6]
    assert title.strip() == "users：至少 90 % 的运行满足目标"
    assert re.findall(r"[^\s┃]+(?: [^\s┃]+)?(?: \(GiB\))?", head) == [
        *("策略", "满足", "不满足", "瓶颈", "KV 剩余 (GiB)", "最敏感的假设")
    ]
    assert re.findall(r"[^\s│]+", first) == ["first", "96", "100", "增长缓冲区的旧副本", "0.05", "non_torch_bytes"]
    assert re.findall(r"[^\s│]+", second)[:3] == ["second", "无解", "100"]


def test_the_table_of_answers_tells_what_was_not_asked_from_what_there_is_not() -> None:
    still = replace(PLAN, leaning=Leaning(answer=96, leans=(), still=(), worst=96, draws=4))
    quick = replace(PLAN, binding=None, changes=None, leaning=None)
    plans = {
        "asked": PLAN,
        "quick": quick,
        "still": still,
        "unbounded": replace(quick, first_failing=None),
        "nothing": replace(quick, answer=None, peak=None),
    }
    cells = {}
    for lang in LANGUAGES:
        rows = [line.strip("│").split("│") for line in shown(plans, lang).splitlines() if line.startswith("│")]
        cells[lang] = {name.strip(): [cell.strip() for cell in row] for name, *row in rows if len(row) == 5}
    assert cells["en"] == {
        "asked": ["96", "100", "growth copies", "0.05", "non_torch_bytes"],
        "quick": ["96", "100", "not asked", "0.05", "not asked"],
        "still": ["96", "100", "growth copies", "0.05", "–"],
        "unbounded": ["96", "none", "–", "0.05", "–"],
        "nothing": ["none", "100", "not asked", "–", "–"],
    }
    assert cells["zh"]["quick"] == ["96", "100", "未求", "0.05", "未求"]
