"""SIGTERM to an example leaves none of the processes behind among which it shares its runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def processes_of(group: int) -> list[str]:
    """Command lines of a process group, without those that only wait to be reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(its_group) == group:
                found.append(stat.with_name("cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def waited_for(group: int, least: int, most: int) -> int:
    """How many workers there are, once they are so many; after a minute however many."""
    workers = -1
    for _ in range(600):
        workers = sum("popen_loky" in command for command in processes_of(group))
        if least <= workers <= most:
            break
        time.sleep(0.1)
    return workers


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize("program", ["examples/cliffs", "examples/claims", "benchmarks/plan_coverage.py"])
def test_no_worker_outlives_it(program: str) -> None:
    running = subprocess.Popen(
        [sys.executable, str(ROOT / program)],
        env={**os.environ, "LOKY_MAX_CPU_COUNT": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert waited_for(running.pid, 2, 2) == 2
        running.terminate()
        _, err = running.communicate(timeout=60)
        assert (running.returncode, err) == (128 + signal.SIGTERM, b"")
        assert waited_for(running.pid, 0, 0) == 0
    finally:
        if processes_of(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
