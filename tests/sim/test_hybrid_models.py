"""Whole runs of hybrids: their configs, blocks that hold a state, books that close, leaps as steps, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.kernels.weights import weight_bytes
from hbmtwin.sim.books import Books, BooksDoNotClose
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.catalog import CatalogError, device, model
from hbmtwin.sim.fit.fit import memory_budget
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.layer_groups import BlockPool, block_pool
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.schedulers.aligned_chunks import aligned_chunk

GRANITE = "granite-4.0-h-micro"
STATES = 36 * 1_074_688
"""Of one sequence of Granite."""
HYBRIDS = {"bamba-9b": 9_780_235_392, GRANITE: 3_191_396_096, "nemotron-nano-9b-v2": 8_888_227_328}

SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "hidden_size": 256,
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 64,
    "torch_dtype": "bfloat16",
}
NEMOTRON: dict[str, Any] = {
    **SMALL,
    "model_type": "nemotron_h",
    "layer_types": "absent",
    "hybrid_override_pattern": "M-*M",
    "intermediate_size": 512,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}


def config(folder: Path, given: dict[str, Any], **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**given, **changes}.items() if v != "absent"}))
    return str(path)


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_have_as_many_parameters_as_published(name: str) -> None:
    """Bamba's is what the class of its checkpoint has; its card says 9.78 billion."""
    assert weight_bytes(model(name)) / 2 == pytest.approx(HYBRIDS[name], rel=1e-6)


def test_layers_and_sizes_of_the_catalog() -> None:
    granite, nemotron, bamba = (model(name) for name in (GRANITE, "nemotron-nano-9b-v2", "bamba-9b"))
    assert [i for i, kind in enumerate(granite.layer_types) if kind == "attention"] == [5, 15, 25, 35]
    assert [i for i, kind in enumerate(nemotron.layer_types) if kind == "attention"] == [14, 21, 30, 39]
    assert [i for i, kind in enumerate(bamba.layer_types) if kind == "attention"] == [9, 18, 27]
    assert [m.num_mamba_layers for m in (granite, nemotron, bamba)] == [36, 27, 29]
    assert [m.rotary_dim for m in (granite, nemotron, bamba)] == [0, 0, 64]
    assert [m.mamba.ssm_dtype_bytes for m in (granite, nemotron, bamba) if m.mamba] == [2, 4, 2]
    assert (nemotron.mlp_in_layer, nemotron.gated_mlp, granite.mlp_in_layer) == (False, False, True)
    assert kv_layout(granite).token_bytes == 4 * 2 * 8 * 64 * 2
    assert "vLLM serves this type up to 0.23" in bamba.source


