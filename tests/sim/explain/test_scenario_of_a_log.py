"""The scenario of every text is taken by ``fit`` and ``run``, and has nothing that the text did not tell."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hbmtwin.cli import main
from hbmtwin.sim.explain.explaining import explain

from .engine_pastes import HEALTHY, PASTES

TEXTS = {paste.name: paste.text for paste in (*PASTES, *HEALTHY)}
WITH_SCENARIO = [name for name, text in TEXTS.items() if explain(text).scenario]


@pytest.mark.parametrize("name", WITH_SCENARIO)
def test_fit_takes_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(explain(TEXTS[name]).scenario, encoding="utf-8")
    code = main(["fit", str(path)])
    assert code in (0, 3), capsys.readouterr().err


def test_run_takes_it_where_ranks_and_length_are_beyond_what_stands_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = explain(
        "python3 -m sglang.launch_server --model-path /m/Foo-900B --tp-size 16 --context-length 131072\n"
        "NPU out of memory. Tried to allocate 96.00 MiB (NPU 3; 61.27 GiB total capacity; 55.50 GiB already allocated; "
        "55.50 GiB current active; 7.00 MiB free; 57.90 GiB reserved in total by PyTorch)\n"
    )
    assert "engine" not in tomllib.loads(told.scenario) or not tomllib.loads(told.scenario)["engine"]
    assert "# tensor_parallel_size = 16  # ascend-910c has no all-reduce time for as many" in told.scenario
    assert "# max_model_len = 131072  # more than the 4096 positions of llama-2-7b, which stands in" in told.scenario
    path = tmp_path / "scenario.toml"
    path.write_text(told.scenario, encoding="utf-8")
    for verb in (["fit", str(path)], ["run", str(path), "--set", "workload.num_prompts=3"]):
        assert main(verb) in (0, 3), capsys.readouterr().err


def test_a_catalog_model_keeps_its_length() -> None:
    told = explain("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 131072 --tensor-parallel-size 2\n")
    engine = tomllib.loads(told.scenario)["engine"]
    assert engine == {"tensor_parallel_size": 2, "max_model_len": 131072}
