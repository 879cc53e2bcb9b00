"""Models with layers that keep a state (Mamba-2): how vLLM caches states, and what does not go with them.

::

    kv_cache.enable_prefix_caching   kv_cache.mamba_cache_mode   states of a sequence
    false                            - or none                   none: one a layer, as long as it lives
    true                             - or all                    all: one at every block is found again
    true                             align                       align: those at the ends of chunks are

vLLM 0.27 turns a mode that does not go with the first key into one that does, with a line in its log; here it is
refused by name. By itself it takes ``all`` for the three model types that the catalog reads.
"""

from __future__ import annotations

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.layer_groups import BlockPool
from hbmtwin.sim.scenario import Scenario, ScenarioError


def mamba_mode(scenario: Scenario, model: ModelShape) -> MambaMode:
    """The mode in which the scenario's engine caches the states of *model*; ``none`` for one without any."""
    kv = scenario.kv_cache
    if model.mamba is None or not kv.enable_prefix_caching:
        return "none"
    return kv.mamba_cache_mode or "all"


def state_block_size(pool: BlockPool) -> int:
    """Tokens between two states that are kept at the ends of chunks; 0 where chunks may end anywhere."""
    groups = pool.grouping.groups if pool.grouping is not None else ()
    return next((group.block_size for group in groups if group.mamba_mode == "align"), 0)


def check_states(scenario: Scenario, model: ModelShape) -> None:
    """Refuse what does not go with states. Raise ScenarioError naming keys, reason and cure."""
    if model.mamba is None:
        return
    kv = scenario.kv_cache
    whose = f"the states of the {model.num_mamba_layers} Mamba-2 layers of {model.name}"
    if kv.policy != "paged":
        raise ScenarioError(f"kv_cache.policy: {kv.policy!r} has no place for {whose}; use paged")
    if kv.version != "0.27":
        raise ScenarioError(f"kv_cache.version: how {kv.version} keeps {whose} is not known; use 0.27")
    if kv.retention != "full":
        raise ScenarioError(
            f"kv_cache.retention: {kv.retention} drops tokens, and {whose} have taken in every one; use full"
        )
    if kv.disable_hybrid_kv_cache_manager:
        raise ScenarioError(
            f"kv_cache.disable_hybrid_kv_cache_manager: without groups there is no place for {whose}, and vLLM does "
            "not start; leave it false"
        )
    if scenario.memory.admission != "none":
        raise ScenarioError(f"memory.admission: reserve knows no pool for {whose}; leave it none")
    mode = kv.mamba_cache_mode
    if mode == "align" and scenario.scheduler.policy == "vllm" and not scenario.scheduler.enable_chunked_prefill:
        raise ScenarioError(
            "scheduler.enable_chunked_prefill: with kv_cache.mamba_cache_mode = 'align' chunks end where states are "
            "kept, so there must be chunks: leave it true, or use all"
        )
    if mode in ("align", "all") and not kv.enable_prefix_caching:
        raise ScenarioError(
            f"kv_cache.mamba_cache_mode: {mode} keeps states for later requests, and kv_cache.enable_prefix_caching is "
            "false: set that to true, or use none"
        )
    if mode == "none" and kv.enable_prefix_caching:
        raise ScenarioError(
            "kv_cache.mamba_cache_mode: none keeps no state for later requests, so that kv_cache.enable_prefix_caching "
            "finds nothing: use all or align, or set that to false"
        )
    if mode == "align" and scenario.scheduler.policy != "vllm":
        raise ScenarioError(
            f"kv_cache.mamba_cache_mode: align ends chunks of a prompt at states, and {scenario.scheduler.policy} does "
            "not; use all, or scheduler.policy = 'vllm'"
        )


def state_notes(scenario: Scenario, model: ModelShape, pool: BlockPool, block_size: int) -> tuple[str, ...]:
    """What a user of such a model should know of the run; and that the mode has no effect on other models."""
    mode = scenario.kv_cache.mamba_cache_mode
    if model.mamba is None:
        return () if mode is None else (f"kv_cache.mamba_cache_mode has no effect: {model.name} has no Mamba-2 layers",)
    assert pool.grouping is not None
    attention = next(group for group in pool.grouping.groups if group.kind != "mamba")
    state_bytes = model.mamba_state_bytes(scenario.engine.tensor_parallel_size)
    found = [
        f"times of the {model.num_mamba_layers} Mamba-2 layers of {model.name} are defaults without a measured source "
        "(confidence L)"
    ]
    if attention.block_size != block_size:
        found.append(
            f"kv_cache.block_size: blocks have {attention.block_size:,} tokens instead of {block_size}, so that a page "
            f"of {pool.grouping.page_bytes:,} bytes holds a state of {state_bytes:,}"
        )
    state = next(group for group in pool.grouping.groups if group.kind == "mamba")
    if state.mamba_mode == "all" and state.block_size > attention.block_size:
        found.append(
            f"kv_cache.mamba_cache_mode: vllm-ascend keeps states of mode all every {state.block_size:,} tokens only, "
            "so shorter prefixes are never found; align keeps them every block"
        )
    return tuple(found)
