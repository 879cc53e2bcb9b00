"""Each page's logic, without a browser: what the knobs make of the numbers, and what bad input is told."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from hbmtwin import api
from hbmtwin.api import Scenario, fit
from hbmtwin.cli import main
from hbmtwin.dashboard.app import jobs
from hbmtwin.dashboard.app.validate_page import read_report
from hbmtwin.dashboard.error_bar_words import bar_rows, compared_rows, end_rows, order_sentences, sentences
from hbmtwin.sim.capacity.plan_file import in_both_languages
from hbmtwin.sim.capacity.plan_words import sentences as sentences_of_plan
from hbmtwin.sim.phrases import Lang

from ...known_figures import known_figures
from ...patience import PATIENCE_S, until
from ...sim.capacity.plans_by_hand import PLAN

PAGE = """
from hbmtwin.dashboard.app import {page}, language
language.choose()
{page}.show()
"""
SMALL = ("workload.num_prompts=5", "workload.request_rate=inf")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results of a test lie in its own directory, and its workers end with it."""
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path / "kept"))
    yield
    jobs.shared().workers.close()
    st.cache_resource.clear()


def page(name: str, *, lang: str = "en", settings: tuple[str, ...] = (), **asked: str) -> AppTest:
    app = AppTest.from_string(PAGE.format(page=name), default_timeout=2 * PATIENCE_S)
    app.query_params.update({"lang": lang, **asked})
    if settings:
        app.query_params["set"] = list(settings)
    return app.run()


def said(app: AppTest) -> str:
    parts = [*app.title, *app.error, *app.warning, *app.success, *app.info, *app.markdown, *app.caption]
    return re.sub(r"\\(.)", r"\1", "\n".join(str(part.value) for part in parts))  # as a reader sees it


def run_it(app: AppTest) -> AppTest:
    """Click on the page's button, and wait until its job has ended."""
    return click(app, "run")


def click(app: AppTest, key: str) -> AppTest:
    """Click on a button that starts a job, and wait until it has ended."""
    app.button(key=key).click().run()
    assert until(lambda: all(task.ended for task in app.session_state["tasks"].values()))
    return app.run()


# -- fit -------------------------------------------------------------------------------------------------------------


def test_fit_says_what_the_command_line_says() -> None:
    app = page("fit_page")
    answer = fit(model="llama-2-7b", device="ascend-910b4")
    assert not app.exception
    assert [metric.value for metric in app.metric] == [
        f"{answer.budget.kv_tokens:,}",
        f"{answer.budget.max_concurrency:.2f}",
        f"{answer.budget.num_blocks:,}",
        f"{answer.max_model_len_that_fits:,}",
    ]
    assert "llama-2-7b on ascend-910b4, vllm-ascend 0.21+: starts" in said(app)
    assert app.code[-1].value == "hbmtwin fit --model llama-2-7b --device ascend-910b4"
    table = app.dataframe[0].value
    assert table["GiB"].iloc[:-1].sum() == pytest.approx(table["GiB"].iloc[-1])  # the pieces are the device


def test_a_knob_of_fit_moves_the_numbers_and_the_command() -> None:
    app = page("fit_page")
    app.selectbox(key="model").select("llama-2-70b").run()
    app.number_input(key="tensor-parallel-size").set_value(2).run()
    assert "does not start" in said(app)
    assert "Any one of these changes alone makes it start" in said(app)
    app.number_input(key="tensor-parallel-size").set_value(8).run()
    answer = fit(model="llama-2-70b", device="ascend-910b4", tensor_parallel_size=8)
    assert app.metric[0].value == f"{answer.budget.kv_tokens:,}"
    assert app.code[-1].value.endswith("--tensor-parallel-size 8")


def test_fit_tells_what_makes_no_sense_and_its_cure() -> None:
    app = page("fit_page")
    app.selectbox(key="kv-cache-dtype").select("int8").run()
    assert not app.exception
    assert "int8" in said(app)


def test_fit_in_chinese() -> None:
    app = page("fit_page", lang="zh")
    assert "能否启动，显存用在哪里？" in said(app)
    assert "可以启动" in said(app)
    assert app.metric[1].label == "4,096 token 请求的并发"


