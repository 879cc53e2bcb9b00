"""A conversation with kept history: memory and time per token grow with every turn (claims A1, A3, B2)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

MIB = 2**20


def converse(preset: str, *, prompt: int, output: int, turns: int, **sets: object) -> Result:
    overrides = [
        "workload.users=1",
        f"workload.num_prompts={turns}",
        f"workload.prompt_tokens={prompt}",
        f"workload.output_tokens={output}",
        "workload.system_prompt_tokens=0",
        f"session.turns={turns}",
        "session.think_time_s=1",
        "session.between_turns=keep",
        *(f"{key.replace('__', '.')}={value}" for key, value in sets.items()),
    ]
    return Twin(Scenario.load(preset=preset, overrides=overrides)).run()


@pytest.mark.parametrize("preset", ["caching", "doubling", "pooled"])
def test_ten_tokens_a_turn_are_five_mebibytes_a_turn(preset: str) -> None:
    """A3: 5 MiB after turn 1, 10 after 2, 100 after 20. The KV of a turn's last token is written by the next turn."""
    result = converse(preset, prompt=5, output=5, turns=20)
    assert result.summary["requests_completed"] == 20
    turns = result.requests.sort_values("turn")
    assert list(turns["prompt_tokens"] + turns["output_tokens"]) == [10 * turn for turn in range(1, 21)]
    token_bytes = 5 * MIB // 10
    parked = result.timeline.loc[result.timeline["parked"] == 1, "kv_parked"].drop_duplicates()
    assert list(parked) == [10 * turn * token_bytes - token_bytes for turn in range(1, 20)]
    # The first step of turn n + 1 computes the token that turn n left, and its own five.
    assert list(turns["cached_tokens"]) == [0, *(10 * turn - 1 for turn in range(1, 20))]


def test_a_hundred_turns_are_five_hundred_mebibytes() -> None:
    """A3, its last figure."""
    result = converse("doubling", prompt=5, output=5, turns=100)
    last = result.requests.sort_values("turn").iloc[-1]
    tokens = int(last["prompt_tokens"] + last["output_tokens"])
    assert tokens * 5 * MIB // 10 == 500 * MIB
    assert int(result.timeline["kv_tokens"].max()) == 500 * MIB - 5 * MIB // 10


def test_history_is_250_tokens_after_turn_1_and_430_after_turn_2(tmp_path: Path) -> None:
    """B2: 50 + 200, then 30 + 150; with turns of that size it passes 2,000 tokens by turn 10."""
    rows = [(50, 200), (250 + 30, 150)]
    for _ in range(8):
        rows.append((sum(rows[-1]) + 40, 175))
    text = "arrival_s,prompt_tokens,output_tokens,session,turn\n"
    text += "".join(f"0,{prompt},{output},7,{turn}\n" for turn, (prompt, output) in enumerate(rows))
    trace = tmp_path / "conversation.csv"
    trace.write_text(text)
    scenario = Scenario.load(
        preset="caching", overrides=[f"workload.trace={trace}", "session.between_turns=keep", "kv_cache.tensors=merged"]
    )
    result = Twin(scenario).run()
    turns = result.requests.sort_values("turn")
    history = list(turns["prompt_tokens"] + turns["output_tokens"])
    assert history[:2] == [250, 430]
    assert history[9] > 2000
    assert list(turns["cached_tokens"].iloc[:3]) == [0, 249, 429]


def test_time_per_token_and_memory_grow_with_every_turn() -> None:
    """A1 in kind: each turn of a kept history reads, copies and holds more than the one before."""
    result = converse("caching", prompt=40, output=60, turns=20, kv_cache__tensors="merged")
    turns = result.requests.sort_values("turn")
    assert list(turns["turn"]) == list(range(20))
    tpot_ns = ((turns["end_ns"] - turns["first_token_ns"]) / (turns["output_tokens"] - 1)).to_list()
    assert all(later > earlier for earlier, later in pairwise(tpot_ns))
    peaks = [int(result.timeline.loc[result.timeline["time_ns"] <= end, "kv_tokens"].max()) for end in turns["end_ns"]]
    assert peaks == [(100 * turn - 1) * MIB // 2 for turn in range(1, 21)]


def test_dropped_history_is_computed_again() -> None:
    kept = converse("caching", prompt=40, output=60, turns=5)
    dropped = converse("caching", prompt=40, output=60, turns=5, session__between_turns="drop")
    assert kept.summary["simulated_output_tokens"] == dropped.summary["simulated_output_tokens"] == 300
    assert int(kept.requests["cached_tokens"].sum()) == 99 + 199 + 299 + 399
    assert int(dropped.requests["cached_tokens"].sum()) == 0
    assert int(dropped.timeline["kv_parked"].max()) == 0
