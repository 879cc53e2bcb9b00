"""Priorities: classes of sessions, the first of which is served first where the scheduler heeds priorities."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hbmtwin.workloads.draws import Purpose, uniform
from hbmtwin.workloads.records import Request, Source, Status, WorkloadError


class Priorities:
    """A :class:`~hbmtwin.workloads.records.Source` whose sessions have priority k as often as ``weights[k]`` says.

    The draw is keyed by *seed* and session: all turns and samples of a session have the same, whatever the policy.
    Raise WorkloadError for weights that are negative or all 0.
    """

    def __init__(self, source: Source, weights: Sequence[float], *, seed: int = 0) -> None:
        if min(weights, default=0) < 0 or sum(weights) <= 0:
            raise WorkloadError(f"priorities must be weights from 0 on, one of them above 0, not {list(weights)}")
        self.source = source
        self._seed = seed
        total = sum(weights)
        self._bounds = [bound / total for bound in accumulate(weights)][:-1]
        self.total_requests: int | None = source.total_requests

    def open(self) -> Iterator[Request]:
        """The requests of the other source with their priorities. O(log(weights)) each."""
        return (self._ranked(r) for r in self.source.open())

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The other source's, with the priority of its session."""
        following = self.source.next_turn(r, end_ns, status)
        return None if following is None else self._ranked(following)

    def _ranked(self, r: Request) -> Request:
        drawn = uniform(self._seed, Purpose.PRIORITY, r.session, 0)
        return r._replace(priority=bisect_right(self._bounds, drawn))
