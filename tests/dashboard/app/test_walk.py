"""A browser walks every screen of ``hbmtwin dashboard``, as somebody does who plans a server.

::

    HBMTWIN_SCREENSHOTS=DIR   each screen is written there, in both themes and languages: look at them

Nothing waits for a time but for what is to be seen, so that no busy machine is a fault. Numbers are held to those of
the command line, in a process of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 120_000
SMALL = ("workload.num_prompts=5", "workload.request_rate=inf")
DEATH = ("kv_cache.preset=doubling",)
ENDLESS = ("workload.num_prompts=900000",)
IDLE = "[data-testid=stApp][data-test-script-state=notRunning]"
PLOT = ".js-plotly-plot .nsewdrag"
WAS_HERE = Path(f"/tmp/hbmtwin-was-here-{os.getpid()}")


class Bomb:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(WAS_HERE),)


class Names(NamedTuple):
    """What a screen is called, in both languages."""

    links: tuple[str, str]
    titles: tuple[str, str]


PAGES = {
    "": Names(("Fit", "显存规划"), ("Will it start, and what takes the memory?", "能否启动，显存用在哪里？")),
    "what-if": Names(("What if", "假设分析"), ("What if?", "假设分析")),
    "memory-map": Names(("Memory map", "显存地图"), ("Memory map", "显存地图")),
    "compare": Names(("Compare", "对比"), ("Compare on the same traffic", "相同流量下的对比")),
    "capacity": Names(("Capacity", "容量"), ("How many fit?", "能承载多少？")),
    "explain": Names(("Explain", "日志诊断"), ("Why did it die?", "为什么显存不足？")),
    "validate": Names(("Validate", "验证"), ("How far can it be trusted?", "结果可信度")),
}


class Server(NamedTuple):
    """An app that runs."""

    url: str
    process: subprocess.Popen[bytes]
    cache: Path


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        port: int = asked.getsockname()[1]
        return port


def command_line(*words: str) -> list[str]:
    return [sys.executable, "-m", "hbmtwin", *words]


def children(pid: int) -> list[int]:
    """Processes that it started, and those started."""
    found: list[int] = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = task.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if int(rest.split()[1]) == pid:
            child = int(name.split()[0])
            found += [child, *children(child)]
    return found


def until(true: Any) -> None:
    for _ in range(PATIENCE_MS // 50):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health") as answer:
            return bool(answer.read() == b"ok")
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The app as the command starts it; at its end Ctrl-C leaves no process."""
    folder = tmp_path_factory.mktemp("dashboard")
    port = free_port()
    process = subprocess.Popen(
        command_line("dashboard", "--no-browser", "--port", str(port)),
        env={**os.environ, "HBMTWIN_CACHE": str(folder / "kept")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    made = Server(f"http://localhost:{port}", process, folder / "kept")
    try:
        until(lambda: answers(made.url))
        yield made
        beside = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) in (0, 130)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in beside))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium to walk with: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright to walk with")
    with api.sync_playwright() as playwright:
        # as root, and without a device for pictures
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield launched
        launched.close()


