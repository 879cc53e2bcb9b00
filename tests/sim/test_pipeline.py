"""Ranks of a pipeline: the budget of each stage, the minimum over them, and runs on the stage that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.kv_groups import Grouping
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.kernels.weights import embedding_bytes, weight_bytes_per_rank
from hbmtwin.sim.budget import memory_budget as budgets
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.budget.memory_budget import DoesNotFit, MemoryBudget
from hbmtwin.sim.catalog import device, model
from hbmtwin.sim.engines import GIB
from hbmtwin.sim.engines.vllm import VLLM
from hbmtwin.sim.fit.fit import memory_budget
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.layer_groups import BlockPool, block_pool
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

LLAMA_8B, LLAMA_70B = model("llama-3.1-8b"), model("llama-2-70b")
B4 = device("ascend-910b4")
H100 = replace(device("a100-80gb"), name="h100", memory_bytes=round(79.19 * GIB), multiprocessor_count=132)


def budget(shape: Any = LLAMA_8B, on: Any = B4, **changes: Any) -> MemoryBudget:
    asked: dict[str, Any] = {
        "layout": kv_layout(shape, tensor_parallel_size=changes.pop("tensor_parallel_size", 1)),
        "gpu_memory_utilization": 0.92,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": on.default_block_size,
    }
    return memory_budget(shape, on, **{**asked, **changes})


def gib(size: int) -> float:
    return round(size / GIB, 2)


# The budget of each stage


def logged() -> MemoryBudget:
    return budget(
        on=H100,
        pipeline_parallel_size=2,
        gpu_memory_utilization=0.95,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        rules=replace(VLLM, charges_graphs=False),
    )


def test_the_first_stage_is_that_of_the_log() -> None:
    # vLLM 0.19, Llama-3.1-8B, two stages on H100: weights 7.51, activations 1.10, non-torch 0.07, KV 66.54 GiB;
    # 1.45 GiB outside torch before. The formula gives 0.05 + 0.87 + 2 * 2 * 8192 * 4096 bytes = 1.04 of activations.
    first = logged().stages[0]
    assert (gib(first.weights_bytes), gib(first.activation_bytes), gib(first.non_torch_bytes)) == (7.51, 1.04, 0.07)
    assert first.kv_bytes / GIB == pytest.approx(66.54, abs=0.08)
    assert first.context_bytes / GIB == pytest.approx(1.45, abs=0.07)


def test_the_last_stage_has_the_logits_and_decides() -> None:
    # Its activations: 0.05 + the head's 1.84 + what it receives, 0.125. Blocks of 16 tokens, 16 layers, 1 MiB each:
    # 80,778,134,291 - 8,063,819,776 - 2,161,410,867 - 75,161,927 = 70,477,741,721, and 71,518,442,752 on the first.
    b = logged()
    assert gib(b.stages[1].activation_bytes) == 2.01
    assert [s.num_blocks for s in b.stages] == [68_205, 67_212]
    assert (b.stage, b.layers, b.num_blocks, b.block_bytes) == (1, range(16, 32), 67_212, 1 << 20)
    assert b.kv_bytes == b.stages[1].kv_bytes
    assert b.weights_bytes == weight_bytes_per_rank(stage_shapes(LLAMA_8B, stage_layers(32, 2))[1])


def test_what_the_pipelines_communicator_takes_later_comes_out_of_the_unplanned_rest() -> None:
    alone, both = budget(LLAMA_8B), budget(LLAMA_8B, pipeline_parallel_size=2)
    assert (alone.late_bytes, gib(both.late_bytes)) == (0, 0.39)
    assert gib(both.non_torch_bytes) == 0.15
    assert both.static_bytes == both.non_torch_bytes + both.late_bytes
    by_item = [{line.item: line.bytes for line in b.lines} for b in (alone, both)]
    saved_graphs = alone.graph_bytes - both.graph_bytes
    left = [items["unplanned"] + items["run-time sampler"] for items in by_item]
    assert left[1] == left[0] - both.late_bytes + saved_graphs
    assert gib(budget(LLAMA_8B, pipeline_parallel_size=2, tensor_parallel_size=2).non_torch_bytes) == 0.64


def test_one_stage_is_what_it_was() -> None:
    b = budget()
    assert b.stages == ()
    assert (b.stage, b.layers) == (0, range(32))
    assert b == budget(pipeline_parallel_size=1, layer_partition=[32])


# The minimum over ranks


def naive_blocks(shape: Any, tp: int, sizes: list[int]) -> list[int]:
    """Of each stage of a dense model on a 910B4, from the shapes: embedding first, head last, logits last."""
    usable = int(0.92 * B4.memory_bytes)
    table = 2 * shape.hidden_size * (-(-shape.vocab_size // 64) * 64) // tp
    kv_heads = max(1, shape.num_kv_heads // tp)
    rows = (shape.num_attention_heads // tp + 2 * kv_heads) * shape.head_dim
    heads = shape.num_attention_heads // tp * shape.head_dim
    layer = 2 * shape.hidden_size * (rows + heads + 3 * shape.intermediate_size // tp + 2)
    rotary = 2 * shape.max_position_embeddings * shape.head_dim
    hidden = 2 * 2048 * shape.hidden_size
    mlp = 2 * 2048 * (30 * shape.intermediate_size // tp + 34 * shape.hidden_size) // 10
    logits = 256 * shape.vocab_size * 2 + hidden
    found = []
    parts = stage_shapes(shape, stage_layers(sum(sizes), len(sizes), sizes))
    for stage, layers in enumerate(sizes):
        last = stage == len(sizes) - 1
        in_blocks = loaded_weight_bytes(parts[stage], "ascend", tp) - weight_bytes_per_rank(parts[stage], tp)
        weights = layers * layer + rotary + in_blocks
        weights += table * ((stage == 0) + last) + (2 * shape.hidden_size if last else 0)
        passed = 2 * hidden * ((stage > 0) + (not last))
        activations = GIB // 50 + max(mlp, logits if last else 0) + passed
        libraries = 15 * GIB // 100 if tp == 1 else 64 * GIB // 100
        kv = usable - weights - activations - libraries
        found.append(max(0, kv) // (layers * 128 * 2 * 2 * kv_heads * shape.head_dim))
    return found


def decides_well(b: MemoryBudget, tp: int) -> bool:
    """Whether a pipeline's budget is that of the first stage with the fewest blocks, by the naive count."""
    blocks = naive_blocks(LLAMA_70B, tp, [len(s.layers) for s in b.stages])
    fewest = min(blocks)
    return (b.num_blocks, b.stage, [s.num_blocks for s in b.stages]) == (fewest, blocks.index(fewest), blocks)


