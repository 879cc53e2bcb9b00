"""A scenario that runs in a few milliseconds, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hbmtwin.cli import main

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}
SCENARIO = """
[model]
name = "{model}"
[device]
memory_bytes = "4GiB"
[workload]
num_prompts = 4
prompt_tokens = {{ distribution = "uniform", low = 20, high = 90 }}
output_tokens = 8
system_prompt_tokens = 0
[session]
turns = 1
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Shell = Callable[..., Answer]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """Run ``hbmtwin`` with these arguments, in the directory of the scenario."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments: str | Path) -> Answer:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The scenario's file: a model of two layers, four requests of random lengths."""
    model = tmp_path / "tiny" / "config.json"
    model.parent.mkdir()
    model.write_text(json.dumps(CONFIG), encoding="utf-8")
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO.format(model=model), encoding="utf-8")
    return path
