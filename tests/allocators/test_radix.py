"""SGLang's token pool and radix tree: each rule of section 10 of specs/paged-kv.md, in a case to be done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.radix_tree import Node, Reader
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release, Span, Tag

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
"""4 bytes a token."""


def pool(num_blocks: int, block_size: int = 4, **settings: Any) -> RadixPolicy:
    """A pool with a tree, whose pages are 1 to num_blocks - 1."""
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = {"enable_prefix_caching": True, "max_model_len": 1000} | settings
    return RadixPolicy(TINY, arena, RadixConfig(num_blocks=num_blocks, block_size=block_size, **config))


def ask(id: int, *prompt: Span) -> KVSequence:
    """A request; its answer is a stream of its own."""
    tokens = sum(length for _, _, length in prompt)
    spans = (*prompt, (f"answer {id}", 0, 1000))
    return KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=1000, spans=spans)


def compute(kv: RadixPolicy, *sequences: KVSequence, chunk: int = 1000) -> None:
    """One step of all of them: newcomers with all that is found, prompts in chunks, others a token."""
    scheduled = []
    for s in sequences:
        admitting = not s.num_computed_tokens and not kv.block_ids(s)
        hit = kv.lookup(s) if admitting else 0
        new = min(chunk, s.num_tokens - s.num_computed_tokens - hit)
        assert kv.reserve(s, new, hit=hit, admitting=admitting) == Granted(hit)
        scheduled.append((s, hit + new))
    kv.end_step()
    for s, tokens in scheduled:
        s.num_computed_tokens += tokens
        s.num_tokens += s.num_computed_tokens == s.num_tokens
    kv.check()


def served(kv: RadixPolicy, s: KVSequence, why: Release = Release.FINISH) -> None:
    """Computed in one step and gone."""
    compute(kv, s)
    kv.release(s, why)
    kv.check()


def free(kv: RadixPolicy) -> list[int]:
    """The list as the next step finds it."""
    kv._end_group()
    return list(kv._free)


def tree(kv: RadixPolicy) -> dict[tuple[int, ...], tuple[int, int]]:
    """(locks, hits) of each node by its pages."""
    return {tuple(node.pages): (node.locks, node.hits) for node in kv._tree.nodes()}


# The pool


def test_a_page_of_one_token_is_taken_at_the_head_and_given_back_at_the_tail() -> None:
    kv = pool(9, 1, enable_prefix_caching=False)
    a, b, c = ask(1, ("a", 0, 3)), ask(2, ("b", 0, 2)), ask(3, ("c", 0, 4))
    compute(kv, a, b)
    assert (kv.block_ids(a), kv.block_ids(b)) == ((1, 2, 3), (4, 5))
    kv.release(a, Release.FINISH)
    assert free(kv) == [6, 7, 8, 1, 2, 3]
    compute(kv, c)
    assert kv.block_ids(c) == (6, 7, 8, 1)
    kv.release(b, Release.PREEMPT)
    assert free(kv) == [2, 3, 4, 5]


def test_pages_of_one_free_call_go_in_front_in_table_order() -> None:
    """Those that end with one step are freed in one call, a retracted one in a call of its own."""

    def three() -> tuple[RadixPolicy, KVSequence, KVSequence]:
        kv = pool(8, enable_prefix_caching=False)
        a, b = ask(1, ("a", 0, 12)), ask(2, ("b", 0, 5))
        compute(kv, a, b)
        assert (kv.block_ids(a), kv.block_ids(b)) == ((1, 2, 3), (4, 5))
        return kv, a, b

    kv, a, b = three()
    kv.release(a, Release.FINISH)
    kv.release(b, Release.FINISH)
    assert free(kv) == [1, 2, 3, 4, 5, 6, 7]
    kv, a, b = three()
    kv.release(a, Release.FINISH)
    compute(kv, b)
    kv.release(b, Release.FINISH)
    assert free(kv) == [4, 5, 1, 2, 3, 6, 7]
    kv, a, b = three()
    kv.release(a, Release.FINISH)
    kv.release(b, Release.PREEMPT)
    assert free(kv) == [4, 5, 1, 2, 3, 6, 7]


def test_an_extend_fills_the_last_page_and_a_decode_takes_one_at_a_multiple_of_the_page() -> None:
    kv = pool(9)
    a = ask(1, ("a", 0, 10))
    compute(kv, a, chunk=6)
    assert kv.block_ids(a) == (1, 2)
    compute(kv, a, chunk=6)
    assert kv.block_ids(a) == (1, 2, 3)
    compute(kv, a)
    compute(kv, a)
    assert (a.num_computed_tokens, kv.block_ids(a)) == (12, (1, 2, 3))
    compute(kv, a)
    assert kv.block_ids(a) == (1, 2, 3, 4)


def test_the_dummy_is_there_and_never_handed_out() -> None:
    kv = pool(4, 1)
    compute(kv, a := ask(1, ("a", 0, 3)))
    assert kv.block_ids(a) == (1, 2, 3)
    assert kv.usage().pool == 4, "the dummy's four bytes"
    assert kv.reserve(a, 1) == Refused(4, 0, "not enough free or evictable pages")
    assert kv.arena.usage().requested_by_tag[Tag.KV] == 4 * 4


def test_an_arena_without_room_raises_and_keeps_nothing() -> None:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=4096))
    with pytest.raises(OutOfMemory):
        RadixPolicy(TINY, arena, RadixConfig(num_blocks=2000, max_model_len=8))
    assert arena.usage().allocated == 0


# What is found


def test_the_last_token_is_never_found() -> None:
    """A prompt of two whole pages, asked again: only one page is found; with pages of a token, all but the last."""
    kv = pool(12)
    served(kv, ask(1, ("a", 0, 8)))
    assert [kv.lookup(ask(2, ("a", 0, n))) for n in (4, 5, 8, 9)] == [0, 4, 4, 8]
    kv = pool(12, 1)
    served(kv, ask(1, ("a", 0, 8)))
    assert [kv.lookup(ask(2, ("a", 0, n))) for n in (1, 5, 8, 9)] == [0, 4, 7, 8]


def test_a_conversation_step_by_step() -> None:
    kv = pool(10)
    a, b = ask(1, ("a", 0, 10)), ask(2, ("a", 0, 8), ("b", 0, 3))
    compute(kv, a)
    assert kv.block_ids(a) == (1, 2, 3)
    assert tree(kv) == {(1, 2): (1, 1)}, "whole pages of the prompt, locked by A"
    compute(kv, b)
    assert kv.block_ids(b) == (1, 2, 4)
    assert tree(kv) == {(1, 2): (2, 2)}
    compute(kv, b)
    assert b.num_computed_tokens == 12
    assert tree(kv) == {(1, 2): (2, 2)}, "an answer enters when its request finishes"
    kv.release(b, Release.FINISH)
    assert tree(kv) == {(1, 2): (1, 2), (4,): (0, 1)}
    assert free(kv) == [5, 6, 7, 8, 9]
    kv.release(a, Release.FINISH)
    assert tree(kv) == {(1, 2): (0, 2), (4,): (0, 1)}
    assert free(kv) == [3, 5, 6, 7, 8, 9], "the tail below a page"
    again = ask(3, ("a", 0, 8), ("b", 0, 3), ("answer 2", 0, 1), ("c", 0, 2))
    assert kv.lookup(again) == 12
    compute(kv, again)
    assert kv.block_ids(again) == (1, 2, 4, 3)
    assert tree(kv) == {(1, 2): (1, 3), (4,): (1, 2)}


def test_equal_prompts_of_one_step_are_both_computed_and_the_second_gives_its_pages_back() -> None:
    kv = pool(10)
    a, b = ask(1, ("a", 0, 9)), ask(2, ("a", 0, 9))
    compute(kv, a, b)
    assert (kv.block_ids(a), kv.block_ids(b)) == ((1, 2, 3), (1, 2, 6))
    assert tree(kv) == {(1, 2): (2, 2)}
    assert free(kv) == [4, 5, 7, 8, 9]


def test_an_answer_that_is_there_already_gives_its_pages_back_when_it_finishes() -> None:
    kv = pool(10)
    a, b = (KVSequence(id, id, 0, 4, 1000, spans=(("p", 0, 4), ("same answer", 0, 100))) for id in (1, 2))
    compute(kv, a, b)
    for _ in range(5):
        compute(kv, a, b)
    assert (kv.block_ids(a), kv.block_ids(b)) == ((1, 2, 4), (1, 3, 5)), "page 2 was B's copy of the prompt before"
    kv.release(a, Release.FINISH)
    kv.release(b, Release.FINISH)
    assert tree(kv) == {(1,): (0, 2), (2,): (0, 2)}
    assert free(kv) == [4, 3, 5, 6, 7, 8, 9], "A's tail, B's copy of page 2, and its tail, as one call"


def test_a_prompt_enters_chunk_by_chunk() -> None:
    kv = pool(10)
    a = ask(1, ("a", 0, 16))
    for found in (4, 8, 12):
        compute(kv, a, chunk=5)
        assert kv.lookup(ask(2, ("a", 0, 16))) == found
    assert tree(kv) == {(1,): (1, 1), (2,): (1, 1), (3,): (1, 1)}
    compute(kv, a, chunk=5)
    assert tree(kv) == {(1,): (1, 1), (2,): (1, 1), (3,): (1, 1), (4,): (1, 1)}


def test_what_is_computed_in_a_step_is_found_after_it_only() -> None:
    kv = pool(10)
    kv.reserve(ask(1, ("a", 0, 9)), 9, admitting=True)
    assert kv.lookup(ask(2, ("a", 0, 9))) == 0
    kv.end_step()
    assert kv.lookup(ask(2, ("a", 0, 9))) == 8


def test_equal_tokens_are_found_however_they_are_told() -> None:
    kv = pool(10)
    served(kv, ask(1, ("a", 0, 6), ("b", 0, 2), ("b", 2, 3)))
    assert kv.lookup(ask(2, ("a", 0, 1), ("x", 7, 0), ("a", 1, 5), ("b", 0, 5))) == 8
    assert kv.lookup(ask(3, ("a", 0, 6), ("b", 1, 5))) == 4
    assert kv.lookup(ask(4, ("a", 0, 6), ("c", 0, 5))) == 4
    assert kv.lookup(ask(5, ("a", 1, 6), ("b", 0, 5))) == 0
    assert kv.lookup(KVSequence(6, 6, 0, 9, 9)) == 0, "nobody says what it asks"


def test_a_reader_tells_runs_in_the_fewest_pieces() -> None:
    reader = Reader((("a", 0, 2), ("a", 2, 2), ("b", 5, 0), ("a", 4, 3), ("c", 0, 9)), 9)
    assert reader.ahead(9) == (("a", 0, 7), ("c", 0, 2))
    reader.skip(5)
    assert (reader.left, reader.ahead(3)) == (4, (("a", 5, 2), ("c", 0, 1)))
    assert reader.alike((("a", 5, 2), ("c", 0, 7))) == 4
    assert reader.alike((("a", 5, 1), ("c", 0, 1))) == 1
    reader.skip(2)
    assert reader.alike((("c", 1, 1),)) == 0


# The tree


def test_a_match_within_a_node_splits_it_and_both_parts_have_its_locks_and_hits() -> None:
    kv = pool(10)
    a = ask(1, ("a", 0, 12))
    compute(kv, a)
    assert tree(kv) == {(1, 2, 3): (1, 1)}
    c = ask(2, ("a", 0, 4), ("c", 0, 4))
    assert kv.lookup(c) == 4
    assert tree(kv) == {(1,): (1, 1), (2, 3): (1, 1)}
    compute(kv, c)
    assert tree(kv) == {(1,): (2, 2), (2, 3): (1, 1), (4,): (1, 1)}
    kv.release(a, Release.FINISH)
    assert tree(kv) == {(1,): (1, 2), (2, 3): (0, 1), (4,): (1, 1)}, "A had counted them when its prompt came in"
    assert kv.usage().cached == 2 * 16


def test_a_whole_leaf_goes_the_least_recently_accessed_first_for_what_is_short() -> None:
    kv = pool(10)
    for id, name in enumerate("abc"):
        served(kv, ask(id, (name, 0, 12)))
    assert tree(kv) == {(1, 2, 3): (0, 1), (4, 5, 6): (0, 1), (7, 8, 9): (0, 1)}
    kv.lookup(ask(8, ("a", 0, 13)))
    d = ask(9, ("d", 0, 5))
    compute(kv, d)
    assert set(tree(kv)) == {(1, 2, 3), (7, 8, 9), (4,)}, "b had waited longest, and went whole"
    assert kv.block_ids(d) == (4, 5)
    assert free(kv) == [6]


def test_a_look_up_that_ends_in_a_node_refreshes_what_is_left_of_it_as_well() -> None:
    """SGLang sets the access time of the node before it splits it."""
    kv = pool(7)
    for id, name in enumerate("ab"):
        served(kv, ask(id, (name, 0, 12)))
    kv.lookup(ask(8, ("a", 0, 5)))
    compute(kv, ask(9, ("d", 0, 4)))
    assert set(tree(kv)) == {(1,), (2, 3), (4,)}, "b is gone, and d has its first page"


def test_a_parent_goes_after_its_last_child_and_not_while_one_is_locked() -> None:
    kv = pool(7)
    served(kv, ask(1, ("a", 0, 8)))
    served(kv, ask(2, ("a", 0, 8), ("x", 0, 4)))
    served(kv, ask(3, ("b", 0, 12)))
    assert set(tree(kv)) == {(1, 2), (3,), (4, 5, 6)}
    d = ask(4, ("d", 0, 12))
    compute(kv, d)
    assert set(tree(kv)) == {(4, 5, 6), (1, 2, 3)}, "x (page 3), then its parent, each put in front of the list"
    assert kv.block_ids(d) == (1, 2, 3)
    kv = pool(7)
    served(kv, ask(1, ("a", 0, 8)))
    e = ask(2, ("a", 0, 8), ("x", 0, 5))
    compute(kv, e)
    served(kv, ask(3, ("b", 0, 8)))
    assert kv.reserve(ask(4, ("d", 0, 12)), 12, admitting=True) == Refused(48, 32, "the whole prompt does not fit")
    assert set(tree(kv)) == {(1, 2), (3,), (5, 6)}, "a refusal evicts nothing"


@pytest.mark.parametrize(
    ("asked", "policy", "gone"),
    [
        ("aaccb", "lru", "a"),
        ("aaccb", "lfu", "b"),
        ("aaccb", "slru", "b"),
        ("aaaccbb", "lfu", "c"),
        ("aaaccbb", "slru", "a"),
    ],
)
def test_which_leaf_goes_first(asked: str, policy: str, gone: str) -> None:
    """The least recent; of those that fewest requests have put, the least recent; the least recent that only one has
    put, or, if there is none, of all."""
    kv = pool(5, eviction_policy=policy)
    for id, name in enumerate(asked):
        served(kv, ask(id, (name, 0, 4)))
    assert tree(kv) == {(page,): (0, asked.count(name)) for page, name in ((1, "a"), (2, "c"), (3, "b"))}
    compute(kv, d := ask(9, ("d", 0, 5)))
    assert kv.block_ids(d) == (" acb".index(gone), 4)


def test_a_request_is_counted_once_at_each_node() -> None:
    kv = pool(10)
    a = ask(1, ("a", 0, 8))
    compute(kv, a, chunk=4)
    compute(kv, a, chunk=4)
    assert tree(kv) == {(1,): (1, 1), (2,): (1, 1)}
    for _ in range(4):
        compute(kv, a)
    kv.release(a, Release.FINISH)
    assert tree(kv) == {(1,): (0, 1), (2,): (0, 1), (3,): (0, 1)}
    assert kv.lookup(ask(2, ("a", 0, 9))) == 8
    assert tree(kv) == {(1,): (0, 1), (2,): (0, 1), (3,): (0, 1)}, "a look-up does not count"


# Admission, retraction, and steps that are not carried out


def test_who_asks_with_a_prefix_has_it_locked_before_room_is_counted() -> None:
    kv = pool(6)
    served(kv, ask(1, ("a", 0, 12)))
    s = ask(2, ("a", 0, 12), ("b", 0, 9))
    assert kv.lookup(s) == 12
    assert kv.reserve(s, 9, hit=12, admitting=True) == Refused(48, 32, "the whole prompt does not fit")
    assert tree(kv) == {(1, 2, 3): (0, 1)}
    assert kv.reserve(s, 9, admitting=True) == Refused(96, 80, "the whole prompt does not fit")


def test_a_retracted_request_leaves_its_prompt_and_takes_its_answer_along() -> None:
    kv = pool(40)
    a, b = ask(1, ("a", 0, 9)), ask(2, ("b", 0, 9))
    compute(kv, a, b)
    for _ in range(8):
        compute(kv, a, b)
    assert kv.block_ids(b) == (4, 5, 6, 8, 10)
    kv.release(b, Release.PREEMPT)
    assert tree(kv) == {(1, 2): (1, 1), (4, 5): (0, 1)}
    assert free(kv)[:5] == [6, 8, 10, 11, 12]
    b.num_computed_tokens = 0
    assert kv.lookup(b) == 8
    compute(kv, b)
    assert kv.block_ids(b) == (4, 5, 6, 8, 10)
    assert tree(kv) == {(1, 2): (1, 1), (4, 5): (1, 2), (6, 8): (1, 1)}, "its answer so far is prefilled, and enters"


def test_a_retraction_evicts_until_those_that_stay_have_room_for_twenty_tokens_each() -> None:
    kv = pool(12)
    served(kv, ask(1, ("old", 0, 12)))
    served(kv, ask(2, ("new", 0, 12)))
    a, b = ask(3, ("a", 0, 5)), ask(4, ("b", 0, 5))
    compute(kv, a, b)
    assert free(kv) == [11]
    kv.release(b, Release.PREEMPT)
    assert set(tree(kv)) == {(4, 5, 6), (7,), (9,)}, "5 pages for A: 10 and 11 are free, and old's three"
    assert free(kv) == [1, 2, 3, 10, 11]


@pytest.mark.parametrize("why", [Release.PREEMPT, Release.DROP])
def test_only_a_retraction_makes_room(why: Release) -> None:
    kv = pool(12)
    served(kv, ask(1, ("old", 0, 28)))
    compute(kv, a := ask(2, ("a", 0, 4)), b := ask(3, ("b", 0, 4)))
    kv.release(b, why)
    assert kv.block_ids(a) == (8,)
    assert len(free(kv)) == (9 if why is Release.PREEMPT else 2)


def test_an_aborted_step_gives_its_pages_back_and_unlocks_what_it_adopted() -> None:
    kv = pool(12, 1)
    served(kv, ask(1, ("a", 0, 4)))
    compute(kv, b := ask(2, ("b", 0, 2)))
    before = (kv.usage(), list(kv.walk()), free(kv), kv.block_ids(b))
    late = ask(3, ("a", 0, 4), ("c", 0, 3))
    assert kv.lookup(late) == 4
    kv.reserve(b, 1)
    kv.reserve(late, 3, hit=4, admitting=True)
    assert tree(kv) == {(1, 2, 3, 4): (1, 1), (5, 6): (1, 1)}
    kv.abort_step()
    assert (kv.usage(), list(kv.walk()), free(kv), kv.block_ids(b)) == before
    kv.end_step()
    assert tree(kv) == {(1, 2, 3, 4): (0, 1), (5, 6): (1, 1)}, "nobody computes what it would have put there"
    kv.check()


@pytest.mark.parametrize(
    ("hit", "caching", "started"),
    [(12, True, False), (6, True, False), (-4, True, False), (8, False, False), (8, True, True)],
)
def test_what_was_not_promised_cannot_be_adopted(hit: int, caching: bool, started: bool) -> None:
    kv = pool(12, enable_prefix_caching=caching)
    served(kv, ask(1, ("a", 0, 8)))
    s = ask(2, ("a", 0, 8), ("b", 0, 8))
    s.num_computed_tokens = 4 * started
    with pytest.raises(ValueError, match=f"cannot adopt {hit} tokens"):
        kv.reserve(s, 4, hit=hit, admitting=True)


def test_a_part_of_what_was_promised_can_be_adopted() -> None:
    kv = pool(12)
    served(kv, ask(1, ("a", 0, 12)))
    s = ask(2, ("a", 0, 12), ("b", 0, 1))
    assert kv.lookup(s) == 12
    assert kv.reserve(s, 9, hit=4, admitting=True) == Granted(4)
    kv.end_step()
    assert kv.block_ids(s) == (1, 2, 3, 6), "the rest was computed anew, was there, and was given back"
    assert tree(kv) == {(1,): (1, 2), (2, 3): (1, 2)}


# Leaps


def test_a_leap_evicts_as_its_steps_do() -> None:
    def crowded() -> tuple[RadixPolicy, list[KVSequence]]:
        kv = pool(12)
        served(kv, ask(1, ("old", 0, 8)))
        served(kv, ask(2, ("new", 0, 8)))
        running = [ask(3, ("a", 0, 7)), ask(4, ("b", 0, 6))]
        compute(kv, *running)
        compute(kv, *running)
        assert free(kv) == [9, 10, 11]
        return kv, running

    leaping, running = crowded()
    assert leaping.horizon(running, 100) == 13, "three free pages and four to evict, and B has a slot left"
    leaping.advance(running, 12)
    stepping, again = crowded()
    for _ in range(12):
        compute(stepping, *again)
    assert [leaping.block_ids(s) for s in running] == [stepping.block_ids(s) for s in again]
    assert [leaping.block_ids(s) for s in running] == [(5, 6, 9, 11, 2), (7, 8, 10, 1, 3)]
    assert (free(leaping), tree(leaping)) == (free(stepping), tree(stepping))
    assert leaping.usage() == stepping.usage()
    assert leaping.horizon(running, 100) == 1
    with pytest.raises(ValueError, match="2 steps are over the horizon of 1"):
        leaping.advance(running, 2)


def test_no_leap_begins_in_a_step_that_put_something_into_the_tree() -> None:
    """Who waits is looked up in each step. After the first, what it passes is older than what the step put in, after
    the second younger: which leaf goes first depends on whether the second look-up was made."""
    kv = pool(30)
    served(kv, ask(1, ("w", 0, 8)))
    waiting, s = ask(2, ("w", 0, 9)), ask(3, ("s", 0, 9))

    def youngest() -> tuple[int, ...]:
        return tuple(max(kv._tree.nodes(), key=lambda node: node.touched).pages)

    kv.reserve(s, 9, admitting=True)
    kv.lookup(waiting)
    kv.end_step()
    s.num_computed_tokens, s.num_tokens = 9, 10
    assert (youngest(), kv.horizon([s], 10)) == ((3, 4), 0)
    kv.reserve(s, 1)
    kv.lookup(waiting)
    kv.end_step()
    assert (youngest(), kv.horizon([s], 10)) == ((1, 2), 10)


def test_the_last_token_of_a_prompt_is_no_part_of_a_leap() -> None:
    kv = pool(30)
    s = ask(1, ("s", 0, 5))
    compute(kv, s, chunk=4)
    kv.end_step()
    assert s.num_computed_tokens + 1 == s.num_tokens
    assert kv.horizon([s], 10) == 0
    compute(kv, s)
    kv.end_step()
    assert kv.horizon([s], 10) == 10


# Books and settings


def test_a_page_that_several_refer_to_counts_once() -> None:
    kv = pool(20)
    running = [ask(id, ("system", 0, 8), (f"user {id}", 0, 3)) for id in range(3)]
    served(kv, ask(9, ("system", 0, 8)))
    compute(kv, *running)
    usage = kv.usage()
    assert usage.token == (8 + 3 * 3) * 4
    assert usage.shared == 2 * 8 * 4
    assert usage.held == (2 + 3) * 16
    assert usage.table == 3 * 11 * 4, "each has an entry for each token"
    assert (usage.cached, usage.pool) == (0, 15 * 16)
    running_pieces = [(block.owner, block.size // 16) for block in kv.walk() if block.state == "running"]
    assert running_pieces == [(0, 2), (0, 1), (1, 1), (2, 1)], "full neighbours of one owner are one piece"
    for s in running:
        kv.release(s, Release.PARK)
    nothing = KVUsage(token=0, parked=0, held=0, growth_copy=0, cached=0, pool=0, table=0)
    assert kv.usage() == nothing._replace(cached=2 * 16, pool=18 * 16)


def test_without_prefix_caching_there_is_no_tree() -> None:
    kv = pool(10, enable_prefix_caching=False)
    for why in Release:
        served(kv, ask(1, ("a", 0, 9)), why)
        assert kv.lookup(ask(2, ("a", 0, 9))) == 0
        assert tree(kv) == {}
        assert kv.usage().cached == 0
    compute(kv, a := ask(1, ("a", 0, 9)))
    assert kv.horizon([a], 30) == 27, "six pages, and three slots of the last"


def test_settings() -> None:
    assert (RadixConfig(num_blocks=2, max_model_len=1).block_size, RadixPolicy.name) == (1, "radix")
    for name, value in (("num_blocks", 0), ("max_model_len", 0), ("block_size", 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            RadixConfig(**({"num_blocks": 9, "max_model_len": 9} | {name: value}))
    wrong: Any = "fifo"
    with pytest.raises(ValueError, match="eviction_policy must be one of lru, lfu, slru"):
        RadixConfig(num_blocks=9, max_model_len=9, eviction_policy=wrong)


def test_check_notices_a_lost_lock_and_a_lost_page() -> None:
    kv = pool(10)
    compute(kv, ask(1, ("a", 0, 9)))
    node: Node = next(kv._tree.nodes())
    node.locks = 0
    with pytest.raises(AssertionError):
        kv.check()
    node.locks = 1
    kv.check()
    kv._free.pop()
    with pytest.raises(AssertionError):
        kv.check()


def test_found_tokens_are_counted_when_a_request_is_admitted() -> None:
    """Two prompts of 9 tokens that are alike in 8: the second finds two pages. It is counted again, and apart, when it
    comes back from a retraction, with the tokens that it has by then; look-ups and refusals count nothing."""
    kv = pool(20)
    first, second = (ask(id, ("system", 0, 8), (f"user {id}", 0, 1)) for id in (1, 2))
    assert kv.prefix_stats() == (0, 0, 0, 0, 0, 0)
    assert kv.lookup(first) == 0
    assert kv.reserve(first, 9, admitting=True) == Granted()
    kv.end_step()
    assert kv.prefix_stats()[:3] == (1, 9, 0)
    assert kv.lookup(second) == 8
    assert isinstance(kv.reserve(ask(3, ("much", 0, 500)), 500, admitting=True), Refused)
    kv.reserve(second, 1, hit=8, admitting=True)
    kv.abort_step()
    assert kv.prefix_stats()[:3] == (1, 9, 0), "nobody was admitted in a step that was not carried out"
    kv.reserve(second, 1, hit=8, admitting=True)
    kv.end_step()
    assert kv.prefix_stats()[:3] == (2, 18, 8)
    kv.release(second, Release.PREEMPT)
    second.num_tokens, second.num_computed_tokens = 12, 0
    kv.reserve(second, 4, hit=kv.lookup(second), admitting=True)
    kv.end_step()
    assert kv.prefix_stats() == (2, 18, 8, 1, 12, 8)


def test_without_a_tree_nothing_is_counted() -> None:
    kv = pool(20, enable_prefix_caching=False)
    kv.reserve(ask(1, ("a", 0, 9)), 9, admitting=True)
    kv.end_step()
    assert kv.prefix_stats() == (0, 0, 0, 0, 0, 0)