@settings(deadline=None)
@given(st.data())
def test_the_stage_with_the_fewest_blocks_decides(data: st.DataObject) -> None:
    tp, stages = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(2, 16))
    partition = None
    if data.draw(st.booleans()):
        cuts = sorted(data.draw(st.sets(st.integers(1, 79), min_size=stages - 1, max_size=stages - 1)))
        partition = [b - a for a, b in zip([0, *cuts], [*cuts, 80], strict=True)]
    b = budget(
        LLAMA_70B, tensor_parallel_size=tp, pipeline_parallel_size=stages, layer_partition=partition, max_model_len=128
    )
    assert decides_well(b, tp)
    for s in b.stages:
        assert sum(line.bytes for line in s.lines) == s.total_bytes


PARTITIONS = ([30, 30, 20], [20, 30, 30], [27, 27, 26], [26, 27, 27])
"""The first, the last, the first and the last decide."""


@pytest.mark.parametrize(
    "mistake",
    [
        lambda stages, key: max(stages, key=key),
        lambda stages, key: stages[0],
        lambda stages, key: stages[-1],
        lambda stages, key: min(stages, key=lambda b: b.kv_bytes),
        lambda stages, key: min(reversed(stages), key=key),
    ],
    ids=["maximum", "first", "last", "fewest bytes", "last of equals"],
)
def test_another_rank_than_that_with_the_fewest_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., MemoryBudget]
) -> None:
    def all_well() -> bool:
        cases = [(2, partition) for partition in PARTITIONS] + [(2, [20, 20, 20, 20]), (2, [10, 30, 20, 20])]
        return all(
            decides_well(
                budget(LLAMA_70B, tensor_parallel_size=tp, pipeline_parallel_size=len(p), layer_partition=p), tp
            )
            for tp, p in cases
        )

    assert all_well()
    monkeypatch.setattr(budgets, "min", lambda stages, key=None: mistake(stages, key), raising=False)
    assert not all_well()


