"""What the names of a scenario stand for: the device, the longest request, and the layout of the model's KV."""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.allocators.records import KVLayout
from hbmtwin.allocators.retention import retention_rule
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.kernels.weights import check_tensor_parallel
from hbmtwin.sim import catalog
from hbmtwin.sim.calibration import calibrated, profile_of
from hbmtwin.sim.kv_layout import kernel_notes, kv_layout, kv_refusal
from hbmtwin.sim.legality import COUNT_BLOCKS
from hbmtwin.sim.model_windows import block_retention
from hbmtwin.sim.scenario import Scenario, ScenarioError

MAX_REQUEST_TOKENS = 2**40
"""Longest request where only what is kept of it counts."""
IN_BLOCKS = ("paged", "radix")
"""KV policies whose KV is read through a block table."""


def device_of(scenario: Scenario) -> DeviceSpec:
    """The device, with the memory that the scenario gives it and the figures of its profile. Raise CatalogError, and
    ScenarioError for a profile of another device or one that cannot be read."""
    device = calibrated(profile_of(scenario), catalog.device(scenario.device.name))
    if scenario.device.memory_bytes is None:
        return device
    return replace(device, memory_bytes=scenario.device.memory_bytes)


def max_model_len_of(scenario: Scenario, model: ModelShape) -> int:
    """Longest prompt and answer together. Raise ScenarioError if it is more than the model has positions."""
    wanted = scenario.engine.max_model_len
    if wanted is None:
        return model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ScenarioError(
            f"engine.max_model_len: {wanted} is more than the {model.max_position_embeddings} positions of "
            f"{model.name}; take at most that"
        )
    return wanted


def longest_request_of(scenario: Scenario, max_model_len: int) -> int:
    """*max_model_len*, unless retention bounds what is kept: positions then count within the cache, as in StreamingLLM,
    and a request may be of any length. Raise ScenarioError if more is kept than that."""
    bound = retention_rule(scenario.kv_cache.retention).bound
    if bound is None:
        return max_model_len
    if bound > max_model_len:
        raise ScenarioError(
            f"kv_cache.retention: {scenario.kv_cache.retention} keeps {bound} tokens, more than max_model_len "
            f"{max_model_len}: keep fewer, or raise engine.max_model_len"
        )
    in_blocks = block_retention(scenario) is not None  # a block table is indexed by position
    return max_model_len if in_blocks else MAX_REQUEST_TOKENS


def layout_of(scenario: Scenario, model: ModelShape, device: DeviceSpec) -> KVLayout:
    """How the model's KV lies in memory. Raise ScenarioError where the model, device or policy cannot have it so."""
    kv, tp = scenario.kv_cache, scenario.engine.tensor_parallel_size
    try:
        check_tensor_parallel(model, tp)
    except ValueError as error:
        raise ScenarioError(f"engine.tensor_parallel_size: {error}") from None
    if (refused := kv_refusal(device, model, dtype=kv.dtype, v_dtype=kv.v_dtype)) is not None:
        raise ScenarioError(refused)
    try:
        layout = kv_layout(model, dtype=kv.dtype, v_dtype=kv.v_dtype, tensor_parallel_size=tp)
    except ValueError as error:
        raise ScenarioError(f"kv_cache.{error}") from None
    in_blocks = kv.policy in IN_BLOCKS
    if in_blocks and (refused := kv_refusal(device, model, dtype=kv.dtype, v_dtype=kv.v_dtype, paged=True)) is not None:
        raise ScenarioError(refused)
    return layout


def stage_layers_of(scenario: Scenario, model: ModelShape, device: DeviceSpec) -> tuple[range, ...]:
    """The layers of each pipeline stage. Raise ScenarioError where the model, device or engine cannot be cut so."""
    engine = scenario.engine
    stages = engine.pipeline_parallel_size
    if stages > 1 and not (device.send_ns and device.send_bandwidth_bytes_per_s):
        raise ScenarioError(
            f"engine.pipeline_parallel_size: {device.name} has no figures for a message between stages (send_ns, "
            "send_bandwidth_bytes_per_s): add them to the device, or use engine.tensor_parallel_size"
        )
    if stages > 1 and scenario.scheduler.policy == "vllm_v0":
        raise ScenarioError(
            "engine.pipeline_parallel_size: v0 deals requests and blocks out to one scheduler a stage, which is not "
            "computed; use 1, or scheduler.policy = 'vllm' with a later kv_cache.version"
        )
    key = "pipeline_parallel_size" if engine.layer_partition is None else "layer_partition"
    try:
        layers = stage_layers(model.num_layers, stages, engine.layer_partition)
        stage_shapes(model, layers)
    except ValueError as error:
        raise ScenarioError(f"engine.{key}: {error}") from None
    return layers


