"""Inter-token latency (ITL): the time between two tokens of one request, each gap counted, from the stored steps.

::

    steps.parquet   row 0: seqs 1 2 3   |--------|               one prefill: a first token each
                    row 1: seqs 1 2 3   |---|---|---|            a leap of three steps: step_ends_ns has three ends
                    row 2: seqs 1 2 4   |----------|             4 arrives, 3 is preempted: its gap spans rows

    gaps            within a leap       end - end before, once for each sequence that decodes
                    between rows        first end of the row - the last token of that sequence

A sequence gets a token in a step that computes further than any step before it, its prompt at least: parts of a prompt
end before that, and so does what is computed again after a preemption. In a batch that is padded each step is a token:
prompts are whole there, and slots count pads, of which one that was preempted may get fewer the next time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from hbmtwin.sim.scenario import Scenario

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Gaps between tokens of completed requests; entry *i* stands for ``count[i]`` equal ones at one moment."""

    time_ns: Ints
    """When the later token came."""
    gap_ns: Ints
    count: Ints

    def percentiles(self) -> dict[str, float | None]:
        """p50, p90 and p99 in seconds, as :func:`hbmtwin.sim.summary.percentiles` has them. O(entries log entries)."""
        order = np.argsort(self.gap_ns, kind="stable")
        seconds, until = self.gap_ns[order] / 1e9, np.cumsum(self.count[order])
        if not len(until) or until[-1] == 0:
            return {"p50": None, "p90": None, "p99": None}
        found: dict[str, float | None] = {}
        for percent in (50, 90, 99):
            place, part = divmod((int(until[-1]) - 1) * percent, 100)
            low, high = (seconds[np.searchsorted(until, rank, side="right")] for rank in (place, place + (part > 0)))
            found[f"p{percent}"] = float(low + (high - low) * part / 100)
        return found


def token_gaps(requests: pd.DataFrame, steps: pd.DataFrame, *, padded: bool = False) -> TokenGaps:
    """Every gap between two tokens of a completed request, exactly; *padded*: of batches that are.

    O(entries of the steps, sorted by request).
    """
    wanted = ["id", "prompt_tokens", "output_tokens", "first_token_ns"]
    done = requests.loc[requests["status"] == "completed", wanted].set_index("id")
    ends = _flat(steps["step_ends_ns"])
    repeats = steps["repeat"].to_numpy(dtype=np.int64)
    starts = np.cumsum(repeats) - repeats
    width = np.array([len(ids) for ids in steps["seq_ids"]], dtype=np.int64)
    entries = pd.DataFrame(
        {
            "id": _flat(steps["seq_ids"]),
            "start": np.repeat(starts, width),
            "repeat": np.repeat(repeats, width),
            "computed": _flat(steps["context_tokens"]) + _flat(steps["new_tokens"]),
        }
    )
    entries = entries[entries["id"].isin(done.index)].join(done, on="id")
    entries = entries.sort_values(["id", "start"], kind="stable")
    if not padded:
        reach = entries["computed"] + entries["repeat"] - 1
        farthest = reach.groupby(entries["id"]).cummax().groupby(entries["id"]).shift(1, fill_value=-1)
        entries = entries[(entries["computed"] >= entries["prompt_tokens"]) & (entries["computed"] > farthest)]
    # Who is done in a padded static batch computes on until the batch ends: those are no tokens of its answer.
    ahead = entries.groupby("id")["repeat"].cumsum() - entries["repeat"]
    tokens = (entries["output_tokens"] - ahead).clip(upper=entries["repeat"])
    entries, tokens = entries[tokens > 0], tokens[tokens > 0]

    start, stop = entries["start"].to_numpy(dtype=np.int64), (entries["start"] + tokens).to_numpy(dtype=np.int64)
    last = pd.Series(ends[stop - 1], index=entries.index, dtype="int64")
    before = last.groupby(entries["id"]).shift(1, fill_value=-1).to_numpy(dtype=np.int64)
    # A sample that was forked from its sibling had its first token in a step that names the sibling only.
    before = np.where(before < 0, entries["first_token_ns"].to_numpy(dtype=np.int64), before)
    later = before < ends[start]
    between = (ends[start] - before)[later]

    size = len(ends)
    getting = np.cumsum(np.bincount(start, minlength=size + 1) - np.bincount(stop, minlength=size + 1))[:size]
    inner = np.ones(size, dtype=bool)
    inner[starts] = False  # the first step of each row: its gaps are those between rows
    within = np.diff(ends, prepend=ends[:1])[inner]
    return TokenGaps(
        np.concatenate([ends[start][later], ends[inner]]),
        np.concatenate([between, within]),
        np.concatenate([np.ones(len(between), dtype=np.int64), getting[inner]]),
    )


def pads_batches(scenario: Scenario) -> bool:
    """Whether the scenario's steps compute pads."""
    scheduler = scenario.scheduler
    return scheduler.policy == "static_batch" and scheduler.batching != "variable"


def _flat(lists: Iterable[Sequence[int]]) -> Ints:
    """A column of lists as one array."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.asarray(x, dtype=np.int64) for x in lists)])
