"""The tasks that one session waits for; a session that is gone waits no longer.

::

    slot of a page -> Task        a page has one at a time
    connection lost -> a minute's grace -> each is left, and cancelled if nobody else waits for it
                    -> there again within it: all goes on

A browser says nothing when its window is closed. Streamlit drops what it caches for a session once its connection is
lost, and tells of that: it is the only end of a session that can be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping

from hbmtwin.dashboard.app.workers import Task, Workers

GRACE_S = 60.0
"""Streamlit keeps what a lost session had for twice as long: so long it may come again."""


class SessionTasks(MutableMapping[str, Task]):
    """By their slots. Those that are left out are not left: :meth:`Workers.leave` is the caller's."""

    def __init__(self, workers: Workers, grace_s: float = GRACE_S) -> None:
        self._workers = workers
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

    def went(self) -> None:
        """The session is not there; if it does not come again, its tasks are left."""
        with self._lock:
            if self._timer is None:
                self._departures += 1
                self._timer = threading.Timer(self._grace_s, self._leave_all, (self._departures,))
                self._timer.daemon = True
                self._timer.start()

    def _leave_all(self, departure: int) -> None:
        with self._lock:
            if self._timer is None or departure != self._departures:  # it came at the last moment
                return
            self._timer = None
            tasks, self._tasks = list(self._tasks.values()), {}
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
