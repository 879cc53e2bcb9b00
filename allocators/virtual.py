"""Virtual KV: a range of addresses per sequence, long enough for the longest, and pages behind it as tokens come.

::

    range 0, a sequence    K0 |page|page|...no memory...|  V0 |page|page|...no memory...|  K1 ...
    range 1, parked        K0 |page|....................|  V0 |page|....................|  K1 ...
    range 2, nobody's      K0 |page|page|page|..........|  V0 |page|page|page|..........|  K1 ...
                              pages of a sequence that ended: the next one that takes the range has them

vAttention's idea (Prabhu et al., arXiv 2405.04437; github.com/microsoft/vattention): kernels see contiguous tensors and
nothing is copied when they grow, while memory is taken page by page. Its rules here:

- *Deferred reclamation*: a sequence that ends leaves its pages mapped. The next one takes the free range with the
  fewest pages that are enough; when pages run out, those that nobody needs are unmapped and mapped elsewhere, and only
  then a sequence is refused.
- A sequence is admitted if all its present tokens fit, though a chunk of them is scheduled.

Different: ranges are made on demand, since they cost no bytes (vAttention makes them for the largest batch at start),
and pages are created when they are mapped and destroyed when they are unmapped (it creates them all at start, and keeps
them). Left out: mapping ahead in a thread of its own, which hides the driver's calls behind the step before, and the
watermark of its scheduler. Histories that are kept between turns are ours; vAttention knows none.

What is here: who is admitted, how far a sequence may go without a new page, what is parked, and what makes way. Ranges
and pages are :mod:`hbmtwin.allocators.virtual_ranges`.

Complexity: reserve O(1), O(ranges + parked sessions) when admitting or short of pages; grow_layer O(new pages), and
O(ranges * tensors) when it must reclaim; horizon and advance O(sequences); end_step and release O(growths of the step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hbmtwin.allocators.contract import PageAllocator
from hbmtwin.allocators.driver import PAGE_UNIT
from hbmtwin.allocators.histories import common_prefix
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.allocators.virtual_ranges import RangeStore, VirtualRange


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualConfig:
    """Settings of :class:`VirtualPolicy`."""

    max_model_len: int
    page_bytes: int = PAGE_UNIT
    """Bytes of a page, a multiple of the driver's granularity. vAttention's modified driver has 64, 128, 256 KiB."""
    limit_bytes: int | None = None
    """Bytes that pages may take in their arena; None is all that it has."""

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, not {self.max_model_len}")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, but is {self.limit_bytes}")


@kv_policies.register("virtual")
class VirtualPolicy:
    """A range of addresses per sequence with pages mapped on demand, as vAttention keeps its KV.

    Pages are the arena's blocks with ``Tag.KV``, whole pages requested; ``check`` holds the policy to all of those. The
    arena knows a page by the sequence that it was mapped for, which may have left it to another since.

    Parked histories keep their range until the next turn of their session adopts it, or give it up, the least recently
    parked first, before a sequence is refused. What ``abort_step`` gives back is unmapped: pages, ranges and tokens are
    as they were, but for what the step had reclaimed or dropped to make room.
    """

    name: ClassVar[str] = "virtual"
    requires: ClassVar[frozenset[str]] = frozenset({"pages"})
    offers: ClassVar[frozenset[str]] = frozenset({"one_piece", "park", "preempt", "reject"})
    Config: ClassVar[type[VirtualConfig]] = VirtualConfig

    def __init__(self, layout: KVLayout, arena: PageAllocator, config: VirtualConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self._store = RangeStore(layout, arena, config.page_bytes, config.max_model_len, config.limit_bytes)
        self._running: dict[int, VirtualRange] = {}
        self._parked: dict[int, VirtualRange] = {}
        """By session, least recently parked first."""
        self._admitted: dict[int, tuple[int, bool]] = {}
        """Sequences admitted in this step: session, and whether they adopted its history."""

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the session's parked history that begin *s* as well, at most ``s.num_tokens - 1``. O(spans)."""
        parked = self._parked.get(s.session)
        if parked is None:
            return 0
        return min(common_prefix(parked.spans, s.spans), parked.filled, s.num_tokens - 1)

    def reserve(
        self,
        s: KVSequence,
        new: int,
        *,
        hit: int = 0,
        lookahead: int = 0,
        admitting: bool = False,
        others_running: bool = False,
    ) -> Granted | Refused:
        """Plan the pages for *new* tokens behind the computed ones; when admitting, all present tokens must fit.

        Refused if that is more than what is free and what nobody needs, and dropping all parked histories of others
        would not do. Raise ValueError if *hit* tokens are not parked. O(1), O(ranges + parked sessions) when admitting
        or short.
        """
        longest, store = self.config.max_model_len, self._store
        tokens = min(s.num_computed_tokens + hit + new, longest)
        room = min(tokens + lookahead, longest)
        running = self._running.get(s.id)
        if running is None:
            whole = max(room, min(s.num_tokens, longest)) if admitting else room
            own = self._parked.get(s.session)
            if hit > (parked_tokens := own.filled if own else 0):
                raise ValueError(
                    f"sequence {s.id} cannot adopt {hit} tokens: session {s.session} has {parked_tokens} parked"
                )
            need = store.pages_for(whole) - (store.pages_for(own.room) if own else 0)
            if refused := self._refuse(need, s.session, "the whole prompt does not fit"):
                return refused
            running = self._admit(s, hit, store.pages_for(whole))
        else:
            if hit:
                raise ValueError(f"sequence {s.id} is running already and cannot adopt {hit} tokens")
            if room > running.room:
                need = store.pages_for(room) - store.pages_for(running.room)
                if refused := self._refuse(need, s.session, "not enough pages"):
                    return refused
        store.plan(running, tokens, room)
        return Granted(hit)

    def _refuse(self, need: int, session: int, reason: str) -> Refused | None:
        """Refuse unless *need* more pages can be had; parked histories of other sessions make room for them."""
        left = self._store.left_pages
        if need <= left:
            return None
        others = {other: self._store.pages_for(r.room) for other, r in self._parked.items() if other != session}
        if need > left + sum(others.values()):
            return Refused(need * self.config.page_bytes, left * self.config.page_bytes, reason)
        for other, pages in others.items():
            if need <= left:
                break
            left += pages
            self.drop_parked(other)
        return None

    def _admit(self, s: KVSequence, hit: int, pages: int) -> VirtualRange:
        if hit:
            taken = self._parked.pop(s.session)
            self._store.adopt(taken, s.id, hit)
        else:
            if s.session in self._parked:
                self.drop_parked(s.session)
            taken = self._store.take(s.id, pages)
        self._running[s.id] = taken
        self._admitted[s.id] = (s.session, bool(hit))
        return taken

    # -- a step ------------------------------------------------------------------------------------------------------

    def grow_layer(self, layer: int) -> None:
        """Map this layer's pages of all planned tokens, in running order, after reclaiming what they are short of.

        Raise OutOfMemory where memory went elsewhere since ``reserve``, its facts completed by what the policy knows:
        the owner's bytes, unfilled and parked ones. Books and :meth:`check` still close then. Raise RuntimeError if a
        layer was left out. O(new pages), and O(ranges * tensors) when it must reclaim.
        """
        self._store.grow_layer(layer)

    def end_step(self) -> None:
        """The step's pages stay. Raise RuntimeError if a reservation was never made physical. O(1)."""
        self._store.end_step()
        self._admitted.clear()

    def abort_step(self) -> None:
        """Unmap what this step has mapped: sequences are as they were at the last ``end_step``. O(pages mapped).

        Sequences admitted in this step are gone, an adopted history is parked again (as the most recent one). Pages
        that were reclaimed and histories that were dropped to make room do not come back.
        """
        self._store.undo()
        for owner, (session, adopted) in self._admitted.items():
            taken = self._running.pop(owner)
            if adopted:
                self._park(session, taken)
            else:
                self._store.free(taken)
        self._admitted.clear()

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """Steps until the first sequence needs a page that is not mapped, in any tensor. O(sequences)."""
        running = self._running
        for s in decoding:
            r = running[s.id]
            limit = min(limit, r.full - r.tokens)
        return limit

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Count *k* more tokens each. O(sequences).

        Raise ValueError, and change nothing, if *k* is over the horizon.
        """
        if not k:
            return
        self._store.refuse_while_growing("advance")
        if k > (horizon := self.horizon(decoding, k)):
            raise ValueError(f"{k} steps are over the horizon of {horizon}: a page would be missing")
        self._store.advance([self._running[s.id] for s in decoding], k)

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Leave the sequence's range to the next one, or park it; FINISH and DROP leave the session's history as well.

        What is parked are the ``s.num_computed_tokens`` first tokens of ``s.spans``. Raise KeyError for PARK if the
        sequence has no range, RuntimeError if pages are planned and not mapped. O(growths of this step).
        """
        if why is Release.PARK:
            if s.id not in self._running:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            self._store.refuse_while_growing("parking")
        taken = self._running.pop(s.id, None)
        if taken is not None:
            self._admitted.pop(s.id, None)
            if why is Release.PARK:
                taken.spans = s.spans
                self._store.forget(taken)
                self._store.hold(taken, s.num_computed_tokens)
                self._park(s.session, taken)
            else:
                self._store.free(taken)
        if why in (Release.FINISH, Release.DROP) and s.session in self._parked:
            self.drop_parked(s.session)

    def parked_sessions(self) -> tuple[int, ...]:
        """Sessions with a parked history, least recently parked first."""
        return tuple(self._parked)

    def drop_parked(self, session: int) -> None:
        """Leave the range of a session's parked history to the next sequence. Raise KeyError if there is none."""
        self._store.free(self._parked.pop(session))

    def _park(self, session: int, r: VirtualRange) -> None:
        if session in self._parked:
            self.drop_parked(session)
        self._store.move(r, "parked")
        self._parked[session] = r

    # -- what ranges cannot do ---------------------------------------------------------------------------------------

    def fork(self, parent: KVSequence, child: KVSequence) -> Refused:
        """Always refused: a page could stand in two ranges, but nobody copies it when one of them writes."""
        return Refused(0, 0, "ranges are not shared; a child must be computed anew")

    def swap_out(self, s: KVSequence) -> Refused:
        """Always refused: vAttention keeps no host copy."""
        return Refused(0, 0, "the virtual policy has no host memory to swap to")

    def swap_in(self, s: KVSequence) -> Refused:
        """Always refused, as :meth:`swap_out`."""
        return self.swap_out(s)

    # -- books -------------------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """No work of its own: nothing is copied, and the arena counts the driver's calls and the mapped bytes."""
        return Work()

    def kept(self, tokens: int) -> int:
        """*tokens*: nothing is dropped."""
        return tokens

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Empty: pages have addresses, and no ids."""
        return ()

    def usage(self) -> KVUsage:
        """The books, O(1). Surplus pages of a running sequence are its own, and unfilled."""
        pages, tokens = self._store.pages, self._store.tokens
        size, token_bytes = self.config.page_bytes, self.layout.token_bytes
        return KVUsage(
            token=tokens["running"] * token_bytes,
            parked=tokens["parked"] * token_bytes,
            held=(pages["running"] + pages["parked"]) * size,
            growth_copy=0,
            cached=0,
            pool=pages["free"] * size,
            table=0,
            parked_sessions=len(self._parked),
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every page in address order. O(pages * log(pages))."""
        return iter(sorted(self._store.blocks()))

    def check(self) -> None:
        """Assert the books against the walk, and the walk against the arena's own. O(blocks of the arena)."""
        usage, blocks = self.usage(), list(self.walk())
        assert usage.token == sum(block.token_bytes for block in blocks if block.state == "running")
        assert usage.parked == sum(block.token_bytes for block in blocks if block.state == "parked")
        assert usage.held == sum(block.size for block in blocks if block.state != "free")
        assert usage.pool == sum(block.size for block in blocks if block.state == "free")
        assert usage.unfilled >= 0
        in_arena = {
            block.address: block.requested
            for segment in self.arena.walk()
            for block in segment.blocks
            if block.state == "active_allocated" and block.tag is Tag.KV
        }
        assert in_arena == {block.address: block.size for block in blocks}
        assert self.config.limit_bytes is None or usage.held + usage.pool <= self.config.limit_bytes
        for owner, r in self._running.items():
            assert (r.state, r.owner) == ("running", owner)
        assert all(r.state == "parked" for r in self._parked.values())
        held = [*self._running.values(), *self._parked.values()]
        assert sorted(r.number for r in held) == [r.number for r in self._store.ranges if r.state != "free"]
        self._store.check()
