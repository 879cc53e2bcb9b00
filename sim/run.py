"""From a scenario to a result: every part is built here, once, and handed to the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

from hbmtwin.allocators.caching import ConfError
from hbmtwin.allocators.contract import CountsPrefixes, DeviceAllocator, KVPolicy, ReportsCacheEvents
from hbmtwin.allocators.driver import PAGE_UNIT, HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.kernels.activations import ActivationModel
from hbmtwin.kernels.records import CostModel
from hbmtwin.kernels.stages import stage_shapes
from hbmtwin.kernels.weights import weight_tensors
from hbmtwin.sim import catalog, legality, summary
from hbmtwin.sim.books import Books
from hbmtwin.sim.engine import Engine
from hbmtwin.sim.engine_config import EngineConfig, Progress
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.idle_settings import config_fields
from hbmtwin.sim.kv_layout import scale_tensors
from hbmtwin.sim.kv_policy import is_v0, kv_policy, told
from hbmtwin.sim.layer_groups import BlockPool, block_pool
from hbmtwin.sim.memory_budget import MemoryBudget, memory_budget
from hbmtwin.sim.model_states import check_states, mamba_mode, state_block_size, state_notes
from hbmtwin.sim.model_windows import as_read, check_windows, window_notes, with_windows
from hbmtwin.sim.monitor import alerts, kv_monitor, limits_of
from hbmtwin.sim.pipeline import pipeline_notes, stage_rows, step_cost
from hbmtwin.sim.recorder import Recorder
from hbmtwin.sim.resolve import (
    batch_notes,
    check_groups,
    check_pages,
    device_notes,
    device_of,
    layout_of,
    longest_request_of,
    max_model_len_of,
    max_num_batched_tokens_of,
    stage_layers_of,
)
from hbmtwin.sim.result import Result
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.scheduler import Scheduler, SchedulerConfig, schedulers
from hbmtwin.sim.slo import goodput
from hbmtwin.sim.token_gaps import pads_batches, token_gaps
from hbmtwin.sim.traffic import source_of
from hbmtwin.sim.unfinished import unfinished_because
from hbmtwin.workloads.records import Source


class DoesNotFit(RuntimeError):
    """The server would not start: the plan leaves no room for KV, or not enough for one longest request."""

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__(budget)  # what pickle hands to a new one, when a run in another process does not fit
        self.budget = budget

    def __str__(self) -> str:
        return self.budget.reason


class Twin:
    """The parts of one run, built from a scenario and not yet started.

    It can run once. Raise ScenarioError, CatalogError, WorkloadError, or DoesNotFit if the server would not start.
    *source* and *cost* stand in for the scenario's own, for research and tests.
    """

    def __init__(self, scenario: Scenario, *, source: Source | None = None, cost: CostModel | None = None) -> None:
        legality.check(scenario)
        self.scenario = scenario
        self.model = catalog.model(scenario.model.name)
        self.device = device_of(scenario)
        self.max_model_len = max_model_len_of(scenario, self.model)
        self.longest_request = longest_request_of(scenario, self.max_model_len)
        self.max_num_batched_tokens = max_num_batched_tokens_of(scenario, self.max_model_len)
        self.layout = layout_of(scenario, self.model, self.device)
        self.stage_layers = stage_layers_of(scenario, self.model, self.device)
        self.in_flight_tokens = self.max_num_batched_tokens * len(self.stage_layers)
        """By which vLLM sizes windows: a pipeline has as many batches under way as stages."""
        check_states(scenario, self.model)
        self.mamba_mode = mamba_mode(scenario, self.model)
        self.kept_model, self.sinks = with_windows(scenario, self.model)
        """As the KV policy keeps it: with the windows that it makes use of."""
        check_windows(scenario, self.model, self.kept_model)
        read_model = as_read(self.model, self.kept_model, self.sinks)
        self.window = read_model.window
        """Tokens that a layer with a window reads of a sequence; 0: there is none."""
        try:
            self.cost: CostModel = cost or step_cost(
                read_model, self.device, self.stage_layers, self.layout, attention=scenario.engine.attention
            )
        except ValueError as error:
            raise ScenarioError(f"engine.tensor_parallel_size: {error}") from None
        self.block_size = scenario.kv_cache.block_size or self.device.default_block_size
        check_pages(scenario, self.block_size)
        self.pool = self._pool()
        if self.pool.grouping is not None:
            check_groups(scenario)
        self.budget = self._budget()
        if not self.budget.fits:
            raise DoesNotFit(self.budget)
        self.rank_model = stage_shapes(self.model, self.stage_layers)[self.budget.stage]
        """What is on the rank whose memory is simulated, the one with room for the fewest blocks."""
        if len(self.stage_layers) > 1:
            self.pool = self.pool.on_stage(self.budget.layers)
            self.layout = self.pool.layout
        self.source = source or source_of(scenario)
        self._build_memory()
        config = SchedulerConfig(
            max_model_len=self.longest_request,
            max_num_seqs=scenario.scheduler.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            oom=legality.effective_oom(scenario),
            batching=scenario.scheduler.batching,
            bucket_tokens=scenario.scheduler.bucket_tokens,
            preemption_mode=scenario.scheduler.preemption_mode,
            state_block_size=state_block_size(self.pool),
            enable_chunked_prefill=scenario.scheduler.enable_chunked_prefill,
            long_prefill_token_threshold=scenario.scheduler.long_prefill_token_threshold,
            scheduling_policy=scenario.scheduler.scheduling_policy,
            schedule_conservativeness=scenario.scheduler.schedule_conservativeness,
        )
        make_scheduler: Any = schedulers.get(scenario.scheduler.policy)
        self.scheduler: Scheduler = make_scheduler(config)

    def _pool(self) -> BlockPool:
        try:
            return block_pool(
                self.kept_model,
                self.layout,
                block_size=self.block_size,
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.in_flight_tokens,
                sinks=self.sinks,
                mamba_mode=self.mamba_mode,
                ascend=self.device.vendor == "ascend",
            )
        except ValueError as error:
            raise ScenarioError(f"model.name: {error}") from None

    def _budget(self) -> MemoryBudget:
        s = self.scenario
        return memory_budget(
            self.kept_model,
            self.device,
            sinks=self.sinks,
            mamba_mode=self.mamba_mode,
            layout=self.layout,
            gpu_memory_utilization=s.engine.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_seqs=s.scheduler.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            pipeline_parallel_size=s.engine.pipeline_parallel_size,
            layer_partition=s.engine.layer_partition,
            block_size=self.block_size,
            other_tenant_bytes=s.device.other_tenant_bytes,
            activation_bytes=s.memory.activation_bytes,
        )

    def _build_memory(self) -> None:
        s, budget, pool = self.scenario, self.budget, self.pool
        policy: Any = kv_policy(s, grouped=pool.grouping is not None)
        self.token_bytes = pool.token_bytes
        settings_of_policy = config_fields(policy)
        page_bytes = min(PAGE_UNIT, s.kv_cache.page_bytes) if "page_bytes" in settings_of_policy else PAGE_UNIT
        try:
            self.driver = HbmDriver(
                budget.total_bytes, tenants_bytes=s.device.other_tenant_bytes, page_bytes=page_bytes
            )
        except ValueError as error:
            raise ScenarioError(f"kv_cache.page_bytes: {error}") from None
        before = self.driver.mem_info()[0]
        self.driver.alloc(budget.static_bytes + budget.graph_bytes)
        self.static_bytes = before - self.driver.mem_info()[0]
        settings: dict[str, Any] = {
            "flavour": "torch_npu" if self.device.vendor == "ascend" else "torch_cuda",
            "alloc_conf": s.memory.alloc_conf,
            "fit": s.memory.fit,
            "coalescing": s.memory.coalescing,
        }
        if s.memory.alignment_bytes is not None:
            settings["alignment_bytes"] = s.memory.alignment_bytes
        # What the budget grants to torch: the same cap for every policy, so that a comparison compares policies. By how
        # much segments of loaded tensors are rounded stands outside the engine's plan, which counts torch's blocks.
        free = self.driver.mem_info()[0]
        trial = self._allocator(s.memory.general, {**settings, "limit_bytes": free}, HbmDriver(free))
        self._loaded(trial)
        # Activations that come and go need the room that a reserve would have taken.
        coming = 0 if s.memory.activations == "none" else budget.activation_bytes
        granted = min(trial.usage().reserved + coming + budget.kv_bytes, free)
        # Only KV that grows among the general allocator's blocks needs the cap: elsewhere its bytes are set from the
        # start, and what activations need beyond their estimate comes out of the unplanned rest, as on a device.
        grows = s.memory.kv_arena == s.memory.general and "num_blocks" not in settings_of_policy
        self.limit_bytes = granted if grows else free
        self.general = self._allocator(s.memory.general, {**settings, "limit_bytes": self.limit_bytes})
        self.recorder = Recorder(
            allocators=[self.general],
            interval_ns=max(1, round(s.results.interval_s * 1e9)),
            checkpoint_ns=round(s.results.checkpoint_s * 1e9),
            steps_wanted=s.results.steps,
            trace_wanted=s.results.memory_trace,
            events_wanted=s.results.cache_events,
        )
        self.forward = self._loaded(self.general)
        left = granted - self.general.usage().reserved - coming
        self.arena, self.arena_limit_bytes = self.general, granted
        if s.memory.kv_arena != s.memory.general:
            self.arena_limit_bytes = left // PAGE_UNIT * PAGE_UNIT
            unit = s.memory.alignment_bytes or 0
            if "region" in device_allocators.get(s.memory.kv_arena).features and unit > self.arena_limit_bytes:
                raise ScenarioError(
                    f"memory.alignment_bytes: {unit} is more than the whole region of memory.kv_arena = "
                    f"{s.memory.kv_arena!r}, {self.arena_limit_bytes} bytes; use less (512 is torch's unit)"
                )
            self.arena = self._allocator(s.memory.kv_arena, {**settings, "limit_bytes": self.arena_limit_bytes})
            self.recorder.watch(self.arena)
        self.kv_budget_bytes = left
        room = min(left, self.arena_limit_bytes)  # a region is cut to whole pages
        if "page_bytes" in settings_of_policy:
            self._check_pages(s.kv_cache.page_bytes, left)
        settings_given = {name: getattr(s.kv_cache, name) for name in type(s.kv_cache).model_fields}
        given = {name: value for name, value in settings_given.items() if value is not None}  # else the policy's own
        given |= {
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "admission": s.memory.admission,
            "limit_bytes": room,
            "grouping": pool.grouping,
            "max_num_batched_tokens": self.in_flight_tokens,
            **s.kv_cache.options,
        }
        self.block_bytes = pool.block_bytes if "num_blocks" in settings_of_policy else None
        if self.block_bytes is not None:
            given["num_blocks"] = self._pool_blocks(
                s.memory.kv_arena, settings, room, pool, wanted=s.kv_cache.options.get("num_blocks")
            )
        try:
            self.kv: KVPolicy = policy(self.layout, self.arena, _config(policy.Config, given))
        except OutOfMemory:
            room_for = self._pool_blocks(s.memory.kv_arena, settings, room, pool, wanted=None)
            raise ScenarioError(
                f"kv_cache.options: num_blocks: {self._too_many(given['num_blocks'], room_for)}"
            ) from None
        except (TypeError, ValueError) as error:  # what is left to go wrong are options
            raise ScenarioError(f"kv_cache.options: {error}") from None
        if s.results.cache_events:
            if not isinstance(self.kv, ReportsCacheEvents):
                raise ScenarioError(
                    f"results.cache_events: {told(s)} reports none; leave it false, or use "
                    "kv_cache.policy = 'paged' of 0.27, 0.22 or 0.18 with kv_cache.enable_prefix_caching = true"
                )
            self.kv.on_cache_event = self.recorder.cache_event

    def _check_pages(self, page_bytes: int, left_bytes: int) -> None:
        """Raise DoesNotFit unless the pages of one longest request fit in *left_bytes*."""
        tensors = self.layout.tensor_bytes * self.layout.num_layers
        need = sum(-(-self.max_model_len * size // page_bytes) for size in tensors) * page_bytes
        if need > left_bytes:
            reason = (
                f"one request of max_model_len {self.max_model_len} needs {need / 2**30:.2f} GiB in pages of "
                f"{page_bytes} bytes, {len(tensors)} tensors with pages of their own; {left_bytes / 2**30:.2f} GiB are "
                "left for KV: take a smaller kv_cache.page_bytes, or shorten max_model_len"
            )
            raise DoesNotFit(replace(self.budget, fits=False, reason=reason))

    def _loaded(self, general: DeviceAllocator) -> Forward:
        """A forward pass whose weights, and activation reserve if there is one, are in *general*. Raise DoesNotFit."""
        s, budget = self.scenario, self.budget
        outside = s.engine.task_queue_enable == 2 and self.device.vendor == "ascend"
        workspace: Any = general if outside else None
        tp = s.engine.tensor_parallel_size
        model = self.rank_model
        activations = ActivationModel(model, self.device, tensor_parallel_size=tp, attention=s.engine.attention)
        forward = Forward(general, self.layout.num_layers, s.memory.activations, activations, workspace)
        try:
            forward.load(chain(weight_tensors(model, tp), scale_tensors(self.layout)), budget.activation_bytes)
        except OutOfMemory as error:  # the budget does not round, the allocator does
            reason = f"weights and activations do not fit once they are rounded ({error}): raise gpu_memory_utilization"
            raise DoesNotFit(replace(budget, fits=False, reason=reason)) from None
        return forward

    def _pool_blocks(
        self, arena: str, settings: dict[str, Any], left_bytes: int, pool: BlockPool, *, wanted: int | None
    ) -> int:
        """The most blocks, or as many as are *wanted*, whose tensors fit in *left_bytes*: they are placed in an empty
        allocator of that kind.

        vLLM divides the bytes by the block's and lets the allocator round on top, outside its plan; here the rounding
        lies under the cap, so the pool may be a few blocks smaller than vLLM's log says. Raise DoesNotFit if one
        longest request has no room beside the null block, ScenarioError if more are wanted than the device holds.
        """
        block_bytes = pool.block_tensors

        def fits(blocks: int) -> bool:
            empty = self._allocator(arena, {**settings, "limit_bytes": left_bytes}, HbmDriver(left_bytes))
            try:
                for size in block_bytes:
                    empty.malloc(blocks * size, tag=Tag.KV)
            except OutOfMemory:
                return False
            return True

        planned = left_bytes // sum(block_bytes)
        blocks = bisect_left(range(1, planned + 1), True, key=lambda n: not fits(n))
        if wanted is not None:
            if wanted * sum(block_bytes) > self.driver.capacity_bytes:
                raise ScenarioError(f"kv_cache.options: num_blocks: {self._too_many(wanted, blocks)}")
            blocks = wanted  # more than planned is allowed, as with vLLM's num_gpu_blocks_override
        longest = pool.request_blocks(self.max_model_len)
        null_blocks = 0 if is_v0(self.scenario) else 1
        if blocks - null_blocks < longest:
            null = ", one of them the null block," if null_blocks else ""
            reason = (
                f"one request of max_model_len {self.max_model_len} needs {longest} blocks; the pool has {blocks}"
                f"{null} once its tensors are rounded: "
                + ("raise num_blocks" if wanted is not None else "raise gpu_memory_utilization")
                + ", or shorten max_model_len or block_size"
            )
            raise DoesNotFit(replace(self.budget, fits=False, reason=reason))
        return blocks

    def _too_many(self, wanted: int, blocks: int) -> str:
        return (
            f"{wanted} blocks do not fit, {blocks} do by the plan: leave it out, or raise engine.gpu_memory_utilization"
        )

    def _allocator(self, name: str, settings: dict[str, Any], driver: HbmDriver | None = None) -> DeviceAllocator:
        make: Any = device_allocators.get(name)
        try:
            allocator: DeviceAllocator = make(driver or self.driver, _config(make.Config, settings))
        except (ValueError, ConfError) as error:
            raise ScenarioError(f"memory.alloc_conf: {error}") from None
        return allocator

    def run(self, *, progress: Callable[[Progress], None] | None = None, step_mode: bool = False) -> Result:
        """Run to the end of the traffic, or to the server's death."""
        s = self.scenario
        allocators = [self.general] if self.arena is self.general else [self.general, self.arena]
        model, tp = self.rank_model, s.engine.tensor_parallel_size
        state_bytes = model.mamba_state_bytes(tp) * model.num_mamba_layers
        books = Books(
            self.driver,
            allocators,
            self.kv,
            static_bytes=self.static_bytes,
            token_bytes=self.token_bytes,
            sequence_state_bytes=state_bytes if self.mamba_mode == "none" else None,
            operations=lambda: self.recorder.op_index,
        )
        engine = Engine(
            EngineConfig(
                oom=legality.effective_oom(s),
                arena_limit_bytes=self.arena_limit_bytes,
                between_turns=s.session.between_turns,
                drops_tokens=s.kv_cache.retention != "full" and not self.window,
                fixed_pool=self.block_bytes is not None,
                counts_dropped=s.kv_cache.retention != "full",
                window=self.window,
                keeps_parked="park" in self.kv.offers,
                step_mode=step_mode or not self._may_leap(),
            ),
            self.source,
            self.scheduler,
            self.kv,
            self.arena,
            self.forward,
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
        for allocator in allocators:
            allocator.check()
        self.kv.check()
        return self._result(engine, allocators)

    def _may_leap(self) -> bool:
        """Whether equal steps may be counted instead of taken: not where each of them is to be seen, or changes
        something that no count shows (torch's garbage collection ages cached blocks at each request)."""
        memory, results = self.scenario.memory, self.scenario.results
        if results.cache_events:
            return False
        if memory.activations == "none":
            return True
        collects = "garbage_collection_threshold" in memory.alloc_conf
        return self.forward.repeatable and not results.memory_trace and not collects

    def _result(self, engine: Engine, allocators: list[DeviceAllocator]) -> Result:
        timeline, requests = self.recorder.timeline(), self.recorder.requests()
        steps = self.recorder.steps()
        gaps = None if steps is None else token_gaps(requests, steps, padded=pads_batches(self.scenario))
        stats = [a.stats() for a in allocators]
        counts = summary.request_counts(requests, self.source.total_requests)
        makespan_s = max(0, int(requests["end_ns"].max()) if len(requests) else 0) / 1e9
        limits = limits_of(self.scenario.results)
        return Result(
            scenario=self.scenario,
            summary={
                **counts,
                "unfinished_because": unfinished_because(requests, self.source.total_requests),
                "preemptions": engine.preemptions,
                **engine.recompute.summary(
                    self.scheduler.running_tokens, (u.sequence for u in self.scheduler.unfinished())
                ),
                "standstill": self._standstill(engine),
                **summary.dropped(requests),
                "prefix_cache": self._prefix_cache(),
                "oom": None if engine.oom is None else engine.oom.to_dict(),
                "capacity_bytes": self.driver.capacity_bytes,
                "kv_budget_bytes": self.kv_budget_bytes,
                "kv_block_bytes": self.block_bytes,
                "peak_reserved_bytes": sum(x["reserved_bytes.all.peak"] for x in stats),
                "peak_requested_bytes": sum(x["requested_bytes.all.peak"] for x in stats),
                "num_alloc_retries": sum(x.get("num_alloc_retries", 0) for x in stats),
                **summary.memory_means(timeline, self.kv_budget_bytes),
                "alerts": alerts(kv_monitor(timeline, self.kv_budget_bytes), limits) if limits else [],
                **summary.latencies(requests),
                "itl_s": None if gaps is None else gaps.percentiles(),
                "goodput": goodput(requests, self.scenario.slo, counts["requests_total"], makespan_s),
                "makespan_s": makespan_s,
                "simulated_output_tokens": int(requests["output_tokens"].sum()),
                "stages": stage_rows(self.budget),
                "basis": self.cost.basis,
                "seed": self.scenario.seed,
                "version": version("hbmtwin"),
                "notes": [
                    *legality.notes(self.scenario),
                    *device_notes(self.scenario, self.device),
                    *pipeline_notes(self.scenario, self.budget),
                    *batch_notes(self.scenario, self.max_model_len),
                    *window_notes(self.scenario, self.model, self.kept_model),
                    *state_notes(self.scenario, self.model, self.pool, self.block_size),
                ],
            },
            timeline=timeline,
            requests=requests,
            checkpoints=self.recorder.checkpoints(),
            steps=steps,
            memory_trace=self.recorder.memory_trace(),
            cache_events=self.recorder.cache_events(),
        )

    def _standstill(self, engine: Engine) -> dict[str, Any] | None:
        if engine.standstill is None:
            return None
        usage = self.kv.usage()
        in_blocks = usage.held + usage.cached + usage.pool  # as many as were made, which may not be what was planned
        pool_bytes = self.kv_budget_bytes if self.block_bytes is None else in_blocks
        return engine.standstill.to_dict(self.token_bytes, pool_bytes)

    def _prefix_cache(self) -> dict[str, Any] | None:
        """What the prefix cache was asked for and found, by the rules of the release; None without one."""
        if not (self.scenario.kv_cache.enable_prefix_caching and isinstance(self.kv, CountsPrefixes)):
            return None
        stats = self.kv.prefix_stats()
        return {**stats._asdict(), "hit_rate": stats.hits / stats.queries if stats.queries else None}


def run(scenario: Scenario, *, progress: Callable[[Progress], None] | None = None) -> Result:
    """Simulate a scenario. Raise ScenarioError, CatalogError, WorkloadError or DoesNotFit."""
    return Twin(scenario).run(progress=progress)


def _config(config: Any, values: dict[str, Any]) -> Any:
    """Make a policy's own settings from those of the scenario that it knows."""
    names = {f.name for f in fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})
