"""Contiguous KV: every sequence has buffers of its own, in one piece each, and a growth rule says how large.

::

    arena    | K0 of a | V0 of a | K0 of b, parked | V0 of b, parked | K1 of a ...         per_layer
             | a, all layers              | b, all layers, parked | ...                    merged
    buffer   | tokens kept           | unfilled |

What is here: who is admitted with how much, how far a sequence may go without growth, and what is kept, parked or freed
at an end. How buffers come and grow is :mod:`hbmtwin.allocators.buffers`, what is kept between turns
:mod:`hbmtwin.allocators.histories`, the sizes :mod:`hbmtwin.allocators.growth`, which tokens are dropped
:mod:`hbmtwin.allocators.retention`.

A policy owns every allocation of its arena that carries ``Tag.KV``; ``check`` holds it to that.

Complexity: lookup O(spans), reserve O(1), grow_layer O(growths) calls of the arena, end_step O(old copies), abort_step
O(sequences of the step), horizon and advance O(sequences), release O(buffers of the sequence).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import ClassVar

from hbmtwin.allocators.buffers import Buffers, BufferStore, Moved
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.growth import growth_rule
from hbmtwin.allocators.histories import History, ParkedHistories
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.allocators.retention import retention_rule

_UNBOUNDED = 1 << 62
"""More tokens than any sequence has."""


@kv_policies.register("contiguous")
class ContiguousPolicy:
    """Buffers per sequence that grow by a rule, copied or not, as naive serving code keeps its KV.

    Between turns a *parked* history keeps its buffers under its session until the next turn adopts them
    (``reserve(hit=)``); a next turn that comes with ``hit = 0``, a FINISH or a DROP frees them, as does
    :meth:`drop_parked`. One history per session: parking again frees the older one. An adopted history is the
    sequence's own: a PREEMPT frees it with the rest, and the sequence comes back with ``hit = 0``. A sequence that is
    preempted before it held anything leaves the history of its session parked.

    Adopted buffers keep the owner that the arena knows them by: the turn that made them. Where only a part of a history
    is adopted, buffers keep their size, and ``regrow`` counts all of them as copied.

    *Retention* drops tokens when a step computes more than the rule holds; only the held ones have slots, in a prompt
    that comes in chunks too (what a chunk needs beyond them are activations). Where what stays must move, growth that
    concatenates makes the tensors anew, at equal size or smaller, and buffers with room to spare are shifted in place.
    A ring grows to its bound and never again.
    """

    name: ClassVar[str] = "contiguous"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"one_piece", "park", "preempt", "reject"})
    Config: ClassVar[type[ContiguousConfig]] = ContiguousConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: ContiguousConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self._rule = growth_rule(config.growth, asdict(config))
        self._retention = retention_rule(config.retention)
        self._bound = self._retention.bound or _UNBOUNDED
        """Tokens up to which none is dropped."""
        self._largest = _UNBOUNDED if self._retention.moves else self._bound
        """Tokens that no buffer passes, whatever the growth rule says: those of a ring."""
        self._longest = min(config.max_model_len, self._bound)
        """The most tokens that a sequence ever holds."""
        self._store = BufferStore(layout, arena, config.tensors, config.copy_scope)
        self._histories = ParkedHistories()
        self._running: dict[int, Buffers] = {}
        self._full_bytes = 0
        """Bytes of all running sequences at their full length."""
        self._admitted: dict[int, tuple[int, History | None]] = {}
        """Sequences admitted in this step: session, and the history that they adopted."""

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the session's parked history that *s* need not compute, at most ``s.num_tokens - 1``. O(spans).

        Dropped ones count, if *s* goes on with the whole history; a part of a history that lost tokens is no use.
        """
        return self._histories.lookup(s)

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
        """Decide the capacity for *new* tokens behind the computed ones, and queue the growth if there is one. O(1).

        Refused only by ``admission = "reserve"``, when admitting. Raise ValueError if *hit* tokens are not parked.
        """
        buffers = self._running.get(s.id)
        if buffers is None:
            if admitting and self.config.admission == "reserve" and (refused := self._refuse(s)):
                return refused
            buffers = self._admit(s, hit)
        elif hit:
            raise ValueError(f"sequence {s.id} is running already and cannot adopt {hit} tokens")
        tokens = s.num_computed_tokens + hit + new
        if tokens > self._longest:
            self._plan_past_the_longest(buffers, tokens, lookahead)
            return Granted(hit)
        room = tokens + lookahead
        capacity = buffers.capacity
        if room > capacity:
            capacity = self._capacity(room, buffers.prompt_tokens + lookahead)
        self._store.plan(buffers, tokens, capacity)
        return Granted(hit)

    def _plan_past_the_longest(self, buffers: Buffers, computed: int, lookahead: int) -> None:
        """Plan what is held of *computed* tokens, more than ever are."""
        retention = self._retention
        kept = retention.kept(computed)
        tokens, dropped = min(kept, self._longest), computed - kept
        staying = retention.staying(buffers.filled + buffers.dropped, computed)
        room, capacity = tokens + lookahead, buffers.capacity
        moved: Moved = "nothing"
        if retention.moves and dropped > buffers.dropped and buffers.filled:
            moved = "anew" if self._rule.concatenates else "in_place"
        if room > capacity or moved == "anew":
            capacity = self._capacity(room, buffers.prompt_tokens + lookahead)
        self._store.plan_drop(buffers, tokens, dropped, staying=staying, capacity=capacity, moved=moved)

    def _capacity(self, tokens: int, prompt_tokens: int) -> int:
        """Tokens of a buffer that must hold *tokens*, which are at most as many as are ever held."""
        longest = self._longest
        if tokens > longest:
            tokens = longest
        if prompt_tokens > longest:
            prompt_tokens = longest
        capacity = self._rule.capacity(tokens, longest, prompt_tokens=prompt_tokens)
        return capacity if capacity < self._largest else self._largest

    def _refuse(self, s: KVSequence) -> Refused | None:
        """Refuse unless all running sequences and *s* fit at full length; parked histories make room for them.

        Old copies are not counted: a doubling server needs them on top for a moment.
        """
        limit = self.config.limit_bytes or 0
        others_parked = self._histories.held_bytes - self._histories.held_bytes_of(s.session)
        need, left = self._bytes_at_full_length(s), limit - self._full_bytes
        if need <= left:  # histories of others that stand in the way go, least recently parked first
            for session in self.parked_sessions():
                if need <= left - others_parked:
                    break
                if session != s.session:
                    others_parked -= self._histories.held_bytes_of(session)
                    self.drop_parked(session)
            return None
        free = left - others_parked
        reason = "the running sequences at their full length leave too little"
        return Refused(need, max(0, free), reason, never=need > limit)

    def _bytes_at_full_length(self, s: KVSequence) -> int:
        return self._capacity(s.max_tokens, s.num_tokens) * self.layout.token_bytes

    def _admit(self, s: KVSequence, hit: int) -> Buffers:
        if hit > (usable := self._histories.usable(s.session, hit)):
            raise ValueError(
                f"sequence {s.id} cannot adopt {hit} tokens: session {s.session} has {usable} parked that can begin it"
            )
        history = None
        if hit:
            history = self._histories.unpark(s.session)
            buffers = history.buffers
            self._store.adopt(buffers, s.id, hit - history.dropped)
        else:
            if s.session in self._histories:
                self.drop_parked(s.session)
            buffers = self._store.new(s.id)
        buffers.prompt_tokens = s.num_tokens
        buffers.full_bytes = self._bytes_at_full_length(s)
        self._full_bytes += buffers.full_bytes
        self._running[s.id] = buffers
        self._admitted[s.id] = (s.session, history)
        return buffers

    # -- a step ------------------------------------------------------------------------------------------------------

    def grow_layer(self, layer: int) -> None:
        """Make this layer's buffers of all queued growths (all layers' at layer 0 when merged), in running order.

        Raise OutOfMemory, its facts completed by what the policy knows: the owner's bytes, old copies (the buffer that
        was to be replaced among them), unfilled and parked bytes. Books and :meth:`check` still close then.
        Raise RuntimeError if a layer is left out. O(growths) calls of the arena.
        """
        try:
            self._store.grow_layer(layer)
        except OutOfMemory as error:
            error.facts = replace(error.facts, parked_bytes=self._histories.tokens * self.layout.token_bytes)
            raise

    def end_step(self) -> None:
        """Free the step's old copies. Raise RuntimeError if a reservation was never made physical."""
        self._store.end_step()
        self._admitted.clear()

    def abort_step(self) -> None:
        """Take back what this step reserved and made: sequences are as they were at the last ``end_step``.

        Sequences admitted in this step are gone, an adopted history is parked again (as the most recent one); one that
        was freed at admission stays freed: it was of no use to the turn, and would be of none when that comes again.
        Copies made stay counted, that work was done. Tokens that were dropped count as held again, those that others
        were moved over too: a move in place is modelled as the bytes that it copies, and no more. Raise RuntimeError,
        and change nothing, if a concatenation (``copy_scope = "tensor"``) has begun to replace tensors.
        """
        self._store.undo()
        for owner, (session, history) in self._admitted.items():
            self._take_from_running(owner)
            if history is not None:
                self._park(session, history)
        self._admitted.clear()

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """Steps until the first sequence is full, or at its retention's bound: 0 for ``exact``. O(sequences).

        At the bound, a ring goes on for ever; where tokens must move, nothing is certain.
        """
        running, bound = self._running, self._bound
        for s in decoding:
            buffers = running[s.id]
            tokens = buffers.tokens
            if tokens >= bound:
                if self._retention.moves:
                    return 0
                continue
            if limit > buffers.capacity - tokens:  # comparisons: twice as fast as min()
                limit = buffers.capacity - tokens
            if limit > bound - tokens:
                limit = bound - tokens
        return limit

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Count *k* more tokens each. O(sequences).

        Raise ValueError, and change nothing, if *k* is over the horizon.
        """
        if not k:
            return
        self._store.refuse_while_growing("advance")
        if k > (horizon := self.horizon(decoding, k)):
            raise ValueError(f"{k} steps are over the horizon of {horizon}: a buffer would be full")
        buffers = [self._running[s.id] for s in decoding]
        if self._largest < _UNBOUNDED:
            self._store.overwrite([ring for ring in buffers if ring.tokens == self._bound], k)
            buffers = [ring for ring in buffers if ring.tokens < self._bound]
        self._store.advance(buffers, k)

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Free the sequence's buffers, or park them; FINISH and DROP free the session's parked history as well.

        What is parked are the ``s.num_computed_tokens`` first tokens of ``s.spans``, less those dropped since. Raise
        KeyError for PARK if the sequence has no buffers, RuntimeError if they are half-grown. O(buffers).
        """
        if why is Release.PARK:
            if s.id not in self._running:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            self._store.refuse_while_growing("parking")
        if s.id in self._running:
            buffers = self._take_from_running(s.id)
            self._admitted.pop(s.id, None)
            self._store.forget(buffers)
            if why is Release.PARK:
                kept = self.kept(s.num_computed_tokens)
                self._store.fill(buffers, kept, s.num_computed_tokens - kept)
                self._park(s.session, History(buffers, s.spans))
            else:
                self._store.free(buffers)
        if why in (Release.FINISH, Release.DROP) and s.session in self._histories:
            self.drop_parked(s.session)

    def parked_sessions(self) -> tuple[int, ...]:
        """Sessions with a parked history, least recently parked first."""
        return self._histories.sessions()

    def drop_parked(self, session: int) -> None:
        """Free a session's parked history. Raise KeyError if there is none."""
        self._store.free(self._histories.unpark(session).buffers)

    def _take_from_running(self, owner: int) -> Buffers:
        buffers = self._running.pop(owner)
        self._full_bytes -= buffers.full_bytes
        return buffers

    def _park(self, session: int, history: History) -> None:
        if session in self._histories:
            self.drop_parked(session)
        self._histories.park(session, history)

    # -- what contiguous buffers cannot do ---------------------------------------------------------------------------

    def fork(self, parent: KVSequence, child: KVSequence) -> Refused:
        """Always refused: one buffer cannot belong to two sequences."""
        return Refused(0, 0, "contiguous buffers cannot be shared; a child must be computed anew")

    def swap_out(self, s: KVSequence) -> Refused:
        """Always refused: naive serving code keeps no host copy."""
        return Refused(0, 0, "the contiguous policy has no host memory to swap to")

    def swap_in(self, s: KVSequence) -> Refused:
        """Always refused, as :meth:`swap_out`."""
        return self.swap_out(s)

    # -- books -------------------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """Bytes moved in place, and those copied under ``copy_scope = "step"``: what stayed of each old buffer.

        The arena counts regrow's, the smaller of both sizes: with a drop, the new token's too.
        """
        return self._store.take_work()

    def kept(self, tokens: int) -> int:
        """What the retention rule holds of *tokens*. O(1)."""
        return self._retention.kept(tokens)

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Empty: there are no blocks."""
        return ()

    def usage(self) -> KVUsage:
        """The books, O(1)."""
        token_bytes, store, parked_tokens = self.layout.token_bytes, self._store, self._histories.tokens
        return KVUsage(
            token=(store.filled_tokens - parked_tokens) * token_bytes,
            parked=parked_tokens * token_bytes,
            held=store.held_bytes,
            growth_copy=store.old_bytes,
            cached=0,
            pool=0,
            table=0,
            parked_sessions=len(self._histories),
            dropped=(store.dropped_tokens - self._histories.dropped_tokens) * token_bytes,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every buffer in address order; an old copy holds no tokens of its own. O(buffers * log(buffers))."""
        blocks = [block for buffers in self._running.values() for block in self._store.blocks(buffers, "running")]
        blocks += [block for buffers in self._histories.buffers() for block in self._store.blocks(buffers, "parked")]
        blocks += self._store.old_blocks()
        return iter(sorted(blocks))

    def check(self) -> None:
        """Assert the books against the walk, and the walk against the arena's own. O(blocks of the arena)."""
        blocks = list(self.walk())
        usage = self.usage()
        kept = [block for block in blocks if block.state != "growth_copy"]
        assert usage.held == sum(block.size for block in kept)
        assert usage.growth_copy == sum(block.size for block in blocks) - usage.held
        for state, booked in (("running", usage.token), ("parked", usage.parked)):
            assert booked == sum(block.token_bytes for block in kept if block.state == state), state
        assert usage.unfilled >= 0
        assert self.arena.usage().requested_by_tag[Tag.KV] == usage.held + usage.growth_copy
        in_arena = {
            block.address: block.requested
            for segment in self.arena.walk()
            for block in segment.blocks
            if block.state == "active_allocated" and block.tag is Tag.KV
        }
        assert in_arena == {block.address: block.size for block in blocks}
        for owner, buffers in self._running.items():
            assert buffers.owner == owner
            assert buffers.queued or buffers.filled == self.kept(buffers.filled + buffers.dropped)
        assert usage.dropped == sum(b.dropped for b in self._running.values()) * self.layout.token_bytes
        assert self._full_bytes == sum(buffers.full_bytes for buffers in self._running.values())
        self._store.check([*self._running.values(), *self._histories.buffers()])
        self._histories.check()
