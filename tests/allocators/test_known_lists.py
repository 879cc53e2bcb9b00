"""Leaps on a list that is asked again: the answers of a new list, the state of single steps, and what it costs.

A block pool knows a batch by its list. Here one list is asked and advanced in many pieces, beside a copy of the policy
that takes single steps, one that is given a new list each time, and one that tries how far it comes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hbmtwin.allocators.decode_batch import DecodeBatch
from hbmtwin.allocators.direct import DirectAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.group_leaps import GroupBatch, Trial
from hbmtwin.allocators.kv_groups import Grouping, KVGroup
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release

from .test_paged_groups_stateful import MODELS

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4)
LONGEST = 400
KINDS = [*MODELS, "paged", "paged with a cache", "radix 1", "radix 4", "radix 4 with a tree"]


def pool(kind: str, num_blocks: int, longest: int = LONGEST) -> Any:
    arena = DirectAllocator(HbmDriver(1 << 24), DirectAllocator.Config(limit_bytes=1 << 24))
    common: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": longest}
    if kind in MODELS:
        caching, groups = MODELS[kind]
        grouping = Grouping(groups=groups, group_length=2, page_bytes=32)
        more = {"grouping": grouping, "enable_prefix_caching": caching, "max_num_batched_tokens": 64}
        return PagedGroupsPolicy(TINY, arena, PagedGroupsConfig(**common, **more))
    caching = kind.endswith(("cache", "tree"))
    common |= {"block_size": 1 if kind == "radix 1" else 4, "enable_prefix_caching": caching}
    if kind.startswith("paged"):
        return PagedPolicy(TINY, arena, PagedConfig(**common))
    return RadixPolicy(TINY, arena, RadixConfig(**common))


def admitted(policy: Any, choose: random.Random) -> list[KVSequence]:
    """Those that fit of some sequences with prompts in common; each has a token or a few of its answer."""
    running = []
    for id in range(choose.randint(1, 7)):
        shared = choose.choice([0, 8, 16, 24])
        spans = ((f"s{choose.randrange(2)}", 0, shared), (f"o{id}", 0, 2 * LONGEST))
        s = KVSequence(id, id, 0, shared + choose.randint(1, 30), LONGEST, spans=spans)
        hit = policy.lookup(s)
        new, drafts = s.num_tokens - hit, choose.choice([0, 0, 3])
        if isinstance(policy.reserve(s, new, hit=hit, lookahead=drafts, admitting=True), Granted):
            s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
            running.append(s)
        policy.end_step()
    policy.end_step()
    return running


def stepped(policy: Any, running: list[KVSequence]) -> bool:
    """One step of all, if all have room."""
    for s in running:
        if not isinstance(policy.reserve(s, 1), Granted):
            return False
    policy.end_step()
    for s in running:
        s.num_computed_tokens += 1
        s.num_tokens += 1
    return True


def steps_that_fit(policy: Any, running: list[KVSequence], limit: int) -> int:
    """Tried on a copy, up to where what is kept bends."""
    twin, trying = copy.deepcopy((policy, running))
    bound = getattr(policy, "_bound", None)
    for step in range(limit):
        bends = bound is not None and step and any(s.num_computed_tokens == bound for s in trying)
        if bends or not stepped(twin, trying):
            return step
    return limit


def queue(policy: Any) -> list[int]:
    return list(policy._free) if isinstance(policy, RadixPolicy | PagedPolicy) else list(policy.free_queue())


def in_pieces(kind: str, seed: int) -> None:
    """One list, in pieces."""
    choose = random.Random(seed)
    policy = pool(kind, choose.choice([30, 60, 120, 400]))
    decoding = admitted(policy, choose)
    twin, running = copy.deepcopy((policy, decoding))
    for _ in range(choose.randint(1, 9)):
        limit = choose.choice([1, 5, 20, 60])
        fresh, others = copy.deepcopy((policy, decoding))
        if isinstance(policy, PagedGroupsPolicy) and choose.random() < 0.6:
            seen = policy.steps_unseen(decoding, limit)
            assert seen == fresh.steps_unseen(list(others), limit)
            assert gives_nothing_back(twin, running, seen)
        k = policy.horizon(decoding, limit)
        assert k == fresh.horizon(list(others), limit)
        assert k == steps_that_fit(twin, running, limit)
        piece = choose.choice([k, k // 2, min(k, 1), min(k, choose.randint(0, 9))])
        policy.advance(decoding, piece)
        assert all(stepped(twin, running) for _ in range(piece))
        assert policy.usage() == twin.usage()
        assert [policy.block_ids(s) for s in decoding] == [twin.block_ids(s) for s in running]
        assert queue(policy) == queue(twin)
        if choose.random() < 0.2:
            policy.check()
            policy.end_step()
    assert list(policy.walk()) == list(twin.walk())
    policy.check()
    for s, in_steps in zip(decoding, running, strict=True):
        s.num_computed_tokens, s.num_tokens = in_steps.num_computed_tokens, in_steps.num_tokens
    assert [stepped(policy, decoding)] == [stepped(twin, running)]
    assert policy.usage() == twin.usage()
    policy.abort_step()
    twin.abort_step()
    assert policy.usage() == twin.usage()
    for s in decoding:
        policy.release(s, Release.FINISH)
        twin.release(s, Release.FINISH)
    assert queue(policy) == queue(twin)


def gives_nothing_back(policy: Any, running: list[KVSequence], steps: int) -> bool:
    twin, trying = copy.deepcopy((policy, running))
    nulls = list(twin.pool.nulls)
    for _ in range(min(steps, 12)):
        if not stepped(twin, trying):
            break
        if twin.pool.nulls != nulls:
            return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_in_pieces_is_single_steps(kind: str) -> None:
    for seed in range(40):
        in_pieces(kind, seed)


# What it costs


class Watched(list[Any]):
    """A list that counts who looks at it."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def watched(policy: Any, count: int, tokens: int) -> Watched:
    """Sequences at every place of a block of 16."""
    batch = Watched()
    for id in range(count):
        s = KVSequence(id, id, 0, tokens + id % 16, 4096, spans=((f"s{id}", 0, 4096),))
        assert policy.reserve(s, s.num_tokens, admitting=True) == Granted()
        s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
        batch.append(s)
    policy.end_step()
    policy.end_step()
    return batch


