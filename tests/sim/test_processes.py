"""Workers end with their kill, and nothing is printed of the calls that are lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from hbmtwin.sim.processes import kill_workers

from ..patience import PATIENCE_S, until


def started() -> tuple[Generator[None, None, None], list[int]]:
    """Two workers with more to do than they will: what joblib yields, and who they are."""
    coming = Parallel(n_jobs=2, return_as="generator_unordered", batch_size=1)(
        delayed(time.sleep)(nap) for nap in (0.0, 0.1, *[60.0] * 20)
    )
    next(coming)
    return coming, list(get_reusable_executor(max_workers=2, reuse=True)._processes)


def gone(pid: int) -> bool:
    return until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Exceptions of threads that would have been printed."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    return seen


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_workers_are_gone_after_their_kill(told: list[type[BaseException]]) -> None:
    coming, workers = started()
    assert len(workers) == 2
    kill_workers(coming)
    assert all(gone(pid) for pid in workers)
    assert told == []


def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loky forget its calls as it does, with one of them still among those to be sent."""
    from joblib.externals.loky.process_executor import _ExecutorManagerThread as Manager

    forget = Manager.flag_executor_shutting_down

    def forgets_one_too_many(self: Any) -> None:
        forget(self)
        self.work_ids_queue.put(10)

    monkeypatch.setattr(Manager, "flag_executor_shutting_down", forgets_one_too_many)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_call_that_was_about_to_be_sent_is_not_mentioned(
    told: list[type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    race(monkeypatch)
    coming, workers = started()
    kill_workers(coming)
    assert all(gone(pid) for pid in workers)
    assert told == []
    others = get_reusable_executor(max_workers=1)
    others.submit(time.sleep, 0.0).result(timeout=PATIENCE_S)
    monkeypatch.undo()
    get_reusable_executor(reuse=True).shutdown(wait=True)


def test_the_race_prints_where_it_is_not_kept_quiet(
    told: list[type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    race(monkeypatch)
    coming, _ = started()
    get_reusable_executor(max_workers=2, reuse=True).shutdown(wait=True, kill_workers=True)
    assert told == [KeyError]
    monkeypatch.undo()
    kill_workers(coming)


def test_other_threads_are_heard_while_workers_are_killed(told: list[type[BaseException]]) -> None:
    def fails() -> Generator[int, None, None]:
        try:
            yield 0
        except KeyboardInterrupt:
            other = threading.Thread(target=lambda: {}["nothing"])
            other.start()
            other.join()
            raise

    coming = fails()
    next(coming)
    kill_workers(coming)
    assert told == [KeyError]
