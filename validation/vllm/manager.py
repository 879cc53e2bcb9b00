"""vLLM's own KVCacheManager as one side of the comparison: its groups, verbs, events and statistics.

::

    KVGroup         full                sliding_window      chunked_local               mamba
    vLLM's spec     FullAttentionSpec   SlidingWindowSpec   ChunkedLocalAttentionSpec   MambaSpec
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, lcm
from types import SimpleNamespace
from typing import Any

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.records import KVSequence, Release
from hbmtwin.validation.vllm.sides import Event, Pool, Tables


class Vllm:
    """vLLM's manager of one pool, told what a paged policy is told."""

    def __init__(self, core: Mapping[str, Any], pool: Pool) -> None:
        self.core, self.pool = core, pool
        config, whole, hash_block_size, self.hasher = cache_of(core, pool)
        self.manager = core["kv_cache_manager"].KVCacheManager(
            config,
            max_model_len=pool.max_model_len,
            scheduler_block_size=whole,
            hash_block_size=hash_block_size,
            max_in_flight_tokens=pool.max_num_batched_tokens,
            enable_caching=pool.caching,
            watermark=pool.watermark,
            log_stats=True,
            enable_kv_cache_events=pool.caching,
        )
        self.status = core["request"].RequestStatus
        self.requests: dict[int, Any] = {}
        self.tokens: dict[int, Sequence[int]] = {}
        self.found: dict[int, tuple[Any, int]] = {}
        """Blocks and tokens of the last look-up of each that waits."""
        self.stored: set[tuple[int, int]] = set()
        """``(key, group)`` of all full blocks that got a key."""
        self.sums = [0] * 6

    def arrive(self, s: KVSequence, tokens: Sequence[int]) -> None:
        """Its Request, with the prompt only."""
        asked = SimpleNamespace(max_tokens=self.pool.max_model_len, extra_args=None, skip_reading_prefix_cache=None)
        prompt = list(tokens[: s.num_tokens])
        self.requests[s.id] = self.core["request"].Request(
            str(s.id), prompt, asked, None, arrival_time=0.0, block_hasher=self.hasher
        )
        self.tokens[s.id] = tokens

    def start_step(self) -> None:
        """As its scheduler says it."""
        self.manager.new_step_starts()

    def end_step(self) -> None:
        """Nothing: a step of vLLM ends with the next one."""

    def lookup(self, s: KVSequence) -> int:
        """``get_computed_blocks``."""
        request = self.requests[s.id]
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        self.found[s.id] = blocks, hit
        return int(hit)

    def shared_boundary(self, s: KVSequence) -> int:
        """What ``get_computed_blocks`` said besides."""
        return int(self.requests[s.id].shared_prefix_boundary)

    def reserve(
        self, s: KVSequence, new: int, *, hit: int, lookahead: int, admitting: bool, others_running: bool
    ) -> bool:
        """``allocate_slots``, and at an admission what the scheduler does next to it."""
        request = self.requests[s.id]
        if not admitting:
            return self.manager.allocate_slots(request, new, num_lookahead_tokens=lookahead) is not None
        blocks, real_hit = self.found.pop(s.id)
        granted = self.manager.allocate_slots(
            request,
            new,
            real_hit,
            blocks,
            num_lookahead_tokens=lookahead,
            full_sequence_must_fit=self.pool.reserve_full_sequence,
            has_scheduled_reqs=others_running,
        )
        if granted is not None:
            self.manager.record_prefix_cache_stats(request, real_hit)
            request.status = self.status.RUNNING
        return granted is not None

    def counted(self, s: KVSequence) -> None:
        """Computed tokens are the same, and sampled ones are appended."""
        request = self.requests[s.id]
        request.num_computed_tokens = s.num_computed_tokens
        if request.num_tokens < s.num_tokens:
            request.append_output_token_ids(list(self.tokens[s.id][request.num_tokens : s.num_tokens]))

    def release(self, s: KVSequence, why: Release) -> None:
        """``free``."""
        request = self.requests[s.id]
        self.manager.free(request)
        if why is Release.PREEMPT:
            request.status = self.status.PREEMPTED
            request.num_preemptions += 1
        else:
            del self.requests[s.id], self.tokens[s.id]

    def reset_prefix_cache(self) -> bool:
        """Its own."""
        return bool(self.manager.reset_prefix_cache())

    def tables(self, s: KVSequence) -> Tables:
        """Its tables."""
        return tuple(map(tuple, self.manager.get_block_ids(str(s.id))))

    def free_blocks(self) -> int:
        """Free blocks."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def free_queue(self) -> tuple[int, ...]:
        """The free queue from its head."""
        return tuple(block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks())

    def events(self) -> list[Event]:
        """One for each block; vLLM tells of a key by the last 64 bits of its hash.

        A full-attention group whose blocks are larger than the unit of keys also tells of a key inside the last block
        of a prompt, which no look-up of these groups asks for: those are left out.
        """
        found: list[Event] = []
        for event in self.manager.take_events():
            action = type(event).__name__
            if action == "AllBlocksCleared":
                found.append(("cleared", -1, 0))
                continue
            group = int(event.group_idx)
            keys = [(int(key), group) for key in event.block_hashes or ()]
            if action == "BlockStored":
                if event.block_size == self.pool.groups[group].block_size:
                    self.stored.update(keys)
                    found += [("stored", *key) for key in keys]
            else:
                found += [("removed", *key) for key in keys if key in self.stored]
        return found

    def statistics(self) -> tuple[int, ...]:
        """Sums since the start of requests, queries and hits, and of those of preempted ones."""
        now = self.manager.make_prefix_cache_stats()
        names = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
        self.sums = [total + int(getattr(now, name)) for total, name in zip(self.sums, names, strict=True)]
        return tuple(self.sums)

    def check(self) -> None:
        """Nothing: vLLM has its own assertions."""


def cache_of(core: Mapping[str, Any], pool: Pool) -> tuple[Any, int, int, Any]:
    """Its KVCacheConfig, the scheduler's block size, the size of the blocks that have keys, and what makes them."""
    interface, utils = core["kv_cache_interface"], core["kv_cache_utils"]
    config = interface.KVCacheConfig(
        num_blocks=pool.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            interface.KVCacheGroupSpec([f"layer{i}"], spec_of(interface, group)) for i, group in enumerate(pool.groups)
        ],
    )
    sizes = [group.block_size for group in pool.groups]
    whole, keyed = lcm(*sizes), gcd(*sizes)
    sha256 = core["hashing"].sha256
    utils.init_none_hash(sha256)
    # As resolve_kv_cache_block_sizes has it: keys are as fine as the smallest block, if there are keys at all.
    hash_block_size = keyed if pool.caching else whole
    hasher = utils.get_request_block_hasher(hash_block_size, sha256) if pool.caching else None
    return config, whole, hash_block_size, hasher


def spec_of(interface: Any, group: KVGroup) -> Any:
    """The record by which vLLM knows such a group; sizes of heads and states do not matter for places of blocks."""
    if group.kind == "mamba":
        return interface.MambaSpec(
            block_size=group.block_size,
            shapes=((1,),),
            dtypes=(None,),
            mamba_cache_mode=group.mamba_mode,
            num_speculative_blocks=group.speculative_blocks,
        )
    common = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": None}
    if group.kind == "sliding_window":
        return interface.SlidingWindowSpec(**common, sliding_window=group.window)
    if group.kind == "chunked_local":
        return interface.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.window)
    return interface.FullAttentionSpec(**common)
