"""``workload.multi_turn`` in a scenario: a run of it, its path, and what contradicts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hbmtwin.api import Scenario, ScenarioError, WorkloadError, run

SMALL = {
    "num_conversations": 6,
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 6},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 128},
        "prefix_num_tokens": {"distribution": "constant", "value": 64},
        "num_tokens": {"distribution": "constant", "value": 32},
    },
    "prompt_output": {"num_tokens": {"distribution": "constant", "value": 16}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "generate.json").write_text(json.dumps(SMALL))
    (tmp_path / "scenario.toml").write_text('[workload]\nmulti_turn = "generate.json"\nusers = 2\n')
    return tmp_path / "scenario.toml"


def test_a_run_has_every_turn_of_every_conversation(file: Path) -> None:
    """Six messages are three requests: prompts of 192, 192 + 16 + 32 = 240 and 288 tokens."""
    result = run(Scenario.load(file, overrides=["kv_cache.enable_prefix_caching=true", "kv_cache.block_size=16"]))
    assert result.summary["requests_completed"] == 18
    assert sorted(result.requests["prompt_tokens"].tolist()) == [192] * 6 + [240] * 6 + [288] * 6
    # Blocks of 16: the first of two clients' prompts find nothing, later ones 128 tokens, turns the whole history but
    # its last block: 192 of 240, and 240 of 288.
    assert result.summary["prefix_cache"]["hits"] >= 4 * 128 + 6 * 192 + 6 * 240


def test_requests_and_the_rate_of_a_client_are_the_workloads_keys(file: Path) -> None:
    result = run(Scenario.load(file, overrides=["workload.num_prompts=10", "workload.request_rate=0.01"]))
    assert result.summary["requests_completed"] == 10
    assert result.summary["makespan_s"] > 100
    assert run(Scenario.load(file, overrides=["workload.request_rate=inf"])).summary["makespan_s"] < 100


def test_the_path_is_relative_to_the_file_and_saved_as_it_is(file: Path) -> None:
    s = Scenario.load(file)
    assert s.workload.multi_turn == str(file.parent / "generate.json")
    (file.parent / "again.toml").write_text(s.to_toml())
    assert Scenario.load(file.parent / "again.toml") == s


def test_what_it_says_itself_is_told(file: Path) -> None:
    notes = run(Scenario.load(file, overrides=["workload.prompt_tokens=9", "session.turns=2"])).summary["notes"]
    assert "workload.prompt_tokens is said by workload.multi_turn" in notes
    assert "session.turns is said by workload.multi_turn" in notes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["workload.users=7"], r"workload.multi_turn: 7 clients need as many conversations, and there are 6 \("),
        (["workload.preset=rag"], "workload.preset: workload.multi_turn says by itself who asks for what"),
        (["workload.samples=2"], "workload.samples: 2 answers .*; leave workload.multi_turn out, or samples = 1"),
    ],
)
def test_what_contradicts_it_is_refused(settings: list[str], said: str, file: Path) -> None:
    with pytest.raises(ScenarioError, match=said):
        run(Scenario.load(file, overrides=settings))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"generate\.json:1: not JSON"),
        ("[]", r"generate\.json: this is a list"),
        ('{"num_conversations": 3}', r"generate\.json: prompt_input is missing"),
    ],
)
def test_a_file_that_is_wrong_is_told_behind_its_key(text: str, said: str, file: Path) -> None:
    (file.parent / "generate.json").write_text(text)
    with pytest.raises(WorkloadError, match=f"^workload\\.multi_turn: .*{said}"):
        run(Scenario.load(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"^workload\.multi_turn: .*no such file"):
        run(Scenario.load(overrides=[f"workload.multi_turn={tmp_path / 'no.json'}"]))
