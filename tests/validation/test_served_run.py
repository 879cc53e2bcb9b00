"""Reading a recorded run or a pasted log, counting its steps, and finding a device's figures in a log that was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hbmtwin.kernels.profile import model_quantities, outside, parse_profile
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim.catalog import device, model
from hbmtwin.validation.served_runs import fit as served_run_fit
from hbmtwin.validation.served_runs.fit import fit_engine_log, fit_intervals
from hbmtwin.validation.served_runs.log import read_engine_log
from hbmtwin.validation.served_runs.replay import (
    Times,
    curve_errors,
    from_second,
    judged,
    measured_curves,
    measured_times,
    replay_run,
    scenario_of,
    simulated_curves,
    simulated_generation,
    simulated_times,
)
from hbmtwin.validation.served_runs.served_run import (
    Interval,
    ServedRun,
    ServedRunError,
    ServerSettings,
    read_served_run,
    read_time_series,
)
from hbmtwin.validation.served_runs.steps import steps_of

SETTINGS = ServerSettings(tensor_parallel_size=2, max_num_seqs=128, max_num_batched_tokens=2048)
CARD = device("rtx-pro-6000-server")
HEAD = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n"
META = {
    "model": "Qwen/Qwen3-32B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 1, "max_num_seqs": 64},
    "num_requests": 150,
}
LINE = (
    "(APIServer pid=7) INFO 11-30 05:12:{at:02d} [loggers.py:259] Engine 00{engine}: Avg prompt throughput: {p} "
    "tokens/s, Avg generation throughput: {g} tokens/s, Running: {r} reqs, Waiting: {w} reqs, GPU KV cache usage: "
    "{kv}%, Prefix cache hit rate: 0.0%\n"
)


def write(folder: Path, *, meta: object = META, series: str = HEAD + "1,10,20,3,0,0\n") -> Path:
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    (folder / "timeseries.csv").write_text(series, encoding="utf-8")
    return folder


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_run_is_read_with_what_bounds_its_steps(tmp_path: Path) -> None:
    run = read_served_run(write(tmp_path, series=HEAD + "1.0,3489,3,4,0,0\n3.0,100,50,4,1,25\n"))
    assert (run.model, run.version) == ("Qwen/Qwen3-32B", "0.19.0")
    assert run.settings == ServerSettings(tensor_parallel_size=2, max_num_seqs=64, num_requests=150)
    assert run.intervals == (Interval(1, 1, 3489, 3, 4, 0, 0), Interval(3, 2, 200, 100, 4, 1, 0.25))


@pytest.mark.parametrize(
    ("version", "told", "planned_ahead"),
    [
        ("0.19.0", None, True),
        ("0.14.0rc1", None, True),
        ("0.13.0", None, False),
        ("0.9.2", None, False),
        ("main", None, True),
        ("0.19.0", False, False),
        ("0.13.0", True, True),
    ],
)
def test_a_release_plans_ahead_by_default_or_as_it_was_told(
    tmp_path: Path, version: str, told: bool | None, planned_ahead: bool
) -> None:
    kwargs = META["engine_kwargs"] | {"async_scheduling": told}
    run = read_served_run(write(tmp_path, meta={**META, "vllm_version": version, "engine_kwargs": kwargs}))
    assert run.settings.async_scheduling == planned_ahead
    assert scenario_of(run, "rtx-pro-6000-server").scheduler.async_scheduling == planned_ahead


@pytest.mark.parametrize(
    ("series", "said"),
    [
        (HEAD, "no rows"),
        (HEAD + "1,1,1,1,1,0\n1,1,1,1,1,0\n", "line 3: t is 1, and 1 before"),
        (HEAD + "1,x,1,1,1,0\n", "line 2: prompt_throughput: a number is wanted, not 'x'"),
        (HEAD + "1,1,nan,1,1,0\n", "line 2: gen_throughput"),
        (HEAD + "1,1,1,-4,1,0\n", "line 2: running: -4"),
        (HEAD + "1,1,1,4,1,much\n", "line 2: kv_cache_pct: a number is wanted, not 'much'"),
        ("t,running\n1,4\n", "line 2: prompt_throughput: a number is wanted, not None"),
    ],
)
def test_a_series_that_is_none_is_refused_by_line_and_column(tmp_path: Path, series: str, said: str) -> None:
    write(tmp_path, series=series)
    with pytest.raises(ServedRunError, match=said):
        read_time_series(tmp_path / "timeseries.csv")


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ([], "engine_kwargs: missing"),
        ({**META, "model": 4}, "model: a text is wanted, not 4"),
        ({**META, "engine_kwargs": {"max_num_seqs": "64"}}, "max_num_seqs: a whole number is wanted"),
        ({**META, "engine_kwargs": {"max_num_seqs": 0}}, "max_num_seqs must be at least 1"),
        ({**META, "engine_kwargs": {"data_parallel_size": 2}}, "give the log of one engine"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_key(tmp_path: Path, meta: object, said: str) -> None:
    with pytest.raises(ServedRunError, match=said):
        read_served_run(write(tmp_path, meta=meta))


def test_a_folder_without_a_run_says_what_a_run_has(tmp_path: Path) -> None:
    with pytest.raises(ServedRunError, match=r"meta.json.*timeseries.csv and requests.jsonl"):
        read_served_run(tmp_path)


def test_a_pasted_log_gives_the_same_intervals(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 11-30 05:10:00 [kv_cache_utils.py:1319] GPU KV cache size: 400,000 tokens\n"
        + LINE.format(at=10, engine=0, p="862.3", g="2,176.0", r=128, w=172, kv="37.5")
        + "INFO:     127.0.0.1:5 - POST /v1/completions 200 OK\n"
        + LINE.format(at=20, engine=0, p="0.0", g="2304.0", r=127, w=171, kv="40.0"),
        encoding="utf-8",
    )
    intervals, kv_tokens = read_engine_log(log)
    assert kv_tokens == 400_000
    assert intervals == (Interval(10, 10, 8623, 21760, 128, 172, 0.375), Interval(20, 10, 0, 23040, 127, 171, 0.4))


def test_engines_of_one_server_are_added_up(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        LINE.format(at=10, engine=0, p=100, g=10, r=3, w=0, kv="10.0")
        + LINE.format(at=10, engine=1, p=50, g=20, r=4, w=1, kv="30.0"),
        encoding="utf-8",
    )
    assert read_engine_log(log, engines=2)[0] == (Interval(10, 10, 1500, 300, 7, 1, 0.2),)


def test_a_log_without_such_lines_says_which_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("nothing here\n", encoding="utf-8")
    with pytest.raises(ServedRunError, match="Avg prompt throughput"):
        fit_engine_log(tmp_path / "x.log", model("qwen3-32b"), CARD)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_of_a_full_server_and_of_one_that_fills() -> None:
    """Worked by hand: 17 steps of 128; then (5000 + 120) / 2048 = 2.5 steps, all with prompts, of 48 decodes each."""
    full = replace(SETTINGS, num_requests=None)
    rise = [Interval(1, 1, 6400, 8, 8, 0), Interval(2, 1, 96_000, 512, 128, 0)]
    found = steps_of([*rise, Interval(3, 1, 0, 2176, 128, 9), Interval(4, 1, 5000, 120, 128, 9)], full)
    assert found[0] is None  # nobody ran when it began
    assert found[2] is not None
    assert found[3] is not None
    assert (found[2].steps, found[2].prefills, found[2].decode_count) == (17, 0, 128)
    assert found[2].decode_batch().decode_count == 128
    assert (found[3].steps, found[3].prefills, found[3].prompt_tokens) == (2.5, 2.5, 2000)
    assert found[3].mixed_batch().tokens == 2000 + 48


def test_the_cache_holds_what_came_in_less_what_ended() -> None:
    """Two requests of 100 + 50 of which one ends; and where the usage is logged, that."""
    one = [Interval(1, 1, 200, 60, 2, 0), Interval(2, 1, 0, 40, 1, 0), Interval(3, 1, 0, 0, 0, 0)]
    found = steps_of(one, replace(SETTINGS, num_requests=2))
    assert found[1] is not None
    assert found[1].kv_tokens == ((200 + 60) + (300 - 150)) / 2
    logged = [i._replace(kv_usage=0.5) for i in one]
    found = steps_of(logged, replace(SETTINGS, num_requests=2, kv_tokens=1000))
    assert found[1] is not None
    assert found[1].kv_tokens == 500


def test_lines_of_an_idle_server_change_nothing() -> None:
    """Before the first request, and between two loads, of which the second begins with an empty cache."""
    load = [Interval(1, 1, 800, 8, 8, 0), Interval(2, 1, 800, 100, 16, 0), Interval(3, 1, 0, 1600, 16, 0)]
    alone = steps_of(load, SETTINGS)
    idle = Interval(0, 1, 0, 0, 0, 0)
    assert steps_of([idle, idle, *load], SETTINGS)[2:] == alone
    assert steps_of([*load, idle, *load], SETTINGS)[4:] == alone


def test_a_log_that_tells_no_lengths_or_no_work_is_refused() -> None:
    with pytest.raises(ServedRunError, match="does not begin with a server that fills"):
        steps_of([Interval(1, 1, 0, 2176, 128, 9), Interval(2, 1, 0, 2176, 128, 9)], SETTINGS)
    with pytest.raises(ServedRunError, match="no interval in which requests ran"):
        steps_of([Interval(1, 1, 100, 2, 1, 0)], SETTINGS)


# -- a log that was made from known figures ---------------------------------------------------------------------------

PLANTED = replace(CARD, weight_bandwidth_efficiency=0.9, prefill_flops_efficiency=0.45, kv_bandwidth_efficiency=0.55)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    """150 requests at 8 a second on a card whose figures are known, as its log would have them."""
    folder = write(tmp_path_factory.mktemp("made"))
    draw = np.random.default_rng(5)
    rows = [
        {
            "input_toks": int(draw.integers(100, 1600)),
            "output_toks": int(draw.integers(200, 700)),
            "arrival_time": 1e9 + at / 8,
        }
        for at in range(150)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bare = read_served_run(folder)
    result = replay_run(bare, PLANTED)
    ends = np.arange(1.0, result.requests["end_ns"].max() / 1e9 + 2)
    first = result.requests["first_token_ns"].to_numpy(float) / 1e9
    prompts, _ = np.histogram(first, np.concatenate([[0.0], ends]), weights=result.requests["prompt_tokens"])
    counts = simulated_curves(result, ends)
    columns = (ends, prompts, simulated_generation(result, ends), counts.running, counts.waiting, 0 * ends)
    np.savetxt(folder / "timeseries.csv", np.array(columns).T, "%.6f", ",", header=HEAD.strip(), comments="")
    return read_served_run(folder)


def off(fitted: DeviceSpec, made: ServedRun) -> float:
    """How far a run on the fitted card is from the one that it was made of."""
    ours, theirs = (simulated_times(replay_run(made, d)).quantities() for d in (fitted, PLANTED))
    return max(abs(ours[key] / theirs[key] - 1) for key in theirs)


def test_a_fit_finds_the_figures_that_made_a_log(made: ServedRun) -> None:
    fit = fit_intervals(made.intervals, model(made.model), CARD, made.settings)
    assert off(CARD, made) > 0.1
    assert off(fit.device, made) < 0.03
    assert fit.figures["weight_bandwidth_efficiency"].value == pytest.approx(0.9, rel=0.06)
    assert fit.cross_validated_percent < 5
    assert not fit.figures["step_overhead_ns"].told  # no log can tell it from streaming the weights


@pytest.mark.parametrize(
    "wrong",
    [
        lambda i: i._replace(seconds=i.seconds * 1.2),
        lambda i: i._replace(running=i.running * 1.3),
        lambda i: i._replace(prompt_tokens=i.prompt_tokens * 0.6),
    ],
    ids=["clock", "running", "prompts"],
)
def test_a_log_that_is_misread_is_noticed(made: ServedRun, wrong: Callable[[Interval], Interval]) -> None:
    """Each of these mistakes would move the fitted card's run away from the one that the log was made of."""
    fit = fit_intervals([wrong(i) for i in made.intervals], model(made.model), CARD, made.settings)
    assert off(fit.device, made) > 0.06


