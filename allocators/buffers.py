"""Buffers that grow: what each sequence has in an arena, and what one step makes, copies and frees of it.

::

    per_layer   K0 |tokens.....unfilled|  V0 |tokens.....unfilled|  K1 ...        one buffer for each tensor of a layer
    merged      |tokens..............................unfilled|                    1 buffer

    growth, copy_scope "tensor":  new, copy, free for each tensor in turn (DeviceAllocator.regrow)
            copy_scope "step":    new, copy; all old ones live until end_step

    drop    made anew             as a growth, to a size that may be equal or smaller: what stays is copied
            moved in place        what stays is copied to the buffer's front; nothing is allocated
            overwritten           a ring: nothing is copied, nothing is allocated

``plan`` and ``plan_drop`` only queue; ``grow_layer`` asks the arena, in program order. New tokens count in the books as
soon as all their buffers are there, dropped ones go from them with the plan, so that the books close at every moment,
after a failed growth too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import KVBlock, KVLayout, Tag, Work

Tensors = Literal["per_layer", "merged"]
CopyScope = Literal["tensor", "step"]
Moved = Literal["nothing", "in_place", "anew"]
"""What becomes of the tokens that stay when others are dropped."""


class Buffers:
    """What one sequence has. ``capacity`` is decided, ``grown`` is physically there; they differ within a step only."""

    __slots__ = (
        "capacity",
        "done",
        "dropped",
        "dropping",
        "filled",
        "full_bytes",
        "grown",
        "handles",
        "moves",
        "owner",
        "prompt_tokens",
        "queued",
        "tokens",
        "units",
    )

    def __init__(self, owner: int, units: tuple[int, ...]) -> None:
        self.owner = owner
        self.units = units
        """Bytes of one token in each buffer of a layer."""
        self.full_bytes = 0
        """Bytes at full length, while it runs; only a server that reserves looks at them."""
        self.prompt_tokens = 0
        """Tokens that were to be computed when the sequence was admitted, those already there included."""
        self.handles: list[int] = []
        self.tokens = 0
        """Target of the last plan."""
        self.filled = 0
        """Tokens counted in the books: ``tokens``, once the growth is done."""
        self.dropping = 0
        """Computed tokens that are not held after the last plan."""
        self.dropped = 0
        """Those counted in the books: ``dropping``, once the growth is done."""
        self.capacity = 0
        self.grown = 0
        self.queued = False
        """Whether ``grow_layer`` has something to do for the last plan."""
        self.moves = False
        """What it has to do is to move tokens to the front of the buffers that are there."""
        self.done = 0
        """Handles that already have the size of ``capacity``, while a growth is under way; else 0."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all handles, in the middle of a growth too. O(tensors of a layer)."""
        done = self._unit_of_first(self.done)
        return done * self.capacity + (self._unit_of_first(len(self.handles)) - done) * self.grown

    def size_of(self, place: int) -> int:
        """Bytes of the buffer that stands at *place* among the handles."""
        return (self.capacity if place < self.done else self.grown) * self.units[place % len(self.units)]

    def _unit_of_first(self, count: int) -> int:
        """Bytes of one token in the first *count* buffers."""
        layers, tensors = divmod(count, len(self.units))
        return layers * sum(self.units) + sum(self.units[:tensors])


class _OldCopy(NamedTuple):
    """A buffer that was replaced and lives until ``end_step``, and the place where its successor stands."""

    buffers: Buffers
    place: int
    handle: int
    size: int


