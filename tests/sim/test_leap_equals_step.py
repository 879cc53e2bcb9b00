"""A leap of many steps must leave exactly the rows that single steps leave, whatever a scenario asks for.

Scenarios are those of :mod:`legal_scenarios`: every key is drawn that can matter. Each stored table is compared, the
table of steps step by step. That they would show a leap that is wrong is told by ``test_leap_planted_bugs``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

from .legal_scenarios import differences, legal_scenarios, numbered


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(legal_scenarios())
def test_every_stored_row_is_equal(scenario: Scenario) -> None:
    assert differences(Twin(scenario).run(), Twin(scenario).run(step_mode=True)) == []


@pytest.mark.parametrize("seed", [20143, 20738, 20285, 20291, 20754])
def test_every_stored_row_is_equal_where_it_once_was_not(seed: int) -> None:
    """A prompt in chunks that waits, and fits as soon as what it would have found in the cache is taken by others; next
    turns that come in while a rejection is answered, after the look at the queue."""
    scenario = Scenario.of(numbered(seed))
    assert differences(Twin(scenario).run(), Twin(scenario).run(step_mode=True)) == []


@pytest.mark.parametrize("policy", ["vllm", "prefill_first", "guaranteed_no_evict", "max_utilization"])
def test_a_turn_that_waited_for_one_that_is_rejected_does_not_wait_for_a_leap(policy: str, tmp_path: Path) -> None:
    """The turn of 500 tokens is too long; the one behind it comes in as that is answered, after the queue was seen."""
    trace = tmp_path / "requests.csv"
    rows = ("0,10,200,0,0", "0.1,10,2,1,0", "0.101,500,2,1,1", "0.102,20,2,1,2")
    trace.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens,session,turn", *rows)) + "\n")
    keys = {"engine.max_model_len": 256, "kv_cache.block_size": 16, "workload.trace": str(trace)}
    scenario = Scenario.of(keys | {"scheduler.policy": policy})
    leaps = Twin(scenario).run()
    assert differences(leaps, Twin(scenario).run(step_mode=True)) == []
    assert leaps.requests["id"].tolist() == [1, 2, 3, 0]


SAVED_BYTES = """
import hashlib, pathlib, sys, tempfile
from legal_scenarios import numbered
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
for seed in range(10):
    with tempfile.TemporaryDirectory() as folder:
        Twin(Scenario.of(numbered(seed))).run().write_into(pathlib.Path(folder))
        files = sorted(pathlib.Path(folder).iterdir())
        print(seed, *((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files))
"""


def test_two_runs_leave_the_same_bytes_whatever_the_hash_seed() -> None:
    printed = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-W", "error", "-c", SAVED_BYTES]
        printed.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert printed[0] == printed[1]
    assert printed[0].count("summary.json") == 10
