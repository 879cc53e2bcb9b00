"""Groups of layers that share a block table, all of them over one pool of equal pages.

::

    layers            full   window window   full   window window          two kinds of layer, one page size
    groups            0: full, layers 0 3    1: window, layers 1 4         2: window, layers 2 5
    pool tensors      tensor 0: layer 0 | layer 1 | layer 2                group_length = 2 tensors, each shared by
                      tensor 1: layer 3 | layer 4 | layer 5                one layer of every group
    block id          one page in each tensor; it belongs to one group at a time

The rules are vLLM 0.27's (``kv_cache_utils``, ``single_type_kv_cache_manager``); :mod:`hbmtwin.allocators.form_groups`
forms the groups of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hbmtwin.allocators.records import KVLayout

GroupKind = Literal["full", "sliding_window", "chunked_local", "mamba"]
MambaMode = Literal["none", "align", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """What one layer keeps of a sequence, on one rank."""

    kind: GroupKind = "full"
    token_bytes: int = 0
    """Attention: of one token, all tensors of the layer together."""
    window: int = 0
    """``sliding_window``: tokens that a token attends to, itself included; ``chunked_local``: tokens of a chunk."""
    state_bytes: int = 0
    """``mamba``: of one state, whatever the number of tokens."""
    k_bytes: int = 0
    """Attention beside Mamba layers on Ascend: of one token's K among ``token_bytes``."""
    conv_bytes: int = 0
    """``mamba`` on Ascend: the convolution's part of ``state_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of one kind with one block table between them."""

    kind: GroupKind = "full"
    num_layers: int = 1
    """Real ones; the pool has pages for ``group_length`` layers, and the rest is padding. 0: on a pipeline stage with
    layers of other groups only."""
    block_size: int = 16
    """Tokens of one block; of a Mamba group the tokens between two states."""
    token_bytes: int = 0
    """Of one token in one layer; 0 for Mamba."""
    window: int = 0
    """``sliding_window``: the window W; ``chunked_local``: the chunk K; else 0."""
    sinks: int = 0
    """``sliding_window``: tokens at the start that are never forgotten (a research option: no engine has it)."""
    state_bytes: int = 0
    """``mamba``: of one state in one layer."""
    mamba_mode: MambaMode = "none"
    speculative_blocks: int = 0
    """``mamba``: further states for drafts."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_layers < 0:
            raise ValueError(f"a group has at least one token a block and no fewer than no layers, not {self}")
        if (self.kind in ("sliding_window", "chunked_local")) != (self.window > 0):
            raise ValueError(f"window belongs to sliding_window and chunked_local, and must be above 0 there: {self}")
        if self.sinks and self.kind != "sliding_window":
            raise ValueError(f"sinks belong to sliding_window groups: {self}")
        if self.kind == "mamba" and self.token_bytes:
            raise ValueError(f"a Mamba group keeps states, and nothing of a token: {self}")

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks of one request of *max_model_len* tokens at once, by which vLLM sizes the pool and gates admission.

        A window group holds the window and the chunk that is computed, which may start inside a block; a Mamba group a
        state, in mode ``align`` also the one that it was copied from. Mode ``all`` is counted as attention is, though a
        running request gives its old states back.
        """
        if self.kind == "sliding_window":
            sinks = -(-self.sinks // self.block_size)
            tokens = min(self.window - 1 + max_num_batched_tokens, max_model_len)
            return -(-tokens // self.block_size) + 1 + sinks
        if self.kind == "mamba" and self.mamba_mode != "all":
            return (2 if self.mamba_mode == "align" else 1) + self.speculative_blocks
        tokens = max_model_len
        if self.kind == "chunked_local":
            tokens = min(self.window + max_num_batched_tokens, max_model_len)
        return -(-tokens // self.block_size) + self.speculative_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """All groups of a model, and the pool that they share."""

    groups: tuple[KVGroup, ...]
    group_length: int
    """Pool tensors: layers that one block id holds a page for."""
    page_bytes: int
    """Of one block in one pool tensor, the same for every group."""

    @property
    def block_bytes(self) -> int:
        """Of one block id, all pool tensors together."""
        return self.group_length * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Of one token in all attention layers, where none of it is forgotten."""
        return sum(group.num_layers * group.token_bytes for group in self.groups)


def one_group(layout: KVLayout, block_size: int) -> Grouping:
    """All layers of a model without windows and states: the pool of :class:`~hbmtwin.allocators.paged.PagedPolicy`."""
    token_bytes = layout.layer_token_bytes
    group = KVGroup(num_layers=layout.num_layers, block_size=block_size, token_bytes=token_bytes)
    return Grouping(groups=(group,), group_length=layout.num_layers, page_bytes=block_size * token_bytes)
