"""A second model of vLLM's asynchronous scheduling, on the naive model of its scheduler, in vLLM's own order of things.

Read in 0.27.1: vllm/v1/core/sched/async_scheduler.py, scheduler.py and v1/engine/core.py (step_with_batch_queue)::

    plan      counts tokens as computed at once; those that a step will sample stand as under_way until it is told
    outcome   of the oldest plan: its tokens are there, its keys as well, who has all of them leaves
    a server  plans until two batches are under way, then waits for the outcome of the oldest
"""

from __future__ import annotations

from collections import deque

from .naive_vllm import Asked, NaiveVllm, Rules, Told


class NaiveAsyncVllm(NaiveVllm):
    """Plans and outcomes are asked for one by one."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.under_way: dict[int, int] = {}
        """num_output_placeholders of each"""
        self.batches: deque[tuple[Told, set[int]]] = deque()
        """Plans without an outcome, with those whose token they sample"""
        self.stale: set[int] = set()
        """Preempted with a token under way"""

    def add(self, r: Asked) -> None:
        super().add(r)
        self.under_way[r.id] = 0

    def plan(self) -> Told:
        told = Told()
        budget = self.schedule_running(told)
        if not told.preempted:
            self.schedule_waiting(told, budget)
        sampling = set()
        for id, new in told.scheduled:
            r = self.asked[id]
            r.computed += new
            if r.computed == r.total + self.under_way[id]:
                self.under_way[id] += 1
                sampling.add(id)
        if told.scheduled:
            self.batches.append((told, sampling))
        return told

    def outcome(self) -> list[int]:
        """Of the oldest batch: who ended with it."""
        told, sampling = self.batches.popleft()
        ended = []
        for id, _ in told.scheduled:
            if id not in self.asked or id not in sampling:
                self.stale.discard(id)
                continue
            r = self.asked[id]
            r.total += 1
            if id in self.stale:
                self.stale.remove(id)
            else:
                self.under_way[id] -= 1
                self.key(r, r.computed - self.under_way[id])
            if r.total == len(r.tokens):
                ended.append(id)
                del self.asked[id]
                if id in self.tables:
                    self.running.remove(id)
                    self.give_back(id)
                else:
                    self.queue.remove(id)
        return ended

    def key(self, r: Asked, reached: int) -> None:
        have = {block for _, block in self.keyed}
        for i in range(reached // self.rules.block_size if self.rules.caching else 0):
            block = self.tables[r.id][i]
            if block not in have:
                self.keyed.append((self.keys(r)[i], block))

    def preempt(self, id: int) -> None:
        super().preempt(id)
        self.under_way[id] = 0
        if any(id == other for told, _ in self.batches for other, _ in told.scheduled):
            self.stale.add(id)

    def schedule_running(self, told: Told) -> int:
        rules, budget, at = self.rules, self.rules.budget, 0
        while at < len(self.running) and budget > 0:
            id = self.running[at]
            r = self.asked[id]
            lacking = r.total + self.under_way[id] - r.computed
            if self.under_way[id] and r.computed + 2 - self.under_way[id] >= r.prompt + r.most:
                lacking = 0
            new = min(lacking, rules.threshold or lacking, budget, rules.longest - r.computed - 1)
            if new == 0:
                at += 1
                continue
            while not self.allocate(r, new):
                victim = self.gives_way()
                scheduled = dict(told.scheduled).get(victim, 0)
                self.preempt(victim)
                told.preempted.append(victim)
                if victim == id:
                    return 0
                budget += scheduled
                at -= scheduled > 0
                told.scheduled = [pair for pair in told.scheduled if pair[0] != victim]
            told.scheduled.append((id, new))
            budget -= new
            at += 1
        return budget
