"""OOM points against runs of every load, against arithmetic where it is exact, and against what nobody ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.capacity.oom_point import OomPoint, oom_point
from hbmtwin.sim.capacity.oom_point_curves import by_load, by_place, causes, memory_by_load, quantile
from hbmtwin.sim.capacity.oom_point_draws import Draw
from hbmtwin.sim.capacity.oom_point_loads import Load, parse_load
from hbmtwin.sim.capacity.oom_point_tables import half_load, tables, to_dict, write_tables
from hbmtwin.sim.capacity.smallest_memory import UNIT_BYTES, evenly
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row, run_row
from hbmtwin.sim.sweep.scenario_key import scenario_key

HERE = partial(run_each, jobs=1)
AT_ONCE = [
    "workload.request_rate=inf",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "kv_cache.tensors=merged",
    "results.interval_s=1e6",
]
STATIC = [
    *AT_ONCE,
    *("kv_cache.growth=static", "engine.max_model_len=2048", "workload.prompt_tokens=5", "workload.output_tokens=2"),
]
"""Each request takes 2,048 tokens of 512 KiB, 1 GiB, whatever it says."""
PAGED = [
    *AT_ONCE,
    *("kv_cache.options={num_blocks=41}", "engine.max_model_len=512", "kv_cache.block_size=128"),
    *("workload.prompt_tokens=300", "workload.output_tokens=100"),
]
"""Each request begins in 3 blocks and ends in 4, of the 40 that are not the null block."""
DOUBLING = [
    *("engine.max_model_len=1024", "engine.gpu_memory_utilization=0.5", "kv_cache.tensors=merged"),
    *("workload.num_prompts=10", "workload.system_prompt_tokens=0", "session.turns=1", "results.interval_s=1e6"),
    *("workload.prompt_tokens={distribution='uniform',low=10,high=300}", "workload.output_tokens=220"),
]
"""1.8 GiB for KV: a few of ten requests at once."""


def found(point: OomPoint, policy: str, end: str = "fails") -> list[float | None]:
    return [c.load for c in point.critical if (c.policy, c.end) == (policy, end)]


# -- exact where it can be ---------------------------------------------------------------------------------------------


def test_static_buffers_run_out_at_the_quotient_and_one() -> None:
    """14.24 GiB for KV hold 14 buffers of 1 GiB; the fifteenth request finds no room."""
    loads = parse_load("num_prompts=4:24:1")
    point = oom_point(None, policies=["caching"], load=loads, seeds=2, overrides=STATIC, call=HERE)
    budget = point.runs[0]["kv_budget_bytes"]
    assert isinstance(budget, int)
    assert budget // 2**30 == 14
    assert found(point, "caching") == [15, 15]
    assert all(c.monotone for c in point.critical)
    assert [c.row["outcome"] for c in point.critical if c.row] == ["out_of_memory"] * 2
    assert [c.row["died_users"] for c in point.critical if c.row] == [15, 15]
    assert len({row["key"] for row in point.runs}) < 2 * 15


def test_a_pool_of_blocks_preempts_at_the_quotient_and_one_and_never_fails() -> None:
    """40 blocks: ten requests end in 4 each; of eleven one has to give way, and all are served."""
    loads = parse_load("num_prompts=2:13:1")
    point = oom_point(None, policies=["paged"], load=loads, seeds=1, overrides=PAGED, call=HERE)
    assert point.ends == {"paged": ("fails", "preempts")}
    assert found(point, "paged") == [None]
    assert found(point, "paged", "preempts") == [11]
    (critical,) = point.of("paged", "preempts")
    assert critical.row is not None
    assert (critical.row["outcome"], critical.row["requests_completed"]) == ("held", 11)
    assert critical.row["first_preemption_s"] is not None


def test_the_smallest_memory_of_static_buffers_is_that_of_one_more_buffer() -> None:
    loads = parse_load("num_prompts=2,9")
    point = oom_point(None, policies=["caching"], load=loads, seeds=1, overrides=STATIC, memory=True, call=HERE)
    for s in point.smallest:
        assert s.memory_bytes is not None
        assert s.monotone
        assert s.memory_bytes % UNIT_BYTES == 0
        here, below, further = (alone(STATIC, s.load, s.memory_bytes - less * UNIT_BYTES) for less in (0, 1, 2))
        assert [row["outcome"] for row in (here, below, further)] == ["held", "out_of_memory", "out_of_memory"]
        budgets = [
            row["kv_budget_bytes"] // 2**30 for row in (here, further)
        ]  # weights lie 15 MiB longer than they are
        assert budgets == [s.load, s.load - 1]
    assert [s.load for s in point.smallest] == [2, 9]


def alone(overrides: Sequence[str], requests: float, memory_bytes: int) -> dict[str, Any]:
    """A run of its own."""
    sets = [*overrides, f"workload.num_prompts={requests}", f"device.memory_bytes={memory_bytes}"]
    return run_row(Scenario.load(overrides=sets, preset="caching"))


# -- against running everything ----------------------------------------------------------------------------------------


def first_by_hand(policy: str, overrides: Sequence[str], word: str, loads: Sequence[float], seed: int) -> float | None:
    """The spec, without a search: run every load."""
    for load in loads:
        sets = [*overrides, f"workload.{word}={load}"]
        if run_row(Scenario.load(overrides=sets, preset=policy, seed=seed))["outcome"] != "held":
            return load
    return None


def test_the_search_finds_what_running_every_load_finds() -> None:
    loads = parse_load("users=1:10:1")
    point = oom_point(None, policies=["doubling"], load=loads, seeds=3, overrides=DOUBLING, call=HERE)
    by_hand = [first_by_hand("doubling", DOUBLING, "users", loads.values, seed) for seed in range(3)]
    assert found(point, "doubling") == by_hand == [7, 7, 8]


def test_draws_that_draw_nothing_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: every draw has the same seed."""
    same = tuple(Draw(f"seed {seed}", {"seed": 0}) for seed in range(3))
    monkeypatch.setattr("hbmtwin.sim.capacity.oom_point.draws_of", lambda scenario, count: same)
    loads = parse_load("users=6:9:1")
    point = oom_point(None, policies=["doubling"], load=loads, seeds=3, overrides=DOUBLING, call=HERE)
    assert found(point, "doubling") == [7, 7, 7] != [7, 7, 8]


