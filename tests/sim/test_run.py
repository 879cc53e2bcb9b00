"""From a scenario to a server: what is built, under which cap, and why it would not start."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.kernels.weights import weight_bytes_per_rank
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.run import Twin, run
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError
from hbmtwin.sim.scheduler import schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler

GIB = 2**30


def scenario(*overrides: str, preset: str | None = None) -> Scenario:
    quick = ["workload.num_prompts=4", "workload.request_rate=inf", "workload.output_tokens=6", "session.turns=1"]
    return Scenario.load(preset=preset, overrides=[*quick, *overrides])


# -- what is built ---------------------------------------------------------------------------------------------------


def test_all_presets_have_the_same_bytes_for_kv() -> None:
    twins = {preset: Twin(scenario(preset=preset)) for preset in PRESETS}
    assert len({twin.kv_budget_bytes for twin in twins.values()}) == 1
    assert len({twin.static_bytes for twin in twins.values()}) == 1
    loaded = twins["caching"].general.usage().reserved
    for preset, twin in twins.items():
        cap = loaded + twin.budget.kv_bytes
        held = sum(a.usage().reserved for a in {id(a): a for a in (twin.general, twin.arena)}.values())
        assert held <= cap, preset
        result = twin.run()
        assert result.summary["peak_reserved_bytes"] <= cap, preset
        assert result.summary["kv_budget_bytes"] == twin.kv_budget_bytes


def test_the_arena_is_shared_where_both_are_of_a_kind() -> None:
    caching, pooled = Twin(scenario(preset="caching")), Twin(scenario(preset="pooled"))
    assert caching.arena is caching.general
    assert pooled.arena is not pooled.general
    unit = 2 * 2**20
    assert pooled.arena.usage().reserved == pooled.kv_budget_bytes // unit * unit


@pytest.mark.parametrize("arena", ["caching", "pooled"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_pool_has_the_most_blocks_that_fit(arena: str, block_size: int) -> None:
    sets = [f"memory.kv_arena={arena}", f"kv_cache.block_size={block_size}"]
    twin = Twin(scenario(*sets))
    assert isinstance(twin.kv, PagedPolicy)
    blocks = twin.kv.config.num_blocks
    assert blocks <= twin.budget.num_blocks  # which does not round
    assert blocks > 0.98 * twin.budget.num_blocks
    loaded = Twin(scenario(preset="caching")).general.usage().reserved if arena == "caching" else 0
    assert twin.arena.usage().reserved - loaded <= twin.kv_budget_bytes
    one_more = f"kv_cache.options={{num_blocks={blocks + 1}}}"
    if arena == "caching":  # the pool may be made larger by hand, as with vLLM's num_gpu_blocks_override
        assert Twin(scenario(*sets, one_more)).arena.usage().reserved - loaded > twin.kv_budget_bytes
        return
    with pytest.raises(
        ScenarioError, match=rf"^kv_cache\.options: num_blocks: {blocks + 1} blocks do not fit, {blocks} do by the plan"
    ):
        Twin(scenario(*sets, one_more))


def test_weights_and_the_activation_reserve_are_there_from_the_start() -> None:
    twin = Twin(scenario("memory.activation_bytes=3GiB"))
    by_tag = twin.general.usage().requested_by_tag
    assert by_tag[Tag.ACTIVATION] == 3 * GIB
    tensors = weight_bytes_per_rank(twin.model)
    assert by_tag[Tag.WEIGHT] == tensors
    assert tensors <= twin.budget.weights_bytes < 1.001 * tensors  # in whole blocks of the allocator
    row = twin.run().timeline.iloc[-1]
    assert (row["activations"], row["weights"]) == (3 * GIB, tensors)


def test_other_tenants_and_another_memory_size_are_taken_as_given() -> None:
    twin = Twin(scenario("device.memory_bytes=40GiB", "device.other_tenant_bytes=2GiB"))
    free, total = twin.driver.mem_info()
    assert total == 40 * GIB
    held = twin.general.usage().reserved
    assert free == 40 * GIB - 2 * GIB - twin.static_bytes - held


def test_defaults_come_from_the_device_and_the_model() -> None:
    ascend, cuda = Twin(scenario()), Twin(scenario("device.name=a100-80gb"))
    assert (ascend.block_size, cuda.block_size) == (128, 16)
    assert ascend.max_model_len == 4096
    assert Twin(scenario("engine.max_model_len=100")).max_model_len == 100


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_scenario_gives_the_same_result(preset: str) -> None:
    first, second = (run(scenario("kv_cache.tensors=merged", preset=preset)) for _ in range(2))
    assert first.summary == second.summary
    for name in ("timeline", "requests", "checkpoints"):
        assert getattr(first, name).equals(getattr(second, name))


def test_more_ranks_hold_less_each() -> None:
    one, two = (Twin(scenario(f"engine.tensor_parallel_size={tp}")) for tp in (1, 2))
    assert two.layout.token_bytes * 2 == one.layout.token_bytes
    assert two.kv_budget_bytes > one.kv_budget_bytes


def test_notes_are_kept_with_the_result() -> None:
    assert run(scenario("kv_cache.watermark=0.1", "memory.fit=first")).summary["notes"] == [
        "memory.fit concerns the allocators pooled only"
    ]


# -- why it would not start --------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_says_so_and_survives_another_process() -> None:
    with pytest.raises(DoesNotFit, match="no memory is left for KV") as caught:
        Twin(scenario("model.name=llama-2-70b"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.budget == caught.value.budget


def test_weights_that_fit_unrounded_only_do_not_fit() -> None:
    """The budget leaves 53 MiB for KV and 27 MiB unplanned; the segments of the weights round up by more than that."""
    tight = ("engine.gpu_memory_utilization=0.99", "memory.activation_bytes=16.45GiB")
    with pytest.raises(DoesNotFit, match="do not fit once they are rounded") as caught:
        Twin(scenario(*tight, "engine.max_model_len=2", "kv_cache.block_size=1"))
    assert caught.value.budget.kv_bytes > 0
    assert not caught.value.budget.fits
    assert not isinstance(caught.value, OutOfMemory)


@pytest.mark.parametrize("policy", [(), ("kv_cache.policy=radix", "kv_cache.version=v0")], ids=["paged", "radix"])
def test_a_pool_that_holds_no_longest_request_once_rounded_does_not_fit(policy: tuple[str, ...]) -> None:
    """One block short: the budget counts whole bytes, the allocator rounds each of 64 tensors up.

    A release of vLLM, of which v0 has no null block, means nothing to another policy.
    """
    said: set[str] = set()
    for utilization in range(4400, 4600, 2):
        sets = [f"engine.gpu_memory_utilization={utilization / 10000}", "engine.max_model_len=512", *policy]
        try:
            Twin(scenario(*sets))
        except DoesNotFit as error:
            said.add(str(error).partition(":")[0])
    assert (
        "one request of max_model_len 512 needs 4 blocks; the pool has 4, one of them the null block, once its tensors "
        "are rounded"
    ) in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "engine.max_model_len=5000",
            "engine.max_model_len: 5000 is more than the 4096 positions of llama-2-7b; take at most that",
        ),
        ("engine.tensor_parallel_size=3", "engine.tensor_parallel_size: "),
        ("memory.alloc_conf=max_split_size_mb:x", "memory.alloc_conf: "),
        (
            "kv_cache.options={num_blocks=1000000000}",
            "kv_cache.options: num_blocks: 1000000000 blocks do not fit, 225 do",
        ),
        ("memory.general=pooled", "memory.general: "),
    ],
)
def test_a_scenario_that_cannot_be_built_names_its_key(setting: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Twin(scenario(setting))
    assert str(caught.value).startswith(said)


def test_unknown_names_of_the_catalog_are_its_errors() -> None:
    for setting in ("model.name=llama-9", "device.name=ascend-9"):
        with pytest.raises(CatalogError):
            Twin(scenario(setting))


# -- policies of others ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ThriftyConfig(PagedConfig):
    spare_blocks: int = 0


class ThriftyPolicy(PagedPolicy):
    """A policy of another package: paged, with a setting that no scenario knows."""

    name = "thrifty"
    Config = ThriftyConfig


class ShyScheduler(VllmScheduler):
    """A scheduler of another package: one at a time."""

    name = "shy"

    def _admit(self, plan: object, kv: object, budget: int) -> None:
        if not self._running:
            super()._admit(plan, kv, budget)


@pytest.fixture
def policies_of_others() -> object:
    kv_policies.register("thrifty")(ThriftyPolicy)
    schedulers.register("shy")(ShyScheduler)
    yield
    kv_policies.unregister("thrifty")
    schedulers.unregister("shy")


@pytest.mark.usefixtures("policies_of_others")
def test_policies_of_another_package_run_with_their_own_settings() -> None:
    sets = ["kv_cache.policy=thrifty", "scheduler.policy=shy", "memory.oom=preempt"]
    twin = Twin(scenario(*sets, "kv_cache.options={spare_blocks=3}"))
    assert isinstance(twin.kv, ThriftyPolicy)
    assert twin.kv.config.spare_blocks == 3
    assert twin.run().summary["requests_completed"] == 4
    with pytest.raises(ScenarioError, match=r"'spare_block' is no further setting .*did you mean 'spare_blocks'\?"):
        Twin(scenario(*sets, "kv_cache.options={spare_block=3}"))


def test_the_driver_of_a_twin_is_its_own() -> None:
    first, second = Twin(scenario()), Twin(scenario())
    assert isinstance(first.driver, HbmDriver)
    assert first.driver is not second.driver


@pytest.mark.parametrize(
    ("device", "begins"),
    [
        ("ascend-910b4", "NPU out of memory. Tried to allocate 514.00 MiB (NPU 0; 29.50 GiB total capacity; "),
        ("a100-80gb", "CUDA out of memory. Tried to allocate "),
    ],
)
def test_a_death_is_told_as_torch_would_tell_it_too(device: str, begins: str) -> None:
    overrides = [f"device.name={device}", "workload.users=300", "workload.num_prompts=300"]
    oom = Twin(Scenario.load(preset="doubling", overrides=overrides)).run().oom
    assert oom is not None
    assert oom["torch_message"].startswith(begins)


def test_a_pool_that_refuses_has_no_message_of_torch() -> None:
    overrides = ["memory.oom=stop", "workload.users=300", "workload.num_prompts=300"]
    oom = Twin(Scenario.load(preset="paged", overrides=overrides)).run().oom
    assert oom is not None
    assert oom["torch_message"] == ""


def test_pages_too_large_for_one_longest_request_do_not_start() -> None:
    """Llama-2-7B has 64 tensors a sequence: pages of 256 MiB are 16 GiB for its first token."""
    pages = ["kv_cache.policy=virtual", "memory.kv_arena=direct"]
    with pytest.raises(
        DoesNotFit, match=r"needs 16\.00 GiB in pages of 268435456 bytes, 64 tensors .*14\.24 GiB are left"
    ):
        Twin(scenario(*pages, "kv_cache.page_bytes=256MiB"))
    assert Twin(scenario(*pages, "kv_cache.page_bytes=128MiB")).kv.usage().held == 0
