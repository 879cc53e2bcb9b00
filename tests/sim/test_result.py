"""The result directory: all of it or nothing, the same bytes every time, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from hbmtwin.sim.result import Result, ResultError, check_replaceable, write_directory
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import PRESETS, Scenario

FILES = {
    "summary.json",
    "scenario.toml",
    "timeline.parquet",
    "kv_monitor.parquet",
    "requests.parquet",
    "checkpoints.parquet",
    "steps.parquet",
    "memory_trace.parquet",
}


def run(*overrides: str, preset: str = "paged", seed: int = 0) -> Result:
    base = [
        "engine.max_model_len=512",
        "workload.request_rate=20",
        "workload.num_prompts=6",
        "workload.prompt_tokens={distribution='uniform',low=1,high=200}",
        "workload.output_tokens={distribution='uniform',low=1,high=30}",
        "kv_cache.tensors=merged",
        "session.turns=1",
        "results.steps=true",
        "results.memory_trace=true",
        "results.interval_s=0.05",
    ]
    return Twin(Scenario.load(preset=preset, overrides=[*base, *overrides], seed=seed)).run()


@pytest.fixture(scope="module")
def result() -> Result:
    return run()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_result_is_read_back_as_it_was(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == FILES
    again = Result.load(tmp_path / "out")
    assert again.scenario == result.scenario
    assert again.summary == result.summary
    for name in ("timeline", "requests", "checkpoints", "memory_trace"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(result, name))
    assert again.steps is not None
    assert result.steps is not None
    for name, column in again.steps.items():
        assert [list(x) if hasattr(x, "__len__") else x for x in column] == list(result.steps[name])


def test_what_was_not_asked_for_is_not_there(tmp_path: Path) -> None:
    plain = run("results.steps=false", "results.memory_trace=false")
    plain.save(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == FILES - {"steps.parquet", "memory_trace.parquet"}
    again = Result.load(tmp_path / "out")
    assert (again.steps, again.memory_trace, again.oom) == (None, None, None)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_scenario_and_seed_give_the_same_bytes_and_another_seed_others(preset: str, tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        run(preset=preset, seed=seed).save(tmp_path / name)
    first, second, other = (contents(tmp_path / name) for name in ("first", "second", "other"))
    assert set(first) == FILES
    assert first == second
    same = {name for name in FILES if first[name] == other[name]}
    assert same == ({"memory_trace.parquet"} if preset == "paged" else set())  # a pool is taken once, whatever comes


def test_the_types_of_steps_do_not_depend_on_what_happened(tmp_path: Path) -> None:
    run("engine.max_model_len=2", "kv_cache.block_size=1").save(tmp_path / "nothing")
    run().save(tmp_path / "something")
    nothing, something = (
        pd.read_parquet(tmp_path / name / "steps.parquet", dtype_backend="pyarrow") for name in ("nothing", "something")
    )
    assert len(nothing) == 0 < len(something)
    assert nothing.dtypes.equals(something.dtypes)


def test_no_wall_time_is_stored(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [key for key in summary if "wall" in key] == []
    for name in ("timeline", "requests", "steps", "memory_trace"):
        frame = getattr(result, name)
        for column in [c for c in frame.columns if c.endswith("_ns")]:
            assert frame[column].explode().max() < 100 * 10**9, f"{name}.{column} is no simulated time"


# -- all or nothing ------------------------------------------------------------------------------------------------


def test_a_failure_in_the_middle_leaves_nothing(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full_disk)
    with pytest.raises(ResultError, match="No space left on device"):
        result.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_in_the_middle_leaves_the_older_result(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.save(tmp_path / "out")
    before = contents(tmp_path / "out")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(seed=9).save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert contents(tmp_path / "out") == before


def test_an_older_result_comes_back_if_the_new_one_cannot_take_its_place(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.save(tmp_path / "out")
    before = contents(tmp_path / "out")
    rename = Path.rename

    def refuses_the_new(self: Path, target: Path) -> Path:
        if target == tmp_path / "out" and not self.name.endswith(".old"):
            raise OSError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuses_the_new)
    with pytest.raises(ResultError, match="Operation not permitted"):
        result.save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert contents(tmp_path / "out") == before


def test_a_result_replaces_an_older_one_wholly(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    run("results.steps=false", seed=5).save(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == FILES - {"steps.parquet"}
    assert Result.load(tmp_path / "out").scenario.seed == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_somebody_else_is_refused_and_left_alone(result: Result, tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"cat")
    plain = tmp_path / "file"
    plain.write_text("text")
    for place in (foreign, plain):
        with pytest.raises(ResultError, match="is not a result of hbmtwin; choose another --out or remove it"):
            result.save(place)
        with pytest.raises(ResultError):
            check_replaceable(place)
    assert (foreign / "cat.jpg").read_bytes() == b"cat"
    assert plain.read_text() == "text"
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "file"}


def test_a_lone_scenario_is_not_taken_for_a_result(result: Result, tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text("seed = 1\n")
    with pytest.raises(ResultError, match="is not a result of hbmtwin"):
        result.save(tmp_path)
    assert (tmp_path / "scenario.toml").read_text() == "seed = 1\n"


@pytest.mark.parametrize("name", ["report.html", "summary.json"])
def test_files_of_somebody_else_beside_ours_are_not_deleted(name: str, result: Result, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / name).write_text("{}")
    (mixed / "thesis.tex").write_text("years of work")
    with pytest.raises(ResultError, match="is not a result of hbmtwin"):
        result.save(mixed)
    assert (mixed / "thesis.tex").read_text() == "years of work"


def test_an_empty_directory_and_one_whose_parents_are_missing_will_do(result: Result, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result.save(tmp_path / "empty")
    result.save(tmp_path / "a" / "b")
    assert set(contents(tmp_path / "empty")) == set(contents(tmp_path / "a" / "b")) == FILES


def test_a_comparison_replaces_a_comparison(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "report.html").write_text("report")
        for name in PRESETS:
            (directory / name).mkdir()

    write_directory(tmp_path / "out", write)
    write_directory(tmp_path / "out", write)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", *PRESETS}


# -- reading -------------------------------------------------------------------------------------------------------


def test_a_result_of_an_older_release_says_what_it_lacks(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    del summary["goodput"], summary["prefix_cache"]
    (tmp_path / "out" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(
        ResultError, match="lacks goodput, prefix_cache: written by an older release, or damaged; run it again"
    ):
        Result.load(tmp_path / "out")


@pytest.mark.parametrize(("table", "column"), [("requests", "priority"), ("timeline", "queried_tokens")])
def test_a_table_of_an_older_release_says_what_it_lacks(
    table: str, column: str, result: Result, tmp_path: Path
) -> None:
    result.save(tmp_path / "out")
    path = tmp_path / "out" / f"{table}.parquet"
    pd.read_parquet(path).drop(columns=column).to_parquet(path, index=False)
    with pytest.raises(ResultError, match=rf"{table}\.parquet lacks {column}: written by an older release"):
        Result.load(tmp_path / "out")


@pytest.mark.parametrize("damage", ["summary.json", "scenario.toml", "timeline.parquet"])
def test_a_damaged_result_is_named(damage: str, result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    (tmp_path / "out" / damage).write_bytes(b"{]")
    with pytest.raises(ResultError, match="out: not a result directory of hbmtwin: "):
        Result.load(tmp_path / "out")
    (tmp_path / "out" / damage).unlink()
    with pytest.raises(ResultError, match="out: not a result directory of hbmtwin: "):
        Result.load(tmp_path / "out")