def test_ranks_of_one_stage_are_alike_or_refused() -> None:
    # What could be uneven divides, or does not start: heads, MLP and KV heads here, and the vocabulary is padded to 64.
    uneven_mlp = replace(LLAMA_70B, intermediate_size=28_674)
    with pytest.raises(ValueError, match="num_kv_heads 8 and tensor_parallel_size 3 do not divide each other"):
        budget(LLAMA_70B, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="cannot be split over tensor_parallel_size 4: 64 attention heads"):
        budget(uneven_mlp, tensor_parallel_size=4)
    odd_vocabulary = replace(LLAMA_70B, vocab_size=32_001)  # padded to 32,064: 8 ranks have 4,008 rows each
    assert embedding_bytes(odd_vocabulary, 8) == 4_008 * 8192 * 2
    assert budget(odd_vocabulary, tensor_parallel_size=8).stages == ()
    by_five = replace(LLAMA_70B, num_attention_heads=40, num_kv_heads=40, intermediate_size=28_680)
    assert budget(by_five, tensor_parallel_size=5).stages == ()
    with pytest.raises(ValueError, match="and the vocabulary padded to 32064; possible sizes are"):
        budget(replace(by_five, vocab_size=32_001), tensor_parallel_size=5)


def test_a_stage_that_does_not_start_is_named_though_another_has_fewer_blocks() -> None:
    b = budget(LLAMA_70B, pipeline_parallel_size=4)
    assert not b.fits
    assert b.reason.startswith("stage 0 of 4: no memory is left for KV: weights 32.37 GiB")
    assert "Any one of these would start: tensor_parallel_size 2" in b.reason
    # Outside the utilisation: more layers have more graphs, and the fewest layers the fewest blocks only by their KV.
    late = budget(gpu_memory_utilization=0.99, pipeline_parallel_size=2)
    assert late.reason.startswith("stage 0 of 2: the graph pool (0.16 GiB) is captured outside the utilisation")
    assert "after the pipeline's buffers (0.39 GiB)," in late.reason


def test_a_model_that_no_tensor_split_holds_is_told_how_many_stages_would() -> None:
    odd = replace(LLAMA_70B, name="odd", num_attention_heads=63, num_kv_heads=7)
    b = budget(odd)
    assert b.reason.endswith("Any one of these would start: pipeline_parallel_size 8")
    assert budget(odd, pipeline_parallel_size=8).fits
    assert not budget(odd, pipeline_parallel_size=4).fits


# Groups of layers on a stage


def pool(name: str, **changes: Any) -> BlockPool:
    shape = model(name)
    asked: dict[str, Any] = {"block_size": 16, "max_model_len": 4096, "max_num_batched_tokens": 2048}
    return block_pool(shape, kv_layout(shape), **{**asked, **changes})


def lengths(grouping: Grouping | None) -> list[int]:
    assert grouping is not None
    return [group.num_layers for group in grouping.groups]


def test_groups_of_the_whole_model_are_cut_at_stages() -> None:
    # gemma-2-9b: 42 layers, every other one with a window. A group each; of 21 layers a stage has 11 and 10.
    whole = pool("gemma-2-9b")
    assert lengths(whole.grouping) == [21, 21]
    stages = [whole.on_stage(own) for own in stage_layers(42, 2)]
    assert [lengths(s.grouping) for s in stages] == [[11, 10], [10, 11]]
    assert [s.grouping and s.grouping.group_length for s in stages] == [11, 11]
    assert whole.block_bytes == 21 * 16 * 2 * 2 * 8 * 256
    assert [s.block_bytes for s in stages] == [11 * 16 * 2 * 2 * 8 * 256] * 2
    assert sum(s.token_bytes for s in stages) == whole.token_bytes
    assert {s.request_blocks(4096) for s in stages} == {whole.request_blocks(4096)}


def test_groups_of_a_hybrid_model_by_hand() -> None:
    # bamba-9b: attention at 9, 18, 27; 29 others keep states, ten groups of them, the j-th in group j mod 10.
    whole = pool("bamba-9b")
    assert lengths(whole.grouping) == [3] * 9 + [2] + [3]
    states = [i for i in range(32) if i not in (9, 18, 27)]
    for own, layers in zip(
        (whole.on_stage(own) for own in stage_layers(32, 2)), (range(16), range(16, 32)), strict=True
    ):
        expected = [sum(i in layers for i in states[group::10]) for group in range(10)]
        expected.append(sum(i in layers for i in (9, 18, 27)))
        assert lengths(own.grouping) == expected
        assert own.layout.num_layers == expected[-1]
        assert own.grouping is not None
        assert own.grouping.group_length == max(expected)


