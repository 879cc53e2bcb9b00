"""Keys of full KV blocks: equal keys mean an equal prefix of tokens, in whatever spans it was told.

::

    spans        | sys 0..5 | user 0..4 | ...         block size 4
    blocks       | sys 0..3 | sys 4..5 user 0..1 | ...
    keys         k0 = (none, sys, 0)     k1 = (k0, pieces 1)   k2 = (k1, pieces 2) ...

vLLM hashes (parent's hash, tokens of the block); here each such pair is interned to a small integer instead, so that
no two differing prefixes ever share a key. Ids and order of blocks do not depend on the values of keys.
A key is dropped when no sequence, no block and no longer key needs it any more.

Those of a session's next turn go on from those of the turn before, if they are known still.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.allocators.records import KVSequence, Span

NO_KEY = -1
"""Of a block without one; and the parent of the first key of a chain."""
ENDED_CHAINS = 4096
"""Sessions whose next turn may go on from the keys of the last: a matter of speed and memory only."""

_MadeOf = tuple[int, str | int, int] | tuple[int, tuple[Span, ...]]
"""Parent, and the block's tokens: stream and start of one piece, or several pieces. Numbers are cheap to hash."""


class _Chain:
    """The keys of one sequence so far, and where in its spans the next block starts."""

    __slots__ = ("keys", "offset", "place", "session", "spans")

    def __init__(self, session: int) -> None:
        self.keys: list[int] = []
        self.place = 0
        self.offset = 0
        self.session = session
        self.spans: tuple[Span, ...] = ()


class BlockKeys:
    """Chained keys of every sequence at one block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[_MadeOf, int] = {}
        self._made_of: dict[int, _MadeOf] = {}
        self._uses: dict[int, int] = {}
        """Of each key: chains that end with it, blocks that carry it, keys whose parent it is."""
        self._chains: dict[int, _Chain] = {}
        self._ended: dict[int, _Chain] = {}
        """By session the chain of the sequence that ended last, oldest first; it counts as no use."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, s: KVSequence, count: int) -> Sequence[int]:
        """Its keys: at least the first *count*, fewer only where its spans end. O(blocks that are new to its session),
        O(1) if there are none.

        The spans of a sequence must stay what they were.
        """
        chain = self._chains.get(s.id)
        if chain is None:
            chain = self._chains[s.id] = self._start(s)
        if len(chain.keys) < count:
            self._lengthen(chain, s.spans, count)
        return chain.keys

    def parent(self, key: int) -> int:
        """The key that it continues, ``NO_KEY`` for the first of a chain. O(1)."""
        return self._made_of[key][0]

    def forget(self, sequence: int) -> None:
        """Its keys are not asked for again, or are made anew."""
        chain = self._chains.pop(sequence, None)
        if chain is None or not chain.keys:
            return
        last = chain.keys[-1]
        self.unuse(last)
        if last in self._uses:  # so all before it are known too, as long as it is
            ended = self._ended
            ended.pop(chain.session, None)
            ended[chain.session] = chain
            if len(ended) > ENDED_CHAINS:
                del ended[next(iter(ended))]

    def use(self, key: int) -> None:
        """Somebody more needs the key. O(1)."""
        self._uses[key] += 1

    def use_all(self, keys: Sequence[int]) -> None:
        """Somebody more needs each. O(keys)."""
        uses = self._uses
        for key in keys:
            uses[key] += 1

    def unuse(self, key: int) -> None:
        """Somebody less needs it; keys without need are dropped, parents after children. O(keys dropped)."""
        uses = self._uses
        while key != NO_KEY:
            left = uses[key] - 1
            if left:
                uses[key] = left
                return
            del uses[key]
            made_of = self._made_of.pop(key)
            del self._numbers[made_of]
            key = made_of[0]

    def _start(self, s: KVSequence) -> _Chain:
        """The chain of a sequence that has none."""
        chain = self._ended.pop(s.session, None)
        if chain is not None and chain.keys[-1] in self._uses and s.spans[: len(chain.spans)] == chain.spans:
            self._uses[chain.keys[-1]] += 1
        else:
            chain = _Chain(s.session)
        return chain

    def _lengthen(self, chain: _Chain, spans: tuple[Span, ...], count: int) -> None:
        """To *count* keys, or to the last full block of its spans. O(keys made or met)."""
        size, keys, intern = self.block_size, chain.keys, self._intern
        place, offset, missing = chain.place, chain.offset, count - len(keys)
        before = parent = keys[-1] if keys else NO_KEY
        first_made = self._next
        while missing and place < len(spans):
            stream, start, length = spans[place]
            whole, begin = (length - offset) // size, start + offset
            if whole > missing:
                whole = missing
            offset += whole * size
            for position in range(begin, start + offset, size):
                parent = intern((parent, stream, position))
                keys.append(parent)
            missing -= whole
            if offset == length:
                place, offset = place + 1, 0
            elif missing:
                over = _over_the_end(spans, place, offset, size)
                if over is None:
                    break
                pieces, place, offset = over
                parent = intern((parent, pieces) if len(pieces) > 1 else (parent, *pieces[0][:2]))
                keys.append(parent)
                missing -= 1
        chain.spans, chain.place, chain.offset = spans, place, offset
        if parent == before:
            return
        # Keys that were made just now are in use: each by the next one, the last by the chain.
        held = parent if first_made == self._next else self._made_of[first_made][0]
        if held != before:
            if held != NO_KEY:
                self._uses[held] += 1
            if before != NO_KEY:
                self._uses[before] -= 1  # the key behind it uses it

    def _intern(self, made_of: _MadeOf) -> int:
        key = self._numbers.setdefault(made_of, self._next)
        if key == self._next:
            self._next = key + 1
            self._made_of[key] = made_of
            self._uses[key] = 1
        return key


def _over_the_end(
    spans: tuple[Span, ...], place: int, offset: int, size: int
) -> tuple[tuple[Span, ...], int, int] | None:
    """The block that starts in one span and ends in another, in the fewest pieces, and where the next one starts; None
    if the spans end before."""
    stream, start, length = spans[place]
    pieces = [(stream, start + offset, length - offset)]
    missing = size - length + offset
    while missing:
        place += 1
        if place == len(spans):
            return None
        stream, start, length = spans[place]
        taken = missing if missing < length else length
        if taken:
            last = pieces[-1]
            if last[0] == stream and last[1] + last[2] == start:
                pieces[-1] = (stream, last[1], last[2] + taken)
            else:
                pieces.append((stream, start, taken))
            missing -= taken
    return tuple(pieces), place, taken
