"""Requests written as our own files, CSV, JSON lines or Parquet by the name; :mod:`~hbmtwin.workloads.formats.requests`
reads them back.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.workloads.formats.requests import decimal_seconds
from hbmtwin.workloads.formats.whole_file import replaced, text_file
from hbmtwin.workloads.records import Request, WorkloadError

_ROWS_AT_ONCE = 1 << 14
_PARQUET = pa.schema(
    [
        ("arrival_s", pa.decimal128(19, 9)),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("session", pa.int64()),
        ("turn", pa.int64()),
        ("tenant", pa.int64()),
        ("spans", pa.string()),
    ]
)


def write_csv(requests: Iterable[Request], path: Path) -> None:
    """Write ``arrival_s,prompt_tokens,output_tokens,session,turn``: what other tools and spreadsheets read.

    Which prompts share a prefix across sessions is lost; :func:`write_trace` keeps it. In order of arrival, as gzip if
    the name ends in ``.gz``; same requests, same bytes; the file appears whole or not at all. Raise WorkloadError if a
    request arrives before the one above it, OSError if the file cannot be written.
    """
    with text_file(path) as out:
        out.write("arrival_s,prompt_tokens,output_tokens,session,turn\n")
        for r in _in_order(requests):
            out.write(f"{decimal_seconds(r.arrival_ns):f},{r.prompt_tokens},{r.output_tokens},{r.session},{r.turn}\n")


def write_trace(requests: Iterable[Request], path: str | Path) -> None:
    """Write all that a replay needs: as :func:`write_csv`, and ``tenant`` and ``spans`` of each request.

    The name says the kind: ``.csv``, ``.jsonl`` (each also with ``.gz`` behind) or ``.parquet``. ``max_tokens``,
    priorities and samples are settings of a run, and not in the file. Flat memory: some rows are held. Raise
    WorkloadError on another name or if a request arrives before the one above it, OSError if it cannot be written.
    """
    path = Path(path)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if path.suffix == ".parquet":
        _write_parquet(_in_order(requests), path)
    elif kind == "csv":
        with text_file(path) as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(_PARQUET.names)
            writer.writerows((f"{decimal_seconds(r.arrival_ns):f}", *_values(r)) for r in _in_order(requests))
    elif kind == "jsonl":
        with text_file(path) as out:
            for r in _in_order(requests):
                # As text, not as a float: 2^53 ns are 104 days.
                values = ", ".join(
                    f'"{name}": {value}' for name, value in zip(_PARQUET.names[1:], _values(r), strict=True)
                )
                out.write(f'{{"arrival_s": {decimal_seconds(r.arrival_ns):f}, {values}}}\n')
    else:
        raise WorkloadError(f"{path}: no kind of file is called {kind!r}; let its name end in .csv, .jsonl or .parquet")


def _values(r: Request) -> tuple[int, int, int, int, int, str]:
    spans = json.dumps(r.spans)
    return r.prompt_tokens, r.output_tokens, r.session, r.turn, r.tenant, spans


def _write_parquet(requests: Iterator[Request], path: Path) -> None:
    with replaced(path) as partial, pq.ParquetWriter(partial, _PARQUET) as writer:
        while some := list(islice(requests, _ROWS_AT_ONCE)):
            columns = zip(*((decimal_seconds(r.arrival_ns), *_values(r)) for r in some), strict=True)
            arrays = [pa.array(values, field.type) for values, field in zip(columns, _PARQUET, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=_PARQUET))


def _in_order(requests: Iterable[Request]) -> Iterator[Request]:
    last_ns = 0
    for r in requests:
        if r.arrival_ns < last_ns:
            raise WorkloadError(f"request {r.id} arrives before the one above it; sort by arrival_ns")
        last_ns = r.arrival_ns
        yield r
