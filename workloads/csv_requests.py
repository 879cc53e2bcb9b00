"""Our own CSV of requests: ``arrival_s,prompt_tokens,output_tokens[,session,turn]``, read and written.

``arrival_s`` is in decimal seconds and read exactly to the nanosecond; ``prompt_tokens`` is the whole prompt, the
history of its session included.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import BinaryIO, cast

from hbmtwin.workloads.csv_rows import Format
from hbmtwin.workloads.records import Request, WorkloadError

_LATEST_S = 2**33
"""The year 2242 in Unix time; later is milliseconds, and past 64 bits of nanoseconds."""


def seconds_ns(text: str) -> int:
    """Nanoseconds of decimal seconds, exactly; digits past the ninth are rounded.

    Raise ValueError that says what is needed when it is no number, not finite, negative or too large.
    """
    try:
        seconds = Decimal(text)
    except InvalidOperation:
        raise ValueError("it must be a number of seconds") from None
    if not seconds.is_finite() or seconds < 0:
        raise ValueError("it must be a finite number of seconds, not negative")
    if seconds > _LATEST_S:
        raise ValueError(f"it must be at most {_LATEST_S} seconds; is it in milliseconds?")
    return round(seconds.scaleb(9))


REQUESTS_CSV = Format(
    name="a CSV of requests",
    time="arrival_s",
    prompt_tokens="prompt_tokens",
    output_tokens="output_tokens",
    time_ns=seconds_ns,
    session="session",
    turn="turn",
)


def write_csv(requests: Iterable[Request], path: Path) -> None:
    """Write requests in order of arrival, as gzip if the name ends in ``.gz``; same requests, same bytes.

    The file appears whole or not at all. Raise WorkloadError if a request arrives before the one above it, OSError
    if the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(cast(BinaryIO, packed), encoding="utf-8", newline="\n") as out:
                out.write("arrival_s,prompt_tokens,output_tokens,session,turn\n")
                last_ns = 0
                for r in requests:
                    if r.arrival_ns < last_ns:
                        raise WorkloadError(f"request {r.id} arrives before the one above it; sort by arrival_ns")
                    last_ns = r.arrival_ns
                    seconds, ns = divmod(r.arrival_ns, 10**9)
                    out.write(f"{seconds}.{ns:09d},{r.prompt_tokens},{r.output_tokens},{r.session},{r.turn}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
