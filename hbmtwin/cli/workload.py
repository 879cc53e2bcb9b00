"""``hbmtwin workload describe``: what a trace looks like."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import OK, UsageError
from hbmtwin.cli.options import MAX_PROMPTS, Jitter, Json, SkipBadLines, TraceFormat
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.workloads import Request

workload_app = typer.Typer(help="Look at traffic: traces, and models of them.", no_args_is_help=True)

PAGE = "workload.html"
SUMMARY = "workload.json"


@workload_app.command()
def describe(
    trace: Annotated[Path, typer.Argument(help="Trace of requests: CSV, JSON lines or Parquet, plain or gzip.")],
    format: TraceFormat = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**40,
            help="Tokens that an id of the trace stands for, and of a block of the caches. Default: the format's; 16 "
            "where it has no ids.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_PROMPTS, help="Requests from the first on. Default: all.", show_default=False),
    ] = None,
    jitter: Jitter = False,
    skip_bad_lines: SkipBadLines = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Take failed calls for requests too.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Directory for {PAGE}, with pictures, and {SUMMARY}; nothing is written without."),
    ] = None,
    json_: Json = False,
) -> int:
    """Print the statistics of a trace: arrivals, lengths, sessions, sharing."""
    from hbmtwin.cli.workload_tables import print_description
    from hbmtwin.workloads.formats.traces import TimelessTrace, open_trace, trace_lengths
    from hbmtwin.workloads.statistics.describe import BLOCK_SIZE
    from hbmtwin.workloads.statistics.describe import describe as describe_requests

    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no directory; name another one for --out")
    requests: Iterable[Request]
    try:
        replay = open_trace(
            trace,
            format=format,
            num_prompts=num_prompts,
            block_size=block_size,
            jitter=jitter,
            skip_bad_lines=skip_bad_lines,
            keep_failed=keep_failed,
        )
    except TimelessTrace:
        notes: tuple[str, ...] = (f"{trace}: lengths without times, so nothing but lengths is described",)
        lengths = trace_lengths(trace, format=format, num_prompts=num_prompts, skip_bad_lines=skip_bad_lines)
        found = describe_requests(_timeless(lengths))
    else:
        notes = replay.notes
        with closing(replay.recorded()) as requests:
            found = describe_requests(requests, block_size=block_size or replay.block_size or BLOCK_SIZE)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    summary = {"trace": str(trace), "notes": list(notes), **found.to_dict()}
    if out is not None:
        from hbmtwin.dashboard.workload_report import write_workload_report

        write_workload_report(trace.name, found, out / PAGE, notes)
        (out / SUMMARY).write_text(json_text(summary) + "\n", encoding="utf-8")
    if json_:
        print(json_text(summary))
    else:
        print_description(stdout(), trace.name, found)
        if out is not None:
            print(f"pictures: {out / PAGE}")
    return OK


def _timeless(lengths: Iterable[tuple[int, int]]) -> Iterator[Request]:
    from hbmtwin.workloads import Request, user_stream

    for id, (prompt, output) in enumerate(lengths):
        yield Request(id, id, 0, 0, prompt, output, output, ((user_stream(id, 0), 0, prompt),))
