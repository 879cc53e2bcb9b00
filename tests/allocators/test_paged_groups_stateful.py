"""Groups under random traffic: one full group beside ``paged`` at every operation, and several by their invariants.

The machine knows the rules only as far as anybody can see them: S(c) of each kind, that a refusal changes nothing but
what was forgotten, that tables grow at their end, and the books.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators.direct import DirectAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.group_managers import GroupManager, WindowManager
from hbmtwin.allocators.kv_groups import Grouping, KVGroup, one_group
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4)
MAX_MODEL_LEN = 60


def arena() -> DirectAllocator:
    return DirectAllocator(HbmDriver(1 << 24), DirectAllocator.Config(limit_bytes=1 << 24))


# One full group


class Beside:
    """The same calls to both policies, whose answers must be equal."""

    def __init__(self, seed: int, groups_class: type[PagedGroupsPolicy] = PagedGroupsPolicy) -> None:
        self.random = choose = random.Random(seed)
        size = choose.choice([1, 3, 4])
        common: dict[str, Any] = {
            "num_blocks": choose.choice([12, 25, 60]),
            "max_model_len": MAX_MODEL_LEN,
            "enable_prefix_caching": choose.random() < 0.7,
            "watermark": choose.choice([0.0, 0.1]),
            "reserve_full_sequence": choose.random() < 0.5,
        }
        self.paged: Any = PagedPolicy(LAYOUT, arena(), PagedConfig(block_size=size, **common))
        self.groups: Any = groups_class(LAYOUT, arena(), PagedGroupsConfig(grouping=one_group(LAYOUT, size), **common))
        self.running: list[KVSequence] = []
        self.told: list[Any] = []
        self.operations = 0

    def both(self, verb: str, *args: Any, **more: Any) -> Any:
        """Call a verb of both, and compare all that can be seen."""
        self.operations += 1
        answers = [getattr(policy, verb)(*args, **more) for policy in (self.paged, self.groups)]
        assert answers[0] == answers[1], verb
        assert tuple(self.paged._free) == self.groups.free_queue(), verb
        assert self.paged.usage() == self.groups.usage(), verb
        for s in self.running:
            assert self.paged.block_ids(s) == self.groups.block_ids(s), verb
        return answers[0]

    def run(self, operations: int) -> None:
        """Traffic that repeats and extends prompts."""
        while self.operations < operations:
            getattr(self, self.random.choice(["admit", "step", "step", "leap", "end", "abort"]))()
            if self.random.random() < 0.05:
                self.both("reset_prefix_cache")
                self.groups.check()
                assert list(self.paged.walk()) == list(self.groups.walk())

    def newcomer(self) -> KVSequence:
        choose, id = self.random, self.operations
        shared = choose.choice([(("a", 0, n),) for n in (0, 4, 8, 12)] + self.told[-6:])
        spans = (*shared, (f"s{choose.randrange(6)}", 0, choose.choice([0, 4, 7])), (f"o{id}", 0, 2 * MAX_MODEL_LEN))
        tokens = max(1, min(sum(length for *_, length in spans[:-1]), MAX_MODEL_LEN - 8))
        return KVSequence(id, id, 0, tokens, MAX_MODEL_LEN, spans=spans)

    def admit(self) -> None:
        s = self.newcomer()
        hit = self.both("lookup", s)
        new = min(self.random.choice([3, 100]), s.num_tokens - hit)
        others = bool(self.running)
        answer = self.both("reserve", s, new, hit=hit, admitting=True, others_running=others)
        self.both("end_step")
        if isinstance(answer, Granted):
            s.num_computed_tokens = hit + new
            s.num_tokens += s.num_computed_tokens == s.num_tokens
            self.running.append(s)

    def step(self) -> None:
        chunk, lookahead = self.random.choice([1, 5]), self.random.choice([0, 0, 2])
        for s in list(self.running):
            new = min(chunk, s.num_tokens - s.num_computed_tokens)
            while s in self.running:
                if isinstance(self.both("reserve", s, new, lookahead=lookahead, others_running=True), Granted):
                    break
                self.release(self.running[-1], Release.PREEMPT)
            if s in self.running:
                s.num_computed_tokens += new
        self.both("end_step")
        for s in list(self.running):
            s.num_tokens += s.num_computed_tokens == s.num_tokens
            if s.num_tokens >= MAX_MODEL_LEN - 4:
                self.release(s, Release.FINISH)

    def leap(self) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        limit = min([self.random.randrange(30), *(MAX_MODEL_LEN - 4 - s.num_tokens for s in decoding)])
        k = self.both("horizon", decoding, limit)
        self.both("advance", decoding, k)
        for s in decoding:
            s.num_computed_tokens += k
            s.num_tokens += k

    def abort(self) -> None:
        for s in self.running:
            self.both("reserve", s, min(4, s.num_tokens - s.num_computed_tokens))
        late = self.newcomer()
        hit = self.both("lookup", late)
        self.both("reserve", late, late.num_tokens - hit, hit=hit, admitting=True)
        self.both("abort_step")

    def end(self) -> None:
        if self.running:
            self.release(self.random.choice(self.running), self.random.choice([Release.FINISH, Release.PREEMPT]))

    def release(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.told.append(tuple(piece for piece in s.spans[:-1] if piece[2]))
        self.both("release", s, why)


@pytest.mark.parametrize("seed", range(12))
def test_one_full_group_is_paged_operation_by_operation(seed: int) -> None:
    beside = Beside(seed)
    beside.run(2500)
    assert beside.operations >= 2500


class TakesTheNewest(PagedGroupsPolicy):
    """Of two blocks with one key the last registered serves."""

    def lookup(self, s: KVSequence) -> int:
        cache = self.pool.cache
        for key, blocks in cache.carriers().items():
            if len(blocks) > 1 and blocks[0] == min(blocks):
                first, *others = blocks
                cache.block_of[key], cache._twins[key] = others[0], [*others[1:], first]
        return super().lookup(s)


class RegistersOneBlockLess(PagedGroupsPolicy):
    """The last full block gets its key only when the next one is full."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        register, size = self.pool.register, self.pool.alignment
        self.pool.register = lambda s, held, tokens: register(s, held, max(0, tokens - size))


