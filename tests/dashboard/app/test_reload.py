"""A page that is loaded anew in the midst of a run finds it, and shows its progress and then its result."""

from __future__ import annotations

import os
import re
import signal

from ...patience import until, worked_s
from .screen import Screen, Server, children

ENDLESS = ("workload.num_prompts=900000",)
LONG = ("workload.num_prompts=60000",)
"""Seven seconds of a core: its progress is seen."""


def test_its_run_goes_on_and_is_cancelled_there(screen: Screen, server: Server) -> None:
    screen.open("what-if", ENDLESS)
    screen.button_that_starts().click()
    screen.says(re.compile(r"of 900,000 requests"))
    at_work = max(children(server.process.pid), key=worked_s)
    screen.page.reload()
    screen.says(re.compile(r"of 900,000 requests"))
    screen.expect(screen.button_that_starts()).to_be_disabled()
    assert at_work in children(server.process.pid)
    screen.button("Cancel").click()
    screen.says("Turn a knob on the left")
    assert until(lambda: at_work not in children(server.process.pid))  # nobody else waited for it


def test_the_result_is_drawn_when_it_is_there(screen: Screen, server: Server) -> None:
    screen.open("what-if", LONG)
    screen.button_that_starts().click()
    screen.says(re.compile(r"of 60,000 requests"))
    at_work = max(children(server.process.pid), key=worked_s)
    os.kill(at_work, signal.SIGSTOP)  # so that it has not ended before the page is there again
    screen.page.reload()
    screen.says(re.compile(r"of 60,000 requests"))
    os.kill(at_work, signal.SIGCONT)
    screen.expect(screen.page.get_by_test_id("stMetric")).to_have_count(5)
