"""Every pair of a KV policy and an arena: a legal one serves requests, an illegal one is refused by name.

Pairs are read from the registries, but for classes that a model or a release chooses in place of ``paged``. Nothing
is known here of what a policy requires or an allocator offers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.sim import legality
from hbmtwin.sim.kv_policy import CHOSEN_BY_MODEL, CHOSEN_BY_RELEASE
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

NAMED = [name for name in kv_policies.names() if name not in CHOSEN_BY_MODEL | CHOSEN_BY_RELEASE]
PAIRS = list(product(NAMED, device_allocators.names()))
LEGAL = [(p, a) for p, a in PAIRS if kv_policies.get(p).requires <= device_allocators.get(a).features]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]
SMALL = (
    "engine.max_model_len=512",
    "workload.users=3",
    "workload.num_prompts=6",
    "workload.prompt_tokens=100",
    "workload.output_tokens=30",
    "workload.system_prompt_tokens=3",
    "session.turns=2",
    "session.think_time_s=0.1",
    "session.between_turns=keep",
    "kv_cache.growth=static",
)


def scenario(policy: str, arena: str, *more: str) -> Scenario:
    return Scenario.load(overrides=[f"kv_cache.policy={policy}", f"memory.kv_arena={arena}", *SMALL, *more])


def refusal(policy: str, arena: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        legality.check(scenario(policy, arena))
    return str(caught.value)


@pytest.mark.parametrize(("policy", "arena"), LEGAL)
def test_a_legal_pair_serves_every_request(policy: str, arena: str) -> None:
    result = Twin(scenario(policy, arena)).run()  # whose books are checked at every row
    assert result.summary["requests_completed"] == 6
    assert result.summary["oom"] is None
    offers = "park" in kv_policies.get(policy).offers
    assert (result.timeline["parked"].max() > 0) == offers
    last = result.timeline.iloc[-1]
    assert (last["kv_tokens"], last["kv_parked"], last["growth_copy"]) == (0, 0, 0)


@pytest.mark.parametrize(("policy", "arena"), ILLEGAL)
def test_an_illegal_pair_is_refused_with_what_is_missing_and_who_offers_it(policy: str, arena: str) -> None:
    requires = kv_policies.get(policy).requires
    missing = ", ".join(sorted(requires - device_allocators.get(arena).features))
    able = ", ".join(name for name, cls in device_allocators if requires <= cls.features)
    assert able
    assert refusal(policy, arena) == (
        f"kv_cache.policy: {policy!r} needs {missing}, which memory.kv_arena = {arena!r} does not offer; "
        f"allocators that do: {able}"
    )


def test_the_refusal_of_pages_word_for_word() -> None:
    assert len(ILLEGAL) >= 5
    assert refusal("virtual", "tlsf") == (
        "kv_cache.policy: 'virtual' needs pages, which memory.kv_arena = 'tlsf' does not offer; "
        "allocators that do: direct"
    )


@pytest.fixture
def demanding() -> Iterator[str]:
    """A policy that needs what two allocators offer together, and none alone."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(PagedConfig):
        pass

    class Demanding(PagedPolicy):
        name = "demanding"
        requires = frozenset({"pages", "region"})

    Demanding.Config = Config
    kv_policies.register("demanding")(Demanding)
    yield "demanding"
    kv_policies.unregister("demanding")


@pytest.mark.parametrize(
    ("arena", "missing"), [("direct", "region"), ("pooled", "pages"), ("caching", "pages, region")]
)
def test_where_nobody_offers_what_a_policy_needs_the_refusal_says_so(demanding: str, arena: str, missing: str) -> None:
    assert refusal(demanding, arena) == (
        f"kv_cache.policy: 'demanding' needs {missing}, which memory.kv_arena = {arena!r} does not offer; "
        "no allocator offers all that it needs"
    )


def test_a_pair_that_is_let_through_though_illegal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_policies.get("virtual"), "requires", frozenset())
    legality.check(scenario("virtual", "pooled"))
    with pytest.raises(Exception, match=r"page_bytes|reserve_range") as caught:
        test_a_legal_pair_serves_every_request("virtual", "pooled")
    assert not isinstance(caught.value, ScenarioError)


@pytest.mark.parametrize("general", device_allocators.names())
def test_weights_lie_beside_the_cache_but_for_allocators_of_one_region(general: str) -> None:
    wanted: Any = scenario("paged", "caching", f"memory.general={general}")
    if "region" not in device_allocators.get(general).features:
        assert Twin(wanted).run().summary["requests_completed"] == 6
        return
    with pytest.raises(ScenarioError) as caught:
        Twin(wanted)
    assert str(caught.value) == (
        f"memory.general: {general!r} takes one region at start and cannot hold the weights beside another arena; use "
        "it as memory.kv_arena"
    )
