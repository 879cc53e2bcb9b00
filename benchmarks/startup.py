"""How long hbmtwin takes to start: ``import hbmtwin`` and ``hbmtwin --help`` in fresh processes, the median of seven.

    python benchmarks/startup.py [RUNS]

``python`` is the interpreter that does nothing, and a part of both. Targets: 0.3 s and 0.7 s of the clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

CASES: tuple[tuple[str, list[str], float | None], ...] = (
    ("python", ["-c", "pass"], None),
    ("import hbmtwin", ["-c", "import hbmtwin"], 0.3),
    ("hbmtwin --help", ["-m", "hbmtwin", "--help"], 0.7),
)


def once(arguments: list[str]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor, of one process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL)
    clock, after = time.perf_counter() - start, os.times()
    return clock, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print a row per case; the first run, which may have to compile, does not count."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"{'':16}{'clock s':>9}{'CPU s':>8}{'target':>8}   of {runs} runs: {'fastest':>8}{'slowest':>9}")
    for name, arguments, target in CASES:
        once(arguments)
        clocks, cpus = zip(*(once(arguments) for _ in range(runs)), strict=True)
        verdict = "" if target is None else f"{target:8.1f}"
        print(
            f"{name:16}{median(clocks):9.3f}{median(cpus):8.3f}{verdict:>8}{'':14}{min(clocks):8.3f}{max(clocks):9.3f}"
        )


if __name__ == "__main__":
    main()
