"""``hbmtwin validate run``: what it prints and writes, and what it says of directories that it cannot replay."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from hbmtwin.cli.app import app
from hbmtwin.kernels.attention.backends import BackendUnavailable, load
from hbmtwin.kernels.profile import Coefficient, Profile
from hbmtwin.sim.run import run as simulate
from hbmtwin.sim.scenario import Scenario
from hbmtwin.validation.emulated import EmulatorUnavailable, build, npu
from hbmtwin.validation.run_replay import backends as run_replay_backends
from hbmtwin.validation.run_replay.room import SHARE
from hbmtwin.validation.run_replay.steps import FEW_STEPS, ROUNDS, StepOptions

Shell = Callable[..., Any]
Recorded = Callable[..., Path]

SETTINGS = (
    "device.name=ascend-910b4",
    "results.memory_trace=true",
    "results.steps=true",
    "results.interval_s=0.01",
    "memory.activations=peak",
    "workload.request_rate=inf",
    "workload.num_prompts=3",
    "workload.prompt_tokens=20",
    "workload.output_tokens=4",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "engine.max_model_len=256",
)


@pytest.fixture
def emulated() -> None:
    try:
        build.build_emulator()
    except EmulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    def record(*settings: str, preset: str = "doubling") -> Path:
        out = tmp_path / "result"
        simulate(Scenario.load(preset=preset, overrides=[*SETTINGS, *settings])).save(out)
        return out

    return record


@pytest.fixture
def no_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes so far has read and planned everything."""

    def missing() -> None:
        raise EmulatorUnavailable("torch_npu is not installed; pip install 'hbmtwin[npu]'")

    monkeypatch.setattr(npu, "build_emulator", missing)


@pytest.mark.usefixtures("emulated")
def test_a_run_without_a_difference_on_screen_as_json_and_as_a_page(
    shell: Shell, recorded: Recorded, tmp_path: Path
) -> None:
    result = recorded()
    answer = shell("validate", "run", result, "--out", tmp_path / "replay")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(
        "no difference in memory\nrun: llama-2-7b on ascend-910b4, doubling, activations peak\n"
    )
    assert "memory, measured on torch_npu 2.13.0 on the emulated driver\n" in answer.out
    assert (
        "attention alone: The emulated driver computes nothing: no kernel was run and no time measured." in answer.out
    )
    found = json.loads((tmp_path / "replay" / "validate_run.json").read_text(encoding="utf-8"))
    assert found["agrees"] is True
    assert found["measured_on"] == {"memory": "torch_npu 2.13.0 on the emulated driver", "kernels": "", "steps": ""}
    assert {row["quantity"]: row["mape_percent"] for row in found["memory"]["errors"]} == {
        "reserved": 0.0,
        "allocated": 0.0,
        "requested": 0.0,
        "driver_free": 0.0,
    }
    assert found["memory"]["steps"]["predicted"] == found["memory"]["steps"]["measured"]
    page = (tmp_path / "replay" / "validate_run.html").read_text(encoding="utf-8")
    assert "no difference in memory" in page
    assert "https://" not in page.split("<script", 2)[1]
    assert (tmp_path / "replay" / "plotly.min.js").exists()
    assert json.loads(shell("validate", "run", result, "--json").out) == found, "nothing depends on the clock"


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("most", [1, 50, 230])
def test_a_part_of_a_trace_says_so(shell: Shell, recorded: Recorded, most: int) -> None:
    answer = shell("validate", "run", recorded(preset="pooled"), "--max-operations", most)
    assert answer.code == 0, answer.err
    assert f"not compared: Only the first {most} of " in answer.out


