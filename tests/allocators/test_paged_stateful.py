"""The invariants of specs/paged-kv.md section 13, whatever a scheduler does: Hypothesis plays one.

Versions, prefix caching and both gates are drawn; pools are small, prompts of whole blocks come again and are extended.
Beside a leap goes a copy of the policy in single steps. The policy's own ``check`` is asked in one place only.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hbmtwin.allocators.block_keys import NO_KEY
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixCache
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
LONGEST = 60


class Server(RuleBasedStateMachine):
    policy_class: type[PagedPolicy] = PagedPolicy

    @initialize(
        version=st.sampled_from(["0.18", "0.22", "0.27"]),
        caching=st.sampled_from([True, True, False]),
        admission=st.sampled_from(["none", "none", "reserve"]),
        num_blocks=st.integers(8, 60),
        block_size=st.sampled_from([1, 3, 4]),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def start(self, version: str, watermark: float, caching: bool, **drawn: Any) -> None:
        arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1 << 20))
        watermark = watermark if version == "0.27" else 0.0
        config = PagedConfig(
            version=version, watermark=watermark, enable_prefix_caching=caching, max_model_len=LONGEST, **drawn
        )
        self.policy = self.policy_class(TINY, arena, config)
        self.config = config
        self.block_bytes = config.block_size * TINY.token_bytes
        self.running: list[KVSequence] = []
        self.waiting: list[KVSequence] = []
        self.told: list[tuple[Span, ...]] = [()]
        self.next_id = 0
        self.events: list[CacheEvent] = []
        self.policy.on_cache_event = self.events.append

    # -- what a scheduler does ---------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 4),
        old=st.integers(0, 5),
        blocks=st.integers(0, 4),
        more=st.sampled_from([0, 0, 1]),
        most=st.sampled_from([3, 30, LONGEST]),
    )
    def arrive(self, count: int, old: int, blocks: int, more: int, most: int) -> None:
        """Prompts that were told before, extended by some blocks and a token; the next ones extend the one before."""
        for _ in range(count):
            spans = self.told[-1 - old % len(self.told)]
            tokens, new = sum(length for _, _, length in spans), blocks * self.config.block_size + more
            if not 0 < tokens + new < LONGEST - 1:
                spans, tokens, new = (), 0, 1 + blocks
            if new:
                spans = (*spans, (self.next_id % 3, tokens, new))
                tokens += new
            self.told.append(spans)
            answer: Span = (f"answer {self.next_id % 2}", tokens, LONGEST)
            longest = min(LONGEST, tokens + most)
            self.waiting.append(KVSequence(self.next_id, 0, 0, tokens, longest, spans=(*spans, answer)))
            self.next_id += 1

    @precondition(lambda self: self.waiting)
    @rule(times=st.integers(1, 4), chunk=st.sampled_from([2, LONGEST, LONGEST]))
    def admit(self, times: int, chunk: int) -> None:
        """The queue from its front, several in one step."""
        planned = []
        for s in self.waiting[:times]:
            hit = self.policy.lookup(s)
            assert 0 <= hit < s.num_tokens
            assert hit % self.config.block_size == 0
            new = min(chunk, s.num_tokens - hit)
            if not self.granted(s, new, hit=hit, admitting=True):
                break
            self.waiting.remove(s)
            self.running.append(s)
            planned.append((s, hit + new))
            s.num_computed_tokens = hit + new  # the books have them; that they are computed comes with the step's end
        self.policy.end_step()
        self.sample(planned)

    @precondition(lambda self: self.running)
    @rule(times=st.sampled_from([1, 1, 5]), chunk=st.sampled_from([1, 9]))
    def steps(self, times: int, chunk: int) -> None:
        for _ in range(times):
            planned: list[tuple[KVSequence, int]] = []
            while len(planned) < len(self.running):
                s = self.running[len(planned)]
                new = min(chunk, s.num_tokens - s.num_computed_tokens)
                if self.granted(s, new):
                    planned.append((s, new))
                    continue
                assert self.config.admission == "none", "its blocks were promised"
                self.leave(self.running[-1], Release.PREEMPT)
            self.policy.end_step()
            for s, new in planned:
                s.num_computed_tokens += new
            self.sample(planned)

    @rule(limit=st.integers(0, 40))
    def leap(self, limit: int) -> None:
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        limit = min([limit, *(s.max_tokens - s.num_tokens for s in decoding)])
        twin, in_steps = copy.deepcopy((self.policy, decoding))
        told: list[CacheEvent] = []
        twin.on_cache_event = told.append
        self.events.clear()
        k = self.policy.horizon(decoding, limit)
        self.policy.advance(decoding, k // 2)
        self.policy.advance(decoding, k - k // 2)
        for s in decoding:
            s.num_computed_tokens += k
            s.num_tokens += k
        for step in range(limit):
            answers = [twin.reserve(s, 1, others_running=True) for s in in_steps]
            if step == k:
                assert not all(isinstance(answer, Granted) for answer in answers), "it could have gone on"
                twin.abort_step()
                break
            assert all(isinstance(answer, Granted) for answer in answers)
            twin.end_step()
            for s in in_steps:
                s.num_computed_tokens += 1
                s.num_tokens += 1
        assert self.policy.usage()._replace(cached=0, pool=0) == twin.usage()._replace(cached=0, pool=0)
        assert [self.policy.block_ids(s) for s in decoding] == [twin.block_ids(s) for s in in_steps]
        if k == limit:  # else the last of the twin's steps has taken keys, and the abort does not bring them back
            assert self.seen(self.policy, decoding) == self.seen(twin, in_steps)
            assert self.events == told
        for s in [s for s in decoding if s.num_tokens >= s.max_tokens]:
            self.leave(s, Release.FINISH)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), why=st.sampled_from([Release.FINISH, Release.DROP, Release.PARK, Release.PREEMPT]))
    def end(self, index: int, why: Release) -> None:
        self.leave(self.running[index % len(self.running)], why)

    @precondition(lambda self: self.waiting)
    @rule()
    def give_up(self) -> None:
        self.policy.release(self.waiting.pop(), Release.DROP)

    @rule(chunk=st.sampled_from([1, 9]))
    def abort(self, chunk: int) -> None:
        """A step with two newcomers is planned, and not carried out."""
        before, cached = self.seen(self.policy, self.running), self.policy.usage().cached
        for s in self.running:
            self.policy.reserve(s, min(chunk, s.num_tokens - s.num_computed_tokens))
        for s in self.waiting[:2]:
            hit = self.policy.lookup(s)
            self.policy.reserve(s, min(chunk, s.num_tokens - hit), hit=hit, admitting=True)
        self.policy.abort_step()
        after = self.seen(self.policy, self.running)
        assert after["tables"] == before["tables"]
        assert after["books"] == before["books"]
        assert self.policy.usage().cached <= cached
        if self.config.version == "0.27":
            assert after["stats"] == before["stats"]

    @rule()
    def reset(self) -> None:
        queue = list(self.policy._free)
        assert self.policy.reset_prefix_cache() == (not self.running)
        assert list(self.policy._free) == queue
        assert self.running or self.policy.usage().cached == 0

    # -- what holds after each of them -------------------------------------------------------------------------------

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        tables = [self.policy.block_ids(s) for s in self.running]
        entries = [block for table in tables for block in table]
        queue, n = list(self.policy._free), self.config.num_blocks
        cache = self.policy._cache
        refs = cache.refs if cache is not None else [entries.count(block) for block in range(n)]
        assert len(queue) + sum(ref > 0 for ref in refs) + 1 == n
        assert len(entries) == sum(refs)
        assert sorted(queue) == [block for block in range(1, n) if not refs[block]]
        assert refs[0] == 0
        if cache is None:
            assert max(refs) <= 1
        usage = self.policy.usage()
        assert 0 <= usage.held / self.block_bytes / (n - 1) <= 1
        assert usage.held == self.block_bytes * sum(ref > 0 for ref in refs)
        assert usage.table == 4 * len(entries)
        computed = sum(s.num_computed_tokens for s in self.running)
        assert usage.token + usage.shared == computed * TINY.token_bytes

    @invariant()
    def a_key_is_in_the_map_if_its_block_carries_it(self) -> None:
        cache = self.policy._cache
        if cache is None:
            return
        carried = [(key, block) for block, key in enumerate(cache.key_of) if key != NO_KEY]
        carriers = cache.carriers()
        assert sorted(carried) == sorted((key, block) for key, blocks in carriers.items() for block in blocks)
        assert all(carriers.values())
        assert self.policy.usage().cached == self.block_bytes * sum(cache.refs[block] == 0 for _, block in carried)
        for s in self.running:
            full = min(s.num_computed_tokens, s.num_tokens) // self.config.block_size
            assert all(cache.key_of[block] != NO_KEY for block in self.policy.block_ids(s)[:full])

    @invariant()
    def what_was_promised_is_there(self) -> None:
        if self.config.admission == "reserve":
            size = self.config.block_size
            lacking = sum(-(-s.max_tokens // size) - len(self.policy.block_ids(s)) for s in self.running)
            assert lacking <= len(self.policy._free)

    @invariant()
    def its_own_check_agrees(self) -> None:
        self.policy.check()

    def teardown(self) -> None:
        if not hasattr(self, "policy"):
            return
        for s in list(self.running):
            self.leave(s, Release.FINISH)
        for s in self.waiting:
            self.policy.release(s, Release.DROP)
        assert self.policy.reset_prefix_cache()
        usage = self.policy.usage()
        assert usage.pool == self.config.num_blocks * self.block_bytes
        if self.policy._cache is not None:
            assert len(self.policy._cache.keys) == 0
            assert self.policy._cache.keys._chains == {}

    # -- the same for all --------------------------------------------------------------------------------------------

    def granted(self, s: KVSequence, new: int, **more: Any) -> bool:
        """Ask for room; a refusal leaves everything as it was."""
        before = self.seen(self.policy, self.running)
        answer = self.policy.reserve(s, new, others_running=bool(self.running), **more)
        if isinstance(answer, Refused):
            assert answer.need_bytes > answer.free_bytes
            assert self.seen(self.policy, self.running) == before
            assert s.id not in self.policy._tables or not more
        return isinstance(answer, Granted)

    def seen(self, policy: PagedPolicy, sequences: list[KVSequence]) -> dict[str, object]:
        usage = policy.usage()
        return {
            "tables": [policy.block_ids(s) for s in sequences],
            "books": usage._replace(cached=0, pool=0),
            "free": (usage.cached, usage.pool),
            "queue": list(policy._free),
            "keys": policy._cache and policy._cache.carriers(),
            "stats": policy.prefix_stats(),
            "promised": policy._admission.promised,
        }

    def sample(self, planned: list[tuple[KVSequence, int]]) -> None:
        for s, _ in planned:
            s.num_tokens += s.num_computed_tokens == s.num_tokens
            if s.num_tokens >= s.max_tokens:
                self.leave(s, Release.FINISH)

    def leave(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        if why is Release.PREEMPT:
            s.num_computed_tokens = 0
            self.waiting.insert(0, s)


def drive(machine: type[Server], examples: int, **more: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_whatever_a_scheduler_does() -> None:
    drive(Server, examples=120)


# Planted bugs; the policy's own check says nothing of them


class TouchesBeforeItRefuses(PagedPolicy):
    """What was found is taken out of the queue before it is known whether the rest is free."""

    def reserve(self, s: KVSequence, new: int, *, hit: int = 0, **more: Any) -> Granted | Refused:
        answer = super().reserve(s, new, hit=hit, **more)
        if hit and isinstance(answer, Refused) and self._cache is not None:
            self._cache.touch(self._cache.adoptable(s, hit))
        return answer


class LosesTheLastKeyOfALeap(PagedPolicy):
    def advance(self, decoding: Any, k: int) -> None:
        super().advance(decoding, k)
        for s in decoding[:1]:
            table = self._tables[s.id]
            if k and table.keyed and self._cache is not None:
                table.keyed -= 1
                self._cache.withdraw(table.blocks[table.keyed])


class LeapsBackwards(PagedPolicy):
    def advance(self, decoding: Any, k: int) -> None:
        super().advance(decoding[::-1], k)


class PromisesTooLittle(PagedPolicy):
    """What a newcomer has now, not its full length."""

    def _newcomer(self, s: KVSequence, lookahead: int) -> Any:
        most, s.max_tokens = s.max_tokens, 0
        table = super()._newcomer(s, lookahead)
        s.max_tokens = most
        return table


class KeepsChains(PagedPolicy):
    def release(self, s: KVSequence, why: Release) -> None:
        super().release(s, Release.PREEMPT if why is Release.DROP else why)


class TakesWithTheKey(PrefixCache):
    """A block that is taken anew is still found under its old key."""

    def take(self) -> int:
        block = self.free.popleft()
        self.refs[block] = 1
        self.cached -= self.key_of[block] != NO_KEY
        return block


class FreesWhatOthersHold(PrefixCache):
    def put_back(self, blocks: Any) -> None:
        for block in blocks:
            if self.refs[block] > 1:
                self.shared -= self.refs[block] - 1
                self.refs[block] = 1
        super().put_back(blocks)


@pytest.mark.parametrize(
    "bug",
    [
        TouchesBeforeItRefuses,
        LosesTheLastKeyOfALeap,
        LeapsBackwards,
        PromisesTooLittle,
        KeepsChains,
        TakesWithTheKey,
        FreesWhatOthersHold,
    ],
)
def test_a_planted_bug_is_noticed(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base = PagedPolicy if issubclass(bug, PrefixCache) else bug

    class Broken(Server):
        policy_class = type("Hidden", (base,), {"check": lambda self: None})

    if issubclass(bug, PrefixCache):
        monkeypatch.setattr("hbmtwin.allocators.paged.PrefixCache", bug)
    with pytest.raises((AssertionError, KeyError)):
        drive(Broken, examples=400, phases=[Phase.generate], database=None, derandomize=True)
