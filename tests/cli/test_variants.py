"""``compare --variant``: how it is written, what it runs, and that nothing runs where one of them is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.api import Result, ScenarioError
from hbmtwin.sim.variants import parse_variants, split_at_commas

Shell = Callable[..., Any]

CONF = "max_split_size_mb:64,roundup_power2_divisions:4"
FEW = ("--set", "workload.num_prompts=12", "--set", "session.turns=1")


# -- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a=1,b=2", ["a=1", "b=2"]),
        ("kv_cache.retention=forget(4096,1024),a=1", ["kv_cache.retention=forget(4096,1024)", "a=1"]),
        ('c="x:1,y:2",d=3', ['c="x:1,y:2"', "d=3"]),
        ("w={distribution='uniform',low=1,high=9},t=[1,[2,3]],z=1", ["w={distribution='uniform',low=1,high=9}"]),
        ("a='(',b=1", ["a='('", "b=1"]),
        ("a=(1,2", ["a=(1,2"]),
        ("", [""]),
    ],
)
def test_commas_count_outside_brackets_and_quotes_only(text: str, parts: list[str]) -> None:
    assert split_at_commas(text)[0][: len(parts)] == parts


@given(st.text(alphabet="ab=,()[]{}\"'", max_size=20))
def test_nothing_of_a_text_is_lost(text: str) -> None:
    assert ",".join(split_at_commas(text)[0]) == text


def test_a_variant_is_a_name_and_settings() -> None:
    assert parse_variants(["big:kv_cache.preset=doubling,kv_cache.initial_tokens=1024", "mine:", "x-1:seed=2"]) == {
        "big": ["kv_cache.preset=doubling", "kv_cache.initial_tokens=1024"],
        "mine": [],
        "x-1": ["seed=2"],
    }
    assert list(parse_variants(["n" * 64 + ":"])) == ["n" * 64]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["kv_cache.growth=static"], "write it as NAME:key=value,key=value"),
        (["big"], "--variant big: write it as NAME:key=value"),
        ([":a=1"], "the name '' must be a word"),
        (["two words:a=1"], "the name 'two words' must be a word"),
        (["../up:a=1"], "the name '../up' must be a word"),
        (["report.html:a=1"], "the name 'report.html' must be a word"),
        (["paged:a=1"], "'paged' is a preset; choose another name"),
        (["big:a=1", "big:b=1"], "there is a variant 'big' already"),
        (["Paged:a=1"], "'paged' is a preset; choose another name"),
        (["Big:a=1", "bIG:b=1"], "--variant bIG:b=1: there is a variant 'Big' already"),
        (["n" * 65 + ":a=1"], "--variant nnnnnnnnnnnnnnnnnnnn...: the name has 65 letters; at most 64"),
        (['a:memory.alloc_conf="x'], """the quote " is not closed; add another \""""),
        (["a:memory.alloc_conf='x,seed=1"], "the quote ' is not closed; add another '"),
        (["big:a=1,a=2"], "a is set twice"),
        (["big:a"], "'a' is no key=value; write it as NAME:key=value"),
        (["big:a=1,"], "'' is no key=value; a value with commas of its own stands in quotes"),
        (["big:memory.alloc_conf=x:1,y:2"], "'y:2' is no key=value; a value with commas of its own stands in quotes"),
    ],
)
def test_another_text_is_refused_with_its_cure(texts: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        parse_variants(texts)
    assert said in str(error.value)


# -- the verb ------------------------------------------------------------------------------------------------------


def test_a_variant_runs_beside_the_presets_and_carries_its_name_everywhere(shell: Shell, tmp_path: Path) -> None:
    given = (
        "--variant",
        f"wide:kv_cache.preset=doubling,kv_cache.initial_tokens=512,memory.alloc_conf='{CONF}'",
    )
    code, out, _ = shell("compare", *FEW, "--policies", "paged", *given, "--out", "c")
    assert code == 0
    assert out.startswith("paged and wide held.")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("wide ")] == ["wide", "wide"]
    assert "512" in out.partition("Settings that differ")[2]
    assert CONF in out
    stored = Result.load(tmp_path / "c" / "wide").scenario
    assert (stored.kv_cache.growth, stored.kv_cache.initial_tokens) == ("doubling", 512)
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert 'data-policy="wide"' in page
    assert "<th>kv_cache.\ninitial_tokens</th>" in page
    alone = json.loads(shell("run", "--json", *FEW, *(f"--set={x}" for x in parse_variants(given[1:])["wide"])).out)
    del alone["wall_s"]
    assert Result.load(tmp_path / "c" / "wide").summary == alone


