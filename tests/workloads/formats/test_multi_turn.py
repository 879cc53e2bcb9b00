"""Conversations of vLLM's multi-turn benchmark: its shipped example in numbers, and what its JSON may say."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pvariance
from typing import Any

import pytest

from hbmtwin.workloads import Request, Status, WorkloadError, output_stream
from hbmtwin.workloads.formats.multi_turn import MultiTurn, MultiTurnPlan, read_multi_turn
from hbmtwin.workloads.formats.multi_turn_counts import count_from

Play = Callable[..., list[Any]]

SHIPPED: dict[str, Any] = {
    "filetype": "generate_conversations",
    "num_conversations": 24,
    "text_files": ["pg1184.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}
"""The numbers of vLLM's ``benchmarks/multi_turn/generate_multi_turn.json``."""


def plan_of(tmp_path: Path, found: Any) -> MultiTurnPlan:
    path = tmp_path / "generate.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return read_multi_turn(path)


def sessions(served: list[Any]) -> dict[int, list[Request]]:
    found: dict[int, list[Request]] = defaultdict(list)
    for s in served:
        found[s.request.session].append(s.request)
    return found


def test_the_shipped_example(tmp_path: Path, play: Play) -> None:
    source = MultiTurn(plan_of(tmp_path, SHIPPED), num_clients=4)
    served = play(source, 10**9)
    found = sessions(served)
    assert len(found) == 24
    assert source.total_requests == len(served) == sum(map(len, found.values()))
    assert sorted(s.request.id for s in served) == list(range(len(served)))
    for requests in found.values():
        assert 6 <= len(requests) <= 9
        assert [r.turn for r in requests] == list(range(len(requests)))
        assert [r.has_next for r in requests] == [True] * (len(requests) - 1) + [False]
        first = requests[0]
        assert first.spans[0] == ("system", 0, 500)
        assert 500 < first.prompt_tokens <= 5500
        assert all(80 <= r.output_tokens == r.max_tokens <= 120 for r in requests)
        for before, r in pairwise(requests):
            assert r.spans[:-1] == (*before.spans, (output_stream(r.session, before.turn), 0, before.output_tokens))
            assert 120 <= r.prompt_tokens - before.prompt_tokens - before.output_tokens <= 160
            assert sum(length for _, _, length in r.spans) == r.prompt_tokens


def test_num_turns_counts_messages_of_both_sides(tmp_path: Path, play: Play) -> None:
    """12 to 18 messages, made even upwards, are 6, 7, 7, 8, 8, 9, 9 requests; 1 is made 2."""
    many = {**SHIPPED, "num_conversations": 7000}
    counts = Counter(len(r) for r in sessions(play(MultiTurn(plan_of(tmp_path, many)), 1)).values())
    assert set(counts) == {6, 7, 8, 9}
    assert mean(counts.elements()) == pytest.approx(54 / 7, rel=0.01)
    assert counts[6] / 7000 == pytest.approx(1 / 7, rel=0.1)
    one = {**SHIPPED["prompt_input"], "num_turns": {"distribution": "constant", "value": 1}}
    single = sessions(play(MultiTurn(plan_of(tmp_path, {**SHIPPED, "prompt_input": one})), 1))
    assert [len(r) for r in single.values()] == [1] * 24


def test_own_prefixes_have_the_average_and_the_words_of_the_first_message_are_in_the_common_prefix(
    tmp_path: Path,
) -> None:
    many = {**SHIPPED, "num_conversations": 20_000}
    source = MultiTurn(plan_of(tmp_path, many), num_clients=20_000)
    own = [r.prompt_tokens - 500 for r in source.open()]
    assert mean(own) == pytest.approx(1000, rel=0.01)
    assert median(own) == pytest.approx(850, rel=0.02)
    assert max(own) <= 5000
    prompt = {key: value for key, value in SHIPPED["prompt_input"].items() if key != "common_prefix_num_tokens"}
    alone = MultiTurn(plan_of(tmp_path, {**many, "prompt_input": prompt}), num_clients=20_000)
    more = [r.prompt_tokens - before for r, before in zip(alone.open(), own, strict=True)]
    assert (min(more), max(more)) == (120, 160)


