"""Every error that a user of the dashboard meets, in Chinese: each is provoked, and no English sentence is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.api import PRESETS, Scenario, devices, fit, models, parse_load, question_of, run, workload_presets
from hbmtwin.dashboard.app import in_chinese as told
from hbmtwin.dashboard.app import worker
from hbmtwin.dashboard.app.in_chinese import pattern_of
from hbmtwin.dashboard.app.knobs import settings_of_file
from hbmtwin.dashboard.app.run_notes import NOTES
from hbmtwin.dashboard.app.wrong_capacity import CAPACITY
from hbmtwin.dashboard.app.wrong_files import FILES
from hbmtwin.dashboard.app.wrong_policies import POLICIES
from hbmtwin.dashboard.app.wrong_server import SERVER
from hbmtwin.dashboard.app.wrong_settings import JOINED, SETTINGS
from hbmtwin.dashboard.app.wrong_traffic import TRAFFIC
from hbmtwin.sim.capacity.oom_point_draws import draws_of
from hbmtwin.sim.capacity.oom_point_loads import check_load
from hbmtwin.sim.capacity.plan_targets import target_of
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import known_keys
from hbmtwin.sim.scheduler import schedulers
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.sweep.grid import parse_grid
from hbmtwin.sim.sweep.sweep import points_of
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.formats.traces import FORMATS

from . import wrong_examples as wrong

OURS: tuple[Phrase, ...] = (*JOINED, *SETTINGS, *POLICIES, *SERVER, *TRAFFIC, *FILES, *CAPACITY)
"""In the order in which they are tried."""
NOT_PROVOKED = {
    "weights and activations do not fit once they are rounded ({oom}): raise gpu_memory_utilization": "by a few bytes",
    "one request of max_model_len {length} needs {need} blocks; the pool has {blocks} once its tensors are rounded: "
    "raise gpu_memory_utilization, or shorten max_model_len or block_size": "as the one with a null block",
    "this takes more than {most} GiB of memory: ask for fewer requests (workload.num_prompts)": "it would take them",
    "{count} runs wait already: try again when some have ended": "it would take so many; test_workers has it",
}
"""Sentences that no example here raises, and why."""


def lines_of(asked: Callable[..., object], *args: Any, **options: Any) -> list[str]:
    """What it raises, which it must, a line each, behind the words that say where."""
    try:
        asked(*args, **options)
    except Exception as error:
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        return f"{where}{error}".splitlines()
    raise AssertionError(f"nothing is wrong with {args} {options}")


def serve(*settings: str) -> None:
    """All that is looked at before a run begins."""
    scenario = Scenario.load(overrides=settings)
    ServerPlan(scenario)
    source_of(scenario)
    Twin(scenario)


def promise(slo: str) -> None:
    question_of(
        "users", slo=slo, survive=0.9, confidence=0.95, margin="1%", max_preemptions=None, seeds=None, explain=False
    )


def wrong_with(settings: tuple[str, ...]) -> list[str]:
    """Nothing where nothing is."""
    try:
        serve(*settings)
    except Exception as error:
        return str(error).splitlines()
    return []


def everything(folder: Path) -> Iterator[str]:
    """The lines of all examples."""
    for settings in wrong.SETTINGS:
        yield from lines_of(serve, *settings)
    for settings in wrong.RUNS:
        yield from lines_of(lambda *said: run(Scenario.load(overrides=said)), wrong.PLAIN, *settings)
    for upload in wrong.UPLOADS:
        yield from lines_of(settings_of_file, "mine.toml", upload if isinstance(upload, bytes) else upload.encode())
    for place, trace in enumerate(wrong.TRACES):
        path = folder / f"{place}.csv"
        path.write_bytes(trace if isinstance(trace, bytes) else trace.encode())
        yield from lines_of(serve, f"workload.trace={path}")
    for place, (key, kind, text) in enumerate(wrong.NAMED_FILES):
        path = folder / f"{place}.{kind}"
        path.write_text(text)
        yield from lines_of(serve, f"{key}={path}")
    yield from _of_files(folder)
    for grid in wrong.GRIDS:
        yield from lines_of(parse_grid, grid)
    yield from lines_of(parse_grid, ["workload.users=1"], ["workload.users=3"])
    yield from lines_of(points_of, None, parse_grid(["workload.users=1,2"]), overrides=[wrong.RATE])
    for load in (*wrong.LOADS, *wrong.MORE_LOADS):
        yield from lines_of(parse_load, load)
    for load, setting in wrong.UNFIT_LOADS:
        yield from lines_of(check_load, Scenario.load(overrides=[setting]), parse_load(load))
    for settings in wrong.WINDOWS_OF_A_TRACE:
        yield from lines_of(draws_of, Scenario.load(overrides=settings), 50)
    for slo in wrong.PROMISES:
        yield from lines_of(promise, slo)
    for target, setting in wrong.TARGETS:
        yield from lines_of(target_of, Scenario.load(overrides=[setting]), target)
    for options in wrong.FITS:
        yield from lines_of(fit, **{"model": "llama-2-7b", "device": "ascend-910b4", **options})
    yield from lines_of(Scenario.load, overrides=["kv_cache.preset=paged"], preset="doubling")
    yield from lines_of(worker.do, {"verb": "run", "settings": ["workload.num_prompts=1000000000"]}, print)


def _of_files(folder: Path) -> Iterator[str]:
    """What takes several keys, or more than a text."""
    (folder / "awq.json").write_text(wrong.AWQ)
    yield from lines_of(serve, f"model.name={folder / 'awq.json'}", "memory.activations=per_layer")
    yield from lines_of(serve, "workload.trace=zzzzzzzzzz")
    (folder / "folder.json").mkdir()
    yield from lines_of(serve, f"calibration.profile={folder / 'folder.json'}")
    (folder / "two.csv").write_text(f"{wrong.HEADER}\n1,1,3\n4000000000,1,1\n")
    yield from lines_of(serve, f"workload.trace={folder / 'two.csv'}", "workload.time_scale=1e9")
    (folder / "turns.csv").write_text(f"{wrong.HEADER},session,turn\n1,1,1,1,0\n2,1,1,1,1\n")
    yield from lines_of(serve, f"workload.trace={folder / 'turns.csv'}", "workload.samples=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where paths of settings begin: an error may list what lies there."""
    found = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        yield found


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[str]:
    return list(dict.fromkeys(everything(folder)))