@pytest.mark.usefixtures("emulated")
def test_a_difference_exits_with_3(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    table = pq.read_table(result / "memory_trace.parquet")
    rows = table.to_pylist()
    kv = next(row for row in rows if row["tag"] == "kv")
    kv["size"] += 512
    pq.write_table(pa.Table.from_pylist(rows, table.schema), result / "memory_trace.parquet")
    answer = shell("validate", "run", result)
    assert answer.code == 3
    assert answer.out.startswith("memory differs from the real one\n")
    assert "  the run's books at step ends: " in answer.out


@pytest.mark.usefixtures("no_emulator")
def test_without_the_real_one_it_says_what_to_do_and_exits_with_1(shell: Shell, recorded: Recorded) -> None:
    answer = shell("validate", "run", recorded())
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "error: torch_npu is not installed; pip install 'hbmtwin[npu]'\n"


# -- directories that cannot be replayed -------------------------------------------------------------------------------


def test_what_is_no_result(shell: Shell, tmp_path: Path) -> None:
    answer = shell("validate", "run", "gone")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == ("error: gone: is not there; give the --out directory of an earlier `hbmtwin run`\n")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert shell("validate", "run", "file").err.startswith("error: file: is no directory; give the --out directory")
    (tmp_path / "empty").mkdir()
    answer = shell("validate", "run", "empty")
    assert answer.code == 1
    assert answer.err.startswith("error: empty: not a result directory, it holds no summary.json; give the --out")


@pytest.mark.parametrize("missing", ["steps", "memory_trace"])
def test_a_table_that_is_not_there_comes_with_the_command_that_makes_it(
    shell: Shell, recorded: Recorded, missing: str
) -> None:
    result = recorded()
    (result / f"{missing}.parquet").unlink()
    answer = shell("validate", "run", result)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        f"error: {result}: holds no {missing}.parquet, so there is nothing to replay; run it again with both tables: "
        f"hbmtwin run {result}/scenario.toml --set results.steps=true --set results.memory_trace=true --out {result}\n"
    )


def test_that_command_makes_them(shell: Shell, recorded: Recorded) -> None:
    result = recorded("results.memory_trace=false", "results.steps=false")
    said = shell("validate", "run", result).err
    command = said.partition("hbmtwin ")[2].split()
    assert shell(*command).code == 0
    assert (result / "steps.parquet").exists()
    assert (result / "memory_trace.parquet").exists()


