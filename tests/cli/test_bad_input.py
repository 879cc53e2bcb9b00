"""Bad input: one error line that says what, where and the cure, the right exit code, and nothing on stdout."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def complaint(answer: Any, code: int) -> str:
    """The error of a run that must have failed with this code."""
    assert answer.code == code
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("error: ") == 1
    assert "Traceback" not in answer.err
    return str(answer.err.removeprefix("error: ").rstrip("\n"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "engine.gpu_memory_utilisation=0.5",
            "engine.gpu_memory_utilisation: unknown key; did you mean 'engine.gpu_memory_utilization'?",
        ),
        ("device.memory_bytes=-5", "device.memory_bytes: input should be greater than 0, not -5"),
        (
            "device.memory_bytes=-5GiB",
            "device.memory_bytes: write bytes as a number, or with a unit such as 512MiB or 29.5GiB, not '-5GiB'",
        ),
        ("workload.num_prompts=0", "workload.num_prompts: input should be greater than or equal to 1, not 0"),
        (
            "memory.alignment_bytes=8GiB",
            "memory.alignment_bytes: input should be less than or equal to 1073741824, not '8GiB'",
        ),
        (
            "kv_cache.growth_factor=1025",
            "kv_cache.growth_factor: input should be less than or equal to 1024, not 1025",
        ),
        ("seed", "--set seed: write it as section.key=value"),
        (
            "kv_cache.policy=contigous",
            "kv_cache.policy: no KV policy is called 'contigous' (there are contiguous, paged, radix, virtual); "
            "did you mean 'contiguous'?",
        ),
    ],
)
def test_a_bad_setting_is_named_with_its_cure(shell: Shell, setting: str, said: str) -> None:
    assert complaint(shell("run", "--set", setting), 2) == said
    if "kv_cache" not in setting:  # which a preset of compare would replace
        assert complaint(shell("compare", "--set", setting), 2) == said


def test_an_illegal_combination_of_policies_says_why(shell: Shell) -> None:
    said = complaint(shell("run", "--set", "kv_cache.policy=contiguous", "--set", "memory.oom=preempt"), 2)
    assert said.startswith("memory.oom: 'preempt' is illegal with kv_cache.growth = 'exact'")
    assert said.endswith("use stop")


def settings(*given: str) -> list[str]:
    return [word for setting in given for word in ("--set", setting)]


def test_what_depends_on_the_size_of_the_device_names_its_key(shell: Shell) -> None:
    naive = ("kv_cache.policy=contiguous", "memory.kv_arena=pooled")
    small = ("memory.alignment_bytes=1GiB", "device.memory_bytes=15GiB", "engine.max_model_len=64")
    said = complaint(shell("run", *settings(*naive, *small)), 2)
    assert said.startswith(
        "memory.alignment_bytes: 1073741824 is more than the whole region of memory.kv_arena = 'pooled'"
    )
    said = complaint(shell("run", *settings(*naive, "kv_cache.retention=sliding_window(999999999999)")), 2)
    assert said.startswith("kv_cache.retention: sliding_window(999999999999) keeps 999999999999 tokens, more than max_")
    said = complaint(shell("run", *settings(*naive, "model.name=llama-3.1-8b", "engine.max_model_len=131072")), 3)
    assert said.startswith("one request of max_model_len 131072 needs 16.00 GiB of KV and there are ")
    assert " block" not in said


def test_a_preset_that_is_illegal_here_is_named(shell: Shell) -> None:
    said = complaint(shell("compare", "--policies", "paged", "--set", "scheduler.policy=static_batch"), 2)
    assert said.startswith("preset 'paged': scheduler.policy: static_batch is how servers form batches")


def test_an_unknown_model_gets_the_nearest_one(shell: Shell) -> None:
    assert "did you mean 'mixtral-8x7b'?" in complaint(shell("run", "--set", "model.name=mixtral-8x7"), 2)


def test_an_unknown_preset_is_a_usage_error(shell: Shell) -> None:
    said = complaint(shell("compare", "--policies", "caching,pagd"), 2)
    assert said == (
        "--policies: no preset is called 'pagd' (there are caching, pooled, doubling, paged); did you mean 'paged'?"
    )
    assert "nothing to compare" in complaint(shell("compare", "--policies", ","), 2)


def test_a_missing_scenario_and_a_broken_one(shell: Shell, tmp_path: Path) -> None:
    assert complaint(shell("run", "gone.toml"), 2) == "gone.toml: no such file; `hbmtwin init gone.toml` writes one"
    (tmp_path / "broken.toml").write_text("seed = [", encoding="utf-8")
    assert complaint(shell("run", "broken.toml"), 2).startswith("broken.toml: not valid TOML")


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_model_that_does_not_fit_exits_with_3_and_shows_the_subtraction(shell: Shell, verb: str) -> None:
    first, *lines = complaint(shell(verb, "--set", "model.name=llama-2-70b"), 3).splitlines()
    assert "128.48 GiB" in first
    assert "tensor_parallel_size 8" in first
    shown = [float(line.partition(" GiB")[0].split()[-1]) for line in lines]
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.05)
    assert shown[-1] == 29.5
    activations = next(line for line in lines if line.lstrip().startswith("activations"))
    assert activations.endswith("estimated, 0.34 to 0.57")  # 25 % either way, as on two NPU points


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_truncated_gzip_tells_where_it_ends(shell: Shell, tmp_path: Path, verb: str) -> None:
    whole = gzip.compress((HEADER + "".join(f"{i},{i * 7919 % 911 + 1},5\n" for i in range(5000))).encode())
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    said = complaint(shell(verb, "--set", "workload.trace=cut.csv.gz"), 1)
    assert said.startswith("workload.trace: cut.csv.gz:")
    assert said.endswith("the gzip file ends early; fetch or write it again")
    assert not (tmp_path / "hbmtwin-compare").exists()


def test_a_bad_line_of_a_csv_is_given_by_its_number(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(f"{HEADER}0,10,10\n1,ten,10\n", encoding="utf-8")
    said = complaint(shell("run", "--set", "workload.trace=bad.csv"), 1)
    assert said == "workload.trace: bad.csv:3: prompt_tokens is 'ten'; it must be a whole number"


def test_times_out_of_order_are_given_by_both_lines(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(f"{HEADER}5,10,10\n1,10,10\n", encoding="utf-8")
    said = complaint(shell("run", "--set", "workload.trace=order.csv"), 1)
    assert said == "workload.trace: order.csv:3: arrival_s is 4 s before line 2; sort the file by arrival_s"


def test_a_trace_without_requests(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text(HEADER, encoding="utf-8")
    assert complaint(shell("run", "--set", "workload.trace=empty.csv"), 1).startswith("workload.trace: empty.csv: ")


@pytest.mark.parametrize(
    ("keys", "turn"),
    [
        (("session.turns=200",), "turn 47 of session 0"),
        (("session.turns=1", "workload.users=1"), "turn 0 of session 47"),
    ],
)
def test_turns_after_the_end_of_the_clock_are_told(shell: Shell, keys: tuple[str, ...], turn: str) -> None:
    """Each waits three years for the next, and the clock ends after 146."""
    settings = (*keys, "session.think_time_s=1e8", "workload.prompt_tokens=1", "workload.output_tokens=1")
    said = complaint(shell("run", *(word for key in settings for word in ("--set", key))), 1)
    assert said.startswith(f"{turn} would be sent 4,700,000,00")
    assert said.endswith("over 146 years: shorten session.think_time_s, or take fewer workload.num_prompts")


def test_a_request_over_max_model_len_is_rejected_by_reason_and_the_rest_served(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text(f"{HEADER}0,10,10\n1,5000,10\n2,10,10\n", encoding="utf-8")
    answer = shell("run", "--json", "--set", "workload.trace=long.csv")
    assert answer.code == 0
    summary = json.loads(answer.out)
    assert summary["requests_rejected"] == {"max_model_len": 1}
    assert summary["requests_completed"] == 2


def test_what_is_nested_too_deeply_is_told_in_a_line(shell: Shell, tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("a=" + "[" * 100_000, encoding="utf-8")
    for verb in ("run", "fit"):
        assert complaint(shell(verb, str(deep)), 2) == f"{deep}: nested too deeply for a scenario"
    said = complaint(shell("run", "--set", "workload.num_prompts=" + "[" * 3000), 2)
    assert said == "--set workload.num_prompts: nested too deeply for a value"
