"""Prefix sharing measured in one pass: how often blocks are used again, and what prefix caches of each size would hit.

The caches are those of ``reuse_curve.py``, an id stands for its block and all before it, and the last, partly filled
block has one too. Prompts that no other can share are counted without being kept: memory is one count for each
different block of the others, and the caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.records import Span
from hbmtwin.workloads.statistics.reuse_curve import IdealCache, ReuseCurve

CAPACITIES: Final = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, None)


@dataclass(frozen=True, slots=True)
class ReuseStatistics:
    """How much of the prompts is in earlier ones."""

    block_size: int
    """Tokens of a block."""
    used_once_share: float
    """Share of the different blocks that only one request has."""
    reused_references_share: float
    """Share of all blocks of prompts, counted each time, that at least two requests have."""
    commonest_share: float
    """Share of the requests that have the block which most of them have: 1 where all share a system prompt."""
    half_cached_share: float
    """Share of the requests of which an endless cache holds more than half of the blocks."""
    nine_tenths_cached_share: float
    curve: ReuseCurve
    """Blocks hit by capacity, ids touched last to first: the order in which vLLM and SGLang give them back."""
    first_to_last: ReuseCurve
    """The same, ids touched first to last."""


class ReuseMeter:
    """Takes chains in order of arrival. O(blocks x capacities)."""

    def __init__(self, block_size: int, capacities: Sequence[int | None] = CAPACITIES) -> None:
        self._block_size = block_size
        self._capacities = tuple(capacities)
        self._uses: dict[Hashable, int] = {}
        orders = (True, False)
        self._caches = [[IdealCache(c, order) for c in capacities if c is not None] for order in orders]
        self._hits = [[0 for c in capacities if c is not None] for _ in orders]
        self._endless_hits = 0
        self._requests = 0
        self._private_blocks = 0
        self._half = 0
        self._nine_tenths = 0

    def add_private(self, spans: tuple[Span, ...]) -> None:
        """One more prompt, which begins as no other does: it hits nothing, and takes room from others.

        Before the first shared prompt nobody is there to lose room to it, and it is the first to go.
        """
        self._requests += 1
        self._private_blocks += -(-sum(length for _, _, length in spans) // self._block_size)
        if self._uses:
            self._serve(self.chain(spans))

    def chain(self, spans: tuple[Span, ...]) -> list[bytes]:
        """The blocks of a prompt. O(blocks)."""
        return block_chain(spans, self._block_size, partial=True)

    def add(self, chain: Sequence[Hashable]) -> None:
        """One more prompt, by its blocks."""
        uses = self._uses
        known = 0
        for block in chain:
            if block not in uses:
                break
            known += 1
        for block in chain:
            uses[block] = uses.get(block, 0) + 1
        self._requests += 1
        self._endless_hits += known
        self._half += 2 * known > len(chain)
        self._nine_tenths += 10 * known > 9 * len(chain)
        self._serve(chain)

    def _serve(self, chain: Sequence[Hashable]) -> None:
        for caches, hits in zip(self._caches, self._hits, strict=True):
            for i, cache in enumerate(caches):
                hits[i] += cache.serve(chain)

    def statistics(self) -> ReuseStatistics | None:
        """Of all prompts so far; None where none can be shared."""
        if not self._uses:
            return None
        private = self._private_blocks
        references, distinct = sum(self._uses.values()) + private, len(self._uses) + private
        once = sum(1 for n in self._uses.values() if n == 1) + private
        curves = []
        for found in self._hits:
            bounded = iter(found)
            hits = tuple(self._endless_hits if c is None else next(bounded) for c in self._capacities)
            curves.append(ReuseCurve(self._capacities, hits, references, distinct))
        return ReuseStatistics(
            block_size=self._block_size,
            used_once_share=once / distinct,
            reused_references_share=1 - once / references,
            commonest_share=max(self._uses.values()) / self._requests,
            half_cached_share=self._half / self._requests,
            nine_tenths_cached_share=self._nine_tenths / self._requests,
            curve=curves[0],
            first_to_last=curves[1],
        )
