"""From the keys of a scenario to its traffic: which source, with which figures, and what is refused."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from hbmtwin.sim.legality import notes
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic import source_of, trace_notes
from hbmtwin.workloads.builtin import NUM_PROMPTS, builtin
from hbmtwin.workloads.closed_loop import ClosedLoop
from hbmtwin.workloads.formats.replay import Replay
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.priorities import Priorities
from hbmtwin.workloads.records import Request, WorkloadError
from hbmtwin.workloads.samples import Samples


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


def test_what_a_scenario_says_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 40, "output_length": 2, "hash_ids": [%d, 1, 9]}\n'
    path.write_text(line % (0, 0) + "{\n" + line % (0, 2) + line % (3000, 3))
    keys = [f"workload.trace={path}", "workload.trace_block_size=16", "workload.skip_bad_lines=true"]
    source = source_of(scenario(*keys, "workload.trace_format=mooncake"))
    assert [(r.arrival_ns, r.spans[0]) for r in source.open()] == [
        (0, ("mooncake", 0, 32)),
        (0, ("mooncake", 32, 16)),
        (3 * 10**9, ("mooncake", 48, 16)),
    ]
    (note,) = trace_notes(scenario(), Samples(Priorities(source, [1.0, 1.0]), 2))
    assert note.startswith(f"workload.trace: 1 bad line was skipped; the first: {path}:2: this is no JSON")
    assert trace_notes(scenario(), source_of(scenario())) == ()
    spread = [
        [r.arrival_ns for r in source_of(scenario(*keys, "workload.trace_jitter=true", seed=seed)).open()]
        for seed in (0, 1)
    ]
    assert spread[0] != spread[1]
    assert all(0 == times[0] < times[1] < times[2] for times in spread)
    with pytest.raises(WorkloadError, match=r"^workload\.trace: no trace format 'moon'; did you mean 'mooncake'\?$"):
        source_of(scenario(*keys, "workload.trace_format=moon"))


def test_a_window_of_a_trace_is_the_trace_cut_there(tmp_path: Path) -> None:
    path, cut = tmp_path / "trace.csv", tmp_path / "cut.csv"
    lines = ["arrival_s,prompt_tokens,output_tokens,session", "0,5,2,7", "1,9,3,7", "4,20,1,8", "6,40,2,7", "9,8,8,9"]
    path.write_text("\n".join(lines))
    cut.write_text("\n".join([lines[0], *lines[2:5]]))
    window = source_of(scenario(f"workload.trace={path}", "workload.trace_skip=1", "workload.num_prompts=3"))
    assert window.total_requests == 3
    first, second = (r for r in window.open())
    assert [(r.session, r.turn, r.arrival_ns, r.prompt_tokens, r.has_next) for r in (first, second)] == [
        (7, 0, 0, 9, True),
        (8, 0, 3 * 10**9, 20, False),
    ]
    assert list(window.recorded()) == list(source_of(scenario(f"workload.trace={cut}")).recorded())
    with pytest.raises(WorkloadError, match=r"trace\.csv: no requests in it behind the first 5$"):
        source_of(scenario(f"workload.trace={path}", "workload.trace_skip=5"))
    with pytest.raises(ScenarioError, match=r"workload\.trace_skip: "):
        scenario("workload.trace_skip=-1")


def test_failed_calls_of_a_trace_are_sent_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,5,2\n2,6,0\n")
    assert source_of(scenario(f"workload.trace={path}")).total_requests == 1
    assert source_of(scenario(f"workload.trace={path}", "workload.keep_failed=true")).total_requests == 2


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


# -- prefixes and clients ----------------------------------------------------------------------------------------------


def opened(*overrides: str) -> list[Request]:
    return list(source_of(scenario(*(f"workload.{setting}" for setting in overrides), "session.turns=1")).open())


def test_prefixes_of_one_kind_and_of_several() -> None:
    one = opened("prefix_tokens=64", "prefix_count=5")
    assert {r.spans[1] for r in one} == {(f"prefix/{i}", 0, 64) for i in range(5)}
    assert {r.spans[1] for r in opened("prefix_tokens=64")} == {("prefix/0", 0, 64)}
    several = opened("prefix_buckets=[{prefix_tokens=10, bucket_weight=3}, {prefix_tokens=20, prefix_count=2}]")
    counts = Counter(r.spans[1] for r in several)
    assert counts.keys() == {("prefix/0", 0, 10), ("prefix/1", 0, 20), ("prefix/2", 0, 20)}
    assert counts["prefix/0", 0, 10] / len(several) == pytest.approx(0.75, abs=0.05)


def test_shared_prefix_in_the_words_of_inference_perf() -> None:
    words = "{num_groups=4, num_prompts_per_group=5, system_prompt_len=100, question_len=30, output_len=7}"
    requests = opened(f"shared_prefix={words}", "request_rate=inf")
    assert len(requests) == 20  # every prompt once
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(130, 7)}
    assert len({r.spans for r in requests}) == 20
    assert {r.spans[0] for r in requests} == {(f"prefix/{i}", 0, 100) for i in range(4)}
    again = opened(f"shared_prefix={words}", "request_rate=inf", "num_prompts=50")
    assert len({r.spans for r in again}) == 20


def test_prefix_repetition_in_the_words_of_vllm() -> None:
    words = "{prefix_len=256, suffix_len=40, num_prefixes=10, output_len=128}"
    requests = opened(f"prefix_repetition={words}", "num_prompts=500")
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(296, 128)}
    assert len({r.spans for r in requests}) == 500
    counts = Counter(r.spans[0] for r in requests)
    assert counts.keys() == {(f"prefix/{i}", 0, 256) for i in range(10)}
    assert (min(counts.values()), max(counts.values())) == (pytest.approx(50, abs=20), pytest.approx(50, abs=20))


CLIENTS = (
    "clients=[{request_rate=9, prompt_tokens=11, system_prompt_tokens=5, turns=2, think_time_s=1},"
    "{request_rate=1, cv=4, output_tokens=3}]"
)


def test_clients_have_what_they_say_and_else_what_all_have() -> None:
    requests = opened(CLIENTS, "prompt_tokens=22", "output_tokens=33", "system_prompt_tokens=4", "num_prompts=3000")
    assert {(r.tenant, r.prompt_tokens, r.output_tokens) for r in requests} == {(0, 20, 33), (1, 26, 3)}
    assert {r.spans[:-1] for r in requests if r.tenant == 0} == {(("system", 0, 4), ("tenant/0", 0, 5))}
    assert {r.has_next for r in requests if r.tenant == 1} == {False}
    assert {r.has_next for r in requests[:-1] if r.tenant == 0} == {True}
    assert sum(r.tenant == 0 for r in requests) / len(requests) == pytest.approx(
        0.9, abs=0.08
    )  # 170 arrivals at a CV of 4


def test_a_rate_curve_is_that_of_all_clients() -> None:
    requests = opened(CLIENTS, "rate_curve=[[0, 1], [5, 1], [5, 0], [10, 0]]")
    assert {r.arrival_ns // 10**9 % 10 < 5 or r.arrival_ns % 10**10 == 5 * 10**9 for r in requests} == {True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["prefix_count=3"], "prefix_count: say how long prefixes are, workload.prefix_tokens"),
        (["prefix_tokens=3", "prefix_buckets=[{prefix_tokens=3}]"], "prefix_buckets: they say prefix_tokens and"),
        (["prefix_tokens={distribution='fixed'}"], "prefix_tokens: fixed needs 'value'"),
        (["prefix_buckets=[]"], "prefix_buckets: give one bucket of prefixes or more"),
        (
            ["prefix_buckets=[{prefix_tokens={distribution='fixed'}}]"],
            "prefix_buckets: 0.prefix_tokens: fixed needs 'value'",
        ),
        (
            ["prefix_repetition={prefix_len=2,suffix_len=4,num_prefixes=1,output_len=1}", "prompt_tokens=3"],
            "prefix_repetition: it says workload.prompt_tokens by itself; give one of the two",
        ),
        ([CLIENTS, "request_rate=3"], "clients: each has a request_rate of its own; leave workload.request_rate out"),
        ([CLIENTS, "users=3"], "clients: each has a request_rate of its own; leave workload.users out"),
        ([CLIENTS, "rescale_gaps=true"], "clients: each has a request_rate of its own; leave workload.rescale_gaps"),
        (["clients=[]"], "give one client or more"),
        (["clients=[{request_rate=1},{request_rate=1,cv=99}]"], "clients.1.cv: cv of gamma gaps is from 0 to 10"),
        (["clients=[{request_rate=1,turns={}}]"], "clients.0.turns: the table needs a distribution"),
    ],
)
def test_prefixes_and_clients_that_contradict_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        opened(*settings)
    assert str(error.value).removeprefix("workload.").startswith(said)


def test_sets_of_prompts_have_one_turn_and_one_name() -> None:
    sets = [
        "workload.prefix_repetition={prefix_len=2,suffix_len=4,num_prefixes=1,output_len=1}",
        "workload.shared_prefix={num_groups=1,num_prompts_per_group=1,system_prompt_len=1,question_len=1,output_len=1}",
    ]
    with pytest.raises(ScenarioError, match=r"^workload\.prefix_repetition: its sessions have one turn; leave session"):
        source_of(scenario(sets[0], "session.turns=2"))
    with pytest.raises(ScenarioError, match=r"^workload\.shared_prefix: workload\.prefix_repetition says other prompt"):
        source_of(scenario(*sets))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("clients=[{request_rate=1, burstines=2}]", r"workload\.clients\.0\.burstines: unknown key"),
        ("clients=[{cv=1}]", r"workload\.clients\.0\.request_rate: field required"),
        ("shared_prefix={num_groups=0}", r"workload\.shared_prefix\.num_groups: input should be greater than"),
    ],
)
def test_a_bad_table_of_a_client_or_a_set_is_told_with_its_path(setting: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        scenario(f"workload.{setting}")


def test_clients_and_sets_are_saved_and_read_back() -> None:
    s = scenario(f"workload.{CLIENTS}", "workload.prefix_buckets=[{prefix_tokens={distribution='zipf',alpha=1,max=9}}]")
    keys = tomllib.loads(s.to_toml())
    assert Scenario.of({f"workload.{k}": v for k, v in keys["workload"].items()}).workload == s.workload


def test_what_clients_say_themselves_is_noted() -> None:
    said = "is said by each of workload.clients"
    assert notes(scenario(f"workload.{CLIENTS}", "workload.cv=2")) == (f"workload.cv {said}",)
