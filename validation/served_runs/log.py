"""The same of a log as it was pasted: vLLM's line of every ten seconds.

::

    Avg prompt throughput: 862.3 tokens/s, Avg generation throughput: 2176.0 tokens/s, Running: 128 reqs,
    Waiting: 172 reqs, GPU KV cache usage: 37.4%, Prefix cache hit rate: 0.0%

Rates are means since the line before, counts are snapshots, as in a time series. The lines are read by what ``explain``
reads them by, so that colours, clocks, containers and broken lines are dealt with there. Several engines of a
data-parallel server write a line each: those are added up, one of each in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hbmtwin.sim.explain.boot_log import read as read_boot
from hbmtwin.sim.explain.clean import clean
from hbmtwin.sim.explain.decode import decode
from hbmtwin.sim.explain.engine_errors import read as read_engine
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.validation.served_runs.served_run import Interval, ServedRunError

LOG_SECONDS = 10.0
"""VLLM_LOG_STATS_INTERVAL's default."""
NEEDED = ("prompt_tokens_per_s", "output_tokens_per_s", "running")


def read_engine_log(
    path: Path, *, engines: int = 1, seconds: float = LOG_SECONDS
) -> tuple[tuple[Interval, ...], int | None]:
    """Intervals of a log, and the tokens that its KV cache holds where the start is in it too.

    O(bytes). Raise ServedRunError for a file without such lines, or one that cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ServedRunError(f"{path}: {error}") from None
    lines = clean(decode(data))
    told = [f for f in read_engine(lines) if f.kind == "metrics" and all(key in f.numbers for key in NEEDED)]
    told.sort(key=lambda finding: finding.line)
    if len(told) < engines:
        raise ServedRunError(
            f"{path}: no line 'Avg prompt throughput: .., Avg generation throughput: .., Running: ..' in it; give a "
            f"log of vLLM at level INFO with log stats on, or a directory with a timeseries.csv"
        )
    found = [
        _added(told[at : at + engines], seconds, (at // engines + 1) * seconds)
        for at in range(0, len(told) - engines + 1, engines)
    ]
    sizes = [round(f.numbers["kv_tokens"]) for f in read_boot(lines) if f.numbers.get("kv_tokens")]
    return tuple(found), sum(sizes[:engines]) if sizes else None


def _added(of_engines: Sequence[Finding], seconds: float, end_s: float) -> Interval:
    def total(key: str) -> float:
        return sum(float(finding.numbers.get(key, 0)) for finding in of_engines)

    return Interval(
        end_s,
        seconds,
        total("prompt_tokens_per_s") * seconds,
        total("output_tokens_per_s") * seconds,
        total("running"),
        total("waiting"),
        total("kv_usage") / len(of_engines),
    )
