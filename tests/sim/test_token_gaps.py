"""Inter-token latency: literal gaps, and every token of a run followed by hand where each step is a row of its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.token_gaps import TokenGaps, token_gaps

PRESSED = (
    *(
        "engine.max_model_len=512",
        "workload.system_prompt_tokens=20",
        "workload.request_rate=inf",
        "workload.num_prompts=60",
        "session.turns=1",
    ),
    "workload.prompt_tokens={distribution='uniform',low=1,high=300}",
    "workload.output_tokens={distribution='uniform',low=1,high=90}",
    *("kv_cache.block_size=16", "kv_cache.options={num_blocks=40}", "results.steps=true"),
)


def steps(*rows: tuple[list[int], list[int], list[int], list[int]]) -> pd.DataFrame:
    """``(seq_ids, new_tokens, context_tokens, step_ends_ns)``."""
    names = ("seq_ids", "new_tokens", "context_tokens", "step_ends_ns")
    frame = pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows], columns=list(names))
    return frame.assign(repeat=[len(row[3]) for row in rows])


def requests(*rows: tuple[int, int, int, int, str]) -> pd.DataFrame:
    """``(id, prompt_tokens, output_tokens, first_token_ns, status)``."""
    return pd.DataFrame(rows, columns=["id", "prompt_tokens", "output_tokens", "first_token_ns", "status"])


def gaps_of(found: TokenGaps) -> list[tuple[int, int]]:
    """Each gap with the moment of its later token, equal ones as often as they are."""
    times, gaps = (np.repeat(column, found.count).tolist() for column in (found.time_ns, found.gap_ns))
    return sorted(zip(times, gaps, strict=True))


def test_a_leap_and_a_preemption_by_hand() -> None:
    """Prompts of 4 and 2. 1 comes in two chunks; both decode in a leap of two; 2 is preempted, and computed again."""
    table = steps(
        ([1, 2], [3, 2], [0, 0], [100]),  # half of 1's prompt: no token; 2's first
        ([1, 2], [1, 1], [3, 2], [130]),  # 1's first token, 2's second
        ([1, 2], [1, 1], [4, 3], [140, 155]),  # tokens 2 and 3 of 1, 3 and 4 of 2
        ([1], [1], [6], [175]),  # 2 is preempted
        ([1, 2], [1, 5], [7, 0], [275]),  # 2 computes 5 of its 2 + 4 tokens again: no token
        ([1, 2], [1, 1], [8, 5], [285]),  # its fifth token
    )
    found = token_gaps(requests((1, 4, 6, 130, "completed"), (2, 2, 5, 100, "completed")), table)
    ones = [(140, 10), (155, 15), (175, 20), (275, 100), (285, 10)]
    twos = [(130, 30), (140, 10), (155, 15), (285, 130)]
    assert gaps_of(found) == sorted(ones + twos)
    of_one = token_gaps(requests((1, 4, 6, 130, "completed"), (2, 2, 5, 100, "failed")), table)
    assert gaps_of(of_one) == ones


def test_a_forked_sample_begins_where_its_sibling_had_its_first_token() -> None:
    table = steps(([1], [9], [0], [50]), ([1, 2], [1, 1], [9, 9], [60]))
    found = token_gaps(requests((1, 9, 2, 50, "completed"), (2, 9, 2, 50, "completed")), table)
    assert gaps_of(found) == [(60, 10), (60, 10)]


def test_who_pads_until_a_batch_ends_gets_no_tokens() -> None:
    table = steps(([1, 2], [3, 3], [0, 0], [50]), ([1, 2], [1, 1], [3, 3], [60, 71, 83]))
    found = token_gaps(requests((1, 3, 4, 50, "completed"), (2, 3, 2, 50, "completed")), table)
    assert gaps_of(found) == [(60, 10), (60, 10), (71, 11), (83, 12)]


def test_who_comes_back_to_a_batch_with_fewer_pads_goes_on_getting_a_token_a_step() -> None:
    """1 is preempted with its prompt of 3 and 3 tokens more, behind 6 pads; alone it computes 6 of its own, no pad."""
    table = steps(
        ([1, 2], [9, 9], [0, 0], [50]),
        ([1, 2], [1, 1], [9, 9], [60, 71]),
        ([2], [1], [11], [80]),
        ([1], [6], [0], [100]),
        ([1], [1], [6], [110, 121]),
    )
    found = token_gaps(requests((1, 3, 6, 50, "completed"), (2, 9, 4, 50, "completed")), table, padded=True)
    both = [(60, 10), (71, 11)]
    assert gaps_of(found) == sorted([*both, *both, (80, 9), (100, 29), (110, 10), (121, 11)])


def test_percentiles_are_those_of_the_gaps_written_out() -> None:
    random = np.random.default_rng(7)
    for size in (1, 2, 3, 40):
        gap, count = random.integers(1, 10**9, size), random.integers(1, 9, size)
        found = TokenGaps(gap, gap, count).percentiles()
        wanted = np.percentile(np.repeat(gap, count) / 1e9, [50, 90, 99])
        assert list(found.values()) == pytest.approx(list(wanted))
    none = np.empty(0, dtype=np.int64)
    assert TokenGaps(none, none, none).percentiles() == {"p50": None, "p90": None, "p99": None}


def followed(result: Result) -> list[tuple[int, int]]:
    """Gaps of a run whose steps all stand alone, by following each request: no sorting, no running maxima."""
    assert result.steps is not None
    prompts = dict(zip(result.requests["id"], result.requests["prompt_tokens"], strict=True))
    tokens: dict[int, list[int]] = {}
    for ids, new, context, ends in result.steps[["seq_ids", "new_tokens", "context_tokens", "step_ends_ns"]].values:
        assert len(ends) == 1
        for i, n, c in zip(ids, new, context, strict=True):
            if c + n == prompts[i] + len(tokens.setdefault(i, [])):  # nothing known is left to compute
                tokens[i].append(ends[0])
    assert [len(tokens[i]) for i in result.requests["id"]] == list(result.requests["output_tokens"])
    return sorted((b, b - a) for times in tokens.values() for a, b in pairwise(times))


@pytest.mark.parametrize("overrides", [(), ("kv_cache.enable_prefix_caching=true",)])
def test_leaps_give_the_gaps_of_single_steps(overrides: tuple[str, ...]) -> None:
    scenario = Scenario.load(overrides=[*PRESSED, *overrides])
    leaps, singles = Twin(scenario).run(), Twin(scenario).run(step_mode=True)
    assert leaps.summary["preemptions"] > 10
    assert set(leaps.requests["status"]) == {"completed"}
    assert leaps.steps is not None
    assert singles.steps is not None
    assert leaps.steps["repeat"].max() > 1
    found = gaps_of(token_gaps(leaps.requests, leaps.steps))
    assert found == followed(singles) == gaps_of(token_gaps(singles.requests, singles.steps))
    assert leaps.summary["itl_s"] == singles.summary["itl_s"]
    wanted = np.percentile([gap / 1e9 for _, gap in found], [50, 90, 99])
    assert list(leaps.summary["itl_s"].values()) == pytest.approx(list(wanted))


def test_a_leap_whose_steps_are_taken_for_equally_long_is_caught() -> None:
    """The planted bug of whoever divides a leap's duration by its steps: a step is longer than the one before it."""
    scenario = Scenario.load(overrides=PRESSED)
    leaps, singles = Twin(scenario).run(), Twin(scenario).run(step_mode=True)
    assert leaps.steps is not None
    evened = [
        [start + duration * step // repeat for step in range(1, repeat + 1)]
        for start, duration, repeat in leaps.steps[["start_ns", "duration_ns", "repeat"]].values
    ]
    found = token_gaps(leaps.requests, leaps.steps.assign(step_ends_ns=evened))
    assert gaps_of(found) != followed(singles)


@pytest.mark.parametrize(
    "overrides",
    [
        ("kv_cache.preset=doubling",),
        ("kv_cache.version=v0", "scheduler.policy=vllm_v0", "workload.samples=3"),
        ("scheduler.policy=static_batch", "scheduler.batching=variable", "kv_cache.preset=doubling"),
    ],
)
def test_gaps_of_every_scheduler_fill_the_time_from_first_to_last_token(overrides: tuple[str, ...]) -> None:
    scenario = Scenario.load(
        overrides=[
            *(
                "engine.max_model_len=512",
                "workload.system_prompt_tokens=20",
                "workload.request_rate=20",
                "workload.num_prompts=9",
                "session.turns=1",
            ),
            "workload.prompt_tokens={distribution='uniform',low=1,high=300}",
            "workload.output_tokens={distribution='uniform',low=1,high=90}",
            *("results.steps=true", *overrides),
        ]
    )
    result = Twin(scenario).run()
    assert result.steps is not None
    done = result.requests
    assert set(done["status"]) == {"completed"}
    found = token_gaps(done, result.steps)
    assert found.count.sum() == (done["output_tokens"] - 1).sum()
    assert (found.count * found.gap_ns).sum() == (done["end_ns"] - done["first_token_ns"]).sum()


def test_without_steps_there_is_none() -> None:
    scenario = Scenario.load(overrides=["workload.num_prompts=2", "session.turns=1"])
    assert Twin(scenario).run().summary["itl_s"] is None


def test_in_a_padded_batch_tokens_count_when_they_are_computed() -> None:
    """The call returns with the longest answer: a request's own tokens were there before."""
    overrides = ["scheduler.policy=static_batch", "kv_cache.preset=doubling", "engine.max_model_len=512"]
    scenario = Scenario.load(
        overrides=[
            *("workload.request_rate=20", "workload.num_prompts=9", "session.turns=1", *overrides),
            *(
                "workload.system_prompt_tokens=20",
                "workload.prompt_tokens=100",
                "workload.output_tokens={distribution='uniform',low=1,high=90}",
            ),
            "results.steps=true",
        ]
    )
    result = Twin(scenario).run()
    assert result.steps is not None
    assert set(result.requests["status"]) == {"completed"}
    found = token_gaps(result.requests, result.steps)
    assert found.count.sum() == (result.requests["output_tokens"] - 1).sum()
    assert found.gap_ns.max() < 0.1e9