@pytest.fixture(scope="module")
def bad_values(folder: Path) -> list[str]:
    """The lines of every key with every bad value."""
    found: dict[str, None] = {}
    for key in known_keys():
        for value in wrong.VALUES:
            short = () if key == "engine.max_model_len" else (wrong.SHORT,)
            found |= dict.fromkeys(wrong_with((f"{key}={value}", *short)))
    return list(found)


WORD = re.compile(r"[A-Za-z][\w+-]*", re.ASCII)
NAMES = {
    *("list", "requests", "lengths", "values", "shared", "users", "request_rate", "prompt", "session", "turn", "x"),
    *("start", "end", "memory", "time", "a", "b", "c", "over"),
}
"""English words that are names as well: of types, formats, columns and keys, and as people write examples."""


def words(text: str) -> set[str]:
    """Words outside of quotes, and of what has a slash, a dot or an underline."""
    plain = re.sub(r"\S*[/_.]\S*|--\S+|\{\w+\}", " ", told.QUOTED.sub(" ", text))
    return set(WORD.findall(plain))


def names() -> set[str]:
    """Words of keys, and what catalogs and presets have."""
    found = {part for key in known_keys() for part in re.split("[._]", key)}
    found |= {name for registry in (kv_policies, device_allocators, schedulers) for name in registry.names()}
    found |= {format.name for format in FORMATS} | {path.stem for path in wrong.TINY.iterdir()}
    return found | NAMES | {*PRESETS, *devices(), *models(), *workload_presets()}


ENGLISH = (
    {w for p in (*OURS, *NOTES) for w in words(p.en)} - {w for p in (*OURS, *NOTES) for w in words(p.zh)} - names()
)
"""What English sentences are made of and Chinese ones are not."""


def untold(lines: Iterable[str]) -> list[tuple[str, object]]:
    """Lines without a Chinese one, and those of which English is left."""
    found: list[tuple[str, object]] = []
    for line in lines:
        chinese = told.in_chinese(line)
        if chinese is None or (left := sorted(words(chinese) & ENGLISH)):
            found.append((line, chinese if chinese is None else left))
    return found


