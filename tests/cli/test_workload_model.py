"""``hbmtwin workload learn`` and ``generate``: what they write, what they print, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten minutes, a request every other second, and twice as many in the second half."""
    times = [*range(0, 300, 2), *range(300, 601)]
    rows = [f"{time},{100 + time % 50},{10 + time % 7}" for time in times]
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_a_trace_becomes_a_model_and_the_model_traffic(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "learn", trace, "--out", "model.toml")
    assert answer.code == 0, answer.err
    assert "trace.csv: 1 client, 0.7517 requests a second over 600 s" in answer.out
    assert "request rate /s" in answer.out
    assert answer.out.rstrip().endswith("wrote model.toml")

    answer = shell("workload", "generate", "model.toml", "--out", "made.csv")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("wrote made.csv: 451 requests in ")
    assert len(Path("made.csv").read_text().splitlines()) == 452
    again = shell("workload", "generate", "model.toml", "--out", "again.csv")
    assert again.code == 0
    assert Path("again.csv").read_bytes() == Path("made.csv").read_bytes()


def test_generated_traffic_is_as_long_and_dense_as_asked(shell: Shell, trace: Path) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")

    def made(*options: str) -> Any:
        answer = shell("workload", "generate", "model.toml", "--out", "made.jsonl", "--json", *options)
        assert answer.code == 0, answer.err
        return json.loads(answer.out)

    assert made("--num-prompts", "1000")["requests"] == 1000
    assert made("--duration", "300")["requests"] == 150
    assert made("--duration", "300", "--rate-scale", "3")["requests"] == 450
    assert made("--format", "mooncake", "--num-prompts", "3")["requests"] == 3
    line = json.loads(Path("made.jsonl").read_text().splitlines()[0])
    assert list(line) == ["timestamp", "input_length", "output_length", "hash_ids"]


def test_json_has_the_figures(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "learn", trace, "--out", "model.toml", "--json")
    found = json.loads(answer.out)
    assert found["written"] == "model.toml"
    assert found["clients"] == 1
    assert found["figures"][0] == pytest.approx(
        {
            "figure": "request rate /s",
            "trace": 451 / 600,
            "generated": found["figures"][0]["generated"],
            "deviation": found["figures"][0]["deviation"],
            "allowed": 0.02,
            "relative": True,
            "holds": True,
        }
    )


def test_lengths_without_times_need_a_rate(shell: Shell, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,5,15,2\n20,5,25,4\n")
    answer = shell("workload", "learn", lengths, "--out", "model.toml")
    assert (answer.code, answer.out) == (1, "")
    assert "say with --request-rate how many requests a second arrive" in answer.err
    answer = shell("workload", "learn", lengths, "--out", "model.toml", "--request-rate", "4")
    assert answer.code == 0
    assert "note: the trace has no times: arrivals are Poisson's, at 4 a second" in answer.err


def test_what_is_read_is_never_written_over(shell: Shell, trace: Path) -> None:
    before = trace.read_bytes()
    answer = shell("workload", "learn", trace, "--out", trace)
    assert (answer.code, answer.err) == (2, f"error: --out {trace} is the file that is read; name another one\n")
    assert trace.read_bytes() == before
    shell("workload", "learn", trace, "--out", "model.csv", "--no-check")
    model = Path("model.csv").read_bytes()
    assert shell("workload", "generate", "model.csv", "--out", "model.csv").code == 2
    assert Path("model.csv").read_bytes() == model


def test_a_file_that_cannot_be_written_is_named_as_given(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "learn", trace, "--out", "none/model.toml", "--no-check")
    reason = "No such file or directory"
    said = f"cannot be written ({reason}); check the folder and its permissions\n"
    assert (answer.code, answer.err) == (1, f"error: none/model.toml: {said}")
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    for name in ("none/x.csv", "none/x.jsonl.gz", "none/x.parquet"):
        answer = shell("workload", "generate", "model.toml", "--out", name)
        assert (answer.code, answer.err) == (1, f"error: {name}: {said}")


@pytest.mark.parametrize("more", [["--out", ""], ["--out", "m.toml", "--block-size", str(2**63)]])
def test_a_file_without_a_name_and_a_block_without_end_are_refused(shell: Shell, trace: Path, more: list[str]) -> None:
    assert shell("workload", "learn", trace, *more).code == 2


def test_traffic_of_no_request_and_lines_under_the_name_of_a_table_are_refused(shell: Shell, trace: Path) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    answer = shell("workload", "generate", "model.toml", "--out", "made.csv", "--duration", "1e-9")
    assert (answer.code, "no request falls in 1e-09 s" in answer.err) == (1, True)
    for name in ("made.csv", "made.csv.gz", "made.parquet"):
        answer = shell("workload", "generate", "model.toml", "--out", name, "--format", "mooncake")
        assert (answer.code, "name a .jsonl file" in answer.err) == (2, True)
    assert not list(Path().glob("*made*"))


def test_a_model_of_windows_without_end_is_refused(shell: Shell, trace: Path) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    text = Path("model.toml").read_text()
    assert "window_s = 300" in text
    Path("model.toml").write_text(text.replace("window_s = 300", "window_s = 1e-9"))
    answer = shell("workload", "generate", "model.toml", "--out", "x.csv", "--num-prompts", "5")
    assert (answer.code, answer.out) == (1, "")
    assert "span_s / window_s is at most 10,000,000 windows, not 6" in answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["learn", "no.csv", "--out", "m.toml"], "no.csv: no such file"),
        (["learn", "trace.csv", "--out", "m.toml", "--request-rate", "4"], "has times of its own"),
        (["generate", "no.toml", "--out", "x.csv"], "no.toml: no such file"),
        (["generate", "trace.csv", "--out", "x.csv"], "this is no TOML"),
        (["generate", "model.toml", "--out", "x.txt"], "let its name end in .csv, .jsonl or .parquet"),
    ],
)
def test_a_mistake_is_told_in_a_line(shell: Shell, trace: Path, arguments: list[str], said: str) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    answer = shell("workload", *arguments)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert said in answer.err
    assert not any(name.name.startswith("x.") for name in Path().iterdir())