def test_without_policies_the_presets_are_compared_too(shell: Shell) -> None:
    compared = json.loads(shell("compare", "--json", *FEW, "--variant", "b16:kv_cache.block_size=16").out)
    assert list(compared) == ["caching", "pooled", "doubling", "paged", "b16"]


@pytest.mark.parametrize("none", ["none", ""])
def test_variants_alone_start_from_the_file_with_its_own_settings(shell: Shell, tmp_path: Path, none: str) -> None:
    (tmp_path / "mine.toml").write_text(
        'seed = 5\n[kv_cache]\npreset = "doubling"\n[engine]\nmax_model_len = 512\n', encoding="utf-8"
    )
    given = (
        "--variant",
        "mine:",
        "--variant",
        "one:kv_cache.growth=static",
        "--variant",
        "two:engine.max_model_len=256",
    )
    answer = shell("compare", "mine.toml", "--json", *FEW, "--policies", none, *given)
    assert list(json.loads(answer.out)) == ["mine", "one", "two"]
    mine, one, two = (Result.load(tmp_path / "hbmtwin-compare" / n).scenario for n in ("mine", "one", "two"))
    assert (mine.seed, mine.kv_cache.preset, mine.engine.max_model_len) == (5, "doubling", 512)
    assert (one.kv_cache.growth, one.kv_cache.tensors, one.kv_cache.preset) == ("static", "merged", None)
    assert two.engine.max_model_len == 256


def test_notes_of_one_variant_name_it(shell: Shell) -> None:
    given = ("--policies", "none", "--variant", "a:kv_cache.growth=static", "--variant", "b:")
    assert "note: a: kv_cache.growth does not concern the policy 'paged'" in shell("compare", *FEW, *given).err


@pytest.mark.parametrize(
    ("variant", "code", "said"),
    [
        ("x:kv_cache.grwth=static", 2, "variant 'x': kv_cache.grwth: unknown key; did you mean 'kv_cache.growth'?"),
        ("x:kv_cache.policy=contiguous,memory.oom=preempt", 2, "variant 'x': memory.oom: 'preempt' is illegal"),
        ("x:device.name=ascend-911", 2, "variant 'x': unknown device 'ascend-911'"),
        ("x:memory.alloc_conf=nonsense", 2, "variant 'x': memory.alloc_conf: "),
        ("x:model.name=llama-2-70b", 3, "variant 'x': no memory is left for KV"),
        ("x:workload.trace=gone.csv", 1, "variant 'x': "),
        ("caching:", 2, "'caching' is a preset"),
    ],
)
def test_a_bad_variant_is_named_before_anything_runs(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, code: int, said: str
) -> None:
    monkeypatch.setattr("hbmtwin.sim.experiment.in_processes", None)
    answer = shell("compare", *FEW, "--variant", "fine:kv_cache.block_size=16", "--variant", variant)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("error: ")
    assert said in answer.err
    assert list(tmp_path.iterdir()) == []


def test_none_of_both_is_nothing_to_compare(shell: Shell) -> None:
    answer = shell("compare", "--policies", "none")
    assert (answer.code, answer.out) == (2, "")
    assert "nothing to compare" in answer.err


def test_help_tells_how_to_write_one(shell: Shell) -> None:
    out = " ".join(shell("compare", "--help").out.split())
    assert "--variant" in out
    assert "none: only the variants" in out