# -- what if ---------------------------------------------------------------------------------------------------------


def test_what_if_begins_empty_and_a_run_fills_it() -> None:
    app = page("what_if_page", settings=SMALL)
    assert "Turn a knob on the left" in said(app)
    app = run_it(app)
    assert not app.exception
    summary = api.run(Scenario.load(overrides=SMALL)).summary
    assert app.metric[0].value == f"{summary['requests_completed']:,}"
    assert app.metric[2].value == f"{summary['ttft_s']['p99']:,.2f}"
    assert "run held" in said(app)
    assert app.button(key="run").disabled  # it is there already
    assert app.code[-1].value == ("hbmtwin run --set workload.request_rate=inf --set workload.num_prompts=5")


def test_what_is_done_soon_is_drawn_by_the_click_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AT_ONCE_S", PATIENCE_S)
    app = page("what_if_page", settings=SMALL)
    assert "The device before the first request" in [heading.value for heading in app.subheader]
    app.button(key="run").click().run()  # one drawing of the page, and no other
    assert len(app.metric) == 5
    assert app.button(key="run").disabled
    assert not app.session_state["tasks"]


def test_who_was_not_served_is_told_and_why() -> None:
    settings = ("engine.max_model_len=700", "workload.num_prompts=30", "workload.request_rate=inf")
    app = run_it(page("what_if_page", settings=settings))
    assert app.warning[0].value.replace("\\", "").split("\n\n") == [
        "rejected: 13 max_model_len",
        "11 unfinished: an earlier turn of their session was rejected",
    ]


def test_a_death_is_told_with_its_cause() -> None:
    app = run_it(page("what_if_page", settings=("kv_cache.preset=doubling",)))
    assert "died at 304.5 s (external fragmentation)" in said(app)
    assert "the largest piece is 1.72 GiB" in said(app)


def test_a_knob_replaces_its_setting_and_no_other() -> None:
    app = page("what_if_page", settings=(*SMALL, "kv_cache.block_size=32"))
    app.number_input(key="workload.num_prompts#0").set_value(7).run()
    assert app.code[-1].value.split(" --set ")[1:] == [
        "kv_cache.block_size=32",
        "workload.request_rate=inf",
        "workload.num_prompts=7",
    ]
    app.number_input(key="workload.users#0").set_value(3).run()  # a closed loop has no rate
    assert "request_rate" not in app.code[-1].value
    app.selectbox(key="kv_cache.preset#0").select("doubling").run()
    assert "kv_cache.preset=doubling" in app.code[-1].value


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("kv_cache.presett=paged", "kv_cache.presett: unknown key; did you mean 'kv_cache.preset'?"),
        ("model.name=llama-2-77b", "did you mean 'llama-2-7b'"),
        ("nonsense", "--set nonsense: write it as section.key=value"),
        ("workload.trace=/nowhere.csv", "/nowhere.csv"),
    ],
)
def test_a_bad_address_is_told_and_the_knobs_stay(setting: str, told: str) -> None:
    app = page("what_if_page", settings=(setting,))
    if "trace" in setting:
        app = run_it(app)
    assert not app.exception
    assert told in said(app)
    assert app.selectbox


UNCERTAIN = {"kv_bandwidth_efficiency": (0.31, 0.8), "host_layer_ns": (450_000, 650_000)}


def test_error_bars_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    app = run_it(page("what_if_page", settings=(*SMALL, *known_figures(tmp_path / "known.json", **UNCERTAIN))))
    assert app.button(key="ask-error-bars").label == "How far may these numbers be off? (3 runs)"
    assert "--error-bars" not in app.code[-1].value
    app = click(app, "ask-error-bars")
    assert not app.exception
    capsys.readouterr()
    assert app.code[-1].value.startswith("hbmtwin run --error-bars --set ")
    assert main(shlex.split(f"{app.code[-1].value} --json")[1:]) == 0
    told = json.loads(capsys.readouterr().out)["error_bars"]
    assert list(app.session_state["error-bars"].values()) == [{"": told}]
    shown = app.table[0].value.replace("\N{NO-BREAK SPACE}", " ", regex=True)
    assert list(shown.itertuples(index=False, name=None)) == bar_rows(told)
    assert list(app.dataframe[-1].value["at"]) == [row[1] for row in end_rows(told)]
    for sentence in sentences(told, "the run"):
        assert sentence in said(app)


