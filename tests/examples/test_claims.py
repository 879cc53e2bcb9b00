"""The claims of the write-ups: each is judged anew, to its last figure, and docs/claims.md is what the program writes.

One experiment a test, so that the workers of ``pytest -n`` share them; ``python examples/claims`` runs all at once.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hbmtwin
from hbmtwin import Scenario, kv_layout
from hbmtwin.allocators.contract import CountsInBlocks
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import KVLayout, KVUsage
from hbmtwin.sim.run import Twin

from ..patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "examples" / "claims"
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
TRACES = ROOT.parent / "shared" / "traces"
RECORDED = (
    "azure2023_conv.csv.gz",
    "mooncake_fast25_conversation.jsonl.gz",
    "vidur_arxiv_summarization_lengths.csv.gz",
)

VERDICTS = {
    "A1": "holds in part",
    "A2": "holds",
    "A3": "holds",
    "A4": "holds",
    "A5": "holds",
    "A6": "holds",
    "A7": "holds",
    "A8": "wrong",
    "A9": "wrong",
    "B1": "holds in part",
    "B2": "holds",
    "B3": "wrong",
    "B4": "holds in part",
    "B5": "holds",
    "B6": "holds",
    "B7": "holds",
    "C1": "holds in part",
    "C2": "holds in part",
    "C3": "holds",
    "C4": "holds in part",
    "C5": "holds in part",
    "C6": "wrong",
    "C7": "holds in part",
    "C8": "holds in part",
    "C9": "holds in part",
    "C10": "wrong",
    "C11": "holds in part",
    "C12": "wrong",
    "C13": "holds",
}
"""All that the write-ups state, A1 to A9, B1 to B7 and C1 to C13, in the order of the page."""
EXACT = {
    "A2": "a layer: a token 16 KiB, 1,024 tokens 16 MiB, 4,096 tokens 64 MiB, 16,384 tokens 256 MiB; 4,096 tokens "
    "over 32 layers 2 GiB",
    "A3": "4.5, 9.5, 99.5, 499.5 MiB, and 5, 10, 100, 500 once",
    "A9": "64 MiB a layer for the prompt, 8 MiB a layer for the 512 decoded tokens",
    "B2": "250 tokens, 430 tokens;",
    "B7": "5,120 MiB, 8 (GQA, the model's own) 640 MiB, 1 (MQA) 80 MiB: 8 and 64 times smaller",
    "C1": "12 GiB of KV, with the 128th generated token 24, and 36 while old and new buffers live",
    "C2": "5,368,709,120 bytes, 20 GiB for batch 4; with the model's 8 KV heads 671,088,640 bytes, 0.625 GiB",
    "C10": "25.0 % at INT8, 37.5 % at INT4",
}
"""Figures that are worked out by hand."""

needs_traces = pytest.mark.skipif(
    not all((TRACES / name).exists() for name in RECORDED), reason="the recorded traces are not beside the repository"
)


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    """``examples/claims/__main__.py`` as a module, beside the modules that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CLAIMS)
        spec = importlib.util.spec_from_file_location("claims_program", CLAIMS / "__main__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command that docs/claims.md names."""
    command = [sys.executable, str(CLAIMS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def on_page(program: ModuleType) -> dict[str, Any]:
    """What the page says that was found: cells of its table and paragraphs below, each in one line."""
    blocks = [" ".join(block.splitlines()) for block in PAGE.split("\n\n") if block.startswith("**")]
    told = {block[2:].partition(":")[0]: block.partition(".** ")[2] for block in blocks}
    rows = [line[2:-2].split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][2:]
    return {id: program.Found(verdict, simulated, why, told.get(id, "")) for id, _, simulated, verdict, why in rows}


@pytest.mark.parametrize("id", [pytest.param(id, marks=needs_traces) if id == "C11" else id for id in VERDICTS])
def test_what_is_found_is_what_the_page_says(program: ModuleType, on_page: dict[str, Any], id: str) -> None:
    """With :func:`test_the_page_is_what_is_written_of_it` this holds the whole page to what the program prints."""
    found = program.find(id)
    assert found == on_page[id]
    assert found.verdict == VERDICTS[id]


def test_the_page_is_what_is_written_of_it(program: ModuleType, on_page: dict[str, Any]) -> None:
    assert program.page(on_page) == PAGE


def test_the_page_is_written_where_it_is_asked_for(
    program: ModuleType, on_page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "find_all", lambda ids: {id: on_page[id] for id in ids})
    assert program.main(["--write", str(tmp_path / "claims.md")]) == 0
    assert (tmp_path / "claims.md").read_text(encoding="utf-8") == PAGE
    assert [path.name for path in tmp_path.iterdir()] == ["claims.md"]


def test_a_page_that_cannot_be_written_is_told(
    program: ModuleType, on_page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_all", lambda ids: {id: on_page[id] for id in ids})
    assert program.main(["--write", "/nowhere/claims.md"]) == 1
    said = capsys.readouterr().err
    assert said == ("error: /nowhere/claims.md: No such file or directory; give a file in a directory that is there\n")
    assert program.main(["A2", "--write", "claims.md"]) == 2
    assert capsys.readouterr().err == "error: the page has all claims; leave out their names, or --write\n"


@pytest.mark.parametrize("id", EXACT)
def test_what_is_exact_is_what_comes_out_by_hand(on_page: dict[str, Any], id: str) -> None:
    assert EXACT[id] in on_page[id].simulated


@pytest.mark.parametrize("id", ["A2", "A3", "A9", "B2", "B7"])
def test_a_layer_more_in_the_layout_is_caught(program: ModuleType, monkeypatch: pytest.MonkeyPatch, id: str) -> None:
    """A planted fault: the arithmetic is held to the run, to the byte."""

    def with_a_layer_more(*shape: Any, **settings: Any) -> KVLayout:
        layout = kv_layout(*shape, **settings)
        return replace(layout, num_layers=layout.num_layers + 1)

    monkeypatch.setattr(sys.modules["claims_bytes"], "kv_layout", with_a_layer_more)
    with pytest.raises(AssertionError):
        program.find(id)


def test_the_step_in_which_buffers_double_by_hand(program: ModuleType) -> None:
    """Two buffers of 3 bytes become 6: 12 bytes of new ones beside 6 of old ones, if those go last."""
    columns = ["op", "id", "size", "tag", "owner", "step"]
    rows: list[tuple[str, int, int, str, int, int]] = [("malloc", i, 3, "kv", i, 0) for i in (1, 2)]
    rows += [("malloc", 9, 100, "activation", -1, 4), ("free", 9, 0, "", -1, 4)]
    rows += [("malloc", i, 6, "kv", i - 2, 5) for i in (3, 4)] + [("free", i, 0, "", -1, 5) for i in (1, 2)]
    copied = SimpleNamespace(memory_trace=pd.DataFrame(rows, columns=columns))
    assert sys.modules["claims_copies"].c1_jump(copied) == (5, 6, 18, 12)


def test_buffers_placed_afresh_by_hand(program: ModuleType) -> None:
    """Of 5 KiB two are taken, apart: the 3 free ones lie in one piece afterwards, and nothing larger fits."""
    fragments, kib = sys.modules["claims_fragments"], 1024
    pool = [fragments.Piece(what, kib) for what in ("kv", "free", "free", "kv", "free")]
    assert fragments.placed_afresh(pool, 3 * kib) == 3 * kib
    with pytest.raises(OutOfMemory):
        fragments.placed_afresh(pool, 3 * kib + 1)


def test_static_buffers_of_c13_by_hand(on_page: dict[str, Any]) -> None:
    """As many as the pool has whole buffers; between what is shown and what fails lie those that are not decided."""
    pool_bytes = hbmtwin.run(Scenario.load(CLAIMS / "c13.toml")).summary["kv_budget_bytes"]
    assert pool_bytes // (2048 * 512 * 1024) == 14
    assert "static buffers of 2,048, 14 and 14;" in on_page["C13"].simulated
    assert pool_bytes // (512 * 512 * 1024) == 56
    assert "static buffers of 512, 56 and 0;" in on_page["C13"].simulated


def test_an_answer_of_a_plan_in_a_few_characters(program: ModuleType) -> None:
    capacity = sys.modules["claims_capacity"].Capacity
    assert (str(capacity(14, 15)), str(capacity(126, 134))) == ("14", "126 to 133")


def test_the_window_of_c11_without_recorded_traces(
    program: ModuleType, on_page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["claims_growth"], "TRACES", tmp_path)
    found = program.find("C11")
    builtin = on_page["C11"].simulated.partition(", Azure")[0]
    assert found.simulated == f"{builtin}, recorded traces are not beside the repository"
    assert "Azure" not in found.why + found.told
    assert "Mooncake" not in found.why + found.told


def test_of_equal_turns_the_possible_hit_rate_by_hand(program: ModuleType) -> None:
    """Prompts of 40, 305, 570, 835 tokens, of which 0, 265, 530, 795 were there: 2, 4 and 6 whole pages of 128."""
    most_found = sys.modules["claims_paged"].most_found
    assert [most_found(turns, 40, 225, None) for turns in (1, 2, 3, 4)] == [0, 265 / 345, 795 / 915, 1590 / 1750]
    assert [most_found(turns, 40, 225, 128) for turns in (1, 2, 3, 4)] == [0, 256 / 345, 768 / 915, 1536 / 1750]
    # The last token of an answer is not computed: 128 tokens of history are no page of 128, and 129 are one.
    assert [most_found(2, 28, answer, 128) for answer in (100, 101)] == [0, 128 / (28 + 157)]


def test_a_page_that_is_held_is_an_entry_of_a_table_in_c8(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8 counts entries from the bytes held, which is what the policy's own books say as long as nothing is shared."""
    twin = Twin(Scenario.load(CLAIMS / "c8.toml"))
    assert isinstance(twin.kv, CountsInBlocks)
    books, usage_of = [], twin.kv.usage_of

    def watched(counts: Sequence[Any]) -> KVUsage:
        books.append(usage_of(counts))
        return books[-1]

    monkeypatch.setattr(twin.kv, "usage_of", watched)
    twin.run()
    page_bytes = 16 * twin.layout.token_bytes
    tables = [table for rows in books for table in np.atleast_1d(rows.table)]
    helds = [held for rows in books for held in np.atleast_1d(rows.held)]
    assert tables == [held // page_bytes * 4 for held in helds]
    assert max(tables) == 1920


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 1000])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_pages_of_c9_are_those_of_its_formula(program: ModuleType, prompt: int, samples: int) -> None:
    sharing = sys.modules["claims_sharing"]
    for engine in sharing.C9_ENGINES:
        pages = sharing.c9_pages(engine, prompt=prompt, samples=samples, output=20)
        assert (pages.most, pages.copied) == sharing.c9_formula(engine, prompt, samples, 20)


def test_the_pages_of_c9_by_hand(program: ModuleType) -> None:
    """1,199 stored tokens take 75 pages of 16, 1,207 take 76; of the prompt alone 62 and 63 pages are full."""
    formula = sys.modules["claims_sharing"].c9_formula
    assert [formula(engine, 1000, 8, 200) for engine in sys.modules["claims_sharing"].C9_ENGINES] == [
        (62 + 8 * 13, 7),
        (62 + 8 * 13, 0),
        (8 * 75, 0),
    ]
    assert formula("v0, forked", 1008, 8, 200) == (63 + 8 * 13, 0)
    assert formula("v1, prefix cache", 1008, 8, 200) == (62 + 8 * 14, 0)


def test_no_claim_is_open(program: ModuleType, on_page: dict[str, Any]) -> None:
    asked = [f"A{i}" for i in range(1, 10)] + [f"B{i}" for i in range(1, 8)] + [f"C{i}" for i in range(1, 14)]
    assert list(VERDICTS) == list(on_page) == asked
    assert sorted(program.CLAIMS) == sorted(asked)


@pytest.mark.parametrize("id", VERDICTS)
def test_the_scenario_says_what_was_claimed_and_what_to_look_at(id: str) -> None:
    path = CLAIMS / f"{id.lower()}.toml"
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith(f"# Claim {id}: ")
    assert second.startswith("# Look at ")
    assert Scenario.load(path).schema_version == 1


def test_no_scenario_lies_there_without_a_claim() -> None:
    assert sorted(path.stem.upper() for path in CLAIMS.glob("*.toml")) == sorted(VERDICTS)


def test_a_paragraph_for_each_claim_that_does_not_simply_hold(on_page: dict[str, Any]) -> None:
    assert [id for id, found in on_page.items() if not found.told and found.verdict != "holds"] == []


def test_the_pictures_are_there(program: ModuleType, on_page: dict[str, Any]) -> None:
    pictures = [line.partition("](")[2].rstrip(")") for line in PAGE.splitlines() if line.startswith("![")]
    drawn = [id for id, claim in program.CLAIMS.items() if claim.picture]
    assert sorted(pictures) == sorted(f"claim-{id.lower()}.png" for id in drawn)
    assert all(on_page[id].told for id in drawn), "a picture stands under words"
    for name in pictures:
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")
    assert not {path.name for path in (ROOT / "docs").glob("claim-*.png")} - set(pictures)


def test_the_command_runs_what_it_is_told_in_the_three_forms() -> None:
    as_json = run("c10", "A4", "--json")
    assert as_json.returncode == 0, as_json.stderr
    said = json.loads(as_json.stdout)
    assert list(said) == ["C10", "A4"]
    assert said["C10"]["verdict"] == "wrong"
    assert EXACT["C10"] in said["C10"]["simulated"]
    as_markdown = run("C10", "--markdown")
    header, line, row = as_markdown.stdout.splitlines()
    assert header == "| claim | claimed | simulated | verdict | why |"
    assert line == "| --- | --- | --- | --- | --- |"
    assert row in PAGE.splitlines()
    table = run("C10")
    assert table.returncode == 0
    assert "wrong" in table.stdout
    assert max(map(len, table.stdout.splitlines())) >= 160  # in a pipe too, where a terminal's width is not known


def test_an_unknown_claim_is_told_what_there_is() -> None:
    refused = run("Z9")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "error: no claim is called Z9; there are A1, A2, A3, A4, A5, A6, A7, A8, A9, B1, B2"
    )
    assert "Traceback" not in refused.stderr
