"""Jobs that take long, in processes beside the app: at most so many at once, with progress, and cancelled at will.

::

    start(key, job) -> Task       one that is under way by that key already is shared
    Task: waiting -> running -> done | failed | cancelled | lost

A script of Streamlit runs anew at each click, in a thread of its session; what takes long must not stand in it. One
process is kept warm (the simulator takes most of a second to import): the one that has just done a job, unless it ends
to give back its memory. Threads here only read lines; all of a task's fields change under one lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["waiting", "running", "done", "failed", "cancelled", "lost"]
"""``lost``: its process ended without a word, as one does that the system kills for its memory."""
WORKER = "hbmtwin.dashboard.app.worker"
UNMENTIONED = "ignore:resource_tracker:UserWarning"
"""What joblib's trackers say of semaphores when a worker ends in mid-run, as with the app; they clean them up."""
WARM_UP_AFTER_S = 3.0
"""After a job has ended: importing the simulator takes a second of a core."""
MOST_WAITING = 64
"""Jobs that wait their turn: more is somebody's script, not somebody's clicks."""


class TooManyJobs(RuntimeError):
    """So many wait already that another is not taken."""


@dataclass(eq=False)
class Task:
    """One job: how far it is, and how it ended. Read its fields at any time."""

    key: str
    job: Mapping[str, Any]
    state: State = "waiting"
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What its worker said last."""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Of one that is done: what came with it."""
    message: str = ""
    """Of one that failed: what, where, and the cure."""
    watchers: int = 0
    """Sessions that wait for it."""
    _process: subprocess.Popen[str] | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state not in ("waiting", "running")

    def wait(self, most_s: float) -> None:
        """Return at its end, or after *most_s*."""
        self._over.wait(most_s)


class Workers:
    """The jobs of all sessions of the app: *slots* run at once, the others wait in the order in which they came."""

    def __init__(self, slots: int | None = None, *, finished: Callable[[Task], None] | None = None) -> None:
        self._slots = slots or max(1, (os.cpu_count() or 2) - 1)
        self._finished = finished
        self._lock = threading.Lock()
        self._under_way: dict[str, Task] = {}
        self._waiting: deque[Task] = deque()
        self._running = 0
        self._spare: subprocess.Popen[str] | None = None
        self._closed = False
        self._warm_up()

    def start(self, key: str, job: Mapping[str, Any]) -> Task:
        """The task that does *job*, begun now or shared with whoever began it. Raise TooManyJobs."""
        with self._lock:
            task = self._under_way.get(key)
            if task is None:
                if len(self._waiting) >= MOST_WAITING:
                    raise TooManyJobs(f"{MOST_WAITING} runs wait already: try again when some have ended")
                task = self._under_way[key] = Task(key, job)
                self._waiting.append(task)
            task.watchers += 1
            self._next()
        return task

    def leave(self, task: Task) -> None:
        """A session waits for it no longer; it is cancelled once none does."""
        with self._lock:
            task.watchers -= 1
            if task.watchers > 0 or task.ended:
                return
            process = task._process
            self._end(task, "cancelled")
        if process is not None:
            _kill(process)  # what it wrote lies in a directory that no result ever has the name of

    def close(self) -> None:
        """End all of it; nothing is started any more."""
        with self._lock:
            self._closed = True
            tasks, spare = list(self._under_way.values()), self._spare
            self._spare = None
            for task in tasks:
                self._end(task, "cancelled")
        for process in [*(task._process for task in tasks), spare]:
            if process is not None:
                _kill(process)

    def waiting_before(self, task: Task) -> int:
        """How many come before it."""
        with self._lock:
            return self._waiting.index(task) if task in self._waiting else 0

    def _next(self) -> None:
        """Start what there is room for. Called with the lock held."""
        while self._waiting and self._running < self._slots and not self._closed:
            task = self._waiting.popleft()
            task.state = "running"
            self._running += 1
            if self._spare is not None and self._spare.poll() is not None:  # somebody killed it meanwhile
                _kill(self._spare)
                self._spare = None
            task._process, self._spare = self._spare or _process(), None
            threading.Thread(target=self._serve, args=(task, task._process), daemon=True).start()

    def _serve(self, task: Task, process: subprocess.Popen[str]) -> None:
        """Give a process its job, and read what it says to its end."""
        said: dict[str, Any] = {}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(task.job) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if "done" in said or "error" in said:
                    break
                if "ready" not in said:
                    with self._lock:
                        task.progress = said
        except (OSError, ValueError):  # it is gone, or was cut off in the middle of a line
            said = {}
        with self._lock:
            kept = bool(said.get("again")) and self._spare is None and not (task.ended or self._closed)
            if kept:
                self._spare = process
            self._running -= 1
            if not task.ended:
                if "done" in said:
                    task.outcome = said
                    self._end(task, "done")
                elif "error" in said:
                    task.message = said["error"]
                    self._end(task, "failed")
                else:
                    self._end(task, "lost")
            self._next()
        if not kept:
            _kill(process)
        if task.state == "done" and self._finished is not None:
            self._finished(task)  # it may read a whole directory: nobody waits for it
        later = threading.Timer(WARM_UP_AFTER_S, self._warm_up)  # the picture that somebody waits for comes first
        later.daemon = True
        later.start()

    def _end(self, task: Task, state: State) -> None:
        """Called with the lock held."""
        task.state = state
        task._over.set()
        self._under_way.pop(task.key, None)
        if task in self._waiting:
            self._waiting.remove(task)

    def _warm_up(self) -> None:
        """Have a process that waits for the next job; where no other may begin, one that is busy will be it."""
        with self._lock:
            if self._spare is None and self._running < self._slots and not self._closed:
                self._spare = _process()


def _kill(process: subprocess.Popen[str]) -> None:
    """End it, and the processes that it has started: they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)  # joblib's trackers ignore it, remove what the others leave, and end
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _process() -> subprocess.Popen[str]:
    """A worker that waits for its job; Ctrl-C at the app's terminal is the app's."""
    return subprocess.Popen(
        [sys.executable, "-P", "-W", UNMENTIONED, "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