def test_a_stage_may_lack_a_group() -> None:
    # gemma-3-1b: 26 layers, those at 5, 11, 17 and 23 see all; 22 windows are six groups, the j-th in group j mod 6.
    whole = pool("gemma-3-1b")
    assert lengths(whole.grouping) == [4, 4, 4, 4, 3, 3, 4]
    stages = [whole.on_stage(own) for own in stage_layers(26, 4)]
    assert [lengths(s.grouping) for s in stages] == [
        [1, 1, 1, 1, 1, 0, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 1, 1],
    ]
    # A partition by which the last stage has layers 24 and 25 only, of groups 2 and 3: a block is one page there.
    assert lengths(whole.on_stage(range(24, 26)).grouping) == [0, 0, 1, 1, 0, 0, 0]
    assert whole.on_stage(range(24, 26)).block_bytes == whole.block_bytes // 4


# Runs


SMALL = {
    "model.name": "llama-2-7b",
    "engine.max_model_len": 256,
    "engine.pipeline_parallel_size": 2,
    "engine.tensor_parallel_size": 2,
    "kv_cache.policy": "paged",
    "kv_cache.block_size": 16,
    "workload.users": 4,
    "workload.num_prompts": 12,
    "workload.prompt_tokens": 60,
    "workload.output_tokens": 30,
    "workload.system_prompt_tokens": 3,
    "session.turns": 2,
    "session.think_time_s": 0.1,
    "results.interval_s": 0.2,
    "results.steps": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "two by two": {},
    "short of blocks": {"kv_cache.options": {"num_blocks": 20}},
    "three": {"engine.pipeline_parallel_size": 3, "engine.tensor_parallel_size": 1},
    "uneven": {"engine.layer_partition": [24, 8]},
    "contiguous": {"kv_cache.policy": "contiguous", "kv_cache.growth": "exact", "memory.oom": "stop"},
    "per layer": {"memory.activations": "per_layer", "workload.num_prompts": 4},
    "radix": {"kv_cache.policy": "radix", "kv_cache.enable_prefix_caching": True},
    "windows": {"model.name": "gemma-2-9b", "device.name": "a100-80gb", "engine.max_model_len": 8192},
    "a group is not there": {
        "model.name": "gemma-3-1b",
        "device.name": "a100-80gb",
        "engine.max_model_len": 512,
        "engine.pipeline_parallel_size": 4,
        "engine.tensor_parallel_size": 1,
        "workload.output_tokens": 90,
        "kv_cache.enable_prefix_caching": True,
        "kv_cache.options": {"num_blocks": 250},
    },
    "window of all": {"kv_cache.retention": "sliding_window(100)"},
    "states": {
        "model.name": "bamba-9b",
        "device.name": "a100-80gb",
        "engine.max_model_len": 4096,
        "engine.tensor_parallel_size": 1,
        "kv_cache.enable_prefix_caching": True,
        "kv_cache.mamba_cache_mode": "align",
    },
    "states that stay": {"model.name": "granite-4.0-h-micro", "device.name": "a100-80gb"},
}


@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_a_run_closes_its_books_on_the_stage_that_decides_and_leaps_are_steps(keys: dict[str, Any]) -> None:
    s = Scenario.of(SMALL | keys)
    twin = Twin(s)
    leaps, steps = twin.run(), Twin(s).run(step_mode=True)  # checks the books at every row, and every party at the end
    for name in ("timeline", "requests", "checkpoints"):
        assert getattr(leaps, name).equals(getattr(steps, name)), name
    assert leaps.summary == steps.summary
    assert leaps.summary["requests_completed"] == s.workload.num_prompts
    rows = leaps.summary["stages"]
    assert [row["decides"] for row in rows] == [row["stage"] == twin.budget.stage for row in rows]
    mine = rows[twin.budget.stage]
    assert mine["num_blocks"] == min(row["num_blocks"] for row in rows)
    assert sum(row["num_layers"] for row in rows) == twin.model.num_layers
    if twin.block_bytes is not None:
        assert twin.block_bytes == mine["kv_block_bytes"]
    tp = s.engine.tensor_parallel_size
    assert mine["weights_bytes"] == loaded_weight_bytes(twin.plan.rank_model, twin.device.vendor, tp)  # in whole blocks
    tensors = weight_bytes_per_rank(twin.plan.rank_model, tp)
    assert (leaps.timeline["weights"] >= tensors).all()
    assert leaps.timeline["weights"].max() < tensors + (64 << 20)
    json.dumps(leaps.summary, allow_nan=False)