def test_where_all_figures_are_known_no_error_bar_is_asked_for(tmp_path: Path) -> None:
    app = run_it(page("what_if_page", settings=(*SMALL, *known_figures(tmp_path / "known.json"))))
    assert "No figure behind this run has a range." in said(app)
    assert "ask-error-bars" not in [button.key for button in app.button]


def test_why_a_run_failed_stands_until_the_settings_change() -> None:
    app = run_it(page("what_if_page", settings=(*SMALL, "workload.trace=/nowhere.csv")))
    assert "/nowhere.csv" in said(app.run())
    app.number_input(key="seed#0").set_value(5).run()
    assert "/nowhere.csv" not in said(app)


def test_a_run_of_other_settings_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AT_ONCE_S", 0.0)
    app = page("what_if_page", settings=("workload.num_prompts=900000",))
    app.button(key="run").click().run()
    assert app.button(key="run").disabled
    app.number_input(key="workload.num_prompts#0").set_value(5).run()
    assert "Under way with the settings before" in said(app)
    assert not app.button(key="run").disabled
    monkeypatch.setattr(jobs, "AT_ONCE_S", PATIENCE_S)
    app.button(key="run").click().run()
    assert app.metric[0].delta == "of 5"
    assert not app.session_state["tasks"]


def test_what_cannot_start_is_told_before_a_run() -> None:
    app = page("what_if_page", settings=("model.name=llama-2-70b",))
    assert not app.exception
    assert "no memory is left for KV" in said(app)


# -- memory map, compare ---------------------------------------------------------------------------------------------


def test_the_map_asks_for_a_run_first() -> None:
    assert "There is no run of these settings yet" in said(page("memory_map_page", settings=SMALL))


def test_the_map_shows_the_last_moment_and_why_memory_ran_out() -> None:
    run_it(page("what_if_page", settings=("kv_cache.preset=doubling",)))
    app = page("memory_map_page", settings=("kv_cache.preset=doubling",))
    assert not app.exception
    assert app.metric[1].value == "1.00 GiB"
    assert "Enough is free in all, but no single piece is large enough." in said(app)


def test_compare_is_the_runs_of_the_command_line_and_their_differences() -> None:
    app = page("compare_page", settings=SMALL)
    app.text_area(key="variants").input("small:kv_cache.block_size=16").run()
    app.button_group(key="policies").set_value(["doubling", "paged"]).run()
    app = run_it(app)
    assert not app.exception
    results = api.compare(
        None, ["doubling", "paged"], variants={"small": ["kv_cache.block_size=16"]}, overrides=list(SMALL), jobs=1
    )
    table = app.dataframe[0].value.set_index("metric")
    for name, result in results.items():
        assert table.loc["TTFT p99 (s)", name] == result.summary["ttft_s"]["p99"]
    difference = table.loc["TTFT p99 (s)", "paged − doubling"]
    assert difference == results["paged"].summary["ttft_s"]["p99"] - results["doubling"].summary["ttft_s"]["p99"]
    assert "--variant small:kv_cache.block_size=16" in app.code[-1].value


def test_error_bars_of_a_comparison_tell_where_its_order_turns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    app = page("compare_page", settings=(*SMALL, *known_figures(tmp_path / "known.json", **UNCERTAIN)))
    app.text_area(key="variants").input("small:kv_cache.block_size=16").run()
    app.button_group(key="policies").set_value(["paged"]).run()
    app = run_it(app)
    assert app.button(key="ask-error-bars").label == "How far may these numbers be off? (6 runs)"
    app = click(app, "ask-error-bars")
    assert not app.exception
    capsys.readouterr()
    words = shlex.split(f"{app.code[-1].value} --json")[1:]
    assert "--error-bars" in words
    assert main([*words, "--out", os.environ["HBMTWIN_CACHE"] + "-compared"]) == 0
    told = {name: one["error_bars"] for name, one in json.loads(capsys.readouterr().out).items()}
    assert list(app.session_state["error-bars"].values()) == [told]
    assert list(app.table[0].value.itertuples(index=False, name=None)) == compared_rows(told)
    for sentence in order_sentences(told):
        assert sentence in said(app)


