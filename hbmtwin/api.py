"""The names that a notebook needs: ``from hbmtwin import Scenario, run``.

Everything here is re-exported from where it lives; ``hbmtwin`` itself fetches these names on first use.
"""

from __future__ import annotations

from hbmtwin.allocators.caching import RULES
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.allocators.oom import Cause, OutOfMemory
from hbmtwin.allocators.records import KVLayout
from hbmtwin.allocators.registry import UnknownPolicy, device_allocators, kv_policies
from hbmtwin.allocators.retention import RETENTIONS
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.weights import weight_bytes_per_rank
from hbmtwin.sim.budget.memory_budget import DoesNotFit, MemoryBudget
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan
from hbmtwin.sim.capacity.capacity_runs import CapacityRuns
from hbmtwin.sim.capacity.error_bars import ErrorBars, error_bars, error_bars_to_dicts, runs_for_error_bars
from hbmtwin.sim.capacity.oom_point import OomPoint, oom_point
from hbmtwin.sim.capacity.oom_point_loads import parse_load
from hbmtwin.sim.capacity.plan import plan, plan_each, question_of
from hbmtwin.sim.capacity.plan_capacity import PlanQuestion, check_question, rule_of
from hbmtwin.sim.catalog import (
    CatalogError,
    WorkloadPreset,
    device,
    device_figures,
    devices,
    hugging_face_ids,
    model,
    models,
    workload_preset,
    workload_presets,
)
from hbmtwin.sim.engine_config import Progress
from hbmtwin.sim.experiment import compare, differences
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.explain.explanation import Explanation
from hbmtwin.sim.export import EXPORT_FORMATS, check_exportable, export
from hbmtwin.sim.fit.fit import fit, memory_budget
from hbmtwin.sim.fit.options import FitError
from hbmtwin.sim.fit.report import Fit
from hbmtwin.sim.kv_layout import DTYPES as KV_DTYPES
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.kv_policy import CHOSEN_BY_MODEL, CHOSEN_BY_RELEASE
from hbmtwin.sim.last_operations import LastOperations, last_operations
from hbmtwin.sim.legality import notes
from hbmtwin.sim.replay import OpResult, ReplayError, Tally, make_allocator, per_op_rows, replay, write_per_op
from hbmtwin.sim.result import Result, ResultError, check_replaceable, write_directory
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError
from hbmtwin.sim.scheduler import schedulers
from hbmtwin.sim.serial_reuse import ReuseTerms, reuse_terms
from hbmtwin.sim.slo import objectives
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, run_row
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.sweep.store import RunStore
from hbmtwin.sim.sweep.workers import WorkersLost
from hbmtwin.sim.what_would_hold import ran_short, what_would_hold
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace, write_memory_trace
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.records import Request, Source, WorkloadError
from hbmtwin.workloads.statistics.describe import Description, describe

__all__ = [
    "CHOSEN_BY_MODEL",
    "CHOSEN_BY_RELEASE",
    "EXPORT_FORMATS",
    "GROWTH_RULES",
    "KV_DTYPES",
    "PRESETS",
    "RETENTIONS",
    "ROW_COLUMNS",
    "RULES",
    "CapacityPlan",
    "CapacityRuns",
    "CatalogError",
    "Cause",
    "Description",
    "DeviceSpec",
    "DoesNotFit",
    "ErrorBars",
    "Explanation",
    "Fit",
    "FitError",
    "HbmDriver",
    "KVLayout",
    "LastOperations",
    "MemoryBudget",
    "MemoryOp",
    "ModelShape",
    "OomPoint",
    "OpResult",
    "OutOfMemory",
    "PlanQuestion",
    "Progress",
    "ReplayError",
    "Request",
    "Result",
    "ResultError",
    "ReuseTerms",
    "RunStore",
    "Scenario",
    "ScenarioError",
    "Source",
    "Tally",
    "UnknownPolicy",
    "WorkersLost",
    "WorkloadError",
    "WorkloadPreset",
    "check_exportable",
    "check_question",
    "check_replaceable",
    "compare",
    "describe",
    "device",
    "device_allocators",
    "device_figures",
    "devices",
    "differences",
    "error_bars",
    "error_bars_to_dicts",
    "explain",
    "export",
    "fit",
    "hugging_face_ids",
    "kv_layout",
    "kv_policies",
    "last_operations",
    "make_allocator",
    "memory_budget",
    "model",
    "models",
    "notes",
    "objectives",
    "oom_point",
    "open_trace",
    "parse_load",
    "per_op_rows",
    "plan",
    "plan_each",
    "question_of",
    "ran_short",
    "read_memory_trace",
    "replay",
    "reuse_terms",
    "rule_of",
    "run",
    "run_each",
    "run_row",
    "runs_for_error_bars",
    "scenario_key",
    "schedulers",
    "weight_bytes_per_rank",
    "what_would_hold",
    "workload_preset",
    "workload_presets",
    "write_directory",
    "write_memory_trace",
    "write_per_op",
]
