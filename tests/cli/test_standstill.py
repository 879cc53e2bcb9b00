"""A run that came to a standstill, on the terminal and in the report: what, why, which setting, and exit code 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.schedulers.vllm import VllmScheduler

Shell = Callable[..., Any]

LONG_PROMPTS = (
    *("--set", "kv_cache.preset=paged", "--set", "engine.max_model_len=2048", "--set", "kv_cache.version=0.18"),
    *("--set", "kv_cache.options={num_blocks=17}", "--set", "kv_cache.enable_prefix_caching=false"),
    *("--set", "scheduler.long_prefill_token_threshold=128", "--set", "workload.request_rate=inf"),
    *("--set", "workload.num_prompts=3", "--set", "workload.prompt_tokens=1500", "--set", "workload.output_tokens=3"),
    *("--set", "workload.system_prompt_tokens=0", "--set", "session.turns=1"),
)


@pytest.fixture
def live_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever holds most give way."""

    def victim(self: VllmScheduler) -> int:
        return max(range(len(self._running)), key=lambda place: self._running[place].sequence.num_computed_tokens)

    init = VllmScheduler.__init__

    def not_the_last(self: VllmScheduler, *arguments: Any) -> None:
        init(self, *arguments)
        self._last_gives_way = False

    monkeypatch.setattr(VllmScheduler, "__init__", not_the_last)
    monkeypatch.setattr(VllmScheduler, "_victim", victim)


@pytest.mark.usefixtures("live_lock")
def test_a_live_lock_is_told_with_cause_and_cure(shell: Shell) -> None:
    code, out, _ = shell("run", *LONG_PROMPTS)
    said = " ".join(out.split())
    assert code == 3
    assert "paged: live-locked at " in said
    assert "requests 0, 1, 2 give way to one another, " in said
    assert "none gets another token" in said
    assert "At full length they take 2.20 GiB (4,509 tokens), and there are 1.06 GiB of KV." in said
    assert "Cure: scheduler.policy = 'vllm', which always lets one go on; scheduler.max_num_seqs = 1;" in said
    assert "0 of 3 completed, 0 rejected, 3 failed, 0 unfinished" in said
    assert "recomputed tokens " in said


@pytest.mark.usefixtures("live_lock")
def test_a_comparison_and_its_report_tell_it_too(shell: Shell) -> None:
    code, out, _ = shell("compare", *LONG_PROMPTS, "--policies", "paged", "--out", "there")
    said = " ".join(out.split())
    assert code == 3
    assert said.startswith("paged live-locked at ")
    assert "paged: Live-lock from " in said
    assert "Latencies of a policy that ended early cover only what it lived through." in said
    page = Path("there/report.html").read_text(encoding="utf-8")
    assert '<p class="oom"><strong>paged.</strong> Live-lock from ' in page
    assert "recomputed tokens: " in page
    assert '<tr class="died"' in page


@pytest.mark.usefixtures("live_lock")
def test_json_has_the_record(shell: Shell) -> None:
    code, out, _ = shell("run", *LONG_PROMPTS, "--json")
    found = json.loads(out)["standstill"]
    assert (code, found["kind"], found["requests"]) == (3, "live_lock", [0, 1, 2])


def test_the_same_under_the_packages_own_rule_is_code_0(shell: Shell) -> None:
    code, out, _ = shell("run", *LONG_PROMPTS)
    assert code == 0
    assert "paged: held, " in out


def test_a_deadlock_is_told_as_a_fault_of_the_scheduler(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmScheduler, "_admit", lambda *_: None)
    code, out, _ = shell("run", *LONG_PROMPTS)
    said = " ".join(out.split())
    assert code == 3
    assert "deadlocked at 0.0 s" in said
    assert (
        "requests 0, 1, 2 run or wait, the scheduler plans nothing for them, and no other request is to come." in said
    )


def test_thrashing_is_a_note_and_requests_never_sent_have_a_reason(shell: Shell) -> None:
    thrashing = ("workload.num_prompts=12", "workload.output_tokens=400", "workload.prompt_tokens=1200")
    code, out, err = shell("run", *LONG_PROMPTS, *(word for key in thrashing for word in ("--set", key)))
    assert code == 0
    assert ", thrashing" in out.splitlines()[0]
    assert "note: thrashing in " in err
    assert "at least half of what was computed had been computed before" in err
    turns = ("session.turns=3", "workload.num_prompts=6", "session.think_time_s=1", "kv_cache.options={num_blocks=40}")
    code, out, _ = shell("run", *LONG_PROMPTS, *(word for key in turns for word in ("--set", key)))
    assert code == 0
    assert "2 unfinished: an earlier turn of their session was rejected" in out