# -- what nobody has to run --------------------------------------------------------------------------------------------


def made_up(fails_from: dict[int, float], *, broken: Sequence[int] = ()) -> object:
    """Rows as if seed *s* died at loads from ``fails_from[s]`` on, of growth copies below 6 and shortage from there."""

    def call(scenarios: Sequence[Scenario]) -> Iterable[Row]:
        for scenario in scenarios:
            users = scenario.workload.users or 0
            row: Row = {**dict.fromkeys(ROW_COLUMNS), "key": scenario_key(scenario), "seed": scenario.seed}
            row |= {"outcome": "held", "preemptions": 0, "recomputed_share": 0.0, "thrashing_minutes": 0}
            if scenario.seed in broken:
                row |= {"outcome": "failed", "cause": "ValueError", "error": "ValueError: planted"}
            elif users >= fails_from.get(scenario.seed, 10**9):
                cause = "growth_copy" if users < 6 else "shortage"
                row |= {"outcome": "out_of_memory", "cause": cause, "died_users": users, "died_turn": 0}
                row |= {"died_at_s": 100.0 / users, "died_operations": 10 * users}
            yield row

    return call


def study(fails_from: dict[int, float], seeds: int, *, broken: Sequence[int] = (), memory: bool = False) -> OomPoint:
    call = made_up(fails_from, broken=broken)
    assert callable(call)
    load = parse_load("users=1:8:1")
    return oom_point(None, policies=["caching"], load=load, seeds=seeds, memory=memory, call=call)


def test_shares_and_their_bands_are_those_of_the_binomial_distribution() -> None:
    stats = pytest.importorskip("scipy.stats")
    point = study({0: 3, 1: 3, 2: 7, 3: 5}, 6)
    curve = by_load(point, "caching", "fails")
    assert [s.ended for s in curve] == [0, 0, 2, 2, 3, 3, 4, 4]
    for s in curve:
        exact = stats.binomtest(s.ended, 6).proportion_ci(0.95, "exact")
        assert (s.low, s.high) == pytest.approx((exact.low, exact.high), abs=1e-12)
    assert half_load(point, "caching", "fails") == 5
    assert causes(point.of("caching", "fails")) == {"growth_copy": 3, "shortage": 1}


def test_places_count_those_that_did_not_die_in_the_denominator() -> None:
    point = study({0: 3, 1: 3, 2: 7, 3: 5}, 6)
    shares = by_place(point.of("caching", "fails"), "died_users")
    assert [(s.at, s.ended, s.n) for s in shares] == [(3, 2, 6), (5, 3, 6), (7, 4, 6)]


def test_a_draw_in_error_counts_for_nothing_and_is_told() -> None:
    point = study({0: 3, 2: 5}, 3, broken=[1])
    assert [s.n for s in by_load(point, "caching", "fails")] == [2] * 8
    assert {row["draw"] for row in point.broken} == {"seed 1"}
    assert to_dict(point)["runs_in_error"][0]["error"] == "ValueError: planted"


