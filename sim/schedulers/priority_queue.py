"""A queue of requests in order of priority, the smallest number first, then of arrival.

::

    priority   0  0  1  7        who waits since when does not matter to those of smaller number;
    arrival    3  9  2  1        one that was preempted stands again where it stood
    id         .  .  .  .        in the same instant: in order of id

The order is that of vLLM's ``scheduling_policy = "priority"``.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from hbmtwin.sim.scheduler import Entry


def order(entry: Entry) -> tuple[int, int]:
    """What the queue is sorted by, and by what a victim is chosen: the largest gives way."""
    return entry.request.priority, entry.request.arrival_ns


class PriorityQueue(deque[Entry]):
    """A deque that puts an entry where its priority says, whichever end it is given to.

    O(1) at its head, O(waiting) to put one in.
    """

    def append(self, entry: Entry, /) -> None:
        """Put a request in."""
        insort(self, entry, key=lambda e: (*order(e), e.request.id))

    appendleft = append
