"""What a scenario comes to before any memory is built: model, device and lengths, the pool of blocks, the budget."""

from __future__ import annotations

from collections.abc import Mapping

from hbmtwin.kernels.records import CostModel
from hbmtwin.kernels.stages import stage_shapes
from hbmtwin.sim import catalog, legality
from hbmtwin.sim.budget.memory_budget import DoesNotFit, MemoryBudget
from hbmtwin.sim.calibration import profile_of
from hbmtwin.sim.fit.fit import memory_budget
from hbmtwin.sim.layer_groups import BlockPool, block_pool
from hbmtwin.sim.model_states import check_states, mamba_mode
from hbmtwin.sim.model_windows import as_read, check_windows, with_windows
from hbmtwin.sim.pipeline import step_cost
from hbmtwin.sim.resolve import (
    check_groups,
    check_pages,
    check_tensors,
    device_of,
    layout_of,
    longest_request_of,
    max_model_len_of,
    max_num_batched_tokens_of,
    stage_layers_of,
)
from hbmtwin.sim.scenario import Scenario, ScenarioError


class ServerPlan:
    """A scenario resolved and checked, as far as it can be without placing a byte.

    Raise ScenarioError, CatalogError, or DoesNotFit if the budget leaves too little. *cost* stands in for the model of
    the scenario's device.
    """

    def __init__(self, scenario: Scenario, cost: CostModel | None = None) -> None:
        legality.check(scenario)
        self.scenario = scenario
        self.model = catalog.model(scenario.model.name)
        self.device = device_of(scenario)
        self.profile = profile_of(scenario)
        """Where figures of the device come from that were measured; None: all are the catalog's."""
        self.max_model_len = max_model_len_of(scenario, self.model)
        self.longest_request = longest_request_of(scenario, self.max_model_len)
        self.max_num_batched_tokens = max_num_batched_tokens_of(scenario, self.max_model_len)
        check_tensors(scenario, self.model)
        self.layout = layout_of(scenario, self.model, self.device)
        self.stage_layers = stage_layers_of(scenario, self.model, self.device)
        batches = 2 if scenario.scheduler.async_scheduling else len(self.stage_layers)
        self.in_flight_tokens = self.max_num_batched_tokens * batches
        """By which vLLM sizes windows: a pipeline has as many batches under way as stages, and who plans ahead two."""
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
        measured: Mapping[str, int] = {} if self.profile is None else self.profile.memory
        profiled = set(measured)
        if s.memory.activation_bytes is not None:
            measured = {**measured, "activation_bytes": s.memory.activation_bytes}
            profiled.discard("activation_bytes")
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
            async_scheduling=s.scheduler.async_scheduling,
            block_size=self.block_size,
            other_tenant_bytes=s.device.other_tenant_bytes,
            activation_bytes=measured.get("activation_bytes"),
            non_torch_bytes=measured.get("non_torch_bytes"),
            graph_bytes=measured.get("graph_bytes"),
            communicator_bytes=measured.get("communicator_bytes"),
            profiled=profiled,
        )
