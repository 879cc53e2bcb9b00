"""Several groups over one pool, a second time: from section 6 of specs/paged-kv.md alone, plain lists and real tokens.

One method a rule, so that a test can have each of them wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.records import KVSequence, Release
from hbmtwin.validation.vllm.sides import Pool

Token = tuple[str | int, int]
Hits = list[list[int]]


def blocks_for(tokens: int, size: int) -> int:
    return -(-tokens // size)


@dataclass
class Held:
    """One sequence in one group."""

    table: list[int] = field(default_factory=list)
    registered: int | None = None
    """Blocks from the start that got keys or were passed over; None before the first time."""
    grew: bool = False
    """Mamba align: it has taken a state."""
    prev: int | None = None
    """Mamba align: index of the last state before the last growth."""


class NaiveGroups:
    """One side of the comparison. A key is a number for a whole prefix; the map is a list of (key, group, block)."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.groups = pool, pool.groups
        self.free = list(range(1, pool.num_blocks))
        self.refs = [0] * pool.num_blocks
        self.keys: list[tuple[int, int, int]] = []
        self.held: dict[int, list[Held]] = {}
        self.known: dict[tuple[int, tuple[Token, ...]], int] = {}
        self.prefixes: dict[int, list[int]] = {}
        self.this_step: list[tuple[int, int]] = []
        self.told: list[tuple[str, int, int]] = []
        self.boundary = 0
        self.preempted: list[int] = []
        self.sums = [0] * 6
        sizes = [group.block_size for group in self.groups]
        self.whole, self.unit = lcm(*sizes), gcd(*sizes)
        self.classes = [
            [number for number, other in enumerate(self.groups) if other == group]
            for group in sorted(dict.fromkeys(self.groups), key=lambda group: group.kind != "full")
        ]

    # -- keys --------------------------------------------------------------------------------------------------------

    def prefix_keys(self, s: KVSequence) -> list[int]:
        """A number for each prefix of whole units: equal prefixes have equal numbers."""
        if s.id not in self.prefixes:
            tokens = [(stream, start + i) for stream, start, length in s.spans for i in range(length)]
            before, out = -1, []
            for end in range(self.unit, len(tokens) + 1, self.unit):
                before = self.known.setdefault((before, tuple(tokens[end - self.unit : end])), len(self.known))
                out.append(before)
            self.prefixes[s.id] = out
        return self.prefixes[s.id]

    def key(self, s: KVSequence, g: int, index: int) -> int:
        """Of block *index* of a group: the prefix up to its end."""
        return self.prefix_keys(s)[(index + 1) * self.groups[g].block_size // self.unit - 1]

    def has_key(self, block: int) -> bool:
        return any(other == block for _, _, other in self.keys)

    # -- rules of one group ------------------------------------------------------------------------------------------

    def skipped(self, group: KVGroup, computed: int) -> int:
        """S(c)."""
        if group.kind == "sliding_window":
            return max(0, computed - group.window + 1)
        if group.kind == "chunked_local":
            return computed // group.window * group.window
        return max(0, computed - 1) if group.kind == "mamba" else 0

    def run(self, group: KVGroup) -> int:
        """Blocks that a window needs at its end."""
        return blocks_for(group.window - 1, group.block_size)

    def batched(self) -> int:
        """F."""
        return self.pool.max_num_batched_tokens

    def cap(self, group: KVGroup) -> int | None:
        batched, longest = self.batched(), self.pool.max_model_len
        if group.kind == "sliding_window":
            return blocks_for(min(group.window - 1 + batched, longest), group.block_size) + 1
        if group.kind == "chunked_local":
            return blocks_for(min(group.window + batched, longest), group.block_size)
        return None

    def keeps_key(self, group: KVGroup, index: int) -> bool:
        """Whether a full block gets a key at all."""
        stretch = self.whole // group.block_size
        if group.kind != "sliding_window" or self.run(group) >= stretch:
            return True
        return index % stretch >= stretch - self.run(group)

    def rounded(self, tokens: int) -> int:
        """What of the tokens is registered."""
        return tokens // self.whole * self.whole if len(self.groups) > 1 else tokens

    # -- look-up -----------------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        return self.find(s)[1]

    def find(self, s: KVSequence) -> tuple[Hits, int]:
        hits: Hits = [[] for _ in self.groups]
        if not self.pool.caching:
            return hits, 0
        first = {(key, g): block for key, g, block in reversed(self.keys)}
        length, longest, full = s.num_tokens - 1, 0, None
        while True:
            before = length
            for members in self.classes:
                group = self.groups[members[0]]
                if group.kind == "full" and full is not None:
                    length = min(length, full)
                    continue

                def cached(index: int, members: list[int] = members) -> list[int] | None:
                    blocks = [first.get((self.key(s, g, index), g)) for g in members]
                    return None if None in blocks else blocks

                found = self.find_in_class(group, cached, length)
                length = len(found) * group.block_size
                longest = max(longest, length)
                for place, g in enumerate(members):
                    hits[g] = [blocks[place] if blocks else 0 for blocks in found]
                if group.kind == "full":
                    full = length
            simple = len(self.classes) == 2 and self.groups[self.classes[0][0]].kind == "full"
            if length >= before or simple or len(self.groups) == 1:
                break
        for g, group in enumerate(self.groups):
            if group.kind == "full":
                del hits[g][length // group.block_size :]
        self.boundary = longest if longest > length else 0
        return hits, length

    def find_in_class(
        self, group: KVGroup, cached: Callable[[int], list[int] | None], limit: int
    ) -> list[list[int] | None]:
        """Blocks of the hit, None for a null one."""
        size = group.block_size
        aligned = size if len(self.groups) == 1 else self.whole
        most = limit // size
        found: list[list[int] | None] = []
        if group.kind in ("full", "chunked_local"):
            if group.kind == "chunked_local":
                found = [None] * (limit // group.window * group.window // size)
            while len(found) < most and (blocks := cached(len(found))):
                found.append(blocks)
            while group.kind == "full" and len(found) * size % aligned:
                found.pop()
            return found
        if group.kind == "mamba":
            for index in range(most - 1, -1, -1):
                if (index + 1) * size % aligned == 0 and (blocks := cached(index)):
                    return [None] * index + [blocks]
            return []
        run: list[list[int] | None] = []
        for index in range(most - 1, -1, -1):
            blocks = cached(index)
            if blocks is None:
                run = []
            elif run or (index + 1) * size % aligned == 0:
                run = [blocks, *run]
                if len(run) >= self.run(group):
                    return [None] * index + run
        while len(run) * size % aligned:
            run.pop()
        return run

    # -- need --------------------------------------------------------------------------------------------------------

    def idle(self, blocks: list[int]) -> int:
        return len([block for block in blocks if block and self.refs[block] == 0])

    def need(self, s: KVSequence, g: int, tokens: int, main: int, hits: list[int], computed: int, gate: bool) -> int:
        """Blocks of one group; *main* is tokens without lookahead."""
        group, held = self.groups[g], self.of(s)[g]
        if self.just_registered(s, g, hits):
            return self.pool.num_blocks + 1
        if group.mamba_mode == "align" and group.kind == "mamba":
            wanted = blocks_for(main, group.block_size) + group.speculative_blocks
            new = wanted - len(hits) - len(held.table)
            if new > 0:
                new = 1 if held.grew else 1 + group.speculative_blocks
            return new + self.idle(hits)
        wanted = blocks_for(tokens, group.block_size) + group.speculative_blocks
        cap = self.cap(group) if gate else None
        if cap is not None:
            wanted = min(wanted, cap)
        if held.registered is not None:
            return max(0, wanted - len(held.table))
        null = self.skipped(group, computed) // group.block_size
        return max(0, wanted - max(null, len(hits) + len(held.table))) + self.idle(hits[null:])

    def just_registered(self, s: KVSequence, g: int, hits: list[int]) -> bool:
        """Whether a Mamba hit is a state that only this step computes."""
        if self.groups[g].kind != "mamba" or not hits:
            return False
        return (self.key(s, g, len(hits) - 1), g) in self.this_step

    # -- allocate ----------------------------------------------------------------------------------------------------

    def of(self, s: KVSequence) -> list[Held]:
        return self.held.get(s.id) or [Held() for _ in self.groups]

    def reserve(
        self,
        s: KVSequence,
        new: int,
        *,
        hit: int = 0,
        lookahead: int = 0,
        admitting: bool = False,
        others_running: bool = False,
    ) -> bool:
        hits: Hits = [[] for _ in self.groups]
        if hit:
            hits, found = self.find(s)
            assert found == hit
        computed = s.num_computed_tokens + hit
        kept = int(self.pool.watermark * self.pool.num_blocks) if admitting and others_running else 0
        every = range(len(self.groups))
        if admitting and self.pool.reserve_full_sequence:
            tokens = min(s.num_tokens, self.pool.max_model_len)
            need = sum(self.need(s, g, tokens, tokens, hits[g], computed, True) for g in every)
            if need + kept > len(self.free):
                return False
        main = computed + new
        tokens = min(main + lookahead, self.pool.max_model_len)
        self.forget_all(s, computed)
        need = sum(self.need(s, g, tokens, main, hits[g], computed, False) for g in every)
        if need + kept > len(self.free):
            return False
        held = self.held.setdefault(s.id, [Held() for _ in self.groups])
        if hit:
            for g in every:
                self.adopt(g, held[g], hits[g], computed)
        for g in every:
            self.take(g, held[g], tokens, main)
        if self.pool.caching:
            for g in every:
                self.register(s, g, held[g], self.rounded(min(main, s.num_tokens)))
        if admitting and self.pool.caching:
            first = 3 if s.id in self.preempted else 0
            for place, more in enumerate((1, s.num_tokens, hit), first):
                self.sums[place] += more
        return True

    def forget_all(self, s: KVSequence, computed: int) -> None:
        """Before the check, and it stays done."""
        for g, held in enumerate(self.of(s)):
            self.forget(g, held, computed)

    def forget(self, g: int, held: Held, computed: int) -> None:
        group = self.groups[g]
        gone = []
        for index in range(min(self.skipped(group, computed) // group.block_size, len(held.table)) - 1, -1, -1):
            if not held.table[index]:
                break
            gone.append(held.table[index])
            held.table[index] = 0
        self.put_back(gone)
        self.forget_prev(group, held, computed)

    def forget_prev(self, group: KVGroup, held: Held, computed: int) -> None:
        """Mamba align: the state before the last growth, once the one after it is computed."""
        prev = held.prev
        if prev is not None and prev < blocks_for(computed, group.block_size) - 1 and held.table[prev]:
            self.put_back([held.table[prev]])
            held.table[prev] = 0

    def adopt(self, g: int, held: Held, hits: list[int], computed: int) -> None:
        null = self.skipped(self.groups[g], computed) // self.groups[g].block_size
        for block in hits[null:]:
            if block:
                if self.refs[block] == 0:
                    self.free.remove(block)
                self.refs[block] += 1
        held.table = [0] * null + hits[null:]
        held.registered = len(held.table)

    def take(self, g: int, held: Held, tokens: int, main: int) -> None:
        group, table, states = self.groups[g], held.table, self.groups[g].speculative_blocks
        if group.kind == "mamba" and group.mamba_mode == "align":
            last = blocks_for(main, group.block_size) - 1
            if last + 1 + states <= len(table):
                return
            before = len(table)
            if held.grew:
                held.prev = before - 1 - states
            elif before:
                held.prev = before - 1
            table += [0] * (last - before)
            if held.grew:
                for index in range(before - states, min(before, last)):
                    table.append(table[index])
                    table[index] = 0
            table += [self.pop() for _ in range(last + 1 + states - len(table))]
            held.grew = True
        else:
            table += [self.pop() for _ in range(blocks_for(tokens, group.block_size) + states - len(table))]

    def pop(self) -> int:
        block = self.free.pop(0)
        for key, g, other in self.keys:
            if other == block:
                self.told.append(("removed", key, g))
        self.keys = [entry for entry in self.keys if entry[2] != block]
        self.refs[block] = 1
        return block

    def register(self, s: KVSequence, g: int, held: Held, tokens: int) -> None:
        group = self.groups[g]
        full = tokens // group.block_size
        if full <= (held.registered or 0):
            return
        for index in range(held.registered or 0, full):
            if held.table[index] and self.keeps_key(group, index):
                key = self.key(s, g, index)
                self.keys.append((key, g, held.table[index]))
                self.told.append(("stored", key, g))
                self.this_step.append((key, g))
        held.registered = full

    # -- give back ---------------------------------------------------------------------------------------------------

    def put_back(self, blocks: list[int]) -> None:
        """One call of free: the rule of section 2."""
        head = []
        for block in blocks:
            if not block:
                continue
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if self.pool.caching and not self.has_key(block):
                head.append(block)
            else:
                self.free.append(block)
        self.free = head + self.free

    def release(self, s: KVSequence, why: Release = Release.FINISH) -> None:
        for held in self.held.pop(s.id, []):
            self.put_back(held.table[::-1])
        if why is Release.PREEMPT:
            self.preempted.append(s.id)
        else:
            self.prefixes.pop(s.id, None)

    def reset_prefix_cache(self) -> bool:
        if len(self.free) < self.pool.num_blocks - 1:
            return False
        self.keys = []
        self.told.append(("cleared", -1, 0))
        return True

    # -- what a side is asked besides --------------------------------------------------------------------------------

    def arrive(self, s: KVSequence, tokens: Sequence[int]) -> None:
        pass

    def start_step(self) -> None:
        pass

    def end_step(self) -> None:
        self.this_step = []

    def counted(self, s: KVSequence) -> None:
        pass

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        return 0

    def shared_boundary(self, s: KVSequence) -> int:
        return self.boundary

    def tables(self, s: KVSequence) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(held.table) for held in self.of(s))

    def free_blocks(self) -> int:
        return len(self.free)

    def free_queue(self) -> tuple[int, ...]:
        return tuple(self.free)

    def events(self) -> list[tuple[str, int, int]] | None:
        told, self.told = self.told, []
        return told if self.pool.caching else None

    def statistics(self) -> tuple[int, ...] | None:
        return tuple(self.sums) if self.pool.caching else None

    def check(self) -> None:
        counted = [0] * self.pool.num_blocks
        for groups in self.held.values():
            for block in [block for held in groups for block in held.table if block]:
                counted[block] += 1
        assert counted == self.refs
        assert sorted(self.free) == [block for block in range(1, self.pool.num_blocks) if not self.refs[block]]
