"""At most so many requests in the server, as the semaphore of ``vllm bench serve --max-concurrency`` has it.

::

    traffic  r7 r6 r5 | r4        | r0 r1 r2 r3
    not drawn yet     | waits at  | in the server, max_concurrency = 4
                      | the client|

Who is due and finds no room waits at the client, first come, first sent; its arrival is the moment when it is sent, so
that the wait is no part of its TTFT. Of the traffic one request at most waits, and the next is drawn when that one is
sent: a million requests that are all due at once take no memory. Next turns wait in the same queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count

import simpy

from hbmtwin.sim.inbox import Inbox
from hbmtwin.workloads.records import Request


class LimitedInbox(Inbox):
    """An inbox that lets *max_concurrency* requests in and the others as these leave. O(log waiting) each."""

    def __init__(
        self,
        env: simpy.Environment,
        traffic: Iterator[Request],
        submit: Callable[[Request], None],
        max_concurrency: int,
    ) -> None:
        super().__init__(env, traffic, self._admit)
        self._send = submit
        self._free = max_concurrency
        self._waiting: list[tuple[int, int, Request]] = []
        """By the time when they were due, then in the order of coming; all are in :attr:`to_come` as well."""
        self._came = count()
        self._drawn_id: int | None = None
        """Of the traffic's request that waits."""

    def left(self) -> None:
        """Send who has waited longest."""
        self._free += 1
        if not self._waiting or self.closed:
            return
        r = heappop(self._waiting)[2]
        del self.to_come[r.id]
        self._free -= 1
        self._send(r._replace(arrival_ns=int(self._env.now)))
        if r.id == self._drawn_id:
            self._drawn_id = None
            self._draw()

    def _start(self) -> None:
        self._env.timeout(0).callbacks.append(lambda _: self._draw())

    def _draw(self) -> None:
        """Take requests of the traffic up to one that lies ahead, or finds no room: that one goes on with it."""
        for r in self.traffic:
            ahead_ns = r.arrival_ns - int(self._env.now)
            if ahead_ns > 0:
                self._later(r, ahead_ns)
                return
            if not self._drawn(r):
                return

    def _later(self, r: Request, ahead_ns: int) -> None:
        self.to_come[r.id] = r
        self._env.timeout(ahead_ns).callbacks.append(lambda _: self._due(r))

    def _due(self, r: Request) -> None:
        if not self.closed:
            del self.to_come[r.id]
            if self._drawn(r):
                self._draw()

    def _drawn(self, r: Request) -> bool:
        """Send one of the traffic, or let it wait; whether there was room."""
        room = self._free > 0
        if not room:
            self._drawn_id = r.id
        self._admit(r)
        return room

    def _admit(self, r: Request) -> None:
        if self._free and not self.closed:
            self._free -= 1
            self._send(r)
        else:
            self.to_come[r.id] = r
            heappush(self._waiting, (r.arrival_ns, next(self._came), r))
