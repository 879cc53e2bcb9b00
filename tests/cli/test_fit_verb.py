"""``hbmtwin fit`` as a shell sees it: the screen, the JSON, the exit code, and what is told of a mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len

from hbmtwin.cli import fit_screen
from hbmtwin.sim.fit import words as fit_words

from .conftest import Shell

FITS = ("fit", "--model", "llama-2-7b", "--device", "ascend-910b4")
TOO_LONG = ("fit", "--model", "llama-3.1-8b", "--device", "ascend-910b4")
TOO_LARGE = ("fit", "--model", "llama-2-70b", "--device", "ascend-910b4")
KEYS = [
    *("fits", "reason", "kv_bytes_per_token", "block_bytes", "available_kv_bytes", "num_gpu_blocks", "kv_tokens"),
    *("max_concurrency", "max_model_len_that_fits", "binding_rank", "breakdown", "advice", "warnings"),
    *("engine", "model", "device", "arguments", "boot_lines", "groups"),
]


def answer(shell: Shell, *arguments: str) -> dict[str, Any]:
    code, out, err = shell(*arguments, "--json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    assert code == (0 if found["fits"] else 3)
    return found


def test_a_server_that_starts_exits_with_0_and_says_how_many_requests(shell: Shell) -> None:
    code, out, err = shell(*FITS)
    assert (code, err) == (0, "")
    assert "It starts. 7 requests of 4,096 tokens" in out
    assert "227 blocks / 32 = 7.09 such requests at once; x 4,096 = 29,056 tokens" in out


def test_one_that_does_not_exits_with_3_and_names_the_smallest_changes(shell: Shell) -> None:
    code, out, err = shell(*TOO_LONG)
    assert (code, err) == (3, "")
    assert "It does not start: one request of max_model_len 131072 needs 16.00 GiB" in out
    assert re.search(r"max_model_len 96256 +96,256 tokens = 1\.00 x 96,256", out)
    assert "Not enough alone: gpu_memory_utilization" in out


@pytest.mark.parametrize("arguments", [FITS, TOO_LONG, TOO_LARGE])
def test_the_json_has_every_key_and_the_lines_sum_to_the_device(shell: Shell, arguments: tuple[str, ...]) -> None:
    found = answer(shell, *arguments)
    assert [key for key in KEYS if key not in found] == []
    assert sum(line["bytes"] for line in found["breakdown"]) == 31_675_383_808
    assert all(set(line) == {"item", "bytes", "low", "high", "source"} for line in found["breakdown"])
    assert all(line["source"] for line in found["breakdown"])
    assert (found["reason"] == "") == found["fits"]


@pytest.mark.parametrize("arguments", [FITS, TOO_LONG, TOO_LARGE])
@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_line_is_wider_than_the_terminal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], columns: int, lang: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = shell(*arguments, "--lang", lang).out
    assert max(map(cell_len, out.splitlines())) <= columns
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize("arguments", [FITS, TOO_LONG, TOO_LARGE])
def test_both_languages_have_the_same_numbers(shell: Shell, arguments: tuple[str, ...]) -> None:
    numbers = [re.findall(r"\d[\d,.]*\d|\d", shell(*arguments, "--lang", lang).out) for lang in ("en", "zh")]
    assert len(numbers[0]) > 30
    assert numbers[0] == numbers[1]
    english, chinese = (answer(shell, *arguments, "--lang", lang) for lang in ("en", "zh"))
    assert english.keys() == chinese.keys()
    assert english["breakdown"] == chinese["breakdown"]


def test_the_bars_follow_each_other_and_end_with_the_device(shell: Shell) -> None:
    lines = shell(*FITS).out.splitlines()
    bars = [line for line in lines if "█" in line]
    edges = [(line.index("█"), line.rindex("█") + 1) for line in bars]
    assert all(end == start for (_, end), (start, _) in pairwise(edges))
    device = next(line for line in lines if "─" in line)
    assert (device.index("─"), device.rindex("─") + 1) == (edges[0][0], edges[-1][1])


def test_where_more_is_needed_the_bars_run_past_the_device(shell: Shell) -> None:
    lines = shell(*TOO_LARGE).out.splitlines()
    weights = next(line for line in lines if "weights" in line and "█" in line)
    device = next(line for line in lines if "─" in line)
    assert weights.count("█") > 3 * device.count("─") > 0


def test_nothing_said_plans_what_is_built_in_and_says_so(shell: Shell) -> None:
    code, out, err = shell("fit")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("llama-2-7b on ascend-910b4")
    assert "No model or device was named" in out
    assert "No model or device was named" not in shell(*FITS).out


# -- from numbers alone ------------------------------------------------------------------------------------------------

LOGGED = [
    # bytes a token, block, bytes for KV, max_model_len: tokens and concurrency as vLLM logged them
    (48_128, 128, 11_381_826_560, 32_768, 236_416, "7.21"),
    (49_152, 128, 53_405_099_008, 4_096, 1_086_464, "265.25"),
]


@pytest.mark.parametrize(("token", "block", "kv", "length", "tokens", "ratio"), LOGGED)
def test_published_logs_come_out_of_their_numbers_alone(
    shell: Shell, token: int, block: int, kv: int, length: int, tokens: int, ratio: str
) -> None:
    sizes = ("--kv-bytes-per-token", token, "--available-kv-bytes", kv, "--block-size", block)
    arguments = ("fit", *map(str, sizes), "--max-model-len", str(length))
    found = answer(shell, *arguments)
    assert (found["fits"], found["kv_tokens"], f"{found['max_concurrency']:.2f}") == (True, tokens, ratio)
    assert (found["kv_bytes_per_token"], found["block_bytes"]) == (token, token * block)
    out = shell(*arguments).out
    assert f"GPU KV cache size: {tokens:,} tokens" in out
    assert f"Maximum concurrency for {length:,} tokens per request: {ratio}x" in out


def test_blocks_alone_are_enough(shell: Shell) -> None:
    found = answer(
        *(shell, "fit", "--num-gpu-blocks-override", "1381", "--block-size", "16", "--max-model-len", "2048"),
        *("--num-layers", "32", "--num-kv-heads", "8", "--head-dim", "128"),
    )
    assert f"{found['max_concurrency']:.2f}" == "10.79"
    assert found["kv_bytes_per_token"] == 131_072


def test_a_subtraction_from_measured_bytes_needs_no_catalog(shell: Shell) -> None:
    found = answer(
        *(shell, "fit", "--total-memory-bytes", "79.19GiB", "--weights-bytes", "14.99GiB"),
        *("--activation-bytes", "1.89GiB", "--non-torch-bytes", "0.25GiB", "--graph-bytes", "0"),
        *("--gpu-memory-utilization", "0.95", "--num-layers", "32", "--num-kv-heads", "8", "--head-dim", "128"),
        *("--max-model-len", "8k"),
    )
    assert round(found["available_kv_bytes"] / 2**30, 2) == 58.10  # vLLM logged 58.11 from unrounded shares
    assert found["arguments"]["max_model_len"] == {"value": 8000, "origin": "given"}


def test_what_is_missing_is_named_all_at_once(shell: Shell) -> None:
    code, out, err = shell("fit", "--weights-bytes", "14GiB")
    assert (code, out) == (2, "")
    assert "--kv-bytes-per-token, or --num-layers with --num-kv-heads and --head-dim" in err
    assert "--activation-bytes with --graph-bytes or --enforce-eager" in err
    assert "--device, or --total-memory-bytes" in err


# -- settings ----------------------------------------------------------------------------------------------------------


def test_an_older_release_profiles_whole_prompts_and_says_why_a_longer_length_starts(shell: Shell) -> None:
    old = ("fit", "--model", "llama-3.1-8b", "--device", "rtx-3090", "--engine-version", "0.6")
    fits = {}
    for length in ("20000", "29000", "35000"):
        found = answer(shell, *old, "--gpu-memory-utilization", "0.9", "--max-model-len", length)
        fits[length] = found["fits"]
    assert fits == {"20000": True, "29000": False, "35000": True}
    out = " ".join(shell(*old, "--gpu-memory-utilization", "0.9", "--max-model-len", "29000").out.split())
    assert "The profiling run computes one whole prompt of 29,000 tokens" in out
    assert "above it chunked prefill turns itself on, 2,048 tokens are profiled" in out
    assert "max_model_len 32769" in out


def test_both_spellings_and_short_forms_of_vllms_flags(shell: Shell) -> None:
    long = answer(shell, *FITS, "--tensor-parallel-size", "2", "--max-model-len", "4096", "--no-enforce-eager")
    short = answer(shell, *FITS, "-tp", "2", "--max_model_len=4K")
    assert long["kv_tokens"] == short["kv_tokens"] > 2 * answer(shell, *FITS)["kv_tokens"]
    assert short["arguments"]["tensor_parallel_size"] == {"value": 2, "origin": "given"}
    assert short["arguments"]["max_num_seqs"] == {"value": 256, "origin": "default"}


def test_auto_takes_the_longest_that_fits(shell: Shell) -> None:
    for said in ("auto", "-1"):
        found = answer(shell, *TOO_LONG, "--max-model-len", said)
        assert found["fits"]
        assert found["arguments"]["max_model_len"]["value"] == found["max_model_len_that_fits"] == 96_256


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--mem-fraction-static", "0.8"), "--mem-fraction-static: vllm-ascend has no such option"),
        (("--engine", "sglang", "--gpu-memory-utilization", "0.8"), "use --mem-fraction-static"),
        (("--enforce-eager", "--no-enforce-eager"), "--enforce-eager and --no-enforce-eager: one undoes the other"),
        (("--engine", "vlm"), "did you mean 'vllm'"),
        (("--engine", "tensorrt-llm"), "does not serve on ascend-910b4"),
        (("--gpu-memory-utilization", "1.2"), "--gpu-memory-utilization: a share is above 0 and at most 1, not 1.2"),
        (("--max-model-len", "32kk"), "write a whole number, or one such as 32k (32,000)"),
        (("--weights-bytes", "12 gigs"), "write bytes as a number"),
        (("--quantization", "fp9"), "did you mean 'fp8'"),
        (("--kv-cache-dtype", "fp7"), "unknown"),
        (("--dtype", "int8"), "--dtype: 'int8' is none of auto"),
        (("--tensor-parallel-size", "3"), "cannot be split over tensor_parallel_size 3"),
        (("--max-num-seqs", "0"), "--max-num-seqs: from 1"),
        (("--model", "lama-2-7b"), "did you mean 'llama-2-7b'"),
        (("missing.toml",), "no such file"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_exits_with_2(shell: Shell, arguments: tuple[str, ...], told: str) -> None:
    code, out, err = shell(*FITS, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err


def test_a_combination_that_no_kernel_runs_does_not_start_whatever_the_memory(shell: Shell) -> None:
    code, out, _ = shell(*FITS, "--kv-cache-dtype", "fp8")
    assert code == 3
    assert "It does not start so, whatever the memory: kv_cache_dtype:" in out
    assert "Memory would suffice." in out
    found = answer(shell, *FITS, "--kv-cache-dtype", "fp8")
    assert found["reason"] in found["warnings"]


def test_measured_bytes_stand_in_for_estimates(shell: Shell) -> None:
    found = answer(shell, *FITS, "--activation-bytes", "1GiB", "--graph-bytes", "0.5GiB", "--non-torch-bytes", "300MiB")
    lines = {line["item"]: line for line in found["breakdown"]}
    for item, size in (("activations", 1 << 30), ("graphs", 1 << 29), ("non-torch", 300 << 20)):
        assert (lines[item]["bytes"], lines[item]["low"], lines[item]["high"]) == (size, size, size)


def test_the_ranges_decide_is_said_in_the_verdict(shell: Shell) -> None:
    code, out, _ = shell(*TOO_LONG, "--max-model-len", "96256")
    assert code == 0
    assert out.splitlines()[0].endswith("may not start")
    assert "It may not start. By the figures it does, and 1 request of 96,256 tokens" in out
    assert answer(shell, *TOO_LONG, "--max-model-len", "96256")["may_not_start"]


def test_a_scenario_is_asked_as_run_asks_it_and_flags_win(shell: Shell, tmp_path: Any) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[model]\nname = "llama-2-7b"\n[device]\nname = "ascend-910b2"\n'
        "[engine]\ngpu_memory_utilization = 0.8\n[scheduler]\nmax_num_seqs = 64\n",
        encoding="utf-8",
    )
    found = answer(shell, "fit", str(file))
    assert found["device"] == "ascend-910b2"
    assert found["arguments"]["gpu_memory_utilization"] == {"value": 0.8, "origin": "scenario"}
    assert found["arguments"]["max_num_seqs"] == {"value": 64, "origin": "scenario"}
    smaller = answer(shell, "fit", str(file), "--device", "ascend-910b4")
    assert smaller["device"] == "ascend-910b4"
    assert smaller["num_gpu_blocks"] < found["num_gpu_blocks"]


# -- other screens -----------------------------------------------------------------------------------------------------

SCREENS = [
    ("--model", "bamba-9b", "--device", "a100-40gb"),
    ("--model", "gemma-2-27b", "--device", "h100-80gb", "--max-model-len", "auto"),
    ("--model", "llama-3.1-70b", "--device", "h100-80gb", "-tp", "2", "-pp", "2"),
    ("--model", "deepseek-r1", "--device", "ascend-910c", "-tp", "8", "-dp", "2", "-ep"),
    ("--model", "llama-3.1-8b", "--device", "rtx-3090", "--engine-version", "0.6", "--max-model-len", "29000"),
    ("--model", "llama-3.1-8b", "--device", "ascend-910b2", "--engine", "mindie", "--npu-mem-size", "8"),
    ("--model", "llama-3.1-8b", "--device", "h200", "--engine", "sglang", "--mem-fraction-static", "0.5"),
    ("--available-kv-bytes", "10GiB", "--kv-bytes-per-token", "48128"),
]


@pytest.mark.parametrize("arguments", SCREENS)
def test_every_kind_of_screen_has_the_same_numbers_in_both_languages(shell: Shell, arguments: tuple[str, ...]) -> None:
    numbers = [re.findall(r"\d[\d,.]*\d|\d", shell("fit", *arguments, "--lang", lang).out) for lang in ("en", "zh")]
    assert sorted(numbers[0]) == sorted(numbers[1])
    assert max(map(cell_len, shell("fit", *arguments, "--lang", "zh").out.splitlines())) <= 140


def test_layers_that_keep_different_things_are_counted_group_by_group(shell: Shell) -> None:
    out = shell("fit", *SCREENS[1]).out
    assert "one request of 8,192 tokens: 1,025 blocks, over all groups of layers" in out
    assert "23 layers with a window of 4,096: 513, of 16 tokens each" in out
    assert "23 layers that see all: 512, of 16 tokens each" in out


def test_the_rank_that_decides_is_named(shell: Shell) -> None:
    assert answer(shell, "fit", *SCREENS[2])["binding_rank"] == 2
    assert "rank 2, which has room for the fewest blocks" in " ".join(shell("fit", *SCREENS[2]).out.split())


def test_the_verb_imports_nothing_of_the_simulator() -> None:
    code = (
        "import sys; from hbmtwin.cli import main; "
        "main(['fit', '--model', 'llama-3.1-8b', '--device', 'ascend-910b4', '--json']); "
        "print(sorted({'numpy', 'pandas', 'plotly', 'pyarrow', 'simpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_planted_a_language_that_tells_another_number_is_caught(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    other = fit_words.RESULT._replace(zh="{tokens} 个 token = {ratio} × 4096")
    monkeypatch.setattr(fit_words, "RESULT", other)
    with pytest.raises(AssertionError):
        test_both_languages_have_the_same_numbers(shell, TOO_LONG)


def test_planted_a_bar_that_begins_one_column_late_is_caught(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fit_screen._edges

    def late(sizes: Any, total: int, width: int) -> Any:
        return [(start + (start > 0), max(end, start + 1)) for start, end in honest(sizes, total, width)]

    monkeypatch.setattr(fit_screen, "_edges", late)
    with pytest.raises(AssertionError):
        test_the_bars_follow_each_other_and_end_with_the_device(shell)


def test_without_unicode_the_bars_are_hashes_and_nothing_fails() -> None:
    command = [sys.executable, "-m", "hbmtwin", "fit", "--lang", "zh"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stderr == b""
    assert b"####" in done.stdout
    assert b"14.24" in done.stdout


def test_the_batch_of_sglang_s_graphs_is_not_told_as_a_limit_of_requests(shell: Shell) -> None:
    asked = ("fit", "--model", "qwen3-8b", "--device", "ascend-910b4", "--engine", "sglang")
    assert "max_num_seqs" not in shell(*asked).out
    assert "Given: max_num_seqs 8" in shell(*asked, "--max-num-seqs", "8").out
