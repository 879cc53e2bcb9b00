"""How many steps a server made in each interval of its log, and of what: the log's counts as batches of the cost model.

::

    interval                     P prompt tokens that ended, G generated, R running on average, K tokens in the cache
    steps            n           max(G / R, (P + G) / T): each running sequence has one token of each step,
                                 and no step has more than T tokens
    of these         m           min(n, prompts that ended), at least as many as P needs beside the decodes: prefill
    one of these                 G / n decodes over K tokens, and P / m tokens of a prompt
    one of the rest              G / n decodes over K tokens

What no log tells is worked out: a prompt's mean length, from the first rise of ``running``, in which none has ended, or
from the number of requests where it is known; and K, from the usage of the cache where it is recorded, else from what
came in less what ended. All that follows from requests' own times is left alone: those are what a fit is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.kernels.records import BatchShape, CostModel
from hbmtwin.validation.served_runs.served_run import Interval, ServedRunError, ServerSettings


class Steps(NamedTuple):
    """The steps of one interval, of two kinds."""

    seconds: float
    steps: float
    """Of all steps; a fraction where the last one ends in the next interval."""
    prefills: float
    """Those of them that compute prompts."""
    prompt_tokens: float
    """Of one of those."""
    decode_count: float
    """Of each step."""
    kv_tokens: float
    """In the cache, in the middle of the interval."""

    def decode_batch(self) -> BatchShape:
        """A step without prompts."""
        count = max(1, round(self.decode_count))
        return BatchShape(decode_count=count, kv_read_tokens=round(self.kv_tokens), kv_read_growth=count)

    def mixed_batch(self) -> BatchShape:
        """A step with a prompt in it."""
        return BatchShape(
            prefill=((max(1, round(self.prompt_tokens)), 0),),
            decode_count=round(self.decode_count),
            kv_read_tokens=round(self.kv_tokens),
        )

    def modelled_s(self, cost: CostModel) -> float:
        """How long they take by a cost model."""
        total = 0.0
        if self.steps > self.prefills:
            total += (self.steps - self.prefills) * cost.steps(self.decode_batch()).first_ns
        if self.prefills:
            total += self.prefills * cost.steps(self.mixed_batch()).first_ns
        return total / 1e9


class Traffic(NamedTuple):
    """What the intervals tell of the requests as a whole."""

    prompt_tokens: float
    """Of a request, on average."""
    request_tokens: float
    """The same with its answer, when it ends."""


def steps_of(intervals: Sequence[Interval], settings: ServerSettings) -> tuple[Steps | None, ...]:
    """The steps of each interval; None where the server was not busy throughout, as far as snapshots tell.

    O(intervals). Raise ServedRunError where nothing is told: no interval in which it was busy.
    """
    traffic = _traffic(intervals, settings.num_requests)
    found: list[Steps | None] = []
    cached, running = 0.0, 0.0
    began = ended = 0.0
    for one in intervals:
        before, before_running = cached, running
        began += one.prompt_tokens / traffic.prompt_tokens
        more = max(0.0, began - one.running - ended)
        ended += more
        cached = max(0.0, cached + one.prompt_tokens + one.generated_tokens - more * traffic.request_tokens)
        if one.kv_usage and settings.kv_tokens:
            cached = one.kv_usage * settings.kv_tokens
        if one.running + one.waiting == 0:  # nothing is left: what was estimated too high or too low goes with it
            cached = began = ended = 0.0
        running = one.running
        busy = min(before_running, running) >= 1 and one.generated_tokens > 0
        found.append(
            _steps(one, (before_running + running) / 2, max(1.0, (before + cached) / 2), traffic, settings)
            if busy
            else None
        )
    if not any(found):
        raise ServedRunError("no interval in which requests ran from its beginning to its end; give a longer log")
    return tuple(found)


def _steps(one: Interval, running: float, cached: float, traffic: Traffic, settings: ServerSettings) -> Steps:
    count = max(one.generated_tokens / running, (one.prompt_tokens + one.generated_tokens) / settings.most_tokens)
    prompts = one.prompt_tokens / traffic.prompt_tokens
    decodes = min(running, one.generated_tokens / count)
    needed = one.prompt_tokens / max(1.0, settings.most_tokens - decodes)
    prefills = max(min(count, prompts), needed)
    each = one.prompt_tokens / prefills if prefills else 0.0
    return Steps(one.seconds, count, prefills, each, decodes, cached)


def _traffic(intervals: Sequence[Interval], num_requests: int | None) -> Traffic:
    """Of the whole run where its requests are counted and it ends in the log; else of its first rise."""
    prompts, generated = sum(i.prompt_tokens for i in intervals), sum(i.generated_tokens for i in intervals)
    if num_requests and intervals[-1].running == 0 and prompts:
        return Traffic(prompts / num_requests, (prompts + generated) / num_requests)
    start = next((at for at, one in enumerate(intervals) if one.prompt_tokens), 0)
    if start and intervals[start - 1].running:
        start = 0  # it ran when the log began
    rise = start
    while rise + 1 < len(intervals) and intervals[rise + 1].running > intervals[rise].running:
        rise += 1
    began = intervals[rise].running
    prompt = sum(i.prompt_tokens for i in intervals[start : rise + 1]) / began if began else 0.0
    if prompt < 1:
        raise ServedRunError(
            "the log does not begin with a server that fills, so how long prompts are is not known; give it from the "
            "first request on, or num_requests of a log that ends with the last one"
        )
    # the oldest answer, when prompts begin to be served again: every running sequence had a token of each step
    first_end = next((at for at in range(rise + 1, len(intervals)) if intervals[at].prompt_tokens), len(intervals))
    answer = sum(i.generated_tokens / i.running for i in intervals[:first_end] if i.running)
    return Traffic(prompt, prompt + answer)
