"""The same sweep on a local Ray cluster, one of whose workers is killed in mid-run. Skipped where Ray is not installed
(``pip install ".[ray]"``; scripts/test installs it with HBMTWIN_TEST_RAY=1)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..patience import PATIENCE_S, until

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc"),
]
GRID = ("--grid", "kv_cache.preset=paged,doubling", "workload.num_prompts=1:5:1", "--seeds", "20")
ON_RAY = ("--executor", "ray", "--jobs", "3")
RUNS = 200


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, by their command lines."""
    parents: dict[int, tuple[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                command = stat.with_name("cmdline").read_text().replace("\0", " ")
                parents[int(stat.parent.name)] = int(parent), command
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {pid}
    while more := {child for child, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return {child: parents[child][1] for child in found - {pid}}


def test_a_worker_that_is_killed_in_mid_run_loses_nothing(tiny: Path, shell: Callable[..., object]) -> None:
    runs = tiny.parent / "out" / "runs"
    server = subprocess.Popen(
        [sys.executable, "-m", "hbmtwin", "sweep", tiny.name, *GRID, "--out", "out", "--json", *ON_RAY],
        cwd=tiny.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: server.poll() is not None or len(list(runs.glob("*.parquet"))) >= 50)
        assert server.poll() is None, server.communicate()
        there = descendants(server.pid)
        actors = [pid for pid, command in there.items() if command.startswith("ray::PoolActor")]
        assert len(actors) == 3
        early = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.parquet")}
        assert 50 <= len(early) < RUNS
        os.kill(actors[1], signal.SIGKILL)
        out, err = server.communicate(timeout=2 * PATIENCE_S)
    finally:
        server.kill()
    assert server.returncode == 0, err.decode()
    assert "note: a worker died; " in err.decode()
    told = json.loads(out)  # nothing of Ray's is on stdout
    assert told["outcomes"] == {"held": RUNS}
    after = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.parquet")}
    assert len(after) == RUNS
    assert early.items() <= after.items()
    assert until(lambda: not [pid for pid in there if Path(f"/proc/{pid}").exists()])
    assert shell("sweep", tiny.name, *GRID, "--out", "local", "--jobs", 1).code == 0
    for name in ("runs.parquet", "runs.csv", "sweep.json", "report.html"):
        assert (tiny.parent / "out" / name).read_bytes() == (tiny.parent / "local" / name).read_bytes()


def test_a_sigterm_is_told_as_without_ray(tiny: Path) -> None:
    runs = tiny.parent / "out" / "runs"
    server = subprocess.Popen(
        [sys.executable, "-m", "hbmtwin", "sweep", tiny.name, *GRID, "--out", "out", *ON_RAY],
        cwd=tiny.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: server.poll() is not None or len(list(runs.glob("*.parquet"))) >= 5)
        server.terminate()
        out, err = server.communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
    assert server.returncode == 143
    assert out == b""
    # no stack of Ray's; where runs take long it is told how long the others will
    first, second = (line for line in err.decode().splitlines() if not line.startswith("note: about "))
    assert first.startswith("note: 10 combinations x 20 seeds")
    assert second.endswith(" runs are stored in out; the same command goes on from there")
