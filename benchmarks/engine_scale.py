"""How the engine fares at scale: requests a CPU second, peak memory, and events, one fresh process a case.

    python benchmarks/engine_scale.py [REQUESTS] [--case NAME ...] [--runs N] [--profile NAME]

Llama-2-7B on an Ascend 910B2 under paged, everything recorded but single steps. Lengths are lognormal, cut
so that every request fits the model:

    base        Poisson arrivals, about 500 tokens in and 200 out, some 60 requests in flight: what the target is for
    many        256 users, the next question at once, in memory for all of them
    preemption  60 users, the next question at once, in memory for some 45
    sessions    base in conversations of four turns of 200 in and 200 out, whose history the prefix cache finds again
    outputs     events of SimPy a request at 100 and at 400 tokens out, the same Poisson arrivals: leaps make them equal

``in flight`` is the mean over the run, by Little's law. ``columns`` is the memory of the result's tables, which grow
with the requests by their nature; ``beyond`` is what the run took at its peak above the start and above these.
Comparing two numbers of requests shows what else grows.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

import simpy

from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

EVENTS_REQUESTS = 10_000
"""Events a request are counted apart from the time, over so many at most."""
MIB = 1 << 20


def lengths(output: int) -> tuple[str, str]:
    """Prompts of about 500 tokens, answers of about *output*."""
    return (
        'workload.prompt_tokens={distribution="lognormal",mean=500,sigma=0.5,max=2000}',
        f'workload.output_tokens={{distribution="lognormal",mean={output},sigma=0.5,max=2000}}',
    )


COMMON = ("device.name=ascend-910b2", "workload.system_prompt_tokens=0")
SINGLE = (*COMMON, "session.turns=1")
AT_ONCE = ("session.think_time_s=0.0",)
CASES: dict[str, tuple[str, ...]] = {
    "base": (*SINGLE, *lengths(200), "workload.request_rate=6.5"),
    "many": (*SINGLE, *lengths(200), "workload.users=256", *AT_ONCE, "device.memory_bytes=160GiB"),
    "preemption": (*SINGLE, *lengths(200), "workload.users=60", *AT_ONCE, "device.memory_bytes=29GiB"),
    "sessions": (
        *COMMON,
        'workload.prompt_tokens={distribution="lognormal",mean=200,sigma=0.5,max=500}',
        'workload.output_tokens={distribution="lognormal",mean=200,sigma=0.5,max=500}',
        "session.turns=4",
        "session.think_time_s=10.0",
        "session.between_turns=prefix_cache",
        "kv_cache.enable_prefix_caching=true",
        "workload.request_rate=1.5",
        "device.memory_bytes=120GiB",
    ),
    "outputs100": (*SINGLE, *lengths(100), "workload.request_rate=3.0"),
    "outputs400": (*SINGLE, *lengths(400), "workload.request_rate=3.0"),
}
TIMED = ("base", "many", "preemption", "sessions")


def twin_of(case: str, requests: int) -> Twin:
    """A run that has not begun."""
    overrides = [*CASES[case], f"workload.num_prompts={requests}"]
    return Twin(Scenario.load(preset="paged", overrides=overrides))


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def events_a_request(case: str, requests: int) -> float:
    """Events that SimPy was given, over requests."""
    plain, count = simpy.Environment.schedule, 0

    def counting(env: simpy.Environment, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        plain(env, *args, **kwargs)

    with patch.object(simpy.Environment, "schedule", counting):
        twin_of(case, requests).run()
    return count / requests


def columns_bytes(result: Result) -> int:
    """Memory of the tables; a column of one value has that value only."""
    columns = [column for frame in (result.timeline, result.requests) for _, column in frame.items()]
    return sum(0 if column.to_numpy().strides == (0,) else int(column.memory_usage(deep=True)) for column in columns)


def measured(case: str, requests: int) -> dict[str, float]:
    """Simulate once in this process."""
    twin = twin_of(case, requests)
    before = peak_bytes()
    start = time.process_time()
    result = twin.run()
    seconds = time.process_time() - start
    peak = peak_bytes()
    summary, rows = result.summary, result.requests
    done = summary["requests_completed"]
    assert done == requests, f"{case}: {done} of {requests} requests were completed"
    lasted = (rows["end_ns"] - rows["arrival_ns"]).sum()
    return {
        "seconds": seconds,
        "in_flight": float(lasted / rows["end_ns"].max()),
        "preemptions": summary["preemptions"] / requests,
        "found": float(rows["cached_tokens"].sum() / rows["prompt_tokens"].sum()),
        "rows": len(result.timeline),
        "steps": twin.recorder.step / requests,
        "before": before,
        "peak": peak,
        "columns": columns_bytes(result),
    }


def in_fresh_process(case: str, requests: int, what: str) -> dict[str, float]:
    """Measure in a process that has done nothing else."""
    command = [sys.executable, __file__, str(requests), "--child", what, "--case", case]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def profile(case: str, requests: int) -> None:
    """Where the time goes."""
    twin = twin_of(case, requests)
    profiler = cProfile.Profile()
    profiler.runcall(twin.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", nargs="?", type=int, default=20_000)
    parser.add_argument("--case", action="append", choices=[*CASES, "outputs"], help="only these; default: all")
    parser.add_argument("--runs", type=int, default=1, help="the best of so many")
    parser.add_argument("--profile", choices=list(CASES), help="tell where this case spends its time, and stop")
    parser.add_argument("--child", choices=["time", "events"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        profile(args.profile, args.requests)
        return
    if args.child:
        case = args.case[0]
        figures = (
            measured(case, args.requests)
            if args.child == "time"
            else {"events": events_a_request(case, min(args.requests, EVENTS_REQUESTS))}
        )
        print(json.dumps(figures))
        return
    wanted = args.case or [*TIMED, "outputs"]
    print(
        f"{'':12}{'requests':>10}{'CPU s':>9}{'per CPU s':>11}{'in flight':>10}{'preempted':>10}{'found':>7}"
        f"{'steps':>7}{'events':>8}{'rows':>9}{'peak MiB':>10}{'columns':>9}{'beyond':>8}"
    )
    for case in [name for name in CASES if name in wanted and not name.startswith("outputs")]:
        runs = [in_fresh_process(case, args.requests, "time") for _ in range(args.runs)]
        best = min(runs, key=lambda run: run["seconds"])
        events = in_fresh_process(case, args.requests, "events")["events"]
        beyond = best["peak"] - best["before"] - best["columns"]
        print(
            f"{case:12}{args.requests:10,}{best['seconds']:9.2f}{args.requests / best['seconds']:11,.0f}"
            f"{best['in_flight']:10.0f}{best['preemptions']:10.2f}{best['found']:7.0%}{best['steps']:7.1f}"
            f"{events:8.2f}{best['rows']:9,.0f}{best['peak'] / MIB:10,.0f}{best['columns'] / MIB:9,.0f}"
            f"{beyond / MIB:8,.0f}",
            flush=True,
        )
    if "outputs" in wanted or any(name.startswith("outputs") for name in wanted):
        for case in ("outputs100", "outputs400"):
            events = in_fresh_process(case, args.requests, "events")["events"]
            print(f"mean output {case.removeprefix('outputs')} tokens: {events:.3f} events of SimPy a request")


if __name__ == "__main__":
    main()
