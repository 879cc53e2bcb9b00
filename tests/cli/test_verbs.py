"""The four verbs, as a shell sees them: results on stdout, everything else on stderr, and the exit code."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from hbmtwin.api import PRESETS, Result, Scenario, device_allocators
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.learned.learn import learn_lengths
from hbmtwin.workloads.learned.model_file import write_model

Shell = Callable[..., Any]

FEW = ("--set", "workload.num_prompts=12")
DYING = (
    *("--set", "kv_cache.preset=doubling", "--set", "workload.num_prompts=40", "--set", "workload.request_rate=inf"),
    *("--set", "workload.prompt_tokens=1500", "--set", "workload.output_tokens=600"),
)
RUN_KEYS = [
    "requests_completed",
    "requests_rejected",
    "requests_failed",
    "requests_unfinished",
    "preemptions",
    "oom",
    "peak_reserved_bytes",
    "peak_requested_bytes",
    "kv_utilization_mean",
    "internal_fragmentation_mean",
    "external_fragmentation_mean",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "makespan_s",
    "simulated_output_tokens",
    "basis",
    "wall_s",
]


def test_version_and_help(shell: Shell) -> None:
    from hbmtwin import __version__

    assert shell("--version") == (0, f"hbmtwin {__version__}\n", "")
    code, out, err = shell("--help")
    assert (code, err) == (0, "")
    assert all(verb in out for verb in ("init", "catalog", "run", "compare"))


def test_no_arguments_print_the_help_and_are_a_usage_error(shell: Shell) -> None:
    code, out, err = shell()
    assert (code, err) == (2, "")
    assert out.strip() == shell("--help").out.strip()


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "hbmtwin", "run", "--nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")


def test_init_writes_the_default_scenario_with_every_key_explained(shell: Shell, tmp_path: Path) -> None:
    assert shell("init", "mine.toml").code == 0
    assert Scenario.load(tmp_path / "mine.toml").model_dump() == Scenario().model_dump()
    lines = (tmp_path / "mine.toml").read_text(encoding="utf-8").splitlines()
    for name, section in Scenario.model_fields.items():
        fields = getattr(section.annotation, "model_fields", None)
        for key, info in {name: section}.items() if fields is None else fields.items():
            assert f"# {info.description}" in lines
            assert any(line.startswith((f"{key} =", f"# {key} =")) for line in lines), key


def test_init_dash_prints_the_file(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("init", "-")
    assert (code, err) == (0, "")
    (tmp_path / "piped.toml").write_text(out, encoding="utf-8")
    assert Scenario.load(tmp_path / "piped.toml").model_dump() == Scenario().model_dump()


def test_init_never_overwrites(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text("seed = 3\n", encoding="utf-8")
    code, out, err = shell("init")
    assert (code, out) == (2, "")
    assert err == "error: scenario.toml exists; name another file, or remove it first\n"
    assert (tmp_path / "scenario.toml").read_text(encoding="utf-8") == "seed = 3\n"


def test_a_file_that_cannot_be_written_whole_is_not_written(shell: Shell, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as on a disk that has no more room
    try:
        code, out, err = shell("init", "mine.toml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out) == (1, "")
    assert err == "error: [Errno 27] File too large: 'mine.toml'\n"
    assert list(tmp_path.iterdir()) == []


def test_init_shows_forms_of_traffic_that_can_be_used_and_ends_with_the_built_in_ones(
    shell: Shell, tmp_path: Path
) -> None:
    section = ""
    shown: dict[str, list[str]] = {}
    for line in shell("init", "-").out.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif (example := re.match(r"# (\w+) = (.+)", line)) is not None:
            shown.setdefault(f"{section}.{example[1]}", []).append(example[2])
    assert {key: len(examples) for key, examples in shown.items() if section != "" and len(examples) > 1} == {
        "workload.prompt_tokens": 3,
        "workload.output_tokens": 2,
        "session.turns": 2,
        "session.think_time_s": 3,
    }
    (tmp_path / "generate_multi_turn.json").write_text(
        '{"num_conversations": 1, "prompt_output": {"num_tokens": {"distribution": "constant", "value": 1}},'
        '"prompt_input": {"num_turns": {"distribution": "constant", "value": 2}, "prefix_num_tokens": '
        '{"distribution": "constant", "value": 0}, "num_tokens": {"distribution": "constant", "value": 1}}}'
    )
    (tmp_path / "requests.csv.gz").write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,10,10\n"))
    write_model(learn_lengths([(10, 10)], request_rate=1.0), tmp_path / "model.toml")
    for key, examples in shown.items():
        for example in examples:
            assert source_of(Scenario.load(overrides=[f"{key}={example}"])).total_requests is not None, key
    lasts = [f"{key}={examples[-1]}" for key, examples in shown.items() if len(examples) > 1]
    built_in, spelt_out = (list(source_of(Scenario.load(overrides=given)).open()) for given in ([], lasts))
    assert spelt_out == built_in


def test_catalog_lists_devices_models_policies_and_workloads(shell: Shell) -> None:
    whole = json.loads(shell("catalog", "--json").out)
    assert list(whole) == ["devices", "models", "policies", "workloads"]
    assert {"ascend-910b2", "ascend-910b4", "a100-80gb"} <= set(whole["devices"])
    assert json.loads(shell("catalog", "models", "--json").out) == whole["models"]
    llama = whole["models"]["llama-2-7b"]
    assert llama["kv_token_bytes"] == 524_288  # 2 x 32 layers x 32 heads x 128 x 2 bytes
    assert all(policy["summary"] for policy in whole["policies"])
    code, out, err = shell("catalog")
    assert (code, err) == (0, "")
    assert "llama-2-70b" in out
    assert "vllm" in out
    assert "reasoning-r1" in out
    rag = whole["workloads"]["rag"]
    assert rag["keys"]["workload.request_rate"] == "inf"
    assert rag["sources"]["session.turns"] == "number_of_turns (confidence M)"
    assert rag["credit"].startswith("Kubernetes SIG inference-perf")


def test_the_catalog_of_policies_has_a_line_for_every_name_that_a_scenario_takes(shell: Shell) -> None:
    listed = json.loads(shell("catalog", "policies", "--json").out)
    names: dict[str, list[str]] = {}
    for entry in listed:
        names.setdefault(entry["family"], []).append(entry["name"])
        assert re.match(r"[A-Za-z0-9].*", entry["summary"])
        assert not re.search(r"``|claim|\n|:class:", entry["summary"]), entry
    assert list(names) == [
        *("preset", "KV policy", "paged by other rules", "growth rule", "retention", "KV dtype", "device allocator"),
        *("scheduler", "batching"),
    ]
    assert {"paged", "radix"} <= set(names["KV policy"])
    assert names["paged by other rules"] == ["paged_v0", "paged_groups"]
    assert names["preset"] == list(PRESETS)
    assert names["batching"] == list(get_args(type(Scenario().scheduler).model_fields["batching"].annotation))
    assert {"static", "exact", "doubling", "step", "hybrid"} <= set(names["growth rule"])
    assert {"full", "truncate(n)", "forget(over, drop)"} <= set(names["retention"])
    assert {"auto", "fp8", "int8_per_token_head", "int4"} <= set(names["KV dtype"])
    lines = {entry["name"]: entry["summary"] for entry in listed}
    assert lines["int8_per_token_head"] == (
        "8 bits, an FP32 scale a token and KV head: 51.6 % of float16 for llama-2-7b."  # (128 + 4) / 256
    )
    assert "initial_tokens * growth_factor ** k" in lines["doubling"]
    needs = {entry["name"]: entry["requires"] for entry in listed}
    offers = {entry["name"]: entry["features"] for entry in listed}
    assert set(needs["virtual"]) <= set(offers["direct"])
    assert {"preempt", "reject"} <= set(offers["paged"])


def test_a_policy_that_is_registered_is_listed(shell: Shell) -> None:
    @device_allocators.register("mine")
    class Mine(device_allocators.get("bump")):
        """Written this morning."""

    try:
        (mine,) = [e for e in json.loads(shell("catalog", "policies", "--json").out) if e["name"] == "mine"]
        assert (mine["family"], mine["summary"]) == ("device allocator", "Written this morning.")
        assert "Written this morning." in shell("catalog", "policies").out
    finally:
        device_allocators.unregister("mine")


def test_run_json_is_all_that_stdout_carries(shell: Shell) -> None:
    code, out, err = shell("run", "--json", *FEW)
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert set(RUN_KEYS) <= set(summary)
    assert set(summary["ttft_s"]) == {"p50", "p90", "p99"}
    assert summary["oom"] is None
    ended = [summary[f"requests_{how}"] for how in ("completed", "failed", "unfinished")]
    assert sum(ended) + sum(summary["requests_rejected"].values()) == summary["requests_total"]


def test_run_for_people_says_how_it_ended_and_how_far_to_trust_it(shell: Shell) -> None:
    code, out, err = shell("run", *FEW)
    assert (code, err) == (0, "")
    assert out.startswith("llama-2-7b on ascend-910b4, paged: held")
    assert "default, uncalibrated" in out
    assert "\x1b" not in out  # no colours in a pipe


def test_the_seed_of_the_command_line_wins_and_the_same_seed_gives_the_same_answer(shell: Shell) -> None:
    def answer(*more: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(shell("run", "--json", *FEW, *more).out)
        del summary["wall_s"]
        return summary

    assert answer("--seed", "5") == answer("--seed", "5") == answer("--set", "seed=5")
    assert answer("--seed", "5") != answer("--seed", "6")


def test_out_is_a_result_directory_without_wall_time(shell: Shell, tmp_path: Path) -> None:
    printed = json.loads(shell("run", "--json", *FEW, "--out", "mine").out)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == [
        "checkpoints.parquet",
        "kv_monitor.parquet",
        "requests.parquet",
        "scenario.toml",
        "summary.json",
        "timeline.parquet",
    ]
    stored = Result.load(tmp_path / "mine").summary
    assert "wall_s" not in stored
    assert printed == {**stored, "wall_s": printed["wall_s"]}
    assert shell("run", *FEW, "--out", "mine").code == 0  # one of ours is replaced


def test_a_death_is_a_result_unless_the_caller_says_otherwise(shell: Shell) -> None:
    code, out, _ = shell("run", *DYING)
    assert code == 0
    assert "Out of memory at" in out
    assert shell("run", "--fail-on-oom", *DYING).code == 3
    assert shell("run", "--fail-on-oom", *FEW).code == 0
    record = json.loads(shell("run", "--json", *DYING).out)["oom"]
    assert record["need_bytes"] > record["largest_free_bytes"]


def test_what_would_have_held_is_a_table_the_best_first(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("run", "--what-would-hold", *DYING, "--out", "mine")
    assert (code, err) == (0, "")
    table = out.partition("What would have held: ")[2]
    cures = Result.load(tmp_path / "mine").summary["what_would_hold"]
    held = sum(cure["held"] for cure in cures)
    assert table.startswith(f"{held} of {len(cures)} single changes; the best: {cures[0]['change']}.")
    assert "kv_cache.policy = paged" in " ".join(table.split())
    order = [line.strip() for line in table.splitlines()]
    places = [next(i for i, line in enumerate(order) if line.startswith(cure["change"])) for cure in cures]
    assert places == sorted(places)
    printed = json.loads(shell("run", "--what-would-hold", "--json", *DYING).out)
    assert printed["what_would_hold"] == cures
    assert "what_would_hold" not in json.loads(shell("run", "--json", *DYING).out)


def test_where_memory_sufficed_nothing_is_run_again_and_that_is_said(shell: Shell) -> None:
    code, out, err = shell("run", "--what-would-hold", "--json", *FEW)
    assert (code, err) == (0, "note: memory sufficed, so nothing was run again\n")
    assert json.loads(out)["what_would_hold"] == []
    assert "would have held" not in shell("run", "--what-would-hold", *FEW).out


def test_alerts_are_told_beside_the_result(shell: Shell) -> None:
    limits = ("--set", "results.alert_kv_usage=0.01", "--set", "results.alert_hit_rate=0.9")
    code, out, err = shell("run", "--json", *FEW, *limits)
    alerts = json.loads(out)["alerts"]
    assert code == 0
    assert {alert["metric"] for alert in alerts} == {"usage", "hit_rate"}
    lines = err.splitlines()
    assert all(line.startswith("note: ") for line in lines)
    assert any(line.startswith("note: KV hit rate below 90.0 % from ") for line in lines)
    assert len(lines) == 4
    assert lines[-1].endswith(", all in summary.json and with --json")
    compared = shell("compare", *FEW, *limits, "--policies", "paged,doubling").err
    assert "note: paged: KV usage above 1.0 % from " in compared
    assert "note: doubling: KV usage above 1.0 % from " in compared


def test_compare_json_is_each_presets_run(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("compare", "--json", "--policies", "doubling,paged", *FEW)
    assert code == 0
    assert err.splitlines()[-1] == "report: hbmtwin-compare/report.html"
    compared = json.loads(out)
    assert list(compared) == ["doubling", "paged"]
    for name, summary in compared.items():
        alone = json.loads(shell("run", "--json", *FEW, "--set", f"kv_cache.preset={name}").out)
        del alone["wall_s"], summary["wall_s"]
        assert summary == alone
        assert Result.load(tmp_path / "hbmtwin-compare" / name).summary == alone
    assert (tmp_path / "hbmtwin-compare" / "plotly.min.js").stat().st_size > 1_000_000


def test_compare_for_people_begins_with_the_verdict_and_has_a_row_a_policy(shell: Shell) -> None:
    code, out, _ = shell("compare", *FEW, "--out", "report")
    assert code == 0
    assert " held" in out.splitlines()[0] or " died at " in out.splitlines()[0]
    firsts = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [name for name in firsts if name in PRESETS] == list(PRESETS)
    assert "arrivals of later turns may differ: a turn waits for the answer before it." in " ".join(out.split())


def test_a_directory_of_somebody_else_is_refused_before_the_run(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.txt").write_text("years of work", encoding="utf-8")
    for verb in ("run", "compare"):
        code, out, err = shell(verb, *FEW, "--out", "thesis")
        assert (code, out) == (2, "")
        assert err == ("error: thesis: exists and is not a result of hbmtwin; choose another --out or remove it\n")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["draft.txt"]


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_closed_streams_are_no_crash(verb: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m hbmtwin {verb} --set workload.num_prompts=5 --out"
    for closed, told in ((">&-", verb == "compare"), (">&- 2>&-", False)):
        out = f"mine{len(closed)}"
        done = subprocess.run(f"{command} {out} {closed}", shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0
        assert done.stderr == (f"report: {out}/report.html\n" if told else "")
        assert (tmp_path / out).is_dir()


def test_a_closed_pipe_is_no_crash() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "hbmtwin", "catalog", "--json"], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("path", ["hbmtwin", "hbmtwin.cli"])
def test_importing_the_face_loads_nothing_heavy(path: str) -> None:
    heavy = "{'pandas', 'plotly', 'pydantic', 'simpy', 'numpy', 'hbmtwin.api'}"
    code = f"import sys, {path}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_compare_leaves_out_presets_that_are_illegal_here_unless_they_were_asked_for(shell: Shell) -> None:
    hybrid = ("--set", "model.name=granite-4.0-h-micro", "--set", "workload.num_prompts=3")
    answer = shell("compare", *hybrid)
    assert answer.code == 0
    assert "note: the preset 'caching' is left out: kv_cache.policy: 'contiguous' has no place for" in answer.err
    assert answer.out.startswith("paged held.")
    asked = shell("compare", "--policies", "caching,paged", *hybrid)
    assert asked.code == 2
    assert "preset 'caching'" in asked.err


def test_run_tells_what_depends_on_the_model(shell: Shell) -> None:
    answer = shell("run", "--set", "model.name=granite-4.0-h-micro", "--set", "workload.num_prompts=3")
    assert "note: times of the 36 Mamba-2 layers of granite-4.0-h-micro are defaults" in answer.err


@pytest.mark.parametrize("policy", ["paged", "radix"])
def test_run_tells_what_the_prefix_cache_found(shell: Shell, policy: str) -> None:
    cache = ("--set", f"kv_cache.policy={policy}", "--set", "kv_cache.enable_prefix_caching=true")
    answer = shell("run", *cache, "--set", "workload.num_prompts=9")
    assert re.search(r"prefix cache +\d+\.\d % hit rate, [\d,]+ of [\d,]+ tokens found, \d+ requests", answer.out)