def test_a_hybrid_is_read_from_disk_with_the_defaults_of_its_class(tmp_path: Path) -> None:
    read = model(config(tmp_path, SMALL))
    assert read.layer_types == ("mamba", "attention", "mamba", "mamba")
    assert read.mamba is not None
    assert (read.mamba.d_head, read.mamba.n_groups, read.mamba.d_conv, read.mamba.chunk_size) == (64, 1, 4, 256)
    assert (read.intermediate_size, read.rotary_dim) == (512, 0)
    rope = model(config(tmp_path, SMALL, position_embedding_type="rope"))
    assert rope.rotary_dim == 64
    plain = model(config(tmp_path, SMALL, layer_types=["attention"] * 4))
    assert (plain.mamba, plain.layer_types, plain.num_attention_layers) == (None, (), 4)
    dense = model(config(tmp_path, NEMOTRON, n_routed_experts=8, mamba_ssm_cache_dtype="bfloat16", n_groups=2))
    assert dense.layer_types == ("mamba", "mlp", "attention", "mamba")
    assert dense.mamba is not None
    assert (dense.mamba.n_groups, dense.mamba.ssm_dtype_bytes, dense.mamba.chunk_size) == (2, 2, 128)
    bamba = model(config(tmp_path, {**SMALL, "intermediate_size": 512}, model_type="bamba", attn_layer_indices=[3]))
    assert bamba.layer_types == ("mamba", "mamba", "mamba", "attention")


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (SMALL, {"num_local_experts": 8}, r"experts \(num_local_experts\) of the model type granitemoehybrid"),
        (SMALL, {"model_type": "jamba", "mamba_d_state": 16}, r"state-space layers \(mamba_d_state\)"),
        (SMALL, {"model_type": "falcon_h1"}, r"state-space layers \(mamba_d_state\)"),
        (SMALL, {"model_type": "mamba", "state_size": 16}, r"state-space layers \(state_size\)"),
        (SMALL, {"linear_num_value_heads": 32}, r"linear attention \(linear_num_value_heads\)"),
        (SMALL, {"layer_types": ["mamba", "moe"]}, "layer_types must say attention or mamba for each of 4 layers"),
        (SMALL, {"layer_types": ["mamba"] * 4}, "one kind is missing"),
        (SMALL, {"mamba_d_head": 65}, "8 mamba_n_heads of mamba_d_head 65 are not mamba_expand x hidden_size = 512"),
        (SMALL, {"mamba_n_groups": 3}, "3 groups do not divide 8 heads"),
        (SMALL, {"mamba_d_state": 0}, "mamba_d_state must be a whole number"),
        (SMALL, {"mamba_d_conv": 1}, "d_conv at least 2"),
        (NEMOTRON, {"hybrid_override_pattern": "ME*M"}, "mixture of experts .E in hybrid_override_pattern"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*"}, "must have a letter for each of 4 layers"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*x"}, "has 'x'; known are M, . and -"),
        (NEMOTRON, {"mamba_ssm_cache_dtype": "float8"}, "mamba_ssm_cache_dtype 'float8' is not known"),
        (SMALL, {"model_type": "bamba", "intermediate_size": 1, "attn_layer_indices": [4]}, "must list layers from 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, given: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        model(config(tmp_path, given, **changes))
    assert str(refused.value).count("config.json") == 1


# -- blocks and the budget ---------------------------------------------------------------------------------------------


def pool_of(name: str, mode: MambaMode = "none", *, ascend: bool = False, tp: int = 1, **changes: Any) -> BlockPool:
    shape = model(name)
    asked = {"block_size": 16, "max_model_len": 4096, "max_num_batched_tokens": 2048, **changes}
    return block_pool(shape, kv_layout(shape, tensor_parallel_size=tp), mamba_mode=mode, ascend=ascend, **asked)


def attention_block(pool: BlockPool) -> int:
    assert pool.grouping is not None
    return next(group.block_size for group in pool.grouping.groups if group.kind == "full")


def test_block_sizes_and_padding_are_those_of_boot_logs() -> None:
    """Granite 4.0 H Small has states and KV heads like Bamba, and vLLM logs for it 528 tokens and a padding of 0.69 %
    (ROCm issue 5590); for Nemotron Nano 9B v2, when its states were in 16 bit, 672 tokens (vLLM issue 24280)."""
    bamba = pool_of("bamba-9b")
    assert bamba.grouping is not None
    assert attention_block(bamba) == 528
    assert round(100 * (bamba.grouping.page_bytes / 2_147_840 - 1), 2) == 0.69
    half = 3 * (10240 + 2 * 8 * 128) * 2 + 10240 * 128 * 2
    assert 16 * -(-half // (16 * 4096)) == 672
    assert attention_block(pool_of("nemotron-nano-9b-v2")) == 16 * -(-5_316_608 // (16 * 4096)) == 1312
    assert attention_block(pool_of(GRANITE)) == 528
    assert attention_block(pool_of(GRANITE, "align")) == 528
    assert attention_block(pool_of(GRANITE, "all")) == 768  # of whole chunks of 256 besides
    assert attention_block(pool_of(GRANITE, block_size=64)) == 576
    assert attention_block(pool_of(GRANITE, block_size=2048)) == 2048


def test_groups_of_granite_and_what_a_request_pays() -> None:
    """4 layers of attention and 36 of states: groups of 4, one and nine of them."""
    pool = pool_of(GRANITE)
    assert pool.grouping is not None
    assert [(g.kind, g.num_layers, g.block_size) for g in pool.grouping.groups] == [
        *[("mamba", 4, 4096)] * 9,
        ("full", 4, 528),
    ]
    assert (pool.grouping.page_bytes, pool.grouping.group_length) == (528 * 2048, 4)
    assert pool.token_bytes == 8192
    assert pool.request_blocks(4096) == 9 + 8
    assert pool_of(GRANITE, "align").request_blocks(4096) == 9 * 2 + 8
    assert pool_of(GRANITE, "all").request_blocks(4096) == 10 * 6
    assert pool.longest_request(9 + 8, 131072) == 8 * 528
    assert pool.longest_request(9, 131072) == 0


@pytest.mark.parametrize(("name", "tokens"), [(GRANITE, 1024), ("bamba-9b", 1024), ("nemotron-nano-9b-v2", 2560)])
def test_on_ascend_the_recurrence_fills_k_exactly(name: str, tokens: int) -> None:
    shape = model(name)
    assert shape.mamba is not None
    pool = pool_of(name, ascend=True, block_size=128)
    assert pool.grouping is not None
    k_bytes = shape.num_kv_heads * shape.head_dim * 2
    assert attention_block(pool) == tokens == shape.mamba.ssm_state_bytes() // k_bytes
    assert pool.grouping.page_bytes == 2 * tokens * k_bytes + shape.mamba.conv_state_bytes()


def test_a_model_whose_states_do_not_fit_ascends_blocks_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = config(tmp_path, SMALL, mamba_d_state=48)
    with pytest.raises(ScenarioError, match=r"model.name: vllm-ascend refuses this model.*change tensor_parallel_size"):
        Twin(scenario(f"model.name={path}", "device.name=ascend-910b4"))


def test_the_budget_counts_states_and_ranks() -> None:
    shape, on = model(GRANITE), device("a100-80gb")
    asked = {
        "gpu_memory_utilization": 0.9,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
    }
    budget = memory_budget(shape, on, layout=kv_layout(shape), **asked)
    assert budget.weights_bytes == loaded_weight_bytes(shape, "nvidia")
    tensors = 2 * 3_191_396_096 + 2 * 36 * 64
    assert tensors < budget.weights_bytes < 1.005 * tensors  # in whole blocks of the allocator
    assert budget.num_blocks == budget.kv_bytes // (4 * 528 * 2048)
    assert budget.max_concurrency == budget.num_blocks / 17
    assert budget.kv_tokens == budget.num_blocks * 4096 // 17
    caching = memory_budget(shape, on, layout=kv_layout(shape), mamba_mode="all", **asked)
    assert caching.max_concurrency == caching.num_blocks / 60
    two = memory_budget(shape, on, layout=kv_layout(shape, tensor_parallel_size=2), **asked)
    assert two.weights_bytes < budget.weights_bytes * 0.52
    assert "Mamba-2 mixers as vLLM's code makes them" in budget.lines[3].source


# -- whole runs --------------------------------------------------------------------------------------------------------

TIGHT = {"ascend-910b4": 0.2354, "a100-80gb": 0.0888}
"""Of each device what leaves Granite a pool of some 40 to 80 blocks."""


def scenario(*overrides: str, seed: int = 0) -> Scenario:
    return Scenario.load(preset="paged", seed=seed, overrides=list(overrides))


def tight(on: str, mode: MambaMode, seed: int = 0, *more: str) -> Scenario:
    caching = mode != "none"
    return scenario(
        f"model.name={GRANITE}",
        f"device.name={on}",
        "engine.max_model_len=2048",
        f"engine.gpu_memory_utilization={TIGHT[on]}",
        f"kv_cache.enable_prefix_caching={str(caching).lower()}",
        f"kv_cache.mamba_cache_mode={mode}",
        "workload.num_prompts=24",
        f"workload.request_rate={(4, 50)[seed % 2]}",
        'workload.prompt_tokens={distribution="uniform",low=1,high=500}',
        'workload.output_tokens={distribution="uniform",low=1,high=640}',
        f"workload.system_prompt_tokens={(0, 900)[seed // 2 % 2]}",
        "session.turns=1",
        f"scheduler.max_num_batched_tokens={(2048, 700)[seed % 2]}",
        "scheduler.max_num_seqs=32",
        "results.interval_s=0.5",
        *more,
        seed=seed,
    )


RUNS = [
    *[("ascend-910b4", mode) for mode in ("none", "all", "align")],
    *[("a100-80gb", mode) for mode in ("none", "all", "align")],
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("on", "mode"), RUNS)
def test_leaps_leave_the_rows_of_single_steps(on: str, mode: MambaMode, seed: int) -> None:
    short = tight(on, mode, seed)
    leaps, steps = Twin(short).run(), Twin(short).run(step_mode=True)
    for table in ("timeline", "requests", "checkpoints"):
        assert getattr(leaps, table).equals(getattr(steps, table)), table
    assert leaps.summary == steps.summary
    assert leaps.summary["requests_completed"] == 24
    states = leaps.timeline["kv_state"]
    if mode == "none":
        assert (states == leaps.timeline["running"] * STATES).all()
    else:
        assert (states >= leaps.timeline["running"] * STATES).all()
    assert (states[leaps.timeline["running"] == 0] == 0).all()


def test_the_short_pools_above_do_preempt_and_do_find_states() -> None:
    found: dict[str, Result] = {mode: Twin(tight("a100-80gb", mode, 3)).run() for mode in ("none", "all", "align")}
    assert all(result.summary["preemptions"] > 0 for result in found.values())
    assert found["none"].summary["prefix_cache"] is None
    for mode in ("all", "align"):
        assert found[mode].timeline["hit_tokens"].iloc[-1] > 0, mode


def test_a_server_that_stops_dies_with_books_that_close() -> None:
    died = Twin(tight("a100-80gb", "none", 1, "memory.oom=stop")).run()
    assert died.summary["oom"] is not None
    assert (died.timeline["kv_state"] == died.timeline["running"] * STATES).all()
    assert died.timeline["kv_state"].iloc[-1] > 0


def test_what_a_sequence_pays_for_states_does_not_grow() -> None:
    """One answer of 1,900 tokens: the same states from first to last, and four blocks of tokens."""
    one = (
        *("workload.num_prompts=1", "workload.request_rate=1", "workload.prompt_tokens=100"),
        *("workload.output_tokens=1900", "workload.system_prompt_tokens=0", "session.turns=1"),
        *(f"model.name={GRANITE}", "device.name=a100-80gb", "engine.max_model_len=2048"),
    )
    line = Twin(scenario(*one)).run().timeline
    busy = line[line["running"] > 0]
    assert set(busy["kv_state"]) == {STATES}
    assert busy["kv_tokens"].max() == 1999 * 8192
    block = 4 * 528 * 2048
    held = busy["kv_tokens"] + busy["kv_state"] + busy["kv_unfilled"]
    assert set(held // block) == {9 + 1, 9 + 2, 9 + 3, 9 + 4}


def test_a_state_that_the_policy_forgets_to_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the scheduler's count of sequences says what states there must be."""
    seen = Books.row

    def one_less(self: Books, tokens: int, padding: int = 0, running: int = 0) -> Any:
        return seen(self, tokens, padding, max(0, running - 1))

    monkeypatch.setattr(Books, "row", one_less)
    with pytest.raises(BooksDoNotClose, match=f"the scheduler counts 0 bytes of states, the KV policy {STATES}"):
        Twin(tight("a100-80gb", "none")).run()


def test_prefixes_are_found_where_states_are_and_not_elsewhere() -> None:
    """A system prompt of 1,200 tokens before 16 prompts: found at the last block before its end, 528 tokens or 768."""

    def hits(on: str, mode: MambaMode) -> int:
        chats = tight(on, mode, 0, "workload.system_prompt_tokens=1200", "engine.gpu_memory_utilization=0.5")
        chats = chats.model_copy(update={"workload": chats.workload.model_copy(update={"request_rate": 0.2})})
        return int(Twin(chats).run().requests["cached_tokens"].max())

    assert hits("a100-80gb", "align") >= 1056
    assert hits("a100-80gb", "all") >= 768
    assert hits("ascend-910b4", "align") == 1024
    assert hits("ascend-910b4", "all") == 0  # a state every max_model_len tokens


def test_nemotron_in_detail_and_over_ranks() -> None:
    run = Twin(
        scenario(
            *("model.name=nemotron-nano-9b-v2", "device.name=ascend-910b2", "engine.tensor_parallel_size=2"),
            *("memory.activations=per_layer", "workload.num_prompts=4", "session.turns=1"),
            *("workload.prompt_tokens=500", "workload.output_tokens=20", "engine.max_model_len=8192"),
        )
    ).run()
    assert run.summary["requests_completed"] == 4
    assert run.timeline["kv_state"].max() % (27 * 5_316_608 // 2) == 0
    notes = " ".join(run.summary["notes"])
    assert "times of the 27 Mamba-2 layers of nemotron-nano-9b-v2 are defaults without a measured source" in notes
    assert "blocks have 2,560 tokens instead of 128" in notes


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [
        (
            ["kv_cache.policy=radix"],
            "kv_cache.policy: 'radix' has no place for the states of the 36 Mamba-2 layers",
        ),
        (["kv_cache.version='0.22'"], "kv_cache.version: how 0.22 keeps the states"),
        (["kv_cache.retention='sliding_window(64)'"], "kv_cache.retention: sliding_window(64) drops tokens"),
        (["kv_cache.disable_hybrid_kv_cache_manager=true"], "without groups there is no place for the states"),
        (["memory.admission=reserve"], "memory.admission: reserve knows no pool for the states"),
        (
            ["kv_cache.mamba_cache_mode=align"],
            "kv_cache.mamba_cache_mode: align keeps states for later requests, and kv_cache.enable_prefix_caching is "
            "false: set that to true, or use none",
        ),
        (
            ["kv_cache.mamba_cache_mode=none", "kv_cache.enable_prefix_caching=true"],
            "kv_cache.mamba_cache_mode: none keeps no state for later requests",
        ),
        (
            [
                *("kv_cache.mamba_cache_mode=align", "kv_cache.enable_prefix_caching=true"),
                "scheduler.enable_chunked_prefill=false",
            ],
            "scheduler.enable_chunked_prefill: with kv_cache.mamba_cache_mode = 'align' chunks end where states are ",
        ),
        (["engine.tensor_parallel_size=3"], "64 Mamba heads and intermediate_size 8192 must divide"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_go_with_states_is_refused_by_name(settings_given: list[str], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        Twin(scenario(f"model.name={GRANITE}", *settings_given))
    assert message in str(refused.value)


def test_a_pool_too_small_for_one_request_does_not_start() -> None:
    with pytest.raises(DoesNotFit, match="one request of max_model_len 131072 needs"):
        Twin(scenario(f"model.name={GRANITE}", "device.name=a100-80gb", "engine.gpu_memory_utilization=0.105"))


def test_the_mode_is_idle_for_other_models_and_policies() -> None:
    few = ("workload.num_prompts=2", "workload.request_rate=inf", "kv_cache.mamba_cache_mode=none")
    notes = Twin(scenario("model.name=llama-2-7b", *few)).run().summary["notes"]
    assert notes == ["kv_cache.mamba_cache_mode has no effect: llama-2-7b has no Mamba-2 layers"]


# -- where a chunk ends ------------------------------------------------------------------------------------------------


def test_chunks_of_a_prompt_by_hand() -> None:
    """Blocks of 16, a prompt of 44 tokens, 40 a step: two whole blocks, then the rest."""
    prompt = {"num_tokens": 44, "prompt_tokens": 44, "block_size": 16, "max_num_batched_tokens": 40}
    assert aligned_chunk(0, 40, **prompt) == 32
    assert aligned_chunk(32, 12, **prompt) == 12
    assert aligned_chunk(0, 15, **prompt) == 0  # not a block's worth is left of the step
    assert aligned_chunk(0, 44, **prompt) == 32  # a whole prompt stops at its last boundary
    assert aligned_chunk(5, 39, **prompt) == 11  # inside a block: up to its end
    assert aligned_chunk(0, 40, **prompt, shared_boundary=20) == 16
    assert aligned_chunk(16, 28, **prompt, shared_boundary=20) == 16
    decode = {"num_tokens": 50, "prompt_tokens": 44, "block_size": 16, "max_num_batched_tokens": 40}
    assert aligned_chunk(49, 1, **decode) == 1
    assert aligned_chunk(0, 40, **decode) == 32  # one that was preempted, again
    wide = {"num_tokens": 44, "prompt_tokens": 44, "block_size": 32, "max_num_batched_tokens": 20}
    assert (aligned_chunk(0, 20, **wide), aligned_chunk(20, 20, **wide)) == (20, 12)


def by_the_letter(start: int, new: int, n: int, prompt: int, b: int, most: int, shared: int) -> int:
    """The words of the specification, token by token."""
    p = max(prompt, n - 1)
    if start >= p:
        return new
    end = start + new
    if end < p:
        down = max(t for t in range(end + 1) if t % b == 0)
        if down > start or b <= most:
            end = down
    ends = [
        t for t in range(start + 1, end) if start % b and t == min(u for u in range(start + 1, start + b) if u % b == 0)
    ]
    ends += [t for t in range(start + 1, end) if t == max(u for u in range(n + 1) if u % b == 0)]
    if start < shared < end:
        ends += [
            t for t in range(start + 1, end) if t == max(u for u in range(start, shared + 1) if (u - start) % b == 0)
        ]
    return max(0, min(ends, default=end) - start)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_chunks_are_those_of_the_specification(data: st.DataObject) -> None:
    b, most, prompt = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 60)), data.draw(st.integers(1, 90))
    n = prompt + data.draw(st.integers(0, 30))
    start = data.draw(st.integers(0, n - 1))
    new = data.draw(st.integers(1, min(most, n - start)))
    shared = data.draw(st.integers(0, n))
    got = aligned_chunk(
        start,
        new,
        num_tokens=n,
        prompt_tokens=prompt,
        block_size=b,
        max_num_batched_tokens=most,
        shared_boundary=shared,
    )
    assert got == by_the_letter(start, new, n, prompt, b, most, shared)