def test_each_client_has_one_conversation_at_a_time(tmp_path: Path, play: Play) -> None:
    source = MultiTurn(plan_of(tmp_path, SHIPPED), num_clients=5)
    served = play(source, lambda r: 10**9 + r.output_tokens)
    for client in range(5):
        mine = [s for s in served if s.request.session % 5 == client]
        assert mine[0].request.arrival_ns == 0
        for before, after in pairwise(mine):
            assert after.request.arrival_ns == before.end_ns
        assert [s.request.session for s in mine] == sorted(s.request.session for s in mine)


def test_a_rate_is_a_clients_own_and_waits_are_exponential(tmp_path: Path, play: Play) -> None:
    many = {**SHIPPED, "num_conversations": 600}
    served = play(MultiTurn(plan_of(tmp_path, many), num_clients=1, request_rate=4.0), 10**9)
    waits = [(b.request.arrival_ns - a.end_ns) / 1e9 for a, b in pairwise(served)]
    assert mean(waits) == pytest.approx(0.25, rel=0.05)
    assert math.sqrt(pvariance(waits)) / mean(waits) == pytest.approx(1, abs=0.07)


def test_requests_are_shared_out_in_whole_numbers(tmp_path: Path, play: Play) -> None:
    served = play(MultiTurn(plan_of(tmp_path, SHIPPED), num_clients=4, max_num_requests=47), 1)
    assert Counter(s.request.session % 4 for s in served) == dict.fromkeys(range(4), 11)


def test_a_rejected_turn_ends_its_conversation_only(tmp_path: Path, play: Play) -> None:
    def refused(r: Request) -> Status:
        return Status.REJECTED if (r.session, r.turn) == (0, 2) else Status.COMPLETED

    found = sessions(play(MultiTurn(plan_of(tmp_path, SHIPPED)), 1, refused))
    assert len(found[0]) == 3
    assert len(found) == 24


def test_the_traffic_is_the_same_whatever_the_server_does(tmp_path: Path, play: Play) -> None:
    plan = plan_of(tmp_path, SHIPPED)
    runs = [play(MultiTurn(plan, num_clients=3, seed=7), ns) for ns in (1, 10**9)]
    shapes = [sorted((s.request.session, s.request.turn, s.request.spans) for s in run) for run in runs]
    assert shapes[0] == shapes[1]
    other = play(MultiTurn(plan, num_clients=3, seed=8), 1)
    assert sorted((s.request.session, s.request.turn, s.request.spans) for s in other) != shapes[0]


# -- distributions -----------------------------------------------------------------------------------------------------


def shares(spec: dict[str, Any], steps: int = 200_000) -> Counter[int]:
    """How often each value comes, by walking through the quantiles."""
    count = count_from(spec, "x")
    return Counter(count.at((i + 0.5) / steps) for i in range(steps))


def test_a_zipf_distribution_piles_up_at_its_largest_value() -> None:
    """zeta(2) = pi^2 / 6; all above 4 are set to 4."""
    found = shares({"distribution": "zipf", "alpha": 2, "max": 4})
    zeta = math.pi**2 / 6
    for value, share in {1: 1 / zeta, 2: 1 / 4 / zeta, 3: 1 / 9 / zeta}.items():
        assert found[value] / 200_000 == pytest.approx(share, abs=1e-4)
    assert found[4] / 200_000 == pytest.approx(1 - (1 + 1 / 4 + 1 / 9) / zeta, abs=1e-4)
    assert set(found) == {1, 2, 3, 4}


@pytest.mark.parametrize("alpha", [0.5, 3, 40, 2000])
def test_a_poisson_distribution_has_its_mean_and_variance(alpha: float) -> None:
    found = shares({"distribution": "poisson", "alpha": alpha})
    values = list(found.elements())
    assert mean(values) == pytest.approx(alpha, rel=1e-3)
    assert pvariance(values) == pytest.approx(alpha, rel=5e-3)
    assert found[0] / 200_000 == pytest.approx(math.exp(-alpha), abs=1e-4)
    assert set(shares({"distribution": "poisson", "alpha": alpha, "max": 2}, 1000)) <= {0, 1, 2}


