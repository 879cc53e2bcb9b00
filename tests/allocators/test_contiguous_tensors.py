"""Contiguous KV whose tensors differ in size: V of another dtype, scales of their own, or one latent tensor."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.allocators.buffers import BufferStore
from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVDtype, KVLayout, KVSequence, KVUsage, Release, Work

INT8, INT4 = KVDtype(8, "token"), KVDtype(4)
K_AND_V = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
V_IN_INT4 = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256, v_dtype=INT4)
"""K 512 bytes a token, V 128."""
WITH_SCALES = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256, dtype=INT8)
"""K and V 256 bytes a token, then their scales, 4 bytes each."""
LATENT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=576, v_head_dim=0)
"""MLA: 1,152 bytes a token, for K and V together."""
SCALED_K = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256, dtype=INT8, v_dtype=KVDtype(16))
"""K 256 bytes a token, V 512, the scale of K 4."""
LAYOUTS = [K_AND_V, V_IN_INT4, WITH_SCALES, LATENT, SCALED_K]


def policy_of(
    layout: KVLayout, cls: type[ContiguousPolicy] = ContiguousPolicy, region_bytes: int = 1 << 26, **settings: Any
) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(1 << 26), PooledConfig(limit_bytes=region_bytes))
    arena.take_work()
    return cls(layout, arena, ContiguousConfig(**{"max_model_len": 4096} | settings))


def sequence(id: int, tokens: int) -> KVSequence:
    return KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=4096)


def step(policy: ContiguousPolicy, s: KVSequence) -> None:
    policy.reserve(s, s.num_tokens - s.num_computed_tokens, admitting=s.num_computed_tokens == 0)
    for layer in range(policy.layout.num_layers):
        policy.grow_layer(layer)
        policy.check()
    policy.end_step()
    s.num_computed_tokens = s.num_tokens
    s.num_tokens += 1
    policy.check()


def shortage(policy: ContiguousPolicy) -> OomFacts | None:
    """Let all layers grow; the facts if memory ends."""
    try:
        for layer in range(policy.layout.num_layers):
            policy.grow_layer(layer)
    except OutOfMemory as error:
        return error.facts
    return None


def operations_of_a_step(policy: ContiguousPolicy, s: KVSequence) -> list[tuple[str, int]]:
    operations: list[tuple[str, int]] = []
    policy.arena.observer = lambda op, id, size, *rest: operations.append((op, size))
    step(policy, s)
    return operations


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (K_AND_V, [512, 512]),
        (V_IN_INT4, [512, 128]),
        (WITH_SCALES, [256, 256, 4, 4]),
        (LATENT, [1152]),
        (SCALED_K, [256, 512, 4]),
    ],
)
def test_each_tensor_is_made_in_its_own_size_and_grown_in_the_order_of_the_program(
    layout: KVLayout, sizes: list[int]
) -> None:
    policy, s = policy_of(layout), sequence(1, 10)
    assert operations_of_a_step(policy, s) == [("malloc", 10 * size) for size in sizes] * 2
    grown = [operation for size in sizes for operation in (("malloc", 11 * size), ("free", 0))]
    assert operations_of_a_step(policy, s) == grown * 2
    assert policy.arena.take_work().copied_bytes == 10 * 2 * sum(sizes)
    assert [(b.size, b.token_bytes) for b in policy.walk()] == [(b.size, b.size) for b in policy.walk()]
    assert policy.usage() == KVUsage(22 * sum(sizes), 0, 22 * sum(sizes), 0, 0, 0, 0)


def test_only_equal_tensors_that_stand_side_by_side_are_regrown_together() -> None:
    calls: list[tuple[int, int]] = []

    class Arena(PooledAllocator):
        def regrow(self, handles: Any, size: int) -> list[int]:
            calls.append((len(handles), size))
            return super().regrow(handles, size)

    for layout in LAYOUTS:
        policy = ContiguousPolicy(
            layout, Arena(HbmDriver(1 << 26), PooledConfig(1 << 26)), ContiguousConfig(max_model_len=64)
        )
        s = sequence(1, 9)
        step(policy, s)
        calls.clear()
        step(policy, s)
        assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
        assert (
            calls[: len(calls) // 2]
            == {
                K_AND_V: [(2, 5120)],
                V_IN_INT4: [(1, 5120), (1, 1280)],
                WITH_SCALES: [(2, 2560), (2, 40)],
                LATENT: [(1, 11_520)],
                SCALED_K: [(1, 2560), (1, 5120), (1, 40)],
            }[layout]
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("growth", ["static", "exact", "doubling"])
@pytest.mark.parametrize("copy_scope", ["tensor", "step"])
def test_merged_buffers_hold_all_tensors_of_all_layers(layout: KVLayout, growth: str, copy_scope: str) -> None:
    apart, merged = (
        policy_of(layout, growth=growth, tensors=tensors, copy_scope=copy_scope) for tensors in ("per_layer", "merged")
    )
    for policy in (apart, merged):
        s = sequence(1, 60)
        for _ in range(6):
            step(policy, s)
    assert len(list(merged.walk())) == 1
    assert len(list(apart.walk())) == 2 * len(layout.tensor_bytes)
    assert merged.usage() == apart.usage()
    assert merged.usage().token == 65 * layout.token_bytes
    copies = [policy.take_work().plus(policy.arena.take_work()) for policy in (apart, merged)]
    assert copies[0] == copies[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_copies_have_the_sizes_of_their_tensors(layout: KVLayout) -> None:
    policy, s = policy_of(layout, copy_scope="step"), sequence(1, 10)
    step(policy, s)
    policy.reserve(s, 1)
    policy.grow_layer(0)
    assert policy.usage().growth_copy == 10 * layout.layer_token_bytes
    assert policy.usage().held == 21 * layout.layer_token_bytes
    old = [b.size for b in policy.walk() if b.state == "growth_copy"]
    assert sorted(old) == sorted(10 * size for size in layout.tensor_bytes)
    policy.check()
    policy.abort_step()
    assert policy.usage() == KVUsage(10 * layout.token_bytes, 0, 10 * layout.token_bytes, 0, 0, 0, 0)
    assert policy.take_work() == Work(copied_bytes=10 * layout.layer_token_bytes)
    policy.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copy_scope", ["tensor", "step"])
def test_wherever_memory_ends_the_books_close(layout: KVLayout, copy_scope: str) -> None:
    # From just what stands there to all that a step needs, in units of the pool.
    standing = sum(-(-10 * size // 512) * 512 for size in layout.tensor_bytes) * layout.num_layers
    failures = set()
    for spare in range(0, standing + 8192, 512):
        policy, s = policy_of(layout, region_bytes=standing + spare, copy_scope=copy_scope), sequence(1, 10)
        step(policy, s)
        policy.reserve(s, 1)
        if (facts := shortage(policy)) is not None:
            policy.check()
            failures.add(facts.asked_bytes)
            usage, unit = policy.usage(), facts.asked_bytes // 11
            assert facts.owner_bytes == usage.held + usage.growth_copy
            assert facts.growth_copy_bytes == usage.growth_copy + 10 * unit
            assert facts.unfilled_bytes == usage.unfilled
            policy.release(s, Release.DROP)
            policy.check()
            assert not any(policy.usage())
    assert 11 * layout.tensor_bytes[0] in failures


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_is_moved_in_every_tensor(layout: KVLayout) -> None:
    policy, s = policy_of(layout, growth="static", retention="truncate(10)"), sequence(1, 10)
    step(policy, s)
    step(policy, s)
    assert policy.take_work() == Work(copied_bytes=9 * layout.token_bytes)


# Planted bugs


class OneUnitForAll(ContiguousPolicy):
    """Takes every tensor of a layer for as large as the first."""

    class Store(BufferStore):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._runs = [(self._units[0], len(self._units))]

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: ContiguousConfig) -> None:
        super().__init__(layout, arena, config)
        self._store = self.Store(layout, arena, config.tensors, config.copy_scope)


@pytest.mark.parametrize("layout", [V_IN_INT4, WITH_SCALES, SCALED_K])
def test_one_size_for_all_tensors_is_noticed(layout: KVLayout) -> None:
    step(policy_of(K_AND_V, OneUnitForAll), sequence(1, 10))
    with pytest.raises(AssertionError):
        step(policy_of(layout, OneUnitForAll), sequence(1, 10))
