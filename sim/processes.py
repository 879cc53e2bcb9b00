"""Worker processes of this machine: how many, how they start, and how they end, whatever interrupts us.

::

    Ctrl-C, SIGTERM, an error      we kill them                            kill_workers
    the end of the work            they end, and we wait for it            end_workers
    SIGKILL, a crash, no memory    each sees that its parent is gone       ends_with_us
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask, raise_signal, signal
from typing import Any

from joblib import cpu_count
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.backend import resource_tracker as loky_tracker

PARENT_EVERY_S = 1.0
"""A worker looks so often whether its parent is there."""


def ends_with_us() -> dict[str, Any]:
    """What joblib's ``Parallel`` is given so that its workers end when this process does, even by SIGKILL.

    Loky's own would wait for the next call, for 300 s, with all the memory that they have.
    """
    return {"initializer": _end_with, "initargs": (os.getpid(),)}


def _end_with(parent: int) -> None:
    """In a worker: end once *parent* has, in the midst of a run too, for nobody is there who would take its row."""

    def watch() -> None:
        while os.getppid() == parent:  # the system gives an orphan another one
            time.sleep(PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="ends-with-its-parent", daemon=True).start()


def cores(jobs: int) -> int:
    """How many processes *jobs* asks for: -1 is one a core."""
    return int(cpu_count()) if jobs < 0 else max(1, jobs)


@contextmanager
def workers_deaf_to_ctrl_c() -> Iterator[None]:
    """Start workers that block SIGINT: a terminal sends it to them as well, and they would each print a traceback.

    We kill them when it reaches us. A process inherits what its parent blocks, so for these 30 ms we block it too; one
    that comes meanwhile, be it to another thread of ours, is raised at the end of them.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread may have handlers
        yield
        return
    resource_tracker.ensure_running()  # a start of either inside would unblock SIGINT
    loky_tracker.ensure_running()
    came: list[int] = []
    handler = signal(SIGINT, lambda number, frame: came.append(number))
    mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, mask)  # one that waited comes now
        signal(SIGINT, handler)
        if came:
            raise_signal(SIGINT)


def end_workers() -> None:
    """Wait until idle workers have ended: left to the interpreter, an interrupt of its end would print a traceback."""
    get_reusable_executor(reuse=True).shutdown(wait=True)


def kill_workers(coming: Generator[Any, None, None] | None) -> None:
    """Kill workers with all that they do; *coming* is joblib's generator of what they return."""
    with _lost_calls_unmentioned():
        give_up(coming)
        get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def give_up(coming: Generator[Any, None, None] | None) -> None:
    """Let joblib give up what is under way; a generator that is closed instead warns of what was not run."""
    if coming is not None:
        with suppress(BaseException):
            coming.throw(KeyboardInterrupt)


@contextmanager
def _lost_calls_unmentioned() -> Iterator[None]:
    """Keep loky's thread from printing a traceback of a call that it was about to send.

    When told to kill, it forgets the calls, kills the workers, and then looks up the next call to send: a KeyError, if
    joblib added one since it last looked (a result that came in at the moment of the interrupt). Nothing is left to be
    done by then (loky 3.5, ``_ExecutorManagerThread.run``).
    """
    told = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        name = None if args.thread is None else args.thread.name
        if (name, args.exc_type) != ("ExecutorManagerThread", KeyError):
            told(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = told