GENERATE = ("generate", "model.toml", "--out", "x.csv")
LEARN = ("learn", "trace.csv", "--out", "x.toml", "--no-check")
DESCRIBE = ("describe", "trace.csv")


@pytest.mark.parametrize(
    ("verb", "option", "values"),
    [
        (GENERATE, "--rate-scale", "0 -1 nan inf -inf 1e7 many"),
        (GENERATE, "--duration", "0 -1 nan inf 1e10"),
        (GENERATE, "--num-prompts", "0 -1 nan 1.5 100000000000000"),
        (GENERATE, "--clients", "0 -1 nan"),
        (GENERATE, "--seed", "-1 nan 9223372036854775808"),
        (LEARN, "--window-s", "0 0.5 -1 nan inf 1e7"),
        (LEARN, "--request-rate", "0 -1 nan inf 1e7"),
        (LEARN, "--block-size", "0 -1 nan 2000000000000"),
        (LEARN, "--seed", "-1 9223372036854775808"),
        (DESCRIBE, "--block-size", "0 -1 nan 99999999999999999999"),
        (DESCRIBE, "--num-prompts", "0 -1 nan 100000000000000 99999999999999999999999"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value if value.startswith("--") else "",
)
def test_a_value_that_makes_no_sense_is_a_usage_error_that_names_the_option(
    shell: Shell, trace: Path, verb: tuple[str, ...], option: str, values: str
) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    before = sorted(Path().iterdir())
    for value in values.split():
        answer = shell("workload", *verb, option, value)
        assert (answer.code, answer.out) == (2, ""), (option, value)
        assert answer.err.startswith(f"error: Invalid value for '{option}': Input should be "), answer.err
        assert answer.err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clients", "2"), "the model has 1 client that sends something; ask for 1 to 1, not 2"),
        (("--num-prompts", "10", "--rate-scale", "1e-300"), "rate_scale 1e-300: 10 requests at that times"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_usage_errors(
    shell: Shell, trace: Path, arguments: tuple[str, ...], said: str
) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    answer = shell("workload", *GENERATE, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: model.toml: ")
    assert said in answer.err


def test_one_request_is_one(shell: Shell, trace: Path) -> None:
    shell("workload", "learn", trace, "--out", "model.toml", "--no-check")
    assert ": 1 request in " in shell("workload", *GENERATE, "--num-prompts", "1").out