def gemma(num_blocks: int, caching: bool) -> Any:
    """One group that sees all and six that see 32 tokens."""
    window = KVGroup(kind="sliding_window", window=32, block_size=16, token_bytes=4)
    grouping = Grouping(groups=(KVGroup(block_size=16, token_bytes=4), *[window] * 6), group_length=1, page_bytes=64)
    arena = DirectAllocator(HbmDriver(1 << 30), DirectAllocator.Config(limit_bytes=1 << 30))
    config = PagedGroupsConfig(
        num_blocks=num_blocks, max_model_len=4096, grouping=grouping, enable_prefix_caching=caching
    )
    return PagedGroupsPolicy(TINY, arena, config)


def sglang(num_blocks: int, caching: bool, page: int = 16) -> Any:
    arena = DirectAllocator(HbmDriver(1 << 30), DirectAllocator.Config(limit_bytes=1 << 30))
    config = RadixConfig(num_blocks=num_blocks, max_model_len=4096, block_size=page, enable_prefix_caching=caching)
    return RadixPolicy(TINY, arena, config)


@pytest.mark.parametrize("caching", [False, True])
def test_groups_look_at_sequences_whose_tables_change_and_at_no_others(caching: bool) -> None:
    """In one step of sixteen a block begins, in another one of each window's ends, where others fill and get keys."""
    policy = gemma(208 * 7 * 6, caching)
    batch = watched(policy, 208, 64)
    policy.advance(batch, 1)
    assert batch.walks == 1
    steps: list[int] = []
    forget = policy.pool.forget
    policy.pool.forget = lambda held, computed: (steps.append(computed), forget(held, computed))
    batch.walks = 0
    for _ in range(30):
        policy.steps_unseen(batch, 100)
        assert policy.horizon(batch, 100) == 100
        policy.advance(batch, 3)
    assert batch.walks == 0
    assert len(steps) == 2 * 208 * 90 // 16
    policy.check()


