"""Contiguous KV: every sequence has buffers of its own, in one piece each, and a growth rule says how large.

::

    per_layer   K0 |tokens.....unfilled|  V0 |tokens.....unfilled|  K1 ...        2 * num_layers buffers
    merged      |tokens..............................unfilled|                    1 buffer

    growth, copy_scope "tensor":  new, copy, free for each tensor in turn (DeviceAllocator.regrow)
            copy_scope "step":    new, copy; all old ones live until end_step

``reserve`` only decides and queues; ``grow_layer`` asks the arena, in program order. Tokens count in the books as soon
as all their buffers are there, so that the books close at every moment, after a failed growth too.

A policy owns every allocation of its arena that carries ``Tag.KV``; ``check`` holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.growth import growth_rule
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import (
    Granted,
    KVBlock,
    KVLayout,
    KVSequence,
    KVUsage,
    Refused,
    Release,
    Span,
    Tag,
    Work,
)
from hbmtwin.allocators.registry import kv_policies

Tensors = Literal["per_layer", "merged"]
CopyScope = Literal["tensor", "step"]
Admission = Literal["none", "reserve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousConfig:
    """Settings of :class:`ContiguousPolicy`."""

    max_model_len: int
    growth: str = "exact"
    """A name of :data:`~hbmtwin.allocators.growth.GROWTH_RULES`."""
    initial_tokens: int = 64
    growth_factor: int = 2
    tensors: Tensors = "per_layer"
    copy_scope: CopyScope = "tensor"
    admission: Admission = "none"
    limit_bytes: int | None = None
    """Bytes that KV may take in its arena; ``admission = "reserve"`` needs it, nothing else reads it."""

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, not {self.max_model_len}")
        choices = (("tensors", Tensors), ("copy_scope", CopyScope), ("admission", Admission))
        for name, choice in choices:
            if getattr(self, name) not in get_args(choice):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choice))}, not {getattr(self, name)!r}")
        if self.admission == "reserve" and self.limit_bytes is None:
            raise ValueError('admission = "reserve" needs limit_bytes, the bytes that KV may take')


class _Buffers:
    """What one sequence has. ``capacity`` is decided, ``grown`` is physically there; they differ within a step only."""

    __slots__ = ("capacity", "done", "filled", "full_bytes", "grown", "handles", "owner", "tokens")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.full_bytes = 0
        """Bytes at full length, while it runs."""
        self.handles: list[int] = []
        self.tokens = 0
        """Target of the last reserve."""
        self.filled = 0
        """Tokens counted in the books: ``tokens``, once the growth is done."""
        self.capacity = 0
        self.grown = 0
        self.done = 0
        """Handles that already have the size of ``capacity``, while a growth is under way; else 0."""


class _History(NamedTuple):
    """A parked conversation: buffers of a turn that ended, and which tokens they hold."""

    buffers: _Buffers
    tokens: int
    spans: tuple[Span, ...]


class _OldCopy(NamedTuple):
    """A buffer that was replaced and lives until ``end_step``, and the place where its successor stands."""

    buffers: _Buffers
    place: int
    handle: int
    size: int


@kv_policies.register("contiguous")
class ContiguousPolicy:
    """Buffers per sequence that grow by a rule, copied or not, as naive serving code keeps its KV.

    Between turns a *parked* history keeps its buffers under its session until the next turn adopts them
    (``reserve(hit=)``); a next turn that comes with ``hit = 0``, a FINISH or a DROP frees them, as does
    :meth:`drop_parked`. One history per session: parking again frees the older one.

    Adopted buffers keep the owner that the arena knows them by: the turn that made them. Where only a part of a history
    is adopted, buffers keep their size, and ``regrow`` counts all of them as copied.
    """

    name: ClassVar[str] = "contiguous"
    requires: ClassVar[frozenset[str]] = frozenset()
    Config: ClassVar[type[ContiguousConfig]] = ContiguousConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: ContiguousConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self._rule = growth_rule(config.growth, asdict(config))
        merged = config.tensors == "merged"
        self._unit = layout.token_bytes if merged else layout.tensor_token_bytes
        """Bytes of one token in one buffer."""
        self._width = 1 if merged else 2
        """Buffers of one ``grow_layer``."""
        self._last_layer = 0 if merged else layout.num_layers - 1
        self._step_scope = config.copy_scope == "step"
        self._running: dict[int, _Buffers] = {}
        self._parked: dict[int, _History] = {}
        """By session, least recently parked first."""
        # This step only; end_step empties all of it.
        self._growing: list[_Buffers] = []
        self._touched: list[tuple[_Buffers, int, int]] = []
        """Running sequences with their tokens and capacity before the step, for abort_step."""
        self._admitted: dict[int, tuple[int, _History | None]] = {}
        """Sequences admitted in this step: session, and the history that they adopted."""
        self._old: list[_OldCopy] = []
        self._concat_begun = False
        """A tensor that was there before the step has been replaced and is gone."""
        # The books.
        self._filled_tokens = 0
        self._parked_tokens = 0
        self._held_bytes = 0
        self._parked_held_bytes = 0
        self._full_bytes = 0
        self._old_bytes = 0
        self._copied_bytes = 0

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the session's parked history that begin *s* as well, at most ``s.num_tokens - 1``. O(spans)."""
        history = self._parked.get(s.session)
        if history is None:
            return 0
        return min(common_prefix(history.spans, s.spans), history.tokens, s.num_tokens - 1)

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
        else:
            self._touched.append((buffers, buffers.tokens, buffers.capacity))
        longest = self.config.max_model_len
        tokens = min(s.num_computed_tokens + hit + new, longest)
        room = min(tokens + lookahead, longest)
        buffers.tokens = tokens
        if room > buffers.capacity:
            if buffers.capacity == buffers.grown:
                self._growing.append(buffers)
            buffers.capacity = self._rule.capacity(room, longest)
        elif buffers.capacity == buffers.grown:
            self._filled_tokens += tokens - buffers.filled
            buffers.filled = tokens
        return Granted(hit)

    def _refuse(self, s: KVSequence) -> Refused | None:
        """Refuse unless all running sequences and *s* fit at full length; parked histories make room for them.

        Old copies are not counted: a doubling server needs them on top for a moment.
        """
        limit = self.config.limit_bytes or 0
        own = self._parked.get(s.session)
        own_bytes = 0 if own is None else self._bytes_of(own.buffers)
        need, left = self._bytes_at_full_length(s), limit - self._full_bytes
        if need <= left:  # histories of others that stand in the way go, least recently parked first
            for session in self.parked_sessions():
                if need <= left - (self._parked_held_bytes - own_bytes):
                    break
                if session != s.session:
                    self.drop_parked(session)
            return None
        free = left - (self._parked_held_bytes - own_bytes)
        return Refused(need, max(0, free), "the running sequences at their full length leave too little")

    def _bytes_at_full_length(self, s: KVSequence) -> int:
        longest = self.config.max_model_len
        return self._rule.capacity(min(s.max_tokens, longest), longest) * self.layout.token_bytes

    def _admit(self, s: KVSequence, hit: int) -> _Buffers:
        history = self._parked.get(s.session)
        parked_tokens = history.tokens if history else 0
        if hit > parked_tokens:
            raise ValueError(
                f"sequence {s.id} cannot adopt {hit} tokens: session {s.session} has {parked_tokens} parked"
            )
        if history and not hit:
            self.drop_parked(s.session)
            history = None
        if history:
            self._unpark(s.session)
            buffers = history.buffers
            buffers.owner = s.id
            buffers.filled = hit
            self._filled_tokens += hit
            self._touched.append((buffers, hit, buffers.capacity))
        else:
            buffers = _Buffers(s.id)
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
        if not self._growing or layer > self._last_layer:
            return
        first, width, unit, arena = layer * self._width, self._width, self._unit, self.arena
        for buffers in self._growing:
            if buffers.done != first:
                raise RuntimeError(f"grow_layer({layer}) came out of order: {buffers.done // width} layers are done")
            handles, old, size = buffers.handles, buffers.grown * unit, buffers.capacity * unit
            try:
                if not old:
                    for _ in range(width):
                        handles.append(arena.malloc(size, tag=Tag.KV, owner=buffers.owner))
                        buffers.done += 1
                        self._held_bytes += size
                elif self._step_scope:
                    for place in range(first, first + width):
                        handle = arena.malloc(size, tag=Tag.KV, owner=buffers.owner)
                        self._old.append(_OldCopy(buffers, place, handles[place], old))
                        handles[place] = handle
                        buffers.done += 1
                        self._held_bytes += size - old
                        self._old_bytes += old
                        self._copied_bytes += buffers.filled * unit
                else:
                    self._regrown(buffers, first, arena.regrow(handles[first : first + width], size), size - old)
            except OutOfMemory as error:
                self._regrown(buffers, first, error.done, size - old)
                raise OutOfMemory(self._with_kv_terms(error.facts, buffers, old)) from error
        if layer == self._last_layer:
            self._finish_growth()

    def _regrown(self, buffers: _Buffers, first: int, handles: Sequence[int], added_bytes: int) -> None:
        """Note that the tensors from *first* on were replaced; the arena has counted the copies."""
        if handles:
            buffers.handles[first : first + len(handles)] = handles
            buffers.done += len(handles)
            self._held_bytes += len(handles) * added_bytes
            self._concat_begun = True

    def _with_kv_terms(self, facts: OomFacts, buffers: _Buffers, replaced_bytes: int) -> OomFacts:
        """The allocator's facts and ours. The buffer to be replaced counts as an old copy, so not as unfilled.

        The arena still knows adopted buffers by the turn that made them: the owner is ours to tell.
        """
        own_old = sum(old.size for old in self._old if old.buffers is buffers)
        replaced_unfilled = replaced_bytes - buffers.filled * self._unit if replaced_bytes else 0
        return replace(
            facts,
            owner=buffers.owner,
            owner_bytes=self._bytes_of(buffers) + own_old,
            growth_copy_bytes=self._old_bytes + replaced_bytes,
            unfilled_bytes=self.usage().unfilled - replaced_unfilled,
            parked_bytes=self._parked_tokens * self.layout.token_bytes,
        )

    def _finish_growth(self) -> None:
        for buffers in self._growing:
            buffers.grown = buffers.capacity
            buffers.done = 0
            self._filled_tokens += buffers.tokens - buffers.filled
            buffers.filled = buffers.tokens
        self._growing.clear()

    def end_step(self) -> None:
        """Free the step's old copies. Raise RuntimeError if a reservation was never made physical."""
        self._refuse_while_growing("end_step")
        for old in self._old:
            self.arena.free(old.handle)
        self._old_bytes = 0
        self._begin_step()

    def abort_step(self) -> None:
        """Take back what this step reserved and made: sequences are as they were at the last ``end_step``.

        Sequences admitted in this step are gone, an adopted history is parked again (as the most recent one); a
        history that was freed at admission stays freed, and copies made stay counted: that work was done.
        Raise RuntimeError, and change nothing, if a concatenation (``copy_scope = "tensor"``) has begun to replace
        tensors: the old ones are gone.
        """
        if self._concat_begun:
            raise RuntimeError(
                'a half-grown concatenation cannot be undone: with copy_scope = "tensor" only memory.oom = "stop" is '
                'legal; use copy_scope = "step" for the others'
            )
        for buffers, place, handle, size in reversed(self._old):
            self.arena.free(buffers.handles[place])
            buffers.handles[place] = handle
            self._held_bytes -= self._size_of(buffers, place) - size
        self._old_bytes = 0
        for buffers, tokens, capacity in reversed(self._touched):
            self._filled_tokens += tokens - buffers.filled
            buffers.tokens = buffers.filled = tokens
            buffers.capacity = buffers.grown = capacity
            buffers.done = 0
        for owner, (session, history) in self._admitted.items():
            buffers = self._take_from_running(owner)
            if history is None:
                self._free(buffers)
            else:
                self._park(session, history)
        self._growing.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self._old.clear()
        self._touched.clear()
        self._admitted.clear()
        self._concat_begun = False

    def _refuse_while_growing(self, verb: str) -> None:
        if self._growing:
            layers = self._last_layer + 1
            raise RuntimeError(f"{verb} came before grow_layer of all {layers} layers; call abort_step to give up")

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """Steps until the first sequence is full: 0 for ``exact``. O(sequences)."""
        running = self._running
        for s in decoding:
            buffers = running[s.id]
            limit = min(limit, buffers.capacity - buffers.tokens)
        return limit

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Count *k* more tokens each. O(sequences).

        Raise ValueError, and change nothing, if *k* is over the horizon.
        """
        if not k:
            return
        self._refuse_while_growing("advance")
        if k > (horizon := self.horizon(decoding, k)):
            raise ValueError(f"{k} steps are over the horizon of {horizon}: a buffer would be full")
        for s in decoding:
            buffers = self._running[s.id]
            buffers.tokens += k
            buffers.filled += k
        self._filled_tokens += k * len(decoding)

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Free the sequence's buffers, or park them; FINISH and DROP free the session's parked history as well.

        What is parked are the ``s.num_computed_tokens`` first tokens of ``s.spans``. Raise KeyError for PARK if the
        sequence has no buffers, RuntimeError if they are half-grown. O(buffers).
        """
        if why is Release.PARK:
            if s.id not in self._running:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            self._refuse_while_growing("parking")
        if s.id in self._running:
            buffers = self._take_from_running(s.id)
            self._forget_step_of(buffers)
            if why is Release.PARK:
                self._park(s.session, _History(buffers, s.num_computed_tokens, s.spans))
            else:
                self._free(buffers)
        if why in (Release.FINISH, Release.DROP) and s.session in self._parked:
            self.drop_parked(s.session)

    def parked_sessions(self) -> tuple[int, ...]:
        """Sessions with a parked history, least recently parked first."""
        return tuple(self._parked)

    def drop_parked(self, session: int) -> None:
        """Free a session's parked history. Raise KeyError if there is none."""
        self._free(self._unpark(session).buffers)

    def _take_from_running(self, owner: int) -> _Buffers:
        buffers = self._running.pop(owner)
        self._filled_tokens -= buffers.filled
        self._full_bytes -= buffers.full_bytes
        return buffers

    def _forget_step_of(self, buffers: _Buffers) -> None:
        """Take a sequence that is released in the middle of a step out of the step's queues; frees its old copies."""
        self._admitted.pop(buffers.owner, None)
        self._growing = [other for other in self._growing if other is not buffers]
        self._touched = [entry for entry in self._touched if entry[0] is not buffers]
        for old in [old for old in self._old if old.buffers is buffers]:
            self._old.remove(old)
            self._old_bytes -= old.size
            self.arena.free(old.handle)

    def _park(self, session: int, history: _History) -> None:
        if session in self._parked:
            self.drop_parked(session)
        self._parked[session] = history
        self._parked_tokens += history.tokens
        self._parked_held_bytes += self._bytes_of(history.buffers)

    def _unpark(self, session: int) -> _History:
        history = self._parked.pop(session)
        self._parked_tokens -= history.tokens
        self._parked_held_bytes -= self._bytes_of(history.buffers)
        return history

    def _free(self, buffers: _Buffers) -> None:
        self._held_bytes -= self._bytes_of(buffers)
        for handle in buffers.handles:
            self.arena.free(handle)

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
        """Bytes copied under ``copy_scope = "step"``: what was filled of each old buffer. The arena counts regrow's."""
        work = Work(copied_bytes=self._copied_bytes)
        self._copied_bytes = 0
        return work

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Empty: there are no blocks."""
        return ()

    def usage(self) -> KVUsage:
        """The books, O(1)."""
        token_bytes = self.layout.token_bytes
        return KVUsage(
            token=self._filled_tokens * token_bytes,
            parked=self._parked_tokens * token_bytes,
            held=self._held_bytes,
            growth_copy=self._old_bytes,
            cached=0,
            pool=0,
            table=0,
            parked_sessions=len(self._parked),
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every buffer in address order; an old copy holds no tokens of its own. O(buffers * log(buffers))."""
        kept = [(buffers, buffers.filled, "running") for buffers in self._running.values()]
        kept += [(history.buffers, history.tokens, "parked") for history in self._parked.values()]
        address, unit = self.arena.address, self._unit
        blocks = [
            KVBlock(address(handle), self._size_of(buffers, place), tokens * unit, state, buffers.owner)
            for buffers, tokens, state in kept
            for place, handle in enumerate(buffers.handles)
        ]
        blocks += [KVBlock(address(old.handle), old.size, 0, "growth_copy", old.buffers.owner) for old in self._old]
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
        growing = {id(buffers) for buffers in self._growing}
        for owner, buffers in self._running.items():
            assert buffers.owner == owner
            assert (id(buffers) in growing) == (buffers.capacity != buffers.grown)
            assert buffers.filled <= buffers.tokens <= buffers.capacity
            assert buffers.done == 0 or id(buffers) in growing
        assert self._full_bytes == sum(buffers.full_bytes for buffers in self._running.values())
        assert self._parked_held_bytes == sum(self._bytes_of(history.buffers) for history in self._parked.values())

    def _bytes_of(self, buffers: _Buffers) -> int:
        rest = len(buffers.handles) - buffers.done
        return (buffers.done * buffers.capacity + rest * buffers.grown) * self._unit

    def _size_of(self, buffers: _Buffers, place: int) -> int:
        return (buffers.capacity if place < buffers.done else buffers.grown) * self._unit


def common_prefix(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Tokens that two span lists begin with in common, however their pieces are cut. O(pieces)."""
    common, i, j, used_a, used_b = 0, 0, 0, 0, 0
    while i < len(a) and j < len(b):
        (stream_a, start_a, length_a), (stream_b, start_b, length_b) = a[i], b[j]
        if (stream_a, start_a + used_a) != (stream_b, start_b + used_b):
            break
        same = min(length_a - used_a, length_b - used_b)
        common, used_a, used_b = common + same, used_a + same, used_b + same
        if used_a == length_a:
            i, used_a = i + 1, 0
        if used_b == length_b:
            j, used_b = j + 1, 0
    return common
