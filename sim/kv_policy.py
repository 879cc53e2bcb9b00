"""Which KV policy a scenario means: users name a family and a release, the registry has a class for each set of rules.

::

    kv_cache.policy   kv_cache.version     model's layers                       class
    paged             0.27, 0.22, 0.18     all see the whole context            paged
    paged             0.27                 windows, chunks or states among them paged_groups
    paged             v0                   all                                  paged_v0
    any other         -                    all                                  that name
"""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.allocators.retention import Retention, SinkRecent, SlidingWindow, Truncate, retention_rule
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.scenario import Scenario

CHOSEN_BY_RELEASE = {"paged_v0": "kv_cache.version = 'v0'"}
"""Classes that are not named in a scenario, and what to write instead of ``kv_cache.policy``."""
CHOSEN_BY_MODEL = {"paged_groups": "a model with sliding windows"}
RETAINED_IN_BLOCKS = (Truncate, SlidingWindow, SinkRecent)
"""Retention that a block table allows: tokens go when all of their block have; none moves."""


def kv_policy(scenario: Scenario) -> type[KVPolicy]:
    """The class for a model whose layers all see the whole context. Raise UnknownPolicy."""
    name = scenario.kv_cache.policy
    return kv_policies.get("paged_v0" if name == "paged" and scenario.kv_cache.version == "v0" else name)


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
