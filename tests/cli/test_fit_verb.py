"""``hbmtwin fit`` as a shell sees it: the screen, the JSON, the exit code, and what is told of a mistake."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len

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
