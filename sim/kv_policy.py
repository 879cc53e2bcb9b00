"""Which KV policy a scenario means: users name a family and a release, the registry has a class for each set of rules.

::

    kv_cache.policy   kv_cache.version     model's layers                       class
    paged             0.27, 0.22, 0.18     all see the whole context            paged
    paged             0.27                 windows, chunks or states among them paged_groups
    paged             v0                   all                                  paged_v0
    any other         -                    all                                  that name
"""

from __future__ import annotations

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.sim.scenario import Scenario

CHOSEN_BY_RELEASE = {"paged_v0": "kv_cache.version = 'v0'"}
"""Classes that are not named in a scenario, and what to write instead of ``kv_cache.policy``."""
CHOSEN_BY_MODEL = {"paged_groups": "a model with sliding windows or Mamba states"}


def named_by_users() -> list[str]:
    """KV policies that ``kv_cache.policy`` takes."""
    return [name for name, _ in kv_policies if name not in (*CHOSEN_BY_RELEASE, *CHOSEN_BY_MODEL)]


def kv_policy(scenario: Scenario) -> type[KVPolicy]:
    """The class for a model whose layers all see the whole context. Raise UnknownPolicy."""
    name = scenario.kv_cache.policy
    return kv_policies.get("paged_v0" if name == "paged" and scenario.kv_cache.version == "v0" else name)
