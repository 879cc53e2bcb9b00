"""Mistakes for the paged policy to make on purpose: a comparison that meets one of them must say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hbmtwin.allocators.block_keys import NO_KEY
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.prefix_cache import PrefixCache
from hbmtwin.allocators.records import Granted, KVSequence, Refused


class LastTokenToo(PrefixCache):
    """Finds a prompt whole, so that no token is left to compute the answer from."""

    def _find(self, s: KVSequence) -> list[int]:
        """Up to all tokens."""
        found = super()._find(s)
        count = s.num_tokens // self.block_size
        keys = self.keys.of(s, count)
        if len(found) == count - 1 and len(keys) >= count and keys[count - 1] in self.block_of:
            found.append(self.block_of[keys[count - 1]])
        return found


class NewestOfEqualKeys(PrefixCache):
    """Of two blocks with one key, takes the one that got it last."""

    def _find(self, s: KVSequence) -> list[int]:
        """The last ones inserted."""
        carriers = self.carriers()
        return [carriers[self.key_of[block]][-1] for block in super()._find(s)]


class IdleHitsAreForNothing(PrefixCache):
    """Forgets that a hit that nobody holds takes a block out of the free queue."""

    def idle(self, blocks: Iterable[int]) -> int:
        """None."""
        return 0


class FreesForward(PrefixCache):
    """Lets the first block go first, so that the start of a prefix is evicted before its end."""

    def put_back(self, blocks: Sequence[int]) -> None:
        """The other way round."""
        super().put_back(blocks[::-1])


class BareBlocksToTheTail(PrefixCache):
    """Puts blocks without a key behind those with one."""

    def put_back(self, blocks: Sequence[int]) -> None:
        """To the tail."""
        super().put_back(blocks)
        for block in blocks:
            if not self.refs[block] and self.key_of[block] == NO_KEY:
                self.free.remove(block)
                self.free.extend([block])


class EvictsTwins(PrefixCache):
    """Forgets both of two blocks with one key when one of them is taken."""

    def take(self) -> int:
        """And its twin loses the key too."""
        block = self.free.popleft()
        self.refs[block] = 1
        key = self.key_of[block]
        if key != NO_KEY:
            self.cached -= 1
            others = self.carriers()[key]
            self.unregister(block)
            if len(others) == 2:
                (other,) = [twin for twin in others if twin != block]
                if not self.refs[other]:
                    self.cached -= 1
                self.unregister(other)
        return block


class WatermarkAlways(PagedPolicy):
    """Keeps the watermark though nothing else runs."""

    def reserve(self, s: KVSequence, new: int, **said: Any) -> Granted | Refused:
        """As if others ran."""
        return super().reserve(s, new, **said | {"others_running": True})


class AdmitsByTheFirstChunk(PagedPolicy):
    """Asks for the room of the chunk only."""

    def reserve(self, s: KVSequence, new: int, **said: Any) -> Granted | Refused:
        """As if it were no admission, unless the watermark counts."""
        return super().reserve(s, new, **said | {"admitting": False})


PLANTED: dict[str, type[PrefixCache] | type[PagedPolicy]] = {
    "last-token": LastTokenToo,
    "newest": NewestOfEqualKeys,
    "idle-hits": IdleHitsAreForNothing,
    "forward": FreesForward,
    "bare-to-tail": BareBlocksToTheTail,
    "evict-twins": EvictsTwins,
    "watermark": WatermarkAlways,
    "first-chunk": AdmitsByTheFirstChunk,
}


def plant(policy: PagedPolicy, name: str) -> None:
    """Make a new policy make the mistake called *name*; one of the prefix cache only if it has one."""
    mistaken = PLANTED[name]
    if issubclass(mistaken, PagedPolicy):
        policy.__class__ = mistaken
    elif policy._cache is not None:
        policy._cache.__class__ = mistaken
