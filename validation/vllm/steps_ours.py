"""Our scheduler with a paged policy as one side of the comparison, driven as the engine drives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsPolicy
from hbmtwin.allocators.records import Release
from hbmtwin.sim.scheduler import Finished, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.validation.vllm.policies import GroupsSide, PagedSide, PolicySide, groups_policy, paged_policy
from hbmtwin.validation.vllm.steps import Computed, Scheduled, Server
from hbmtwin.workloads.records import Request


class OurScheduler:
    """``VllmScheduler``, or a class that makes a mistake on purpose, over the policy of one group or of several."""

    def __init__(self, server: Server, scheduler: type[VllmScheduler] = VllmScheduler, *, grouped: bool = True) -> None:
        pool = server.pool
        self.kv: PagedPolicy | PagedGroupsPolicy
        self.memory: PolicySide
        if grouped:
            self.kv = groups = groups_policy(replace(pool, max_num_batched_tokens=server.in_flight_tokens))
            self.memory = GroupsSide(groups)
        else:
            self.kv = paged = paged_policy(pool)
            self.memory = PagedSide(paged)
        self.scheduler = scheduler(
            SchedulerConfig(
                max_model_len=pool.max_model_len,
                max_num_seqs=server.max_num_seqs,
                max_num_batched_tokens=pool.max_num_batched_tokens,
                state_block_size=pool.aligned_block,
                scheduling_policy=server.scheduling_policy,
                long_prefill_token_threshold=server.long_prefill_token_threshold,
                enable_chunked_prefill=server.enable_chunked_prefill,
                async_scheduling=server.async_scheduling,
            )
        )
        self.plan = Plan([])

    def arrive(self, r: Request, tokens: Sequence[int]) -> None:
        """Into the queue; spans say what the tokens are."""
        self.scheduler.add(r, r.arrival_ns)

    def schedule(self) -> Scheduled:
        """The scheduler's plan."""
        self.plan = self.scheduler.schedule(self.kv)
        return self.told(self.plan)

    def told(self, plan: Plan) -> Scheduled:
        """A plan that was just made, and what it left behind."""
        there = [u.sequence for u in self.scheduler.unfinished()]
        running, waiting = there[: self.scheduler.num_running], there[self.scheduler.num_running :]
        return Scheduled(
            scheduled=tuple((s.id, new) for s, new in plan.everyone()),
            admitted=tuple((a.sequence.id, a.hit) for a in plan.admitted),
            preempted=tuple(sorted(s.id for s in plan.preempted)),
            rejected=tuple(r.id for r, _ in plan.rejected),
            running=tuple(s.id for s in running),
            waiting=tuple(s.id for s in waiting),
            tables=tuple(self.memory.tables(s) for s in running),
            free_queue=self.memory.free_queue(),
        )

    def compute(self) -> Computed:
        """As the engine does after a step, which it takes only if something is scheduled."""
        finished: list[Finished] = []
        if self.plan.everyone():
            self.memory.end_step()
            finished = self.scheduler.commit(self.plan, 1)
        return self.left(finished)

    def left(self, finished: Sequence[Finished]) -> Computed:
        """What a step left behind, when those that ended with it have gone."""
        for ended in finished:
            self.memory.release(ended.sequence, Release.FINISH)
        there = [u.request.id for u in self.scheduler.unfinished()]
        return Computed(
            finished=tuple(ended.request.id for ended in finished),
            running=tuple(there[: self.scheduler.num_running]),
            free_queue=self.memory.free_queue(),
        )
