"""The memory of one server before its first step: weights are loaded, and KV has its room.

::

    driver     | context, libraries, graphs | general: weights, activations | arena: KV           | unplanned |
    granted                                 | general and KV: the same for every policy           |
    one arena                               | general: weights, activations, KV that grows        |

The rooms come from the budget, but the allocators place the bytes, and round them: what the budget granted may not hold
once it is placed, which is told as :class:`~hbmtwin.sim.budget.memory_budget.DoesNotFit` too.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from hbmtwin.allocators.caching import ConfError
from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy, ReportsCacheEvents
from hbmtwin.allocators.driver import PAGE_UNIT, HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.kernels.activations import ActivationModel
from hbmtwin.kernels.weights import weight_tensors
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.idle_settings import config_fields
from hbmtwin.sim.kv_layout import scale_tensors
from hbmtwin.sim.kv_policy import is_v0, kv_policy, told
from hbmtwin.sim.recorder import Recorder
from hbmtwin.sim.scenario import ScenarioError
from hbmtwin.sim.server_plan import ServerPlan


class ServerMemory:
    """Driver, allocators, the forward pass with its weights, the KV policy, and the recorder that watches them.

    Raise ScenarioError for settings that an allocator or the policy refuses, DoesNotFit if what was planned does not
    hold once it is placed.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        s, budget = plan.scenario, plan.budget
        policy: Any = kv_policy(s, grouped=plan.pool.grouping is not None)
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
        settings = self._settings()
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
            self.arena = self._arena(settings)
            self.recorder.watch(self.arena)
        self.allocators = [self.general] if self.arena is self.general else [self.general, self.arena]
        self.kv_budget_bytes = left
        self.block_bytes = plan.pool.block_bytes if "num_blocks" in settings_of_policy else None
        """Of a pool of blocks; None where KV grows."""
        if "page_bytes" in settings_of_policy:
            self._check_pages(s.kv_cache.page_bytes, left)
        room = min(left, self.arena_limit_bytes)  # a region is cut to whole pages
        self.kv = self._kv(policy, settings, room)
        if self.block_bytes is not None and "num_blocks" in s.kv_cache.options:
            made = self.kv.usage()
            self.kv_budget_bytes = made.held + made.cached + made.pool  # its usage is a share of the pool, as in vLLM
        if s.results.cache_events:
            if not isinstance(self.kv, ReportsCacheEvents):
                raise ScenarioError(
                    f"results.cache_events: {told(s)} reports none; leave it false, or use "
                    "kv_cache.policy = 'paged' of 0.27, 0.22 or 0.18 with kv_cache.enable_prefix_caching = true"
                )
            self.kv.on_cache_event = self.recorder.cache_event

    # -- allocators --------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Of every allocator, as far as it knows them."""
        s = self._plan.scenario
        settings: dict[str, Any] = {
            "flavour": "torch_npu" if self._plan.device.vendor == "ascend" else "torch_cuda",
            "alloc_conf": s.memory.alloc_conf,
            "fit": s.memory.fit,
            "coalescing": s.memory.coalescing,
        }
        if s.memory.alignment_bytes is not None:
            settings["alignment_bytes"] = s.memory.alignment_bytes
        return settings

    def _allocator(self, name: str, settings: dict[str, Any], driver: HbmDriver | None = None) -> DeviceAllocator:
        make: Any = device_allocators.get(name)
        try:
            allocator: DeviceAllocator = make(driver or self.driver, _config(make.Config, settings))
        except (ValueError, ConfError) as error:
            raise ScenarioError(f"memory.alloc_conf: {error}") from None
        return allocator

    def _arena(self, settings: dict[str, Any]) -> DeviceAllocator:
        """KV's own allocator, with ``arena_limit_bytes``. Raise ScenarioError if they are less than one unit."""
        memory = self._plan.scenario.memory
        unit = memory.alignment_bytes or 0
        if "region" in device_allocators.get(memory.kv_arena).features and unit > self.arena_limit_bytes:
            raise ScenarioError(
                f"memory.alignment_bytes: {unit} is more than the whole region of memory.kv_arena = "
                f"{memory.kv_arena!r}, {self.arena_limit_bytes} bytes; use less (512 is torch's unit)"
            )
        return self._allocator(memory.kv_arena, {**settings, "limit_bytes": self.arena_limit_bytes})

    def _loaded(self, general: DeviceAllocator) -> Forward:
        """A forward pass whose weights, and activation reserve if there is one, are in *general*. Raise DoesNotFit."""
        plan = self._plan
        s, budget = plan.scenario, plan.budget
        outside = s.engine.task_queue_enable == 2 and plan.device.vendor == "ascend"
        workspace: Any = general if outside else None
        tp = s.engine.tensor_parallel_size
        model = plan.rank_model
        activations = ActivationModel(model, plan.device, tensor_parallel_size=tp, attention=s.engine.attention)
        forward = Forward(general, plan.layout.num_layers, s.memory.activations, activations, workspace)
        try:
            forward.load(chain(weight_tensors(model, tp), scale_tensors(plan.layout)), budget.activation_bytes)
        except OutOfMemory as error:  # the budget does not round activations, the allocator does
            reason = f"weights and activations do not fit once they are rounded ({error}): raise gpu_memory_utilization"
            raise DoesNotFit(replace(budget, fits=False, reason=reason)) from None
        return forward

    # -- KV ----------------------------------------------------------------------------------------------------------

    def _kv(self, policy: Any, settings: dict[str, Any], room: int) -> KVPolicy:
        """The policy in its arena, with *room* bytes. Raise ScenarioError, DoesNotFit."""
        plan, s = self._plan, self._plan.scenario
        settings_given = {name: getattr(s.kv_cache, name) for name in type(s.kv_cache).model_fields}
        given = {name: value for name, value in settings_given.items() if value is not None}  # else the policy's own
        given |= {
            "block_size": plan.block_size,
            "max_model_len": plan.max_model_len,
            "admission": s.memory.admission,
            "limit_bytes": room,
            "grouping": plan.pool.grouping,
            "max_num_batched_tokens": plan.in_flight_tokens,
            **s.kv_cache.options,
        }
        if self.block_bytes is not None:
            given["num_blocks"] = self._pool_blocks(settings, room, wanted=s.kv_cache.options.get("num_blocks"))
        try:
            kv: KVPolicy = policy(plan.layout, self.arena, _config(policy.Config, given))
        except OutOfMemory:
            room_for = self._pool_blocks(settings, room, wanted=None)
            raise ScenarioError(
                f"kv_cache.options: num_blocks: {self._too_many(given['num_blocks'], room_for)}"
            ) from None
        except (TypeError, ValueError) as error:  # what is left to go wrong are options
            raise ScenarioError(f"kv_cache.options: {error}") from None
        return kv

    def _check_pages(self, page_bytes: int, left_bytes: int) -> None:
        """Raise DoesNotFit unless the pages of one longest request fit in *left_bytes*."""
        plan, layout = self._plan, self._plan.layout
        tensors = layout.tensor_bytes * layout.num_layers
        need = sum(-(-plan.max_model_len * size // page_bytes) for size in tensors) * page_bytes
        if need > left_bytes:
            reason = (
                f"one request of max_model_len {plan.max_model_len} needs {need / 2**30:.2f} GiB in pages of "
                f"{page_bytes} bytes, {len(tensors)} tensors with pages of their own; {left_bytes / 2**30:.2f} GiB are "
                "left for KV: take a smaller kv_cache.page_bytes, or shorten max_model_len"
            )
            raise DoesNotFit(replace(plan.budget, fits=False, reason=reason))

    def _pool_blocks(self, settings: dict[str, Any], left_bytes: int, *, wanted: int | None) -> int:
        """The most blocks, or as many as are *wanted*, whose tensors fit in *left_bytes*: they are placed in an empty
        allocator of that kind.

        vLLM divides the bytes by the block's and lets the allocator round on top, outside its plan; here the rounding
        lies under the cap, so the pool may be a few blocks smaller than vLLM's log says. Raise DoesNotFit if one
        longest request has no room beside the null block, ScenarioError if more are wanted than the device holds.
        """
        plan, pool = self._plan, self._plan.pool
        arena, block_bytes = plan.scenario.memory.kv_arena, pool.block_tensors

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
        longest = pool.request_blocks(plan.max_model_len)
        null_blocks = 0 if is_v0(plan.scenario) else 1
        if blocks - null_blocks < longest:
            null = ", one of them the null block," if null_blocks else ""
            reason = (
                f"one request of max_model_len {plan.max_model_len} needs {longest} blocks; the pool has {blocks}"
                f"{null} once its tensors are rounded: "
                + ("raise num_blocks" if wanted is not None else "raise gpu_memory_utilization")
                + ", or shorten max_model_len or block_size"
            )
            raise DoesNotFit(replace(plan.budget, fits=False, reason=reason))
        return blocks

    def _too_many(self, wanted: int, blocks: int) -> str:
        return (
            f"{wanted} blocks do not fit, {blocks} do by the plan: leave it out, or raise engine.gpu_memory_utilization"
        )


def _config(config: Any, values: dict[str, Any]) -> Any:
    """Make a policy's own settings from those of the scenario that it knows."""
    names = {f.name for f in fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})
