"""Traffic of a learned model beside what it was learned from, by the rule of acceptance, on ten seeds.

::

    azure       trace: azure2023_conv.csv.gz
    mooncake    trace: mooncake_fast25_conversation.jsonl.gz, requests spread over its ticks of 3 s
    servegen    model: servegen_reason_deepseek-r1.jsonl.gz; its "trace" is a day made by ServeGen's own rule, written
                again here on numpy's generators (another seed, other code, the raw file)
    relearned   the same day, learned from its requests and their clients instead of read
    poisson     the azure trace beside one Poisson stream with the trace's rate and pooled lengths: it must fail

Usage: python benchmarks/learn_acceptance.py TRACES [--only azure,mooncake] [--seeds 10] [--hours 24]
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hbmtwin.workloads.arrivals import Arrivals
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.formats.mooncake import MOONCAKE_BLOCK_SIZE
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.learned.acceptance import figures
from hbmtwin.workloads.learned.learn import learn
from hbmtwin.workloads.learned.measured import measured
from hbmtwin.workloads.learned.model import TrafficModel
from hbmtwin.workloads.learned.servegen import read_servegen
from hbmtwin.workloads.learned.traffic import ModelTraffic
from hbmtwin.workloads.lengths import Length
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.records import Request
from hbmtwin.workloads.statistics.describe import Description, describe

AZURE = "azure2023_conv.csv.gz"
MOONCAKE = "mooncake_fast25_conversation.jsonl.gz"
SERVEGEN = "servegen_reason_deepseek-r1.jsonl.gz"


def upstream_rule(path: Path, duration_s: float, seed: int) -> Iterator[Request]:
    """ServeGen's rule by the word: per client and window as many gaps of the fitted family as its rate says, rescaled
    to fill the window; lengths of each request from the client's table of those six hours."""
    draw = np.random.default_rng(seed)
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            client = json.loads(line)
            tables = {float(start): table for start, table in client["dataset"].items()}
            for start, rate, _, family, shape, scale in client["windows"]:
                count = round(rate * 600)
                if start >= duration_s or not count:
                    continue
                gaps = draw.gamma(shape, scale, count) if family == "Gamma" else scale * draw.weibull(shape, count)
                times = start + np.cumsum(gaps) * (600 / gaps.sum())
                lengths = []
                for field in ("input_tokens", "output_tokens"):
                    values, chances = tables[start // 21600 * 21600][field]
                    chances = np.array(chances)
                    lengths.append(draw.choice(values, count, p=chances / chances.sum()))
                rows += list(zip(times, *lengths, [client["client"]] * count, strict=True))
    rows.sort()
    for id, (time_s, prompt, output, tenant) in enumerate(rows):
        if time_s >= duration_s:
            return
        spans = ((f"user/{id}/0", 0, int(prompt)),)
        yield Request(id, id, 0, round(time_s * 1e9), int(prompt), int(output), int(output), spans, tenant)


def poisson(trace: Description, seed: int) -> Iterator[Request]:
    """One stream at the trace's rate with lengths from all of it."""
    prompts, outputs = (
        _pooled(lengths.values, lengths.counts) for lengths in (trace.prompt_tokens, trace.output_tokens)
    )
    conversations = Conversations(seed=seed, prompt_tokens=prompts, output_tokens=outputs)
    rate = trace.arrivals.request_rate
    assert rate is not None
    return OpenLoop(conversations, Arrivals(rate), num_prompts=trace.requests).open()


def _pooled(values: tuple[int, ...], counts: tuple[int, ...]) -> Length:
    return measured(values, counts)


def cases(traces: Path, hours: float) -> Iterator[tuple[str, Description, TrafficModel | None]]:
    """Name, statistics of the trace, and the model; None for the Poisson stream."""
    azure = describe(open_trace(traces / AZURE).recorded())
    yield "azure", azure, learn(open_trace(traces / AZURE).recorded(), source=AZURE)
    yield "poisson", azure, None
    requests = open_trace(traces / MOONCAKE, jitter=True).recorded
    yield (
        "mooncake",
        describe(requests(), block_size=MOONCAKE_BLOCK_SIZE),
        learn(requests(), source=MOONCAKE, block_size=MOONCAKE_BLOCK_SIZE),
    )
    day = describe(upstream_rule(traces / SERVEGEN, hours * 3600, 1))
    yield "servegen", day, read_servegen(traces / SERVEGEN)
    yield "relearned", day, learn(upstream_rule(traces / SERVEGEN, hours * 3600, 1), source=SERVEGEN)


def main() -> int:
    """Print a table a case: the trace's figure, the worst deviation over the seeds, and how many seeds fail."""
    parser = argparse.ArgumentParser(description="Learned traffic beside its trace, by the rule of acceptance.")
    parser.add_argument("traces", type=Path)
    parser.add_argument("--only", default="azure,poisson,mooncake,servegen,relearned")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hours", type=float, default=24.0)
    options = parser.parse_args()
    failed = 0
    for name, trace, model in cases(options.traces, options.hours):
        if name not in options.only.split(","):
            continue
        begin = time.monotonic()
        duration_s = options.hours * 3600 if name == "servegen" else None
        rows = []
        for seed in range(options.seeds):
            made = (
                poisson(trace, seed)
                if model is None
                else ModelTraffic(model, seed=seed, duration_s=duration_s).requests()
            )
            rows.append(figures(trace, describe(made, block_size=MOONCAKE_BLOCK_SIZE)))
        print(f"\n{name}: {trace.requests:,} requests, {options.seeds} seeds, {time.monotonic() - begin:.0f} s")
        print(f"{'figure':<26}{'trace':>12}{'least':>12}{'greatest':>12}{'worst':>10}{'allowed':>10}  fails")
        for column in zip(*rows, strict=True):
            made_figures = [figure.generated for figure in column]
            worst = max((figure.deviation for figure in column), key=abs)
            fails = sum(not figure.holds for figure in column)
            first = column[0]
            unit = "%" if first.relative else ""
            scale = 100 if first.relative else 1
            print(
                f"{first.name:<26}{first.trace:>12.4g}{min(made_figures):>12.4g}{max(made_figures):>12.4g}"
                f"{scale * worst:>+9.3g}{unit or ' '}{scale * first.allowed:>9.3g}{unit or ' '}  {fails or ''}"
            )
        bad = sum(not all(figure.holds for figure in row) for row in rows)
        print(
            f"{options.seeds - bad} of {options.seeds} seeds meet the rule"
            + (" (none should)" if model is None else "")
        )
        failed += bad if model is not None else options.seeds - bad
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
