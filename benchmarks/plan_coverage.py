"""How often the interval that ``hbmtwin plan`` states holds the answer: forty sets of seeds against a long reference.

Run ``python benchmarks/plan_coverage.py [--sets 40] [--jobs -1]``; about ten minutes on two cores.

The server is one whose edge is wide, so that few seeds really leave it open: Llama-2-7B on one ascend-910b4, doubling
growth, histories kept between four turns. Each set asks for the users at which 80 % of runs hold, with seeds of its
own. The reference counts ten times as many seeds at every value near the edge; its answer is the last value at which
80 % of them held. Stated are 95 %: at least 35 of 40 must hold it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from joblib import Parallel, delayed

from hbmtwin import CapacityRuns, Scenario
from hbmtwin.sim.capacity.loads import Loads
from hbmtwin.sim.capacity.plan_capacity import PlanQuestion, plan_capacity, rule_of
from hbmtwin.sim.capacity.plan_targets import target_of
from hbmtwin.sim.capacity.promise import Promise

QUESTION = PlanQuestion(target="users", survive=0.8, explain=False)
TIMES = 10
NEAR = range(17, 24)
"""Users among which the edge lies: below all runs hold, beyond few."""
KEYS: dict[str, Any] = {
    "model.name": "llama-2-7b",
    "device.name": "ascend-910b4",
    "engine.max_model_len": 4096,
    "kv_cache.policy": "contiguous",
    "kv_cache.growth": "doubling",
    "kv_cache.tensors": "merged",
    "kv_cache.copy_scope": "step",
    "memory.oom": "stop",
    "workload.users": 10,
    "workload.num_prompts": 40,
    "workload.prompt_tokens": {"distribution": "uniform", "low": 30, "high": 50},
    "workload.output_tokens": {"distribution": "uniform", "low": 150, "high": 300},
    "workload.system_prompt_tokens": 0,
    "session.turns": 4,
    "session.think_time_s": 2.0,
    "session.between_turns": "keep",
}


class Trial(NamedTuple):
    """What one set of seeds answered."""

    answer: int | None
    first_failing: int | None
    runs: int
    wall_s: float


def scenario(seed: int) -> Scenario:
    """The server, with that first seed."""
    return Scenario.of({**KEYS, "seed": seed})


def trial(number: int) -> Trial:
    """Plan with the seeds of that set, which no other set and not the reference has."""
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        plan = plan_capacity(scenario((number + 1) * 10**6), QUESTION, CapacityRuns(jobs=1), Path(folder))
    ends = [None if value is None else int(value) for value in (plan.answer, plan.first_failing)]
    return Trial(ends[0], ends[1], plan.runs, time.perf_counter() - begin)


def held_of(users: int, seeds: range) -> int:
    """How many of the reference's runs with those seeds hold at so many users."""
    server = scenario(0)
    target = target_of(server, "users")
    loads = Loads(server, target, Promise(margin=QUESTION.margin), CapacityRuns(jobs=1))
    return loads.held(target.values.index(users), seeds)


def main() -> None:
    """Run all, print a line a set, and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=-1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    begin = time.perf_counter()
    parallel = Parallel(n_jobs=options.jobs, return_as="generator", batch_size=1)
    trials = []
    for number, t in enumerate(parallel(delayed(trial)(number) for number in range(options.sets))):
        print(f"{number:3d}: [{t.answer}, {t.first_failing})  {t.runs} runs, {t.wall_s:.1f} s", flush=True)
        trials.append(t)
    most = rule_of(QUESTION).looks[-1]
    parts = [(users, range(part * most, (part + 1) * most)) for users in NEAR for part in range(TIMES)]
    held = dict.fromkeys(NEAR, 0)
    for (users, _), count in zip(parts, parallel(delayed(held_of)(*part) for part in parts), strict=True):
        held[users] += count
    shares = {users: count / (TIMES * most) for users, count in held.items()}
    reference = max(users for users, share in shares.items() if share >= QUESTION.survive)
    told = ", ".join(f"{users} {share:.3f}" for users, share in shares.items())
    print(f"reference, {TIMES * most} seeds a value: {told}")
    missed = [n for n, t in enumerate(trials) if not (t.answer or 0) <= reference < (t.first_failing or 10**9)]
    widths = [t.first_failing - t.answer for t in trials if t.answer is not None and t.first_failing is not None]
    print(
        f"{len(trials) - len(missed)} of {len(trials)} intervals hold its answer, {reference} users (not: {missed}); "
        f"mean width {sum(widths) / max(1, len(widths)):.1f} users, "
        f"{sum(t.runs for t in trials) / len(trials):.0f} runs a set; {time.perf_counter() - begin:.0f} s in all"
    )
    if options.json is not None:
        figures = {"reference": reference, "shares": shares, "missed": missed, "trials": [t._asdict() for t in trials]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that joblib ends its workers
    main()
