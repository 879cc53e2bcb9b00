"""A sweep of 210 runs that is killed in the middle, or interrupted, goes on from there: nothing is lost or repeated."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

import hbmtwin

from ..patience import PATIENCE_S, alive, until

GRID = ("--grid", "kv_cache.preset=paged,doubling", "workload.num_prompts=1:5:1", "--seeds", "21", "--jobs", "2")
RUNS = 210
RESULTS = ("runs.parquet", "runs.csv", "sweep.json", "report.html")


@contextmanager
def sweeping(tiny: Path, out: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The sweep in a session of its own."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hbmtwin", "sweep", tiny.name, *GRID, "--out", out, *more],
        cwd=tiny.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield server
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def stored(out: Path) -> dict[str, tuple[int, int]]:
    """The runs of a directory, each with its inode and the time of its last change."""
    found = {}
    for path in (out / "runs").glob("*.parquet"):
        status = path.stat()
        found[path.name] = (status.st_ino, status.st_mtime_ns)
    return found


def wait_for(out: Path, runs: int, server: subprocess.Popen[bytes]) -> None:
    assert until(lambda: server.poll() is not None or len(stored(out)) >= runs), "too few runs landed"
    assert server.poll() is None, "the sweep ended before it could be stopped"


def results(out: Path) -> Mapping[str, bytes]:
    return {name: (out / name).read_bytes() for name in RESULTS}


def finish(tiny: Path, out: str, *more: str) -> str:
    """Run the sweep to its end; what it says on stderr."""
    with sweeping(tiny, out, *more) as server:
        _, err = server.communicate(timeout=2 * PATIENCE_S)
    assert server.returncode == 0, err.decode()
    return err.decode()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
def test_killed_and_interrupted_it_ends_as_if_it_had_not_been(tiny: Path) -> None:
    # `python -m` finds this copy first: whoever works on the simulator meanwhile gives its runs other names
    shutil.copytree(Path(hbmtwin.__file__).parent, tiny.parent / "hbmtwin")
    out = tiny.parent / "out"
    before: dict[str, tuple[int, int]] = {}
    for runs, stop in ((60, signal.SIGKILL), (130, signal.SIGINT)):
        with sweeping(tiny, "out") as server:
            wait_for(out, runs, server)
            os.killpg(server.pid, stop)  # all of its processes at once
            _, err = server.communicate(timeout=PATIENCE_S)
        until(lambda: not alive(server.pid))
        assert alive(server.pid) == {}
        there = stored(out)
        assert runs <= len(there) < RUNS
        assert before.items() <= there.items()  # what had run was not written again
        before = there
        if stop == signal.SIGINT:
            assert server.returncode == 130
            told = [  # one may have landed that the interrupt kept from being counted
                f"note: {count} runs are stored in out; the same command goes on from there"
                for count in (len(there), len(there) - 1)
            ]
            *_, note, last = err.decode().splitlines()
            assert note in told
            assert last == "interrupted"
    assert f"{RUNS} runs; {len(before)} of them are in out already" in finish(tiny, "out")
    after = stored(out)
    assert len(after) == RUNS
    assert before.items() <= after.items()
    table = pd.read_parquet(out / "runs.parquet")
    assert len(set(table["key"])) == len(table) == RUNS
    assert not list(out.rglob("*.partial"))
    finish(tiny, "undisturbed")
    assert results(out) == results(tiny.parent / "undisturbed")