def finished(keys: dict[str, Any]) -> Result:
    return Twin(Scenario.of(SMALL | keys)).run()


def test_the_pool_is_that_of_the_stage_with_the_fewest_blocks() -> None:
    even = {"engine.tensor_parallel_size": 1, "model.name": "llama-3.1-8b", "engine.layer_partition": [16, 16]}
    skewed = {**even, "engine.layer_partition": [22, 10]}
    blocks = {}
    for name, keys in (("even", even), ("skewed", skewed)):
        twin = Twin(Scenario.of(SMALL | keys))
        kv: Any = twin.kv
        blocks[name] = kv.config.num_blocks
        planned = twin.budget.num_blocks
        assert planned - 40 <= blocks[name] <= planned, "less what segments round"
    assert blocks["skewed"] < blocks["even"]


def test_a_result_says_which_stage_it_is_of_and_how_far_its_times_are_off() -> None:
    notes = finished({"engine.layer_partition": [24, 8]}).summary["notes"]
    assert any(
        "the memory is that of a rank of stage 0 (layers 0 to 23), the first with room for the fewest" in n
        for n in notes
    )
    assert any(
        "vLLM keeps 2 under way" in n and "throughput is too low, by a factor between 1 (" in n and "and 2 (" in n
        for n in notes
    )
    assert finished({"engine.pipeline_parallel_size": 1}).summary["stages"] == []
    wide = finished({"model.name": "llama-2-70b", "engine.pipeline_parallel_size": 8}).summary["notes"]
    assert any("16 ranks are more than the 8 of a node" in n for n in wide)


def test_a_step_of_the_run_takes_all_stages() -> None:
    one, two = (
        finished({"engine.pipeline_parallel_size": pp, "device.name": "a100-80gb", "workload.users": 1})
        for pp in (1, 2)
    )
    # A decode step of one sequence: two messages of 21 us, two gathers of 4.4 us, and next to no bytes.
    added = [two.summary["tpot_s"][q] - one.summary["tpot_s"][q] for q in ("p50", "p99")]
    assert added == pytest.approx([50.8e-6] * 2, abs=0.5e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"engine.pipeline_parallel_size": 33},
            "engine.pipeline_parallel_size: 32 layers make 1 to 32 stages, not 33",
        ),
        (
            {"engine.layer_partition": [16, 15]},
            r"engine.layer_partition: a partition \[16, 15\] does not cut 32 layers into 2 stages",
        ),
        (
            {"kv_cache.version": "v0", "scheduler.policy": "vllm_v0"},
            "engine.pipeline_parallel_size: v0 deals requests and blocks out to one scheduler a stage",
        ),
        (
            {"model.name": "bamba-9b", "engine.pipeline_parallel_size": 4, "engine.tensor_parallel_size": 1},
            "engine.pipeline_parallel_size: stage 0 of 4 of bamba-9b",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Twin(Scenario.of(SMALL | {"device.name": "a100-80gb"} | keys))


def test_a_device_without_figures_for_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.sim.catalog.device", lambda name: replace(B4, send_ns=0))
    with pytest.raises(ScenarioError, match="ascend-910b4 has no figures for a message between stages"):
        Twin(Scenario.of(SMALL))


def test_a_window_is_sized_for_as_many_batches_as_there_are_stages() -> None:
    # vLLM's max_in_flight_tokens. A window of 100 and chunks of 32: 100 - 1 + 2 * 32 tokens are 11 blocks, and one.
    keys = {"kv_cache.retention": "sliding_window(100)", "scheduler.max_num_batched_tokens": 32}
    two, one = (Twin(Scenario.of(SMALL | keys | {"engine.pipeline_parallel_size": pp})) for pp in (2, 1))
    assert (two.pool.request_blocks(256), one.pool.request_blocks(256)) == (12, 10)
    assert two.max_num_batched_tokens == one.max_num_batched_tokens == 32


def test_a_stage_that_does_not_fit_is_an_answer() -> None:
    keys = {"model.name": "llama-2-70b", "engine.pipeline_parallel_size": 4, "engine.tensor_parallel_size": 1}
    with pytest.raises(DoesNotFit, match="stage 0 of 4: no memory is left for KV"):
        Twin(Scenario.of(SMALL | keys))
