"""Command lines of ``vllm bench serve`` and of its multi-turn benchmark, moved over."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.api import Scenario
from hbmtwin.cli.bench_words import move
from hbmtwin.cli.exits import UsageError

Shell = Callable[..., Any]


def scenario_of(line: str) -> Scenario:
    moved = move(shlex.split(line)).arguments
    assert moved[::2] == ["--set"] * (len(moved) // 2)
    return Scenario.load(overrides=moved[1::2])


def test_a_copied_line_is_the_scenario_that_it_says() -> None:
    s = scenario_of(
        "--backend openai-chat --base-url http://localhost:8000 --endpoint /v1/chat/completions "
        "--model meta-llama/Llama-3.1-8B --tokenizer Llama-3.1-8B --dataset-name random --random-input-len 1024 "
        "--random-output-len 128 --random-prefix-len 64 --random-range-ratio 0.1 --num-prompts 400 --request-rate 2.5 "
        "--burstiness 0.5 --max-concurrency 40 --goodput ttft:500 tpot:50 e2el:10000 --percentile-metrics ttft,tpot "
        "--metric-percentiles 50,99 --ignore-eos --save-result --metadata a=1 b=2 --extra-body '{\"x\": 1}'"
    )
    w = s.workload
    assert s.model.name == "llama-3.1-8b"
    assert w.prompt_tokens == {"distribution": "uniform", "low": 921, "high": 1127}  # floor 921.6, ceil 1126.4
    assert w.output_tokens == {"distribution": "uniform", "low": 115, "high": 141}  # floor 115.2, ceil 140.8
    assert (w.system_prompt_tokens, s.session.turns) == (64, 1)
    assert (w.num_prompts, w.request_rate, w.burstiness, w.max_concurrency) == (400, 2.5, 0.5, 40)
    assert (s.slo.ttft_s, s.slo.tpot_s, s.slo.e2e_s) == (0.5, 0.05, 10.0)


def test_words_set_what_they_say_and_nothing_else() -> None:
    s = scenario_of("--request-rate inf --num-prompts 9")
    given = Scenario.load(overrides=["workload.request_rate=inf", "workload.num_prompts=9"])
    assert s == given
    assert given.workload.prompt_tokens is None


def test_a_model_is_a_repository_or_a_path(tmp_path: Path) -> None:
    assert scenario_of("--model mistralai/Mistral-7B-v0.1").model.name == "mistral-7b-v0.1"
    (tmp_path / "Config.json").write_text("{}")
    assert move(["--model", str(tmp_path / "Config.json")]).arguments == ["--set", f"model.name={tmp_path}/Config.json"]


def test_underscores_and_equals_signs_are_read_as_vllm_reads_them() -> None:
    assert scenario_of("--request_rate=3 --num_prompts=5") == scenario_of("--request-rate 3 --num-prompts 5")
    assert scenario_of("--num-prompts 5 --num-prompts 6").workload.num_prompts == 6


def test_a_ramp() -> None:
    w = scenario_of("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 9 --request-rate inf").workload
    assert (w.ramp_up_strategy, w.ramp_up_start_rps, w.ramp_up_end_rps) == ("linear", 1, 9)


def test_defaults_of_the_data_set_random() -> None:
    w = scenario_of("--dataset-name random").workload
    assert (w.prompt_tokens, w.output_tokens, w.system_prompt_tokens) == (1024, 128, 0)
    assert scenario_of("--random-output-len 7").workload.prompt_tokens == 1024
    assert scenario_of("--input-len 33 --output-len 7").workload.output_tokens == 7
    w = scenario_of("""--random-input-len 10 --random-range-ratio '{"input": 0.95, "output": 0}'""").workload
    assert w.prompt_tokens == {"distribution": "uniform", "low": 1, "high": 20}
    assert w.output_tokens == 128


def test_data_sets_with_files_are_traces() -> None:
    for name in ("burstgpt", "custom", "sharegpt"):
        assert scenario_of(f"--dataset-name {name} --dataset-path a.csv").workload.trace == "a.csv"
    assert scenario_of("--dataset-name sharegpt").workload.preset == "sharegpt"


def test_prefix_repetition(shell: Shell) -> None:
    w = scenario_of("--dataset-name prefix_repetition --prefix-repetition-num-prefixes 5").workload
    assert w.prefix_repetition is not None
    assert w.prefix_repetition.model_dump() == {
        "prefix_len": 256,
        "suffix_len": 256,
        "num_prefixes": 5,
        "output_len": 128,
    }
    lengths = "--prefix-repetition-prefix-len 256 --prefix-repetition-suffix-len 100 --prefix-repetition-output-len 4"
    line = f"--dataset-name prefix_repetition {lengths} --num-prompts 40 --request-rate 1 --json"
    out = json.loads(shell("run", *line.split(), "--set", "kv_cache.enable_prefix_caching=true").out)
    assert out["requests_completed"] == 40
    # Ten prefixes of two blocks of 128: all but the first request of each find theirs.
    assert 30 * 256 <= out["prefix_cache"]["hits"] < 40 * 256


def test_the_multi_turn_benchmark() -> None:
    w = scenario_of(
        "--input-file g.json --num-clients 4 --max-num-requests 20 --request-rate 0 --url http://x"
    ).workload
    assert (w.multi_turn, w.users, w.num_prompts, w.request_rate) == ("g.json", 4, 20, float("inf"))


def test_what_is_not_moved_over_is_told() -> None:
    moved = move(
        shlex.split("scenario.toml --host h --max-turns 8 --port=80 --json --random-input-len 9 --dataset-path x")
    )
    assert moved.arguments[-2:] == ["scenario.toml", "--json"]
    assert moved.notes == [
        "no effect here: --host, --port, --dataset-path (a server's address, its sampler, files of a benchmark)",
        "left out, and the traffic is another without: --max-turns",
    ]


def test_goodput_does_not_swallow_the_scenario() -> None:
    moved = move(["--goodput", "ttft:500", "tpot:50", "mine.toml", "--metadata", "a=b", "other.toml"])
    assert moved.arguments == ["--set", "slo.ttft_s=0.5", "--set", "slo.tpot_s=0.05", "mine.toml", "other.toml"]


def test_what_follows_set_is_left_alone() -> None:
    given = ["--set", "workload.trace=--host", "--", "--host"]
    assert move(given).arguments == given
    assert move(["--set", "--host"]).arguments == ["--set", "--host"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--request-rate 4 --set workload.request_rate=5",
            "--set workload.request_rate=5 and --request-rate both set workload.request_rate; leave one out",
        ),
        ("--set=workload.num_prompts=5 --num-prompts 4", "--set workload.num_prompts=5 and --num-prompts both set"),
        ("--num-prompts 5 --max-num-requests 4", "--num-prompts and --max-num-requests both set workload.num_prompts"),
        (
            "--ramp-up-strategy linear --request-rate 4",
            "--ramp-up-strategy and --request-rate 4: a ramp is the rate itself; leave one out",
        ),
        ("--random-input-len 4 --input-len 4", "--random-input-len and --input-len say the same; leave one out"),
        ("--dataset-name random --set session.turns=3", "--set session.turns=3 and --dataset-name random both set"),
        ("--dataset-name sonnet", "--dataset-name sonnet: its lengths depend on texts that are not here (there are"),
        ("--dataset-name burstgpt", "--dataset-name burstgpt: say where it is with --dataset-path"),
        ("--random-input-len ten", "--random-input-len ten: write a whole number of tokens"),
        ("--random-range-ratio 1", "--random-range-ratio 1: it is from 0 to just under 1"),
        ("--random-range-ratio x", "--random-range-ratio x: write a number, or"),
        ("--goodput itl:3", "--goodput itl:3: there are ttft, tpot, e2el; write --goodput ttft:500"),
        ("--goodput ttft:x", "--goodput ttft:x: 'x' is no number"),
        ("--goodput mine.toml", "--goodput needs a value; write --goodput ttft:500 tpot:50"),
        ("--request-rate", "--request-rate needs a value"),
        ("--request-rate --num-prompts 3", "--request-rate needs a value"),
    ],
)
def test_contradictions_name_both_sides(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        move(shlex.split(line))
    assert caught.value.format_message().startswith(said)


def test_run_and_compare_take_them(shell: Shell, tmp_path: Path) -> None:
    line = shlex.split(
        "--random-input-len 64 --random-output-len 8 --num-prompts 5 --request-rate inf --goodput tpot:1e5"
    )
    code, out, err = shell("run", *line, "--json", "--seed", "3", "--backend", "vllm", "--out", "r")
    assert code == 0
    assert json.loads(out)["requests_completed"] == 5
    assert json.loads(out)["goodput"]["requests_met"] == 5
    assert "note: no effect here: --backend (" in err
    saved = Scenario.load(tmp_path / "r" / "scenario.toml")
    assert (saved.seed, saved.workload.prompt_tokens) == (3, 64)
    code, out, _ = shell("compare", *line, "--policies", "paged,caching", "--json")
    assert [summary["requests_completed"] for summary in json.loads(out).values()] == [5, 5]


def test_an_unknown_word_and_a_contradiction_exit_with_2(shell: Shell) -> None:
    code, _, err = shell("run", "--no-such-word", "3")
    assert code == 2
    assert "--no-such-word" in err
    code, out, err = shell("run", "--dataset-name", "hf")
    assert (code, out) == (2, "")
    assert err.startswith("error: --dataset-name hf: ")


def test_the_help_has_them(shell: Shell) -> None:
    for verb in ("run", "compare"):
        assert "--random-range-ratio" in shell(verb, "--help").out
