"""Weka's lines, as GuideLLM reads them: calls of agents' conversations with ids of 64 tokens.

::

    {"id": "7f3a", "t": 12.5, "in": 150, "out": 20, "hash_ids": [0, 1]}

``t`` is in seconds, ``id`` names the conversation. Ids stand for full blocks, the rest of a prompt is new; files that
have an id for the last, begun block too are read as well. Upstream files of one object with all ``requests`` of a
conversation are to be written as lines first.
Source: GuideLLM's ``weka`` data and github.com/callanjfox/agentic-coding-analysis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.hashed_prompts import checked_ids, pieces
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, shown, whole
from hbmtwin.workloads.formats.session_numbers import session_number
from hbmtwin.workloads.records import Span

WEKA_BLOCK_SIZE: Final = 64
"""Tokens that an id of these files stands for."""
_STREAM = "weka"


def _parser(at: Columns, settings: Settings) -> Parse:
    name, time, prompt, output, hashes = (at[column] for column in WEKA.required)
    block_size = settings.block_size or WEKA_BLOCK_SIZE

    def parse(line: int, values: Sequence[Any]) -> Row:
        time_ns = moment("t", values[time])
        prompt_tokens = whole("in", values[prompt], 1)
        output_tokens = whole("out", values[output], 1)
        ids = checked_ids(values[hashes])
        full, rest = divmod(prompt_tokens, block_size)
        if len(ids) not in (full, full + bool(rest)):
            raise BadRow(
                f"{len(ids)} hash_ids for in {prompt_tokens}",
                f"there must be one for each full {block_size} tokens; if ids stand for another number of tokens, set "
                "workload.trace_block_size",
            )
        named = prompt_tokens if len(ids) > full else prompt_tokens - rest
        spans: tuple[Span, ...] = pieces(_STREAM, ids, named, block_size)
        if named < prompt_tokens:
            spans += ((f"{_STREAM}/{line}", 0, rest),)
        session = session_number(values[name])
        if session is None:
            raise BadRow(f"id is {shown(values[name])}", "it must name the conversation")
        return Row(line, time_ns, prompt_tokens, output_tokens, session, None, spans)

    return parse


WEKA = Format(
    name="weka",
    title="a file of weka lines",
    required=("id", "t", "in", "out", "hash_ids"),
    time="t",
    parser=_parser,
    block_size=WEKA_BLOCK_SIZE,
)