@pytest.mark.parametrize("table", ["steps", "memory_trace", "timeline", "checkpoints"])
@pytest.mark.parametrize("damage", ["cut off", "empty", "text"])
def test_a_damaged_table(shell: Shell, recorded: Recorded, table: str, damage: str) -> None:
    result = recorded()
    path = result / f"{table}.parquet"
    whole = path.read_bytes()
    path.write_bytes({"cut off": whole[: len(whole) // 2], "empty": b"", "text": b"no table at all, only text"}[damage])
    answer = shell("validate", "run", result)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: {path}: is damaged (")
    assert "run it again with both tables: hbmtwin run " in answer.err
    assert answer.err.count("\n") == 1


def test_a_trace_without_an_operation(shell: Shell, recorded: Recorded) -> None:
    out = recorded()
    path = out / "memory_trace.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    answer = shell("validate", "run", str(out))
    assert answer.code == 1
    assert "memory_trace.parquet: holds no operation, so there is nothing to replay; run it again" in answer.err


def test_a_table_without_a_column(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    path = result / "memory_trace.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["step", "tag"]), path)
    answer = shell("validate", "run", result)
    assert answer.code == 1
    assert answer.err.startswith(
        f"error: {path}: lacks step, tag: written by an older release, or damaged; run it again"
    )


@pytest.mark.parametrize("table", ["steps", "memory_trace", "timeline", "checkpoints"])
def test_a_table_with_holes_or_of_text(shell: Shell, recorded: Recorded, table: str) -> None:
    result = recorded()
    path = result / f"{table}.parquet"
    column = {"steps": "new_tokens", "timeline": "weights", "checkpoints": "op_index"}.get(table, "size")
    whole = pq.read_table(path)
    rows = whole.to_pylist()
    rows[1][column] = None
    pq.write_table(pa.Table.from_pylist(rows, whole.schema), path)
    answer = shell("validate", "run", result)
    assert (answer.code, answer.out) == (1, "")
    assert f"is damaged (column {column} has empty cells); run it again" in answer.err
    pq.write_table(pa.Table.from_pylist([{**row, column: "x"} for row in rows]), path)
    assert f"is damaged (column {column} is of type string); run it again" in shell("validate", "run", result).err


def test_steps_whose_columns_do_not_fit_together(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    whole = pq.read_table(result / "steps.parquet")
    rows = whole.to_pylist()
    rows[0]["context_tokens"] = []
    pq.write_table(pa.Table.from_pylist(rows, whole.schema), result / "steps.parquet")
    assert "is damaged (a step has new tokens without context_tokens)" in shell("validate", "run", result).err


@pytest.mark.parametrize(
    ("column", "value"), [("new_tokens", [-1]), ("context_tokens", [-1]), ("repeat", 0), ("duration_ns", -1)]
)
def test_a_step_with_a_number_that_none_has(shell: Shell, recorded: Recorded, column: str, value: object) -> None:
    result = recorded()
    whole = pq.read_table(result / "steps.parquet")
    rows = whole.to_pylist()
    last = rows[-1]
    last[column] = value * len(last[column]) if isinstance(value, list) else value
    pq.write_table(pa.Table.from_pylist(rows, whole.schema), result / "steps.parquet")
    answer = shell("validate", "run", result, "--backend", "cpu")
    assert answer.code == 1
    assert f"steps.parquet: is damaged (a {column} is below " in answer.err


def test_another_release(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    summary = json.loads((result / "summary.json").read_text(encoding="utf-8"))
    (result / "summary.json").write_text(json.dumps({**summary, "version": "0.0.9"}), encoding="utf-8")
    answer = shell("validate", "run", result)
    assert answer.code == 1
    assert "was written by hbmtwin 0.0.9, and this is " in answer.err
    for broken in ({"oom": {"cause": "shortage"}}, {"peak_reserved_bytes": None}):
        (result / "summary.json").write_text(json.dumps({**summary, **broken}), encoding="utf-8")
        assert "written by an older release, or damaged" in shell("validate", "run", result).err
    del summary["basis"]
    (result / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert "summary.json: lacks basis: written by an older release" in shell("validate", "run", result).err
    (result / "summary.json").write_text("{", encoding="utf-8")
    assert "summary.json: is damaged (" in shell("validate", "run", result).err
    (result / "summary.json").write_text("[" * 100_000, encoding="utf-8")
    assert "summary.json: is damaged (nested too deeply)" in shell("validate", "run", result).err
    (result / "summary.json").write_text("[1]", encoding="utf-8")
    assert "summary.json: is no summary of a run" in shell("validate", "run", result).err


def test_a_scenario_that_is_gone_or_broken(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    (result / "scenario.toml").write_text("seed = 'x'\n", encoding="utf-8")
    answer = shell("validate", "run", result)
    assert answer.code == 1  # a damaged file, as the others of a result
    assert answer.err.startswith(f"error: {result}/scenario.toml: is damaged, or of another release (seed: ")
    (result / "scenario.toml").unlink()
    assert shell("validate", "run", result).err.startswith(f"error: {result}: holds no scenario.toml")


@pytest.mark.parametrize("backend", ["cpu", "emulated"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seed=7", "seed: 0 and 7)"),
        ("engine.gpu_memory_utilization=0.8", "kv_budget_bytes: "),
        ("device.name=ascend-910b2", "capacity_bytes: "),
        (
            "calibration.profile=other.json",
            "basis: 'default, uncalibrated' and 'calibrated on ascend-910b4, profile o'; ",
        ),
    ],
)
def test_a_scenario_of_another_run_is_told_by_the_summary(
    shell: Shell, recorded: Recorded, setting: str, told: str, backend: str
) -> None:
    result = recorded()
    step = Coefficient(9.0, 9.0, 9.0, 0.0, 9, "H")
    profile = Profile(name="o", device="ascend-910b4", made="m", source="s", coefficients={"step_overhead_ns": step})
    Path("other.json").write_text(profile.to_json(), encoding="utf-8")
    other = Scenario.load(preset="doubling", overrides=[*SETTINGS, setting])
    (result / "scenario.toml").write_text(other.to_toml(), encoding="utf-8")
    if setting.startswith("calibration"):
        (result / "other.json").write_text(profile.to_json(), encoding="utf-8")
    answer = shell("validate", "run", result, "--backend", backend)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: {result}: summary.json and scenario.toml are not of one run (")
    assert told in answer.err
    assert "put back the run's own scenario.toml and files, or run it again into another directory: " in answer.err
    assert answer.err.count("\n") == 1


def test_a_trace_with_an_operation_that_is_none(shell: Shell, recorded: Recorded) -> None:
    result = recorded()
    path = result / "memory_trace.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[5]["op"] = "mallok"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    answer = shell("validate", "run", result)
    assert answer.code == 1
    assert answer.err.startswith(f"error: {path}: row 5: unknown operation 'mallok'")


@pytest.mark.parametrize(
    ("preset", "settings", "told"),
    [
        ("caching", ("device.name=h100-80gb",), "the run is of h100-80gb, whose allocator has other rules"),
        ("caching", ("memory.general=direct", "memory.kv_arena=direct"), "memory.general = 'direct': no binary"),
    ],
)
def test_a_run_that_no_binary_can_do_exits_with_2(
    shell: Shell, recorded: Recorded, preset: str, settings: tuple[str, ...], told: str
) -> None:
    result = recorded(*settings, preset=preset)
    answer = shell("validate", "run", result)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {result}: {told}")


def test_out_that_is_a_file(shell: Shell, recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("", encoding="utf-8")
    answer = shell("validate", "run", recorded(), "--out", "page")
    assert answer.code == 2
    assert answer.err == "error: --out: page is no directory; name another one\n"


@pytest.mark.parametrize(
    ("out", "why"),
    [("/proc/no/replay", "No such file or directory"), ("page/below", "Not a directory"), ("x" * 300, "File name too")],
)
def test_an_out_that_cannot_be_is_told_before_anything_is_replayed(
    shell: Shell, tmp_path: Path, out: str, why: str
) -> None:
    (tmp_path / "page").write_text("", encoding="utf-8")
    answer = shell("validate", "run", "gone", "--out", out)  # the run is not there, which would be told next
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: --out: {out} cannot be written: {why}")
    assert answer.err.endswith("; name a directory that you may write into\n")


def test_a_trial_of_out_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for out in ("new/deep/er", "there"):
        assert shell("validate", "run", "gone", "--out", out).err.startswith("error: gone: is not there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_kernels_need_no_trace_and_say_where_torch_is_missing(
    shell: Shell, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hbmtwin.kernels.attention.backends import BackendUnavailable

    def missing(*arguments: object, **settings: object) -> None:
        raise BackendUnavailable("cpu: No module named 'torch'; pip install 'hbmtwin[torch]'")

    monkeypatch.setattr(run_replay_backends, "replay_kernels", missing)
    result = recorded("results.memory_trace=false")
    answer = shell("validate", "run", result, "--backend", "cpu")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "error: cpu: No module named 'torch'; pip install 'hbmtwin[torch]'\n"


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_a_device_that_is_not_there(shell: Shell, recorded: Recorded, backend: str) -> None:
    result = recorded("device.name=h100-80gb") if backend == "cuda" else recorded()
    answer = shell("validate", "run", result, "--backend", backend)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.endswith("; --backend emulated needs no device\n")


# -- whole steps -------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def on_cpu(shell: Shell, tmp_path: Path) -> Path:
    """A run on this CPU, made from the command line alone."""
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    keys = (
        *("device.name=cpu", "calibration.profile=cpu-epyc-1-thread", "model.name=config.json", "results.steps=true"),
        *(
            "workload.num_prompts=6",
            "workload.prompt_tokens=30",
            "workload.output_tokens=8",
            "device.memory_bytes=4GiB",
        ),
    )
    answer = shell("run", *(word for key in keys for word in ("--set", key)), "--out", tmp_path / "cpu")
    assert answer.code == 0, answer.err
    return tmp_path / "cpu"


def test_a_cpus_run_is_held_to_a_decoder_on_it(shell: Shell, on_cpu: Path, tmp_path: Path) -> None:
    answer = shell("validate", "run", on_cpu, "--backend", "cpu", "--steps", 4, "--out", tmp_path / "V")
    assert answer.code == 0, answer.err
    assert answer.err.startswith("measuring 4 of ")
    assert " steps through all 3 layers, in 9 rounds: about 1 s, and none begins after 120 s" in answer.err
    assert answer.out.startswith("steps only: times are reported, not judged\n")
    assert "whole steps, measured on a decoder over cpu-flash on " in answer.out
    assert "  predicted for cpu: calibrated on cpu, profile cpu-epyc-1-thread; all 3 layers measured\n" in answer.out
    assert "  Attention's share of a step: predicted " in answer.out
    assert "attention alone: Attention was timed in its place, within whole steps.\n" in answer.out
    found = json.loads((tmp_path / "V" / "validate_run.json").read_text(encoding="utf-8"))["step_times"]
    assert found["same_device"] is True
    assert len(found["steps"]["measured_ns"]) == 4
    assert min(found["steps"]["measured_ns"]) > 10_000
    assert 0 < found["attention_share"]["measured"] < 1
    page = (tmp_path / "V" / "validate_run.html").read_text(encoding="utf-8")
    assert "Whole steps: predicted and measured" in page
    assert "through all 3 layers" in page


def test_fewer_layers_attention_alone_and_a_model_that_no_decoder_here_does(
    shell: Shell, on_cpu: Path, recorded: Recorded
) -> None:
    some = json.loads(
        shell("validate", "run", on_cpu, "--backend", "cpu", "--max-steps", 2, "--layers", 1, "--json").out
    )
    assert (some["step_times"]["layers_measured"], some["step_times"]["num_layers"]) == (1, 3)
    assert any("Measured 1 of 3 layers" in note for note in some["step_times"]["notes"])
    alone = shell("validate", "run", on_cpu, "--backend", "cpu", "--steps", 2, "--attention-only")
    assert alone.err == ""
    assert "whole steps: Not asked for: --attention-only.\n" in alone.out
    assert "attention, measured on cpu-flash on " in alone.out
    other = shell("validate", "run", recorded("results.memory_trace=false"), "--backend", "cpu", "--steps", 1)
    assert other.code == 0
    assert "whole steps: kv_cache.policy = 'contiguous' keeps KV in one piece a sequence, and the decoder" in other.out
    assert "attention, measured on cpu-flash on " in other.out


@pytest.mark.parametrize("wrong", [("--steps", 0), ("--layers", 0), ("--limit-s", 0), ("--threads", -1)])
def test_numbers_out_of_range_are_refused(shell: Shell, tmp_path: Path, wrong: tuple[str, int]) -> None:
    answer = shell("validate", "run", tmp_path, "--backend", "cpu", *wrong)
    assert answer.code == 2
    assert f"Invalid value for '{wrong[0]}'" in answer.err


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_exist_with_their_options_and_keys() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith(("hbmtwin run ", "hbmtwin validate run "))]
    assert len(lines) >= 5
    command: Any = typer.main.get_command(app)
    for line in lines:
        words = shlex.split(line)[1:]
        verb = command
        while hasattr(verb, "commands"):
            verb, words = verb.commands[words[0]], words[1:]
        options = {name for parameter in verb.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
        keys = [given for flag, given in pairwise(words) if flag == "--set"]
        assert Scenario.load(overrides=keys) is not None


def test_the_page_tells_the_defaults_of_whole_steps() -> None:
    assert f"`--steps` at most ({StepOptions().steps})" in PAGE
    assert f"`--limit-s` ({StepOptions().limit_s})" in PAGE
    assert f"{ROUNDS[0]}, {ROUNDS[1]} or {ROUNDS[2]} rounds" in PAGE
    assert f"fewer steps, down to {FEW_STEPS}," in PAGE
    assert f"{SHARE['cpu']:.0%} of the memory" in PAGE.replace(" %", "%")
    assert f"on a device {SHARE['cuda']:.0%}" in PAGE.replace(" %", "%")
