"""A leap: equal steps in a row, as the cost model and the timeline see them."""

from __future__ import annotations

from collections.abc import Iterator

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.kernels.records import BatchShape, CostModel
from hbmtwin.sim.scheduler import Plan


class Leap:
    """Equal steps in a row, the first of which begins, without its memory work, at *start_ns*.

    Times of the batch are worked out once, and the end that was asked for last is kept: nearly always it is the last.
    """

    __slots__ = ("_end_ns", "_end_step", "_times", "changed", "start_ns", "steps")

    def __init__(self, cost: CostModel, batch: BatchShape, start_ns: int, steps: int, changed: bool) -> None:
        """*changed*: whether the batch differs from that of the step before. Raise ValueError for a batch that prefills
        and is to be repeated."""
        if steps > 1 and batch.prefill:
            raise ValueError(f"a batch that prefills cannot be repeated {steps} times")
        self.start_ns = start_ns
        self.steps = steps
        self.changed = changed
        self._times = cost.steps(batch)
        self._end_step, self._end_ns = 0, start_ns

    def end_of(self, step: int) -> int:
        """When its *step*-th step ends, from 1. O(log step), and O(1) for the one asked for last."""
        if step != self._end_step:
            self._end_step, self._end_ns = step, self.start_ns + self._times.total_ns(step)
        return self._end_ns

    def cut_at(self, time_ns: float) -> Leap:
        """Itself, made as short as it must be if something comes in at *time_ns* (infinity: nothing does)."""
        steps, left = self.steps, time_ns - self.start_ns
        if steps == 1 or (steps * self._times.first_ns <= left and self.end_of(steps) <= time_ns):
            return self
        reaching, total_ns = self._times.reaching(int(left))
        if reaching <= steps:
            self.steps = reaching
            self._end_step, self._end_ns = reaching, self.start_ns + total_ns
        return self

    def rows_within(self, next_tick_ns: int, interval_ns: int) -> Iterator[tuple[int, int]]:
        """Steps but the last whose end wants a row, with the time of that end: the first one of a changed batch, then
        the first after each tick of the interval."""
        if self.steps == 1:
            return
        start_ns, last_ns = self.start_ns, self.end_of(self.steps)
        step = 0
        if self.changed:
            step = 1
            time_ns = start_ns + self._times.first_ns
            yield 1, time_ns
            next_tick_ns = (time_ns // interval_ns + 1) * interval_ns
        while next_tick_ns < last_ns:  # else no step but the last reaches it
            reaching, total_ns = self._times.reaching(next_tick_ns - start_ns)
            if reaching > step:
                step, time_ns = reaching, start_ns + total_ns
            else:
                step += 1
                time_ns = start_ns + self._times.total_ns(step)
            if step >= self.steps:
                return
            yield step, time_ns
            next_tick_ns = (time_ns // interval_ns + 1) * interval_ns


def batch_of(plan: Plan, kv: KVPolicy | None = None, window: int = 0) -> BatchShape:
    """The cost model's view of a plan's first step. Of a context only what *kv* keeps is read (None: it keeps all),
    and in layers with a sliding *window* (0: there are none) only that. O(those that are not in the group); with one of
    both O(sequences)."""
    prefill: list[tuple[int, int]] = []
    count = read = window_read = window_growth = 0
    scheduled = plan.scheduled
    if plan.group is not None:
        if kv is None and not window:
            count = len(plan.group.members)
            read = plan.group.context_tokens + count
        else:
            scheduled = plan.everyone()
    growth = count
    for s, new in scheduled:
        context = s.num_computed_tokens
        if new > 1 or context + 1 < s.num_tokens:
            prefill.append((new, context if kv is None else kv.kept(context)))
            continue
        count, growth = count + 1, growth + 1
        if kv is not None:
            kept = kv.kept(context + 1)  # the new token among them: in a ring it has overwritten the oldest
            growth -= kept == kv.kept(context + 2)
            context = kept - 1
        read += context + 1
        if window:
            window_read += min(context + 1, window)
            window_growth += context + 1 < window
    shape = (tuple(prefill), count, read, growth, window_read, window_growth)
    return tuple.__new__(BatchShape, shape)  # its own __new__ is a call of Python's, and this is every leap


def steps_within_window(plan: Plan, window: int) -> int:
    """How many steps of a decoding plan read equally many tokens more each time: none of its sequences begins to fill
    the window in between. O(sequences)."""
    decodes = (s.num_computed_tokens for s, _ in plan.everyone())
    left = (window - context for context in decodes if context + 1 < window)
    return min(left, default=2**62)
