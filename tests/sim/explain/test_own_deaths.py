"""A death of our own simulator, printed as torch prints it and explained, has the cause of the run's own record.

Where the message tells enough. It does not tell: which cached block a rule bars (``allocator_rule`` below what the
driver has free), the rounded size below a segment's, a tenant as small as a server's own context, and the engine's
terms (copies of growing buffers, unfilled and parked memory, transients). Those are the exceptions, each by its test.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import Cause, OomFacts, OutOfMemory, classify
from hbmtwin.allocators.records import Tag
from hbmtwin.sim.explain.failure import OWN_MOST_BYTES
from hbmtwin.sim.explain.findings import Line
from hbmtwin.sim.explain.judge import Judgement, judge
from hbmtwin.sim.explain.npu_oom import read as read_npu
from hbmtwin.sim.explain.torch_oom import read as read_torch
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

MIB = 1 << 20
GIB = 1 << 30
GIVE = 3 * 5_368_710
"""Of a sum of three figures in GiB."""
EDGE = 8 * 5_368_710
"""Of asked, free, reserved and active, each off by half a digit, and each taken for off by as much by the reader."""


def explained(message: str) -> Judgement:
    lines = [Line(1, message)]
    (judgement,) = judge([*read_torch(lines), *read_npu(lines)])
    return judgement


def death(
    flavour: str, capacity_gib: int, tenants_gib: int, cap_gib: int, conf: str, sizes: list[tuple[int, bool]]
) -> OutOfMemory | None:
    """The first failure of some tensors, of which some are freed at once again."""
    driver = HbmDriver(capacity_gib * GIB, tenants_bytes=min(tenants_gib, capacity_gib - 1) * GIB)
    limit = cap_gib * GIB if cap_gib < capacity_gib else None
    a = CachingAllocator(driver, CachingConfig(flavour=flavour, limit_bytes=limit, alloc_conf=conf))
    last: int | None = None
    try:
        for mib, frees in sizes:
            handle = a.malloc(mib * MIB - 512, tag=Tag.KV)
            if frees and last is not None:
                a.free(last)
                last = None
            else:
                last = handle
    except OutOfMemory as failure:
        return failure
    return None


def told_enough(facts: OomFacts, family: str) -> bool:
    """Whether the message tells what the record knows: see the head of this file."""
    free = facts.driver_free_bytes + facts.cached_free_bytes
    if classify(facts) is Cause.ALLOCATOR_RULE:
        return facts.driver_free_bytes >= facts.need_bytes + 2 * MIB + EDGE
    visible = max(0, facts.tenants_bytes - OWN_MOST_BYTES[family])
    for edge in (facts.limit_bytes, free, free + facts.tenants_bytes):
        if edge - EDGE <= facts.need_bytes <= edge + 2 * MIB + EDGE:
            return False
    return (
        not (free + visible - EDGE <= facts.need_bytes <= free + facts.tenants_bytes + EDGE) or free >= facts.need_bytes
    )


@settings(max_examples=200, deadline=None)
@given(
    flavour=st.sampled_from(["torch_npu", "torch_cuda"]),
    capacity_gib=st.integers(8, 64),
    tenants_gib=st.sampled_from([0, 0, 3, 20]),
    cap_gib=st.integers(6, 80),
    conf=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64"]),
    sizes=st.lists(st.tuples(st.integers(12, 9000), st.booleans()), min_size=30, max_size=60),
)
def test_the_cause_is_the_records(
    flavour: str, capacity_gib: int, tenants_gib: int, cap_gib: int, conf: str, sizes: list[tuple[int, bool]]
) -> None:
    failure = death(flavour, capacity_gib, tenants_gib, cap_gib, conf, sizes)
    if failure is None:
        return
    facts, judgement = failure.facts, explained(failure.torch_message)
    for name in ("capacity_bytes", "limit_bytes", "reserved_bytes", "driver_free_bytes", "cached_free_bytes"):
        assert abs(getattr(judgement.facts, name) - getattr(facts, name)) <= GIVE, name
    assert 0 <= judgement.facts.need_bytes - facts.need_bytes + GIVE <= 2 * GIVE + 2 * MIB
    if told_enough(facts, "NPU" if flavour == "torch_npu" else "CUDA"):
        assert judgement.cause is classify(facts)


def test_most_deaths_tell_enough() -> None:
    """The property is not empty: of 200 drawn deaths all causes of an allocator appear, and few are left out."""
    seen: dict[Cause, int] = {}
    enough = deaths = 0
    for at in range(200):
        sizes = [(12 + (at * 7919 + step * 104_729) % 9000, (at + step) % 3 == 0) for step in range(60)]
        flavour = ("torch_npu", "torch_cuda")[at % 2]
        failure = death(flavour, 8 + at % 57, (0, 0, 3, 20)[at % 4], 6 + at % 75, "", sizes)
        if failure is None:
            continue
        deaths += 1
        if told_enough(failure.facts, "NPU" if flavour == "torch_npu" else "CUDA"):
            enough += 1
            cause = explained(failure.torch_message).cause
            assert cause is classify(failure.facts)
            assert cause is not None
            seen[cause] = seen.get(cause, 0) + 1
    assert deaths >= 150
    assert enough >= 0.6 * deaths
    assert set(seen) >= {Cause.NEVER_FITS, Cause.EXTERNAL_FRAGMENTATION, Cause.OTHER_TENANT, Cause.SHORTAGE}


def test_a_block_that_a_rule_bars_is_not_told() -> None:
    """The record knows that a cached block is kept for another stream; the message only sums it up."""
    a = CachingAllocator(HbmDriver(8 * GIB), CachingConfig())
    a.free(a.malloc(3 * GIB - 512, stream=1, tag=Tag.KV))
    keep = a.malloc(4 * GIB - 512, stream=1, tag=Tag.KV)
    assert keep
    a.malloc(100 * MIB, stream=1, tag=Tag.KV)
    with pytest.raises(OutOfMemory) as failed:
        a.malloc(2 * GIB, tag=Tag.KV)
    assert classify(failed.value.facts) is Cause.ALLOCATOR_RULE
    assert explained(failed.value.torch_message).cause is Cause.EXTERNAL_FRAGMENTATION


@pytest.mark.parametrize("device", ["ascend-910b4", "a100-80gb"])
def test_a_servers_death_tells_its_figures_and_not_the_engines_terms(device: str) -> None:
    overrides = [f"device.name={device}", "workload.users=300", "workload.num_prompts=300"]
    record = Twin(Scenario.load(preset="doubling", overrides=overrides)).run().oom
    assert record is not None
    facts = explained(record["torch_message"]).facts
    for name in ("capacity_bytes", "reserved_bytes", "allocated_bytes", "driver_free_bytes", "cached_free_bytes"):
        assert abs(getattr(facts, name) - record[name]) <= GIVE, name
    assert facts.growth_copy_bytes == facts.unfilled_bytes == facts.parked_bytes == 0
