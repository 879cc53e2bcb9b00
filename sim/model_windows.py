"""Layers that see a window of the context: whether the KV policy makes use of it, and what does not go with that.

::

    model's layers   kv_cache.policy, retention          what is kept                what is read
    windows          paged                               window, in whole blocks     window
    windows          other, or no hybrid manager         the whole context           window
    see all          paged, sliding_window(w) ...        window, in whole blocks     window
    see all          contiguous, any retention           what the policy's rule keeps
"""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.allocators.retention import Retention, SinkRecent, SlidingWindow, Truncate, retention_rule
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.scenario import Scenario, ScenarioError

RETAINED_IN_BLOCKS = (Truncate, SlidingWindow, SinkRecent)
"""Retention that a block table allows: tokens go when all of their block have; none moves."""


def block_retention(scenario: Scenario) -> Retention | None:
    """The retention of a paged policy; None where it keeps every token."""
    rule = retention_rule(scenario.kv_cache.retention)
    return rule if scenario.kv_cache.policy == "paged" and isinstance(rule, RETAINED_IN_BLOCKS) else None


def with_windows(scenario: Scenario, model: ModelShape) -> tuple[ModelShape, int]:
    """*model* as its KV is kept by the scenario's policy, and how many tokens at the start its windows keep besides.

    Retention on paged gives every layer a window. Policies other than paged have no block tables to leave holes in, and
    neither has paged with ``disable_hybrid_kv_cache_manager``: there every layer keeps the whole context.
    """
    rule = block_retention(scenario)
    if rule is not None and rule.bound is not None:
        sinks = rule.sinks if isinstance(rule, SinkRecent) else 0
        return replace(model, layer_windows=(rule.bound - sinks,) * model.num_layers), sinks
    kv = scenario.kv_cache
    if kv.policy != "paged" or kv.disable_hybrid_kv_cache_manager:
        return replace(model, layer_windows=()), 0
    return model, 0


def check_windows(scenario: Scenario, model: ModelShape, kept: ModelShape) -> None:
    """Refuse what does not go with windows in layers. Raise ScenarioError."""
    kv = scenario.kv_cache
    if model.layer_windows and kv.retention != "full":
        raise ScenarioError(
            f"kv_cache.retention: {model.name} has sliding windows of {model.window} tokens of its own; use full, or a "
            "model whose layers see the whole context"
        )
    if not kept.layer_windows:
        return
    whose = f"the windows of {model.name}" if model.layer_windows else f"retention = {kv.retention}"
    cure = "set kv_cache.disable_hybrid_kv_cache_manager = true" if model.layer_windows else "use retention = full"
    if kv.version != "0.27":
        raise ScenarioError(
            f"kv_cache.version: how {kv.version} shares a pool for {whose} is not known; use 0.27, or {cure}"
        )
    if scenario.memory.admission != "none":
        raise ScenarioError(f"memory.admission: reserve knows no pool for {whose}; leave it none, or {cure}")
    drops = not model.layer_windows and not isinstance(block_retention(scenario), SlidingWindow)
    if drops and kv.enable_prefix_caching:
        raise ScenarioError(
            f"kv_cache.enable_prefix_caching: under {whose} a key would promise KV that was computed without what has "
            "been dropped; use retention = sliding_window(w), or no prefix caching"
        )


def as_read(model: ModelShape, kept: ModelShape, sinks: int) -> ModelShape:
    """*model* as its attention reads the KV: what is *kept* of it, *sinks* tokens at the start besides; else its own
    windows, whatever else is kept."""
    if sinks:
        return replace(model, layer_windows=(kept.window + sinks,) * model.num_layers)
    return kept if kept.window else model


def window_notes(scenario: Scenario, model: ModelShape, kept: ModelShape) -> tuple[str, ...]:
    """What a user should know of windows that are not made use of, or are not the model's own."""
    kv = scenario.kv_cache
    if kv.policy == "paged" and kv.disable_hybrid_kv_cache_manager and not model.layer_windows:
        return (f"kv_cache.disable_hybrid_kv_cache_manager has no effect: {model.name} has no sliding windows",)
    if model.layer_windows and not kept.layer_windows:
        return (
            f"{model.num_window_layers} of {model.num_layers} layers of {model.name} see {model.window} tokens only; "
            "here they keep the whole context, and read their window",
        )
    if kept.layer_windows and not model.layer_windows:
        return (
            f"kv_cache.retention = {kv.retention} on paged is for research: a block goes when all of its tokens have, "
            "positions stay what they were, and a model that was trained on the whole context answers otherwise",
        )
    return ()
