"""Pools with several groups of layers for the comparison, by kind; each setting is there for a rule that it shows.

::

    window    alone; beside full attention, of the same, half and twice its blocks; two windows; in any order
    chunked   beside full attention; a chunk that is no whole number of blocks, or less than one; beside a window
    mamba     none (caching off), all and align, with and without states for drafts; a chunk shorter than a block
"""

from __future__ import annotations

from typing import Any

from hbmtwin.allocators.kv_groups import GroupKind, KVGroup, MambaMode
from hbmtwin.validation.vllm.sides import Pool

PAGE_BYTES = 960
"""Of a block in one layer: divides by every block size used here."""


def full(block_size: int) -> KVGroup:
    """Full attention."""
    return KVGroup(block_size=block_size, token_bytes=PAGE_BYTES // block_size)


def window(tokens: int, block_size: int, kind: GroupKind = "sliding_window") -> KVGroup:
    """A sliding window."""
    return KVGroup(kind=kind, block_size=block_size, token_bytes=PAGE_BYTES // block_size, window=tokens)


def chunked(tokens: int, block_size: int) -> KVGroup:
    """Chunked local attention."""
    return window(tokens, block_size, "chunked_local")


def mamba(mode: MambaMode, block_size: int, states: int = 0) -> KVGroup:
    """A Mamba state, with further ones for drafts."""
    return KVGroup(
        kind="mamba", block_size=block_size, state_bytes=PAGE_BYTES, mamba_mode=mode, speculative_blocks=states
    )


def _pools(*groups: KVGroup, caching: tuple[bool, ...] = (True, False), **settings: Any) -> tuple[Pool, ...]:
    """One pool of them with prefix caching and one without."""
    return tuple(Pool(groups=groups, caching=switch, **settings) for switch in caching)


ON, OFF = (True,), (False,)
SMALL: dict[str, Any] = {"num_blocks": 60, "max_model_len": 150, "max_num_batched_tokens": 24}
MIDDLE: dict[str, Any] = {"num_blocks": 120, "max_model_len": 240, "max_num_batched_tokens": 40}
LARGE: dict[str, Any] = {"num_blocks": 400, "max_model_len": 400, "max_num_batched_tokens": 64}

WINDOW = (
    *_pools(window(10, 4), **{**SMALL, "num_blocks": 22}),
    *_pools(window(7, 1), num_blocks=40, max_model_len=40, max_num_batched_tokens=8),
    *_pools(window(5, 4), watermark=0.2, **SMALL),
    *_pools(full(4), window(6, 4), **SMALL),
    *_pools(full(4), window(6, 4), caching=ON, reserve_full_sequence=False, **SMALL),
    *_pools(window(9, 4), full(4), window(9, 4), watermark=0.1, **MIDDLE),
    *_pools(full(8), window(4, 4), **MIDDLE),
    *_pools(full(16), window(5, 4), lookahead=3, **LARGE),
    *_pools(full(4), window(13, 8), **SMALL),
    *_pools(full(4), window(6, 4), window(17, 4), **MIDDLE),
    *_pools(window(6, 4), full(8), window(21, 16), drafts=2, **LARGE),
    *_pools(window(6, 4), window(14, 4), caching=ON, **SMALL),
    *_pools(full(4), window(30, 4), caching=ON, **LARGE),
)
CHUNKED = (
    *_pools(full(4), chunked(16, 4), **SMALL),
    *_pools(full(4), chunked(10, 4), caching=ON, watermark=0.1, **MIDDLE),
    *_pools(full(4), chunked(3, 4), caching=ON, reserve_full_sequence=False, **SMALL),
    *_pools(chunked(12, 4), full(4), chunked(12, 4), **MIDDLE),
    *_pools(full(4), window(9, 4), chunked(16, 4), drafts=2, **MIDDLE),
    *_pools(full(8), chunked(64, 8), caching=ON, lookahead=2, **LARGE),
    *_pools(chunked(8, 4), caching=OFF, **{**SMALL, "num_blocks": 22}),
    *_pools(full(8), chunked(16, 4), caching=OFF, **SMALL),
)
MAMBA = (
    *_pools(full(4), mamba("none", 150), caching=OFF, **SMALL),
    *_pools(mamba("none", 240, 2), full(4), mamba("none", 240, 2), caching=OFF, drafts=2, **MIDDLE),
    *_pools(mamba("none", 150), caching=OFF, **{**SMALL, "num_blocks": 20}),
    *_pools(full(4), mamba("all", 4), caching=ON, **SMALL),
    *_pools(mamba("all", 4, 2), full(4), caching=ON, drafts=2, **MIDDLE),
    *_pools(mamba("all", 8), caching=ON, **{**SMALL, "num_blocks": 30}),
    *_pools(full(4), window(13, 8), mamba("all", 4), caching=ON, **MIDDLE),
    *_pools(full(4), mamba("align", 4), caching=ON, **SMALL),
    *_pools(mamba("align", 4, 2), mamba("align", 4, 2), full(4), caching=ON, drafts=2, **MIDDLE),
    *_pools(full(4), mamba("align", 4, 1), caching=ON, drafts=1, watermark=0.1, **{**SMALL, "num_blocks": 40}),
    *_pools(mamba("align", 4), caching=ON, reserve_full_sequence=False, **{**SMALL, "num_blocks": 20}),
    *_pools(full(16), mamba("align", 16), caching=ON, **{**LARGE, "num_blocks": 60, "max_num_batched_tokens": 10}),
    *_pools(full(4), window(6, 4), mamba("align", 4), caching=ON, **{**MIDDLE, "num_blocks": 70}),
    *_pools(full(8), window(21, 16), mamba("align", 8), caching=ON, lookahead=2, **LARGE),
)
GROUP_POOLS: dict[str, tuple[Pool, ...]] = {"window": WINDOW, "chunked": CHUNKED, "mamba": MAMBA}