def test_a_variant_that_is_none_is_told() -> None:
    app = page("compare_page", settings=SMALL)
    app.text_area(key="variants").input("no colon").run()
    assert "--variant no colon: write it as NAME:key=value,key=value" in said(app)


# -- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lang", "verdict"), [("en", "Fragmentation"), ("zh", "显存碎片")])
def test_the_example_is_explained(lang: str, verdict: str) -> None:
    app = page("explain_page", lang=lang)
    app.button(key="example").click().run()
    assert not app.exception
    assert verdict in said(app)


def test_a_log_means_nothing_to_markdown() -> None:
    app = page("explain_page")
    app.text_area(key="pasted").input("<script>alert(1)</script> **bold** [x](http://evil) $a$").run()
    assert not app.exception
    raw = "\n".join(str(part.value) for part in (*app.markdown, *app.error, *app.success))
    assert "<script>" not in raw
    assert "](http" not in raw


# -- capacity, validate ----------------------------------------------------------------------------------------------


def test_a_small_sweep_is_the_sweep_of_the_command_line() -> None:
    app = page("capacity_page", settings=SMALL)
    app.text_input(key="grid").input("kv_cache.preset=paged,doubling scheduler.max_num_seqs=2,4").run()
    app.number_input(key="sweep-seeds").set_value(2).run()
    assert app.code[0].value == (
        "hbmtwin sweep --grid kv_cache.preset=paged,doubling scheduler.max_num_seqs=2,4 --seeds 2 "
        "--set workload.num_prompts=5 --set workload.request_rate=inf"
    )
    app = click(app, "start-sweep")
    assert not app.exception
    assert "8 of 8 runs held" in said(app)
    assert len(app.dataframe[-1].value) == 4
    assert "8 次运行中 8 次跑完全程" in said(page("capacity_page", lang="zh", settings=SMALL))


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("kv_cache.presett=paged", "did you mean"),
        ("workload.users=1:5000:1", "10,000 runs: here at most 500"),
        ("nothing", "nothing"),
        ("workload.users=a:b:c", "workload.users: input should be a valid integer, not 'a:b:c'"),
        ("device.name=ascend-910b4,ascend-910b5", "did you mean"),
        ("workload.users=4,8", "all 2 combinations are illegal, the first: workload.users: a closed loop has no"),
    ],
)
def test_a_grid_that_is_none_or_too_large_is_told_before_it_starts(grid: str, told: str) -> None:
    app = page("capacity_page", settings=SMALL)
    app.text_input(key="grid").input("scheduler.max_num_seqs=2,4").run()
    app.number_input(key="sweep-seeds").set_value(2).run()
    assert not app.error
    assert not app.button(key="start-sweep").disabled
    app.text_input(key="grid").input(grid).run()
    assert not app.exception
    assert told in said(app)
    assert app.button(key="start-sweep").disabled


def test_a_grid_of_more_requests_than_a_job_may_draw_is_told_and_none_is_drawn() -> None:
    app = page("capacity_page", settings=("workload.request_rate=inf",))
    app.text_input(key="grid").input("workload.num_prompts=1,1000000000").run()
    assert "workload.num_prompts: 1,000,000,000 is more than the 10,000,000 of a run here" in said(app)
    assert app.button(key="start-sweep").disabled


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ("users=a:b:c", "--load users=a:b:c: 'a' is no number; write it as users=10:200:10"),
        ("users=4:8:4", "--load users: workload.request_rate makes an open loop; here the load is request_rate"),
        ("num_prompts=1,1e9", "workload.num_prompts: 1,000,000,000 is more than the 10,000,000 of a run here"),
    ],
)
def test_a_load_that_is_none_is_told_before_it_starts(load: str, told: str) -> None:
    app = page("capacity_page", settings=SMALL, kind="oom-point")
    assert not app.error
    assert not app.button(key="start-oom-point").disabled
    app.text_input(key="load").input(load).run()
    assert not app.exception
    assert told in said(app)
    assert app.button(key="start-oom-point").disabled


