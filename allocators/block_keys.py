"""Keys of full KV blocks: equal keys mean an equal prefix of tokens, in whatever spans it was told.

::

    spans        | sys 0..5 | user 0..4 | ...         block size 4
    blocks       | sys 0..3 | sys 4..5 user 0..1 | ...
    keys         k0 = (none, pieces 0)   k1 = (k0, pieces 1)   k2 = (k1, pieces 2) ...

vLLM hashes (parent's hash, tokens of the block); here each such pair is interned to a small integer instead, so that
no two differing prefixes ever share a key. Ids and order of blocks do not depend on the values of keys.
A key is dropped when no sequence, no block and no longer key needs it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.allocators.records import KVSequence, Span

NO_KEY = -1
"""Of a block without one; and the parent of the first key of a chain."""


class _Chain:
    """The keys of one sequence so far, and where in its spans the next block starts."""

    __slots__ = ("keys", "offset", "place")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.place = 0
        self.offset = 0


class BlockKeys:
    """Chained keys of every sequence at one block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, tuple[Span, ...]], int] = {}
        self._made_of: dict[int, tuple[int, tuple[Span, ...]]] = {}
        self._uses: dict[int, int] = {}
        """Of each key: chains that end with it, blocks that carry it, keys whose parent it is."""
        self._chains: dict[int, _Chain] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, s: KVSequence, count: int) -> Sequence[int]:
        """Its keys: at least the first *count*, fewer only where its spans end. O(1) amortised a block.

        The spans of a sequence must stay what they were.
        """
        chain = self._chains.get(s.id)
        if chain is None:
            chain = self._chains[s.id] = _Chain()
        keys = chain.keys
        while len(keys) < count:
            pieces = self._next_block(chain, s.spans)
            if pieces is None:
                break
            parent = keys[-1] if keys else NO_KEY
            keys.append(self._intern(parent, pieces))
            self.use(keys[-1])
            if parent != NO_KEY:
                self.unuse(parent)
        return keys

    def parent(self, key: int) -> int:
        """The key that it continues, ``NO_KEY`` for the first of a chain. O(1)."""
        return self._made_of[key][0]

    def forget(self, sequence: int) -> None:
        """Its keys are not asked for again, or are made anew."""
        chain = self._chains.pop(sequence, None)
        if chain is not None and chain.keys:
            self.unuse(chain.keys[-1])

    def use(self, key: int) -> None:
        """Somebody more needs the key. O(1)."""
        self._uses[key] += 1

    def unuse(self, key: int) -> None:
        """Somebody less needs it; keys without need are dropped, parents after children. O(keys dropped)."""
        while key != NO_KEY:
            self._uses[key] -= 1
            if self._uses[key]:
                return
            del self._uses[key]
            made_of = self._made_of.pop(key)
            del self._numbers[made_of]
            key = made_of[0]

    def _intern(self, parent: int, pieces: tuple[Span, ...]) -> int:
        made_of = (parent, pieces)
        key = self._numbers.get(made_of)
        if key is None:
            key = self._numbers[made_of] = self._next
            self._next += 1
            self._made_of[key] = made_of
            self._uses[key] = 0
            if parent != NO_KEY:
                self._uses[parent] += 1
        return key

    def _next_block(self, chain: _Chain, spans: tuple[Span, ...]) -> tuple[Span, ...] | None:
        """Tokens of the next block in the fewest pieces, and the chain moves on; None if the spans end before."""
        missing, place, offset = self.block_size, chain.place, chain.offset
        if place < len(spans) and offset + missing < spans[place][2]:  # inside one span, as nearly all are
            stream, start, _ = spans[place]
            chain.offset += missing
            return ((stream, start + offset, missing),)
        pieces: list[Span] = []
        while missing:
            if place == len(spans):
                return None
            stream, start, length = spans[place]
            taken = min(missing, length - offset)
            if taken:
                begin = start + offset
                if pieces and pieces[-1][0] == stream and pieces[-1][1] + pieces[-1][2] == begin:
                    pieces[-1] = (stream, pieces[-1][1], pieces[-1][2] + taken)
                else:
                    pieces.append((stream, begin, taken))
                missing -= taken
                offset += taken
            if offset == length:
                place, offset = place + 1, 0
        chain.place, chain.offset = place, offset
        return tuple(pieces)