def max_num_batched_tokens_of(scenario: Scenario, max_model_len: int) -> int:
    """Most tokens that one step computes: at least *max_model_len* where prompts are not cut into chunks."""
    scheduler = scenario.scheduler
    whole = scheduler.policy == "vllm" and not scheduler.enable_chunked_prefill
    if whole or scheduler.policy == "prefill_first":
        return max(scheduler.max_num_batched_tokens, max_model_len)
    return scheduler.max_num_batched_tokens


def check_pages(scenario: Scenario, block_size: int) -> None:
    """Refuse chunks that would end inside a page where prompts are cut at pages. Raise ScenarioError."""
    scheduler = scenario.scheduler
    if scheduler.policy == "sglang" and scheduler.max_num_batched_tokens % block_size:
        raise ScenarioError(
            f"scheduler.max_num_batched_tokens: sglang cuts prompts at whole pages; use a multiple of {block_size}, "
            f"not {scheduler.max_num_batched_tokens}, or another kv_cache.block_size"
        )


def check_tensors(scenario: Scenario, model: ModelShape) -> None:
    """Refuse tensors one by one of matrices whose kernels' tensors are not known. Raise ScenarioError."""
    if scenario.memory.activations != "per_layer":
        return
    if model.experts is not None:
        what = "experts"
    elif model.quantization is not None:
        what = f"matrices quantised as {model.quantization.method}"
    else:
        return
    raise ScenarioError(
        f"memory.activations: 'per_layer' makes the tensors of a step one by one, and those of {what} ({model.name}) "
        "are not known; use 'peak' or 'none'"
    )


def matrix_notes(model: ModelShape) -> tuple[str, ...]:
    """How far the step times of experts and of 8-bit activations are known."""
    found = []
    if model.experts is not None:
        found.append(
            f"experts of {model.name}: a step reads as many as its tokens would choose on average, all alike, at 0.65 "
            "(0.4 to 0.9) of a dense matrix's bandwidth, confidence L; sorting tokens by expert takes no time"
        )
    if model.quantization is not None and model.quantization.activation_bits < 16:
        found.append(
            f"matrices of {model.name} in {model.quantization.method}: 1.2 (0.9 to 1.9) of the 16-bit FLOPs where the "
            "device multiplies such numbers, confidence L; quantising activations takes no time"
        )
    return tuple(found)


def check_groups(scenario: Scenario) -> None:
    """Refuse what does not go with layers that keep different things. Raise ScenarioError."""
    if (policy := scenario.scheduler.policy) in COUNT_BLOCKS:
        raise ScenarioError(
            f"scheduler.policy: {policy!r} counts blocks by tokens, and layers with a window (of {scenario.model.name} "
            "or by kv_cache.retention) or a state hold others; use vllm"
        )


def batch_notes(scenario: Scenario, max_model_len: int) -> tuple[str, ...]:
    """What is made of a token budget below the longest request where prompts are computed whole."""
    scheduler = scenario.scheduler
    given = f"scheduler.max_num_batched_tokens = {scheduler.max_num_batched_tokens}"
    raised = max_num_batched_tokens_of(scenario, max_model_len)
    if raised > scheduler.max_num_batched_tokens:
        why = "scheduler.enable_chunked_prefill is false"
        if scheduler.policy == "prefill_first":
            why = "prefill_first computes prompts whole"
        return (f"{given} is raised to max_model_len, {raised}, for {why}",)
    if scheduler.policy != "vllm_v0" or max_model_len <= scheduler.max_num_batched_tokens:
        return ()
    return (
        f"{given} rejects longer prompts, and longer requests once they are preempted: v0 refuses to start with less "
        f"than max_model_len, {max_model_len}",
    )


def device_notes(scenario: Scenario, model: ModelShape, device: DeviceSpec) -> tuple[str, ...]:
    """Remarks that depend on whose device it is."""
    kv, engine = scenario.kv_cache, scenario.engine
    notes = kernel_notes(device, model, dtype=kv.dtype, v_dtype=kv.v_dtype, paged=kv.policy in IN_BLOCKS)
    if kv.policy == "paged" and device.vendor == "ascend" and kv.block_size not in (None, device.default_block_size):
        notes += (
            f"kv_cache.block_size = {kv.block_size}: vllm-ascend makes it {device.default_block_size} where prefix "
            "caching or chunked prefill is on, as both are by default; here it stays",
        )
    if device.vendor == "cpu" and "caching" in (scenario.memory.general, scenario.memory.kv_arena):
        notes += (
            f"{scenario.device.name}: torch takes a CPU's memory from the C library, which is not modelled; bytes are "
            "placed as CUDA's caching allocator would, so that sizes hold and addresses do not",
        )
    if engine.task_queue_enable == 2 and scenario.memory.activations == "per_layer" and device.vendor != "ascend":
        notes += (f"engine.task_queue_enable is Ascend's, and has no effect on {scenario.device.name}",)
    return notes
