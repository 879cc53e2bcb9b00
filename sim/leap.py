"""A leap: equal steps in a row, as the cost model and the timeline see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.kernels.records import BatchShape, CostModel
from hbmtwin.sim.scheduler import Plan


@dataclass(frozen=True, slots=True)
class Leap:
    """Equal steps in a row, the first of which begins, without its memory work, at *start_ns*."""

    cost: CostModel
    batch: BatchShape
    start_ns: int
    steps: int
    changed: bool
    """Whether the batch differs from that of the step before."""

    def end_of(self, step: int) -> int:
        """When its *step*-th step ends, from 1. O(log step)."""
        return self.start_ns + self.cost.leap_ns(self.batch, step)

    def reaching(self, time_ns: int) -> int:
        """The first step that ends at *time_ns* or later."""
        return self.cost.steps_covering(self.batch, max(1, time_ns - self.start_ns))

    def cut_at(self, time_ns: float) -> Leap:
        """As long as it may be if something comes in at *time_ns* (infinity: nothing does)."""
        if self.steps == 1 or self.end_of(self.steps) <= time_ns:
            return self
        return Leap(self.cost, self.batch, self.start_ns, min(self.steps, self.reaching(int(time_ns))), self.changed)

    def rows_within(self, next_tick_ns: int, interval_ns: int) -> Iterator[tuple[int, int]]:
        """Steps but the last whose end wants a row, with the time of that end: the first one of a changed batch, then
        the first after each tick of the interval."""
        step = 0
        if self.changed and self.steps > 1:
            step = 1
            time_ns = self.end_of(1)
            yield 1, time_ns
            next_tick_ns = (time_ns // interval_ns + 1) * interval_ns
        while self.steps > 1:
            step = max(step + 1, self.reaching(next_tick_ns))
            if step >= self.steps:
                return
            time_ns = self.end_of(step)
            yield step, time_ns
            next_tick_ns = (time_ns // interval_ns + 1) * interval_ns


def batch_of(plan: Plan, kv: KVPolicy | None = None, window: int = 0) -> BatchShape:
    """The cost model's view of a plan's first step. Of a context only what *kv* keeps is read (None: it keeps all),
    and in layers with a sliding *window* (0: there are none) only that."""
    prefill: list[tuple[int, int]] = []
    read = longest = window_read = window_growth = 0
    growth = len(plan.decoding)
    for s, new in plan.scheduled:
        context = s.num_computed_tokens
        decodes = new == 1 and context + 1 == s.num_tokens
        if kv is not None:
            if decodes:
                kept = kv.kept(context + 1)  # the new token among them: in a ring it has overwritten the oldest
                growth -= kept == kv.kept(context + 2)
                context = kept - 1
            else:
                context = kv.kept(context)
        longest = max(longest, context + new)
        if decodes:
            read += context + 1
            if window:
                window_read += min(context + 1, window)
                window_growth += context + 1 < window
        else:
            prefill.append((new, context))
    return BatchShape(
        prefill=tuple(prefill),
        decode_count=len(plan.decoding),
        kv_read_tokens=read,
        kv_read_growth=growth,
        longest_context=longest,
        window_read_tokens=window_read,
        window_read_growth=window_growth,
    )


def steps_within_window(plan: Plan, window: int) -> int:
    """How many steps of a decoding plan read equally many tokens more each time: none of its sequences begins to fill
    the window in between. O(sequences)."""
    left = (window - s.num_computed_tokens for s in plan.decoding if s.num_computed_tokens + 1 < window)
    return min(left, default=2**62)
