"""Which earlier prompt a prompt goes on from, so that caches of every size hit what they hit of the learned traffic.

::

    earlier prompts by time   a     b    c  d      e  f        now
                                       <----- drawn wait ----- |
    near that moment, the one whose whole blocks come nearest to the drawn part: c
    new prompt                system | what c has in common | (c's answer, if all of c fits) | new text

What a cache of a given size hits hangs on how long ago, in blocks touched since, the parts of a prompt were last used;
so the wait and the depth are drawn as they were measured, and the earlier prompt is looked for. One that nothing has
gone on from yet becomes the turn before; from another a new session branches off.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain
from typing import NamedTuple

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import Purpose
from hbmtwin.workloads.learned.model import Sharing
from hbmtwin.workloads.learned.strata import client_keys
from hbmtwin.workloads.records import Span, merge_spans, output_stream

_REACH = 48
"""Prompts looked at on either side of the moment."""
_TRIM = 4096
_DRAWN = 1024
_PURPOSES = (Purpose.FOLLOWS, Purpose.FOLLOW_AFTER, Purpose.SHARED_PART)


class _Sent(NamedTuple):
    session: int
    turn: int
    prompt_tokens: int
    output_tokens: int
    spans: tuple[Span, ...]


class Prompts:
    """The prompts of one client, in order of time. Keeps those not older than the longest wait."""

    def __init__(self, client: int, sharing: Sharing, seed: int) -> None:
        self._sharing = sharing
        self._seed = seed
        self._client = client
        self._longest_ns = round(sharing.follow_after_s[-1] * 1e9)
        self._times_ns: list[int] = []
        self._sent: list[_Sent] = []
        self._blocks: list[int] = []
        """Whole blocks of each; what is complete can be found again."""
        self._followed = bytearray()
        self._drawn_first = -1
        self._drawn: list[tuple[float, float, float]] = []

    def next(self, id: int, serial: int, time_ns: int, prompt: int, output: int) -> tuple[int, int, tuple[Span, ...]]:
        """Session, turn and pieces of the next prompt. O(prompts looked at)."""
        session, turn, spans = id, 0, self._system(prompt)
        found = self._followed_by(serial, time_ns, prompt)
        if found is not None:
            place, tokens = found
            before = self._sent[place]
            if not self._followed[place]:
                self._followed[place] = 1
                session, turn = before.session, before.turn + 1
            whole = before.prompt_tokens + before.output_tokens
            if turn and whole <= prompt and tokens // self._sharing.block_size >= self._blocks[place]:
                answer = output_stream(before.session, before.turn)
                spans = (*before.spans, (answer, 0, before.output_tokens))
            else:
                spans = _leading(before.spans, tokens)
        known = sum(length for _, _, length in spans)
        spans = merge_spans((*spans, (f"text/{session}/{turn}", 0, prompt - known)))
        self._times_ns.append(time_ns)
        self._sent.append(_Sent(session, turn, prompt, output, spans))
        self._blocks.append(prompt // self._sharing.block_size)
        self._followed.append(0)
        self._forget(time_ns)
        return session, turn, spans

    def _followed_by(self, serial: int, time_ns: int, prompt: int) -> tuple[int, int] | None:
        """Place of the prompt that this one goes on from, and how many tokens of it; None where it goes on from none,
        or from one before the traffic began."""
        sharing = self._sharing
        number = bisect_right(sharing.prompt_below, prompt)
        follows, after, how_much = self._drawn_at(serial)
        if follows >= sharing.follow_share[number]:
            return None
        wait = _quantile(sharing.follow_after_s, after)
        at_ns = time_ns - round(wait * 1e9)
        if at_ns < 0 or not self._sent:
            return None
        part = _quantile(sharing.shared_part[number], how_much)
        size = sharing.block_size
        all_blocks = -(-prompt // size)
        # At least a block beyond the system prompt: else it would be no going on.
        blocks = max(round(part * all_blocks), sharing.system_prompt_tokens // size + 1)
        blocks = min(blocks, all_blocks)
        place = self._nearest(at_ns, blocks)
        return place, min(blocks * size, self._sent[place].prompt_tokens, prompt)

    def _drawn_at(self, serial: int) -> tuple[float, float, float]:
        """Whether, after how long and how much: the draws of one number, made for a run of them at once."""
        first, place = divmod(serial, _DRAWN)
        if first != self._drawn_first:
            keys = client_keys(self._client, np.arange(first * _DRAWN, (first + 1) * _DRAWN, dtype=np.int64))
            columns = (draws.uniforms(self._seed, purpose, keys, 0).tolist() for purpose in _PURPOSES)
            self._drawn_first, self._drawn = first, list(zip(*columns, strict=True))
        return self._drawn[place]

    def _nearest(self, at_ns: int, blocks: int) -> int:
        """Where near a moment the prompt stands that has about as many whole blocks, at least those, and none behind
        it."""
        middle = bisect_left(self._times_ns, at_ns)
        count, sizes, followed = len(self._sent), self._blocks, self._followed
        best, best_cost = -1, 1 << 62
        near_enough, if_followed = blocks >> 5, 2 + (blocks >> 2)
        outwards = zip(range(middle - 1, middle - 1 - _REACH, -1), range(middle, middle + _REACH), strict=True)
        for place in chain.from_iterable(outwards):
            if not 0 <= place < count:
                continue
            cost = sizes[place] - blocks
            if cost < 0:
                cost *= -4
            if followed[place]:
                cost += if_followed
            if cost < best_cost:
                best, best_cost = place, cost
                if cost <= near_enough:
                    break
        return best

    def _system(self, prompt: int) -> tuple[Span, ...]:
        length = min(self._sharing.system_prompt_tokens, prompt)
        return merge_spans(((f"system/{self._client}", 0, length),))

    def _forget(self, time_ns: int) -> None:
        old = bisect_left(self._times_ns, time_ns - self._longest_ns) - _REACH
        if old > max(_TRIM, len(self._sent) // 2):
            del self._times_ns[:old], self._sent[:old], self._blocks[:old], self._followed[:old]


def _leading(spans: tuple[Span, ...], tokens: int) -> tuple[Span, ...]:
    """The first *tokens* of a prompt."""
    taken: list[Span] = []
    for stream, start, length in spans:
        if length >= tokens:
            taken.append((stream, start, tokens))
            break
        taken.append((stream, start, length))
        tokens -= length
    return merge_spans(tuple(taken))


def _quantile(values: tuple[float, ...], u: float) -> float:
    """The value at *u* of equally spaced quantiles, from the least to the greatest."""
    at = u * (len(values) - 1)
    i = min(int(at), len(values) - 2)
    return values[i] + (values[i + 1] - values[i]) * (at - i)
