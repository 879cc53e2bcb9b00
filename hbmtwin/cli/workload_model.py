"""``hbmtwin workload learn`` and ``generate``: a trace as a model, and traffic of a model."""

from __future__ import annotations

import sys
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hbmtwin.cli.exits import OK, UsageError
from hbmtwin.cli.options import MAX_PROMPTS, MAX_SEED, Jitter, Json, SkipBadLines, TraceFormat, above_zero
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hbmtwin.workloads.learned.acceptance import Figure
    from hbmtwin.workloads.learned.model import TrafficModel
    from hbmtwin.workloads.records import Request


class RequestFormat(StrEnum):
    """What ``hbmtwin workload generate`` writes."""

    REQUESTS = "requests"
    MOONCAKE = "mooncake"


def learn(
    trace: Annotated[
        Path, typer.Argument(help="Trace of requests (CSV, JSON lines, Parquet), or ServeGen's file or folder.")
    ],
    out: Annotated[Path, typer.Option(help="Model to write, TOML; packed if its name ends in .gz.")],
    window_s: Annotated[
        float | None,
        typer.Option(min=1, max=1e6, help="Seconds in which rate and CV are constant. Default: 300; ServeGen's 600."),
    ] = None,
    format: TraceFormat = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**40, help="Tokens of the blocks that sharing is learned in. Default: the format's, else 16."
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            callback=above_zero(1e6), help="Poisson arrivals a second, for a trace that has lengths and no times."
        ),
    ] = None,
    jitter: Jitter = False,
    skip_bad_lines: SkipBadLines = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Lay generated traffic beside the trace, figure by figure.")
    ] = True,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the traffic that is laid beside the trace.")
    ] = 0,
    json_: Json = False,
) -> int:
    """Learn a model from a trace: arrivals by window, lengths, sessions and sharing."""
    from hbmtwin.workloads.formats.traces import TimelessTrace, open_trace, trace_lengths
    from hbmtwin.workloads.learned.acceptance import figures
    from hbmtwin.workloads.learned.learn import WINDOW_S, learn_lengths
    from hbmtwin.workloads.learned.learn import learn as learn_requests
    from hbmtwin.workloads.learned.model_file import write_model
    from hbmtwin.workloads.learned.servegen import is_servegen, read_servegen
    from hbmtwin.workloads.learned.traffic import ModelTraffic
    from hbmtwin.workloads.records import WorkloadError
    from hbmtwin.workloads.statistics.describe import BLOCK_SIZE, describe

    _keep(trace, out)
    found: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    if is_servegen(trace):
        if window_s is not None:
            raise WorkloadError(f"{trace}: ServeGen's files have windows of their own; leave out --window-s")
        model = read_servegen(trace)
    else:
        try:
            replay = open_trace(
                trace, format=format, block_size=block_size, jitter=jitter, skip_bad_lines=skip_bad_lines
            )
        except TimelessTrace:
            if request_rate is None:
                raise TimelessTrace(
                    f"{trace}: lengths and no times; say with --request-rate how many requests a second arrive"
                ) from None
            lengths = trace_lengths(trace, format=format, skip_bad_lines=skip_bad_lines)
            model = learn_lengths(lengths, request_rate=request_rate, source=trace.name)
        else:
            if request_rate is not None:
                raise WorkloadError(f"{trace}: has times of its own; leave out --request-rate")
            size = block_size or replay.block_size or BLOCK_SIZE
            notes = replay.notes
            with closing(replay.recorded()) as requests:
                model = learn_requests(requests, source=trace.name, window_s=window_s or WINDOW_S, block_size=size)
            if check:
                with closing(replay.recorded()) as requests:
                    seen = describe(requests, block_size=size)
                made = describe(ModelTraffic(model, seed=seed).requests(), block_size=size)
                found = figures(seen, made)
    write_model(model, out)
    notes += model.notes
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if json_:
        print(json_text({"written": str(out), "notes": list(notes), **_summary(model), **_figures(found)}))
    else:
        _print_figures(trace.name, model, found)
        print(f"wrote {out}")
    return OK


