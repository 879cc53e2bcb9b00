"""Settings of :class:`~hbmtwin.allocators.radix.RadixPolicy`, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass

from hbmtwin.allocators.radix_tree import EVICTION_POLICIES, EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixConfig:
    """Settings of SGLang's token pool. ``num_blocks`` counts the dummy page; ``block_size`` is SGLang's page size."""

    num_blocks: int
    max_model_len: int
    block_size: int = 1
    """SGLang's own default; on Ascend it is 128."""
    enable_prefix_caching: bool = False
    """Keep the tree. SGLang does, unless told ``--disable-radix-cache``."""
    eviction_policy: EvictionPolicy = "lru"
    """Which leaf of the tree goes first: SGLang's ``--radix-eviction-policy``."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("max_model_len", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.eviction_policy not in EVICTION_POLICIES:
            known = ", ".join(EVICTION_POLICIES)
            raise ValueError(f"eviction_policy must be one of {known}, not {self.eviction_policy!r}")
