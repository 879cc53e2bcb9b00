"""Look-up of a prefix over several groups: the longest length on which all kinds of layers agree.

::

    limit 12, block size 4        full finds 12 tokens   | 1 | 2 | 3 |
                                  window finds 8 of them | 0 | 5 |
    hit 8                         full                   | 1 | 2 |      cut
                                  window                 | 0 | 5 |
    shared boundary 12            further than the hit: worth a Mamba state for who comes next

The rules are vLLM 0.27's ``HybridKVCacheCoordinator.find_longest_cache_hit``. vLLM cuts the first class of full
attention to the hit; as vllm-ascend does, all are cut here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hbmtwin.allocators.group_managers import NULL, Cached, GroupManager
from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.prefix_cache import PrefixCache
from hbmtwin.allocators.records import KVSequence


class Hit(NamedTuple):
    """What a prefix cache holds of a sequence."""

    tokens: int
    blocks: tuple[Sequence[int], ...]
    """Of each group, null where nothing is needed."""
    shared_boundary: int
    """The longest length that a class of groups holds, if that is more than ``tokens``; else 0."""


class GroupLookup:
    """Finds prefixes in a cache whose groups have these managers."""

    def __init__(self, managers: Sequence[GroupManager], cache: PrefixCache) -> None:
        self._cache = cache
        self._num_groups = len(managers)
        classes: dict[KVGroup, list[int]] = {}
        for index, manager in enumerate(managers):
            classes.setdefault(replace(manager.group, num_layers=1), []).append(index)
        kinds = [(managers[indices[0]], indices) for indices in classes.values()]
        self._classes = sorted(kinds, key=lambda kind: kind[0].group.kind != "full")
        self._one_pass = len(kinds) == 1 or (len(kinds) == 2 and self._classes[0][0].group.kind == "full")

    def find(self, s: KVSequence, limit: int) -> Hit:
        """The longest prefix of at most *limit* tokens. O(limit / block size * classes), times the passes needed."""
        keys = self._cache.keys.of(s, max(0, limit) // self._cache.block_size)
        found: dict[int, list[tuple[int, ...]]] = {}
        length, longest, shortened = max(0, limit), 0, True
        while shortened:
            current = length
            for place, (manager, groups) in enumerate(self._classes):
                if manager.group.kind == "full" and place in found:
                    current = min(current, len(found[place]) * manager.size)
                    continue
                found[place] = manager.find(self._cached(keys, manager, groups), current, (NULL,) * len(groups))
                current = len(found[place]) * manager.size
                longest = max(longest, current)
            shortened = current < length and not self._one_pass
            length = current
        blocks: list[Sequence[int]] = [()] * self._num_groups
        for place, (manager, groups) in enumerate(self._classes):
            for column, group in enumerate(groups):
                blocks[group] = [row[column] for row in found[place][: length // manager.size]]
        return Hit(length, tuple(blocks), longest if longest > length else 0)

    def _cached(self, keys: Sequence[int], manager: GroupManager, groups: Sequence[int]) -> Cached:
        """Blocks by place for one class: the first that was given the key, in each of its groups."""
        block_of, count = self._cache.block_of, self._num_groups
        ratio = manager.size // self._cache.block_size

        def cached(index: int) -> tuple[int, ...] | None:
            last = (index + 1) * ratio - 1
            if last >= len(keys):
                return None
            found = []
            for group in groups:
                block = block_of.get(keys[last] * count + group)
                if block is None:
                    return None
                found.append(block)
            return tuple(found)

        return cached