def generate(
    model: Annotated[Path, typer.Argument(help="Model, as `hbmtwin workload learn` writes it.")],
    out: Annotated[Path, typer.Option(help="File to write: .csv, .jsonl (also with .gz behind) or .parquet.")],
    num_prompts: Annotated[
        int | None, typer.Option(min=1, max=MAX_PROMPTS, help="Requests. Default: those of the duration.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            callback=above_zero(1e9), help="Seconds of traffic. Default: the span that was learned, or --num-prompts."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of every random draw.")] = 0,
    clients: Annotated[
        int | None, typer.Option(min=1, help="So many of the model's clients, drawn by the seed. Default: all.")
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(callback=above_zero(1e6), help="Factor on the rates of all clients.")
    ] = 1.0,
    format: Annotated[
        RequestFormat, typer.Option(help="requests: our own file; mooncake: JSON lines that other tools read.")
    ] = RequestFormat.REQUESTS,
    json_: Json = False,
) -> int:
    """Write traffic of a model: as long, as dense and of as many clients as wanted."""
    from hbmtwin.workloads.formats.mooncake import write_mooncake
    from hbmtwin.workloads.formats.write_requests import write_trace
    from hbmtwin.workloads.learned.model_file import read_model
    from hbmtwin.workloads.learned.traffic import ModelTraffic
    from hbmtwin.workloads.plural import counted
    from hbmtwin.workloads.records import WorkloadError

    _keep(model, out)
    if format is RequestFormat.MOONCAKE and {".csv", ".parquet"} & set(out.suffixes):
        raise UsageError(f"--format mooncake writes JSON lines; name a .jsonl file, not {out}")
    read = read_model(model)
    try:
        traffic = ModelTraffic(
            read, seed=seed, num_prompts=num_prompts, duration_s=duration, num_clients=clients, rate_scale=rate_scale
        )
    except WorkloadError as error:  # the file is read: it is the options that do not go with it
        raise UsageError(f"{model}: {error}") from None
    written = 0
    last_ns = 0

    def seen() -> Iterator[Request]:
        nonlocal written, last_ns
        for r in traffic.requests():
            written, last_ns = written + 1, r.arrival_ns
            yield r
        if not written:
            raise WorkloadError(f"{model}: no request falls in {duration or read.span_s} s; take a longer --duration")

    if format is RequestFormat.MOONCAKE:
        write_mooncake(seen(), out)
    else:
        write_trace(seen(), out)
    for note in read.notes:
        print(f"note: {note}", file=sys.stderr)
    if json_:
        print(json_text({"written": str(out), "requests": written, "span_s": last_ns / 1e9, "notes": list(read.notes)}))
    else:
        print(f"wrote {out}: {counted(written, 'request')} in {last_ns / 1e9:,.1f} s")
    return OK


def _keep(source: Path, out: Path) -> None:
    """Raise UsageError where what is written would take the place of what is read, or has no name."""
    if not out.name:
        raise UsageError("--out needs the name of a file")
    if out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"--out {out} is the file that is read; name another one")


def _summary(model: TrafficModel) -> dict[str, Any]:
    return {
        "clients": len(model.clients),
        "span_s": model.span_s,
        "window_s": model.window_s,
        "request_rate": model.request_rate,
    }


def _figures(found: tuple[Figure, ...]) -> dict[str, Any]:
    if not found:
        return {}
    rows = [
        {
            "figure": figure.name,
            "trace": figure.trace,
            "generated": figure.generated,
            "deviation": figure.deviation,
            "allowed": figure.allowed,
            "relative": figure.relative,
            "holds": figure.holds,
        }
        for figure in found
    ]
    return {"figures": rows, "accepted": all(figure.holds for figure in found)}


def _print_figures(name: str, model: TrafficModel, found: tuple[Figure, ...]) -> None:
    from rich.markup import escape

    from hbmtwin.cli.tables import print_table
    from hbmtwin.workloads.plural import counted

    console = stdout()
    clients = counted(len(model.clients), "client")
    console.print(
        f"[bold]{escape(name)}: {clients}, {model.request_rate:.4g} requests a second over {model.span_s:,.0f} s[/bold]"
    )
    if not found:
        return
    rows = []
    for figure in found:
        scale, unit = (100, " %") if figure.relative else (1, "")
        off, allowed = f"{scale * figure.deviation:+.2g}{unit}", f"{scale * figure.allowed:g}{unit}"
        verdict = "" if figure.holds else "differs"
        rows.append([figure.name, f"{figure.trace:.4g}", f"{figure.generated:.4g}", off, allowed, verdict])
    print_table(console, ["figure", "trace", "generated", "off by", "allowed", ""], rows)
    bad = sum(not figure.holds for figure in found)
    print(
        "generated traffic is like the trace" if not bad else f"generated traffic differs in {counted(bad, 'figure')}"
    )
