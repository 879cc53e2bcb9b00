"""What would have held: legal single changes, each run for real, the best first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hbmtwin.sim import what_would_hold as module
from hbmtwin.sim.legality import check, effective_oom
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import PRESETS, Scenario, known_keys
from hbmtwin.sim.what_would_hold import alternatives, ran_short, what_would_hold

CROWD = [
    *("workload.num_prompts=40", "workload.request_rate=inf", "workload.prompt_tokens=1500", "session.turns=1"),
    *("workload.output_tokens=60", "engine.max_model_len=2048"),
]
ROW = [
    *("change", "keys", "held", "died_at_s", "cause", "requests_completed", "requests_rejected", "preemptions"),
    *("dropped_tokens", "peak_reserved_bytes", "tpot_p50_s", "e2e_p50_s"),
]


@pytest.fixture(scope="module")
def dead() -> Result:
    result = run(Scenario.load(preset="doubling", overrides=CROWD))
    assert result.oom is not None
    return result


def named(scenario: Scenario, running: int | None = None) -> dict[str, dict[str, Any]]:
    return {a.name: a.keys for a in alternatives(scenario, running)}


# -- which changes --------------------------------------------------------------------------------------------------


def test_the_alternatives_of_a_naive_server() -> None:
    """What a server of the preset `caching` could change; preempt is not among it: concat cannot undo a step."""
    assert named(Scenario.load(preset="caching"), 60) == {
        "paged KV": PRESETS["paged"],
        "pages on demand": {"kv_cache.policy": "virtual", "memory.kv_arena": "direct", "memory.oom": "preempt"},
        "a pool for KV": {"memory.kv_arena": "pooled"},
        "static growth": {"kv_cache.growth": "static"},
        "doubling growth": {"kv_cache.growth": "doubling"},
        "step growth": {"kv_cache.growth": "step"},
        "hybrid growth": {"kv_cache.growth": "hybrid"},
        "expandable segments": {"memory.alloc_conf": "expandable_segments:True"},
        "INT8 KV": {"kv_cache.dtype": "int8_per_token_head"},
        "half of the history": {"kv_cache.retention": "truncate(2048)"},
        "a sliding window": {"kv_cache.retention": "sliding_window(2048)"},
        "admission at full length": {"memory.admission": "reserve"},
        "half the sequences at once": {"scheduler.max_num_seqs": 30},
        "more of the device": {"engine.gpu_memory_utilization": 0.95},
    }


@pytest.mark.parametrize(
    ("sets", "there", "not_there"),
    [
        ([], (), ("old copies die one by one", "buffers per layer", "no KV between turns", "half the tokens a step")),
        (
            ["kv_cache.preset=doubling"],
            ("preempt", "exact growth", "old copies die one by one", "buffers per layer"),
            (),
        ),
        (["kv_cache.preset=doubling"], (), ("doubling growth",)),
        (["kv_cache.preset=pooled"], (), ("a pool for KV", "expandable segments")),
        (["kv_cache.preset=caching", "session.between_turns=keep"], ("no KV between turns", "paged KV"), ()),
        (["memory.oom=stop"], ("preempt", "INT8 KV"), ("paged KV", "static growth", "a sliding window")),
        (["kv_cache.dtype=int8"], (), ("INT8 KV",)),
        (["kv_cache.preset=caching", "kv_cache.retention=truncate(100)"], (), ("half of the history",)),
        (["engine.gpu_memory_utilization=0.95"], (), ("more of the device",)),
        (["scheduler.max_num_seqs=1"], (), ("half the sequences at once",)),
        (["memory.activations=peak"], ("half the tokens a step",), ()),
        (
            ["kv_cache.preset=caching", "memory.alloc_conf=garbage_collection_threshold:0.8"],
            (),
            ("expandable segments",),
        ),
    ],
)
def test_only_what_is_legal_and_changes_something(
    sets: list[str], there: Sequence[str], not_there: Sequence[str]
) -> None:
    found = named(Scenario.load(overrides=sets))
    assert set(there) <= set(found)
    assert not set(not_there) & set(found)


@pytest.mark.parametrize("present", ["padded", "sorted", "buckets", "variable"])
def test_a_server_with_static_batches_could_batch_otherwise(present: str) -> None:
    batches = ["scheduler.policy=static_batch", f"scheduler.batching={present}"]
    found = named(Scenario.load(preset="doubling", overrides=batches))
    continuous = {"scheduler.policy": "vllm"}
    of_batches = {name: keys for name, keys in found.items() if "batch" in name}
    assert of_batches == {
        "continuous batching": continuous,
        "continuous batching and paged KV": {**continuous, **PRESETS["paged"]},
        **{f"{b} batches": {"scheduler.batching": b} for b in ("variable", "buckets", "sorted") if b != present},
    }
    assert "paged KV" not in found  # illegal without the other scheduler
    assert not any("batch" in name for name in named(Scenario.load(preset="doubling")))


def test_expandable_segments_stand_beside_the_other_settings() -> None:
    conf = "memory.alloc_conf='expandable_segments:False,roundup_power2_divisions:4'"
    keys = named(Scenario.load(preset="caching", overrides=[conf]))["expandable segments"]
    assert keys == {"memory.alloc_conf": "roundup_power2_divisions:4,expandable_segments:True"}


def test_half_of_what_ran_not_of_a_limit_that_was_never_reached() -> None:
    def half(sets: list[str], running: int | None) -> int:
        keys = named(Scenario.load(overrides=sets), running)["half the sequences at once"]
        return int(keys["scheduler.max_num_seqs"])

    assert half([], None) == 128
    assert half([], 55) == 27
    assert half(["scheduler.max_num_seqs=8"], 55) == 4


@pytest.mark.parametrize("sets", [["kv_cache.preset=caching"], ["kv_cache.preset=doubling"], ["memory.oom=stop"]])
def test_each_changes_its_keys_and_no_other(sets: list[str]) -> None:
    stored = ["results.steps=true", "results.alert_kv_usage=0.5"]
    present = Scenario.load(overrides=[*sets, *stored])
    found = alternatives(present, 60)
    for a in found:
        check(a.scenario)
        changed = {key for key in known_keys() if value(a.scenario, key) != value(present, key)}
        assert changed - {"results.steps", "results.alert_kv_usage"} <= set(a.keys), a.name
        assert {key: value(a.scenario, key) for key in a.keys} == a.keys
        assert not a.scenario.results.steps  # nobody looks at them
    assert len({a.name for a in found}) == len(found) > 3


def value(scenario: Scenario, key: str) -> Any:
    if key == "kv_cache.preset":
        return None
    if key == "memory.oom":
        return effective_oom(scenario)
    section, _, name = key.rpartition(".")
    return getattr(getattr(scenario, section) if section else scenario, name)


def test_a_change_to_what_is_so_already_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a list that offers the present growth rule, and a change twice."""
    changes = [
        ("now", {"kv_cache.growth": "doubling"}),
        ("preset by another name", {"memory.kv_arena": "caching"}),
        ("new", {"seed": 1}),
        ("again", {"seed": 1}),
        ("illegal", {"memory.general": "pooled"}),
    ]
    monkeypatch.setattr(module, "_changes", lambda *_: iter(changes))
    assert list(named(Scenario.load(preset="doubling"))) == ["new"]


