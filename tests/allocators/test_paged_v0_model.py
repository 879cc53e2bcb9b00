"""paged_v0 against a second, naive model of v0's rules: counts, and tables by content, on random traffic.

The naive model has no ids, keys, undo records or running sums. A block is an object with the text that it holds; a
table is a list of such objects; a step is taken back by having copied everything before it. Both must agree on every
answer, on who shares what with whom, on every count, and on which prefixes can still be found. Planted bugs show that
the comparison would notice.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged_v0 import AllocStatus, PagedV0Config, PagedV0Policy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span
from hbmtwin.allocators.shared_blocks import SharedBlocks
from hbmtwin.allocators.shared_tables import SharedTables, Table

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
Text = bytes
"""Four bytes a token, which stand for its stream and its position there."""
NUMBERS: dict[tuple[str | int, int], bytes] = {}


def text_of(s: KVSequence, tokens: int) -> Text:
    return whole_text(s.spans)[: 4 * tokens]


@lru_cache(maxsize=4096)
def whole_text(spans: tuple[Span, ...]) -> Text:
    tokens = [(stream, start + i) for stream, start, length in spans for i in range(length)]
    return b"".join(NUMBERS.setdefault(token, len(NUMBERS).to_bytes(4, "big")) for token in tokens)


@dataclass(eq=False)
class Block:
    """*prefix* is all text up to its end, where it is full and known; *last_use* and *freed* order the evictor."""

    refs: int = 0
    prefix: Text | None = None
    last_use: int = 0
    freed: int = 0
    promised: bool = False


@dataclass(eq=False)
class Held:
    blocks: list[Block]
    slots: int
    computed: int
    last_use: int = 0


@dataclass
class NaiveV0:
    """Section 8 of specs/paged-kv.md, v0's rules, word by word."""

    config: PagedV0Config
    cached: dict[Text, Block] = field(default_factory=dict)
    tables: dict[int, Held] = field(default_factory=dict)
    host: dict[int, int] = field(default_factory=dict)
    """Blocks of each sequence that is swapped out."""
    hosted: dict[int, Held] = field(default_factory=dict)
    plain: int = 0
    now: int = 0
    frees: int = 0
    copied: int = 0
    swapped: int = 0
    step_copies: int = 0
    promised: list[Block] = field(default_factory=list)
    evicted: bool = False
    """Something was evicted, or taken out of the evictor, since this was last reset."""

    def __post_init__(self) -> None:
        self.plain = self.config.num_blocks

    @property
    def free(self) -> int:
        return self.plain + len(self.idle())

    @property
    def watermark(self) -> int:
        return int(self.config.watermark * self.config.num_blocks)

    def idle(self) -> list[Block]:
        return [block for block in self.cached.values() if not block.refs]

    def up(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_size)

    # Blocks

    def new(self) -> Block:
        if self.plain:
            self.plain -= 1
        else:
            victim = min(self.idle(), key=lambda b: (b.last_use, -len(b.prefix or b""), b.freed))
            del self.cached[victim.prefix or b""]
            self.evicted = True
        return Block(refs=1)

    def refer(self, block: Block) -> Block:
        self.evicted |= not block.refs
        block.refs += 1
        return block

    def drop(self, block: Block, last_use: int) -> None:
        block.refs -= 1
        if block.refs:
            return
        self.frees += 1
        block.last_use, block.freed = last_use, self.frees
        if block.prefix is None or self.cached.get(block.prefix) is not block:
            self.plain += 1

    def fill(self, s: KVSequence, count: int, full: int, *, promised: bool) -> list[Block]:
        blocks: list[Block] = []
        for number in range(count):
            prefix = text_of(s, (number + 1) * self.config.block_size) if number < full else None
            if prefix is None or not self.config.enable_prefix_caching:
                blocks.append(self.new())
            elif prefix in self.cached:
                blocks.append(self.refer(self.cached[prefix]))
            else:
                block = self.new()
                block.prefix, block.promised = prefix, promised
                self.cached[prefix] = block
                blocks.append(block)
                if promised:
                    self.promised.append(block)
        return blocks

    # Rules

    def status(self, need: int) -> AllocStatus:
        if self.config.num_blocks - need < self.watermark:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.free - need >= self.watermark else AllocStatus.LATER

    def hits(self, s: KVSequence) -> int:
        size, count = self.config.block_size, 0
        if not self.config.enable_prefix_caching:
            return 0
        while (count + 1) * size <= s.num_tokens - 1:
            block = self.cached.get(text_of(s, (count + 1) * size))
            if block is None or block.promised:
                break
            count += 1
        return count * size

    def admit(self, s: KVSequence, new: int, hit: int) -> bool:
        if self.status(self.up(s.num_tokens)) is not AllocStatus.OK:
            return False
        computed = min(hit + new, self.config.max_model_len)
        full = computed // self.config.block_size
        blocks = self.fill(s, self.up(s.num_tokens), full, promised=True)
        self.tables[s.id] = Held(blocks, min(s.num_tokens, self.config.max_model_len), computed, self.now)
        return True

    def touched(self, s: KVSequence, target: int) -> int:
        held, size = self.tables[s.id], self.config.block_size
        return len({slot // size for slot in range(held.slots, min(target, self.config.max_model_len))})

    def append(self, s: KVSequence, new: int, *, back: bool = False) -> bool:
        held, size = self.tables[s.id], self.config.block_size
        target = min(s.num_computed_tokens + new, self.config.max_model_len)
        if not back and self.touched(s, target) > self.free:
            return False
        for slot in range(held.slots, target):
            if slot // size == len(held.blocks):
                held.blocks.append(self.new())
            elif (shared := held.blocks[slot // size]).refs > 1:
                held.blocks[slot // size] = self.new()
                self.drop(shared, self.now)
                self.step_copies += 1
        held.slots, held.computed, held.last_use = max(held.slots, target), target, self.now
        return True

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        held = self.tables[parent.id]
        self.tables[child.id] = Held([self.refer(b) for b in held.blocks], held.slots, held.computed, self.now)

    def end_step(self, running: Sequence[KVSequence]) -> None:
        """*running*: those that were in the step, in order."""
        for s in running if self.config.enable_prefix_caching else ():
            held, size = self.tables[s.id], self.config.block_size
            for number in range(min(held.computed, s.num_tokens) // size):
                prefix, own = text_of(s, (number + 1) * size), held.blocks[number]
                if prefix not in self.cached:
                    own.prefix = prefix
                    self.cached[prefix] = own
                elif self.cached[prefix] is not own:
                    held.blocks[number] = self.refer(self.cached[prefix])
                    self.drop(own, self.now)
        for block in self.promised:
            block.promised = False
        self.promised = []
        self.copied += self.step_copies
        self.step_copies = 0
        self.now += 1

    def release(self, s: KVSequence) -> None:
        held = self.tables.pop(s.id, None)
        for block in held.blocks if held else ():
            self.drop(block, held.last_use if held else 0)
        self.host.pop(s.id, None)
        self.hosted.pop(s.id, None)

    def swap_need(self, s: KVSequence, held: Held) -> int:
        return self.up(max(held.slots, s.num_tokens))

    def swap_out(self, s: KVSequence) -> bool:
        held = self.tables[s.id]
        size = self.config.block_size * TINY.token_bytes
        if sum(self.host.values()) + self.swap_need(s, held) > self.config.swap_space_bytes // size:
            return False
        self.release(s)
        self.host[s.id], self.hosted[s.id] = len(held.blocks), held
        self.swapped += len(held.blocks)
        return True

    def swap_in(self, s: KVSequence) -> bool:
        held = self.hosted[s.id]
        if self.status(self.swap_need(s, held)) is not AllocStatus.OK:
            return False
        count = self.host.pop(s.id)
        del self.hosted[s.id]
        full = held.computed // self.config.block_size
        blocks = self.fill(s, count, full, promised=False)
        self.tables[s.id] = Held(blocks, held.slots, held.computed, self.now)
        self.swapped += count
        return True


class Comparison:
    """Random traffic on both; everything is compared after every operation."""

    def __init__(self, make: Callable[..., PagedV0Policy], config: PagedV0Config, seed: int) -> None:
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        self.policy = make(TINY, arena, config)
        self.naive = NaiveV0(config)
        self.draw = random.Random(seed)
        self.config = config
        self.groups: list[list[KVSequence]] = []
        self.swapped: list[list[KVSequence]] = []
        self.next_id = 0
        self.counts: Counter[str] = Counter()
        self.probes = [self.newcomer(stream, config.max_model_len, "") for stream in ("a", "b", "c")]

    def newcomer(self, stream: str, length: int, output: str, session: int = -1) -> KVSequence:
        self.next_id += 1
        session = self.next_id if session < 0 else session
        spans = ((stream, 0, length), (output, 0, self.config.max_model_len))
        return KVSequence(self.next_id, session, 0, length, self.config.max_model_len, spans=spans)

    def run(self, operations: int) -> None:
        verbs = (
            *(self.admit, self.admit, self.step, self.step, self.step, self.leap, self.end),
            *(self.fork, self.swap_out, self.swap_in, self.abort),
        )
        for number in range(operations):
            self.draw.choice(verbs)()
            for group in [g for g in self.groups if g[0].num_tokens >= self.config.max_model_len]:
                self.finish(group)
            self.compare()
            if number % 50 == 0:
                self.policy.check()

    def agree(self, what: str, answer: Granted | Refused, granted: bool) -> bool:
        assert isinstance(answer, Granted) == granted, what
        self.counts[f"{what} {'granted' if granted else 'refused'}"] += 1
        return granted

    def end_step(self, running: Sequence[KVSequence]) -> None:
        self.policy.end_step()
        self.naive.end_step(running)
        for s in running:
            s.num_computed_tokens = self.naive.tables[s.id].computed
            s.num_tokens += s.num_tokens == s.num_computed_tokens

    def admit(self) -> None:
        size, longest = self.config.block_size, self.config.max_model_len
        length = self.draw.choice(
            (self.draw.randint(1, longest // 2), self.draw.randint(1, longest // 2 // size) * size)
        )
        s = self.newcomer(self.draw.choice("abc"), length, self.draw.choice(("x", "x", f"own {self.next_id}")))
        hit = self.policy.lookup(s)
        assert hit == self.naive.hits(s)
        self.counts["hit"] += hit > 0
        assert self.policy.can_allocate(s) is self.naive.status(self.naive.up(length))
        new = min(length - hit, self.draw.choice((5, 4096, 4096, 4096)))
        answer = self.policy.reserve(s, new, hit=hit, admitting=True, others_running=bool(self.groups))
        if self.agree("admit", answer, self.naive.admit(s, new, hit)):
            samples = [s]
            if hit + new == length:
                for _ in range(self.draw.choice((0, 0, 1, 3))):
                    output = self.draw.choice(("x", f"own {self.next_id}"))
                    child = self.newcomer(str(s.spans[0][0]), length, output, s.session)
                    assert self.policy.fork(s, child) == Granted()
                    self.naive.fork(s, child)
                    samples.append(child)
            self.groups.append(samples)
            self.end_step(samples)
        elif isinstance(answer, Refused):
            never = answer.need_bytes > self.config.num_blocks * self.config.block_size * TINY.token_bytes
            assert never == (self.naive.status(self.naive.up(length)) is AllocStatus.NEVER)
            self.counts["never"] += never

    def step(self) -> None:
        """All go on in order; the last group is preempted, by swapping or not, when memory is short."""
        index, ran = 0, []
        while index < len(self.groups):
            group = self.groups[index]
            refused = (
                self.policy.append_refusal(group) if group[0].num_tokens - group[0].num_computed_tokens == 1 else None
            )
            assert (refused is not None) == (
                group[0].num_tokens - group[0].num_computed_tokens == 1
                and sum(self.naive.touched(s, s.num_tokens) for s in group) > self.naive.free
            )
            if refused is not None:
                self.counts["preempt"] += 1
                self.give_way(self.groups.pop())
                continue
            for s in group:
                new = min(s.num_tokens - s.num_computed_tokens, self.draw.choice((1, 4096)))
                if self.agree("append", self.policy.reserve(s, new), self.naive.append(s, new)):
                    ran.append(s)
            index += 1
        self.counts["copies"] += self.naive.step_copies
        self.end_step(ran)

    def give_way(self, group: list[KVSequence]) -> None:
        if self.draw.random() < 0.5 and self.out(group):
            return
        for s in group:
            self.policy.release(s, Release.PREEMPT)
            self.naive.release(s)

    def finish(self, group: list[KVSequence]) -> None:
        self.groups.remove(group)
        for s in group:
            self.policy.release(s, Release.FINISH)
            self.naive.release(s)

    def leap(self) -> None:
        decoding = [s for group in self.groups for s in group if s.num_tokens - s.num_computed_tokens == 1]
        longest = max((s.num_tokens for s in decoding), default=0)
        limit = min(self.draw.randint(0, 40), self.config.max_model_len - longest)
        horizon = self.policy.horizon(decoding, limit)
        k = self.draw.choice((horizon, self.draw.randint(0, horizon)))
        self.policy.advance(decoding, k)
        free = self.naive.free
        for _ in range(k if decoding else 0):
            for s in decoding:
                assert self.naive.append(s, 1)
            assert self.naive.step_copies == 0, "a copy is work"
            self.naive.end_step(decoding)
            for s in decoding:
                s.num_computed_tokens += 1
                s.num_tokens += 1
            assert self.naive.free <= free, "nothing is freed within a leap"
            free = self.naive.free
        if not decoding:  # the policy counts steps of nobody
            self.naive.now += k
        self.counts["leap"] += k > 1

    def end(self) -> None:
        if self.groups:
            group = self.draw.choice(self.groups)
            s = group.pop(self.draw.randrange(len(group)))
            self.policy.release(s, self.draw.choice((Release.FINISH, Release.DROP)))
            self.naive.release(s)
            self.groups = [g for g in self.groups if g]
        elif self.swapped and self.draw.random() < 0.2:
            for s in self.swapped.pop():
                self.policy.release(s, Release.DROP)
                self.naive.release(s)

    def fork(self) -> None:
        """Beam search: another sample goes on from here, with the same text to come."""
        groups = [g for g in self.groups if g[0].num_tokens - g[0].num_computed_tokens == 1 and len(g) < 5]
        if groups:
            group = self.draw.choice(groups)
            parent = self.draw.choice(group)
            self.next_id += 1
            child = copy.copy(parent)
            child.id = self.next_id
            held = self.naive.tables[parent.id]
            if not self.agree("late fork", self.policy.fork(parent, child), held.computed == held.slots):
                return
            self.naive.fork(parent, child)
            group.append(child)
            self.end_step([])

    def swap_out(self) -> None:
        if self.groups and self.draw.random() < 0.5:
            group = self.groups.pop(self.draw.randrange(len(self.groups)))
            if not self.out(group):
                self.groups.append(group)

    def out(self, group: list[KVSequence]) -> bool:
        room = self.config.swap_space_bytes // (self.config.block_size * TINY.token_bytes)
        need = sum(self.naive.swap_need(s, self.naive.tables[s.id]) for s in group)
        fits = sum(self.naive.host.values()) + need <= room
        assert self.policy.can_swap_out(group) == fits
        if fits:
            for s in group:
                self.agree("swap out", self.policy.swap_out(s), self.naive.swap_out(s))
            self.swapped.append(group)
        else:
            self.counts["host is full"] += 1
        return fits

    def swap_in(self) -> None:
        if self.swapped:
            group = self.swapped[0]
            need = sum(self.naive.swap_need(s, self.naive.hosted[s.id]) for s in group)
            status = self.naive.status(need)
            assert self.policy.can_swap_in(group) is status
            self.counts[f"swap in {status.value}"] += 1
            if status is AllocStatus.OK:
                for s in group:
                    self.agree("swap in", self.policy.swap_in(s), self.naive.swap_in(s))
                if all(s.num_tokens - s.num_computed_tokens == 1 for s in group):
                    for s in group:
                        answer = self.policy.reserve(s, 1, admitting=True)
                        assert self.agree("come back", answer, self.naive.append(s, 1, back=True))
                    self.end_step(group)
                self.groups.append(self.swapped.pop(0))
            elif status is AllocStatus.NEVER:
                for s in self.swapped.pop(0):
                    self.policy.release(s, Release.DROP)
                    self.naive.release(s)

    def abort(self) -> None:
        """A step that is taken back; left out where keys would be lost by it."""
        before = copy.deepcopy(self.naive)
        self.naive.evicted = False
        late = self.newcomer(self.draw.choice("abc"), self.draw.randint(1, 12), "x")
        hit = self.naive.hits(late)
        answers = [self.naive.append(s, min(7, s.num_tokens - s.num_computed_tokens)) for g in self.groups for s in g]
        answers.append(self.naive.admit(late, late.num_tokens - hit, hit))
        if answers[-1]:
            child = self.newcomer(str(late.spans[0][0]), late.num_tokens, "x", late.session)
            self.naive.fork(late, child)
        lost, self.naive = self.naive.evicted, before
        if lost:
            return
        running = [s for g in self.groups for s in g]
        for s, granted in zip(running, answers, strict=False):
            new = min(7, s.num_tokens - s.num_computed_tokens)
            assert isinstance(self.policy.reserve(s, new), Granted) == granted
        answer = self.policy.reserve(late, late.num_tokens - hit, hit=hit, admitting=True)
        assert isinstance(answer, Granted) == answers[-1]
        if answers[-1]:
            self.policy.fork(late, child)
        self.policy.abort_step()
        self.counts["abort"] += 1

    def compare(self) -> None:
        policy, naive, size = self.policy, self.naive, self.config.block_size * TINY.token_bytes
        same: dict[int, Block] = {}
        slots: dict[Block, int] = {}
        for group in self.groups:
            for s in group:
                held, ids = naive.tables[s.id], policy.block_ids(s)
                assert len(ids) == len(held.blocks)
                for number, (its_id, block) in enumerate(zip(ids, held.blocks, strict=True)):
                    assert same.setdefault(its_id, block) is block, "the same blocks are shared"
                    slots[block] = max(0, min(self.config.block_size, held.computed - number * self.config.block_size))
        assert len(set(same.values())) == len(same)
        usage = policy.usage()
        assert (usage.held, usage.cached, usage.pool) == (
            len(same) * size,
            len(naive.idle()) * size,
            naive.plain * size,
        )
        assert usage.token == sum(slots.values()) * TINY.token_bytes
        assert usage.shared == sum(h.computed for h in naive.tables.values()) * TINY.token_bytes - usage.token
        assert usage.table == 4 * sum(len(held.blocks) for held in naive.tables.values())
        assert policy.swapped_blocks == sum(naive.host.values())
        work = policy.take_work()
        assert (work.copied_bytes, work.swapped_bytes) == (naive.copied * size, naive.swapped * size)
        naive.copied = naive.swapped = 0
        for probe in self.probes:
            assert policy.lookup(probe) == naive.hits(probe)


LITTLE = 40 * 4 * TINY.token_bytes
CONFIGS = {
    "no cache": PagedV0Config(num_blocks=40, block_size=4, max_model_len=60, watermark=0.1, swap_space_bytes=LITTLE),
    "cache": PagedV0Config(
        num_blocks=40,
        block_size=4,
        max_model_len=60,
        watermark=0.05,
        enable_prefix_caching=True,
        swap_space_bytes=LITTLE,
    ),
    "one token a block": PagedV0Config(
        num_blocks=90,
        block_size=1,
        max_model_len=40,
        enable_prefix_caching=True,
        swap_space_bytes=60 * TINY.token_bytes,
    ),
    "large blocks": PagedV0Config(
        num_blocks=14, block_size=16, max_model_len=120, enable_prefix_caching=True, swap_space_bytes=2 * LITTLE
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_count_and_every_table_is_that_of_the_naive_model(name: str) -> None:
    config = CONFIGS[name]
    comparison = Comparison(PagedV0Policy, config, seed=1)
    comparison.run(12_500)
    wanted = ["admit granted", "admit refused", "preempt", "leap", "late fork granted", "abort", "swap in ok"]
    wanted += ["swap out granted", "host is full"]
    wanted += ["hit"] if config.enable_prefix_caching else []
    wanted += ["copies"] if config.block_size > 1 else []
    assert {what: comparison.counts[what] for what in wanted if comparison.counts[what] < 20} == {}


# Planted bugs


class WritesIntoSharedBlocks(SharedTables):
    """No copy is made."""

    def copies_next(self, table: Table) -> bool:
        return False


class KeepsTheReference(SharedTables):
    """Who copies keeps its reference to what it copied from."""

    def append(self, table: Table, **more: int) -> None:
        before = table.blocks[:]
        super().append(table, **more)
        for block, after in zip(before, table.blocks, strict=False):
            if block != after:
                self.pool.refs[block] += 1


class NeverExchanges(SharedTables):
    """A decoded block stays beside the cached one that equals it."""

    def _settle(self, table: Table) -> None:
        for index in range(table.keyed, min(table.tokens, table.sequence.num_tokens) // self.block_size):
            key = self.pool.keys.of(table.sequence, index + 1)[index]
            if key in self.pool.block_of:
                return
            super()._settle(table)


class PromisesAtOnce(SharedTables):
    """What is not computed yet can be found."""

    def admit(self, s: KVSequence, **more: int) -> None:
        super().admit(s, **more)
        self._fresh.clear()


class EvictsShortPrefixesFirst(SharedBlocks):
    def drop(self, block: int, last_use: int, prefix_blocks: int) -> bool:
        return super().drop(block, last_use, -prefix_blocks)


class EvictsTheLastUsed(SharedBlocks):
    def drop(self, block: int, last_use: int, prefix_blocks: int) -> bool:
        return super().drop(block, -last_use, prefix_blocks)


class EvictsBeforeThePlainOnes(SharedBlocks):
    def take(self) -> int:
        if not self._idle:
            return super().take()
        block = self._evict()
        self.refs[block] = 1
        self.entries += 1
        return block


class ForgetsTheWatermark(PagedV0Policy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._watermark_blocks = 0


class CountsNewBlocksOnly(PagedV0Policy):
    """A request in the middle of a block goes on without a free one."""

    def _touched(self, seen: int, tokens: int) -> int:
        return max(0, self._blocks_for(tokens) - self._blocks_for(seen))


class KeepsSwappedBlocksOnTheHost(PagedV0Policy):
    def swap_in(self, s: KVSequence) -> Granted | Refused:
        used, answer = self._host_used, super().swap_in(s)
        self._host_used = used
        return answer


class KeepsSwappedBlocksOnTheDevice(PagedV0Policy):
    def swap_out(self, s: KVSequence) -> Granted | Refused:
        blocks, answer = self.block_ids(s), super().swap_out(s)
        if isinstance(answer, Granted) and self._pool._plain and self._pool._plain[-1] in blocks:
            self._pool._plain.pop()
        return answer


class SwapsForNothing(PagedV0Policy):
    def _move(self, blocks: int) -> None:
        super()._move(blocks)
        self._swapped_bytes = 0


class LeapsOverCopies(PagedV0Policy):
    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        copies_next, self._tables.copies_next = self._tables.copies_next, lambda table: False
        found = super().horizon(decoding, limit)
        self._tables.copies_next = copies_next
        return found


class AdmitsByWhatIsNotCached(PagedV0Policy):
    """Prefix hits are subtracted."""

    def can_allocate(self, s: KVSequence) -> AllocStatus:
        return self._status(self._blocks_for(s.num_tokens) - self._tables.cached_prefix(s))


def with_tables(tables: type[SharedTables], pool: type[SharedBlocks]) -> Callable[..., PagedV0Policy]:
    def make(layout: KVLayout, arena: PooledAllocator, config: PagedV0Config) -> PagedV0Policy:
        policy = PagedV0Policy(layout, arena, config)
        policy._tables = tables(config.num_blocks, config.block_size, caching=config.enable_prefix_caching)
        policy._tables.pool = policy._pool = pool(config.num_blocks, config.block_size)
        return policy

    return make


BUGS = (
    *(WritesIntoSharedBlocks, KeepsTheReference, NeverExchanges, PromisesAtOnce),
    *(EvictsShortPrefixesFirst, EvictsTheLastUsed, EvictsBeforeThePlainOnes),
    *(ForgetsTheWatermark, CountsNewBlocksOnly, KeepsSwappedBlocksOnTheHost, KeepsSwappedBlocksOnTheDevice),
    *(SwapsForNothing, LeapsOverCopies, AdmitsByWhatIsNotCached),
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: type) -> None:
    make: Callable[..., PagedV0Policy] = bug
    if issubclass(bug, SharedTables):
        make = with_tables(bug, SharedBlocks)
    elif issubclass(bug, SharedBlocks):
        make = with_tables(SharedTables, bug)
    with pytest.raises(AssertionError):
        Comparison(make, CONFIGS["cache"], seed=1).run(6_000)
