"""``virtual`` beside a second model written from its rules: lists of page counts, every sum made anew each time.

Hypothesis plays scheduler with little memory; after each call every page of every range must be where the model has it.
Tensors have different widths, and a token of V does not divide a page.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.direct import DirectAllocator, DirectConfig
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Tag
from hbmtwin.allocators.virtual import VirtualConfig, VirtualPolicy
from hbmtwin.allocators.virtual_ranges import RangeStore, VirtualRange

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256, v_head_dim=96)
PAGE = 4096
UNITS = (512, 192, 512, 192)
"""Bytes of a token in each tensor: 8 tokens of K a page, 21 and a third of V."""
CAP_PAGES = 70
"""Two sequences of full length, 34 pages each, and a little."""
MAX_MODEL_LEN = 96
SESSIONS = st.integers(0, 3)


def pages_of(tokens: int) -> list[int]:
    return [-(-tokens * unit // PAGE) for unit in UNITS]


@dataclass
class Range:
    """One range of the model."""

    owner: int = -1
    session: int = -1
    parked: bool = False
    tokens: int = 0
    room: int = 0
    mapped: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def surplus(self) -> list[int]:
        return [max(0, a - b) for a, b in zip(self.mapped, pages_of(self.room), strict=True)]

    def missing(self) -> list[int]:
        return [max(0, b - a) for a, b in zip(self.mapped, pages_of(self.room), strict=True)]

    def leave(self) -> None:
        self.owner = self.session = -1
        self.parked = False
        self.tokens = self.room = 0


class Model:
    """The rules, as plainly as they can be put."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.parked: list[int] = []
        """Sessions, least recently parked first."""
        self.calls = 0
        self.mapped_pages = 0

    def of(self, owner: int) -> Range | None:
        return next((r for r in self.ranges if r.owner == owner and not r.parked), None)

    def history(self, session: int) -> Range | None:
        return next((r for r in self.ranges if r.parked and r.session == session), None)

    def reserve(self, s: KVSequence, tokens: int, room: int, hit: int, cap: int, admitting: bool) -> bool:
        """Whether it is granted; then the range aims at *tokens*."""
        tokens, room = min(tokens, MAX_MODEL_LEN), min(room, MAX_MODEL_LEN)
        r, own = self.of(s.id), self.history(s.session)
        after = max(room, s.num_tokens if admitting else 0)
        needed = sum(sum(pages_of(other.room)) for other in self.ranges if other not in (r, own))
        needed += sum(pages_of(max(after, r.room if r else 0)))
        others = [session for session in self.parked if session != s.session]
        droppable = sum(sum(pages_of(self.history(session).room)) for session in others)
        if needed - droppable > cap and (r is None or room > r.room):
            return False
        for session in others:
            if needed <= cap:
                break
            needed -= sum(pages_of(self.history(session).room))
            self.drop(session)
        if r is None:
            r = self.admit(s, hit, sum(pages_of(after)))
        r.tokens, r.room = tokens, max(r.room, room)
        return True

    def admit(self, s: KVSequence, hit: int, pages: int) -> Range:
        if hit:
            r = self.history(s.session)
            self.parked.remove(s.session)
            r.parked, r.room = False, hit
        else:
            self.drop(s.session)
            free = [r for r in self.ranges if r.owner < 0]
            enough = [r for r in free if sum(r.mapped) >= pages]
            if not free:
                self.ranges.append(Range())
                free = self.ranges[-1:]
                self.calls += 1
            fewest = sorted(enough, key=lambda r: sum(r.mapped))
            most = sorted(free, key=lambda r: -sum(r.mapped))
            r = (fewest or most)[0]
        r.owner, r.session = s.id, s.session
        return r

    def grow(self, free: int, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Map what is missing in some layers; the range and tensor of each new page."""
        short = sum(sum(r.missing()) for r in self.ranges) - free if layers else 0
        for r in reversed(self.ranges):
            for tensor in (3, 2, 1, 0):
                gone = max(0, min(short, r.surplus()[tensor]))
                r.mapped[tensor] -= gone
                self.calls += 2 * gone
                short -= gone
        fresh = []
        for number, r in enumerate(self.ranges):
            for tensor, count in enumerate(r.missing()):
                if tensor // 2 in layers:
                    r.mapped[tensor] += count
                    fresh += [(number, tensor)] * count
        self.mapped_pages += len(fresh)
        self.calls += 2 * len(fresh)
        return fresh

    def park(self, s: KVSequence) -> None:
        r = self.of(s.id)
        self.drop(s.session)
        r.parked, r.tokens, r.room = True, s.num_computed_tokens, s.num_computed_tokens
        self.parked.append(s.session)

    def drop(self, session: int) -> None:
        if session in self.parked:
            self.parked.remove(session)
            self.history(session).leave()

    def steps(self, owner: int) -> int:
        """Tokens that fit behind those of *owner* without a new page."""
        r = self.of(owner)
        tokens = r.tokens
        while tokens < MAX_MODEL_LEN and all(a <= b for a, b in zip(pages_of(tokens + 1), r.mapped, strict=True)):
            tokens += 1
        return tokens - r.tokens


class Traffic(RuleBasedStateMachine):
    """What a scheduler and an engine may do; the model does the same."""

    def __init__(self, policy: type[VirtualPolicy] = VirtualPolicy, store: type[RangeStore] = RangeStore) -> None:
        super().__init__()
        arena = DirectAllocator(HbmDriver(CAP_PAGES * PAGE + 5000, page_bytes=PAGE), DirectConfig())
        config = VirtualConfig(max_model_len=MAX_MODEL_LEN, page_bytes=PAGE, limit_bytes=CAP_PAGES * PAGE + 100)
        self.policy = policy(LAYOUT, arena, config)
        self.policy._store = store(LAYOUT, arena, PAGE, MAX_MODEL_LEN, config.limit_bytes)
        self.model = Model()
        self.running: list[KVSequence] = []
        self.next_id = 0
        self.tenants = 0

    # What the scheduler knows

    def mapped(self) -> int:
        return sum(sum(r.mapped) for r in self.model.ranges)

    def free(self) -> int:
        driver = (CAP_PAGES * PAGE + 5000 - self.tenants) // PAGE - self.mapped()
        return max(0, min(driver, CAP_PAGES - self.mapped()))

    def reserve(self, s: KVSequence, new: int, *, hit: int = 0, lookahead: int = 0, admitting: bool = False) -> bool:
        tokens = s.num_computed_tokens + hit + new
        cap = self.mapped() + self.free()
        expected = self.model.reserve(s, tokens, tokens + lookahead, hit, cap, admitting)
        answer = self.policy.reserve(s, new, hit=hit, lookahead=lookahead, admitting=admitting)
        assert isinstance(answer, Granted) == expected
        if isinstance(answer, Refused):
            assert answer.need_bytes > answer.free_bytes >= 0
        return expected

    def newcomer(self, session: int, length: int, shared: int) -> KVSequence:
        self.next_id += 1
        spans = ((f"session {session}", 0, shared), (f"turn {self.next_id}", 0, length - shared))
        return KVSequence(self.next_id, session, 0, length, MAX_MODEL_LEN, spans=spans)

    def carry_out(self, plan: list[tuple[KVSequence, int]]) -> None:
        self.model.grow(self.free(), (0, 1))
        for layer in (0, 1):
            self.policy.grow_layer(layer)
        self.policy.end_step()
        for s, new in plan:
            s.num_computed_tokens += new
            s.num_tokens = max(s.num_tokens, s.num_computed_tokens + 1)

    def release(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        if why is Release.PARK:
            self.model.park(s)
        else:
            self.model.of(s.id).leave()
        if why in (Release.FINISH, Release.DROP):
            self.model.drop(s.session)

    # What happens

    @rule(
        session=SESSIONS,
        length=st.integers(1, MAX_MODEL_LEN - 8),
        shared=st.sampled_from([0, 5, 40, 60]),
        lookahead=st.sampled_from([0, 0, 3]),
        chunk=st.sampled_from([100, 100, 16]),
    )
    def admit(self, session: int, length: int, shared: int, lookahead: int, chunk: int) -> None:
        if any(s.session == session for s in self.running):
            return
        s = self.newcomer(session, length, min(length, shared))
        hit = self.policy.lookup(s)
        history = self.model.history(session)
        assert hit <= min(length - 1, history.tokens if history else 0)
        new = min(chunk, length - hit)
        if self.reserve(s, new, hit=hit, lookahead=lookahead, admitting=True):
            s.num_computed_tokens = hit
            self.running.append(s)
            self.carry_out([(s, new)])

    @precondition(lambda self: self.running)
    @rule(lookahead=st.sampled_from([0, 0, 3]))
    def decode(self, lookahead: int) -> None:
        plan: list[tuple[KVSequence, int]] = []
        while len(plan) < len(self.running):
            s = self.running[len(plan)]
            new = s.num_tokens - s.num_computed_tokens
            if s.num_tokens >= MAX_MODEL_LEN:
                self.release(s, Release.FINISH)
            elif self.reserve(s, new, lookahead=lookahead):
                plan.append((s, new))
            else:
                self.release(self.running[-1], Release.PREEMPT)
        self.carry_out(plan)

    @precondition(lambda self: self.running)
    @rule(limit=st.integers(0, 40), data=st.data())
    def leap(self, limit: int, data: st.DataObject) -> None:
        batch = [s for s in self.running if s.num_tokens == s.num_computed_tokens + 1]
        horizon = self.policy.horizon(batch, limit)
        assert horizon == min([limit, *(self.model.steps(s.id) for s in batch)])
        k = data.draw(st.integers(0, horizon))
        operations: list[str] = []
        self.policy.arena.observer = lambda op, *rest: operations.append(op)
        self.policy.advance(batch, k)
        self.policy.arena.observer = None
        assert operations == []
        for s in batch:
            r = self.model.of(s.id)
            r.tokens += k
            r.room = max(r.room, r.tokens)
            s.num_computed_tokens += k
            s.num_tokens += k

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), why=st.sampled_from([*Release, Release.PARK, Release.PARK]))
    def end(self, index: int, why: Release) -> None:
        self.release(self.running[index % len(self.running)], why)

    @rule(session=SESSIONS)
    def end_session(self, session: int) -> None:
        if all(s.session != session for s in self.running):
            self.policy.release(self.newcomer(session, 1, 1), Release.DROP)
            self.model.drop(session)

    @rule(layers=st.integers(0, 2), length=st.integers(1, MAX_MODEL_LEN), session=SESSIONS)
    def abort(self, layers: int, length: int, session: int) -> None:
        """Plan a step with a newcomer, carry out a part of it, take it back."""
        before = {s.id: copy.deepcopy(self.model.of(s.id)) for s in self.running}
        for s in self.running:
            if s.num_tokens < MAX_MODEL_LEN:
                self.reserve(s, s.num_tokens - s.num_computed_tokens)
        late = self.newcomer(session, length, min(5, length))
        history = None
        if admitted := all(s.session != session for s in self.running):
            hit = self.policy.lookup(late)
            history = copy.deepcopy(self.model.history(session)) if hit else None
            admitted = self.reserve(late, length - hit, hit=hit, admitting=True)
        fresh = self.model.grow(self.free(), range(layers))
        for layer in range(layers):
            self.policy.grow_layer(layer)
        self.policy.abort_step()
        for number, tensor in fresh:
            self.model.ranges[number].mapped[tensor] -= 1
        self.model.calls += 2 * len(fresh)
        for owner, was in before.items():
            r = self.model.of(owner)
            r.tokens, r.room = was.tokens, was.room
        if admitted:
            r = self.model.of(late.id)
            if history:
                r.parked, r.tokens, r.room = True, history.tokens, history.room
                self.model.parked.append(session)
            else:
                r.leave()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rob(self, data: st.DataObject) -> None:
        """Others take memory between the plan and the pages: the step fails exactly if it is short then."""
        before = [(r.tokens, r.room) for r in self.model.ranges]
        for s in self.running:
            if s.num_tokens < MAX_MODEL_LEN:
                self.reserve(s, s.num_tokens - s.num_computed_tokens, lookahead=40)
        was = self.tenants
        self.hold(was + data.draw(st.integers(0, self.policy.arena.free_bytes)))
        missing = sum(sum(r.missing()) for r in self.model.ranges)
        surplus = sum(sum(r.surplus()) for r in self.model.ranges)
        fails = missing > surplus + self.free()
        fresh = self.model.grow(self.free(), (0, 1))
        failure = None
        try:
            for layer in (0, 1):
                self.policy.grow_layer(layer)
        except OutOfMemory as error:
            failure = error
            self.judge(error)
        assert (failure is not None) == fails
        self.policy.abort_step()
        for number, tensor in fresh:
            self.model.ranges[number].mapped[tensor] -= 1
        for r, (tokens, room) in zip(self.model.ranges, before, strict=True):
            if r.owner >= 0:  # not a history that was dropped
                r.tokens, r.room = tokens, room
        self.hold(was)
        self.policy.arena.take_work()  # how far a failed step came is not the model's business
        self.model.calls = self.model.mapped_pages = 0

    def judge(self, failure: OutOfMemory) -> None:
        self.policy.check()
        facts, usage = failure.facts, self.policy.usage()
        assert facts.owner in {s.id for s in self.running}
        assert facts.owner_bytes == sum(block.size for block in self.policy.walk() if block.owner == facts.owner)
        assert (facts.unfilled_bytes, facts.parked_bytes) == (usage.unfilled, usage.parked)
        assert usage.pool == 0, "all that nobody needs was reclaimed before"

    @rule(share=st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0]))
    def others(self, share: float) -> None:
        self.hold(int(share * (self.tenants + self.policy.arena.driver.mem_info()[0])))

    def hold(self, tenants_bytes: int) -> None:
        self.tenants = tenants_bytes
        self.policy.arena.driver.set_tenants(tenants_bytes)

    # What must hold

    def pages_by_range(self) -> list[list[int]]:
        starts = [r.address for r in self.policy._store.ranges]
        offsets = [0, 12 * PAGE, 17 * PAGE, 29 * PAGE]
        """96 tokens take 12 pages of K and 5 of V."""
        counts = [[0, 0, 0, 0] for _ in starts]
        for block in self.policy.walk():
            number = max(n for n, start in enumerate(starts) if start <= block.address)
            inside = block.address - starts[number]
            counts[number][max(n for n, offset in enumerate(offsets) if offset <= inside)] += 1
        return counts

    @invariant()
    def every_page_is_where_the_model_has_it(self) -> None:
        self.policy.check()
        self.policy.arena.check()
        self.policy.arena.driver.check()
        assert self.pages_by_range() == [r.mapped for r in self.model.ranges]
        usage = self.policy.usage()
        ranges = self.model.ranges
        assert self.policy._store.needed == sum(sum(pages_of(r.room)) for r in ranges)
        assert usage.token == sum(r.tokens for r in ranges if not r.parked) * LAYOUT.token_bytes
        assert usage.token == sum(s.num_computed_tokens for s in self.running) * LAYOUT.token_bytes
        assert usage.parked == sum(r.tokens for r in ranges if r.parked) * LAYOUT.token_bytes
        assert usage.pool == sum(sum(r.mapped) for r in ranges if r.owner < 0) * PAGE
        assert usage.held + usage.pool == self.mapped() * PAGE
        assert self.policy.arena.usage().requested_by_tag[Tag.KV] == usage.held + usage.pool
        assert self.policy.parked_sessions() == tuple(self.model.parked)
        work = self.policy.arena.take_work()
        assert (work.driver_calls, work.mapped_bytes) == (self.model.calls, self.model.mapped_pages * PAGE)
        self.model.calls = self.model.mapped_pages = 0

    def teardown(self) -> None:
        for s in list(self.running):
            self.release(s, Release.FINISH)
        for session in list(self.model.parked):
            self.end_session(session)
        assert not any(self.policy.usage()._replace(pool=0))


def drive(make: Callable[[], Traffic], examples: int = 60, **more: object) -> None:
    run_state_machine_as_test(
        make,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_the_second_model_agrees_page_by_page() -> None:
    drive(Traffic)


# Planted bugs


class CountsWholeTokens(RangeStore):
    """Takes a page for as many whole tokens as it holds, though addresses go on."""

    def _whole(self, tokens: int, unit: int) -> int:
        return -(-tokens // (self.page_bytes // unit))


class ReclaimsAtOnce(RangeStore):
    """Unmaps the pages of a sequence that ended."""

    def free(self, r: VirtualRange) -> None:
        super().free(r)
        self._reclaim(r.count)


class RefusesInsteadOfReclaiming(RangeStore):
    """Does not plan with pages that nobody needs."""

    @property
    def left_pages(self) -> int:
        return self._free_pages()


class LeavesAbortedPagesMapped(RangeStore):
    """An aborted step forgets what it mapped."""

    def undo(self) -> None:
        self._fresh.clear()
        super().undo()


class TakesTheFirstFreeRange(RangeStore):
    """No best fit."""

    def take(self, owner: int, pages: int) -> VirtualRange:
        return super().take(owner, 0)


class ReclaimsTooMuch(RangeStore):
    """A page more than it is short of."""

    def _reclaim(self, count: int) -> None:
        super()._reclaim(count + 1)


class LeapsOverAnEdge(VirtualPolicy):
    """Thinks that a full page has room for one more."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        return min(limit, super().horizon(decoding, limit) + 1)


class DropsTheLastParkedFirst(VirtualPolicy):
    """The most recently parked history makes way."""

    def _refuse(self, need: int, session: int, reason: str) -> Refused | None:
        self._parked = dict(reversed(self._parked.items()))
        answer = super()._refuse(need, session, reason)
        self._parked = dict(reversed(self._parked.items()))
        return answer


class ForgetsSurplusOfAHit(VirtualPolicy):
    """A history that is adopted in part goes on needing all its pages."""

    def _admit(self, s: KVSequence, hit: int, pages: int) -> VirtualRange:
        room = self._parked[s.session].room if hit else 0
        taken = super()._admit(s, hit, pages)
        if hit:
            self._store._need(taken, room)
        return taken


@pytest.mark.parametrize(
    "bug",
    [
        CountsWholeTokens,
        ReclaimsAtOnce,
        RefusesInsteadOfReclaiming,
        LeavesAbortedPagesMapped,
        TakesTheFirstFreeRange,
        ReclaimsTooMuch,
        LeapsOverAnEdge,
        DropsTheLastParkedFirst,
        ForgetsSurplusOfAHit,
    ],
)
def test_a_planted_bug_is_noticed(bug: type[VirtualPolicy] | type[RangeStore]) -> None:
    kind = "store" if issubclass(bug, RangeStore) else "policy"
    with pytest.raises(AssertionError):
        drive(lambda: Traffic(**{kind: bug}), 300, phases=[Phase.generate], database=None, derandomize=True)