# -- what came of them ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(dead: Result) -> list[dict[str, Any]]:
    return what_would_hold(dead, jobs=1)


def test_each_row_is_the_run_of_the_scenario_with_those_keys(dead: Result, rows: list[dict[str, Any]]) -> None:
    assert [list(row) for row in rows] == [ROW] * len(rows)
    by_name = {row["change"]: row for row in rows}
    for name in ("paged KV", "static growth", "a sliding window", "preempt"):
        row = by_name[name]
        sets = [f"{key}={json.dumps(v) if isinstance(v, str) else v}" for key, v in row["keys"].items()]
        summary = run(Scenario.load(preset=None, overrides=[*CROWD, *base(row["keys"]), *sets])).summary
        oom = summary["oom"]
        assert row["held"] is (oom is None)
        assert (row["died_at_s"], row["cause"]) == ((None, None) if oom is None else (oom["time_s"], oom["cause"]))
        for key in ("requests_completed", "preemptions", "dropped_tokens", "peak_reserved_bytes"):
            assert row[key] == summary[key], (name, key)
        assert row["requests_rejected"] == sum(summary["requests_rejected"].values())
        assert (row["tpot_p50_s"], row["e2e_p50_s"]) == (summary["tpot_s"]["p50"], summary["e2e_s"]["p50"])


