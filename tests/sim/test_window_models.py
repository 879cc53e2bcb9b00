"""Whole runs of models whose layers see a window: bytes of the pool, books that close, leaps as steps, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.sim.catalog import model
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.layer_groups import BlockPool, block_pool
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

GEMMA = "model.name=gemma-3-1b"
LLAMA = "model.name=llama-2-7b"
CHATS = (
    "workload.num_prompts=24",
    'workload.prompt_tokens={distribution="uniform",low=1,high=900}',
    'workload.output_tokens={distribution="uniform",low=1,high=700}',
    "session.turns=1",
    "engine.max_model_len=2048",
    "results.interval_s=0.5",
)


ONE = ("workload.num_prompts=1", "workload.request_rate=1", "workload.prompt_tokens=300", "workload.output_tokens=1300")
ALONE = (
    *ONE,
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "kv_cache.block_size=16",
    "results.interval_s=0.05",
)


def scenario(*overrides: str, seed: int = 0) -> Scenario:
    return Scenario.load(preset="paged", seed=seed, overrides=list(overrides))


def pool_of(name: str, block_size: int, max_model_len: int, batched: int) -> BlockPool:
    shape = model(name)
    return block_pool(
        shape,
        kv_layout(shape),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
    )


def test_groups_of_gemma_3_and_what_a_request_pays() -> None:
    """26 layers, every sixth sees all: 4 full and 22 with a window of 512. A group is as long as the smaller kind, 4:
    one full group and ceil(22 / 4) = 6 with windows, of which two lack a layer."""
    pool = pool_of("gemma-3-1b", 128, 8192, 2048)
    assert pool.grouping is not None
    assert [(g.kind, g.num_layers, g.window) for g in pool.grouping.groups] == [
        *[("sliding_window", 4, 512)] * 4,
        *[("sliding_window", 3, 512)] * 2,
        ("full", 4, 0),
    ]
    page = 128 * 2 * 1 * 256 * 2
    assert (pool.grouping.page_bytes, pool.grouping.group_length) == (page, 4)
    assert (pool.block_bytes, pool.block_tensors) == (4 * page, [page] * 4)
    assert pool.token_bytes == 26 * 1024 == model_token_bytes("gemma-3-1b")
    # 64 blocks of the whole context, and in each of 6 groups ceil((512 - 1 + 2048) / 128) + 1 = 21.
    assert pool.request_blocks(8192) == 64 + 6 * 21
    assert pool.longest_request(64 + 6 * 21, 32768) == 8192
    assert pool.longest_request(64 + 6 * 21 - 1, 32768) == 8192 - 128
    assert pool.longest_request(3, 32768) == 0


def model_token_bytes(name: str) -> int:
    return kv_layout(model(name)).token_bytes


def test_gemma_2_halves_and_mistral_has_one_group() -> None:
    gemma = pool_of("gemma-2-9b", 16, 8192, 2048)
    assert gemma.grouping is not None
    assert [(g.kind, g.num_layers) for g in gemma.grouping.groups] == [("sliding_window", 21), ("full", 21)]
    assert gemma.block_bytes == 21 * 16 * 2 * 8 * 256 * 2
    assert gemma.request_blocks(8192) == 8192 // 16 + (4096 - 1 + 2048 + 15) // 16 + 1
    mistral = pool_of("mistral-7b-v0.1", 16, 32768, 2048)
    assert mistral.grouping is not None
    assert [(g.kind, g.num_layers) for g in mistral.grouping.groups] == [("sliding_window", 32)]
    assert mistral.request_blocks(32768) == (4096 - 1 + 2048 + 15) // 16 + 1


def test_a_model_without_windows_has_no_groups() -> None:
    pool = pool_of("llama-2-7b", 16, 4096, 2048)
    assert pool.grouping is None
    assert (pool.block_bytes, pool.request_blocks(4096)) == (16 * 512 * 1024, 256)


def test_a_long_sequence_holds_its_window_and_the_whole_context_where_layers_see_all() -> None:
    """One request of 300 + 1,300 tokens, blocks of 16: in the step behind c tokens the first ``(c - 511) // 16``
    blocks of the windows go."""
    settings = (*ALONE, GEMMA, "engine.gpu_memory_utilization=0.1", "engine.max_model_len=8192")
    result = Twin(scenario(*settings)).run()
    token_bytes = 1024
    held = {}
    for row in result.timeline.itertuples():
        if row.running:
            held[row.kv_tokens] = True
    computed = 1599
    forgotten = (computed - 1 - 511) // 16 * 16
    full, windowed = 4 * computed, 22 * (computed - forgotten)
    assert (full + windowed) * token_bytes in held
    assert result.summary["requests_completed"] == 1
    whole = Twin(scenario(*settings, "kv_cache.disable_hybrid_kv_cache_manager=true")).run()
    assert whole.timeline["kv_tokens"].max() == computed * 26 * token_bytes
    assert "layers of gemma-3-1b see 512 tokens only" in " ".join(whole.summary["notes"])


def test_what_a_model_s_own_window_leaves_behind_is_not_lost() -> None:
    one = ("model.name=mistral-7b-v0.1", "engine.max_model_len=6000", "workload.num_prompts=1", "session.turns=1")
    length = ("workload.prompt_tokens=5000", "workload.output_tokens=9", "workload.request_rate=1")
    run = Twin(scenario(*one, *length)).run()
    assert run.requests["dropped_tokens"].tolist() == [0]
    held = run.timeline["kv_tokens"][run.timeline["running"] > 0].iloc[-1]
    assert 4096 <= held / (128 * 1024) < 4096 + 128


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", ["gemma-3-1b", "llama-2-7b"])
def test_leaps_leave_the_rows_of_single_steps(name: str, caching: bool, seed: int) -> None:
    """On a pool that is short, so that blocks are forgotten, evicted and found again, and some requests preempted."""
    retention = {"gemma-3-1b": "full", "llama-2-7b": "sliding_window(300)"}[name]
    low = {"gemma-3-1b": 0.083, "llama-2-7b": 0.475}[name]
    tight = scenario(
        *CHATS,
        f"model.name={name}",
        f"kv_cache.retention='{retention}'",
        "kv_cache.block_size=16",
        f"kv_cache.enable_prefix_caching={str(caching).lower()}",
        f"engine.gpu_memory_utilization={low + 0.004 * seed}",
        f"workload.request_rate={(2, 50)[seed % 2]}",
        "workload.system_prompt_tokens=48",
        f"scheduler.max_num_batched_tokens={(64, 2048)[seed // 2 % 2]}",
        seed=seed,
    )
    leaps, steps = Twin(tight).run(), Twin(tight).run(step_mode=True)
    for table in ("timeline", "requests", "checkpoints"):
        assert getattr(leaps, table).equals(getattr(steps, table)), table
    assert leaps.summary == steps.summary
    assert leaps.summary["requests_completed"] == 24


def test_retention_on_paged_holds_what_its_rule_says_but_for_started_blocks() -> None:
    """Of 1,599 tokens a window of 512 keeps 512, and what stands before them in the same block of 16; sinks besides."""
    kept = {}
    for rule in ("sliding_window(512)", "truncate(512)", "sink_recent(4, 508)", "sink_recent(20, 492)"):
        run = Twin(scenario(*ALONE, LLAMA, f"kv_cache.retention='{rule}'")).run()
        kept[rule] = int(run.timeline[run.timeline["running"] > 0]["kv_tokens"].iloc[-1] / (512 * 1024))
        assert run.requests["dropped_tokens"].tolist() == [1599 - 512]
        assert "is for research" in " ".join(run.summary["notes"])
    window = 1599 - (1598 - 511) // 16 * 16
    assert kept == {
        "sliding_window(512)": window,
        "truncate(512)": window,
        "sink_recent(4, 508)": 16 + 1599 - (1598 - 507) // 16 * 16,
        "sink_recent(20, 492)": 32 + 1599 - (1598 - 491) // 16 * 16,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [GEMMA, "kv_cache.retention='truncate(100)'"],
            "kv_cache.retention: gemma-3-1b has sliding windows of 512 tokens of its own; use full, or a model whose "
            "layers see the whole context",
        ),
        (
            [GEMMA, "kv_cache.version='0.18'"],
            "kv_cache.version: how 0.18 shares a pool for the windows of gemma-3-1b is not known; use 0.27, or set "
            "kv_cache.disable_hybrid_kv_cache_manager = true",
        ),
        (
            [GEMMA, "memory.admission=reserve"],
            "memory.admission: reserve knows no pool for the windows of gemma-3-1b; leave it none, or set "
            "kv_cache.disable_hybrid_kv_cache_manager = true",
        ),
        (
            [LLAMA, "kv_cache.retention='truncate(100)'", "kv_cache.enable_prefix_caching=true"],
            "kv_cache.enable_prefix_caching: under retention = truncate(100) a key would promise KV that was computed "
            "without what has been dropped; use retention = sliding_window(w), or no prefix caching",
        ),
        (
            [LLAMA, "kv_cache.retention='truncate(5000)'"],
            "kv_cache.retention: truncate(5000) keeps 5000 tokens, more than max_model_len 4096: keep fewer, or raise "
            "engine.max_model_len",
        ),
    ],
)
def test_what_does_not_go_with_windows_is_refused_by_name(settings: list[str], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        Twin(scenario(*settings))
    assert str(refused.value) == message


def test_policies_without_block_tables_keep_the_whole_context_and_say_so() -> None:
    one = ("workload.num_prompts=2", "workload.request_rate=1", "workload.prompt_tokens=700")
    run = Twin(
        Scenario.load(
            preset="doubling",
            overrides=[GEMMA, *one, "workload.output_tokens=50", "session.turns=1", "workload.system_prompt_tokens=0"],
        )
    ).run()
    assert run.timeline["kv_tokens"].max() in (749 * 26 * 1024, 2 * 749 * 26 * 1024)
    assert "22 of 26 layers of gemma-3-1b see 512 tokens only; here they keep" in " ".join(run.summary["notes"])


def test_the_flag_of_the_hybrid_manager_says_where_it_has_no_effect() -> None:
    flag = "kv_cache.disable_hybrid_kv_cache_manager=true"
    plain, windows = (Twin(scenario(*ALONE, name, flag, "workload.output_tokens=2")).run() for name in (LLAMA, GEMMA))
    assert plain.summary["notes"][1:] == [
        "kv_cache.disable_hybrid_kv_cache_manager has no effect: llama-2-7b has no sliding windows"
    ]
    assert not any("no effect" in note for note in windows.summary["notes"])


def test_a_window_read_from_a_config_on_disk_is_served(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "mistral",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "sliding_window": 64,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    small = ("kv_cache.block_size=16", "device.memory_bytes='2GiB'", "memory.activation_bytes='64MiB'")
    twin = Twin(scenario(f"model.name='{path}'", *small, *CHATS, "workload.request_rate=5"))
    kv: Any = twin.kv
    groups = kv.config.grouping.groups
    assert groups == (
        KVGroup(kind="sliding_window", num_layers=4, block_size=16, token_bytes=2 * 2 * 64 * 2, window=64),
    )
    result = twin.run()
    assert result.summary["requests_completed"] == 24
