"""From a scenario to a result: every part is built here, once, and handed to the engine.

::

    Scenario -> ServerPlan -> ServerMemory -> Engine -> Result
                resolved      bytes placed    time      :mod:`hbmtwin.sim.run_result`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hbmtwin.kernels.records import CostModel
from hbmtwin.sim import legality
from hbmtwin.sim.books import Books
from hbmtwin.sim.calibration import ValidityWatch
from hbmtwin.sim.engine import Engine
from hbmtwin.sim.engine_config import EngineConfig, Progress
from hbmtwin.sim.model_states import state_block_size
from hbmtwin.sim.result import Result
from hbmtwin.sim.run_result import result_of
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Scheduler, SchedulerConfig, schedulers
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler
from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.records import Source


class Twin:
    """The parts of one run, built from a scenario and not yet started.

    It can run once. Raise ScenarioError, CatalogError, WorkloadError, or DoesNotFit if the server would not start.
    *source* and *cost* stand in for the scenario's own, for research and tests.
    """

    def __init__(self, scenario: Scenario, *, source: Source | None = None, cost: CostModel | None = None) -> None:
        self.scenario = scenario
        self.plan = plan = ServerPlan(scenario, cost)
        self.model, self.device, self.max_model_len = plan.model, plan.device, plan.max_model_len
        self.block_size, self.max_num_batched_tokens = plan.block_size, plan.max_num_batched_tokens
        self.pool, self.layout, self.token_bytes = plan.pool, plan.layout, plan.pool.token_bytes
        self.budget, self.cost = plan.budget, plan.cost
        self.source = source or source_of(scenario)
        self.memory = memory = ServerMemory(plan)
        self.driver, self.general, self.arena = memory.driver, memory.general, memory.arena
        self.static_bytes, self.limit_bytes = memory.static_bytes, memory.limit_bytes
        self.kv_budget_bytes, self.block_bytes = memory.kv_budget_bytes, memory.block_bytes
        self.kv, self.recorder = memory.kv, memory.recorder
        self.scheduler = _scheduler(plan)

    def run(self, *, progress: Callable[[Progress], None] | None = None, step_mode: bool = False) -> Result:
        """Run to the end of the traffic, or to the server's death."""
        s, plan, memory = self.scenario, self.plan, self.memory
        model, tp = plan.rank_model, s.engine.tensor_parallel_size
        state_bytes = model.mamba_state_bytes(tp) * model.num_mamba_layers
        books = Books(
            self.driver,
            memory.allocators,
            self.kv,
            static_bytes=self.static_bytes,
            token_bytes=self.token_bytes,
            sequence_state_bytes=state_bytes if plan.mamba_mode == "none" else None,
            counted=self.recorder,
        )
        engine = Engine(
            EngineConfig(
                oom=legality.effective_oom(s),
                arena_limit_bytes=memory.arena_limit_bytes,
                between_turns=s.session.between_turns,
                drops_tokens=s.kv_cache.retention != "full" and not plan.window,
                fixed_pool=self.block_bytes is not None,
                counts_dropped=s.kv_cache.retention != "full",
                window=plan.window,
                keeps_parked="park" in self.kv.offers,
                max_concurrency=s.workload.max_concurrency,
                step_mode=step_mode or not self._may_leap(),
                validity=None
                if plan.profile is None
                else ValidityWatch(plan.profile, plan.model, s.engine.tensor_parallel_size),
            ),
            self.source,
            self.scheduler,
            self.kv,
            self.arena,
            memory.forward,
            self.cost,
            books,
            self.recorder,
            progress,
        )
        try:
            engine.run()
        finally:  # rows wait to be compared: what they say comes before what the engine ran into
            self.recorder.close_rows()
        books.check_kept()
        self.driver.check()
        for allocator in memory.allocators:
            allocator.check()
        self.kv.check()
        return result_of(plan, memory, engine)

    def _may_leap(self) -> bool:
        """Whether equal steps may be counted instead of taken: not where each of them is to be seen, or changes
        something that no count shows (torch's garbage collection ages cached blocks at each request)."""
        memory, results = self.scenario.memory, self.scenario.results
        if results.cache_events:
            return False
        if memory.activations == "none":
            return True
        collects = "garbage_collection_threshold" in memory.alloc_conf
        return self.memory.forward.repeatable and not results.memory_trace and not collects


def _scheduler(plan: ServerPlan) -> Scheduler:
    s = plan.scenario.scheduler
    config = SchedulerConfig(
        max_model_len=plan.longest_request,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        oom=legality.effective_oom(plan.scenario),
        batching=s.batching,
        bucket_tokens=s.bucket_tokens,
        preemption_mode=s.preemption_mode,
        state_block_size=state_block_size(plan.pool),
        enable_chunked_prefill=s.enable_chunked_prefill,
        long_prefill_token_threshold=s.long_prefill_token_threshold,
        scheduling_policy=s.scheduling_policy,
        async_scheduling=s.async_scheduling,
        schedule_conservativeness=s.schedule_conservativeness,
    )
    make_scheduler: Any = AsyncVllmScheduler if s.async_scheduling else schedulers.get(s.policy)
    scheduler: Scheduler = make_scheduler(config)
    return scheduler


def run(scenario: Scenario, *, progress: Callable[[Progress], None] | None = None) -> Result:
    """Simulate a scenario. Raise ScenarioError, CatalogError, WorkloadError or DoesNotFit."""
    return Twin(scenario).run(progress=progress)