def test_no_key_has_a_bad_value_that_is_told_in_english(bad_values: list[str]) -> None:
    assert len(bad_values) > 2000
    assert untold(bad_values) == []


def test_every_example_is_told_in_chinese(lines: list[str]) -> None:
    assert untold(lines) == []


def used_in(lines: Iterable[str], phrases: tuple[Phrase, ...] = OURS) -> set[Phrase]:
    """Those of *phrases* that translate a piece of one of these lines."""
    marked = [pattern_of(phrase.en, f"⟦{at}⟧{phrase.zh}") for at, phrase in enumerate(phrases)]
    others = [pattern_of(en, zh) for en, zh in told._all() if Phrase(en, zh) not in phrases]
    found = (told._Reading([*marked, *others]).told(line, told.DEEPEST) or "" for line in lines)
    return {phrases[int(at)] for chinese in found for at in re.findall(r"⟦(\d+)⟧", chinese)}


def test_every_sentence_is_raised_by_an_example(lines: list[str], bad_values: list[str]) -> None:
    """One that is reworded where it is raised is found here: nothing raises its English any more."""
    used = used_in((*lines, *bad_values))
    assert [phrase.en for phrase in OURS if phrase not in used] == list(NOT_PROVOKED)


def test_a_sentence_that_nothing_raises_is_found(lines: list[str]) -> None:
    gone = Phrase("input has to be a whole number", "须为整数")
    assert gone not in used_in(lines, (*OURS, gone))


def test_a_chinese_sentence_has_the_names_of_its_english_one() -> None:
    """Others are the field's, or what is typed here in place of an option of the command line."""
    named = {"token", "KV", "workspace", "agent", "AllReduce", "UTF-8", "ShareGPT", "true", "false", "True", "False"}
    named |= {"seed", "vllm"}
    assert [(p.en, left) for p in OURS if (left := words(p.zh) - words(p.en) - named)] == []


REAL = "seed: input should be a valid integer, not 'x'"


@pytest.mark.parametrize(
    "reworded",
    [
        "seed: input has to be a valid integer, not 'x'",
        "seed: input should be a valid integer, but it is 'x'",
        "the seed: input should be a valid integer, not 'x'",
        "seed: input should be 1 or 2 or something else, not 'x'",
        "seed: needs a valid integer of any kind; use one of 1, 2",
    ],
)
def test_a_reworded_sentence_has_no_chinese_one(reworded: str) -> None:
    assert told.in_chinese(REAL) == "seed：须为整数，不能是 'x'"
    assert told.in_chinese(reworded) is None


def test_english_that_is_left_is_found() -> None:
    assert sorted(words("seed：须为整数，但 is not 'is a word'，见 not/here.is") & ENGLISH) == ["is", "not"]


def test_what_somebody_typed_stays_letter_by_letter() -> None:
    typed = "'did you mean, not {value}; 是否 %s {0}'"
    assert told.in_chinese(f"seed: input should be a valid integer, not {typed}") == f"seed：须为整数，不能是 {typed}"
    no_setting = "kv_cache.options: 'x: y' is no further setting of the policy 'paged'"
    assert told.in_chinese(no_setting) == "kv_cache.options：'x: y' 不是策略 'paged' 的其他设置"


MANY_WAYS = "a: x bad lines were skipped; the first: x is no number; "
"""Several phrases leave the same rest over: a line takes 2 s where it is read once for each way to it."""


@pytest.mark.parametrize(
    "piece", ["a: ", "x, not ", "; did you mean ", "{value}", "1 of 2 is 3; it must be ", MANY_WAYS]
)
def test_no_text_makes_it_slow(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: how often a line is held against a phrase."""
    asked = 0
    values = told.Pattern.values

    def counted(self: told.Pattern, line: str) -> dict[str, str] | None:
        nonlocal asked
        asked += 1
        return values(self, line)

    monkeypatch.setattr(told.Pattern, "values", counted)
    assert told.in_chinese((piece * told.LONGEST)[: told.LONGEST]) is None
    assert asked < 120 * len(told.PATTERNS)
    assert told.in_chinese(REAL + "x" * told.LONGEST) is None


def test_places_that_touch_are_refused() -> None:
    with pytest.raises(ValueError, match="touch"):
        pattern_of("{a}{b} is wrong", "{a}{b}")
