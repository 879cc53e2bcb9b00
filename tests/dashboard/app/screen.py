"""A browser's window at the app, and the app as the command starts it.

::

    HBMTWIN_SCREENSHOTS=DIR   each screen is written there, in both themes and languages: look at them

Nothing waits for a time but for what is to be seen, so that no busy machine is a fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import sample
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from ...patience import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 1000 * PATIENCE_S
IDLE = "[data-testid=stApp][data-test-script-state=notRunning]"
PLOT = ".js-plotly-plot .nsewdrag"


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
    """One below those that a system gives to whoever connects to something: none of them takes it before the app."""
    for port in sample(range(20_000, 32_000), 100):
        with socket.socket() as asked:
            try:
                asked.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


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


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health") as answer:
            return bool(answer.read() == b"ok")
    except OSError:
        return False


@contextmanager
def started(folder: Path, *directories: Path) -> Iterator[Server]:
    """The app as the command starts it, with results in *folder*; at its end Ctrl-C leaves no process."""
    port = free_port()
    process = subprocess.Popen(
        command_line("dashboard", *map(str, directories), "--no-browser", "--port", str(port)),
        env={**os.environ, "HBMTWIN_CACHE": str(folder / "kept")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    made = Server(f"http://localhost:{port}", process, folder / "kept")
    try:
        until(lambda: process.poll() is not None or answers(made.url))
        assert answers(made.url)
        yield made
        beside = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) in (0, 130)
        assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in beside))
    finally:
        process.kill()
        process.wait()


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
        """Wait until that page's title is there, the script stands still, and all that it made has been drawn."""
        self.expect(self.page.locator("h1").first).to_have_text(title or re.compile("."))
        self.page.locator(IDLE).wait_for()
        self.expect(self.page.get_by_test_id("stSkeleton")).to_have_count(0)  # parts whose code is still on its way

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
        """Click on the page's button, and wait until what was asked for is drawn; there may be pictures before."""
        self.button_that_starts().click()
        self.expect(self.button_that_starts()).to_be_disabled()  # it is under way, or there
        self.settled()
        self.expect(self.page.get_by_test_id("stProgress")).to_have_count(0)
        self.settled()
        self.page.locator(PLOT).first.wait_for()

    def upload(self, file: Path, told: str) -> None:
        """Choose a file, again where its box was just drawn anew, until the page says what it is to say of it."""
        for _ in range(4):
            self.page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
            try:
                self.expect(self.main()).to_contain_text(told, timeout=PATIENCE_MS // 4)
            except AssertionError:
                continue
            return
        raise AssertionError(f"{file.name} never came: {self.main().inner_text()}")

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
        for doubled in range(6):  # the time that is left for it to be drawn
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
                self.expect(told).to_be_visible(timeout=5000 << doubled)
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

    def fits(self) -> bool:
        """Whether nothing is cut at this width, once figures have found their own."""
        wide = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('[data-testid=stMain]'))"
        return until(lambda: int(self.page.evaluate(wide)) <= 0)

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
