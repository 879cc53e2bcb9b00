"""Settings of the policy of several groups, and which groups vLLM cannot serve together."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from hbmtwin.allocators.kv_groups import Grouping


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroupsConfig:
    """Settings of ``PagedGroupsPolicy``. ``num_blocks`` counts the null block."""

    num_blocks: int
    max_model_len: int
    grouping: Grouping
    enable_prefix_caching: bool = False
    """Full blocks keep their key when they are freed, and are found again by a sequence with the same prefix."""
    watermark: float = 0.0
    """Part of the pool that admitting leaves free while others run."""
    reserve_full_sequence: bool = True
    """Admit a sequence only if all its present tokens fit, though a chunk of them is scheduled."""
    max_num_batched_tokens: int = 2048
    """The most tokens of a step: what a group with windows may hold beside its window."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("max_model_len", 1), ("max_num_batched_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")
        if not self.grouping.groups:
            raise ValueError("grouping has no group: a model without KV needs no pool")
        sizes = [group.block_size for group in self.grouping.groups]
        for group in self.grouping.groups:
            if group.kind == "mamba" and (group.mamba_mode == "none") == self.enable_prefix_caching:
                wanted = "'all' or 'align'" if self.enable_prefix_caching else "'none'"
                raise ValueError(
                    f"grouping: mamba_mode must be {wanted} with enable_prefix_caching = {self.enable_prefix_caching}, "
                    f"not {group.mamba_mode!r}; form_groups chooses it"
                )
            if not self.enable_prefix_caching:
                continue
            if group.sinks:
                raise ValueError(
                    "grouping: sinks go without prefix caching, for what a hit would have to hold is not known of any "
                    "engine; set enable_prefix_caching = False"
                )
            if group.kind == "chunked_local" and group.block_size != lcm(*sizes):
                raise ValueError(
                    f"grouping: vLLM looks chunked local attention up in blocks of the common size {lcm(*sizes)} only, "
                    f"not {group.block_size}; give all groups one block_size, or set enable_prefix_caching = False"
                )
            if group.mamba_mode == "align" and group.block_size != gcd(*sizes):
                raise ValueError(
                    f"grouping: with blocks of {gcd(*sizes)} tokens beside Mamba states every {group.block_size}, "
                    "hits of vLLM end inside a block and copy it, which is not modelled; give all groups one block_size"
                )
