"""In what order PyTorch's hash table walks its keys: the order in which streams are reaped and pools are searched.

``ska::flat_hash_map`` (``c10/util/flat_hash_map.h``) is a Robin Hood table with Fibonacci hashing; since its keys here
are numbers and not pointers, the order can be computed. Told in the words of that file::

    N slots, N a power of two, and max(4, log2 N) more behind them: a probe never wraps around
    wanted slot of a key = (11400714819323198485 x key mod 2^64) >> (64 - log2 N)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

_FIBONACCI: Final = 11400714819323198485
_WORD: Final = (1 << 64) - 1
_MIN_SLOTS: Final = 4
_MIN_PROBES: Final = 4


class HashOrder:
    """A set of integers, walked in slot order. All verbs O(1) but for the walk, O(slots)."""

    __slots__ = ("_keys", "_probes", "_shift", "_size", "_slots")

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._size = 0
        self._shift = 64
        self._probes = _MIN_PROBES
        self._slots: list[int | None] = []

    def __iter__(self) -> Iterator[int]:
        return (key for key in self._slots if key is not None)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def add(self, key: int) -> None:
        """Add a key, unless it is there."""
        if key not in self._keys:
            self._emplace(key)
            self._keys.add(key)

    def discard(self, key: int) -> None:
        """Remove a key, if it is there: those behind it move one slot back until one is empty or at home."""
        if key in self._keys:
            self._keys.remove(key)
            self._remove_at(self._slots.index(key))

    def walk(self, keep: Callable[[int], bool]) -> None:
        """Call *keep* for each key, going up the slots; one it does not keep goes, and the slot is looked at again."""
        at = 0
        while at < len(self._slots):
            key = self._slots[at]
            if key is not None and not keep(key):
                self._keys.remove(key)
                self._remove_at(at)
            else:
                at += 1

    def _wanted(self, key: int) -> int:
        return (_FIBONACCI * key & _WORD) >> self._shift

    def _distance(self, at: int) -> int:
        """How far the key in a slot is from the one it wanted; -1 for an empty slot."""
        key = self._slots[at]
        return -1 if key is None else at - self._wanted(key)

    def _emplace(self, key: int) -> None:
        """Take the first slot that is empty or whose owner is nearer to home; that owner then moves on likewise."""
        if not self._size:
            self._rebuild()
        at = self._wanted(key)
        distance = 0
        while self._distance(at) >= distance:
            at += 1
            distance += 1
        if distance == self._probes or 2 * (len(self) + 1) > self._size:
            self._rebuild()
            self._emplace(key)
            return
        first = at
        moving, distance = self._put(key, at)
        while moving is not None:
            at += 1
            distance += 1
            if self._distance(at) < distance:
                moving, distance = self._put(moving, at)
            elif distance + 1 == self._probes:
                # The last one displaced has no place: it takes the new key's, which comes in after the rebuild.
                self._slots[first] = moving
                self._rebuild()
                self._emplace(key)
                return

    def _put(self, key: int, at: int) -> tuple[int | None, int]:
        """Take a slot; return its last owner, and how far that one was from home."""
        held, distance = self._slots[at], self._distance(at)
        self._slots[at] = key
        return held, distance

    def _rebuild(self) -> None:
        """Twice the slots, the old ones brought over in order. The table never shrinks."""
        old = [key for key in self._slots if key is not None]
        self._size = max(_MIN_SLOTS, 2 * self._size)
        bits = self._size.bit_length() - 1
        self._shift = 64 - bits
        self._probes = max(_MIN_PROBES, bits)
        self._slots = [None] * (self._size + self._probes)
        for key in old:
            self._emplace(key)

    def _remove_at(self, at: int) -> None:
        slots = self._slots
        slots[at] = None
        at += 1
        while at < len(slots) and self._distance(at) > 0:
            slots[at - 1], slots[at] = slots[at], None
            at += 1
