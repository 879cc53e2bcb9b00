"""Finished sweeps, OOM points, plans and reports, opened as ``hbmtwin dashboard DIR`` opens them.

What stands on the screen is held to ``--json`` of the commands that wrote the directories.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from hbmtwin.dashboard.app import jobs

from ...patience import PATIENCE_S
from ...tiny_scenario import TINY
from .report_by_hand import REPORT
from .screen import PAGES, PLOT, Screen, Server, command_line, started

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GRID = ("kv_cache.preset=paged,doubling", "workload.users=5:8:1", "engine.max_model_len=512,1024")
VERBS = {
    "sweep": ("--grid", *GRID, "--seeds", "2"),
    "oom-point": ("--policies", "doubling", "--load", "users=5:8:1", "--seeds", "2", "--memory"),
    "plan": ("--policies", "doubling", "--target", "users", "--survive", "0.5", "--quick"),
}
PROFILE = ("device.name=cpu", "engine.max_model_len=1024", "calibration.profile=cpu-epyc-1-thread")
PAGE = """
from hbmtwin.dashboard.app import {page}, language
language.choose()
{page}.show()
"""


class Made(NamedTuple):
    """The directories, and what the commands printed."""

    folder: Path
    told: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("finished")
    tiny = tmp_path_factory.mktemp("scenario") / "tiny.toml"
    tiny.write_text(TINY, encoding="utf-8")
    told = {}
    for verb, words in VERBS.items():
        line = command_line(verb, str(tiny), *words, "--jobs", "1", "--out", str(folder / f"my-{verb}"), "--json")
        told[verb] = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)
    report = folder / "my-report"
    report.mkdir()
    (report / "validate_run.json").write_text(json.dumps(REPORT), encoding="utf-8")
    return Made(folder, told)


@pytest.fixture
def _opened(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "argv", ["streamlit", str(made.folder)])
    yield
    jobs.shared().workers.close()
    st.cache_resource.clear()


def page(name: str, **asked: str) -> AppTest:
    app = AppTest.from_string(PAGE.format(page=name), default_timeout=PATIENCE_S)
    app.query_params.update(asked)
    app.run()
    assert not app.exception
    return app


def said(app: AppTest) -> str:
    parts = [*app.error, *app.success, *app.info, *app.markdown, *app.caption]
    return re.sub(r"\\(.)", r"\1", "\n".join(str(part.value) for part in parts))  # as a reader sees it


def figures(app: AppTest) -> list[Any]:
    return [json.loads(element.proto.spec) for element in app.get("plotly_chart")]


def numbers(values: Any) -> list[float]:
    """Of a trace, as it is sent."""
    if isinstance(values, dict):
        values = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return [float(value) for value in values]


# -- the same numbers ------------------------------------------------------------------------------------------------


def sweep_agrees(told: dict[str, Any]) -> None:
    app = page("capacity_page")
    assert f"{told['outcomes']['held']} of {told['runs']} runs held" in said(app)
    table = app.dataframe[-1].value
    assert len(table) == len(told["combinations"]) == 16
    for row, point in zip(table.to_dict("records"), told["combinations"], strict=True):
        settings = point["settings"]
        assert (row["preset"], row["users"], row["max_model_len"]) == tuple(map(str, settings.values()))
        assert row["held"] == f"{point['held']} / {point['runs']}"
        share = point["survival"]
        assert row["share that held (95 %)"] == (
            f"{100 * share['share']:.0f} % ({100 * share['low']:.0f} to {100 * share['high']:.0f})"
        )
        for title, name, factor, digits in (
            ("TTFT p99 (s)", "ttft_p99_s", 1, 2),
            ("TPOT p99 (ms)", "tpot_p99_s", 1e3, 1),
        ):
            middle = point[name]["median"] * factor if name in point else None
            if middle is None:
                assert row[title] == "–"
            else:
                assert float(row[title]) == pytest.approx(middle, abs=0.51 * 10**-digits)
    maps = figures(app)[:2]  # one each policy, the share that held first
    shown = [[value for line in one["data"][0]["z"] for value in line] for one in maps]
    asked = {"paged": shown[0], "doubling": shown[1]}
    for policy, values in asked.items():
        own = [p for p in told["combinations"] if p["settings"]["kv_cache.preset"] == policy]
        by_length = sorted(own, key=lambda p: (p["settings"]["engine.max_model_len"], p["settings"]["workload.users"]))
        assert values == [pytest.approx(100 * p["survival"]["share"]) for p in by_length]
    assert {*asked["doubling"]} > {100.0}  # some died


def oom_points_agree(told: dict[str, Any]) -> None:
    app = page("capacity_page", kind="oom-point")
    ends = told["policies"]["doubling"]["fails"]
    (row,) = app.dataframe[0].value.to_dict("records")
    assert (row["policy"], row["of draws"]) == ("doubling", f"{ends['ended']} of {ends['draws']}")
    first, last = (f"{ends[name]:.0f}" for name in ("first_load", "last_load"))
    assert row["at"] == (first if first == last else f"{first} to {last}")
    assert f"doubling runs out of memory first at {first} users" in said(app) or f"at {first} users in every" in said(
        app
    )
    shares, memories = figures(app)
    curve = next(trace for trace in shares["data"] if trace.get("name") == "doubling")
    assert numbers(curve["x"]) == told["load"]["values"]
    assert numbers(curve["y"]) == pytest.approx([100 * point["share"] for point in ends["curve"]])
    smallest = told["smallest_memory"]["doubling"]["fails"]["curve"]
    curve = next(trace for trace in memories["data"] if trace.get("name") == "doubling")
    assert numbers(curve["y"]) == pytest.approx([point["median_bytes"] / 2**30 for point in smallest])
    for row, point in zip(app.dataframe[1].value.to_dict("records"), smallest, strict=True):
        assert (row["users"], row["doubling"].split()[0]) == (
            f"{point['load']:.0f}",
            f"{point['median_bytes'] / 2**30:,.2f}",
        )


def plan_agrees(told: dict[str, Any]) -> None:
    (told,) = told["plans"].values()
    app = page("capacity_page", kind="plan")
    seen = {tried["value"]: tried for tried in told["tried"]}
    assert f"{told['answer']} users, the most at which at least 50 % of runs hold" in said(app)
    assert f"({seen[told['answer']]['held']} of {seen[told['answer']]['trials']} did)" in said(app)
    (figure,) = figures(app)
    (line,) = figure["data"]
    assert numbers(line["x"]) == sorted(seen)
    shares = [100 * seen[value]["held"] / seen[value]["trials"] for value in sorted(seen)]
    assert numbers(line["y"]) == pytest.approx(shares)


AGREE: dict[str, Callable[[dict[str, Any]], None]] = {
    "sweep": sweep_agrees,
    "oom-point": oom_points_agree,
    "plan": plan_agrees,
}


@pytest.mark.usefixtures("_opened")
@pytest.mark.parametrize("verb", AGREE)
def test_what_is_finished_has_the_numbers_of_its_json_on_the_screen(made: Made, verb: str) -> None:
    AGREE[verb](made.told[verb])


@pytest.mark.usefixtures("_opened")
@pytest.mark.parametrize(
    ("verb", "path", "by"),
    [
        ("sweep", ("outcomes", "held"), 1),
        ("sweep", ("combinations", 3, "held"), -1),
        ("sweep", ("combinations", 0, "ttft_p99_s", "median"), 0.02),
        ("sweep", ("combinations", 9, "survival", "share"), -0.01),
        ("oom-point", ("policies", "doubling", "fails", "curve", 0, "share"), 0.01),
        ("oom-point", ("policies", "doubling", "fails", "first_load"), 1),
        ("oom-point", ("smallest_memory", "doubling", "fails", "curve", 1, "median_bytes"), 1 << 25),
        ("plan", ("plans", "doubling", "answer"), 1),
        ("plan", ("plans", "doubling", "tried", 0, "held"), 1),
    ],
)
def test_a_number_that_is_another_one_is_seen(made: Made, verb: str, path: tuple[Any, ...], by: float) -> None:
    told = deepcopy(made.told[verb])
    *way, last = path
    inner = reduce(lambda place, key: place[key], way, told)
    inner[last] += by
    with pytest.raises((AssertionError, KeyError)):
        AGREE[verb](told)


@pytest.mark.usefixtures("_opened")
def test_a_report_on_the_screen_has_the_numbers_of_its_file() -> None:
    app = page("validate_page")
    assert "No difference in memory: 12,345,678 numbers compared" in said(app)
    memory, times = (frame.value for frame in app.dataframe)
    assert list(memory["quantity"]) == ["Reserved", "Allocated", "Requested", "Free at the driver"]
    assert memory["worst step"].isna().all()  # none differs
    assert list(times["quantity"]) == ["step time", "\u2003decode steps"]
    assert list(times["MAPE (%)"]) == [9.77, 9.7]
    assert list(times["worst step"]) == [3, 3]


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("dashboard"), made.folder) as app:
        yield app


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_screen_that_is_full_in_both_themes_and_languages(
    browser: Browser, server: Server, scheme: str, lang: str
) -> None:
    screen = Screen(browser, server, scheme)
    chinese = lang == "zh"
    for kind, title, says, plots in (
        ("sweep", "参数扫描" if chinese else "Sweep", "32 次运行中" if chinese else "of 32 runs held", 4),
        ("oom-point", "显存耗尽点" if chinese else "OOM point", "显存够用" if chinese else "Memory suffices", 2),
        ("plan", "容量规划" if chinese else "Plan", "用户" if chinese else "users, the most at which", 1),
    ):
        if kind == "sweep":
            screen.open("capacity", lang=lang)
        else:
            screen.page.get_by_role("radio", name=title).check(force=True)
        screen.says(says)
        screen.expect(screen.page.locator(PLOT).first).to_be_visible()
        screen.settled(PAGES["capacity"].titles[chinese])
        until_drawn = screen.page.locator(".js-plotly-plot .main-svg").first
        screen.expect(until_drawn).to_be_visible()
        screen.expect(screen.page.get_by_test_id("stPlotlyChart")).to_have_count(plots)
        screen.expect(screen.page).to_have_url(re.compile("^(?!.*kind=)" if kind == "sweep" else f"kind={kind}"))
        assert screen.page.get_by_test_id("stException").count() == 0
        assert screen.fits()
        screen.shot(f"capacity-{kind}-full-{lang}-{scheme}")
    screen.open("validate", PROFILE, lang)
    screen.says("12,345,678")
    screen.says("显存带宽" if chinese else "memory bandwidth")
    screen.expect(screen.page.locator(PLOT).nth(1)).to_be_visible()
    assert screen.page.get_by_test_id("stException").count() == 0
    assert screen.fits()
    screen.shot(f"validate-full-{lang}-{scheme}")
    screen.context.close()


def test_a_link_opens_the_part_of_capacity_that_was_looked_at(browser: Browser, server: Server) -> None:
    screen = Screen(browser, server)
    screen.page.goto(f"{server.url}/capacity?kind=plan&lang=zh")
    screen.settled(PAGES["capacity"].titles[1])
    screen.says("的最大值")
    screen.page.get_by_role("radio", name="English").check(force=True)
    screen.says("users, the most at which")  # and it is the same part in the other language
    screen.context.close()


def test_a_report_is_uploaded_and_one_that_is_none_is_told(browser: Browser, server: Server, made: Made) -> None:
    screen = Screen(browser, server)
    screen.open("validate")
    drop = screen.main().locator("[data-testid=stFileUploaderDropzoneInput]")
    drop.set_input_files(made.folder / "my-sweep" / "sweep.json")
    screen.says("sweep.json is no report of hbmtwin validate run")
    drop = screen.main().locator("[data-testid=stFileUploaderDropzoneInput]")
    drop.set_input_files(made.folder / "my-report" / "validate_run.json")
    screen.says("12,345,678")
    assert screen.page.get_by_test_id("stException").count() == 0
    screen.context.close()
