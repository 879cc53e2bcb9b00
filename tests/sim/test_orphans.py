"""Workers whose parent is killed end by themselves, in the midst of their runs: after SIGKILL nobody cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..patience import alive, until, worked_s

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
LOKY = "popen_loky_posix"
"""In the command line of a worker of joblib's."""
TO_IMPORT_S = 3.0
"""Of a core: more than the simulator takes to be imported."""
ENDLESS = ("--set", "workload.num_prompts=900000")
APP = """
import sys, time
from hbmtwin.dashboard.app.workers import Workers
workers = Workers(1)
out = {name: f"{sys.argv[1]}/{name}" for name in ("paged", "doubling")}
settings = ["workload.num_prompts=900000"]
job = {"verb": "compare", "settings": settings, "policies": list(out), "variants": {}, "out": out}
task = workers.start("a", job)
print(task._process.pid, flush=True)
time.sleep(3600)
"""
"""A dashboard as far as its jobs go; a worker of it is a session of its own."""


@contextmanager
def running(*command: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, of which nothing is left."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        clean(process.pid)
        process.communicate()


def clean(session: int) -> None:
    for pid in alive(session):
        os.kill(pid, signal.SIGKILL)


def at_work(session: int) -> bool:
    """Whether both workers are there, and one has come far into its run; the other may have done its own."""
    workers = [pid for pid, command in alive(session).items() if LOKY in command]
    return len(workers) == 2 and max(map(worked_s, workers)) > TO_IMPORT_S


@pytest.mark.parametrize(
    "verb",
    [
        ("compare", "--policies", "paged,doubling"),
        ("sweep", "--grid", "kv_cache.preset=paged,doubling", "--out", "out"),
    ],
)
def test_workers_of_a_command_that_is_killed(verb: tuple[str, ...], tmp_path: Path) -> None:
    with running("-m", "hbmtwin", *verb, *ENDLESS, cwd=tmp_path) as parent:
        assert until(lambda: at_work(parent.pid))
        parent.kill()
        parent.wait()
        assert until(lambda: not alive(parent.pid))


def test_workers_of_a_dashboard_that_is_killed(tmp_path: Path) -> None:
    with running("-c", APP, str(tmp_path), cwd=tmp_path) as app:
        assert app.stdout is not None
        worker = int(app.stdout.readline())
        try:
            assert until(lambda: at_work(worker))
            app.kill()
            app.wait()
            assert until(lambda: not alive(worker))
        finally:
            clean(worker)
