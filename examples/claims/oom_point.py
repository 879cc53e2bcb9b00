"""How much a server holds until it dies, and what growing buffers cost on the way: counts over results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from claim import simulate

from hbmtwin import Result


@dataclass(frozen=True)
class OomPoint:
    """The most requests that start together and all end, and the death of one more."""

    requests: int
    death: Result

    @property
    def in_decode(self) -> bool:
        """Whether the request that asked in vain had its first token already."""
        assert self.death.oom is not None
        requests = self.death.requests
        return bool(requests.loc[requests["id"] == self.death.oom["owner"], "first_token_ns"].item() >= 0)


def oom_point(id: str, *overrides: str, most: int) -> OomPoint:
    """Find it by bisection below *most* requests, which must be too many. O(log most) runs."""

    def attempt(requests: int) -> Result:
        return simulate(id, f"workload.num_prompts={requests}", "results.memory_trace=false", *overrides)

    holds, dies = 0, most
    death: Result | None = None
    while dies - holds > 1:
        middle = (holds + dies) // 2
        result = attempt(middle)
        if result.oom is None:
            holds = middle
        else:
            dies, death = middle, result
    death = death or attempt(dies)
    assert death.oom is not None, f"{most} requests do not suffice to run out of memory"
    return OomPoint(holds, death)


@dataclass(frozen=True)
class Copies:
    """What growth did in a run of one buffer per sequence, each of which was full when it grew."""

    count: int
    copied_bytes: int
    peak_bytes: int
    """The most that all KV buffers take at once, old ones among them until they are copied."""


def held_by_op(trace: pd.DataFrame) -> pd.DataFrame:
    """The allocations and frees of KV in a memory trace, with ``held``, the bytes of KV after each."""
    kv_ids = trace.loc[(trace["op"] == "malloc") & (trace["tag"] == "kv"), ["id", "size"]].set_index("id")["size"]
    ops = trace[trace["id"].isin(kv_ids.index)].copy()
    sign = np.where(ops["op"] == "malloc", 1, -1)
    ops["held"] = (sign * ops["id"].map(kv_ids)).cumsum()
    return ops


def copies(result: Result) -> Copies:
    """Count the copies of a run of single turns with ``tensors = "merged"`` from its memory trace."""
    assert result.memory_trace is not None
    ops = held_by_op(result.memory_trace)
    made = ops[ops["op"] == "malloc"]
    replaced = made.groupby("owner")["size"].shift().dropna()
    return Copies(len(replaced), int(replaced.sum()), int(ops["held"].max()))
