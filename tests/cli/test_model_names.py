"""A model by the name that vLLM's users type: the same run, told under the catalog's own name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]

FEW = ("--num-prompts", "3", "--set", "workload.request_rate=1")


def test_a_run_is_the_same_bytes_whatever_the_model_was_called(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "of-file.toml").write_text('[model]\nname = "Meta-Llama/llama-2-7B-hf"\n')
    ways = {
        "own": ("--set", "model.name=llama-2-7b"),
        "flag": ("--model", "meta-llama/Llama-2-7b-hf"),
        "set": ("--set", "model.name=meta-llama/Llama-2-7b-chat-hf"),
        "file": ("of-file.toml",),
    }
    told = {name: shell("run", *way, *FEW, "--out", name) for name, way in ways.items()}
    for name in ways:
        assert told[name].code == 0
        assert told[name].out.startswith("llama-2-7b on ascend-910b4")
        for file in ("scenario.toml", "summary.json", "requests.parquet"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "own" / file).read_bytes(), (name, file)


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_catalog_shows_the_repositories(shell: Shell, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = shell("catalog", "models").out
    llama = json.loads(shell("catalog", "models", "--json").out)["llama-3.1-8b"]
    assert llama["hugging_face_ids"][:2] == ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"]
    for id in llama["hugging_face_ids"]:
        assert id in shown


def test_an_unknown_model_is_a_usage_error_with_the_nearest_of_both_kinds(shell: Shell) -> None:
    told = shell("run", "--model", "meta-llama/Llama-2-7b-hff")
    assert told.code == 2
    assert "did you mean 'llama-2-7b' or 'meta-llama/Llama-2-7b-hf'?" in told.err
    assert "config.json" in told.err
