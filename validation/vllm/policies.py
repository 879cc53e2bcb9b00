"""Our paged policies as one side of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.kv_groups import Grouping
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixStats
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release
from hbmtwin.validation.vllm.groups import PAGE_BYTES
from hbmtwin.validation.vllm.sides import Event, Pool, Tables

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
ARENA_BYTES = 64 << 20


class Policy(Protocol):
    """What is asked of either policy."""

    on_cache_event: Callable[[CacheEvent], None] | None

    def lookup(self, s: KVSequence) -> int:
        """As in KVPolicy; so are the next ones."""
        ...

    def reserve(
        self, s: KVSequence, new: int, *, hit: int, lookahead: int, admitting: bool, others_running: bool
    ) -> Granted | Refused:
        """Room for tokens."""
        ...

    def end_step(self) -> None:
        """The reservations stand."""
        ...

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """Steps that are certain."""
        ...

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take them."""
        ...

    def release(self, s: KVSequence, why: Release) -> None:
        """Take its blocks back."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all keys."""
        ...

    def free_queue(self) -> tuple[int, ...]:
        """Free blocks from the head."""
        ...

    def usage(self) -> KVUsage:
        """The books."""
        ...

    def prefix_stats(self) -> PrefixStats:
        """Sums since the start."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...


class PolicySide:
    """Either policy; tables are told by each in its way."""

    def __init__(self, policy: Policy, caching: bool, block_bytes: int, tables: Callable[[KVSequence], Tables]) -> None:
        self.policy = policy
        self._tables = tables
        self.caching = caching
        self.block_bytes = block_bytes
        self.told: list[Event] = []
        policy.on_cache_event = self._hear

    def _hear(self, event: CacheEvent) -> None:
        self.told.append((event.action, event.key, event.group))

    def arrive(self, s: KVSequence, tokens: Sequence[int]) -> None:
        """Nothing: spans say what the tokens are."""

    def start_step(self) -> None:
        """Nothing: a step of ours ends by itself."""

    def lookup(self, s: KVSequence) -> int:
        """The policy's."""
        return self.policy.lookup(s)

    def shared_boundary(self, s: KVSequence) -> int:
        """0: one group has nothing to share."""
        return 0

    def reserve(
        self, s: KVSequence, new: int, *, hit: int, lookahead: int, admitting: bool, others_running: bool
    ) -> bool:
        """The policy's."""
        answer = self.policy.reserve(
            s, new, hit=hit, lookahead=lookahead, admitting=admitting, others_running=others_running
        )
        return isinstance(answer, Granted)

    def end_step(self) -> None:
        """The policy's."""
        self.policy.end_step()

    def counted(self, s: KVSequence) -> None:
        """Nothing: the sequence is told with every verb."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The policy's."""
        return self.policy.horizon(decoding, limit)

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """The policy's."""
        self.policy.advance(decoding, k)

    def release(self, s: KVSequence, why: Release) -> None:
        """The policy's."""
        self.policy.release(s, why)

    def reset_prefix_cache(self) -> bool:
        """The policy's."""
        return self.policy.reset_prefix_cache()

    def tables(self, s: KVSequence) -> Tables:
        """Block ids of each group."""
        return self._tables(s)

    def free_queue(self) -> tuple[int, ...]:
        """The policy's."""
        return self.policy.free_queue()

    def free_blocks(self) -> int:
        """By the books; the null block stands among them."""
        usage = self.policy.usage()
        return (usage.pool + usage.cached) // self.block_bytes - 1

    def events(self) -> list[Event] | None:
        """What the policy told since the last call; without prefix caching there is nothing to tell."""
        told, self.told = self.told, []
        return told if self.caching else None

    def statistics(self) -> tuple[int, ...] | None:
        """The policy's sums, with prefix caching."""
        return tuple(self.policy.prefix_stats()) if self.caching else None

    def check(self) -> None:
        """The policy's."""
        self.policy.check()


class PagedSide(PolicySide):
    """The policy of one full-attention group."""

    def __init__(self, policy: PagedPolicy) -> None:
        self.paged = policy
        block_bytes = policy.config.block_size * LAYOUT.token_bytes
        super().__init__(policy, policy.config.enable_prefix_caching, block_bytes, lambda s: (policy.block_ids(s),))


class GroupsSide(PolicySide):
    """The policy of several groups."""

    def __init__(self, policy: PagedGroupsPolicy) -> None:
        self.groups = policy
        block_bytes = policy.config.grouping.block_bytes
        super().__init__(policy, policy.config.enable_prefix_caching, block_bytes, policy.tables)

    def shared_boundary(self, s: KVSequence) -> int:
        """The policy's."""
        return self.groups.shared_boundary(s)


def _arena() -> PooledAllocator:
    return PooledAllocator(HbmDriver(ARENA_BYTES), PooledConfig(limit_bytes=ARENA_BYTES))


def paged_policy(pool: Pool) -> PagedPolicy:
    """The policy of a pool with one full-attention group."""
    (group,) = pool.groups
    config = PagedConfig(
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        block_size=group.block_size,
        watermark=pool.watermark,
        reserve_full_sequence=pool.reserve_full_sequence,
        enable_prefix_caching=pool.caching,
    )
    return PagedPolicy(LAYOUT, _arena(), config)


def groups_policy(pool: Pool) -> PagedGroupsPolicy:
    """The policy of a pool with any groups."""
    config = PagedGroupsConfig(
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        grouping=Grouping(groups=pool.groups, group_length=1, page_bytes=PAGE_BYTES),
        enable_prefix_caching=pool.caching,
        watermark=pool.watermark,
        reserve_full_sequence=pool.reserve_full_sequence,
        max_num_batched_tokens=pool.max_num_batched_tokens,
    )
    return PagedGroupsPolicy(LAYOUT, _arena(), config)
