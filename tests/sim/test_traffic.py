"""From the keys of a scenario to its traffic: which source, with which figures, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbmtwin.sim.legality import notes
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.builtin import NUM_PROMPTS, builtin
from hbmtwin.workloads.closed_loop import ClosedLoop
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.replay import Replay
from hbmtwin.workloads.traces import open_trace


def scenario(*overrides: str, seed: int = 0) -> Scenario:
    return Scenario.load(overrides=overrides, seed=seed)


def test_with_nothing_said_the_built_in_workload_runs() -> None:
    source = source_of(scenario(seed=5))
    assert isinstance(source, OpenLoop)
    assert source.total_requests == NUM_PROMPTS
    assert list(source.open()) == list(builtin(seed=5).open())
    assert list(source.open()) != list(builtin(seed=6).open())


def test_a_rate_makes_an_open_loop_without_bursts() -> None:
    source = source_of(scenario("workload.request_rate=4", "workload.num_prompts=400", "session.turns=1"))
    assert isinstance(source, OpenLoop)
    requests = list(source.open())
    assert [r.id for r in requests] == list(range(400))
    assert requests[-1].arrival_ns / 1e9 == pytest.approx(100, rel=0.15)
    assert source.arrivals.bursts is None


def test_an_infinite_rate_is_all_at_once() -> None:
    source = source_of(scenario("workload.request_rate=inf", "workload.num_prompts=5", "session.turns=1"))
    assert {r.arrival_ns for r in source.open()} == {0}


def test_users_make_a_closed_loop_with_the_lengths_given() -> None:
    source = source_of(
        scenario(
            "workload.users=3",
            "workload.num_prompts=7",
            "workload.prompt_tokens=11",
            "workload.output_tokens={distribution='uniform',low=2,high=3}",
            "workload.system_prompt_tokens=4",
        )
    )
    assert isinstance(source, ClosedLoop)
    requests = list(source.open())
    assert [r.arrival_ns for r in requests] == [0, 0, 0]
    assert {r.prompt_tokens for r in requests} == {15}
    assert {r.spans[0] for r in requests} == {("system", 0, 4)}
    assert {r.output_tokens for r in requests} <= {2, 3}


def test_users_and_a_rate_contradict_each_other() -> None:
    with pytest.raises(
        ScenarioError, match=r"^workload\.users: a closed loop has no request_rate; give one of the two"
    ):
        source_of(scenario("workload.users=3", "workload.request_rate=1"))


def test_a_trace_wins_and_is_scaled_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n10,5,2\n11,6,3\n14,7,4\n")
    source = source_of(
        scenario(f"workload.trace={path}", "workload.users=9", "workload.time_scale=2", "workload.num_prompts=2")
    )
    assert isinstance(source, Replay)
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in source.open()] == [
        (0, 5, 2),
        (2_000_000_000, 6, 3),
    ]
    assert source.total_requests == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "workload.prompt_tokens={distribution='zipff'}",
            r"^workload\.prompt_tokens: no distribution 'zipff'; did you mean 'zipf'",
        ),
        ("workload.output_tokens={distribution='uniform',low=5,high=2}", r"^workload\.output_tokens"),
        ("session.turns={distribution='uniform'}", r"^session\.turns"),
        ("session.think_time_s=inf", r"^session\.think_time_s: a think time is from 0 to 100000000 seconds, not inf"),
    ],
)
def test_bad_figures_are_a_fault_of_the_scenario(setting: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        source_of(scenario(setting))


def test_a_bad_file_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,2\n1,x,3\n")
    with pytest.raises(WorkloadError, match=r"bad\.csv:3: "):
        source_of(scenario(f"workload.trace={path}"))


def test_a_trace_of_single_requests_may_be_sampled_and_one_of_conversations_not(tmp_path: Path) -> None:
    head = "arrival_s,prompt_tokens,output_tokens,session\n"
    one, several = tmp_path / "one.csv", tmp_path / "several.csv"
    one.write_text(head + "0,10,5,1\n1,20,5,2\n")
    several.write_text(head + "0,10,5,1\n1,20,5,1\n")
    assert (open_trace(one).has_turns, open_trace(several).has_turns) == (False, True)
    sampled = source_of(Scenario.load(overrides=[f"workload.trace={one}", "workload.samples=2"]))
    assert [(r.id, r.arrival_ns, r.sample) for r in sampled.open()] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 10**9, 0),
        (3, 10**9, 1),
    ]
    with pytest.raises(ScenarioError, match=r"workload.samples: sessions of .*several.csv have several turns, and 2"):
        source_of(Scenario.load(overrides=[f"workload.trace={several}", "workload.samples=2"]))


def test_a_scenario_without_samples_has_its_source_bare() -> None:
    assert isinstance(source_of(Scenario.load(overrides=["session.turns=1"])), OpenLoop)
    sampled = source_of(Scenario.load(overrides=["session.turns=1", "workload.samples=8", "workload.num_prompts=5"]))
    assert sampled.total_requests == 40


# -- arrivals ----------------------------------------------------------------------------------------------------------


def arrivals_s(*overrides: str) -> list[float]:
    return [r.arrival_ns / 1e9 for r in source_of(scenario("session.turns=1", *overrides)).open()]


def test_a_constant_pattern_is_a_request_every_so_often() -> None:
    for pattern in (["workload.arrival_pattern=constant"], ["workload.burstiness=inf"], ["workload.cv=0"]):
        assert arrivals_s("workload.request_rate=4", "workload.num_prompts=3", *pattern) == [0.25, 0.5, 0.75]


def test_a_cv_is_another_way_to_say_burstiness() -> None:
    shape, cv = (
        ["workload.request_rate=4", "workload.num_prompts=50", key]
        for key in ("workload.burstiness=4", "workload.cv=0.5")
    )
    assert arrivals_s(*shape) == arrivals_s(*cv)
    weibull = [*shape, "workload.arrival_pattern=weibull"]
    assert arrivals_s(*weibull) != arrivals_s(*shape)


def test_a_ramp_takes_the_place_of_a_rate() -> None:
    ramp = ["workload.ramp_up_strategy=linear", "workload.ramp_up_start_rps=1", "workload.ramp_up_end_rps=4"]
    keys = ["workload.arrival_pattern=constant", "workload.num_prompts=4", *ramp]
    expected = [1, 1.5, 1.5 + 1 / 3, 1.75 + 1 / 3]
    assert arrivals_s(*keys) == pytest.approx(expected)
    assert arrivals_s(*keys, "workload.request_rate=inf") == pytest.approx(expected)


def test_a_rate_curve_multiplies_the_rate_and_the_built_in_one() -> None:
    curve = "workload.rate_curve=[[0, 2], [1000, 2]]"
    plain = arrivals_s("workload.request_rate=4")
    assert arrivals_s("workload.request_rate=4", curve) == pytest.approx([t / 2 for t in plain], abs=1e-8)
    assert arrivals_s(curve) == pytest.approx([t / 2 for t in arrivals_s()], abs=1e-8)


def test_rescaled_gaps_end_at_n_over_rate() -> None:
    assert arrivals_s("workload.request_rate=4", "workload.rescale_gaps=true", "workload.num_prompts=100")[-1] == 25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["request_rate=2", "cv=2", "burstiness=3"], r"^workload\.cv: burstiness says the same; give one of the two"),
        (["request_rate=2", "cv=20"], r"^workload\.cv: cv of gamma gaps is from 0 to 10 \(1 is Poisson\), not 20\.0"),
        (["burstiness=1e7"], r"^workload\.burstiness: burstiness is from 0\.01 to 1e6 \(1 is Poisson\), or inf, not"),
        (
            ["arrival_pattern=poisson", "burstiness=2"],
            r"^workload\.burstiness: poisson gaps have no burstiness; leave it 1, or take gamma or weibull",
        ),
        (["rate_curve=[[0, 1]]"], r"^workload\.rate_curve: a rate curve has two points or more, \[seconds, factor\]"),
        (["request_rate=inf", "rate_curve=[[0,1],[9,1]]"], r"^workload\.rate_curve: it multiplies workload\.request_r"),
        (["ramp_up_start_rps=1"], r"^workload\.ramp_up_strategy: say linear or exponential, or leave out the rates"),
        (["ramp_up_strategy=linear"], r"^workload\.ramp_up_strategy: a ramp needs ramp_up_start_rps and ramp_up_end"),
        (
            ["ramp_up_strategy=linear", "ramp_up_start_rps=1", "ramp_up_end_rps=2", "request_rate=3"],
            r"^workload\.ramp_up_strategy: a ramp is the rate itself; leave workload\.request_rate out",
        ),
        (
            ["ramp_up_strategy=linear", "ramp_up_start_rps=1", "ramp_up_end_rps=2", "rate_curve=[[0,1],[9,1]]"],
            r"^workload\.rate_curve: a ramp is the rate itself; give one of the two",
        ),
        (
            ["ramp_up_strategy=linear", "ramp_up_start_rps=1", "ramp_up_end_rps=inf"],
            r"^workload\.ramp_up_strategy: a ramp's end rate is above 0 a second and finite, not inf",
        ),
        (["rescale_gaps=true"], r"^workload\.rescale_gaps: it needs workload\.request_rate, without a ramp or a rate"),
    ],
)
def test_arrival_keys_that_contradict_each_other_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        source_of(scenario(*(f"workload.{setting}" for setting in settings)))


def test_arrival_keys_have_no_effect_on_users_and_traces() -> None:
    keys = ["workload.cv=2", "workload.rate_curve=[[0,1],[9,1]]", "workload.rescale_gaps=true"]
    for where, said in (("workload.users=3", "a closed loop"), ("workload.trace=a.csv", "a trace")):
        assert notes(scenario(where, *keys)) == tuple(
            f"workload.{name} does not concern {said}" for name in ("cv", "rate_curve", "rescale_gaps")
        )
