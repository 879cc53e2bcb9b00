"""How fast traffic is made and read, and in how much memory: each case in a process of its own.

    python benchmarks/traffic.py [REQUESTS [MEGABYTES [CASE ...]]]

REQUESTS (1,000,000) of each generator, as a server that answers at once would ask for them, and traces of MEGABYTES
(500), which are written to a temporary folder, opened (one pass, which checks them) and replayed (a second). Printed
are seconds of the clock, requests a second, and the peak of the process beside what it held before it began.
"""

from __future__ import annotations

import heapq
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from hbmtwin.api import Request, Scenario, Source
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads import Status, open_trace

ONE_TURN = ("session.turns=1",)
CASES: dict[str, tuple[str, ...]] = {
    "Poisson, one turn": ("workload.request_rate=10", *ONE_TURN),
    "gamma": ("workload.request_rate=10", "workload.burstiness=0.5", *ONE_TURN),
    "Weibull": ("workload.request_rate=10", "workload.arrival_pattern=weibull", "workload.cv=3", *ONE_TURN),
    "ramp": (
        *("workload.ramp_up_strategy=exponential", "workload.ramp_up_start_rps=1", "workload.ramp_up_end_rps=100"),
        *ONE_TURN,
    ),
    "rate curve": ("workload.request_rate=10", "workload.rate_curve=[[0, 1], [43200, 3], [86400, 1]]", *ONE_TURN),
    "built-in, sessions": (),
    "closed loop, 64 users": ("workload.users=64",),
    "groups of prefixes": (
        *("workload.request_rate=10", "workload.prefix_tokens=1000", "workload.prefix_count=100"),
        *ONE_TURN,
    ),
    "two clients": ("workload.clients=[{request_rate = 9}, {request_rate = 1, cv = 3}]", *ONE_TURN),
    "preset azure-conv": ("workload.preset=azure-conv",),
    "preset mooncake-conversation": ("workload.preset=mooncake-conversation",),
    "preset agentic": ("workload.preset=agentic",),
}
TRACES = ("Azure CSV, read twice", "CSV with sessions, read twice")


def requests_of(source: Source) -> Iterator[Request]:
    """In order of time, each turn a think time after the one before it was sent."""
    following: list[tuple[int, int, Request]] = []
    for first in source.open():
        while following and following[0][0] <= first.arrival_ns:
            yield from sent(source, heapq.heappop(following)[2], following)
        yield from sent(source, first, following)
    while following:
        yield from sent(source, heapq.heappop(following)[2], following)


def sent(source: Source, r: Request, following: list[tuple[int, int, Request]]) -> Iterator[Request]:
    """One request, answered at once; what follows it is put in the heap."""
    yield r
    if (after := source.next_turn(r, r.arrival_ns, Status.COMPLETED)) is not None:
        heapq.heappush(following, (after.arrival_ns, after.id, after))


def peak_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def write_trace(path: Path, megabytes: int, case: str) -> None:
    """A trace of that size, ten requests a second; sessions have four turns, 100 s apart."""
    first, written = 0, 0
    with path.open("w", encoding="ascii") as out:
        sessions = case == TRACES[1]
        out.write("arrival_s,prompt_tokens,output_tokens,session,turn\n" if sessions else AZURE)
        while written < megabytes * 10**6:
            rows = (session_row(n) if sessions else azure_row(n) for n in range(first, first + 100_000))
            written += out.write("".join(rows))
            first += 100_000


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
START = datetime(2024, 5, 10)


def azure_row(n: int) -> str:
    """Row *n* of an Azure trace."""
    time_s, tenth = divmod(n, 10)
    return f"{START + timedelta(seconds=time_s)}.{tenth}000000,{n % 4000 + 96},{n % 700 + 1}\n"


def session_row(n: int) -> str:
    """Row *n* of a trace in which 1,000 sessions are open at any time."""
    block, place = divmod(n, 4000)
    return f"{n // 10}.{n % 10},{n % 4000 + 96},{n % 700 + 1},{block * 1000 + place % 1000},{place // 1000}\n"


def measure(case: str, requests: int, trace: str) -> None:
    """Run one case and print its row."""
    before, start = peak_mib(), time.perf_counter()
    if case in TRACES:
        made = sum(1 for _ in requests_of(open_trace(trace)))
    else:
        made = sum(1 for _ in requests_of(source_of(scenario_of(case, requests))))
    seconds = time.perf_counter() - start
    print(f"{case:30}{made:12,}{seconds:9.2f}{made / seconds:12,.0f}{peak_mib():10.0f}{before:10.0f}", flush=True)


def scenario_of(case: str, requests: int) -> Scenario:
    """The scenario of a case."""
    return Scenario.load(overrides=[*CASES[case], f"workload.num_prompts={requests}"])


def main() -> None:
    """Measure every case that was asked for, or all."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    print(f"{'':30}{'requests':>12}{'clock s':>9}{'a second':>12}{'peak MiB':>10}{'before':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        for case in sys.argv[3:] or [*CASES, *TRACES]:
            if case in TRACES:
                write_trace(trace, megabytes, case)
            subprocess.run([sys.executable, __file__, "--case", case, str(requests), str(trace)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
