"""Which steps of a run are measured whole, where all of them would take too long: the same ones every time.

::

    kind, sequences    steps of the run     time of them     measured of 12
    decode, 1              200                 2 s               1
    decode, 5 to 8       2,400                40 s               5        shares go by time, each has one at least
    mixed, 5 to 8           90                22 s               3
    prefill, 1               6                 3 s               2
    the longest step         1                                   1        always, and it stands for itself alone

Batches of 1, 2, 3 to 4, 5 to 8, 9 to 16 ... sequences are one stratum each, by kind. Within one, steps are put in order
of their predicted time, and the middles of equal shares are taken. A measured step stands for its share of its stratum,
so that a total of all steps can be told from few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hbmtwin.validation.run_replay.sampling import KINDS, Batch

Ints = NDArray[np.int64]


class Chosen(NamedTuple):
    """A step, and how many of the run it stands for, itself among them."""

    batch: Batch
    stands_for: float


class RunSteps:
    """Every step of a run, leaps taken apart, without an object for each."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._new: list[Ints] = [np.asarray(row, np.int64) for row in table["new_tokens"]]
        self._context: list[Ints] = [np.asarray(row, np.int64) for row in table["context_tokens"]]
        self._numbers = table["step"].to_numpy(dtype=np.int64)
        starts = table["start_ns"].to_numpy(dtype=np.int64)
        times: list[Ints] = [
            np.asarray(ends, np.int64) - np.concatenate([[start], ends[:-1]]).astype(np.int64)
            for start, ends, new in zip(starts, table["step_ends_ns"], self._new, strict=True)
            if len(new)
        ]
        rows = [row for row, new in enumerate(self._new) if len(new)]
        counts = [len(t) for t in times]
        self.times_ns: Ints = np.concatenate(times) if times else np.empty(0, np.int64)
        """Of each step, as predicted; steps of nobody are none."""
        self._rows: Ints = np.repeat(np.array(rows, np.int64), counts)
        self._offsets: Ints = np.concatenate([np.arange(n) for n in counts]) if counts else np.empty(0, np.int64)
        strata = {row: _stratum(self._new[row]) for row in rows}
        self.strata: Ints = np.repeat(np.array([strata[row] for row in rows], np.int64), counts)

    def __len__(self) -> int:
        return len(self.times_ns)

    def batch(self, i: int) -> Batch:
        """The batch of the *i*-th step."""
        row, offset = int(self._rows[i]), int(self._offsets[i])
        return Batch(
            row,
            int(self._numbers[row]) + offset,
            tuple(self._new[row].tolist()),
            tuple((self._context[row] + offset).tolist()),
            int(self.times_ns[i]),
        )


def choose(steps: RunSteps, most: int) -> tuple[Chosen, ...]:
    """At most *most* of them, in order; all where there are no more. O(steps log steps).

    With fewer than strata, those that take most of the time have one each, and the others nobody stands for.
    """
    if len(steps) <= most:
        return tuple(Chosen(steps.batch(i), 1.0) for i in range(len(steps)))
    longest = int(steps.times_ns.argmax())
    chosen = {longest: 1.0}
    others = np.delete(np.arange(len(steps)), longest)
    members = {int(s): others[steps.strata[others] == s] for s in np.unique(steps.strata[others])}
    weights = {s: int(steps.times_ns[m].sum()) for s, m in members.items()}
    for s, count in _shares(weights, {s: len(m) for s, m in members.items()}, most - 1).items():
        ordered = members[s][np.argsort(steps.times_ns[members[s]], kind="stable")]
        for i in range(count):
            chosen[int(ordered[(2 * i + 1) * len(ordered) // (2 * count)])] = len(ordered) / count
    return tuple(Chosen(steps.batch(i), chosen[i]) for i in sorted(chosen))


def _stratum(new_tokens: Ints) -> int:
    """Kind and number of sequences: 1, 2, 3 to 4, 5 to 8, ..."""
    sequences = len(new_tokens)
    kind = Batch(0, 0, tuple(new_tokens.tolist()), (), 0).kind
    return (sequences - 1).bit_length() * len(KINDS) + KINDS.index(kind)


def _shares(weights: dict[int, int], most_of: dict[int, int], total: int) -> dict[int, int]:
    """*total*, dealt out by weight: one each, the heaviest first, then to whom most is missing."""
    order: Sequence[int] = sorted(weights, key=lambda s: (-weights[s], s))[:total]
    shares = dict.fromkeys(order, 1)
    whole = sum(weights.values()) or 1
    for _ in range(total - len(shares)):
        open_ = [s for s in order if shares[s] < most_of[s]]
        if not open_:
            break
        shares[max(open_, key=lambda s: (total * weights[s] / whole - shares[s], -s))] += 1
    return shares
