"""How much faster a sweep is in two processes than in one, here and on a local Ray cluster.

    python benchmarks/sweep.py [--runs 240] [--ray]

The runs are those of docs/sweeps.md, a tenth of a second each. Of each way: wall time, and CPU time of all its
processes that have ended (Ray's workers are not among them). A quiet machine is wanted: what else runs shows in
the wall times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCENARIO = Path(__file__).resolve().parents[1] / "examples" / "sweeps" / "chat.toml"
GRID = ("--grid", "kv_cache.preset=paged,doubling", "workload.users=4:60:8")


def timed(out: Path, seeds: int, *how: str) -> tuple[float, float]:
    """Wall and CPU seconds of one sweep, its children among them."""
    before, begin = os.times(), time.monotonic()
    command = [sys.executable, "-m", "hbmtwin", "sweep", str(SCENARIO), *GRID, "--seeds", str(seeds), "--out", str(out)]
    subprocess.run([*command, *how], check=True, capture_output=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begin, cpu_s


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=240, help="runs of each way, a multiple of 16")
    parser.add_argument("--ray", action="store_true", help="on a local Ray cluster too")
    options = parser.parse_args()
    ways = [("--jobs", "1"), ("--jobs", "2")] + [("--jobs", "2", "--executor", "ray")] * options.ray
    seeds = max(1, options.runs // 16)
    one_s = None
    with tempfile.TemporaryDirectory() as folder:
        print(f"{f'{16 * seeds} runs':<26}  wall s    CPU s   runs/s   speed-up")
        for way in ways:
            out = Path(folder, "-".join(way))
            wall_s, cpu_s = timed(out, seeds, *way)
            one_s = one_s or wall_s
            rate = 16 * seeds / wall_s
            print(f"{' '.join(way):<26}{wall_s:8.1f} {cpu_s:8.1f} {rate:8.1f} {one_s / wall_s:10.2f}", flush=True)


if __name__ == "__main__":
    main()