@pytest.mark.parametrize(("values", "q", "expected"), [([], 0.5, None), ([7], 0.5, 7), ([1, 2, 3, 4], 0.5, 2)])
def test_quantiles_are_values_that_were_seen(values: list[float], q: float, expected: float | None) -> None:
    assert quantile(values, q) == expected
    assert quantile(range(1, 11), 0.9) == 9
    assert quantile(range(1, 11), 0.1) == 1


def test_loads_for_memories_are_taken_evenly_with_both_ends() -> None:
    assert evenly(list(range(21)), 5) == [0, 5, 10, 15, 20]
    assert evenly([1, 2], 5) == [1, 2]


def test_the_same_answers_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tables(study({0: 3, 1: 4}, 2), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["critical_loads.csv", "critical_loads.parquet", "runs.csv", "runs.parquet", "summary.json"]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    made = tables(study({0: 3, 1: 4}, 2))
    assert made["critical_loads"].column("load").to_pylist() == [3, 4]


def test_no_memory_that_suffices_is_none_and_not_a_number() -> None:
    point = study({0: 0}, 1, memory=True)
    assert [s.memory_bytes for s in point.smallest] == [None] * 4
    assert [m.median_bytes for m in memory_by_load(point.smallest, "caching", "fails")] == [None] * 4


# -- loads and draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("users=10:40:10", Load("users", (10, 20, 30, 40))),
        ("workload.users=4,2,2", Load("users", (2, 4))),
        ("request_rate=0.1:0.4:0.1", Load("request_rate", (0.1, 0.2, 0.3, 0.4))),
        ("rate_scale=1:8:x2", Load("rate_scale", (1.0, 2.0, 4.0, 8.0))),
        ("users=10:50:x1.5", Load("users", (10, 15, 22, 34))),
        ("users=1:3: x1.1", Load("users", (1, 2, 3))),
    ],
)
def test_loads_as_people_write_them(text: str, load: Load) -> None:
    assert parse_load(text) == load


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("usrs=1:2:1", "--load usrs=1:2:1: 'usrs' is no load; did you mean 'users'?"),
        ("users", "--load users: write it as users=10:200:10"),
        ("users=1:2", "write it as users=10:200:10"),
        ("users=1:x:1", "'x' is no number"),
        ("users=5:1:1", "it ends below where it begins; write the smaller load first"),
        ("users=1:5:0", "loads and steps are above 0, at least 1e-09 and at most 1e+09, not 0"),
        ("users=1:5:x1", "a factor above 1, not x1"),
        ("users=1:9:1.5", "users are whole numbers, and 2.5 is none"),
        ("users=1:1e9:1", "values; at most 1,000: take larger steps"),
        ("time_scale=1:2:1", "write rate_scale, which is 1 / time_scale"),
        ("request_rate=inf", "at most 1e+09, not inf"),
    ],
)
def test_a_load_that_makes_no_sense_is_told_with_its_cure(text: str, said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        parse_load(text)
    assert said in str(error.value)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i},{100 + i},5\n" for i in range(20))
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}", encoding="utf-8")
    return path


def test_a_trace_is_cut_into_windows_and_made_denser(trace: Path) -> None:
    sets = [f"workload.trace={trace}", "workload.num_prompts=4", "engine.max_model_len=512"]
    point = oom_point(None, policies=["paged"], load=parse_load("rate_scale=0.5,2"), seeds=3, overrides=sets, call=HERE)
    assert [draw.keys["workload.trace_skip"] for draw in point.draws] == [0, 8, 16]
    assert point.varies == "3 windows of 4 requests, spread over the trace without overlap"
    spans = {(row["draw"], row["load"]): row["makespan_s"] for row in point.runs}
    assert 6 < float(spans["from request 8", 0.5] or 0) < 7
    assert 1.5 < float(spans["from request 8", 2.0] or 0) < 2.5
    alone = oom_point(None, policies=["paged"], load=parse_load("rate_scale=1"), seeds=1, overrides=sets, call=HERE)
    assert alone.varies == "one trace, which has happened once: there is no spread to tell"


@pytest.mark.parametrize(
    ("sets", "load", "said"),
    [
        (["workload.num_prompts=4"], "rate_scale=1", "20 requests, of which 9 windows of 4 do not fit side by side"),
        ([], "users=1:4:1", "--load users: workload.trace says who asks when; here the load is rate_scale"),
    ],
)
def test_what_a_trace_does_not_have_is_told(trace: Path, sets: list[str], load: str, said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        oom_point(None, load=parse_load(load), seeds=9, overrides=[f"workload.trace={trace}", *sets], call=HERE)
    assert said in str(error.value)


def test_a_rate_scale_needs_something_recorded() -> None:
    with pytest.raises(ScenarioError, match="--load rate_scale: concerns a trace or a model; here the load is users"):
        oom_point(None, load=parse_load("rate_scale=1,2"), overrides=["workload.users=4"], call=HERE)
