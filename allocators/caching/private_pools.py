"""Private pools (``torch.npu.MemPool``): while a pool's scope is entered, requests are served from its own blocks.

Pools never exchange blocks. A pool whose object lives keeps its memory, even when a request is about to fail; when the
object dies its free segments are released at once, and those with live tensors by later releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hbmtwin.allocators.caching.blocks import Block, FreeBlocks, PoolPair
from hbmtwin.allocators.caching.hash_order import HashOrder
from hbmtwin.allocators.caching.segments import UnsafeState


class PrivatePool(PoolPair):
    """The two block pools of one MemPool object."""

    def __init__(self, name: str, number: int, *, no_split: bool = False) -> None:
        super().__init__(self)
        self.name = name
        self.number = number
        self.no_split = no_split
        """Every request gets a whole segment."""
        self.use_count = 1
        """The object itself, and each scope that is entered."""
        self.device_allocations = 0
        """Segments, and requests that had to map less ranges unmapped: at 0 a dead pool is deleted."""

    @property
    def id(self) -> tuple[int, int]:
        """As torch shows it."""
        return (0, self.number)

    def count_free(self) -> None:
        """A segment was freed or a range unmapped. Raise UnsafeState below 0."""
        if self.device_allocations == 0:
            raise UnsafeState(
                f"pool {self.name!r} would count more ranges unmapped than requests that mapped some: the real "
                "allocator aborts the process here. Do not use expandable_segments with a MemPool that dies before "
                "its tensors"
            )
        self.device_allocations -= 1


class PrivatePools:
    """All private pools of a device: which live, which are entered, which may be released."""

    def __init__(self, default: PoolPair) -> None:
        self._names: dict[str, PrivatePool | None] = {}
        """By name; None is a pool whose object is dead (its name is not used again)."""
        self.by_number: dict[int, PrivatePool] = {}
        """Pools that have or may get memory, dead ones included."""
        self.scopes: list[PoolPair] = [default]
        """The default pools, then those that were entered; requests go to the last."""
        self.freeable = HashOrder()
        """Numbers of dead pools that still hold memory."""
        self._on_oom = HashOrder()
        """Numbers of pools that serve others' requests before those fail."""

    def begin(self, name: str, *, use_on_oom: bool, no_split: bool) -> PrivatePool:
        """Enter a pool, made at its first mention. Raise RuntimeError if it is dead, or entered already.

        The failure to enter it twice is counted as a use all the same, as in torch: the pool is never released then.
        """
        if name not in self._names:
            pool = PrivatePool(name, len(self._names) + 1, no_split=no_split)
            self._names[name] = self.by_number[pool.number] = pool
            if use_on_oom:
                self._on_oom.add(pool.number)
        pool = self._alive(name)
        pool.use_count += 1
        if pool in self.scopes:
            raise RuntimeError(f"already recording to mempool_id {pool.id}: pool {name!r} is entered; end it first")
        self.scopes.append(pool)
        return pool

    def end(self, name: str) -> PrivatePool:
        """Leave a pool; scopes need not nest. Raise RuntimeError if it is not entered."""
        pool = self._alive(name)
        if pool not in self.scopes:
            raise RuntimeError(f"not recording to mempool_id {pool.id}: pool {name!r} is not entered")
        pool.use_count -= 1
        self.scopes.remove(pool)
        return pool

    def delete(self, name: str) -> PrivatePool:
        """The pool's object dies; unused, its memory may be released. Raise RuntimeError while the pool is entered."""
        pool = self._alive(name)
        if pool in self.scopes:
            raise RuntimeError(f"pool {name!r} is entered; end its scope before the object dies")
        pool.use_count -= 1
        self._names[name] = None
        self._on_oom.discard(pool.number)
        if pool.use_count == 0:
            self.freeable.add(pool.number)
        return pool

    def on_oom(self) -> list[PrivatePool]:
        """Pools that opted in, in the order in which they are searched."""
        return [self.by_number[number] for number in self._on_oom]

    def release_dead(
        self,
        release: Callable[[PrivatePool], None],
        active: Callable[[], Iterable[Block]],
        forget: Callable[[FreeBlocks], None],
    ) -> None:
        """Let *release* take what dead pools have cached; a pool without driver memory left is deleted (*forget*).

        Raise UnsafeState if a pool counts none and has some.
        """

        def keep(number: int) -> bool:
            pool = self.by_number[number]
            release(pool)
            if pool.device_allocations:
                return True
            if any(home.blocks for home in pool.homes()) or any(b.home.pool.private is pool for b in active()):
                raise UnsafeState(
                    f"pool {pool.name!r} would be destroyed under its blocks: the real allocator counts requests that "
                    "mapped memory against ranges unmapped, and they came out equal too early. Do not use "
                    "expandable_segments with a MemPool that dies before its tensors"
                )
            for home in pool.homes():
                forget(home)
            del self.by_number[number]
            return False

        self.freeable.walk(keep)

    def __iter__(self) -> Iterator[PrivatePool]:
        return iter(self.by_number.values())

    def _alive(self, name: str) -> PrivatePool:
        pool = self._names.get(name)
        if pool is None:
            state = "is deleted" if name in self._names else "does not exist"
            raise RuntimeError(f"pool {name!r} {state}; names are used once")
        return pool
