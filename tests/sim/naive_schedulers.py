"""Second models of further schedulers over vLLM's pool, from sections 8, 11 and 12 of specs/paged-kv.md.

They decide by plain sums over the lists of :class:`naive_vllm.NaiveVllm`, one step at a time; no code is shared.
"""

from __future__ import annotations

from .naive_vllm import Asked, NaiveVllm, Rules, Told, ceil


class NaivePrefillFirst(NaiveVllm):
    """Section 12, and v0's order without chunks: a step is of whole prompts if one can be admitted, else of decodes."""

    def step(self) -> Told:
        told = Told()
        self.schedule_waiting(told, self.rules.budget)
        if not told.scheduled:
            self.schedule_running(told)
        return self.done(told)


class NaiveTrt(NaiveVllm):
    """What both of TensorRT-LLM's schedulers share: full lengths, and who waits to find what is computed now."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.old: list[tuple[int, int]] = []
        """Keys that were there when the step began."""

    def blocks(self, tokens: int) -> int:
        return ceil(tokens, self.rules.block_size)

    def finds_new(self, hits: list[int]) -> bool:
        return any(pair[1] in hits and pair not in self.old for pair in self.keyed)

    def start(self, r: Asked, hits: list[int], new: int, told: Told) -> bool:
        if not self.allocate(r, new, hits, admitting=True):
            return False
        self.queue.remove(r.id)
        self.running.append(r.id)
        r.computed = len(hits) * self.rules.block_size
        self.hits += len(hits)
        told.scheduled.append((r.id, new))
        return True


class NaiveNoEvict(NaiveTrt):
    """GUARANTEED_NO_EVICT."""

    def step(self) -> Told:
        told, size = Told(), self.rules.block_size
        self.old = list(self.keyed)
        rest = len(self.free)
        for id in self.running:
            r = self.asked[id]
            rest -= self.blocks(r.prompt + r.most) - len(self.tables[id])
        budget = self.schedule_running(told)
        assert not told.preempted
        for id in list(self.queue):
            if budget == 0 or len(self.running) == self.rules.seqs:
                break
            r = self.asked[id]
            hits = self.look_up(r)
            if self.finds_new(hits):
                continue
            need, new = self.blocks(r.prompt + r.most), min(r.total - len(hits) * size, budget)
            if need <= rest and self.start(r, hits, new, told):
                rest -= need
                budget -= new
            elif self.running:
                break
            else:
                self.queue.remove(id)
                told.rejected.append(id)
        return self.done(told)


class NaiveMaxUtilization(NaiveTrt):
    """MAX_UTILIZATION: ids are in order of arrival."""

    def step(self) -> Told:
        told, size = Told(), self.rules.block_size
        self.old = list(self.keyed)
        started = list(self.running)
        walk = sorted(self.running + self.queue)
        budget, fitting, room = self.rules.budget, 0, len(self.free)
        while walk:
            r = self.asked[walk[0]]
            hits = [] if r.id in started else self.look_up(r)
            if hits and self.finds_new(hits):
                walk.pop(0)
                continue
            need = self.blocks(r.total) - len(self.tables.get(r.id, ()))
            if fitting < self.rules.seqs and need <= room:
                new = min(r.total - r.computed - len(hits) * size, budget)
                if r.id in started:
                    if new:
                        assert self.allocate(r, new)
                        told.scheduled.append((r.id, new))
                elif new:
                    assert self.start(r, hits, new, told)
                fitting, room, budget = fitting + 1, room - need, budget - new
                walk.pop(0)
                continue
            last = next((id for id in reversed(walk) if id in started), None)
            if last is not None:
                before = len(self.free)
                self.preempt(last)
                self.queue.sort()
                room += len(self.free) - before
                told.preempted.append(last)
                walk = walk[: walk.index(last)]
            elif self.running:
                break
            else:
                self.queue.remove(r.id)
                told.rejected.append(r.id)
                walk.pop(0)
        return self.done(told)
