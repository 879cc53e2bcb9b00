"""Our scheduler beside vLLM's own: the harness without it, on our two policies of blocks, and the comparison with it.

The comparison needs vLLM's source package and is run by hand, at length with scripts/validate_paged --scheduler:
VLLM_SOURCE=vllm-0.27.1.tar.gz pytest tests/validation/test_vllm_scheduler.py
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.validation.vllm.groups import chunked, full, mamba, window
from hbmtwin.validation.vllm.planted_async import PLANTED_AHEAD
from hbmtwin.validation.vllm.planted_steps import PLANTED_STEPS
from hbmtwin.validation.vllm.scheduler import SERVERS, async_runs, both_sides, main, runs
from hbmtwin.validation.vllm.sides import Pool
from hbmtwin.validation.vllm.source import unpacked, vllm_core
from hbmtwin.validation.vllm.steps import Server, Steps, StepsDiffer
from hbmtwin.validation.vllm.steps_async import AsyncSteps, OurAsyncScheduler
from hbmtwin.validation.vllm.steps_ours import OurScheduler
from hbmtwin.validation.vllm.steps_traffic import Requests, blocks_alone
from hbmtwin.workloads.records import Request

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "validate_paged"
SOURCE = os.environ.get("VLLM_SOURCE")


def of_blocks(*groups: KVGroup, blocks: int = 9, budget: int = 24) -> Server:
    pool = Pool(groups=groups, num_blocks=blocks, caching=True, max_model_len=64, max_num_batched_tokens=budget)
    return Server(pool=pool, max_num_seqs=4)


def test_without_vllm_it_says_so_and_compares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vllm", str(tmp_path / "vllm-0.27.1.tar.gz")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "not compared: " in said.err
    assert "vllm-0.27.1.tar.gz does not exist" in said.err


def test_the_script_runs_the_blocks_or_the_scheduler(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = -m ] && echo "$@"\nexit 0\n')
    python.chmod(0o755)

    def said(*arguments: str) -> str:
        environment = os.environ | {"PYTHON": str(python)}
        return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=True).stdout

    assert said("--seed", "3") == "-P -m hbmtwin.validation.vllm.blocks --seed 3\n"
    assert said("--scheduler", "--seed", "3") == "-P -m hbmtwin.validation.vllm.scheduler --seed 3\n"


def test_every_rule_has_a_server_that_shows_it() -> None:
    servers = [run.server for run in runs("all")]
    assert {run.grouped for run in runs("full")} == {True, False}
    assert {run.grouped for run in runs("mamba")} == {True}
    for policy in ("fcfs", "priority"):
        of_policy = [server for server in servers if server.scheduling_policy == policy]
        assert {server.pool.caching for server in of_policy} == {True, False}
        assert any(server.long_prefill_token_threshold for server in of_policy)
        assert any(not server.enable_chunked_prefill for server in of_policy)
        assert any(server.pool.watermark for server in of_policy)
        assert any(server.pool.aligned_block > server.pool.max_num_batched_tokens for server in of_policy)
        assert any(0 < server.long_prefill_token_threshold < server.pool.aligned_block for server in of_policy)


def test_whole_prompts_fit_the_budget() -> None:
    # vLLM refuses such a configuration: a prompt over the budget would wait for ever.
    for run in runs("all"):
        pool = run.server.pool
        assert run.server.enable_chunked_prefill or pool.max_num_batched_tokens >= pool.max_model_len


@pytest.mark.parametrize(
    ("group", "tokens", "blocks"),
    [
        (full(4), 64, 16),
        (full(4), 61, 16),
        (window(6, 4), 64, 10),  # 30 tokens of window and chunk are 8 blocks, and one at either end
        (chunked(16, 4), 64, 12),
        (mamba("all", 4), 64, 16),
        (mamba("align", 4), 64, 3),
        (mamba("none", 64), 64, 1),
    ],
)
def test_blocks_that_a_sequence_may_need_alone(group: KVGroup, tokens: int, blocks: int) -> None:
    assert blocks_alone(of_blocks(group), tokens) == blocks


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_all_traffic_can_run_and_is_answered_the_same_to_equal_sides(kind: str) -> None:
    preempted = 0
    for number, server in enumerate(SERVERS[kind]):
        grouped = kind != "full"
        both = Steps(OurScheduler(server, grouped=grouped), OurScheduler(server, grouped=True))
        assert Requests(both, server, seed=number).run(100) == ""
        assert both.met["rejected"] == 0
        assert both.met["finished"] > 0
        preempted += both.met["preempted"]
    assert preempted >= 10


def test_the_first_difference_is_told_with_its_step() -> None:
    server = of_blocks(full(4))
    both = Steps(OurScheduler(server), OurScheduler(server, PLANTED_STEPS["victim"]))
    for number in (1, 2):
        r = Request(number, number, 0, 0, 8, 12, 12, ((number, 0, 8),))
        both.arrive(r, list(range(20)))
    assert [both.step() for _ in range(9)] == [()] * 9
    # 16 tokens of each fill the eight blocks; there is no room for the seventeenth of the first.
    with pytest.raises(StepsDiffer, match=r"step 10: scheduled is \(\(1, 1\),\) here and \(\) there"):
        both.step()


@pytest.mark.parametrize("name", sorted(PLANTED_STEPS))
def test_planted_mistakes_are_found_beside_the_right_scheduler(name: str) -> None:
    for number, server in enumerate(SERVERS["mamba" if name in ("chunk-stops", "shared-boundary") else "full"]):
        both = Steps(OurScheduler(server, PLANTED_STEPS[name]), OurScheduler(server))
        if Requests(both, server, seed=number).run(150):
            return
    pytest.fail("no server shows it")


def test_traffic_that_is_planned_ahead_is_answered_the_same_to_equal_sides() -> None:
    met: Counter[str] = Counter()
    for number, run in enumerate(async_runs("all")):
        ours = OurAsyncScheduler(run.server, grouped=run.grouped)
        both = AsyncSteps(ours, OurAsyncScheduler(run.server, grouped=True))
        assert Requests(both, run.server, seed=number).run(40) == ""
        met += both.met
    assert met["rejected"] == 0
    assert met["finished"] > 100
    assert met["preempted"] >= 10


@pytest.mark.parametrize("name", sorted(PLANTED_AHEAD))
def test_planted_mistakes_are_found_beside_the_right_scheduler_that_plans_ahead(name: str) -> None:
    kind = "window" if name == "gives-back-at-once" else "full"
    for number, run in enumerate(async_runs(kind)):
        broken = OurAsyncScheduler(run.server, PLANTED_AHEAD[name], grouped=run.grouped)
        both = AsyncSteps(broken, OurAsyncScheduler(run.server, grouped=run.grouped))
        if Requests(both, run.server, seed=number).run(150):
            return
    pytest.fail("no server shows it")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--async", "--planted", "victim"], "--planted victim goes without --async only"),
        (["--planted", "keys-at-once"], "--planted keys-at-once goes with --async only"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.skipif(SOURCE is None, reason="VLLM_SOURCE names no source package of vLLM")
def test_equal_to_vllm_at_every_step(tmp_path: Path) -> None:
    assert SOURCE is not None
    with vllm_core(unpacked(Path(SOURCE), tmp_path)) as core:
        for number, run in enumerate((*runs("all"), *async_runs("all"))):
            both = both_sides(core, run)
            assert Requests(both, run.server, seed=number).run(100) == "", str(run.server)