def test_what_a_short_pool_has_tried_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows give as many blocks back as they take, but for the first two; the full group takes 13 in each step."""
    policy = gemma(208 * 7 * 5 + 1, False)
    batch = watched(policy, 208, 64)
    tried: list[int] = []
    step = Trial._step
    monkeypatch.setattr(Trial, "_step", lambda self, place, at: (tried.append(place), step(self, place, at))[1])
    far = policy.horizon(batch, 400)
    once = len(tried)
    assert 190 < far < 230
    assert 2 * 13 * far <= once <= 2 * 13 * (far + 1) + 208, "two changes each in sixteen steps"
    for gone in range(1, far + 1):
        policy.advance(batch, 1)
        assert policy.horizon(batch, 400) == far - gone
    assert (len(tried), batch.walks) == (once, 1)
    with pytest.raises(ValueError, match="blocks are free for 0 of 1 steps: over the horizon"):
        policy.advance(batch, 1)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_radix_does_not_walk_a_list_that_it_knows(caching: bool, page: int) -> None:
    policy = sglang(208 * 200 // page, caching, page)
    batch = watched(policy, 208, 64)
    policy.advance(batch, 1)
    batch.walks = 0
    held = policy.usage().held
    taken: list[int] = []
    take = policy._take
    policy._take = lambda count: (taken.append(count), take(count))[1]
    for _ in range(30):
        assert policy.horizon(batch, 5_000) < 5_000
        policy.advance(batch, 3)
    pages = 208 * 90 // page
    assert policy.usage().held - held == pages * page * TINY.token_bytes
    assert (batch.walks, taken) == (0, [3 * 208] * 30 if page == 1 else [1] * pages)
    policy.check()


@pytest.mark.parametrize("make", [gemma, sglang])
def test_whatever_else_happens_ends_a_batch(make: Any) -> None:
    policy = make(2000, True)
    batch = watched(policy, 4, 40)
    tokens = policy.usage().token

    def walked() -> int:
        policy.check()
        batch.walks = 0
        policy.advance(batch, 1)
        return batch.walks

    assert (walked(), walked()) == (1, 0)
    assert policy.block_ids(batch[0])
    assert policy.lookup(KVSequence(9, 9, 0, 40, 4096, spans=(("s0", 0, 40),))) == 32
    list(policy.walk())
    policy.end_step()
    assert walked() == 0
    if make is sglang:
        assert policy.usage().token == tokens + 3 * 4 * TINY.token_bytes
    batch[3].num_computed_tokens += 3
    batch[3].num_tokens += 3
    assert policy.reserve(batch[3], 1) == Granted()
    assert walked() == 1
    policy.abort_step()
    assert walked() == 1
    policy.release(batch.pop(), Release.FINISH)
    assert (walked(), walked()) == (1, 0)
    policy.advance(list(batch), 1)
    assert walked() == 1, "another list was in use"


@pytest.mark.parametrize("kind", ["two windows", "no cache", "radix 1", "radix 4"])
def test_who_is_as_long_as_can_be_takes_no_more(kind: str) -> None:
    policy = pool(kind, 400, longest=40)
    batch = [KVSequence(id, id, 0, 20 + 5 * id, 99, spans=((f"s{id}", 0, 99),)) for id in range(2)]
    for s in batch:
        assert policy.reserve(s, s.num_tokens, admitting=True) == Granted()
        s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
    policy.end_step()
    twin, running = copy.deepcopy((policy, batch))
    policy.advance(batch, 17)
    assert policy.horizon(batch, 30) == 30
    policy.advance(batch, 9)
    for _ in range(26):
        assert stepped(twin, [s for s in running if s.num_computed_tokens < 40 + (kind in MODELS)])
    assert [policy.block_ids(s) for s in batch] == [twin.block_ids(s) for s in running]
    assert queue(policy) == queue(twin)
    policy.check()
    assert policy.usage().table == twin.usage().table


# Planted bugs


def counts_from_the_start(self: GroupBatch, limit: int) -> int:
    """Steps that are over count as ahead."""
    return min(limit, UNSEEN(self, limit) + self.step)


def counts_every_reference(self: Trial, blocks: Any) -> None:
    """A shared block is free as soon as one gives it up."""
    self._free += len(blocks)


def keeps_the_trial(self: GroupBatch, steps: int) -> None:
    """Though the batch has overtaken it."""
    trial, self._trial = self._trial, None
    GO(self, steps)
    self._trial = trial


def forgets_the_lead(self: GroupBatch) -> None:
    self.lead = 0


def passes_every_place(self: Any, steps: int) -> None:
    """The next page is thought to be due a step later."""
    PASS_OVER(self, steps)
    self._takes = {self.step + 2: self._takes.pop(self.step + 1)}


UNSEEN, GO, PASS_OVER = GroupBatch.unseen, GroupBatch.go, DecodeBatch.pass_over


@pytest.mark.parametrize(
    ("owner", "verb", "bug", "kind"),
    [
        (GroupBatch, "unbent", lambda self, bound, limit: limit, "two windows"),
        (GroupBatch, "_need", lambda self, end: 0, "full and window"),
        (GroupBatch, "fold", forgets_the_lead, "full and window"),
        (GroupBatch, "go", keeps_the_trial, "full and window"),
        (Trial, "_give_back", counts_every_reference, "full and window"),
        (GroupBatch, "unseen", counts_from_the_start, "mamba align"),
        (DecodeBatch, "pass_over", passes_every_place, "radix 1"),
        (DecodeBatch, "fold", forgets_the_lead, "radix 4"),
    ],
)
def test_a_planted_bug_is_noticed(owner: Any, verb: str, bug: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, verb, bug)

    def one_after_the_other() -> None:
        for seed in range(120):
            in_pieces(kind, seed)

    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        one_after_the_other()