class BufferStore:
    """All buffers that a policy has in its arena, the books over them, and the growth of one step.

    Verbs of a step, in this order: :meth:`plan` for each sequence, :meth:`grow_layer` for each layer, then
    :meth:`end_step`, or :meth:`undo` at any moment before.
    """

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, tensors: Tensors, copy_scope: CopyScope) -> None:
        self.arena = arena
        merged = tensors == "merged"
        self._token_bytes = layout.token_bytes
        self._units = (layout.token_bytes,) if merged else layout.tensor_bytes
        """Bytes of one token in each buffer of one ``grow_layer``."""
        self._layer_bytes = sum(self._units)
        self._runs = [(unit, len(list(run))) for unit, run in groupby(self._units)]
        """Equal ones of them that stand side by side: (unit, how many)."""
        self._last_layer = 0 if merged else layout.num_layers - 1
        self._step_scope = copy_scope == "step"
        # This step only; its end empties all of it.
        self._queue: list[Buffers] = []
        self._before: dict[Buffers, tuple[int, int, int, int]] = {}
        """Owner, tokens, dropped tokens and capacity before the step, for undo."""
        self._old: list[_OldCopy] = []
        self._concat_begun = False
        """A tensor that was there before the step has been replaced and is gone."""
        # The books.
        self.held_bytes = 0
        """Old copies not included."""
        self.filled_tokens = 0
        self.dropped_tokens = 0
        self.old_bytes = 0
        self._copied_bytes = 0

    # -- buffers of one sequence -------------------------------------------------------------------------------------

    def new(self, owner: int) -> Buffers:
        """Return a record without any buffer yet."""
        return Buffers(owner, self._units)

    def adopt(self, buffers: Buffers, owner: int, tokens: int) -> None:
        """Let *owner* go on with kept buffers, from the first *tokens* there; :meth:`undo` counts the others again."""
        self._before[buffers] = (buffers.owner, buffers.filled, buffers.dropped, buffers.capacity)
        buffers.owner = owner
        self.fill(buffers, tokens, buffers.dropped)

    def fill(self, buffers: Buffers, tokens: int, dropped: int = 0) -> None:
        """Count so many tokens in buffers that are all there, and so many dropped, more or fewer than before."""
        self._count(buffers, tokens, dropped)
        buffers.tokens, buffers.dropping = tokens, dropped

    def _count(self, buffers: Buffers, filled: int, dropped: int) -> None:
        self.filled_tokens += filled - buffers.filled
        self.dropped_tokens += dropped - buffers.dropped
        buffers.filled, buffers.dropped = filled, dropped

    def advance(self, decoding: Sequence[Buffers], k: int) -> None:
        """Count *k* more tokens in each: :meth:`fill` for many, since every leap comes here. O(sequences)."""
        for buffers in decoding:
            buffers.tokens += k
            buffers.filled += k
        self.filled_tokens += k * len(decoding)

    def overwrite(self, decoding: Sequence[Buffers], k: int) -> None:
        """Count *k* more dropped tokens in each, whose places *k* new ones took: :meth:`advance` in full rings."""
        for buffers in decoding:
            buffers.dropping += k
            buffers.dropped += k
        self.dropped_tokens += k * len(decoding)

    def free(self, buffers: Buffers) -> None:
        """Give all handles back; the record is empty then, as a new one. O(handles)."""
        self.held_bytes -= buffers.held_bytes
        for handle in buffers.handles:
            self.arena.free(handle)
        buffers.handles.clear()
        buffers.capacity = buffers.grown = buffers.done = 0
        self.fill(buffers, 0)

    def forget(self, buffers: Buffers) -> None:
        """Take a sequence out of the queues of the step that is under way, and free its old copies. O(growths)."""
        self._before.pop(buffers, None)
        buffers.queued = buffers.moves = False
        self._queue = [other for other in self._queue if other is not buffers]
        for old in [old for old in self._old if old.buffers is buffers]:
            self._old.remove(old)
            self.old_bytes -= old.size
            self.arena.free(old.handle)

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(self, buffers: Buffers, tokens: int, capacity: int) -> None:
        """Aim at *tokens* tokens, none dropped, in buffers for *capacity*; queue the growth if there is one. O(1)."""
        self._before.setdefault(buffers, (buffers.owner, buffers.tokens, buffers.dropping, buffers.capacity))
        buffers.tokens = tokens
        if capacity > buffers.capacity:
            buffers.capacity = capacity
            self._enqueue(buffers)
        elif not buffers.queued:
            self.filled_tokens += tokens - buffers.filled
            buffers.filled = tokens

    def plan_drop(
        self, buffers: Buffers, tokens: int, dropped: int, *, staying: int, capacity: int, moved: Moved = "nothing"
    ) -> None:
        """Aim at *tokens* tokens behind *dropped* ones, of which *staying* are there already. O(1).

        They are copied where buffers are made *anew* (for a larger *capacity*, or since it is so *moved*), or are moved
        ``in_place``; either is queued.
        """
        self._before.setdefault(buffers, (buffers.owner, buffers.tokens, buffers.dropping, buffers.capacity))
        self._count(buffers, staying, buffers.filled + buffers.dropped - staying)
        buffers.tokens, buffers.dropping = tokens, dropped
        if capacity > buffers.capacity or moved == "anew":
            buffers.capacity = capacity
            buffers.moves = False
            self._enqueue(buffers)
        elif moved == "in_place":
            buffers.moves = not buffers.queued or buffers.moves
            self._enqueue(buffers)
        elif not buffers.queued:
            self._count(buffers, tokens, dropped)

    def _enqueue(self, buffers: Buffers) -> None:
        if not buffers.queued:
            buffers.queued = True
            self._queue.append(buffers)

    def grow_layer(self, layer: int) -> None:
        """Make this layer's buffers of all queued growths (all layers' at layer 0 when merged), in order of the plans.

        Raise OutOfMemory, its facts completed by the owner's bytes, old copies (the buffer that was to be replaced
        among them) and unfilled bytes; the books close then. Raise RuntimeError if a layer is left out.
        O(growths) calls of the arena.
        """
        if not self._queue or layer > self._last_layer:
            return
        width = len(self._units)
        first = layer * width
        for buffers in self._queue:
            if buffers.done != first:
                raise RuntimeError(f"grow_layer({layer}) came out of order: {buffers.done // width} layers are done")
            if buffers.moves:
                self._copied_bytes += buffers.filled * self._layer_bytes
                buffers.done += width
                continue
            for unit, count in self._runs:
                self._grow(buffers, unit, count)
        if layer == self._last_layer:
            self._finish_growth()

    def _grow(self, buffers: Buffers, unit: int, count: int) -> None:
        """Make the next *count* buffers, which are of equal size. Raise OutOfMemory."""
        arena, handles, first = self.arena, buffers.handles, buffers.done
        old, size = buffers.grown * unit, buffers.capacity * unit
        try:
            if not old:
                for _ in range(count):
                    handles.append(arena.malloc(size, tag=Tag.KV, owner=buffers.owner))
                    buffers.done += 1
                    self.held_bytes += size
            elif self._step_scope:
                for place in range(first, first + count):
                    handle = arena.malloc(size, tag=Tag.KV, owner=buffers.owner)
                    self._old.append(_OldCopy(buffers, place, handles[place], old))
                    handles[place] = handle
                    buffers.done += 1
                    self.held_bytes += size - old
                    self.old_bytes += old
                    self._copied_bytes += buffers.filled * unit
            else:
                self._regrown(buffers, first, arena.regrow(handles[first : first + count], size), size - old)
        except OutOfMemory as error:
            self._regrown(buffers, first, error.done, size - old)
            replaced_unfilled = old - buffers.filled * unit if old else 0
            facts = self._with_kv_terms(error.facts, buffers, old, replaced_unfilled)
            raise OutOfMemory(facts, torch_message=error.torch_message) from error

    def _regrown(self, buffers: Buffers, first: int, handles: Sequence[int], added_bytes: int) -> None:
        """Note that the tensors from *first* on were replaced; the arena has counted the copies."""
        if handles:
            buffers.handles[first : first + len(handles)] = handles
            buffers.done += len(handles)
            self.held_bytes += len(handles) * added_bytes
            self._concat_begun = True

    def _with_kv_terms(
        self, facts: OomFacts, buffers: Buffers, replaced_bytes: int, replaced_unfilled: int
    ) -> OomFacts:
        """The allocator's facts and ours. The buffer to be replaced counts as an old copy, so not as unfilled.

        The arena still knows adopted buffers by the turn that made them: the owner is ours to tell.
        """
        own_old = sum(old.size for old in self._old if old.buffers is buffers)
        return replace(
            facts,
            owner=buffers.owner,
            owner_bytes=buffers.held_bytes + own_old,
            growth_copy_bytes=self.old_bytes + replaced_bytes,
            unfilled_bytes=self.held_bytes - self.filled_tokens * self._token_bytes - replaced_unfilled,
        )

    def _finish_growth(self) -> None:
        for buffers in self._queue:
            buffers.grown = buffers.capacity
            buffers.done = 0
            buffers.queued = buffers.moves = False
            self.filled_tokens += buffers.tokens - buffers.filled
            self.dropped_tokens += buffers.dropping - buffers.dropped
            buffers.filled, buffers.dropped = buffers.tokens, buffers.dropping
        self._queue.clear()

    def end_step(self) -> None:
        """Free the step's old copies. Raise RuntimeError if a growth was never carried out. O(old copies)."""
        self.refuse_while_growing("end_step")
        for old in self._old:
            self.arena.free(old.handle)
        self._begin_step()

    def undo(self) -> None:
        """Take back all plans and growths of this step: buffers are as they were before it, new ones are freed.

        Copies made stay counted: that work was done. Tokens that were moved in place are counted where they were, those
        they moved over included: a move changes nothing that is modelled but the counts. Raise RuntimeError, and change
        nothing, if a concatenation (``copy_scope = "tensor"``) has begun to replace tensors: the old ones are gone.
        """
        if self._concat_begun:
            raise RuntimeError(
                'a half-grown concatenation cannot be undone: with copy_scope = "tensor" only memory.oom = "stop" is '
                'legal; use copy_scope = "step" for the others'
            )
        for buffers, place, handle, size in reversed(self._old):
            self.arena.free(buffers.handles[place])
            buffers.handles[place] = handle
            self.held_bytes -= buffers.size_of(place) - size
        for buffers, (owner, tokens, dropped, capacity) in self._before.items():
            buffers.owner = owner
            buffers.queued = buffers.moves = False
            if capacity:
                self.fill(buffers, tokens, dropped)
                buffers.capacity = buffers.grown = capacity
                buffers.done = 0
            else:
                self.free(buffers)
        self._queue.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self._old.clear()
        self._before.clear()
        self._concat_begun = False
        self.old_bytes = 0

    def refuse_while_growing(self, verb: str) -> None:
        """Raise RuntimeError if a planned growth is not carried out yet."""
        if self._queue:
            layers = self._last_layer + 1
            raise RuntimeError(f"{verb} came before grow_layer of all {layers} layers; call abort_step to give up")

    # -- books -------------------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """Bytes moved in place, and those copied under ``copy_scope = "step"``: what stayed of each old buffer.

        The arena counts regrow's: the smaller of both sizes.
        """
        work = Work(copied_bytes=self._copied_bytes)
        self._copied_bytes = 0
        return work

    def blocks(self, buffers: Buffers, state: str) -> Iterator[KVBlock]:
        """The buffers of one sequence. O(handles)."""
        address, units = self.arena.address, buffers.units
        token_bytes = [buffers.filled * unit for unit in units]
        for place, handle in enumerate(buffers.handles):
            size = buffers.size_of(place)
            yield KVBlock(address(handle), size, token_bytes[place % len(units)], state, buffers.owner)

    def old_blocks(self) -> Iterator[KVBlock]:
        """The old copies, which hold no tokens of their own. O(old copies)."""
        for old in self._old:
            yield KVBlock(self.arena.address(old.handle), old.size, 0, "growth_copy", old.buffers.owner)

    def check(self, kept: Iterable[Buffers]) -> None:
        """Assert the step's queues against *kept*, all the buffers that sequences have, running or parked."""
        queued = set(self._queue)
        for buffers in kept:
            assert (buffers in queued) == buffers.queued
            assert buffers.queued or (buffers.capacity == buffers.grown and not buffers.moves)
            assert buffers.queued or (buffers.tokens, buffers.dropping) == (buffers.filled, buffers.dropped)
            assert buffers.filled <= buffers.tokens <= buffers.capacity
            assert buffers.dropped <= buffers.dropping
            assert buffers.done == 0 or buffers in queued
