"""The words of a verdict, letter by letter."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.allocators.oom import Cause
from hbmtwin.api import Scenario, run
from hbmtwin.dashboard.verdict import (
    CAUSES,
    HEADER,
    basis_text,
    bytes_text,
    dropped_text,
    fate,
    headline,
    oom_in_words,
    percent_text,
    rows,
    same_traffic,
    seconds_text,
    short_fate,
)

GIB = 2**30


def summary(**changes: Any) -> dict[str, Any]:
    """The summary of a run in which nothing happened, with these changes."""
    nothing = {"p50": None, "p90": None, "p99": None}
    return {
        "oom": None,
        "preemptions": 0,
        "dropped_tokens": 0,
        "turns_with_dropped_tokens": 0,
        "requests_rejected": {},
        "requests_completed": 1000,
        "requests_total": 1000,
        "kv_utilization_mean": None,
        "internal_fragmentation_mean": 0.0125,
        "external_fragmentation_mean": 0.25,
        "peak_reserved_bytes": 24 * GIB,
        "ttft_s": nothing,
        "tpot_s": {**nothing, "p50": 0.0241},
        "makespan_s": 1234.5,
        **changes,
    }


def record(cause: str = "external_fragmentation", **changes: Any) -> dict[str, Any]:
    """An out-of-memory record with the terms that are told."""
    return {
        "cause": cause,
        "time_s": 81.25,
        "request": 70,
        "tag": "kv",
        "rule": "",
        "need_bytes": 663 * 2**20,
        "free_bytes": 4 * GIB,
        "largest_free_bytes": 648 * 2**20,
        **changes,
    }


def test_a_death_in_words() -> None:
    assert oom_in_words(record()) == (
        "Out of memory at 81.250 s, cause external fragmentation: request 70 asks for 663.00 MiB of KV in one piece. "
        "4.00 GiB are free in all, the largest piece is 648.00 MiB. "
        "Enough is free in all, but no single piece is large enough."
    )


def test_where_one_piece_is_all_that_is_free_pieces_are_not_spoken_of() -> None:
    assert oom_in_words(record("shortage", free_bytes=2**20, largest_free_bytes=2**20)).startswith(
        "Out of memory at 81.250 s, cause shortage: request 70 asks for 663.00 MiB of KV. 1.00 MiB are free."
    )


def test_a_rule_is_explained_and_an_unknown_one_at_least_named() -> None:
    assert oom_in_words(record("allocator_rule", rule="stream")).endswith(
        "A free piece is large enough, but a rule of the allocator bars it: "
        "a cached block is large enough, but belongs to another stream."
    )
    assert oom_in_words(record("allocator_rule", rule="moon_phase")).endswith("bars it: moon_phase.")


def test_nobody_in_particular_is_the_server() -> None:
    assert "the server asks for 663.00 MiB of weights" in oom_in_words(record(request=-1, tag="weight"))


def test_every_cause_has_its_sentence() -> None:
    assert set(CAUSES) == {cause.value for cause in Cause}


def test_the_headline_names_who_held_and_who_died_of_what() -> None:
    dead = summary(oom=record("growth_copy"))
    assert headline({"caching": dead, "paged": summary()}) == "paged held; caching died at 81.2 s (growth copy)."
    three = {"caching": summary(), "pooled": summary(), "paged": summary()}
    assert headline(three) == "caching, pooled and paged held."
    assert headline({"caching": dead}) == "caching died at 81.2 s (growth copy)."
    idle = summary(requests_completed=0, requests_rejected={"max_model_len": 239})
    assert headline({"caching": dead, "paged": idle}) == (
        "caching died at 81.2 s (growth copy); paged served nothing (all 239 requests rejected)."
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "held"),
        ({"preemptions": 1}, "held, 1 preemption"),
        (
            {"preemptions": 4321, "requests_rejected": {"max_model_len": 2, "never_fits": 1}},
            "held, 4,321 preemptions, 3 rejected",
        ),
        ({"preemptions": 2, "turns_with_dropped_tokens": 17}, "held, 2 preemptions, 17 turns lost tokens"),
        ({"turns_with_dropped_tokens": 1}, "held, 1 turn lost tokens"),
        ({"oom": record()}, "died at 81.2 s: external fragmentation"),
        (
            {"requests_completed": 0, "requests_total": 600, "requests_rejected": {"max_model_len": 239}},
            "served nothing: all 239 requests rejected",
        ),
        (
            {"requests_completed": 0, "requests_rejected": {"never_fits": 1}},
            "served nothing: the only request rejected",
        ),
        (
            {"oom": record(), "requests_completed": 0, "requests_rejected": {"max_model_len": 2}},
            "died at 81.2 s: external fragmentation, 2 rejected",
        ),
    ],
)
def test_a_fate_in_few_words(changes: dict[str, Any], said: str) -> None:
    assert fate(summary(**changes)) == said


def test_a_short_fate_leaves_out_what_a_death_makes_idle() -> None:
    assert short_fate(summary(oom=record(), requests_rejected={"max_model_len": 2})) == (
        "died at 81.2 s: external fragmentation"
    )
    assert short_fate(summary(preemptions=2)) == "held, 2 preemptions"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["session.turns=1"], "Every policy gets the same requests at the same times."),
        (["session.turns=2"], "may differ: a turn waits for the answer before it."),
        (["session.turns=1", "workload.users=2"], "may differ: a user waits for each answer."),
    ],
)
def test_what_the_policies_of_a_comparison_share(overrides: list[str], said: str) -> None:
    few = ["workload.num_prompts=6", "workload.prompt_tokens=100", "workload.output_tokens=10"]
    result = run(Scenario.load(overrides=[*few, *overrides]))
    assert same_traffic({"paged": result}).endswith(said)


def test_runs_of_different_traffic_say_in_what_it_differs() -> None:
    few = ["workload.num_prompts=6", "workload.prompt_tokens=100", "workload.output_tokens=10", "session.turns=1"]
    runs = {n: run(Scenario.load(overrides=[*few, f"seed={n}", f"workload.system_prompt_tokens={n}"])) for n in (1, 2)}
    assert same_traffic(runs) == (
        "The runs do not have the same traffic: they differ in seed and workload.system_prompt_tokens."
    )
    kept = {n: run(Scenario.load(overrides=[*few, f"session.between_turns={n}"])) for n in ("keep", "drop")}
    assert same_traffic(kept) == "Every policy gets the same requests at the same times."


def test_a_row_has_a_cell_a_column_and_a_dash_for_what_is_not() -> None:
    (row,) = rows({"paged": summary()})
    assert len(row) == len(HEADER)
    assert row == ("paged", "held", "1,000 / 1,000", "–", "1.2", "25.0", "24.00", "– / –", "24.1", "1,234.5")


def test_dropped_tokens_in_words() -> None:
    assert dropped_text(summary(dropped_tokens=12345, turns_with_dropped_tokens=67)) == "12,345, of 67 turns"
    assert dropped_text(summary(dropped_tokens=5, turns_with_dropped_tokens=1)) == "5, of 1 turn"


def test_units_follow_the_size() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 3 * 2**19, 3 * 2**29)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "1.50 GiB",
    ]
    assert [percent_text(r) for r in (None, 0.0, 0.123456, 1)] == ["–", "0.0 %", "12.3 %", "100.0 %"]
    assert [seconds_text(s) for s in (None, 0.0, 0.0241, 90.5)] == ["–", "0.00 s", "24.1 ms", "90.50 s"]


def test_runs_with_times_from_elsewhere_are_told_apart() -> None:
    runs = {
        "a": {"basis": "default, uncalibrated"},
        "b": {"basis": "calibrated on cpu"},
        "c": {"basis": "calibrated on cpu"},
    }
    assert basis_text(runs) == "a: default, uncalibrated; b, c: calibrated on cpu"
    assert basis_text({"b": runs["b"], "c": runs["c"]}) == "calibrated on cpu"
