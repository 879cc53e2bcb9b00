"""Azure's public LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

The 2023 files write times such as ``2023-11-16 18:15:46.6805900``, seven digits behind the point, in UTC without
saying so; the 2024 files have six digits and partly ``+00:00`` behind them. The 2025 file has ``NumImages`` too, whose
tokens ``ContextTokens`` includes. No session is recorded.
Source: github.com/Azure/AzurePublicDataset (Patel et al., "Splitwise", ISCA 2024; Qiu et al., "ModServe", SoCC 2025;
CC-BY-4.0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import BadRow, Row, shown, whole

_TIMESTAMP = re.compile(r"\s*(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?\s*", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of a time stamp, exactly; no zone means UTC, digits past the ninth are cut.

    Raise ValueError that says what a time stamp looks like.
    """
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds = _seconds(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise ValueError("it must be a time such as 2023-11-16 18:15:46.6805900") from None
    return seconds * 10**9 + int((match[2] or "0")[:9].ljust(9, "0"))


@lru_cache(maxsize=4)
def _seconds(text: str) -> int:
    # Neighbouring lines lie in the same second, which is most of the work of reading one.
    return (datetime.fromisoformat(text) - _EPOCH) // _SECOND


def _parser(at: Columns, settings: Settings) -> Parse:
    time, prompt, output, images = at["TIMESTAMP"], at["ContextTokens"], at["GeneratedTokens"], at.get("NumImages")

    def parse(line: int, values: Sequence[Any]) -> Row:
        try:
            time_ns = timestamp_ns(str(values[time]))
        except ValueError as error:
            raise BadRow(f"TIMESTAMP is {shown(values[time])}", str(error)) from None
        if images is not None and values[images] is not None:
            whole("NumImages", values[images], 0)
        prompt_tokens = whole("ContextTokens", values[prompt], 1)
        return Row(line, time_ns, prompt_tokens, whole("GeneratedTokens", values[output], 1))

    return parse


AZURE = Format(
    name="azure",
    title="an Azure trace",
    required=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    optional=("NumImages",),
    time="TIMESTAMP",
    parser=_parser,
)
