"""What the comparison asks of a block manager, and the pools that it makes them manage.

::

    arrive -> [ start_step -> lookup, reserve ... -> end_step -> counted ... ] -> release     the verbs, in their order
    tables, free_blocks, free_queue, events, statistics                                       what is compared
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.records import KVSequence, Release

Tables = tuple[tuple[int, ...], ...]
Event = tuple[str, int, int]
"""``(action, key, group)``; keys of two sides differ in value and are matched by the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One configuration of both sides."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    caching: bool
    watermark: float = 0.0
    reserve_full_sequence: bool = True
    max_model_len: int = 512
    max_num_batched_tokens: int = 2048
    """Bounds a chunk, and is F of the caps on admission."""
    lookahead: int = 0
    drafts: int = 0
    """Most draft tokens of a decode step."""

    @property
    def unit(self) -> int:
        """Tokens of a whole block of every group whose blocks are smaller than a sequence."""
        return lcm(*(group.block_size for group in self.groups if group.block_size < self.max_model_len))

    @property
    def aligned_block(self) -> int:
        """Where chunks of a prompt should end: block size of the Mamba groups in mode ``align``, 0 without them."""
        sizes = [group.block_size for group in self.groups if group.mamba_mode == "align"]
        return max(sizes, default=0)

    def __str__(self) -> str:
        groups = " + ".join(map(_told, self.groups))
        switches = "" if self.caching else ", caching off"
        switches += f", watermark {self.watermark}" if self.watermark else ""
        switches += "" if self.reserve_full_sequence else ", chunks admitted"
        switches += f", lookahead {self.lookahead}" if self.lookahead else ""
        switches += f", drafts {self.drafts}" if self.drafts else ""
        return f"{self.num_blocks} blocks of {groups}{switches}"


def _told(group: KVGroup) -> str:
    window = f" {group.window}" if group.window else ""
    mode = f" {group.mamba_mode}" if group.kind == "mamba" else ""
    states = f" +{group.speculative_blocks}" if group.speculative_blocks else ""
    return f"{group.kind}{window}{mode}{states}/{group.block_size}"


class Side(Protocol):
    """A block manager in the verbs of the traffic. The traffic alone writes the counts of a sequence."""

    def arrive(self, s: KVSequence, tokens: Sequence[int]) -> None:
        """A new sequence; *tokens* are those of its prompt and of all the output it may get."""
        ...

    def start_step(self) -> None:
        """Before the first verb of a step."""
        ...

    def lookup(self, s: KVSequence) -> int:
        """Tokens of its prefix that are cached."""
        ...

    def shared_boundary(self, s: KVSequence) -> int:
        """Tokens that the last look-up found in some groups beyond its answer, 0 if there were none."""
        ...

    def reserve(
        self, s: KVSequence, new: int, *, hit: int, lookahead: int, admitting: bool, others_running: bool
    ) -> bool:
        """Whether there is room for *new* tokens more."""
        ...

    def end_step(self) -> None:
        """After the last reservation of a step."""
        ...

    def counted(self, s: KVSequence) -> None:
        """Its counts have changed."""
        ...

    def release(self, s: KVSequence, why: Release) -> None:
        """It gives its blocks back."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all keys; False while something runs."""
        ...

    def tables(self, s: KVSequence) -> Tables:
        """Block ids of each group, 0 for the null block."""
        ...

    def free_blocks(self) -> int:
        """How many blocks can be taken."""
        ...

    def free_queue(self) -> tuple[int, ...]:
        """The free blocks from the head."""
        ...

    def events(self) -> list[Event] | None:
        """Cache events since the last call, None from a side that tells of none."""
        ...

    def statistics(self) -> tuple[int, ...] | None:
        """Prefix statistics: requests, queries, hits, and the same of preempted ones; None from a side without."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...


class Leaping(Side, Protocol):
    """A side that can also take many decode steps at once."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """How many steps, at most *limit*; 0 from a side that takes single steps only."""
        ...

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take them."""
        ...
