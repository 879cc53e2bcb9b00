"""Prefixes that groups of sessions share: a document, a tool's manual, the few-shot examples of a tenant.

::

    prompt    | system, all share | prefix g of n | user/s/0 ...        stream of the prefix: prefix/<g>
    buckets     weight 3: prefixes 0 .. 9 of 2,000 tokens,  weight 1: prefixes 10 .. 99 of 200 tokens

A session draws a bucket by weight and in it one prefix, each as often. GuideLLM names these ``prefix_buckets``; one
bucket is vLLM's ``prefix_repetition`` and inference-perf's ``shared_prefix``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose
from hbmtwin.workloads.lengths import Length, tokens_many
from hbmtwin.workloads.records import WorkloadError

MAX_PREFIXES = 10**6


@dataclass(frozen=True, slots=True)
class PrefixBucket:
    """*prefix_count* prefixes of *prefix_tokens* each. Raise WorkloadError on a bad count or weight."""

    prefix_tokens: Length
    """Drawn once for each prefix."""
    prefix_count: int = 1
    bucket_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.prefix_count <= MAX_PREFIXES:
            raise WorkloadError(f"prefix_count is from 1 to {MAX_PREFIXES:,}, not {self.prefix_count}")
        if not 0 < self.bucket_weight < math.inf:
            raise WorkloadError(f"bucket_weight is above 0 and finite, not {self.bucket_weight}")


@dataclass(frozen=True)
class Prefixes:
    """Buckets of prefixes, which are numbered on from bucket to bucket: a distribution over these numbers.

    Raise WorkloadError for no bucket, or more than a million prefixes.
    """

    buckets: tuple[PrefixBucket, ...]

    def __post_init__(self) -> None:
        if not self.buckets:
            raise WorkloadError("give one bucket of prefixes or more")
        if self.count > MAX_PREFIXES:
            raise WorkloadError(f"buckets may have {MAX_PREFIXES:,} prefixes together, not {self.count:,}")

    @property
    def count(self) -> int:
        """Of all buckets."""
        return sum(bucket.prefix_count for bucket in self.buckets)

    def at(self, u: float) -> int:
        """The prefix at quantile *u*. O(log buckets)."""
        i = bisect_right(self._ends, u)
        count = self.buckets[i].prefix_count
        within = int((u - self._starts[i]) / self._shares[i] * count)
        return self._firsts[i] + min(max(within, 0), count - 1)

    def at_many(self, u: FloatArray) -> IntArray:
        """The same of each."""
        i = np.searchsorted(np.array(self._ends), u, side="right")
        counts = np.array([bucket.prefix_count for bucket in self.buckets], dtype=np.int64)[i]
        within = ((u - np.array(self._starts)[i]) / np.array(self._shares)[i] * counts).astype(np.int64)
        prefixes: IntArray = np.array(self._firsts, dtype=np.int64)[i] + np.minimum(np.maximum(within, 0), counts - 1)
        return prefixes

    def tokens(self, seed: int) -> IntArray:
        """Length of each prefix. O(prefixes)."""
        ids = np.arange(self.count, dtype=np.int64)
        parts = (
            tokens_many(b.prefix_tokens, seed, Purpose.PREFIX_TOKENS, ids[first : first + b.prefix_count], 0)
            for b, first in zip(self.buckets, self._firsts, strict=True)
        )
        return np.concatenate(list(parts))

    @cached_property
    def _shares(self) -> tuple[float, ...]:
        total = sum(bucket.bucket_weight for bucket in self.buckets)
        return tuple(bucket.bucket_weight / total for bucket in self.buckets)

    @cached_property
    def _starts(self) -> tuple[float, ...]:
        return (0.0, *self._ends)

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        """Of all buckets but the last."""
        return tuple(accumulate(self._shares))[:-1]

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return (0, *accumulate(bucket.prefix_count for bucket in self.buckets[:-1]))
