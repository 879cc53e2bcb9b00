"""Nothing is lost: every request has one end, every token is computed once for each time its KV was given up, and every
byte of the device is somewhere, in random runs of all presets.

The token side is replayed from ``steps.parquet`` alone, the byte side from the timeline alone; that both agree at the
step ends that they share is a check of one against the other.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.sim.books import Row
from hbmtwin.sim.engine import Engine
from hbmtwin.sim.recorder import Recorder
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

PRESETS = ["caching", "pooled", "doubling", "paged"]
TOKEN_BYTES = 2**19
"""Llama-2-7B: 32 layers of K and V, 32 heads of 128, two bytes each."""


def settings_of(**values: object) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


tight = st.fixed_dictionaries(
    {
        "engine__gpu_memory_utilization": st.integers(460, 560).map(lambda x: x / 1000),
        "engine__max_model_len": st.sampled_from([300, 512]),
        "scheduler__max_num_seqs": st.sampled_from([1, 4, 256]),
        "scheduler__max_num_batched_tokens": st.sampled_from([20, 150, 2048]),
        "session__between_turns": st.sampled_from(["keep", "drop"]),
        "memory__oom": st.sampled_from(["stop", "reject", "preempt"]),
        "results__interval_s": st.sampled_from([0.01, 0.3, 100]),
        "kv_cache__block_size": st.sampled_from([16, 128]),
        "kv_cache__tensors": st.just("merged"),
        "results__steps": st.just("true"),
        "seed": st.integers(0, 2**40),
    }
)
generated = st.fixed_dictionaries(
    {
        "workload__num_prompts": st.integers(1, 14),
        "workload__prompt_tokens": st.sampled_from(["30", "{distribution='uniform',low=1,high=320}"]),
        "workload__output_tokens": st.sampled_from(["1", "90", "{distribution='uniform',low=1,high=120}"]),
        "workload__system_prompt_tokens": st.sampled_from([0, 7]),
        "session__turns": st.integers(1, 3),
        "session__think_time_s": st.sampled_from([0, 0.4]),
    }
)
open_loop = st.fixed_dictionaries({"workload__request_rate": st.sampled_from(["inf", 2.0, 40.0])})
closed_loop = st.fixed_dictionaries({"workload__users": st.integers(1, 6)})
lines = st.lists(
    st.tuples(st.integers(0, 900), st.integers(1, 320), st.integers(1, 90), st.integers(0, 4)), min_size=1, max_size=20
)


def run(preset: str, values: dict[str, object]) -> Result:
    if preset != "paged":
        values = {**values, "memory__oom": "stop"}
    return Twin(Scenario.load(preset=preset, overrides=settings_of(**values))).run()


def check_requests(result: Result) -> None:
    summary, requests = result.summary, result.requests
    ids = list(requests["id"])
    assert len(ids) == len(set(ids)) == summary["requests_total"]
    ends = [summary[f"requests_{end}"] for end in ("completed", "failed", "unfinished")]
    assert sum(ends) + sum(summary["requests_rejected"].values()) == summary["requests_total"]
    if result.oom is None:
        assert ends[1:] == [0, 0]
    done = requests[requests["status"] == "completed"]
    assert (done["arrival_ns"] <= done["scheduled_ns"]).all()
    assert (done["scheduled_ns"] < done["first_token_ns"]).all()
    assert (done["first_token_ns"] <= done["end_ns"]).all()
    assert summary["preemptions"] == requests["preemptions"].sum() == result.timeline["preemptions"].iloc[-1]
    for _, turns in requests[requests["scheduled_ns"] >= 0].groupby("session"):
        order = turns.sort_values("turn")
        assert (order["arrival_ns"].iloc[1:].to_numpy() >= order["end_ns"].iloc[:-1].to_numpy()).all()


def check_tokens(result: Result) -> None:
    """Replay the steps: what a sequence has computed is what it had and what it was given; preemption takes all."""
    steps = result.steps
    assert steps is not None
    columns = ["start_ns", "duration_ns", "repeat", "seq_ids", "new_tokens", "context_tokens", "preempted"]
    rows = list(steps[columns].itertuples(index=False, name=None))
    last_row = {id: index for index, row in enumerate(rows) for id in row[3]}
    at_time: dict[int, set[int]] = {}
    for time, held in result.timeline[["time_ns", "kv_tokens"]].values.tolist():
        at_time.setdefault(time, set()).add(held)
    computed: dict[int, int] = {}
    hits = shared = 0
    for index, (start, duration, repeat, ids, new_tokens, contexts, preempted) in enumerate(rows):
        for id in preempted:
            computed[id] = 0
        for id, new, context in zip(ids, new_tokens, contexts, strict=True):
            if id not in computed:
                hits += context
            else:
                assert context == computed[id], f"sequence {id} at {start} ns"
            assert repeat == 1 or new == 1, "only decodes leap"
            computed[id] = context + new + repeat - 1
        if start + duration in at_time:
            shared += 1
            running = sum(tokens for id, tokens in computed.items() if last_row[id] >= index)
            assert running * TOKEN_BYTES in at_time[start + duration], f"tokens at {start + duration} ns"
    assert shared or not rows
    assert hits == result.timeline["hit_tokens"].iloc[-1] == result.requests["cached_tokens"].sum()
    done = result.requests[result.requests["status"] == "completed"]
    ended = Counter((done["prompt_tokens"] + done["output_tokens"] - 1).tolist())
    assert ended <= Counter(computed.values())
    begun = int((result.requests["scheduled_ns"] >= 0).sum())
    assert len(computed) <= begun, "sequences computed tokens that no request accounts for"
    assert len(computed) == begun or result.oom is not None
    if set(result.requests["status"]) == {"completed"}:
        assert ended == Counter(computed.values())


def check_bytes(result: Result) -> None:
    timeline = result.timeline
    assert set(timeline[list(Row._fields)].sum(axis=1)) == {result.summary["capacity_bytes"]}
    assert (timeline[list(Row._fields)] >= 0).all(axis=None)
    assert set(timeline["weights"]) == {timeline["weights"].iloc[0]}
    assert (timeline["kv_tokens"] % TOKEN_BYTES == 0).all()
    last = timeline.iloc[-1]
    if result.oom is None:
        assert [int(last[name]) for name in ("running", "waiting", "parked", "kv_tokens", "kv_parked")] == [0] * 5
        assert int(last["kv_unfilled"]) == int(last["growth_copy"]) == 0


def check_all(result: Result) -> None:
    check_requests(result)
    check_tokens(result)
    check_bytes(result)


def note_pressure(seen: Counter[str], result: Result) -> None:
    """Count the runs in which memory ran out, so that a test knows that it saw both kinds."""
    pressed = result.oom is not None or result.summary["preemptions"] or result.summary["requests_rejected"]
    seen["pressed" if pressed else "roomy"] += 1


def random_runs(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_lost_of_generated_traffic(preset: str) -> None:
    seen: Counter[str] = Counter()

    @random_runs(40)
    @given(tight, generated, st.one_of(open_loop, closed_loop))
    def kept(tight: dict[str, object], generated: dict[str, object], loop: dict[str, object]) -> None:
        result = run(preset, {**tight, **generated, **loop})
        check_all(result)
        note_pressure(seen, result)
        rejected = sum(result.summary["requests_rejected"].values())
        if result.oom is None and not rejected:
            assert sorted(result.requests["id"]) == list(range(int(str(generated["workload__num_prompts"]))))

    kept()
    assert min(seen["roomy"], seen["pressed"]) > 0  # which are drawn depends on what else was imported


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_lost_of_a_trace_and_every_line_has_an_end(preset: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    @random_runs(40)
    @given(tight, lines, st.booleans())
    def kept(tight: dict[str, object], lines: list[tuple[int, int, int, int]], sessions: bool) -> None:
        rows = pd.DataFrame(sorted(lines), columns=["arrival_s", "prompt_tokens", "output_tokens", "session"])
        rows["arrival_s"] /= 300
        (rows if sessions else rows.drop(columns="session")).to_csv(tmp_path / "trace.csv", index=False)
        result = run(preset, {**tight, "workload__trace": tmp_path / "trace.csv"})
        check_all(result)
        note_pressure(seen, result)
        assert sorted(result.requests["id"]) == list(range(len(lines)))
        by_id = result.requests.sort_values("id")
        assert list(by_id["prompt_tokens"]) == list(rows["prompt_tokens"])
        done = by_id["status"] == "completed"
        assert list(by_id["output_tokens"][done.to_numpy()]) == list(rows["output_tokens"][done.to_numpy()])

    kept()
    assert min(seen["roomy"], seen["pressed"]) > 0  # which are drawn depends on what else was imported


# -- what these checks would find ------------------------------------------------------------------------------------


def pressed(**changes: object) -> dict[str, object]:
    """Six long answers in a pool that holds three."""
    return {
        "engine__gpu_memory_utilization": 0.463,
        "engine__max_model_len": 512,
        "kv_cache__block_size": 16,
        "kv_cache__tensors": "merged",
        "workload__request_rate": 6,
        "workload__num_prompts": 12,
        "workload__prompt_tokens": 100,
        "workload__output_tokens": 150,
        "workload__system_prompt_tokens": 0,
        "session__turns": 1,
        "results__steps": "true",
        **changes,
    }


def test_the_pressed_run_preempts_and_the_naive_one_dies() -> None:
    paged, caching = run("paged", pressed()), run("caching", pressed())
    assert paged.summary["preemptions"] > 3
    assert caching.summary["requests_failed"] > 0
    assert caching.summary["requests_unfinished"] > 0
    check_all(paged)
    check_all(caching)


def test_a_step_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leap = Recorder.leap
    monkeypatch.setattr(
        Recorder, "leap", lambda self, start, took, k, *rest: leap(self, start, took, k - (k > 5), *rest)
    )
    with pytest.raises(AssertionError, match=r"sequence|tokens at"):
        check_tokens(run("paged", pressed()))


def test_a_preemption_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leap = Recorder.leap
    monkeypatch.setattr(
        Recorder,
        "leap",
        lambda self, start, took, k, scheduled, _, end_of: leap(self, start, took, k, scheduled, [], end_of),
    )
    with pytest.raises(AssertionError, match=r"sequence|tokens at"):
        check_tokens(run("paged", pressed()))


def test_requests_forgotten_at_a_death_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_close_early", lambda self, now, why: None)
    result = run("caching", pressed())
    assert len(result.requests) < result.summary["requests_total"] == 12
    with pytest.raises(AssertionError, match="no request accounts for"):
        check_tokens(result)


@pytest.mark.parametrize("oom", ["stop", "reject"])
def test_what_was_reserved_before_a_refusal_is_not_counted_as_computed(oom: str) -> None:
    """Three sequences fill a block each; of the next three blocks one is there, and the second is refused."""
    values = {
        "engine__gpu_memory_utilization": 0.46,
        "engine__max_model_len": 300,
        "kv_cache__block_size": 128,
        "kv_cache__options": "{num_blocks=5}",
        "memory__oom": oom,
        "results__interval_s": 0.3,
        "results__steps": "true",
        "workload__num_prompts": 3,
        "workload__request_rate": "inf",
        "workload__prompt_tokens": 119,
        "workload__output_tokens": 11,
        "workload__system_prompt_tokens": 0,
        "session__turns": 1,
    }
    result = run("paged", values)
    check_all(result)
    assert int(result.timeline["kv_tokens"].max()) == 3 * 128 * TOKEN_BYTES
    if oom == "stop":
        assert int(result.timeline["kv_tokens"].iloc[-1]) == 3 * 128 * TOKEN_BYTES
    else:
        assert result.summary["requests_rejected"] == {"out_of_memory": 1}
