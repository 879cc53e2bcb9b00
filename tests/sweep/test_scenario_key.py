"""The same run has the same key, another has another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hbmtwin.sim import what_would_hold
from hbmtwin.sim.scenario import Scenario, known_keys
from hbmtwin.sim.sweep import scenario_key as keys
from hbmtwin.sim.sweep.scenario_key import ONLY_STORED, scenario_key


def key(*overrides: str, path: Path | None = None, seed: int | None = None) -> str:
    return scenario_key(Scenario.load(path, overrides=overrides, seed=seed))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["kv_cache.preset=paged"],
        ["kv_cache.policy=paged", "memory.oom=preempt"],
        ["device.memory_bytes=32GiB", "device.memory_bytes=34359738368"],
        ["results.steps=true", "results.memory_trace=true", "results.cache_events=true", "results.checkpoint_s=3"],
        ["results.alert_kv_usage=0.5"],
        ["model.name=meta-llama/Llama-2-7b-hf"],
    ],
)
def test_the_same_run_has_the_same_key(overrides: list[str]) -> None:
    same = overrides[:1] if "memory_bytes" in "".join(overrides) else []
    assert key(*overrides) == key(*same)


@pytest.mark.parametrize(
    "override",
    [
        "kv_cache.preset=doubling",
        "memory.oom=stop",
        "workload.users=3",
        "workload.request_rate=inf",
        "workload.request_rate=1",
        "results.interval_s=2",
        "slo.ttft_s=1",
        "engine.gpu_memory_utilization=0.91",
        "model.name=llama-2-13b",
    ],
)
def test_another_run_has_another_key(override: str) -> None:
    assert key(override) != key()


def test_seeds_are_different_runs() -> None:
    assert len({key(seed=seed) for seed in range(50)}) == 50


def test_what_is_only_stored_is_what_alternatives_leave_out() -> None:
    assert set(ONLY_STORED) - {"results.cache_events", "results.checkpoint_s"} == set(what_would_hold.QUIET)
    assert set(ONLY_STORED) <= set(known_keys())


def test_files_count_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n0,10,3\n1,20,4\n"
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    first = key(f"workload.trace={tmp_path / 'a.csv'}")
    assert key(f"workload.trace={tmp_path / 'b.csv'}") == first
    monkeypatch.chdir(tmp_path)
    assert key("workload.trace=a.csv") == first
    (tmp_path / "a.csv").write_text(text + "2,30,5\n", encoding="utf-8")
    assert key("workload.trace=a.csv") != first
    assert key("workload.trace=missing.csv") != first


def test_a_model_counts_by_its_config(tiny: Path) -> None:
    first = key(path=tiny)
    assert key(f"model.name={tiny.parent / 'tiny'}", path=tiny) == first  # its directory
    config = tiny.parent / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}), encoding="utf-8")
    assert key(path=tiny) != first


def test_it_does_not_hang_on_the_process(tiny: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hbmtwin.api import Scenario, scenario_key; "
        "print(scenario_key(Scenario.load(Path(sys.argv[1]))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, tiny],
            capture_output=True,
            check=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {key(path=tiny)}


def test_another_source_gives_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes a policy must not get the rows of the old one."""
    before = key()
    package = tmp_path / "copy"
    for folder in keys.SOURCES:
        shutil.copytree(
            Path(keys.__file__).parents[2] / folder, package / folder, ignore=shutil.ignore_patterns("*.pyc")
        )
    monkeypatch.setattr(keys, "files", lambda name: package / name.removeprefix("hbmtwin."))
    keys._source_digest.cache_clear()
    try:
        assert key() == before
        keys._source_digest.cache_clear()
        with (package / "allocators" / "paged.py").open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        assert key() != before
    finally:
        keys._source_digest.cache_clear()


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    named = Scenario.load(overrides=["workload.trace=/dev/zero"])
    assert scenario_key(named) == scenario_key(named)
    assert scenario_key(named) != scenario_key(Scenario.load(overrides=["workload.trace=/dev/null"]))
