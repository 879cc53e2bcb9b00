"""SIGTERM to an example leaves none of the processes behind among which it shares its runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S, alive, until

ROOT = Path(__file__).resolve().parents[2]


def workers_of(session: int) -> int:
    return sum("popen_loky" in command for command in alive(session).values())


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
        assert until(lambda: workers_of(running.pid) == 2)
        running.terminate()
        _, err = running.communicate(timeout=PATIENCE_S)
        # loky's tracker speaks of a semaphore whose removal the signal cut in two, and nothing is left of that either
        said = [line for line in err.splitlines() if b"resource_tracker" not in line and b"warnings.warn(" not in line]
        assert (running.returncode, said) == (128 + signal.SIGTERM, [])
        assert until(lambda: workers_of(running.pid) == 0)
    finally:
        if alive(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
