"""Requests on their way to the server: traffic as it comes, and next turns whose time has not come.

::

    traffic     r0  r1      r2 ...        one event of SimPy at a time; what comes later is not drawn yet
    next turns      r0's second turn      an event each, once its predecessor has ended
    closed      nobody is let in any more: who was still to come is unsent
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import simpy

from hbmtwin.workloads.records import Request


class Inbox:
    """Hands each request to *submit* at its time. Raise WorkloadError from traffic that is bad."""

    def __init__(self, env: simpy.Environment, traffic: Iterator[Request], submit: Callable[[Request], None]) -> None:
        self.closed = False
        """Set when the run ends before its traffic does."""
        self._env = env
        self.traffic = traffic
        """What was not drawn yet."""
        self._submit = submit
        self.to_come: dict[int, Request] = {}
        """Next turns whose time has not come, and whom it was closed to."""
        self._start()

    def _start(self) -> None:
        self._env.process(self._arrivals())

    def follow(self, r: Request, now_ns: int) -> None:
        """Submit the next turn of a session when it arrives: at once if it waits for its predecessor only."""
        if r.arrival_ns <= now_ns:
            self._submit(r)
            return
        self.to_come[r.id] = r
        timeout = self._env.timeout(r.arrival_ns - now_ns)  # no process: its start would cut the next leap
        timeout.callbacks.append(lambda _: self._arrive(r))

    def left(self) -> None:
        """A request has left the server. Nobody waits for that here."""

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        env, submit = self._env, self._submit
        now = int(env.now)
        for r in self.traffic:
            if (ahead_ns := r.arrival_ns - now) > 0:
                yield env.timeout(ahead_ns)
                now += ahead_ns
            if self.closed:
                self.to_come[r.id] = r
                return
            submit(r)

    def _arrive(self, r: Request) -> None:
        if not self.closed:
            del self.to_come[r.id]
            self._submit(r)
