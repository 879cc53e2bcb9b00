"""Mooncake's JSON lines, read and written; AIPerf and GuideLLM exchange traffic in them too.

::

    {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 7, 9]}

``timestamp`` is in ms from the start; an id stands for 512 tokens and all before them, the last of a prompt for those
that are left. The recorded times are ticks of 3 s: ``jitter`` spreads them. Each line is a session of one turn: which
lines belong to one conversation is not told, and that they share a prefix the ids say already. An answer's tokens are
in the next turn's prompt under new ids, so a cache that keeps answers finds none here.
Source: github.com/kvcache-ai/Mooncake (Qin et al., FAST 2025; Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.hashed_prompts import checked_ids, prompt_spans
from hbmtwin.workloads.formats.lines import bad_line, text_lines
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, shown, whole
from hbmtwin.workloads.formats.whole_file import text_file
from hbmtwin.workloads.records import Request, WorkloadError

MOONCAKE_BLOCK_SIZE: Final = 512
"""Tokens that an id of Mooncake's traces stands for."""
_MS_NS = 10**6
_TICK_NS = 3 * 10**9
_STREAM = "mooncake"


def _parser(at: Columns, settings: Settings) -> Parse:
    time, prompt, output, ids = (at[name] for name in MOONCAKE.required)
    block_size = settings.block_size or MOONCAKE_BLOCK_SIZE

    def parse(line: int, values: Sequence[Any]) -> Row:
        stamp = values[time]
        # Whole milliseconds as a rule, and 1000 times 2^33 s at most.
        time_ns = stamp * _MS_NS if type(stamp) is int and 0 <= stamp < 2**43 else _milliseconds_ns(stamp)
        prompt_tokens = whole("input_length", values[prompt], 1)
        output_tokens = whole("output_length", values[output], 1)
        spans = prompt_spans(_STREAM, values[ids], prompt_tokens, block_size)
        return Row(line, time_ns, prompt_tokens, output_tokens, spans=spans)

    return parse


def _milliseconds_ns(value: Any) -> int:
    if not isinstance(value, int | Decimal | str) or isinstance(value, bool):
        raise BadRow(f"timestamp is {shown(value)}", "it must be a number of milliseconds")
    try:
        scaled = Decimal(value).scaleb(-3)
    except ArithmeticError:
        raise BadRow(f"timestamp is {shown(value)}", "it must be a number of milliseconds") from None
    return moment("timestamp / 1000", scaled)


MOONCAKE = Format(
    name="mooncake",
    title="a Mooncake trace",
    required=("timestamp", "input_length", "output_length", "hash_ids"),
    time="timestamp",
    parser=_parser,
    tick_ns=_TICK_NS,
    block_size=MOONCAKE_BLOCK_SIZE,
)


def mooncake_chains(path: str | Path) -> Iterator[list[int]]:
    """The ``hash_ids`` of each line (plain or gzip), in order; blank lines pass. Other keys may be missing.

    One line is held at a time. Raise WorkloadError, with the line, on what has no such ids.
    """
    path = Path(path)
    cure = 'write a line such as {"hash_ids": [0, 1, 2]}'
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise bad_line(path, number, f"this is no JSON ({error})", cure) from None
        if not isinstance(record, dict) or "hash_ids" not in record:
            raise bad_line(path, number, "no object with 'hash_ids'", cure)
        try:
            yield checked_ids(record["hash_ids"])
        except BadRow as bad:
            raise bad_line(path, number, bad.what, bad.cure) from None


def write_mooncake(requests: Iterable[Request], path: str | Path, *, block_size: int = MOONCAKE_BLOCK_SIZE) -> None:
    """Write requests in order of arrival, as gzip if the name ends in ``.gz``; same requests, same bytes.

    Times are rounded to the millisecond below and begin at the first arrival; an id is given to each new block of
    *block_size* tokens, in order. What the format has no place for (sessions, tenants, ``max_tokens``) is lost. A
    prompt's tokens that no span names are new. The file appears whole or not at all. Memory O(distinct blocks).
    Raise WorkloadError if a request arrives before the one above it, OSError if the file cannot be written.
    """
    numbers: dict[bytes, int] = {}
    first_ns: int | None = None
    last_ns = 0
    with text_file(Path(path)) as out:
        for r in requests:
            if first_ns is None:
                first_ns = r.arrival_ns
            elif r.arrival_ns < last_ns:
                raise WorkloadError(f"request {r.id} arrives before the one above it; sort by arrival_ns")
            last_ns = r.arrival_ns
            unnamed = r.prompt_tokens - sum(length for _, _, length in r.spans)
            spans = (*r.spans, (f"request/{r.id}", 0, unnamed)) if unnamed > 0 else r.spans
            chain = block_chain(spans, block_size, partial=True)
            record = {
                "timestamp": (r.arrival_ns - first_ns) // _MS_NS,
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": [numbers.setdefault(block, len(numbers)) for block in chain],
            }
            out.write(json.dumps(record) + "\n")