class LeapsSequenceBySequence(PagedGroupsPolicy):
    """Blocks of a leap go out sequence by sequence."""

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        for s in decoding:
            super().advance([s], k)


@pytest.mark.parametrize("bug", [TakesTheNewest, RegistersOneBlockLess, LeapsSequenceBySequence])
def test_a_planted_difference_from_paged_is_noticed(bug: type[PagedGroupsPolicy]) -> None:
    def one_after_the_other() -> None:
        for seed in range(12):
            Beside(seed, bug).run(2500)

    with pytest.raises(AssertionError):
        one_after_the_other()


# Several groups


def full(size: int = 4) -> KVGroup:
    return KVGroup(num_layers=2, block_size=size, token_bytes=32 // size)


def window(tokens: int, size: int = 4, **more: int) -> KVGroup:
    return KVGroup(kind="sliding_window", window=tokens, block_size=size, token_bytes=32 // size, **more)


def chunked(tokens: int, size: int = 4) -> KVGroup:
    return KVGroup(kind="chunked_local", window=tokens, block_size=size, token_bytes=32 // size)


def mamba(mode: Any, size: int = 4, drafts: int = 0) -> KVGroup:
    return KVGroup(kind="mamba", mamba_mode=mode, block_size=size, state_bytes=30, speculative_blocks=drafts)


MODELS: dict[str, tuple[bool, tuple[KVGroup, ...]]] = {
    "full and window": (True, (full(), window(6))),
    "two windows": (True, (window(5), window(11), window(5))),
    "block sizes": (True, (full(8), window(5), window(9, 2))),
    "smaller full blocks": (True, (window(13, 8), full(4))),
    "chunks": (True, (full(), chunked(8), window(7))),
    "mamba align": (True, (full(), mamba("align", drafts=1))),
    "mamba all": (True, (mamba("all"), full(8), window(6))),
    "no cache": (False, (window(6), full(), chunked(8), mamba("none", MAX_MODEL_LEN))),
    "sinks": (False, (window(6, sinks=5),)),
}


def skipped(group: KVGroup, computed: int) -> int:
    """S(c), from the specification."""
    if group.kind == "sliding_window":
        return max(0, computed - group.window + 1)
    if group.kind == "chunked_local":
        return computed // group.window * group.window
    return 0 if group.kind == "full" else max(0, computed - 1)


class Traffic(RuleBasedStateMachine):
    """What a scheduler may do to a policy with these groups."""

    def __init__(self, model: str, cls: type[PagedGroupsPolicy] = PagedGroupsPolicy) -> None:
        super().__init__()
        caching, self.groups = MODELS[model]
        grouping = Grouping(groups=self.groups, group_length=2, page_bytes=32)
        config = PagedGroupsConfig(
            num_blocks=45,
            max_model_len=MAX_MODEL_LEN,
            grouping=grouping,
            enable_prefix_caching=caching,
            max_num_batched_tokens=16,
        )
        self.policy: Any = cls(LAYOUT, arena(), config)
        self.running: list[KVSequence] = []
        self.next_id = 0

    @rule(stream=st.integers(0, 3), shared=st.sampled_from([0, 4, 8, 16, 24]), own=st.sampled_from([0, 1, 4, 9, 20]))
    def admit(self, stream: int, shared: int, own: int) -> None:
        self.next_id += 1
        spans = ((f"s{stream}", 0, shared), (f"o{self.next_id}", 0, 2 * MAX_MODEL_LEN))
        s = KVSequence(self.next_id, self.next_id, 0, max(1, shared + own), MAX_MODEL_LEN, spans=spans)
        hit = self.policy.lookup(s)
        assert 0 <= hit < s.num_tokens
        assert hit <= shared, "nobody else has its own tokens"
        if self.tried(s, min(16, s.num_tokens - hit), hit=hit, admitting=True, others_running=bool(self.running)):
            self.running.append(s)
            s.num_computed_tokens = hit + min(16, s.num_tokens - hit)
            s.num_tokens += s.num_computed_tokens == s.num_tokens
        self.policy.end_step()

    @precondition(lambda self: self.running)
    @rule(times=st.integers(1, 9), drafts=st.sampled_from([0, 0, 2]), end=st.booleans())
    def steps(self, times: int, drafts: int, end: bool) -> None:
        for _ in range(times):
            planned = []
            for s in list(self.running):
                new = min(16, s.num_tokens - s.num_computed_tokens)
                new += drafts * (new == 1 and s.num_tokens - s.num_computed_tokens == 1)  # all of them accepted
                while s in self.running and not self.tried(s, new):
                    self.release(self.running[-1], Release.PREEMPT)
                planned += [(s, new)] if s in self.running else []
            if end:
                self.policy.end_step()
                for s, new in planned:
                    if s in self.running:
                        s.num_computed_tokens += new
                        s.num_tokens = max(s.num_tokens, s.num_computed_tokens + 1)
                        if s.num_tokens > MAX_MODEL_LEN - 4:
                            self.release(s, Release.FINISH)
            else:
                self.policy.abort_step()

    @precondition(lambda self: self.running)
    @rule(limit=st.integers(0, 40))
    def leap(self, limit: int) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        limit = min([limit, *(MAX_MODEL_LEN - 4 - s.num_tokens for s in decoding)])
        policy, (twin, in_steps) = self.policy, copy.deepcopy((self.policy, decoding))
        k = policy.horizon(decoding, limit)
        policy.advance(decoding, k)
        for s in decoding:
            s.num_computed_tokens += k
            s.num_tokens += k
        for _ in range(k):
            for s in in_steps:
                assert twin.reserve(s, 1) == Granted()
                s.num_computed_tokens += 1
                s.num_tokens += 1
            twin.end_step()
        assert policy.free_queue() == twin.free_queue()
        assert policy.usage() == twin.usage()
        assert list(policy.walk()) == list(twin.walk())
        assert [policy.tables(s) for s in decoding] == [twin.tables(s) for s in in_steps]
        assert policy.pool.cache.carriers() == twin.pool.cache.carriers()
        assert policy.horizon(decoding, 50) == twin.horizon(in_steps, 50)
        if k < limit and not any(group.kind == "full" for group in self.groups):
            return  # it may have ended where what is kept bends
        if k < limit:
            assert any(isinstance(twin.reserve(s, 1), Refused) for s in in_steps), "it could have gone on"

    @rule(stream=st.integers(0, 3), shared=st.sampled_from([8, 16, 24]))
    def abort(self, stream: int, shared: int) -> None:
        """A step with a newcomer who may adopt is not carried out; what it found is found again."""
        self.next_id += 1
        spans = ((f"s{stream}", 0, shared), (f"o{self.next_id}", 0, 2 * MAX_MODEL_LEN))
        late = KVSequence(self.next_id, self.next_id, 0, shared + 3, MAX_MODEL_LEN, spans=spans)
        hit = self.policy.lookup(late)
        queue, running = self.policy.free_queue(), [self.policy.tables(s) for s in self.running]
        self.tried(late, min(16, late.num_tokens - hit), hit=hit, admitting=True)
        self.policy.abort_step()
        assert sorted(self.policy.free_queue()) == sorted(queue)
        assert [self.policy.tables(s) for s in self.running] == running
        assert self.policy.tables(late) == ((),) * len(self.groups)
        assert self.policy.lookup(late) <= hit, "evicted keys stay lost"
        self.policy.release(late, Release.DROP)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), why=st.sampled_from([Release.FINISH, Release.PREEMPT]))
    def end(self, index: int, why: Release) -> None:
        self.release(self.running[index % len(self.running)], why)

    @rule()
    def reset(self) -> None:
        queue = self.policy.free_queue()
        assert self.policy.reset_prefix_cache() == (not self.running)
        assert self.policy.free_queue() == queue

    # -- what holds --------------------------------------------------------------------------------------------------

    def tried(self, s: KVSequence, new: int, **more: Any) -> bool:
        """Reserve, and look at what it did to the tables."""
        before, free = self.policy.tables(s), len(self.policy.free_queue())
        answer = self.policy.reserve(s, new, **more)
        after = self.policy.tables(s)
        computed = s.num_computed_tokens + more.get("hit", 0)
        for group, old, table in zip(self.groups, before, after, strict=True):
            out = skipped(group, computed) // group.block_size
            sinks = -(-group.sinks // group.block_size)
            if group.mamba_mode != "align":
                assert all((block == 0) == (sinks <= place < out) for place, block in enumerate(table))
                assert all(new in (0, block) for block, new in zip(old, table, strict=False))
            if isinstance(answer, Refused):
                assert len(table) == len(old)
        if isinstance(answer, Refused):
            assert answer.need_bytes > answer.free_bytes
            assert len(self.policy.free_queue()) >= free
            return False
        for group, table in zip(self.groups, after, strict=True):
            assert len(table) * group.block_size >= min(computed + new, MAX_MODEL_LEN)
            if group.mamba_mode == "align":
                assert sum(block != 0 for block in table) <= 2 + group.speculative_blocks
                assert table[-(-min(s.num_tokens, computed + new) // group.block_size) - 1 :]
        return True

    def release(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        s.num_computed_tokens = 0

    @invariant()
    def the_books_close(self) -> None:
        policy = self.policy
        policy.check()
        usage = policy.usage()
        tokens = sum(s.num_computed_tokens for s in self.running)
        blocks = list(policy.walk())
        assert usage.token == sum(block.token_bytes for block in blocks)
        assert usage.token + usage.dropped + usage.shared == tokens * policy.config.grouping.token_bytes
        assert min(usage) >= 0
        tables = [table for s in self.running for table in policy.tables(s)]
        held = {block for table in tables for block in table} - {0}
        assert usage.held == len(held) * 64
        assert usage.table == sum(map(len, tables)) * 4
        assert len(held) + len(policy.free_queue()) + 1 == 45
        assert held.isdisjoint(policy.free_queue())

    def teardown(self) -> None:
        for s in list(self.running):
            self.release(s, Release.FINISH)
        assert self.policy.reset_prefix_cache()
        assert sorted(self.policy.free_queue()) == list(range(1, 45))


def drive(model: str, cls: type[PagedGroupsPolicy], examples: int, **more: Any) -> None:
    run_state_machine_as_test(
        lambda: Traffic(model, cls),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


@pytest.mark.parametrize("model", MODELS)
def test_whatever_a_scheduler_does(model: str) -> None:
    drive(model, PagedGroupsPolicy, 40)


# Planted bugs, each with a check of its own that says nothing


class ForgetsOneTokenLate(PagedGroupsPolicy):
    """No + 1 in S(c) of a window."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for manager in self.pool.managers:
            if isinstance(manager, WindowManager):
                manager.skipped_tokens = lambda computed, w=manager.group.window: max(0, computed - w)


class KeepsTheCopiedState(PagedGroupsPolicy):
    """The state that the running one was copied from stays."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for manager in self.pool.managers:
            manager.forget = GroupManager.forget.__get__(manager)


class LeapsWithoutForgetting(PagedGroupsPolicy):
    """What leaves the window within a leap is given back at its end only."""

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        forget, self.pool.forget = self.pool.forget, lambda held, computed: None
        super().advance(decoding, k)
        self.pool.forget = forget
        for s in decoding:
            held = self._held[s.id]
            forget(held, max(0, held.tokens - 1))


class LeapsGroupsOneByOne(LeapsSequenceBySequence):
    """As above, where groups give blocks back."""


class PromisesOneStepTooMany(PagedGroupsPolicy):
    """The horizon reaches past the last block."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        return min(limit, super().horizon(decoding, limit) + 1)


class LeavesNullsCounted(PagedGroupsPolicy):
    """An aborted step leaves the null entries of an adopted window in the books."""

    def abort_step(self) -> None:
        nulls = list(self.pool.nulls)
        super().abort_step()
        self.pool.nulls = nulls


class SharesTwice(PagedGroupsPolicy):
    """A block that several share is a distinct one for each."""

    def usage(self) -> Any:
        self.pool.distinct = list(self.pool.entries)
        return super().usage()


@pytest.mark.parametrize(
    ("bug", "model"),
    [
        (ForgetsOneTokenLate, "block sizes"),
        (KeepsTheCopiedState, "mamba align"),
        (LeapsWithoutForgetting, "full and window"),
        (LeapsGroupsOneByOne, "block sizes"),
        (PromisesOneStepTooMany, "chunks"),
        (LeavesNullsCounted, "full and window"),
        (SharesTwice, "full and window"),
    ],
)
def test_a_planted_bug_is_noticed(bug: type[PagedGroupsPolicy], model: str) -> None:
    class Hidden(bug):
        def check(self) -> None:
            pass

    with pytest.raises((AssertionError, ValueError)):
        drive(model, Hidden, 300, phases=[Phase.generate], database=None, derandomize=True)