def base(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={v}" for key, v in PRESETS["doubling"].items() if key not in keys]


def test_some_hold_and_some_do_not_and_the_best_comes_first(rows: list[dict[str, Any]]) -> None:
    held = [row["held"] for row in rows]
    assert held == sorted(held, reverse=True)
    assert set(held) == {True, False}
    assert "paged KV" in [row["change"] for row in rows if row["held"]]


def test_the_table_is_plain_json_and_the_same_in_any_number_of_processes(
    dead: Result, rows: list[dict[str, Any]]
) -> None:
    told: list[str] = []
    again = what_would_hold(dead, jobs=2, finished=told.append)
    assert again == rows == json.loads(json.dumps(rows, allow_nan=False))
    assert sorted(told) == sorted(row["change"] for row in rows)


def outcome(**changes: Any) -> dict[str, Any]:
    return {**dict.fromkeys(ROW[5:], 0), "held": True, "died_at_s": None, "cause": None, "e2e_p50_s": 1.0, **changes}


def test_the_order_of_rows(dead: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        outcome(requests_completed=9),
        outcome(requests_completed=9, e2e_p50_s=2.0),
        outcome(requests_completed=9, preemptions=1),
        outcome(requests_completed=8),
        outcome(requests_completed=9, dropped_tokens=5),
        outcome(held=False),  # lived, and rejected for memory
        outcome(held=False, died_at_s=7.0),
        outcome(held=False, died_at_s=5.0, requests_completed=9, tpot_p50_s=None),
        outcome(held=False, died_at_s=5.0, requests_completed=8, e2e_p50_s=None),
        {**dict.fromkeys(ROW[5:]), "held": False, "died_at_s": None, "cause": "does_not_fit"},
    ]
    changes = [(f"change {i}", {"seed": i + 1}) for i in range(len(wanted))]
    monkeypatch.setattr(module, "_changes", lambda *_: iter(changes))
    monkeypatch.setattr(module, "in_processes", lambda *_, **__: wanted[::-1])
    assert [{k: v for k, v in row.items() if k not in ("change", "keys")} for row in what_would_hold(dead)] == wanted


def test_a_change_with_which_the_server_does_not_start_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds 6 %: 0.92 starts, 0.95 finds too little free."""
    result = run(Scenario.load(preset="doubling", overrides=[*CROWD, "device.other_tenant_bytes=1.75GiB"]))
    monkeypatch.setattr(module, "_changes", lambda *_: iter([("more", {"engine.gpu_memory_utilization": 0.95})]))
    (row,) = what_would_hold(result, jobs=1)
    assert (row["held"], row["cause"], row["died_at_s"], row["requests_completed"]) == (
        False,
        "does_not_fit",
        None,
        None,
    )


# -- when -----------------------------------------------------------------------------------------------------------


def never(*_: object, **__: object) -> list[object]:
    raise AssertionError("something was run again")


def test_nothing_is_run_again_where_memory_sufficed(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["workload.num_prompts=4", "workload.prompt_tokens=3000", "workload.output_tokens=9", "session.turns=1"]
    result = run(Scenario.load(overrides=[*few, "engine.max_model_len=2048"]))
    assert result.summary["requests_rejected"] == {"max_model_len": 4}  # which is no want of memory
    monkeypatch.setattr(module, "in_processes", never)
    assert what_would_hold(result) == []


@pytest.mark.parametrize(
    ("summary", "short"),
    [
        ({"oom": None, "requests_rejected": {}}, False),
        ({"oom": None, "requests_rejected": {"max_model_len": 3}}, False),
        ({"oom": None, "requests_rejected": {"kv_capacity": 1}}, True),
        ({"oom": None, "requests_rejected": {"out_of_memory": 1, "max_model_len": 3}}, True),
        ({"oom": {"cause": "shortage"}, "requests_rejected": {}}, True),
        ({"oom": None, "standstill": {"kind": "live_lock"}, "requests_rejected": {}}, True),
    ],
)
def test_a_rejection_for_want_of_memory_is_a_shortage_too(summary: dict[str, Any], short: bool) -> None:
    assert ran_short(summary) is short
