"""Azure's public LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

The 2023 files write times such as ``2023-11-16 18:15:46.6805900``, seven digits behind the point, in UTC without
saying so; the 2024 files have six digits and partly ``+00:00`` behind them. No session is recorded.
Source: github.com/Azure/AzurePublicDataset (Patel et al., "Splitwise", ISCA 2024; CC-BY-4.0).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from hbmtwin.workloads.csv_rows import Format

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
        seconds = (datetime.fromisoformat(match[1] + (match[3] or "+00:00")) - _EPOCH) // _SECOND
    except ValueError:
        raise ValueError("it must be a time such as 2023-11-16 18:15:46.6805900") from None
    return seconds * 10**9 + int((match[2] or "0")[:9].ljust(9, "0"))


AZURE = Format(
    name="an Azure trace",
    time="TIMESTAMP",
    prompt_tokens="ContextTokens",
    output_tokens="GeneratedTokens",
    time_ns=timestamp_ns,
)
