"""A browser walks every screen of ``hbmtwin dashboard``, as somebody does who plans a server.

Numbers are held to those of the command line, in a process of its own. :mod:`.screen` tells how pictures are kept.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ...patience import worked_s
from .screen import PAGES, PLOT, Screen, Server, children, command_line

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SMALL = ("workload.num_prompts=5", "workload.request_rate=inf")
DEATH = ("kv_cache.preset=doubling",)
ENDLESS = ("workload.num_prompts=900000",)
WAS_HERE = Path(f"/tmp/hbmtwin-was-here-{os.getpid()}")


class Bomb:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(WAS_HERE),)


def test_fill_run_brush_and_look_at_the_map_of_that_moment(screen: Screen) -> None:
    screen.open("what-if")
    screen.says("Turn a knob on the left")
    for label, value in (("Requests", "5"), ("Sessions a second (open loop)", "2")):
        screen.page.get_by_label(label, exact=True).fill(value)
        screen.page.keyboard.press("Enter")
        screen.says(f"={value}")  # the command line has it
    assert screen.command() == "hbmtwin run --set workload.request_rate=2.0 --set workload.num_prompts=5"
    screen.run()
    result = subprocess.run([*command_line(*screen.command().split()[1:]), "--json"], capture_output=True, check=True)
    summary = json.loads(result.stdout)
    told = screen.figures()
    assert told["Completed"] == f"{summary['requests_completed']:,}"
    assert told["TTFT p99 (s)"] == f"{summary['ttft_s']['p99']:,.2f}"
    assert told["Peak reserved (GiB)"] == f"{summary['peak_reserved_bytes'] / 2**30:.2f}"
    del summary["wall_s"]  # how long it took there
    assert json.loads(screen.download("Summary (JSON)")) == summary

    begin, end = screen.brush(0.2, 0.5)
    screen.go("memory-map")
    slider = screen.main().get_by_role("slider")
    screen.expect(slider).to_be_visible()
    assert begin < float(slider.get_attribute("aria-valuetext") or "") <= end


def test_a_link_shows_the_same_to_whoever_it_is_sent_to(screen: Screen, browser: Browser, server: Server) -> None:
    screen.open("what-if", DEATH)
    screen.run()
    screen.says("died at 304.5 s (external fragmentation)")
    second = Screen(browser, server)
    second.page.goto(screen.page.url)
    second.page.locator(PLOT).first.wait_for()
    second.settled("What if?")
    second.says("died at 304.5 s (external fragmentation)")
    assert second.figures()
    assert second.figures() == screen.figures()
    assert second.command() == screen.command()
    second.context.close()


def test_a_scenario_goes_out_as_a_file_and_comes_in_again(screen: Screen, tmp_path: Path) -> None:
    screen.open("what-if", (*SMALL, "kv_cache.block_size=32"))
    file = tmp_path / "mine.toml"
    file.write_bytes(screen.download("Scenario (TOML)"))
    before = screen.command()
    screen.open("what-if")
    screen.page.get_by_test_id("stSidebar").get_by_text("All settings").click()
    screen.page.locator("[data-testid=stFileUploaderDropzoneInput]").set_input_files(file)
    screen.says("kv_cache.block_size=32")
    assert screen.command() == before
    assert "kv_cache.block_size" in screen.page.url


def test_compare_tells_the_differences(screen: Screen) -> None:
    screen.open("compare", SMALL)
    screen.leave_out("caching", "pooled")
    screen.run()
    screen.says("Numbers and differences")
    screen.expect(screen.page.locator(PLOT).nth(3)).to_be_visible()
    said = subprocess.run([*command_line(*screen.command().split()[1:]), "--json"], capture_output=True, check=True)
    assert set(json.loads(said.stdout)) >= {"paged", "doubling"}


def test_a_log_is_explained(screen: Screen, tmp_path: Path) -> None:
    screen.open("explain")
    screen.button("An example").click()
    screen.says("Fragmentation")
    file = tmp_path / "server.log"
    file.write_text(screen.page.get_by_role("textbox").first.input_value())
    screen.open("explain")
    screen.upload(file, "Fragmentation")
    told = subprocess.run(command_line("explain", str(file), "--json"), capture_output=True, check=False)
    assert json.loads(screen.download("Explanation (JSON)")) == json.loads(told.stdout)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps(Bomb()), "binary data"),
        (gzip.compress(b"\0" * (64 << 20)), "Nothing about device memory"),
        (b"<img src=x onerror=alert(1)> RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB", "2.00 GiB"),
    ],
    ids=["pickle", "zip bomb", "html"],
)
def test_a_hostile_log_is_read_and_never_run(screen: Screen, tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "server.log"
    file.write_bytes(content)
    screen.page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    screen.open("explain")
    screen.upload(file, told)
    assert screen.page.get_by_test_id("stException").count() == 0
    assert screen.main().locator("img").count() == 0
    assert not WAS_HERE.exists()


def test_the_language_is_switched_and_what_was_chosen_stays(screen: Screen) -> None:
    screen.open("what-if", DEATH)
    command = screen.command()
    screen.page.get_by_role("radio", name="中文").check(force=True)
    screen.says("假设分析")
    assert screen.command() == command
    assert "lang=zh" in screen.page.url
    screen.go("", "zh")
    screen.page.get_by_role("radio", name="English").check(force=True)
    screen.says("Will it start")
    assert "lang" not in screen.page.url


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("bad.toml", b"[kv_cache]\nblock_size = 'many'\n", "kv_cache.block_size"),
        ("bomb.toml", pickle.dumps(Bomb()), "bomb.toml"),
        ("large.toml", b"#" * (2 << 20), "1MB"),
        ("deep.toml", b"a = " + b"[" * 100_000, "deep.toml"),
    ],
    ids=["bad", "bomb", "large", "deep"],
)
def test_a_bad_file_is_told_and_the_page_stays(
    screen: Screen, tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    screen.open("what-if", SMALL)
    before = screen.command()
    screen.page.get_by_test_id("stSidebar").get_by_text("All settings").click()
    screen.page.locator("[data-testid=stFileUploaderDropzoneInput]").set_input_files(file)
    screen.expect(screen.page.get_by_test_id("stSidebar")).to_contain_text(told)
    assert screen.page.get_by_test_id("stException").count() == 0
    assert screen.command() == before
    assert not WAS_HERE.exists()


def test_a_bad_address_is_told_and_cured_by_a_knob(screen: Screen) -> None:
    screen.open("what-if", ("scheduler.max_num_seqs=-3",))
    screen.says("scheduler.max_num_seqs")
    knob = screen.page.get_by_label("max_num_seqs", exact=True)
    knob.fill("8")
    knob.press("Enter")
    screen.says("hbmtwin run --set scheduler.max_num_seqs=8")


def test_a_long_run_is_cancelled_and_leaves_nothing(screen: Screen, server: Server) -> None:
    screen.open("what-if", ENDLESS)
    screen.button_that_starts().click()
    screen.says(re.compile(r"of 900,000 requests"))
    screen.shot("what-if-running")
    screen.button("Cancel").click()
    screen.says("Turn a knob on the left")
    screen.expect(screen.button_that_starts()).to_be_enabled()
    assert not [path for path in server.cache.iterdir() if path.name.startswith(".")]


def test_a_run_that_is_killed_is_told_and_the_next_one_runs(screen: Screen, server: Server) -> None:
    screen.open("what-if", ENDLESS)
    screen.button_that_starts().click()
    screen.says(re.compile(r"of 900,000 requests"))
    os.kill(max(children(server.process.pid), key=worked_s), signal.SIGKILL)
    screen.says("ended from outside")
    screen.shot("what-if-lost")
    screen.open("what-if", (*SMALL, "seed=3"))
    screen.run()
    screen.says("held")


def test_the_keyboard_reaches_the_knobs_and_starts(screen: Screen) -> None:
    screen.open("what-if", (*SMALL, "seed=4"))
    knobs = ("Model", "Device", "Requests", "Seed")
    for knob in knobs:  # what is drawn only while the focus walks on was not there to be reached
        screen.expect(screen.page.get_by_label(knob, exact=True)).to_be_visible()
    screen.expect(screen.button_that_starts()).to_be_enabled()
    reached: list[str] = []
    for _ in range(80):
        screen.page.keyboard.press("Tab")
        name = screen.page.evaluate("(e => e.getAttribute('aria-label') || e.innerText || '')(document.activeElement)")
        reached.append(name.split("\n")[-1])
        if reached[-1] == "Run":
            break
    assert {*knobs, "Run"} <= set(reached), reached
    screen.page.keyboard.press("Enter")
    screen.expect(screen.page.get_by_test_id("stMetric")).to_have_count(5)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_screen_in_both_themes_and_languages(browser: Browser, server: Server, scheme: str, lang: str) -> None:
    screen = Screen(browser, server, scheme)
    screen.open("what-if", DEATH, lang)
    for place in ("what-if", *PAGES):
        screen.go(place, lang)
        if place == "compare":
            screen.leave_out("caching", "pooled")  # they take long
        if place in ("what-if", "compare") and screen.button_that_starts().is_enabled():
            screen.run()
        if place == "explain":
            screen.button("示例" if lang == "zh" else "An example").click()
            screen.says("显存碎片" if lang == "zh" else "Fragmentation")
        elif place not in ("capacity", "validate"):
            screen.page.locator(PLOT).first.wait_for()
        screen.settled(PAGES[place].titles[lang == "zh"])
        assert screen.page.get_by_test_id("stException").count() == 0
        assert screen.fits()
        screen.shot(f"{place or 'fit'}-{lang}-{scheme}")
    assert screen.page.evaluate("document.documentElement.lang") in ("en", "zh")
    screen.context.close()


@pytest.mark.parametrize(("scheme", "lang", "seed"), [("light", "en", 11), ("dark", "zh", 12)])
def test_error_bars_are_asked_for(browser: Browser, server: Server, scheme: str, lang: str, seed: int) -> None:
    screen = Screen(browser, server, scheme)
    for place in ("what-if", "compare"):
        screen.open(place, (*SMALL, f"seed={seed}"), lang)
        if place == "compare":
            screen.leave_out("caching", "pooled")
        screen.run()
        ask = "How far may these numbers" if lang == "en" else "这些数字可能"
        screen.main().get_by_role("button", name=ask).click()
        heading = "Error bars" if lang == "en" else "误差范围"
        screen.expect(screen.main().get_by_role("heading", name=heading)).to_be_visible()
        screen.settled(PAGES[place].titles[lang == "zh"])
        assert " --error-bars" in screen.command()
        assert screen.page.get_by_test_id("stException").count() == 0
        assert screen.fits()
        screen.shot(f"{place}-error-bars-{lang}-{scheme}")
    screen.context.close()
