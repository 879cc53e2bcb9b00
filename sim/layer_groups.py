"""How a model's layers share the block pool of a paged policy, and how many blocks one request may need.

::

    all layers alike, none with a window    one table, a block has block_size slots in every layer       grouping: None
    windows in some layers                  vLLM's hybrid KV cache manager: groups over one pool         grouping
    windows in all layers                   one group that forgets                                       grouping
    states in some layers (Mamba-2)         as windows in some, in blocks whose page holds a state       grouping

Groups are those of the whole model. A pipeline stage has of each its own layers, and a block there the pages of the
group that has most of them; block ids and tables are the same on every stage (vLLM 0.27, ``get_kv_cache_configs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hbmtwin.allocators.form_groups import form_groups
from hbmtwin.allocators.kv_groups import Grouping, GroupKind, LayerKV, MambaMode
from hbmtwin.allocators.records import KVLayout
from hbmtwin.kernels.records import LayerType, ModelShape

KERNEL_BLOCK_SIZE = 16
"""Tokens of the smallest block that attention on CUDA reads; beside states a block is a multiple of it."""


@dataclass(frozen=True, slots=True)
class BlockPool:
    """What a block costs, and how many of them a request of full length needs."""

    layout: KVLayout
    block_size: int
    max_num_batched_tokens: int
    grouping: Grouping | None
    """None: every layer sees the whole context."""
    kinds: tuple[GroupKind | None, ...] = ()
    """What each layer of the model keeps, None for nothing; empty where all are alike."""

    @property
    def block_tensors(self) -> list[int]:
        """Bytes of a block in each tensor of the pool, in the order in which they are made."""
        if self.grouping is not None:
            return [self.grouping.page_bytes] * self.grouping.group_length
        return self.layout.block_tensors(self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all tensors together."""
        return sum(self.block_tensors)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, where none of it is forgotten."""
        return self.layout.token_bytes if self.grouping is None else self.grouping.token_bytes

    def request_blocks(self, max_model_len: int) -> int:
        """Blocks of one request of *max_model_len* tokens, over all groups, by vLLM's sizing at start."""
        if self.grouping is None:
            return -(-max_model_len // self.block_size)
        return sum(group.max_blocks(max_model_len, self.max_num_batched_tokens) for group in self.grouping.groups)

    def on_stage(self, layers: range) -> BlockPool:
        """The pool of a pipeline stage with these *layers* of the model. O(layers of the model)."""
        kept = range(self.layout.num_layers) if not self.kinds else [i for i, kind in enumerate(self.kinds) if kind]
        attention = [i for i in kept if not self.kinds or self.kinds[i] != "mamba"]
        layout = replace(self.layout, num_layers=sum(i in layers for i in attention))
        if self.grouping is None:
            return replace(self, layout=layout)
        lengths = [0] * len(self.grouping.groups)
        for i, group in zip(kept, _groups_of([self.kinds[i] for i in kept], self.grouping), strict=True):
            lengths[group] += i in layers
        groups = tuple(replace(g, num_layers=n) for g, n in zip(self.grouping.groups, lengths, strict=True))
        grouping = replace(self.grouping, groups=groups, group_length=max(lengths))
        return replace(self, layout=layout, grouping=grouping)

    def longest_request(self, blocks: int, limit: int) -> int:
        """The most tokens up to *limit* that *blocks* hold; 0 if not one fits. O(log limit)."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def block_pool(
    model: ModelShape,
    layout: KVLayout,
    *,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    sinks: int = 0,
    mamba_mode: MambaMode = "none",
    ascend: bool = False,
) -> BlockPool:
    """The pool of *model*; its windows and states make groups. Layers with a window keep *sinks* tokens at the start
    for ever. *ascend*: beside states, the block size is vllm-ascend's.

    Raise ValueError where no common page size exists.
    """
    grouping = None
    kinds: tuple[GroupKind | None, ...] = ()
    if model.mamba is not None:
        kinds = tuple(_KINDS[layer_type] for layer_type in model.layer_types)
        grouping = form_groups(
            _hybrid_layers(model, layout),
            block_size=block_size,
            max_model_len=max_model_len,
            enable_prefix_caching=mamba_mode != "none",
            mamba_mode=mamba_mode,
            mamba_chunk=model.mamba.chunk_size,
            kernel_block_size=max(KERNEL_BLOCK_SIZE, block_size),
            ascend=ascend,
        )
    elif model.layer_windows:
        kinds = tuple("sliding_window" if window else "full" for window in model.layer_windows)
        layers = [
            LayerKV(kind="sliding_window" if window else "full", token_bytes=layout.layer_token_bytes, window=window)
            for window in model.layer_windows
        ]
        grouping = form_groups(layers, block_size=block_size, max_model_len=max_model_len, enable_prefix_caching=False)
        if sinks:
            groups = tuple(replace(g, sinks=sinks if g.kind == "sliding_window" else 0) for g in grouping.groups)
            grouping = replace(grouping, groups=groups)
    return BlockPool(layout, block_size, max_num_batched_tokens, grouping, kinds)


_KINDS: dict[LayerType, GroupKind | None] = {"attention": "full", "mamba": "mamba", "mlp": None}


def _groups_of(kinds: Sequence[GroupKind | None], grouping: Grouping) -> list[int]:
    """The group of each layer that keeps something: those of a kind take its groups in turn, as they were formed."""
    own = {kind: [i for i, group in enumerate(grouping.groups) if group.kind == kind] for kind in set(kinds)}
    seen = dict.fromkeys(own, 0)
    found = []
    for kind in kinds:
        found.append(own[kind][seen[kind] % len(own[kind])])
        seen[kind] += 1
    return found


def _hybrid_layers(model: ModelShape, layout: KVLayout) -> list[LayerKV]:
    """Layers that keep something, in the order of the model."""
    assert model.mamba is not None
    tp = layout.tensor_parallel_size
    attention = LayerKV(token_bytes=layout.layer_token_bytes, k_bytes=layout.tensor_bytes[0])
    state = LayerKV(kind="mamba", state_bytes=model.mamba.state_bytes(tp), conv_bytes=model.mamba.conv_state_bytes(tp))
    return [attention if kind == "attention" else state for kind in model.layer_types if kind != "mlp"]
