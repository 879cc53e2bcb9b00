"""What prompts have in common with earlier ones, measured: who goes on from what, after how long, how far.

::

    block      last touched by        a new prompt  0 1 5 6 9:  0 1 5 6 are known, request 7 touched 6 last:
    0 1        request 9              it goes on from request 7, 4 of its 5 blocks are old,
    5 6        request 7              and the wait is from 7's arrival to its own

A trace that lasts a time T cannot show waits that are longer, and shows a wait w only of prompts that came w or more
after its start: each is counted as often as all prompts are to those. So a model of an hour does not think that nobody
ever goes on in the first minutes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.learned.model import Sharing
from hbmtwin.workloads.records import Request, user_stream

_SYSTEM_SHARE = 0.9
"""Share of all prompts that a system prompt is in."""
_SEEN_SHARE = 0.8
"""Waits up to this part of the trace are learned: of longer ones too few prompts could show any."""
_LEAST_SHARE = 0.001
_CLASS_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_QUANTILES = 41


class SharingMeter:
    """Takes the requests of one client in order. Keeps an entry for each different block of shared prompts, and two
    numbers a request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}
        self._sessions: dict[int, int] = {}
        self._old_blocks = array("q")
        self._parents = array("q")
        self._is_turn = bytearray()
        """Whether the trace itself says that a request goes on from another."""

    def add(self, r: Request) -> None:
        """One more request. O(blocks)."""
        number = len(self._old_blocks)
        chain: Sequence[bytes] = () if _alone(r) else block_chain(r.spans, self._block_size, partial=True)
        old = 0
        for block in chain:
            if block not in self._last:
                break
            old += 1
        parent = self._last[chain[old - 1]] if old else -1
        if r.turn:
            parent = self._sessions.get(r.session, parent)
        if r.has_next or r.turn:
            self._sessions[r.session] = number
        for block in chain:
            self._last[block] = number
            self._seen[block] = self._seen.get(block, 0) + 1
        self._old_blocks.append(old)
        self._parents.append(parent)
        self._is_turn.append(r.turn > 0)

    def sharing(self, times_ns: IntArray, prompts: IntArray) -> Sharing | None:
        """What was measured; None where next to nothing is shared. O(requests log requests)."""
        count = len(times_ns)
        system_blocks = sum(1 for seen in self._seen.values() if seen >= _SYSTEM_SHARE * count and seen > 1)
        old, parents = np.array(self._old_blocks), np.array(self._parents)
        is_turn = np.frombuffer(self._is_turn, dtype=np.uint8) > 0
        follows = (parents >= 0) & (is_turn | (old > system_blocks))
        blocks = -(-prompts // self._block_size)
        waits_s = np.where(follows, times_ns - times_ns[np.maximum(parents, 0)], 0) / 1e9
        since_s = (times_ns - times_ns[0]) / 1e9
        weights = np.where(follows & (waits_s <= _SEEN_SHARE * since_s[-1]), 1.0, 0.0)
        could_show = count - np.searchsorted(since_s, waits_s)
        weights *= count / np.maximum(could_show, 1)
        system_tokens = system_blocks * self._block_size
        if weights.sum() < _LEAST_SHARE * count:
            if not system_tokens:
                return None
            return Sharing(self._block_size, system_tokens, (0.0,), ((0.0, 0.0),), (0.0, 0.0))
        bounds = sorted({int(bound) for bound in np.quantile(prompts, _CLASS_BOUNDS)})
        classes = np.searchsorted(np.array(bounds), prompts, side="right")
        shares, parts = [], []
        for number in range(len(bounds) + 1):
            chosen = classes == number
            shares.append(round(min(1.0, float(weights[chosen].sum() / max(1, chosen.sum()))), 4))
            among = chosen & (weights > 0)
            parts.append(_quantiles(old[among] / blocks[among], weights[among], 4) if among.any() else (0.0, 0.0))
        following = weights > 0
        return Sharing(
            block_size=self._block_size,
            system_prompt_tokens=system_tokens,
            follow_share=tuple(shares),
            shared_part=tuple(parts),
            follow_after_s=_quantiles(waits_s[following], weights[following], 3),
            prompt_below=tuple(bounds),
        )


def _alone(r: Request) -> bool:
    """Whether no other prompt can begin as this one does: one user's own text, in a session of one turn."""
    own = user_stream(r.session, r.turn)
    return not r.turn and not r.has_next and all(stream == own for stream, _, _ in r.spans)


def _quantiles(values: FloatArray, weights: FloatArray, digits: int) -> tuple[float, ...]:
    """Equally spaced quantiles of weighted values, from the least to the greatest."""
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(weights[order])
    middles = (passed - weights[order] / 2) / passed[-1]
    at = np.interp(np.linspace(0, 1, _QUANTILES), middles, values[order])
    return tuple(round(float(value), digits) for value in at)
