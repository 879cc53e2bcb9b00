"""A session that is gone leaves its tasks; one that comes again in time goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hbmtwin.dashboard.app import session_tasks
from hbmtwin.dashboard.app.session_tasks import GRACE_S, Departed, SessionTasks
from hbmtwin.dashboard.app.workers import Task

from ...patience import PATIENCE_S, until


class Left:
    """Of the workers, what a session needs."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.told = threading.Event()

    def leave(self, task: Task) -> None:
        self.tasks.append(task)
        self.told.set()


class Timer:
    """One that rings when it is told to."""

    made: list[Timer]

    def __init__(self, after_s: float, ring: Callable[..., None], args: tuple[object, ...] = ()) -> None:
        self.after_s, self.ring, self.args, self.started, self.cancelled = after_s, ring, args, False, False
        Timer.made.append(self)

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def left() -> Left:
    return Left()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    Timer.made = []
    monkeypatch.setattr(session_tasks.threading, "Timer", Timer)
    return Timer.made


def test_a_session_that_is_gone_leaves_its_tasks_once(left: Left) -> None:
    tasks = SessionTasks(left, Departed(), grace_s=0.01)
    one, other = Task("a", {}), Task("b", {})
    tasks["run"], tasks["cures"] = one, other
    tasks.came()
    tasks.went()
    tasks.went()
    assert left.told.wait(PATIENCE_S)
    assert until(lambda: len(left.tasks) == 2)
    assert left.tasks == [one, other]
    assert not tasks


def test_one_that_comes_again_in_time_keeps_them(left: Left, timers: list[Timer]) -> None:
    tasks = SessionTasks(left, Departed())
    task = tasks["run"] = Task("a", {})
    tasks.went()
    tasks.came()
    (first,) = timers
    assert (first.after_s, first.started, first.cancelled) == (GRACE_S, True, True)
    first.ring(*first.args)  # it was about to: the session came at the last moment
    assert left.tasks == []
    assert list(tasks) == ["run"]
    tasks.went()
    first.ring(*first.args)  # and of that moment nothing is left: the grace begins anew
    assert left.tasks == []
    _, second = timers
    assert (second.after_s, second.started, second.cancelled) == (GRACE_S, True, False)
    second.ring(*second.args)
    assert left.tasks == [task]


def test_a_page_that_is_loaded_anew_takes_over_what_it_asked_for_before(left: Left, timers: list[Timer]) -> None:
    departed = Departed()
    before = SessionTasks(left, departed)
    run, other = before["run"], before["cures"] = Task("a", {}), Task("b", {})
    assert departed.take("run", "a") is None  # that session is there
    before.went()
    assert departed.take("run", "b") is None  # of other settings
    assert departed.take("cures", "a") is None
    assert departed.take("run", "a") is run
    assert departed.take("run", "a") is None  # nobody else gets it
    (timer,) = timers
    timer.ring(*timer.args)
    assert left.tasks == [other]
    assert departed.take("cures", "b") is None


def test_what_a_session_has_that_came_again_is_its_own(left: Left, timers: list[Timer]) -> None:
    departed = Departed()
    tasks = SessionTasks(left, departed)
    tasks["run"] = Task("a", {})
    tasks.went()
    tasks.came()
    assert departed.take("run", "a") is None
    assert list(tasks) == ["run"]
