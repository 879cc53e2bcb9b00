"""Ranges of addresses with pages behind them: what each sequence has, what one step maps, where pages come from.

::

    a range     K0 |page|page|page|          |  V0 |page|page|page|          |  K1 |page| ...
                   |tokens......  |no memory |     |tokens......  |no memory |
                   |<- max_model_len, in whole pages ->|

    running     its tokens need some of its pages; what is mapped beyond them is surplus
    parked      the same, for a history that waits for its next turn
    free        nobody's: all its pages are surplus, and go to the sequence that takes the range

Pages that are needed may be more than those that are mapped only within a step: ``plan`` counts them, ``grow_layer``
maps them. What may be planned therefore depends on two sums alone: needed pages, and mapped pages plus free ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from hbmtwin.allocators.contract import PageAllocator
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import KVBlock, KVLayout, Span, Tag

State = Literal["running", "parked", "free"]


class VirtualRange:
    """Addresses for one sequence of the greatest length, and what is behind them."""

    __slots__ = ("address", "count", "filled", "full", "number", "owner", "pages", "room", "spans", "state", "tokens")

    def __init__(self, number: int, address: int, tensors: int) -> None:
        self.number = number
        self.address = address
        self.pages: list[list[int]] = [[] for _ in range(tensors)]
        """Handles of the pages behind each tensor, from its start on."""
        self.count = 0
        """Pages behind all tensors."""
        self.full = 0
        """Tokens that have memory in every tensor."""
        self.state: State = "free"
        self.owner = -1
        """The sequence that has it or, parked, the last one that had it."""
        self.spans: tuple[Span, ...] = ()
        """Of a parked history: at least the tokens that are there."""
        self.tokens = 0
        """Target of the last plan."""
        self.filled = 0
        """Tokens counted in the books: ``tokens``, once all their pages are mapped."""
        self.room = 0
        """Tokens that the pages counted as needed have room for."""


class RangeStore:
    """All ranges of a policy, the pages behind them, the books over both, and the growth of one step.

    Verbs of a step, in this order: :meth:`plan` for each sequence, :meth:`grow_layer` for each layer, then
    :meth:`end_step`, or :meth:`undo` at any moment before. *limit_bytes* caps what is mapped, if it is given.
    """

    def __init__(
        self, layout: KVLayout, arena: PageAllocator, page_bytes: int, longest: int, limit_bytes: int | None
    ) -> None:
        if page_bytes < 1 or page_bytes % arena.page_bytes:
            raise ValueError(
                f"page_bytes {page_bytes} is no multiple of {arena.page_bytes}, the granularity of the driver: take "
                "that, or make a driver with smaller pages (vAttention modified NVIDIA's for them)"
            )
        self.arena = arena
        self.page_bytes = page_bytes
        self._limit_bytes = limit_bytes
        self._longest = longest
        self._token_bytes = layout.token_bytes
        self._kinds = layout.tensor_bytes
        self._num_layers = layout.num_layers
        self._units = layout.tensor_bytes * layout.num_layers
        """Bytes of a token in each tensor, in program order."""
        *offsets, self._span_bytes = accumulate((self._whole(longest, u) * page_bytes for u in self._units), initial=0)
        self._offsets = offsets
        self.ranges: list[VirtualRange] = []
        # The books.
        self.pages: dict[State, int] = {"running": 0, "parked": 0, "free": 0}
        self.tokens: dict[State, int] = {"running": 0, "parked": 0, "free": 0}
        self.needed = 0
        """Pages that the rooms of all ranges take."""
        # This step only; its end empties all of it.
        self._queue: dict[VirtualRange, None] = {}
        self._before: dict[VirtualRange, tuple[int, int]] = {}
        """Tokens and room before the step, for undo."""
        self._fresh: list[tuple[VirtualRange, int]] = []
        """Range and tensor of each page that this step has mapped."""

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _whole(self, tokens: int, unit: int) -> int:
        """Pages of one tensor; a token may lie across two of them, since addresses go on."""
        return -(-tokens * unit // self.page_bytes)

    def pages_for(self, tokens: int) -> int:
        """Pages of all tensors for so many tokens. O(tensors of a layer)."""
        return self._num_layers * sum([self._whole(tokens, unit) for unit in self._kinds])

    def room_for(self, tokens: int) -> int:
        """The most tokens that take no more pages than *tokens* do. O(tensors of a layer)."""
        size = self.page_bytes
        return min([self._longest, *(self._whole(tokens, unit) * size // unit for unit in self._kinds)])

    @property
    def left_pages(self) -> int:
        """Pages that may still be planned: free ones, and surplus that would be reclaimed; not below 0."""
        return max(0, sum(self.pages.values()) + self._free_pages() - self.needed)

    def _free_pages(self) -> int:
        free = self.arena.free_bytes // self.page_bytes
        if self._limit_bytes is not None:
            free = min(free, self._limit_bytes // self.page_bytes - sum(self.pages.values()))
        return max(0, free)

    # -- ranges ------------------------------------------------------------------------------------------------------

    def take(self, owner: int, pages: int) -> VirtualRange:
        """A range for a new sequence that needs *pages*: a free one, or a new one if there is none. O(ranges).

        Best fit: the fewest mapped pages that are enough, else the most; the lowest number among equals.
        """
        free = [r for r in self.ranges if r.state == "free"]
        enough = [r for r in free if r.count >= pages]
        if enough:
            taken = min(enough, key=lambda r: r.count)
        elif free:
            taken = max(free, key=lambda r: r.count)
        else:
            taken = VirtualRange(len(self.ranges), self.arena.reserve_range(self._span_bytes), len(self._units))
            self.ranges.append(taken)
        self._before[taken] = (0, 0)
        taken.owner = owner
        self.move(taken, "running")
        return taken

    def adopt(self, r: VirtualRange, owner: int, tokens: int) -> None:
        """Let *owner* go on with a parked range, from its first *tokens*; :meth:`undo` counts the others again."""
        self._before[r] = (r.filled, r.room)
        r.owner = owner
        self.move(r, "running")
        self.hold(r, tokens)

    def hold(self, r: VirtualRange, tokens: int) -> None:
        """Count so many tokens, whose pages are all there, and need no pages for more than those. O(1)."""
        r.tokens = tokens
        self._fill(r, tokens)
        self._need(r, self.room_for(tokens))

    def free(self, r: VirtualRange) -> None:
        """Make a range nobody's; its pages stay mapped. O(pages mapped in this step)."""
        self.forget(r)
        self.hold(r, 0)
        self.move(r, "free")
        r.owner = -1
        r.spans = ()
        self._measure(r)

    def forget(self, r: VirtualRange) -> None:
        """Take a range out of the step that is under way. O(pages mapped in this step)."""
        self._before.pop(r, None)
        self._queue.pop(r, None)
        self._fresh = [(other, tensor) for other, tensor in self._fresh if other is not r]

    def move(self, r: VirtualRange, state: State) -> None:
        """Count its pages and tokens under another state. O(1)."""
        for book, amount in ((self.pages, r.count), (self.tokens, r.filled)):
            book[r.state] -= amount
            book[state] += amount
        r.state = state

    def _fill(self, r: VirtualRange, tokens: int) -> None:
        self.tokens[r.state] += tokens - r.filled
        r.filled = tokens

    def _need(self, r: VirtualRange, room: int) -> None:
        self.needed += self.pages_for(room) - self.pages_for(r.room)
        r.room = room

    def _measure(self, r: VirtualRange) -> None:
        size = self.page_bytes
        mapped = [len(pages) * size // unit for pages, unit in zip(r.pages, self._units, strict=True)]
        r.full = min(self._longest, *mapped)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _map(self, r: VirtualRange, tensor: int) -> None:
        pages = r.pages[tensor]
        address = r.address + self._offsets[tensor] + len(pages) * self.page_bytes
        pages.append(self.arena.map_page(address, self.page_bytes, tag=Tag.KV, owner=r.owner))
        r.count += 1
        self.pages[r.state] += 1

    def _unmap(self, r: VirtualRange, tensor: int) -> None:
        self.arena.free(r.pages[tensor].pop())
        r.count -= 1
        self.pages[r.state] -= 1

    def _missing(self, r: VirtualRange, first: int) -> int:
        """Pages that are needed and not there yet, from the tensor *first* on."""
        pairs = zip(r.pages[first:], self._units[first:], strict=True)
        return sum([max(0, self._whole(r.room, unit) - len(pages)) for pages, unit in pairs])

    def _reclaim(self, count: int) -> None:
        """Unmap *count* surplus pages, fewer if there are not so many, from the range of the highest number down.

        That is vAttention's order, whether a range is free or in use; it takes pages of all tensors at once, here they
        go one by one, from the last tensor. O(ranges * tensors).
        """
        for r in reversed(self.ranges):
            if not count:
                return
            for tensor in reversed(range(len(self._units)) if r.count else ()):
                surplus = len(r.pages[tensor]) - self._whole(r.room, self._units[tensor])
                for _ in range(min(count, surplus)):
                    self._unmap(r, tensor)
                    count -= 1
            self._measure(r)

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(self, r: VirtualRange, tokens: int, room: int) -> None:
        """Aim at *tokens* tokens with room for *room*, and queue the growth if there is one. O(1)."""
        self._before.setdefault(r, (r.tokens, r.room))
        r.tokens = tokens
        if room > r.room:
            self._need(r, self.room_for(room))
        if r.room > r.full:
            self._queue[r] = None
        else:
            self._fill(r, tokens)

    def grow_layer(self, layer: int) -> None:
        """Map this layer's pages of all queued growths, in order of the plans, reclaiming what they are short of.

        Raise OutOfMemory, its facts completed by the owner's bytes, unfilled and parked ones; the books close then.
        Raise RuntimeError if a layer was left out. O(pages) calls of the arena; reclaiming O(ranges * tensors).
        """
        if not self._queue or layer >= self._num_layers:
            return
        width = len(self._kinds)
        first = layer * width
        short = sum([self._missing(r, first) for r in self._queue]) - self._free_pages()
        if short > 0:
            self._reclaim(short)
        for r in self._queue:
            try:
                for tensor in range(first, first + width):
                    for _ in range(self._whole(r.room, self._units[tensor]) - len(r.pages[tensor])):
                        self._map(r, tensor)
                        self._fresh.append((r, tensor))
            except OutOfMemory as error:
                held = self.pages["running"] + self.pages["parked"]
                tokens = self.tokens["running"] + self.tokens["parked"]
                error.facts = replace(
                    error.facts,
                    owner_bytes=r.count * self.page_bytes,
                    unfilled_bytes=held * self.page_bytes - tokens * self._token_bytes,
                    parked_bytes=self.tokens["parked"] * self._token_bytes,
                )
                raise
        if layer == self._num_layers - 1:
            for r in self._queue:
                self._measure(r)
                if r.full < r.room:
                    raise RuntimeError(f"the last layer grew before another: sequence {r.owner} lacks pages")
                self._fill(r, r.tokens)
            self._queue.clear()

    def end_step(self) -> None:
        """The step's pages stay. Raise RuntimeError if a growth was never carried out. O(1)."""
        self.refuse_while_growing("end_step")
        self._before.clear()
        self._fresh.clear()

    def undo(self) -> None:
        """Unmap what this step has mapped, and aim where ranges aimed before it; what it reclaimed stays reclaimed."""
        for r, tensor in reversed(self._fresh):
            self._unmap(r, tensor)
        for r, (tokens, room) in self._before.items():
            r.tokens = tokens
            self._fill(r, tokens)
            self._need(r, room)
            self._measure(r)
        self._queue.clear()
        self.end_step()

    def advance(self, decoding: Sequence[VirtualRange], k: int) -> None:
        """Count *k* more tokens in each, all of whose pages are there. O(sequences)."""
        for r in decoding:
            r.tokens = r.filled = tokens = r.tokens + k
            if tokens > r.room:
                self._need(r, self.room_for(tokens))
        self.tokens["running"] += k * len(decoding)

    def refuse_while_growing(self, verb: str) -> None:
        """Raise RuntimeError if a planned growth is not carried out yet."""
        if self._queue:
            raise RuntimeError(
                f"{verb} came before grow_layer of all {self._num_layers} layers; call abort_step to give up"
            )

    # -- books -------------------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[KVBlock]:
        """Every page of every range, in no order. O(pages)."""
        size = self.page_bytes
        for r in self.ranges:
            for pages, offset, unit in zip(r.pages, self._offsets, self._units, strict=True):
                filled = r.filled * unit
                for place in range(len(pages)):
                    token_bytes = min(size, max(0, filled - place * size))
                    yield KVBlock(r.address + offset + place * size, size, token_bytes, r.state, r.owner)

    def check(self) -> None:
        """Assert the books against the ranges, and what is needed against what is there. O(pages)."""
        for state in self.pages:
            ranges = [r for r in self.ranges if r.state == state]
            assert self.pages[state] == sum(len(pages) for r in ranges for pages in r.pages), f"pages, {state}"
            assert self.tokens[state] == sum(r.filled for r in ranges), f"tokens, {state}"
        assert self.needed == sum(self.pages_for(r.room) for r in self.ranges), "needed pages"
        for r in self.ranges:
            assert r.count == sum(map(len, r.pages))
            assert r.filled <= r.tokens <= r.room == self.room_for(r.room)
            assert r.state != "free" or (r.tokens, r.room, r.owner) == (0, 0, -1)
            if r not in self._queue:
                assert r.filled == r.tokens
                assert r.room <= r.full
            for tensor, (pages, unit) in enumerate(zip(r.pages, self._units, strict=True)):
                assert len(pages) >= -(-r.filled * unit // self.page_bytes), "tokens have memory"
                for place, handle in enumerate(pages):
                    assert self.arena.address(handle) == r.address + self._offsets[tensor] + place * self.page_bytes