@pytest.mark.parametrize(
    ("target", "slo", "told"),
    [
        ("request_rate", "ttft_p98=2s", "'ttft_p98' is no percentile of a latency"),
        ("request_rate", "ttft_p99=fast", "a time is a number and its unit, such as 2s or 80ms, not 'fast'"),
        ("users", "", "--target users: workload.request_rate makes an open loop"),
    ],
)
def test_a_plan_of_what_makes_no_sense_is_told_before_it_starts(target: str, slo: str, told: str) -> None:
    app = page("capacity_page", settings=SMALL, kind="plan")
    app.selectbox(key="target").select("request_rate").run()
    assert not app.error
    assert not app.button(key="start-plan").disabled
    app.selectbox(key="target").select(target).run()
    app.text_input(key="slo").input(slo).run()
    assert not app.exception
    assert told in said(app)
    assert app.button(key="start-plan").disabled


@pytest.mark.parametrize(
    ("lang", "told"), [("en", "96 users, the most at which"), ("zh", "96 个用户，是至少 90 % 的运行满足目标的最大值")]
)
def test_a_plan_is_told_in_the_language_of_the_screen(lang: Lang, told: str) -> None:
    directory = jobs.shared().kept.path("plan-a")
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps({"plans": {"paged": in_both_languages(PLAN)}, "left_out": {}}))
    app = page("capacity_page", lang=lang, kind="plan")
    assert not app.exception
    assert told in said(app)
    for heading, sentence in sentences_of_plan(PLAN, lang):
        assert f"- **{heading}**{': ' if lang == 'en' else '：'}{sentence}" in said(app)
    changes, figures = (table.value for table in app.table)
    name, held, carries = changes.iloc[1].tolist()
    assert name.endswith(" (drops tokens)" if lang == "en" else "（会丢弃 token）")
    assert (held, carries) == ("4 of 4" if lang == "en" else "4 / 4", "196")
    assert figures.iloc[0].tolist()[1:] == ["1 B", "2 B", "3 B", "98", "none" if lang == "en" else "无解"]


def test_without_a_report_the_page_says_how_to_make_one() -> None:
    app = page("validate_page")
    assert "hbmtwin validate run DIR --backend emulated" in said(app)
    assert "default, uncalibrated" in said(app)


def test_a_profile_in_use_is_told_with_its_range() -> None:
    app = page(
        "validate_page",
        settings=("device.name=cpu", "engine.max_model_len=1024", "calibration.profile=cpu-epyc-1-thread"),
    )
    assert not app.exception
    assert "cpu-epyc-1-thread" in said(app)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\x80\x04.", b"[" * 100_000, b'{"memory": {"steps": 1}, "run": 1}', b"null"]
)
def test_what_is_no_report_is_none(content: bytes) -> None:
    assert read_report(content) is None


# -- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        ("kv_cache.preset=doubling",),
        ("workload.preset=rag", "workload.num_prompts=30", "seed=7"),
        ("model.name=qwen3-8b", "device.name=a100-80gb", "workload.users=6", "workload.num_prompts=40"),
        ("scheduler.max_num_seqs=4", "workload.num_prompts=60", "slo.ttft_s=1.0", "slo.tpot_s=0.05"),
    ],
    ids=("small", "doubling", "rag", "users", "slo"),
)
def test_the_numbers_on_the_screen_are_those_of_the_command_line(
    settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    app = run_it(page("what_if_page", settings=settings))
    assert not app.exception
    main(["run", *(word for setting in settings for word in ("--set", setting)), "--json"])
    told = json.loads(capsys.readouterr().out)
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics["Completed"] == f"{told['requests_completed']:,}"
    assert metrics["Peak reserved (GiB)"] == f"{told['peak_reserved_bytes'] / 2**30:.2f}"
    assert metrics["TTFT p99 (s)"] == f"{told['ttft_s']['p99']:,.2f}"
    assert metrics["TPOT p99 (ms)"] == f"{told['tpot_s']['p99'] * 1e3:,.2f}"
    assert metrics["Preemptions"] == f"{told['preemptions']:,}"
    table = app.dataframe[-1].value.set_index("")
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end"), ("queue_s", "queue")):
        assert table.loc[f"{title} (s)"].to_dict() == told[name]
