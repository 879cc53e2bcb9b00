"""What ``explain`` lists as tried is what ``fit`` answers to the command that it ends with: one change, or two."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from hbmtwin.cli import main
from hbmtwin.sim.explain import continuing
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.phrases import Phrase, Said

REFUSED = (
    "INFO 11-03 [utils.py:233] non-default args: {{'model': '{model}', 'max_model_len': {length}, "
    "'gpu_memory_utilization': 0.9}}\n"
    "(EngineCore_DP0) INFO 11-03 [worker_v1.py:287] Available memory: -{over}, total memory: 31675383808\n"
    "(EngineCore_DP0) ERROR 11-03 [core.py:298] ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine.\n"
)


def log(model: str, length: int, over: int = 1 << 30) -> str:
    return REFUSED.format(model=model, length=length, over=over)


CASES = {
    "one change": log("Qwen/Qwen2.5-14B-Instruct", 32768),
    "two together": log("Qwen/Qwen3-235B-A22B", 32768, 410 << 30),
}


@pytest.mark.parametrize("name", CASES)
def test_the_list_is_that_of_fit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = explain(CASES[name])
    assert main([*shlex.split(told.fit_command)[1:], "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    changes = record["advice"] or record["advice_of_two"]
    assert len(changes) == len(told.tried) > 0
    for change, line in zip(changes, told.tried, strict=True):
        start = f"{change['change']}: then {change['result']['kv_tokens']:,} tokens fit"
        assert line.text().startswith(start)
        assert (", if the estimates hold" in line.text()) is not change["result"]["certain"]
        assert all(note in line.text() for note in change["warnings"])


def test_two_together_are_told_where_none_does_alone() -> None:
    lines = [line.text() for line in explain(CASES["two together"]).tried]
    assert lines
    assert all(" with " in line.partition(": then")[0] for line in lines)


def test_what_is_to_be_known_stands_beside_its_change() -> None:
    answer = fit("qwen2.5-14b", "rtx-3090", max_model_len=32768)
    noted = replace(answer.advice[0], notes=(Said.of(Phrase("Marlin computes it", "由 Marlin 计算")),))
    told = continuing.change_told(noted)
    assert told.text() == continuing.change_told(answer.advice[0]).text() + ". Note: Marlin computes it"
    assert told.text("zh").endswith("。注意：由 Marlin 计算")
    assert told.text().startswith("quantization awq: weights in 4 bits: then ")
