"""Requests whose times are ticks, spread over the tick they share.

::

    tick 3 s      0 0 0 | 3 3 | 9              in the file
    spread        .4 1.9 2.2 | 3.1 5.0 | 9.7   n draws, sorted: within a tick arrivals are then as of a Poisson process

A recorder that writes a time every 3 s makes a burst of what was none: the gaps of Mooncake's conversations have a CV
of 3 that is its clock's, not its users'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hbmtwin.workloads.draws import Purpose, uniform
from hbmtwin.workloads.formats.rows import Row


def spread(rows: Iterable[Row], tick_ns: int, seed: int) -> Iterator[Row]:
    """Rows with times drawn evenly from each tick, in their old order; what shares no tick moves within its own too.

    A tick ends *tick_ns* after its time, or where the next begins. The n-th row of a file has the same draw whatever
    is in the others. O(rows log(rows of a tick)); one tick's rows are held.
    """
    tick: list[Row] = []
    drawn = 0
    for row in rows:
        if tick and row.time_ns != tick[0].time_ns:
            yield from _spread(tick, min(tick_ns, row.time_ns - tick[0].time_ns), seed, drawn)
            drawn += len(tick)
            tick = []
        tick.append(row)
    yield from _spread(tick, tick_ns, seed, drawn)


def _spread(tick: list[Row], width_ns: int, seed: int, first: int) -> Iterator[Row]:
    moves = sorted(int(width_ns * uniform(seed, Purpose.JITTER, first + i, 0)) for i in range(len(tick)))
    return (row._replace(time_ns=row.time_ns + move) for row, move in zip(tick, moves, strict=True))