def test_a_log_normal_by_average_or_by_the_logarithm() -> None:
    values = list(shares({"distribution": "lognormal", "average": 300, "median_ratio": 0.5}).elements())
    assert mean(values) == pytest.approx(300, rel=0.01)
    assert median(values) == pytest.approx(150, abs=1)
    values = list(shares({"distribution": "lognormal", "mean": 5, "sigma": 0, "max": 100}).elements())
    assert set(values) == {100}
    assert set(shares({"distribution": "lognormal", "mean": 3, "sigma": 0}, 10)) == {20}


def test_constants_may_be_zero_and_uniform_includes_both_ends() -> None:
    assert set(shares({"distribution": "constant", "value": 0}, 10)) == {0}
    found = shares({"distribution": "uniform", "min": 3, "max": 5}, 30_000)
    assert found == {3: 10_000, 4: 10_000, 5: 10_000}


# -- what cannot be read -----------------------------------------------------------------------------------------------


def changed(**keys: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(SHIPPED))
    for path, value in keys.items():
        *tables, key = path.split("__")
        table = found
        for name in tables:
            table = table[name]
        if value is None:
            del table[key]
        else:
            table[key] = value
    return dict(found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "this is a list, perhaps of conversations"),
        (changed(num_conversations=0), "num_conversations is a whole number from 1 to 1,000,000, not 0"),
        (changed(num_conversations=2.5), "num_conversations is a whole number"),
        (changed(num_conversations=None), "num_conversations is missing"),
        (changed(prompt_input__num_tokens=None), "prompt_input.num_tokens is missing"),
        (changed(prompt_imput={}), "prompt_imput: unknown; did you mean 'prompt_input'?"),
        (changed(prompt_input__prefix_tokens=1), "prompt_input.prefix_tokens: unknown; did you mean"),
        (changed(prompt_output=7), "prompt_output: write a table, not 7"),
        (changed(prompt_output__num_tokens=7), "prompt_output.num_tokens: write a table such as"),
        (changed(prompt_output__num_tokens={"value": 7}), "prompt_output.num_tokens: the table needs a distribution"),
        (changed(prompt_output__num_tokens={"distribution": "normal"}), "no distribution 'normal'"),
        (changed(prompt_output__num_tokens={"distribution": "constant", "value": -1}), "value is from 0 to 2^40"),
        (changed(prompt_output__num_tokens={"distribution": "uniform", "min": 0, "max": 2}), "0 < min <= max"),
        (changed(prompt_output__num_tokens={"distribution": "uniform", "min": 1.5, "max": 2}), "a whole number, not"),
        (changed(prompt_output__num_tokens={"distribution": "zipf", "alpha": 1, "max": 9}), "above 1"),
        (changed(prompt_output__num_tokens={"distribution": "zipf", "alpha": 2}), "max is needed"),
        (changed(prompt_output__num_tokens={"distribution": "poisson", "alpha": 0}), "above 0"),
        (changed(prompt_output__num_tokens={"distribution": "lognormal", "average": 0}), "average is 1 or more"),
        (
            changed(prompt_output__num_tokens={"distribution": "lognormal", "average": 9, "median_ratio": 1}),
            "median_ratio between 0 and 1",
        ),
        (
            changed(prompt_output__num_tokens={"distribution": "lognormal", "average": 9, "sigma": 1}),
            "give average (and median_ratio), or mean and sigma of the logarithm, not both",
        ),
        (changed(prompt_output__num_tokens={"distribution": "lognormal", "mean": 3000, "sigma": 1}), "up to 27"),
    ],
)
def test_a_faulty_file_is_told_with_file_key_and_cure(found: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        plan_of(tmp_path, found)
    assert str(caught.value).startswith(f"{tmp_path / 'generate.json'}: ")
    assert said in str(caught.value)


def test_text_that_is_no_json_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "num_conversations": 3,\n x}')
    with pytest.raises(WorkloadError, match=r"a.json:3: not JSON"):
        read_multi_turn(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_clients": 25}, "25 clients need as many conversations, and there are 24"),
        ({"num_clients": 4, "max_num_requests": 3}, "3 requests for 4 clients: each of them begins with one"),
    ],
)
def test_more_clients_than_work_are_refused(settings: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=said):
        MultiTurn(plan_of(tmp_path, SHIPPED), **settings)
