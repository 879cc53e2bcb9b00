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


def is_v0(scenario: Scenario) -> bool:
    """Whether the rules are those of vLLM before its v1 engine; other policies than ``paged`` have no version."""
    return scenario.kv_cache.policy == "paged" and scenario.kv_cache.version == "v0"


def kv_policy(scenario: Scenario, *, grouped: bool = False) -> type[KVPolicy]:
    """The class; *grouped*: for a model whose layers keep different things. Raise UnknownPolicy."""
    if grouped:
        return kv_policies.get("paged_groups")
    return kv_policies.get("paged_v0" if is_v0(scenario) else scenario.kv_cache.policy)


def told(scenario: Scenario) -> str:
    """The policy in the words of a message, with the release where that makes a difference."""
    kv = scenario.kv_cache
    return f"{kv.policy} of {kv.version}" if kv.policy == "paged" else kv.policy
