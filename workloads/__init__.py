"""Requests, arrivals, lengths, sessions and traces: what traffic the memory has to bear. Knows nobody."""

from __future__ import annotations

from hbmtwin.workloads.arrivals import Arrivals, Bursts
from hbmtwin.workloads.builtin import builtin
from hbmtwin.workloads.clients import Client, Clients
from hbmtwin.workloads.closed_loop import ClosedLoop
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.formats.mooncake import write_mooncake
from hbmtwin.workloads.formats.replay import Replay
from hbmtwin.workloads.formats.traces import open_trace, trace_lengths
from hbmtwin.workloads.formats.write_requests import write_csv, write_trace
from hbmtwin.workloads.lengths import Fixed, Length, LogNormal, Quantiles, Uniform, Values, Zipf, length_from
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.prefixes import PrefixBucket, Prefixes
from hbmtwin.workloads.priorities import Priorities
from hbmtwin.workloads.rates import Ramp, RateCurve
from hbmtwin.workloads.records import (
    Request,
    Source,
    Span,
    Status,
    WorkloadError,
    merge_spans,
    output_stream,
    user_stream,
)
from hbmtwin.workloads.samples import Samples
from hbmtwin.workloads.think_times import ConstantTime, ExponentialTime, LogNormalTime, ThinkTime, think_time_from

__all__ = [
    "Arrivals",
    "Bursts",
    "Client",
    "Clients",
    "ClosedLoop",
    "ConstantTime",
    "Conversations",
    "ExponentialTime",
    "Fixed",
    "Length",
    "LogNormal",
    "LogNormalTime",
    "OpenLoop",
    "PrefixBucket",
    "Prefixes",
    "Priorities",
    "Quantiles",
    "Ramp",
    "RateCurve",
    "Replay",
    "Request",
    "Samples",
    "Source",
    "Span",
    "Status",
    "ThinkTime",
    "Uniform",
    "Values",
    "WorkloadError",
    "Zipf",
    "builtin",
    "length_from",
    "merge_spans",
    "open_trace",
    "output_stream",
    "think_time_from",
    "trace_lengths",
    "user_stream",
    "write_csv",
    "write_mooncake",
    "write_trace",
]
