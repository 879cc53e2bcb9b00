"""The program as a process: streams that its caller closed, signals, and the memory of the machine."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes: 128 and the number of the signal, as shells have it."""


class Terminated(BaseException):
    """SIGTERM as an exception, so that it cleans up on its way as Ctrl-C does."""


def interrupted() -> int:
    """Say so on stderr, and return the exit code.

    Python notes an interrupt that leaves an ``exec`` of a string, as dataclasses run on import, even if somebody takes
    it further out, and `python -m` then ends by SIGINT in place of its exit code; the next ``exec`` forgets the note.
    """
    exec("")
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def open_closed_streams() -> None:
    """Send to nowhere what was closed (`hbmtwin >&-`): Python has no stream for it, and workers would have none."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def print_what_can_be_shown() -> None:
    """Print a question mark for a letter that the terminal's encoding lacks, rather than fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated on the first SIGTERM, and let the clean-up that follows finish undisturbed."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # no other thread may have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def machine_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
