"""Words of runs that got nowhere, to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.dashboard.standstill import recomputed_text, standstill_in_words, thrashing_text, unfinished_text
from hbmtwin.dashboard.verdict import ended_early, fate, headline, short_fate

GIB = 2**30
LOCK = {
    "kind": "live_lock",
    "time_s": 12.5,
    "since_s": 10.25,
    "preemptions": 7000,
    "num_requests": 7,
    "requests": [1, 2, 3, 4, 5, 6, 7],
    "tokens": 14000,
    "kv_bytes": 7 * GIB,
    "kv_pool_bytes": 3 * GIB,
}


def summary(**changes: Any) -> dict[str, Any]:
    """Of a run that held."""
    held = {
        "oom": None,
        "requests_completed": 3,
        "requests_rejected": {},
        "preemptions": 0,
        "turns_with_dropped_tokens": 0,
        "thrashing": None,
        "standstill": None,
    }
    return held | changes


def test_a_live_lock_in_words() -> None:
    assert standstill_in_words(summary(standstill=LOCK)) == (
        "Live-lock from 10.250 s: requests 1, 2, 3, 4, 5 and 2 more give way to one another, 7,000 times by 12.500 s, "
        "are computed again, and none gets another token: the same state came again and again. At full length they "
        "take 7.00 GiB (14,000 tokens), and there are 3.00 GiB of KV. Cure: scheduler.policy = 'vllm', which always "
        "lets one go on; scheduler.max_num_seqs = 3; memory.admission = 'reserve' where the KV policy has it; or more "
        "memory (engine.gpu_memory_utilization)."
    )


@pytest.mark.parametrize(("pool_gib", "most"), [(0.5, 1), (6, 6), (9, 6)])
def test_the_advice_is_less_than_those_who_locked(pool_gib: float, most: int) -> None:
    """Also where the pool holds their tokens, but not in the blocks that they take."""
    lock = LOCK | {"kv_pool_bytes": int(pool_gib * GIB)}
    assert f"scheduler.max_num_seqs = {most};" in standstill_in_words(summary(standstill=lock))


def test_a_deadlock_of_one_in_words() -> None:
    lock = LOCK | {"kind": "deadlock", "num_requests": 1, "requests": [4]}
    assert standstill_in_words(summary(standstill=lock)).startswith(
        "Deadlock at 12.500 s: request 4 runs or waits, the "
    )


def test_its_end_in_few_words() -> None:
    locked, dead = summary(standstill=LOCK), summary(standstill=LOCK | {"kind": "deadlock"})
    assert fate(locked | {"preemptions": 7000}) == "live-locked at 12.5 s, 7,000 preemptions"
    assert short_fate(locked | {"preemptions": 7000}) == "live-locked at 12.5 s"
    assert (
        headline({"a": locked, "b": summary(), "c": dead}) == "b held; a live-locked at 12.5 s; c deadlocked at 12.5 s."
    )
    assert [ended_early(s) for s in (locked, summary(), dead)] == [True, False, True]


def test_thrashing_in_words() -> None:
    found = {"minutes": 3, "first_s": 60, "worst_s": 1200, "worst_share": 0.953}
    assert fate(summary(preemptions=9, thrashing=found)) == "held, 9 preemptions, thrashing"
    assert thrashing_text(summary(thrashing=found)) == (
        "thrashing in 3 minutes, first from 60 s: at least half of what was computed had been computed before (95.3 % "
        "in the minute from 1,200 s); fewer scheduler.max_num_seqs, memory.admission = 'reserve' or more memory for KV "
        "would spare it"
    )
    assert thrashing_text(summary(thrashing=found | {"minutes": 1})).startswith("thrashing in one minute, first")


def test_counts_in_words() -> None:
    counts = summary(recomputed_tokens=1120, computed_tokens=2320, recomputed_share=1120 / 2320)
    assert recomputed_text(counts) == "1,120 of 2,320 computed (48.3 %)"
    assert unfinished_text(summary(unfinished_because={"they were late": 1200, "of rain": 1})) == (
        "1,200 unfinished: they were late; 1 unfinished: of rain"
    )
    assert unfinished_text(summary(unfinished_because={})) == ""
