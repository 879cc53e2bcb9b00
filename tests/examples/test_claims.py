"""The claims of the write-ups: each is judged anew, to its last figure, and docs/claims.md says what was found.

One experiment a test, so that the workers of ``pytest -n`` share them; ``python examples/claims`` runs all at once.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hbmtwin import Scenario
from hbmtwin.allocators.contract import CountsInBlocks
from hbmtwin.allocators.records import KVUsage
from hbmtwin.sim.run import Twin

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "examples" / "claims"
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
TRACES = ROOT.parent / "shared" / "traces"
RECORDED = (
    "azure2023_conv.csv.gz",
    "mooncake_fast25_conversation.jsonl.gz",
    "vidur_arxiv_summarization_lengths.csv.gz",
)

FOUND: dict[str, tuple[str, str]] = {
    "A1": (
        "holds in part",
        "turn 1 to 25, 16 users all the time: concat 58 to 9 token/s (x 0.16), device 20 to 52 GiB full, of it KV "
        "1.2 to 31.2; paged 67 to 18 token/s (x 0.27)",
    ),
    "A4": (
        "holds",
        "2.00 GiB from turn 26 on; 15 of 40 turns lost tokens, the last one 2,303",
    ),
    "A5": (
        "holds",
        "66 MiB from turn 1 on, 1/31 of A4; 40 of 40 turns lost tokens (A4: 15), the last one 6,267",
    ),
    "A7": (
        "holds",
        "bytes of tokens over bytes held for KV: static 34 %, doubling 70 %, paged, pages of 128 91 %, paged, pages of "
        "64 95 %, paged, pages of 16 99 %",
    ),
    "A8": (
        "wrong",
        "requests held at once, two draws together: hybrid with exact 91 (for both: 90), doubling 71 (for both: 79), "
        "step 91 (for both: 99); static for both 14",
    ),
    "B1": (
        "holds in part",
        "turn 1 and turn 10, ms a token, standard and flash: 1 user 41.8 and 41.7, 44.7 and 41.9; 62 users, all in"
        " the same turn, 54 and 44, 228 and 60; one layer's attention on a CPU, measured, us: 160 and 89, 1,272 "
        "and 790",
    ),
    "B3": (
        "wrong",
        "hit rate, and in brackets the most that is possible in whole pages of 128, and token by token: 10 turns 92 % "
        "(92, 97); 4 turns 79 % (79, 91); 1 turn 0 % (0, 0); 10 turns, long questions and short answers 80 % (80, 84); "
        "10 turns of 128 users 79 % (92, 97); 10 turns without prefix caching 0 % (92, 97)",
    ),
    "B4": (
        "holds in part",
        "with scales per channel INT8 saves 50.0 %, INT4 75.0 %, with a scale a token 49.2 % and 74.2 %; throughput "
        "with INT8, a scale a token, paged: +4 % with 64 users, who all fit, +9 % with 256, who do not, +34 % with "
        "512 and answers of 1,000 tokens; with full length reserved, 256 users, +15 % (INT4: +20 %)",
    ),
    "B5": (
        "holds",
        "padding among the computed tokens: as they come 79 %, sorted by prompt 50 %, buckets of 256 53 %, variable "
        "length 0 %",
    ),
    "B6": (
        "holds",
        "once at 4,096 tokens, between 3,073 and 4,096 at the end of every step; 5 teeth in 32 turns, 5,120 tokens "
        "lost",
    ),
    "C3": (
        "holds",
        "87 % of the bytes held for KV hold no token; in use: static 13 %, doubling 73 %, step of 256 66 %, exact "
        "100 %, paged, blocks of 128 79 %, paged, blocks of 16 97 %",
    ),
    "C4": (
        "holds in part",
        "requests held at once, and of 12 requests copies, GiB copied, peak GiB: 2x from 64 88, 24, 2.7, 2.25; "
        "concat 109, 3,799, 724.8, 1.64; steps of 256 88, 13, 2.8, 2.38; steps of 64 108, 59, 11.3, 1.75; static 14, "
        "0, 0.0, 12.00",
    ),
    "C5": (
        "holds in part",
        "dies at 21.6 s: 600 MiB asked, 2,139 free, largest piece 499, though the whole traffic never holds more "
        "than 3.25 of 4.80 GiB; empty_cache every 1, 10 or 100 steps on three draws: OOM sooner in 1 of 9, later in 8",
    ),
    "C6": (
        "wrong",
        "seconds to death by fragmentation, three draws of C5's traffic: caching 22, 26, 49; pooled with best fit "
        "24, never, 72; first fit 18, 59, 72; next fit never, never, never; worst fit 72, never, never. With nine "
        "users next fit, too, dies at 25.2 s: 666 MiB asked, 1,094 free, largest piece 661, with 3.73 of 4.80 GiB "
        "held",
    ),
    "C7": (
        "holds in part",
        "padding among the bytes of KV, and KV at its peak: as they come 81 %, 7.55 GiB; sorted by prompt 39 %, 7.31 "
        "GiB; buckets of 256 45 %, 3.57 GiB; variable length 0 %, 0.91 GiB",
    ),
    "C8": (
        "holds in part",
        "in use: static 13 %, steps of 256 66 %, doubling 73 %; pages of 1 100.0 %, 2 99.8 %, 4 99.4 %, 8 98.4 %, 16 "
        "96.8 %, 32 93.6 %, 64 88.1 %, 128 79.3 %, 256 66.2 %; tables at most 29,800, 14,928, 7,492, 3,780, 1,920, "
        "992, 528, 296, 188 bytes",
    ),
    "C9": (
        "holds in part",
        "8 answers of 200 tokens to one prompt of 1,000, pages of 16: nothing shared 600 pages, 4.69 GiB; forked,"
        " with copy-on-write (v0), 166, 1.30 GiB, 7 pages of 8 MiB copied; prefix cache, without copy-on-write "
        "(v1), 166, none copied. 3.39 GiB saved, in both: 7 x 62 pages. With a prompt of 1,008 tokens, 63 full "
        "pages: 608, 167, 174",
    ),
    "C10": (
        "wrong",
        "25.0 % at INT8, 37.5 % at INT4; with a scale a token 24.6 and 37.1 %",
    ),
    "C11": (
        "holds in part",
        "1.00 GiB a sequence at most, flat; share of requests that lose tokens: built-in traffic 34 % (21 % of its "
        "conversations), Azure 2023 chat requests 15 %, Mooncake chat requests 80 %, not conversations: summaries of "
        "arXiv papers 82 %",
    ),
    "C12": (
        "wrong",
        "dies at 0.3 s with 0 of 60 requests served; pooled with best fit at 24.4 s with 4, with next fit it serves "
        "all 60. With buffers taken once, at full length, it dies at 5.4 s with 1, and pooled serves all 60",
    ),
}
"""Verdict and figures of every claim."""

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
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("id", [pytest.param(id, marks=needs_traces) if id == "C11" else id for id in FOUND])
def test_the_verdict_the_figures_and_the_row_of_the_page(program: ModuleType, id: str) -> None:
    found = program.find(id)
    assert (found.verdict, found.simulated) == FOUND[id]
    assert program.markdown(program.row(id, found)) in PAGE.splitlines()


def test_the_window_of_c11_without_recorded_traces(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["claims_growth"], "TRACES", tmp_path)
    builtin = FOUND["C11"][1].partition(", Azure")[0]
    assert program.find("C11").simulated == f"{builtin}, recorded traces are not beside the repository"


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


def test_every_claim_that_was_asked_for_is_there(program: ModuleType) -> None:
    assert sorted(program.CLAIMS) == sorted(FOUND)
    asked = "A1 A4 A5 A7 A8 B1 B3 B4 B5 B6 C3 C4 C5 C6 C7 C8 C9 C10 C11 C12"
    assert set(asked.split()) <= FOUND.keys()


def test_the_table_of_the_page_has_a_row_for_each_and_no_other(program: ModuleType) -> None:
    table = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert table == ["claim", "---", *sorted(FOUND, key=lambda id: (id[0], int(id[1:])))]


@pytest.mark.parametrize("id", FOUND)
def test_the_scenario_says_what_was_claimed_and_what_to_look_at(id: str) -> None:
    path = CLAIMS / f"{id.lower()}.toml"
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith(f"# Claim {id}: ")
    assert second.startswith("# Look at ")
    assert Scenario.load(path).schema_version == 1


def test_no_scenario_lies_there_without_a_claim() -> None:
    assert sorted(path.stem.upper() for path in CLAIMS.glob("*.toml")) == sorted(FOUND)


def test_a_paragraph_for_each_claim_that_does_not_simply_hold() -> None:
    told = [line.removeprefix("**").partition(":")[0] for line in PAGE.splitlines() if line.startswith("**")]
    ids = [id for group in told for id in group.split(", ")]
    assert ids == [id for id, (verdict, _) in FOUND.items() if verdict != "holds"]


def test_the_pictures_are_there() -> None:
    pictures = [line.partition("](")[2].rstrip(")") for line in PAGE.splitlines() if line.startswith("![")]
    names = ("a7", "a1", "b1", "b3", "c4", "c5", "c8", "c9")
    assert pictures == [f"claim-{name}.png" for name in names]
    for name in pictures:
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")


def test_the_command_runs_what_it_is_told_in_the_three_forms() -> None:
    as_json = run("c10", "A4", "--json")
    assert as_json.returncode == 0, as_json.stderr
    said = json.loads(as_json.stdout)
    assert list(said) == ["C10", "A4"]
    assert (said["C10"]["verdict"], said["C10"]["simulated"]) == FOUND["C10"]
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
    assert refused.stderr.startswith("error: no claim is called Z9; there are A1, A4, A5, A7, A8, B1, B3, B4, B5, B6")
    assert "Traceback" not in refused.stderr
