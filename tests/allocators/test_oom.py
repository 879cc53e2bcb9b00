"""The one cause of a failed request: a literal example for each, and the order in which they are tried."""

import json
from dataclasses import replace

import pytest

from hbmtwin.allocators.oom import Cause, OomFacts, OomRecord, OutOfMemory, classify
from hbmtwin.allocators.records import Tag

GIB = 1 << 30

# A device of 64 GiB, capped at 60, with 14 GiB of weights and 2 GiB static. Some 4 GiB are asked for.
BASE = OomFacts(
    allocator="caching",
    asked_bytes=4 * GIB - 32,
    need_bytes=4 * GIB,
    tag=Tag.KV,
    owner=7,
    stream=0,
    capacity_bytes=64 * GIB,
    limit_bytes=60 * GIB,
    reserved_bytes=57 * GIB,
    allocated_bytes=56 * GIB,
    requested_bytes=55 * GIB,
    largest_free_bytes=GIB,
    cached_free_bytes=GIB,
    driver_free_bytes=GIB,
    weights_bytes=14 * GIB,
    static_bytes=2 * GIB,
)

EXAMPLES: dict[Cause, dict[str, int]] = {
    Cause.NEVER_FITS: {"owner_bytes": 40 * GIB + 1},
    Cause.ALLOCATOR_RULE: {"largest_free_bytes": 4 * GIB, "driver_free_bytes": 4 * GIB},
    Cause.EXTERNAL_FRAGMENTATION: {"cached_free_bytes": 3 * GIB},
    Cause.GROWTH_COPY: {"growth_copy_bytes": 2 * GIB},
    Cause.RESERVATION: {"unfilled_bytes": GIB, "rounding_bytes": GIB // 2, "other_arenas_free_bytes": GIB // 2},
    Cause.PARKED_HISTORY: {"parked_bytes": 2 * GIB},
    Cause.OTHER_TENANT: {"tenants_bytes": 2 * GIB},
    Cause.RUNTIME_PEAK: {"transient_bytes": GIB, "pending_bytes": GIB},
    Cause.SHORTAGE: {},
}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_example(cause: Cause) -> None:
    assert classify(replace(BASE, **EXAMPLES[cause])) is cause


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.SHORTAGE])
def test_one_byte_less_and_it_is_another_cause(cause: Cause) -> None:
    terms = dict(EXAMPLES[cause])
    terms[next(iter(terms))] -= 1
    assert classify(replace(BASE, **terms)) is not cause


def test_the_first_cause_in_the_order_wins() -> None:
    terms: dict[str, int] = {}
    for cause in reversed(Cause):
        terms |= EXAMPLES[cause]
        assert classify(replace(BASE, **terms)) is cause


def test_terms_add_up() -> None:
    """1.5 GiB short after what is free: a copy of half of it and parked histories for the rest."""
    facts = replace(BASE, cached_free_bytes=GIB * 3 // 2, growth_copy_bytes=GIB // 2, parked_bytes=GIB)
    assert classify(facts) is Cause.PARKED_HISTORY
    assert classify(replace(facts, parked_bytes=GIB - 1)) is Cause.SHORTAGE


def test_a_pasted_message_is_judged_by_the_same_rules() -> None:
    """vllm-ascend#1617: asked 4.50; 52.87 allocated, 56.89 reserved, 2.77 free of 60.96 GiB. The rest is unknown."""
    facts = OomFacts(
        allocator="torch_npu",
        asked_bytes=round(4.50 * GIB),
        need_bytes=round(4.50 * GIB),
        tag=None,
        owner=-1,
        stream=0,
        capacity_bytes=round(60.96 * GIB),
        limit_bytes=round(60.96 * GIB),
        reserved_bytes=round(56.89 * GIB),
        allocated_bytes=round(52.87 * GIB),
        requested_bytes=0,
        largest_free_bytes=round(2.77 * GIB),
        cached_free_bytes=round(4.02 * GIB),
        driver_free_bytes=round(2.77 * GIB),
    )
    assert classify(facts) is Cause.EXTERNAL_FRAGMENTATION


def test_the_exception_tells_need_free_and_largest_piece() -> None:
    failure = OutOfMemory(BASE)
    assert str(failure) == "caching: 4294967296 bytes needed, 2147483648 free, largest piece 1073741824"
    assert failure.done == ()
    later = failure.after([4, 5])
    assert (later.facts, later.done) == (BASE, (4, 5))


def test_the_record_is_flat_and_json() -> None:
    record = OomRecord.of(replace(BASE, growth_copy_bytes=2 * GIB), time_ns=2_500_000_000, request=12)
    assert record.cause is Cause.GROWTH_COPY
    flat = record.to_dict()
    assert list(flat)[:3] == ["cause", "time_s", "request"]
    assert (flat["cause"], flat["time_s"], flat["request"], flat["tag"]) == ("growth_copy", 2.5, 12, "kv")
    assert flat["free_bytes"] == 2 * GIB
    assert json.loads(json.dumps(flat)) == flat
    assert OomRecord.of(replace(BASE, tag=None), time_ns=0, request=-1).to_dict()["tag"] is None


def test_a_fixed_pool_is_helped_by_nothing_that_is_free_elsewhere() -> None:
    """Each term that would name a cause, and the same with a pool that has all of its memory: what its sequences hold
    without filling it, and parked histories, count on; the rest does not."""
    base = replace(BASE, largest_free_bytes=0, cached_free_bytes=0, driver_free_bytes=0)
    for name, cause, of_pool in (
        ("unfilled_bytes", Cause.RESERVATION, Cause.RESERVATION),
        ("rounding_bytes", Cause.RESERVATION, Cause.SHORTAGE),
        ("other_arenas_free_bytes", Cause.RESERVATION, Cause.SHORTAGE),
        ("parked_bytes", Cause.PARKED_HISTORY, Cause.PARKED_HISTORY),
        ("tenants_bytes", Cause.OTHER_TENANT, Cause.SHORTAGE),
        ("transient_bytes", Cause.RUNTIME_PEAK, Cause.SHORTAGE),
        ("pending_bytes", Cause.RUNTIME_PEAK, Cause.SHORTAGE),
    ):
        facts = replace(base, **{name: base.need_bytes})
        assert (classify(facts), classify(replace(facts, fixed_pool=True))) == (cause, of_pool), name
