"""Two schedulers that plan ahead, in the order of vLLM's engine core with two batches under way, compared at each step.

::

    ours        schedule    schedule_ahead    commit 1    schedule_ahead    commit 2    ...
    vLLM's      schedule 1  schedule 2        update 1    schedule 3        update 2    ...
                                  arrive ^                      arrive ^

A step in which nothing is scheduled takes no time: what comes behind it is planned with nothing under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from hbmtwin.sim.scheduler import Plan
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler
from hbmtwin.validation.vllm.steps import Computed, Scheduled, Server, Steps
from hbmtwin.validation.vllm.steps_ours import OurScheduler
from hbmtwin.validation.vllm.steps_vllm import VllmOwnScheduler

UNDER_WAY = 2
"""Batches that vLLM has under way with ``async_scheduling``."""


class OurAsyncScheduler(OurScheduler):
    """``AsyncVllmScheduler``, or a class that makes a mistake on purpose, over either policy."""

    def __init__(
        self, server: Server, scheduler: type[AsyncVllmScheduler] = AsyncVllmScheduler, *, grouped: bool = False
    ) -> None:
        super().__init__(server, scheduler, grouped=grouped)
        self.under_way: deque[Plan] = deque()

    def schedule(self) -> Scheduled:
        """The plan behind the last one that has something in it."""
        assert isinstance(self.scheduler, AsyncVllmScheduler)
        self.memory.end_step()
        if self.under_way:
            plan = self.scheduler.schedule_ahead(self.under_way[-1], 1, self.kv, now_ns=1 << 62)
        else:
            plan = self.scheduler.schedule(self.kv)
        if plan.everyone():
            self.under_way.append(plan)
        return self.told(plan)

    def compute(self) -> Computed:
        """The oldest plan."""
        return self.left(self.scheduler.commit(self.under_way.popleft(), 1))


class VllmOwnAsyncScheduler(VllmOwnScheduler):
    """vLLM's unmodified AsyncScheduler."""

    def __init__(self, core: Mapping[str, Any], server: Server) -> None:
        super().__init__(core, server)
        self.under_way: deque[tuple[Any, frozenset[str]]] = deque()

    @staticmethod
    def kind(core: Mapping[str, Any]) -> Any:
        """The class of the scheduler."""
        return core["async_scheduler"].AsyncScheduler

    def schedule(self) -> Scheduled:
        """``schedule``; who has computed all of its own, tokens under way among them, gets one from this step."""
        plan = super().schedule()
        requests, names = self.scheduler.requests, self.output.num_scheduled_tokens
        sampled = frozenset(name for name in names if not requests[name].is_prefill_chunk)
        self.under_way.append((self.output, sampled))
        return plan

    def compute(self) -> Computed:
        """The oldest plan that has something in it; those without are told as well, and nothing follows from them."""
        while not self.under_way[0][0].num_scheduled_tokens:
            self.tell(*self.under_way.popleft())
        return self.tell(*self.under_way.popleft())


class AsyncSteps(Steps):
    """Both sides with two batches under way, where there is something to do."""

    under_way: int = 0

    def step(self) -> tuple[int, ...]:
        """The tokens of the oldest batch, then as many plans as there is room for. Raise StepsDiffer."""
        self.steps += 1
        finished: tuple[int, ...] = ()
        if self.under_way:
            finished = self._compute()
            self.under_way -= 1
        while self.under_way < UNDER_WAY and self._plan().scheduled:
            self.under_way += 1
        return finished
