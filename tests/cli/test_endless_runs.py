"""Runs that would never end, or not before the machine's memory did, are refused at once and by the key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.cli import simulate
from hbmtwin.cli.process import machine_memory_bytes

from ..patience import PATIENCE_S, until

Shell = Callable[..., Any]

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n},{100 + n % 9},5\n" for n in range(400))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--request-rate", "1e-300"), "raise workload.request_rate"),
        (
            ("--ramp-up-strategy=linear", "--ramp-up-start-rps=1e-300", "--ramp-up-end-rps=1e300"),
            "workload.ramp_up_sta",
        ),
        (("--set", "workload.model=model.toml", "--set", "workload.rate_scale=1e-300"), "rate_scale 1e-300: "),
        (("--set", "workload.clients=[{request_rate=1e-300}]"), "raise workload.clients.0.request_rate"),
        (
            ("--num-prompts", "100000000000000"),
            "workload.num_prompts: input should be less than or equal to 1000000000",
        ),
    ],
)
def test_requests_that_never_come_are_refused_by_their_key(
    shell: Shell, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    assert shell("workload", "learn", "trace.csv", "--out", "model.toml", "--no-check").code == 0
    begin = time.process_time()
    answer = shell("run", "--num-prompts", "3", *settings)
    assert answer.code in (1, 2)
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_more_rows_than_the_machine_holds_are_refused_before_the_first(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setattr(simulate, "machine_memory_bytes", lambda: 80_000_000)
    answer = shell(verb, "--num-prompts", "900000")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "error: workload.num_prompts: the rows of 900,000 requests take 0.1 GB or more, and this machine has 0.1 GB; "
        "take at most 800,000\n"
    )
    (tmp_path / "trace.csv").write_text(TRACE)
    assert shell("run", "--num-prompts", "900000", "--set", "workload.trace=trace.csv").code == 0  # it has 400


def test_this_machine_has_memory() -> None:
    found = machine_memory_bytes()
    assert found is None or found > 2**28


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["made.csv", "made.jsonl.gz", "made.parquet"])
def test_a_signal_leaves_no_partial_file(tmp_path: Path, number: signal.Signals, name: str) -> None:
    """SIGKILL and SIGALRM cannot be helped."""
    (tmp_path / "trace.csv").write_text(TRACE)
    program = [sys.executable, "-m", "hbmtwin", "workload"]
    subprocess.run(
        [*program, "learn", "trace.csv", "--out", "model.toml"], cwd=tmp_path, check=True, capture_output=True
    )
    before = sorted(tmp_path.iterdir())
    endless = subprocess.Popen(
        [*program, "generate", "model.toml", "--out", name, "--num-prompts", "1000000000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: endless.poll() is not None or any(path.stat().st_size for path in tmp_path.glob(".*.partial")))
        assert len(list(tmp_path.iterdir())) == len(before) + 1, "it is being written"
        os.kill(endless.pid, number)
        _, err = endless.communicate(timeout=PATIENCE_S)
    finally:
        endless.kill()
    assert (endless.returncode, err) == ((143, b"") if number == signal.SIGTERM else (130, b"interrupted\n"))
    assert sorted(tmp_path.iterdir()) == before
