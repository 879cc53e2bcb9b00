"""The tasks that one session waits for; a session that is gone waits no longer.

::

    slot of a page -> Task        a page has one at a time
    connection lost -> a minute's grace -> each is left, and cancelled if nobody else waits for it
                    -> there again within it: all goes on
                    -> another session asks for the same: it takes that over

A page that is loaded anew is another session, which has the same address and so asks for the same. A browser says
nothing when its window is closed. Streamlit drops what it caches for a session once its connection is
lost, and tells of that: it is the only end of a session that can be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping

from hbmtwin.dashboard.app.workers import Task, Workers

GRACE_S = 60.0
"""Streamlit keeps what a lost session had for twice as long: so long it may come again."""


class Departed:
    """The sessions in their grace, of the whole app."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[int, SessionTasks] = {}

    def add(self, session: SessionTasks) -> None:
        """One is not there any more."""
        with self._lock:
            self._sessions[id(session)] = session

    def discard(self, session: SessionTasks) -> None:
        """One is there again, or its grace has ended."""
        with self._lock:
            self._sessions.pop(id(session), None)

    def take(self, slot: str, key: str) -> Task | None:
        """What one of them waits for in that slot under that key: from now on the caller does. O(sessions)."""
        with self._lock:
            sessions = list(self._sessions.values())
        return next((task for session in sessions if (task := session.give(slot, key)) is not None), None)


class SessionTasks(MutableMapping[str, Task]):
    """By their slots. Those that are left out are not left: :meth:`Workers.leave` is the caller's."""

    def __init__(self, workers: Workers, departed: Departed, grace_s: float = GRACE_S) -> None:
        self._workers = workers
        self._departed = departed
        self._grace_s = grace_s
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._departures = 0

    def came(self) -> None:
        """The session is there, for the first time or again."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._departed.discard(self)

    def went(self) -> None:
        """The session is not there; if it does not come again, its tasks are left."""
        with self._lock:
            if self._timer is None:
                self._departures += 1
                self._timer = threading.Timer(self._grace_s, self._leave_all, (self._departures,))
                self._timer.daemon = True
                self._timer.start()
        self._departed.add(self)

    def give(self, slot: str, key: str) -> Task | None:
        """Its task of that slot and key, which is no longer its own; None if there is none, or the session is there."""
        with self._lock:
            task = self._tasks.get(slot)
            if self._timer is None or task is None or task.key != key:
                return None
            return self._tasks.pop(slot)

    def _leave_all(self, departure: int) -> None:
        with self._lock:
            if self._timer is None or departure != self._departures:  # it came at the last moment
                return
            self._timer = None
            tasks, self._tasks = list(self._tasks.values()), {}
        self._departed.discard(self)
        for task in tasks:
            self._workers.leave(task)

    def __getitem__(self, slot: str) -> Task:
        return self._tasks[slot]

    def __setitem__(self, slot: str, task: Task) -> None:
        self._tasks[slot] = task

    def __delitem__(self, slot: str) -> None:
        del self._tasks[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)
