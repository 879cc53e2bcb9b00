"""What somebody got wrong, as a page tells it: not too much of it, and nothing that Markdown would take for its own."""

from __future__ import annotations

import re

import pytest

from hbmtwin.api import DoesNotFit, Scenario, ScenarioError
from hbmtwin.dashboard.app import language
from hbmtwin.dashboard.app.wrong import why_text, wrong_text
from hbmtwin.sim.server_plan import ServerPlan


@pytest.fixture
def in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(language.st.session_state, language.KEY, "zh")


def told(error: Exception) -> list[str]:
    return re.sub(r"\\(.)", r"\1", wrong_text(error)).split("\n\n")


def refused() -> DoesNotFit:
    with pytest.raises(DoesNotFit) as raised:
        ServerPlan(Scenario.load(overrides=["model.name=llama-2-70b"]))
    return raised.value


def test_of_hundreds_of_bad_settings_the_first_are_told_and_how_many_more() -> None:
    with pytest.raises(ScenarioError) as raised:
        Scenario.load(overrides=[f"kv_cache.key{i}=1" for i in range(700)])
    said = told(raised.value)
    assert said[0] == "kv_cache.key0: unknown key; did you mean 'kv_cache.dtype'?"
    assert said[5:] == ["and 695 more"]


def test_five_are_all_told() -> None:
    assert told(ValueError("a\nb\nc\nd\ne")) == ["a", "b", "c", "d", "e"]


def test_a_server_that_does_not_start_is_told_with_what_helps() -> None:
    (said,) = told(refused())
    assert said.startswith("no memory is left for KV: weights 128.48 GiB")
    assert said.endswith("Any one of these would start: tensor_parallel_size 8; pipeline_parallel_size 8")


@pytest.mark.usefixtures("in_chinese")
def test_in_chinese_too() -> None:
    why, helps = told(refused())
    assert why.startswith("无法启动：没有显存留给 KV 缓存：权重 128.48 GiB")
    assert helps == "以下任意一项改动即可启动：tensor_parallel_size 8; pipeline_parallel_size 8"


@pytest.mark.usefixtures("in_chinese")
def test_a_setting_is_told_in_chinese_and_what_is_not_known_in_english_behind_it() -> None:
    with pytest.raises(ScenarioError) as raised:
        Scenario.load(overrides=["seed=x", "kv_cache.presett=paged"])
    assert sorted(told(raised.value)) == [
        "kv_cache.presett：没有此参数；是否指 'kv_cache.preset'？",
        "seed：须为整数，不能是 'x'",
    ]
    mixed = "a: wrong\nseed: input should be a valid integer, not 'x'\nb: wrong"
    english = "以下说明与命令行相同，为英文："
    assert told(ValueError(mixed)) == ["seed：须为整数，不能是 'x'", english, "a: wrong", "b: wrong"]
    with pytest.raises(ScenarioError) as many:
        Scenario.load(overrides=[f"kv_cache.key{i}=1" for i in range(700)])
    assert told(many.value)[4:] == ["kv_cache.key4：没有此参数；是否指 'kv_cache.dtype'？", "另有 695 处"]


def test_a_note_is_in_the_language_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    note, other = "kv_cache.growth does not concern the policy 'paged'", "KV 使用率高于 90.0 %"
    assert why_text(note) == note
    monkeypatch.setitem(language.st.session_state, language.KEY, "zh")
    assert [why_text(note), why_text(other)] == ["kv_cache.growth 与策略 'paged' 无关", other]
