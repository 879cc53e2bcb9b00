"""Ctrl-C in mid-run: exit code 130, and nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_ctrl_c_leaves_nothing_behind(verb: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace" / "endless.csv"
    trace.parent.mkdir()
    rows = "".join(f"{i / 2},100,{200 + i % 7}\n" for i in range(150_000))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}", encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "hbmtwin", verb, "--set", f"workload.trace={trace}", "--out", "result"],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        time.sleep(3)
        assert server.poll() is None, "the run ended before it could be interrupted"
        os.killpg(server.pid, signal.SIGINT)  # a terminal interrupts workers as well
        out, err = server.communicate(timeout=30)
    finally:
        server.kill()
    assert server.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert list(work.iterdir()) == []
