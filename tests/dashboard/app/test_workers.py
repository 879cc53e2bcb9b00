"""Jobs in processes beside the app: done, shared, cancelled, failed, killed; and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hbmtwin.api import Result, Scenario, run
from hbmtwin.dashboard.app.workers import MOST_WAITING, UNMENTIONED, WORKER, Task, TooManyJobs, Workers

from ... import patience
from ...patience import alive

SMALL = ["workload.num_prompts=5", "workload.request_rate=inf"]
ENDLESS = ["workload.num_prompts=900000"]


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(1)
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    assert patience.until(true), "it never came"


def job(settings: list[str], out: Path) -> dict[str, object]:
    return {"verb": "run", "settings": settings, "out": str(out)}


def test_a_job_is_the_run_of_the_command_line(workers: Workers, tmp_path: Path) -> None:
    task = workers.start("a", job(SMALL, tmp_path / "a"))
    until(lambda: task.ended)
    assert (task.state, task.message) == ("done", "")
    assert Result.load(tmp_path / "a").summary == run(Scenario.load(overrides=SMALL)).summary


def test_a_process_does_one_job_after_another_as_if_it_were_new(workers: Workers, tmp_path: Path) -> None:
    other = [*SMALL, "kv_cache.preset=doubling"]
    tasks = []
    for name, settings in (("a", SMALL), ("b", other), ("c", ["workload.num_promts=5"]), ("d", SMALL)):
        tasks.append(workers.start(name, job(settings, tmp_path / name)))
        workers._warm_up()  # as happens a while after the last job, if this one takes as long
        until(lambda: tasks[-1].ended)
    assert [task.state for task in tasks] == ["done", "done", "failed", "done"]
    assert len({task._process for task in tasks}) == 1
    assert Result.load(tmp_path / "b").summary == run(Scenario.load(overrides=other)).summary
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "d" / name).read_bytes() for name in files)


def test_a_process_that_has_started_others_ends_and_gives_all_back(workers: Workers, tmp_path: Path) -> None:
    out = {"paged": str(tmp_path / "paged")}
    compare = {"verb": "compare", "settings": SMALL, "policies": ["paged"], "variants": {}, "out": out}
    first = workers.start("a", compare)
    until(lambda: first.ended)
    assert (first.state, first.message) == ("done", "")
    until(lambda: first._process is not None and first._process.poll() is not None)
    second = workers.start("b", job(SMALL, tmp_path / "b"))
    until(lambda: second.ended)
    assert second.state == "done"


def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_not_missed(workers: Workers, tmp_path: Path) -> None:
    first = workers.start("a", job(SMALL, tmp_path / "a"))
    until(lambda: first.ended)
    assert first._process is not None
    os.kill(first._process.pid, signal.SIGKILL)
    until(lambda: first._process is not None and first._process.poll() is not None)
    second = workers.start("b", job(SMALL, tmp_path / "b"))
    until(lambda: second.ended)
    assert second.state == "done"


def test_a_file_that_lies_where_the_app_was_started_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simpy.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    made = Workers(1)
    task = made.start("a", job(SMALL, tmp_path / "a"))
    until(lambda: task.ended)
    made.close()
    assert (task.state, task.message) == ("done", "")


def test_the_same_job_is_shared_and_ends_when_the_last_leaves(workers: Workers, tmp_path: Path) -> None:
    first, second = (workers.start("a", job(ENDLESS, tmp_path / "a")) for _ in range(2))
    assert first is second
    until(lambda: first.state == "running" and bool(first.progress))
    assert first.progress["completed"] < first.progress["total"] == 900_000
    workers.leave(first)
    assert first.state == "running"
    workers.leave(second)
    assert first.state == "cancelled"
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("said", [UNMENTIONED, "default"], ids=["as it is", "were it not kept quiet"])
def test_a_comparison_that_is_left_in_the_midst_leaves_nothing_and_is_not_mentioned(
    tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hbmtwin.dashboard.app.workers.UNMENTIONED", said)
    workers = Workers(1)
    policies = ["paged", "doubling"]
    out = {name: str(tmp_path / name) for name in policies}
    compare = {"verb": "compare", "settings": ENDLESS, "policies": policies, "variants": {}, "out": out}
    task = workers.start("a", compare)
    until(lambda: task._process is not None)
    assert task._process is not None
    session = task._process.pid
    until(lambda: sum("LokyProcess" in line and patience.worked_s(pid) > 1 for pid, line in alive(session).items()) > 1)
    workers.leave(task)
    until(lambda: not alive(session))
    workers.close()
    left = [
        path.name for path in Path("/dev/shm").iterdir() if re.search(rf"loky-{session}-|folder_{session}_", path.name)
    ]
    assert left == []
    assert ("leaked" in capfd.readouterr().err) == (said != UNMENTIONED)


def test_those_that_wait_have_their_turn(workers: Workers, tmp_path: Path) -> None:
    long = workers.start("a", job(ENDLESS, tmp_path / "a"))
    waits, later = (workers.start(name, job(SMALL, tmp_path / name)) for name in "bc")
    assert (waits.state, workers.waiting_before(waits), workers.waiting_before(later)) == ("waiting", 0, 1)
    workers.leave(later)
    assert later.state == "cancelled"
    workers.leave(long)
    until(lambda: waits.ended)
    assert waits.state == "done"


def test_what_the_user_got_wrong_is_told_as_the_command_line_tells_it(workers: Workers, tmp_path: Path) -> None:
    task = workers.start("a", job(["workload.num_promts=5"], tmp_path / "a"))
    until(lambda: task.ended)
    assert (task.state, task.message) == (
        "failed",
        "workload.num_promts: unknown key; did you mean 'workload.num_prompts'?",
    )


def test_more_requests_than_a_machine_holds_are_refused_at_once(workers: Workers, tmp_path: Path) -> None:
    task = workers.start("a", job(["workload.num_prompts=1000000000"], tmp_path / "a"))
    until(lambda: task.ended)
    assert task.message == (
        "workload.num_prompts: 1,000,000,000 is more than the 10,000,000 of a run here; ask for fewer"
    )
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_killed_loses_its_job_only(workers: Workers, tmp_path: Path) -> None:
    task = workers.start("a", job(ENDLESS, tmp_path / "a"))
    until(lambda: bool(task.progress))
    assert task._process is not None
    os.kill(task._process.pid, signal.SIGKILL)
    until(lambda: task.ended)
    assert task.state == "lost"
    again = workers.start("b", job(SMALL, tmp_path / "b"))
    until(lambda: again.ended)
    assert again.state == "done"


def test_a_script_that_starts_without_end_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers.start("long", job(ENDLESS, tmp_path / "a"))
    for number in range(MOST_WAITING):
        workers.start(f"{number}", job(SMALL, tmp_path / f"{number}"))
    with pytest.raises(TooManyJobs, match="64 runs wait already"):
        workers.start("one more", job(SMALL, tmp_path / "more"))


def test_nothing_is_left_when_the_app_ends(tmp_path: Path) -> None:
    made = Workers(2)
    tasks: list[Task] = [made.start(name, job(ENDLESS, tmp_path / name)) for name in "ab"]
    until(lambda: all(task.progress for task in tasks))
    processes = [task._process for task in tasks]
    made.close()
    assert all(process is not None and process.poll() is not None for process in processes)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_ends_with_the_app_that_died(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert json.loads(worker.stdout.readline()) == {"ready": True}
    worker.stdin.write(json.dumps(job(ENDLESS, tmp_path / "a")) + "\n")
    worker.stdin.close()  # as the system does for an app that died
    assert worker.wait(timeout=patience.PATIENCE_S) == 1
    worker.stdout.close()
