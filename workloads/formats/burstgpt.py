"""BurstGPT: ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type[,Session ID,Elapsed time]``.

``Timestamp`` is in whole seconds from the first day. A call without response tokens (or without request tokens) is one
that failed: such lines are dropped and counted, or with ``keep_failed`` sent for one token. ``Session ID`` is a text,
empty for calls of the API; sessions get a number of it, above those of any line.
Source: github.com/HPMLL/BurstGPT (Wang et al., 2024; CC-BY-4.0), release 2.0 for the last two columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import Row, moment, whole
from hbmtwin.workloads.formats.session_numbers import session_number

_SECOND_NS: Final = 10**9


def _parser(at: Columns, settings: Settings) -> Parse:
    time, prompt, output = at["Timestamp"], at["Request tokens"], at["Response tokens"]
    session = at.get("Session ID")

    def parse(line: int, values: Sequence[Any]) -> Row | None:
        time_ns = moment("Timestamp", values[time])
        prompt_tokens = whole("Request tokens", values[prompt], 0)
        output_tokens = whole("Response tokens", values[output], 0)
        if (prompt_tokens == 0 or output_tokens == 0) and not settings.keep_failed:
            return None
        number = None if session is None else session_number(values[session])
        return Row(line, time_ns, max(1, prompt_tokens), max(1, output_tokens), number)

    return parse


BURSTGPT = Format(
    name="burstgpt",
    title="a BurstGPT trace",
    required=("Timestamp", "Request tokens", "Response tokens"),
    optional=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    time="Timestamp",
    parser=_parser,
    tick_ns=_SECOND_NS,
)
