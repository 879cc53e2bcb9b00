"""``scripts/validate_cuda``: the simulated CUDA allocator held to the real one, every number at every operation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hbmtwin.validation.allocator import Case, CaseReport, validate
from hbmtwin.validation.emulated import EmulatorUnavailable, NpuSettings
from hbmtwin.validation.emulated import build as shared
from hbmtwin.validation.emulated.cuda import CUDA_CONFIGURATIONS, CudaBackend, EmulatedCuda
from hbmtwin.validation.emulated.cuda.golden import GOLDEN, record
from hbmtwin.validation.emulated.cuda.traffic import cuda_trace
from hbmtwin.validation.traffic import Configuration

WHEELS = shared.cache_folder() / "cuda-wheels"
GOLDEN_OPERATIONS = 500
"""Of each configuration that is recorded."""


def main() -> int:
    """Compare and print; 0 if nothing differs, 1 if something does, 2 if the real side is not there."""
    options = _options()
    try:
        cuda = EmulatedCuda(options.wheels)
    except EmulatorUnavailable as absent:
        print(absent, file=sys.stderr)
        return 2
    if options.record is not None:
        chosen = [c for c in CUDA_CONFIGURATIONS if c.name in GOLDEN]
        record([_case(c, GOLDEN_OPERATIONS, options.seed) for c in chosen], cuda, options.record)
        return 0
    each = -(-options.operations // len(CUDA_CONFIGURATIONS))
    cases = [_case(c, each, options.seed) for c in CUDA_CONFIGURATIONS if options.only in ("", c.name)]
    report = validate(cases, CudaBackend(cuda), done=_tell)
    print(
        f"{report.against}: {len(report.cases)} configurations, {report.operations:,} operations of which "
        f"{sum(case.ooms for case in report.cases):,} out of memory, {report.numbers:,} numbers compared, "
        f"{len(report.differing)} configurations differ"
    )
    return 1 if report.differing else 0


def _case(c: Configuration, operations: int, seed: int) -> Case:
    return Case(c.name, cuda_trace(c, operations, seed), NpuSettings(c.capacity_bytes, alloc_conf=c.alloc_conf))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/validate_cuda", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder with the three wheel files (%(default)s)")
    parser.add_argument("--operations", type=int, default=300_000, help="of all configurations together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAME", help="a single configuration")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write what CI replays, and compare nothing")
    return parser.parse_args()


def _tell(case: CaseReport) -> None:
    print(f"{case.name}: {case.operations:,} operations, {case.ooms:,} out of memory, {case.counters} numbers each")
    if case.difference is None:
        return
    print(f"  differs at operation {case.difference.operation}: {case.difference.op}")
    for name, ours, real in case.difference.what:
        print(f"    {name}: ours {ours}, real {real}")


if __name__ == "__main__":
    sys.exit(main())
