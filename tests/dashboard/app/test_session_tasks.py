"""A session that is gone leaves its tasks; one that comes again in time goes on."""

from __future__ import annotations

import threading
import time

import pytest

from hbmtwin.dashboard.app.session_tasks import SessionTasks
from hbmtwin.dashboard.app.workers import Task


class Left:
    """Of the workers, what a session needs."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.told = threading.Event()

    def leave(self, task: Task) -> None:
        self.tasks.append(task)
        self.told.set()


@pytest.fixture
def left() -> Left:
    return Left()


def test_a_session_that_is_gone_leaves_its_tasks_once(left: Left) -> None:
    tasks = SessionTasks(left, grace_s=0.01)
    one, other = Task("a", {}), Task("b", {})
    tasks["run"], tasks["cures"] = one, other
    tasks.came()
    tasks.went()
    tasks.went()
    assert left.told.wait(60)
    for _ in range(1200):
        if len(left.tasks) == 2:
            break
        time.sleep(0.05)
    assert left.tasks == [one, other]
    assert not tasks


def test_one_that_comes_again_in_time_keeps_them(left: Left) -> None:
    tasks = SessionTasks(left, grace_s=0.05)
    tasks["run"] = Task("a", {})
    tasks.went()
    tasks.came()
    time.sleep(0.2)
    assert left.tasks == []
    assert list(tasks) == ["run"]
    tasks.went()
    assert left.told.wait(60)
