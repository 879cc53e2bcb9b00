"""Deferred frees: a block that other streams used comes back when an event on each of them has completed.

What has completed is input. An event completes when its stream reaches it (:meth:`EventTable.complete`) or when
somebody synchronizes; the block is free only when the allocator reaps, at the next request. One table serves all pools
of a device: a queue per stream, added at its first event and removed when found empty, walked in the order of
:mod:`~hbmtwin.allocators.caching.hash_order`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from hbmtwin.allocators.caching.blocks import Block, same_stream
from hbmtwin.allocators.caching.hash_order import HashOrder
from hbmtwin.allocators.caching.sizes import Flavour

LAZY_RECLAIM_LIMIT: Final = 512
"""With ``multi_stream_lazy_reclaim`` events are left alone until more than so many wait."""

Done = Callable[[Block], None]


def stream_key(flavour: Flavour, stream: int) -> int:
    """The key under which PyTorch hashes a stream: device type, device index (0), and the stream's id.

    torch_npu (device type 20): 0 for the default stream, 96 + k for the k-th created one. CUDA (device type 1): 0, and
    32 k + 3; this was not compared with a device.
    """
    stream = same_stream(stream)
    if flavour == "torch_npu":
        return 20 << 56 | (95 + stream if stream else 0)
    return 1 << 56 | (32 * (stream - 1) + 3 if stream else 0)


class Event(NamedTuple):
    """One use of a block that has to end."""

    number: int
    """Its place among all events of its stream, from 1."""
    block: Block


class EventTable:
    """The outstanding events of one device."""

    def __init__(self, flavour: Flavour) -> None:
        self._flavour: Flavour = flavour
        self._order = HashOrder()
        self.queues: dict[int, deque[Event]] = {}
        """By stream; one that nothing waits in is found and removed by the next reap."""
        self._recorded: dict[int, int] = {}
        self._completed: dict[int, int] = {}
        self.outstanding = 0
        """Events in all queues."""

    # -- uses of a live block --------------------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """*stream* uses the block: a set, so that a second use adds nothing."""
        if block.stream_uses is None:
            block.stream_uses = HashOrder()
        block.stream_uses.add(stream_key(self._flavour, stream))

    def erase_stream(self, block: Block, stream: int) -> None:
        """*stream* is done with the live block. It leaves a queue for *stream* behind, empty until the next reap."""
        key = stream_key(self._flavour, stream)
        if block.stream_uses is not None:
            block.stream_uses.discard(key)
        self._queue(key)

    def forget_uses(self, block: Block, streams: Iterable[int]) -> None:
        """A capture is over, and with it the uses of a waiting block by *streams* that were recorded during it."""
        over = {stream_key(self._flavour, stream) for stream in streams}
        left = HashOrder()
        for key in block.stream_uses or ():
            if key not in over:
                left.add(key)
        block.stream_uses = left

    # -- events ----------------------------------------------------------------------------------------------------

    def insert(self, block: Block) -> None:
        """Record an event on each stream that used the block, in the order of its set; the set is then empty."""
        uses = block.stream_uses or ()
        block.stream_uses = None
        for key in uses:
            number = self._recorded.get(key, 0) + 1
            self._recorded[key] = number
            self._queue(key).append(Event(number, block))
            block.event_count += 1
            self.outstanding += 1

    def complete(self, stream: int | None = None, count: int | None = None) -> None:
        """The *count* oldest incomplete events of a stream (all of it, of every stream) have completed."""
        keys = list(self._recorded) if stream is None else [stream_key(self._flavour, stream)]
        for key in keys:
            recorded, completed = self._recorded.get(key, 0), self._completed.get(key, 0)
            self._completed[key] = recorded if count is None else min(recorded, completed + count)

    def reap(self, done: Done) -> None:
        """Stream by stream take the completed events, oldest first; a block without any left is *done*.

        O(slots of the table + events taken).
        """

        def drain(key: int) -> bool:
            queue, completed = self.queues[key], self._completed.get(key, 0)
            while queue and queue[0].number <= completed:
                self._take(queue.popleft(), done)
            if not queue:
                del self.queues[key]
            return bool(queue)

        self._order.walk(drain)

    def wait_for_all(self, done: Done, concerns: Callable[[Block], bool] | None = None) -> None:
        """Synchronize every event, or those whose block *concerns* somebody, and take it. O(slots + events)."""

        def drain(key: int) -> bool:
            queue = self.queues[key]
            for event in list(queue):
                if concerns is None or concerns(event.block):
                    self._completed[key] = max(self._completed.get(key, 0), event.number)
                    queue.remove(event)
                    self._take(event, done)
            if not queue:
                del self.queues[key]
            return bool(queue)

        self._order.walk(drain)

    def check(self) -> None:
        """Assert all invariants."""
        assert set(self._order) == set(self.queues), "each queue has its place in the order"
        assert self.outstanding == sum(map(len, self.queues.values())), "outstanding events"
        for key, queue in self.queues.items():
            numbers = [event.number for event in queue]
            assert numbers == sorted(set(numbers)), "events of a stream are in order"
            assert not numbers or numbers[-1] <= self._recorded[key], "every event was recorded"

    def _queue(self, key: int) -> deque[Event]:
        if key not in self.queues:
            self.queues[key] = deque()
            self._order.add(key)
        return self.queues[key]

    def _take(self, event: Event, done: Done) -> None:
        self.outstanding -= 1
        event.block.event_count -= 1
        if event.block.event_count == 0:
            done(event.block)
