"""Our own requests: ``arrival_s,prompt_tokens,output_tokens[,session,turn,tenant,spans]`` as CSV, JSON lines, Parquet.

::

    {"arrival_s": 1.5, "prompt_tokens": 70, "output_tokens": 9, "session": 4, "turn": 0, "tenant": 0,
     "spans": [["system", 0, 50], ["user/4/0", 0, 20]]}

``arrival_s`` is in decimal seconds and read exactly to the nanosecond; ``prompt_tokens`` is the whole prompt, the
history of its session included. ``spans`` says which prompts share tokens: pieces ``[stream, start, length]`` of
endless token streams (in CSV and Parquet as the text of that list), as many tokens as the prompt; without it a turn
goes on with its session's last prompt and answer where it is long enough.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, shown, whole
from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.records import Span, merge_spans


def _parser(at: Columns, settings: Settings) -> Parse:
    time, prompt, output = at["arrival_s"], at["prompt_tokens"], at["output_tokens"]
    session, turn, tenant, spans = (at.get(name) for name in ("session", "turn", "tenant", "spans"))

    def optional(name: str, where: int | None, values: Sequence[Any], bits: int = 40) -> int | None:
        return None if where is None or values[where] is None else whole(name, values[where], 0, bits=bits)

    def parse(line: int, values: Sequence[Any]) -> Row:
        time_ns = moment("arrival_s", values[time])
        prompt_tokens = whole("prompt_tokens", values[prompt], 1)
        output_tokens = whole("output_tokens", values[output], 1)
        if session is None and spans is None and tenant is None:
            return Row(line, time_ns, prompt_tokens, output_tokens)
        of_session = optional("session", session, values, 53)  # a number made of a name has 53 bits
        of_turn = optional("turn", turn, values)
        if of_turn is not None and of_session is None:
            raise BadRow("a turn without a session", "write its session too")
        pieces = None if spans is None or values[spans] in (None, "") else _spans(values[spans], prompt_tokens)
        of_tenant = optional("tenant", tenant, values) or 0
        return Row(line, time_ns, prompt_tokens, output_tokens, of_session, of_turn, pieces, of_tenant)

    return parse


def _spans(value: Any, prompt_tokens: int) -> tuple[Span, ...]:
    cure = 'write pieces of token streams such as [["system", 0, 50], ["user/4/0", 0, 20]]'
    try:
        pieces = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise BadRow(f"spans is {shown(value)}", cure) from None
    if not isinstance(pieces, list):
        raise BadRow(f"spans is {shown(value)}", cure)
    for piece in pieces:
        if not (
            isinstance(piece, list)
            and len(piece) == 3
            and type(piece[0]) in (str, int)
            and all(type(n) is int and n >= 0 for n in piece[1:])
            and 0 < piece[2] <= MAX_TOKENS  # a start may be past it: a hash_id of 64 bits times its block
        ):
            raise BadRow(f"a piece of spans is {shown(piece)}", cure)
    spans = merge_spans(tuple((stream, start, length) for stream, start, length in pieces))
    total = sum(length for _, _, length in spans)
    if total != prompt_tokens:
        raise BadRow(f"spans have {total} tokens for prompt_tokens {prompt_tokens}", "they must be the whole prompt")
    return spans


REQUESTS = Format(
    name="requests",
    title="a file of requests",
    required=("arrival_s", "prompt_tokens", "output_tokens"),
    optional=("session", "turn", "tenant", "spans"),
    time="arrival_s",
    parser=_parser,
)


def decimal_seconds(time_ns: int) -> Decimal:
    """A time as a file has it: seconds with all nine digits."""
    return Decimal(time_ns).scaleb(-9)
