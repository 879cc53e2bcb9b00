"""What the engine asks of SimPy's clock beyond a plain timeout."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

import simpy
from simpy.events import EventPriority

LAST = EventPriority(2)
"""After every arrival of the same instant: one that comes exactly at a step's end is seen by the next step."""


class Last(simpy.Event):
    """A timeout that is handled after all other events of its instant."""

    def __init__(self, env: simpy.Environment, delay: int) -> None:
        self.env, self.callbacks = env, []  # as Event does; a call less for every leap
        self._ok = True
        self._value = None
        env.schedule(self, LAST, delay)


@contextmanager
def uncollected() -> Generator[None, None, None]:
    """Leave cyclic garbage alone: a run makes none, and looking for it among its objects takes 5 % of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