def test_the_profile_has_all_figures_of_the_fit_and_where_they_hold(made: ServedRun) -> None:
    shape = model(made.model)
    profile = fit_engine_log(made.directory, shape, CARD, name="made", made="today")
    assert parse_profile(profile.to_json().encode(), "here") == profile
    assert set(profile.coefficients) == set(served_run_fit.FITTED)
    fitted = profile.applied_to(CARD)
    assert fitted.weight_bandwidth_efficiency == profile.coefficients["weight_bandwidth_efficiency"].value
    assert not outside(profile, model_quantities(shape))
    assert "hidden_size" in outside(profile, model_quantities(model("qwen3-30b-a3b")))
    assert outside(profile, {"decode_count": 500, "step_tokens": 1000}) == ("decode_count",)


# -- judging ----------------------------------------------------------------------------------------------------------


def times(first: float, each: float) -> Times:
    arrival = np.array([0.0, 1.0])
    return Times(arrival, arrival + first, arrival + first + 10 * each, np.array([11.0, 11.0]))


def test_errors_are_relative_and_signed_and_held_to_their_aims() -> None:
    found = judged(times(2.0, 0.1), times(2.3, 0.1))
    assert found["ttft_p50_s"].error == pytest.approx(0.15)
    assert {key: one.met for key, one in found.items()} == {
        key: key not in ("ttft_p50_s", "makespan_s") for key in found
    }
    assert found["makespan_s"].error == pytest.approx(0.3 / 4.0)


def test_only_what_ended_later_counts_after_a_second() -> None:
    assert list(from_second(times(2.0, 0.1), 3.5).arrival) == [1.0]


def test_clocks_are_tied_by_the_first_request(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    row = {"output_toks": 3, "arrival_time": 1e9, "queued_ts": 50.0, "first_token_ts": 52.0, "last_token_ts": 54.0}
    later = {**row, "arrival_time": 1e9 + 1, "queued_ts": 51.5, "first_token_ts": 53.0, "last_token_ts": 57.0}
    log.write_text(json.dumps(later) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    found = measured_times(log)
    assert (found.first_token - found.arrival).tolist() == [2.0, 2.0]
    assert found.quantities()["makespan_s"] == 7.0
    log.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ServedRunError, match="line 1: KeyError"):
        measured_times(log)


def test_curves_are_apart_by_a_share_of_the_highest() -> None:
    measured = measured_curves([Interval(1, 1, 0, 0, 10, 0), Interval(2, 1, 0, 0, 20, 0)])
    assert curve_errors(measured, measured._replace(running=measured.running + 4)) == {"running": 0.2, "waiting": 0.0}
