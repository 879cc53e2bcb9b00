"""A server for traffic to run against: it serves everybody at once, and answers after a time of the test's choosing."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import pytest

from hbmtwin.workloads import Request, Source, Status


class Served(NamedTuple):
    request: Request
    end_ns: int


Play = Callable[..., list[Served]]


def _play(
    source: Source,
    service_ns: int | Callable[[Request], int],
    status: Callable[[Request], Status] = lambda r: Status.COMPLETED,
) -> list[Served]:
    """Run *source* to its end as the engine does (one arrival read ahead); requests in the order of submission."""
    arrivals = source.open()
    upcoming = next(arrivals, None)
    later: list[tuple[int, int, Request]] = []
    ends: list[tuple[int, int, Request]] = []
    served: list[Served] = []
    while upcoming is not None or later or ends:
        next_end = ends[0][0] if ends else None
        due = [r.arrival_ns for r in (upcoming, later[0][2] if later else None) if r is not None]
        if next_end is not None and (not due or next_end <= min(due)):
            end_ns, _, r = heapq.heappop(ends)
            following = source.next_turn(r, end_ns, status(r))
            if following is not None:
                heapq.heappush(later, (following.arrival_ns, following.id, following))
            continue
        if upcoming is not None and (not later or upcoming.arrival_ns <= later[0][0]):
            r, upcoming = upcoming, next(arrivals, None)
        else:
            r = heapq.heappop(later)[2]
        end_ns = r.arrival_ns + (service_ns if isinstance(service_ns, int) else service_ns(r))
        served.append(Served(r, end_ns))
        heapq.heappush(ends, (end_ns, r.id, r))
    return served


@pytest.fixture(scope="session")
def play() -> Play:
    return _play
