"""``scripts/gpu_check``, with an interpreter that plays every answer: what is told of each, and that nothing passes by
mistake. What its steps do is their own tests' matter; on a device it has never run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .patience import until

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check"

PLAYED = f"""#!{sys.executable}
import json, pathlib, sys
words = sys.argv[1:]
def after(flag):
    return pathlib.Path(words[words.index(flag) + 1])
if "pydantic>=2.8" in words:
    print(json.dumps(FOUND))
elif "hbmtwin.validation.attention_numerics" in words:
    print("2 cases differ from float64 attention by more than rounding")
    sys.exit(3)
elif "bench" in words:
    sys.exit("error: No such command 'bench'. (Possible commands: run)")
elif "allocator" in words:
    if "max_split_size_mb:40" in words:
        sys.exit("error: no such device; --backend emulated needs no device")
    if "expandable_segments:True" in words:
        raise KeyError("a bug")
    print(json.dumps({{"cases": [1, 2], "operations": 1600, "ooms": 7, "differences": 0, "skipped": {{}}}}))
elif "run" in words and "validate" not in words:
    after("--out").mkdir()
    (after("--out") / "memory_trace.parquet").touch()
elif "validate" in words:
    pass  # exit code 0, and no result
else:
    for name in words[4:]:
        (pathlib.Path(words[3]) / (name.replace(" ", "_") + ".csv")).touch()
"""
THERE = {"missing": [], "python": "3.12.3", "torch": "2.11.0+cu130", "device": "NVIDIA H200", "known_as": ["h200"]}


def played(folder: Path, *arguments: str, found: dict[str, Any] = THERE, **environment: str) -> tuple[int, str]:
    python = folder / "python"
    python.write_text(PLAYED.replace("FOUND", repr(found)))
    python.chmod(0o755)
    told = {**os.environ, "OUT": str(folder / "out"), "PYTHON": str(python), **environment}
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, *arguments], env=told, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def statuses(folder: Path) -> dict[str, tuple[str, str]]:
    rows = json.loads((folder / "out" / "gpu_check.json").read_text())["steps"]
    return {row["step"]: (row["status"], row["words"]) for row in rows}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "gpu_check_steps", raising=False)
    loader.exec_module(module)
    return module


def test_what_passed_differs_is_missing_failed_or_was_not_run_is_told_apart(tmp_path: Path) -> None:
    code, said = played(tmp_path)
    assert code == 3
    told = statuses(tmp_path)
    assert told["numerics"] == ("differs", "2 cases differ from float64 attention by more than rounding")
    assert told["bench"][0] == "missing"
    assert told["collectives"][0] == "missing"
    assert told["calibrate"] == ("not run", "there is no bench.json: see the step that writes it")
    assert told["allocator-default"] == ("passed", "2 traces, 1,600 operations, 7 out of memory")
    assert told["allocator-max_split_size_mb"] == (
        "not run",
        "error: no such device; --backend emulated needs no device",
    )
    assert told["allocator-expandable_segments"] == ("failed", "exit code 1: KeyError: 'a bug'")
    assert told["run-oom"] == ("passed", "")
    assert told["replay-oom"][0] == "failed"  # it said yes and left nothing
    assert "cannot be read" in told["replay-oom"][1]
    assert "2 traces, 1,600 operations" in (tmp_path / "out" / "gpu_check.txt").read_text() in said


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({**THERE, "missing": ["simpy>=4.1"]}, "simpy>=4.1; carry their wheels: WHEELS=FOLDER"),
        ({**THERE, "device": ""}, "torch 2.11.0+cu130 sees no CUDA device; BACKEND=cpu makes a dry run"),
    ],
)
def test_without_a_library_or_a_device_nothing_runs_and_it_is_said(
    tmp_path: Path, found: dict[str, Any], why: str
) -> None:
    code, said = played(tmp_path, found=found)
    assert code == 1
    assert why in said
    assert {status for status, _ in statuses(tmp_path).values()} == {"not run"}


def test_all_limits_together_are_under_eight_minutes(script: ModuleType) -> None:
    assert script.TOTAL_S < 480
    assert script.PATIENCE == 1
    assert sum(step.limit_s for step in script.steps("h200", Path("w"))) <= script.TOTAL_S


def test_all_reduces_are_timed_where_there_are_two_devices_and_are_in_the_profile(script: ModuleType) -> None:
    for devices in (1, 2, 8):
        made = {step.name: step for step in script.steps("h200", Path("w"), devices)}
        assert ("collectives" in made) == (devices > 1)
        assert made["calibrate"].argv.count("--from-bench") == min(devices, 2)
        assert made["bench"].argv[made["bench"].argv.index("--memory-gib") + 1] == "24"


def test_only_some_and_a_word_that_is_none(tmp_path: Path) -> None:
    assert played(tmp_path, "--only", "allocator-default")[0] == 0
    assert list(statuses(tmp_path)) == ["traces", "allocator-default"]
    code, said = played(tmp_path, "--only", "alocator")
    assert code == 2
    assert "--only with one of numerics, bench" in said
    assert played(tmp_path, "--list")[1].startswith("numerics")


def test_a_step_past_its_limit_is_ended_with_what_it_started(script: ModuleType, tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    starts = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True)"
    )
    said = ""
    for limit_s in (1, 10, 100):  # a busy machine may end it before it has started anything
        slow = script.Step("slow", limit_s, ("-c", f"{starts}; p.wait()"))
        assert script.do(slow, dict(os.environ), 100.0) == ("failed", f"ran past its limit of {limit_s} s")
        if said := (tmp_path / "slow.log").read_text():
            break
    pid = int(said.split()[0])
    assert until(lambda: not _alive(pid))
    assert script.do(slow, dict(os.environ), 0.5)[0] == "not run"


def _alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
