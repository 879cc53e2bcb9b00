"""Waiting for what is to be seen, however busy the machine is: a time that has passed says nothing.

Patience costs nothing where all is well; it only ends a test that would wait for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 180.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def until(true: Callable[[], object], every_s: float = 0.05) -> bool:
    """Wait for it; False once patience has ended."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def alive(session: int) -> dict[int, str]:
    """Processes of a session that have not ended, by their command lines."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found[int(stat.parent.name)] = stat.with_name("cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def worked_s(process: int) -> float:
    """Seconds of a core that it has had: how far it is, whatever else the machine does. 0 of one that has ended."""
    try:
        user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(user) + int(system)) / TICKS_A_SECOND