class Screen:
    """A browser's window at the app."""

    def __init__(self, browser: Browser, server: Server, scheme: str = "light") -> None:
        from playwright.sync_api import expect

        self.server = server
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 1000}, color_scheme="dark" if scheme == "dark" else "light"
        )
        self.context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        self.expect = expect
        self.page: Page = self.context.new_page()
        self.asked: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, place: str, settings: tuple[str, ...] = (), lang: str = "en") -> None:
        """As somebody does who was sent a link."""
        query = urlencode([*([("lang", lang)] if lang != "en" else []), *(("set", setting) for setting in settings)])
        self.page.goto(f"{self.server.url}/{place}" + (f"?{query}" if query else ""))
        self.settled(PAGES[place].titles[lang == "zh"])

    def settled(self, title: str = "") -> None:
        """Wait until that page's title is there and the script stands still."""
        self.expect(self.page.locator("h1").first).to_have_text(title or re.compile("."))
        self.page.locator(IDLE).wait_for()

    def go(self, place: str, lang: str = "en") -> None:
        """Take the link in the sidebar."""
        told = PAGES[place]
        links = self.page.get_by_test_id("stSidebarNav")
        links.get_by_role("link", name=told.links[lang == "zh"], exact=True).click()
        self.settled(told.titles[lang == "zh"])

    def main(self) -> Locator:
        return self.page.get_by_test_id("stMain")

    def says(self, words: str | re.Pattern[str]) -> None:
        self.expect(self.main()).to_contain_text(words)

    def button(self, name: str) -> Locator:
        return self.main().get_by_role("button", name=name, exact=True)

    def run(self) -> None:
        """Click on the page's button, and wait for the first picture."""
        self.button_that_starts().click()
        self.page.locator(PLOT).first.wait_for()
        self.settled()

    def leave_out(self, *policies: str) -> None:
        """Of those that are compared."""
        for policy in policies:
            self.button(policy).click()
            self.expect(self.page.get_by_test_id("stCode").last).not_to_contain_text(policy)

    def button_that_starts(self) -> Locator:
        return self.page.get_by_test_id("stBaseButton-primary")

    def brush(self, begin: float, end: float) -> tuple[float, float]:
        """Drag over that share of the first picture, again where it was just drawn anew; return what the page says."""
        said = re.compile(r"([0-9.]+) to ([0-9.]+) s")
        for _ in range(20):
            self.page.locator("h1").first.scroll_into_view_if_needed()
            box = self.page.locator(PLOT).first.bounding_box()
            assert box is not None
            y = box["y"] + box["height"] / 2
            self.page.mouse.move(box["x"] + begin * box["width"], y)
            self.page.mouse.down()
            self.page.mouse.move(box["x"] + end * box["width"], y, steps=8)
            self.page.mouse.up()
            told = self.page.get_by_test_id("stCaptionContainer").filter(has_text=said).first
            try:
                self.expect(told).to_be_visible(timeout=5000)
            except AssertionError:
                continue
            found = said.search(told.inner_text())
            assert found is not None
            return float(found[1]), float(found[2])
        raise AssertionError("a drag selects nothing")

    def figures(self) -> dict[str, str]:
        """What the page's large numbers say, by their labels."""
        said = self.page.get_by_test_id("stMetric")
        labels = said.get_by_test_id("stMetricLabel").all_inner_texts()
        return dict(zip(labels, said.get_by_test_id("stMetricValue").all_inner_texts(), strict=True))

    def command(self) -> str:
        return self.page.get_by_test_id("stCode").last.inner_text().strip()

    def download(self, name: str) -> bytes:
        with self.page.expect_download() as told:
            self.button(name).click()
        return Path(told.value.path()).read_bytes()

    def shot(self, name: str) -> None:
        """Keep a picture of the whole page, if they are wanted."""
        if not (folder := os.environ.get("HBMTWIN_SCREENSHOTS")):
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        height = max(1000, self.page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") + 20)
        self.page.set_viewport_size({"width": 1280, "height": height})
        self.page.wait_for_timeout(1000)  # figures draw themselves anew, and nothing tells their end
        self.page.screenshot(path=Path(folder, f"{name}.png"))
        self.page.set_viewport_size({"width": 1280, "height": 1000})


@pytest.fixture
def screen(browser: Browser, server: Server) -> Iterator[Screen]:
    made = Screen(browser, server)
    yield made
    foreign = [url for url in made.asked if not url.startswith((server.url, "data:", "blob:"))]
    made.context.close()
    assert foreign == []


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
    assert screen.page.locator(PLOT).count() >= 4
    said = subprocess.run([*command_line(*screen.command().split()[1:]), "--json"], capture_output=True, check=True)
    assert set(json.loads(said.stdout)) >= {"paged", "doubling"}


def test_a_log_is_explained(screen: Screen, tmp_path: Path) -> None:
    screen.open("explain")
    screen.button("An example").click()
    screen.says("Fragmentation")
    file = tmp_path / "server.log"
    file.write_text(screen.page.get_by_role("textbox").first.input_value())
    screen.open("explain")
    screen.page.locator("[data-testid=stFileUploaderDropzoneInput]").set_input_files(file)
    screen.says("Fragmentation")
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
    screen.page.locator("[data-testid=stFileUploaderDropzoneInput]").set_input_files(file)
    screen.says(told)
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
    busy = max(children(server.process.pid), key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[13]))
    os.kill(busy, signal.SIGKILL)
    screen.says("ended from outside")
    screen.shot("what-if-lost")
    screen.open("what-if", (*SMALL, "seed=3"))
    screen.run()
    screen.says("held")


def test_the_keyboard_reaches_the_knobs_and_starts(screen: Screen) -> None:
    screen.open("what-if", (*SMALL, "seed=4"))
    reached: list[str] = []
    for _ in range(80):
        screen.page.keyboard.press("Tab")
        name = screen.page.evaluate("(e => e.getAttribute('aria-label') || e.innerText || '')(document.activeElement)")
        reached.append(name.split("\n")[-1])
        if reached[-1] == "Run":
            break
    assert {"Model", "Device", "Requests", "Seed", "Run"} <= set(reached)
    screen.page.keyboard.press("Enter")
    screen.page.locator(PLOT).first.wait_for()


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
        wide = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('[data-testid=stMain]'))"
        assert screen.page.evaluate(wide) <= 0  # nothing is cut at 1280 px
        screen.shot(f"{place or 'fit'}-{lang}-{scheme}")
    assert screen.page.evaluate("document.documentElement.lang") in ("en", "zh")
    screen.context.close()
