"""Splitwise-sim's traces of requests.

::

    request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size

``arrival_timestamp`` is in seconds; an application is a tenant. A line is one request, so its batch size must be 1.
Source: github.com/Mutinifni/splitwise-sim (Patel et al., ISCA 2024; MIT).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, whole


def _parser(at: Columns, settings: Settings) -> Parse:
    time, prompt, output = (at[name] for name in SPLITWISE.required)
    tenant, batch = at.get("application_id"), at.get("batch_size")

    def parse(line: int, values: Sequence[Any]) -> Row:
        time_ns = moment("arrival_timestamp", values[time])
        if batch is not None and (size := whole("batch_size", values[batch], 1)) != 1:
            raise BadRow(f"batch_size is {size}", "write one line for each request of the batch")
        prompt_tokens = whole("prompt_size", values[prompt], 1)
        output_tokens = whole("token_size", values[output], 1)
        owner = 0 if tenant is None else whole("application_id", values[tenant], 0)
        return Row(line, time_ns, prompt_tokens, output_tokens, tenant=owner)

    return parse


SPLITWISE = Format(
    name="splitwise",
    title="a splitwise-sim trace",
    required=("arrival_timestamp", "prompt_size", "token_size"),
    optional=("request_id", "request_type", "application_id", "batch_size"),
    time="arrival_timestamp",
    parser=_parser,
)
