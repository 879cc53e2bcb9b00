"""``--fail-on-slo``: the exit code of promises kept and broken, and what is printed of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Shell = Callable[..., Any]

FEW = ("--set", "workload.num_prompts=6", "--set", "session.turns=1")
KEPT, BROKEN = ("--set", "slo.ttft_s=1000"), ("--set", "slo.ttft_s=0.000001")


def test_a_promise_that_is_kept_and_one_that_is_not(shell: Shell) -> None:
    code, out, _ = shell("run", *FEW, *KEPT, "--fail-on-slo")
    assert code == 0
    assert "6 met the SLO (100.0 %)" in out
    code, out, _ = shell("run", *FEW, *BROKEN, "--fail-on-slo")
    assert code == 3
    assert "0.000 requests/s, 0 met the SLO (0.0 %); missed" in out
    assert shell("run", *FEW, *BROKEN).code == 0


def test_the_summary_holds_goodput_and_without_objectives_none(shell: Shell) -> None:
    goodput = json.loads(shell("run", *FEW, *KEPT, "--set", "slo.e2e_s=1000", "--json").out)["goodput"]
    assert goodput["requests_met"] == 6
    assert goodput["share_met_by_slo"] == {"ttft_s": 1.0, "e2e_s": 1.0}
    plain = shell("run", *FEW)
    assert "goodput" not in plain.out
    assert json.loads(shell("run", *FEW, "--json").out)["goodput"] is None


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s", "e2e_s"])
def test_an_objective_is_a_time_that_may_come_to_pass(shell: Shell, key: str) -> None:
    for value in ("inf", "-inf", "nan", "0", "-1", "1e300"):
        code, out, err = shell("run", *FEW, "--set", f"slo.{key}={value}")
        assert (code, out) == (2, "")
        assert err.startswith(f"error: slo.{key}: input should be ")
    code, out, err = shell("run", *FEW, "--goodput", "ttft:inf")
    assert (code, out) == (2, "")
    assert err.startswith("error: slo.ttft_s: input should be less than or equal to 1000000000, not inf")


def test_nothing_promised_is_a_usage_error_before_anything_runs(shell: Shell) -> None:
    for verb in ("run", "compare"):
        code, out, err = shell(verb, *FEW, "--fail-on-slo")
        assert (code, out) == (2, "")
        assert err == (
            "error: --fail-on-slo: no objective is set; add one, e.g. --set slo.ttft_s=2 "
            "(there are ttft_s, tpot_s, e2e_s)\n"
        )


def test_a_comparison_misses_if_one_run_does(shell: Shell) -> None:
    promised = ("compare", *FEW, "--policies", "none", "--variant", "a:slo.ttft_s=1000", "--fail-on-slo")
    code, out, _ = shell(*promised, "--out", "one")
    assert code == 0
    assert "a: goodput " in out
    assert shell(*promised, "--variant", "b:slo.ttft_s=0.000001", "--out", "two").code == 3
    assert shell(*promised, "--variant", "b:kv_cache.block_size=16", "--out", "three").code == 2
    code, _, err = shell(*promised, "--variant", "b:slo.no=1", "--out", "four")
    assert code == 2
    assert "variant 'b'" in err


def test_inter_token_latency_is_printed_where_steps_are_kept(shell: Shell) -> None:
    assert "ITL" not in shell("run", *FEW).out
    assert "ITL" in shell("run", *FEW, "--set", "results.steps=true").out
