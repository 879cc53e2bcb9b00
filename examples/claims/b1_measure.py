"""Time B1's attention on this machine's CPU: ``python examples/claims/b1_measure.py`` writes ``b1_cpu.json``.

One layer of one rank of the 70B at tensor parallel size 4 (16 query heads on 2 of K and V, head_dim 128), one token of
one conversation, at the context of each turn; torch's flash kernel beside attention whose scores are written out.
"""

from __future__ import annotations

import json
import sys

from b1_turns import CPU_FILE, HEADS, contexts
from claim import HERE

from hbmtwin.validation.bench.kernels import run_bench
from hbmtwin.validation.bench.records import case

ROUNDS = 9


def main() -> int:
    """Measure both kinds, one after the other in each round, and write medians in microseconds."""
    cases = [case("decode", {"batch": 1, "context_tokens": tokens, **HEADS}) for tokens in contexts()]
    told = {}
    for kind in ("flash", "standard"):
        bench = run_bench(cases, "cpu", kind=kind, dtype="bfloat16", threads=1, rounds=ROUNDS)
        told[kind] = [round(point.median_ns / 1e3, 1) for point in bench.points]
    machine = f"{bench.device}, 1 thread, torch {bench.torch}, {bench.dtype}, {bench.clock} time"
    (HERE / CPU_FILE).write_text(json.dumps({"machine": machine, "contexts": contexts(), "us": told}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
