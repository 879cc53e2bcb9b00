"""What a process and its children cost: seconds of the processor, and the most memory that they held at one time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.02


class Cost(NamedTuple):
    """Of a process, its threads and all its descendants."""

    cpu_s: float
    """User and system time."""
    peak_bytes: int
    """Memory at the worst moment, pages that several of them share counted once."""


class Failed(RuntimeError):
    """A process that ended with an error; its text is what it said last."""


def run(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Cost:
    """Run *command* to its end, its output in *log*. Raise Failed. Needs Linux.

    Memory is looked at every 20 ms, as the sum of proportional set sizes; the largest process's own high-water mark,
    which the kernel keeps without gaps, is the least that can be true.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        peak = 0
        try:
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                peak = max(peak, _tree_bytes(process.pid))
                time.sleep(POLL_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
    _, status, usage = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise Failed(f"exit {process.returncode}: {said}")
    return Cost(usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss * 1024))


def _tree_bytes(pid: int) -> int:
    """Proportional set sizes of a process and its descendants; those that end meanwhile count as nothing."""
    held = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                held = int(line.split()[1]) * 1024
        children = [
            child for of in Path(f"/proc/{pid}/task").iterdir() for child in (of / "children").read_text().split()
        ]
    except OSError:
        return held
    return held + sum(_tree_bytes(int(child)) for child in children)
