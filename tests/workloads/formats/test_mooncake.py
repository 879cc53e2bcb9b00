"""Mooncake's lines: read, cut to other blocks, spread over their ticks, written and read again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Request, WorkloadError, open_trace, write_mooncake
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.draws import uniform
from hbmtwin.workloads.formats.hashed_prompts import pieces
from hbmtwin.workloads.formats.mooncake import mooncake_chains
from hbmtwin.workloads.formats.rows import Row
from hbmtwin.workloads.formats.ticks import spread
from hbmtwin.workloads.statistics.reuse_curve import reuse_curve

MOONCAKE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not beside this checkout")
SIZES = (1_000, 20_000, None)

THREE = (
    '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}\n\n'
    '{"timestamp": 3001, "input_length": 1030, "output_length": 1, "hash_ids": [0, 1, 7]}\n'
    '{"timestamp": 3001, "input_length": 3, "output_length": 2, "hash_ids": [4]}\n'
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_prompt_is_what_its_ids_stand_for(tmp_path: Path) -> None:
    requests = list(open_trace(write(tmp_path, THREE)).open())
    assert [r.spans for r in requests] == [
        (("mooncake", 0, 1024),),
        (("mooncake", 0, 1024), ("mooncake", 7 * 512, 6)),
        (("mooncake", 4 * 512, 3),),
    ]
    assert [(r.id, r.session, r.turn, r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0, 0, 0, 0, 1024, 5),
        (1, 1, 0, 3_001_000_000, 1030, 1),
        (2, 2, 0, 3_001_000_000, 3, 2),
    ]


def test_the_block_size_is_a_parameter(tmp_path: Path) -> None:
    path = write(tmp_path, '{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 9]}')
    assert next(open_trace(path, block_size=16).open()).spans == (("mooncake", 0, 32), ("mooncake", 144, 8))
    with pytest.raises(WorkloadError, match=r":1: 3 hash_ids for input_length 40; .* set workload\.trace_block_size$"):
        open_trace(path)
    with pytest.raises(WorkloadError, match=r"^an id of a trace stands for at least 1 token, not 0$"):
        open_trace(path, block_size=0)


def recut(ids: list[int], tokens: int, block_size: int, page: int) -> list[int]:
    """By the spec's words: each id expands into block_size / page child ids, as many as the prompt has pages."""
    share = block_size // page
    return [id * share + child for id in ids for child in range(share)][: -(-tokens // page)]


@given(
    chains=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=12),
    last=st.integers(1, 8),
    page=st.sampled_from([1, 2, 4, 8]),
)
def test_ids_cut_to_smaller_blocks_share_what_their_children_share(
    chains: list[list[int]], last: int, page: int
) -> None:
    # An id names its prefix: made so by numbering prefixes.
    numbers: dict[tuple[int, ...], int] = {}
    named = [[numbers.setdefault(tuple(chain[: n + 1]), len(numbers)) for n in range(len(chain))] for chain in chains]
    tokens = [8 * (len(chain) - 1) + last for chain in named]
    by_children = [recut(ids, n, 8, page) for ids, n in zip(named, tokens, strict=True)]
    by_tokens = [block_chain(pieces("x", ids, n, 8), page, partial=True) for ids, n in zip(named, tokens, strict=True)]
    sizes = [0, 3, 10, None]
    if last in (1, 2, 4, 8) and last % page == 0:  # a begun block of other length is another block
        assert reuse_curve(by_tokens, sizes) == reuse_curve(by_children, sizes)
    assert [len(chain) for chain in by_tokens] == [len(chain) for chain in by_children]


@needs_mooncake
@pytest.mark.parametrize("page", [16, 128])
def test_the_real_trace_in_pages_hits_as_its_children_do(page: int) -> None:
    requests = list(open_trace(MOONCAKE, num_prompts=300).recorded())
    chains = list(mooncake_chains(MOONCAKE))[:300]
    children = [recut(ids, r.prompt_tokens, 512, page) for ids, r in zip(chains, requests, strict=True)]
    full = [ids[: r.prompt_tokens // page] for ids, r in zip(children, requests, strict=True)]
    assert reuse_curve((block_chain(r.spans, page) for r in requests), [5_000, None]) == reuse_curve(
        full, [5_000, None]
    )


# -- ticks -------------------------------------------------------------------------------------------------------------


def rows_at(times_s: list[int]) -> list[Row]:
    return [Row(line, time_s * 10**9, line, 1) for line, time_s in enumerate(times_s, 1)]


def assert_spread(rows: list[Row], moved: list[Row]) -> None:
    """Each in its own tick, 3 s long at most, and in the file's order."""
    assert [row.line for row in moved] == [row.line for row in rows]
    assert all(a.time_ns <= b.time_ns for a, b in pairwise(moved))
    starts = {row.time_ns for row in rows}
    for old, new in zip(rows, moved, strict=True):
        end_ns = min([old.time_ns + 3 * 10**9, *(start for start in starts if start > old.time_ns)])
        assert old.time_ns <= new.time_ns < end_ns


@pytest.mark.parametrize("wrong_s", [[0.5, 0.2, 3.1], [0.5, 0.7, 2.9], [0.5, 3.1, 3.2], [0.5, 0.7, 6.5]])
def test_a_spread_that_leaves_its_tick_or_its_order_would_be_caught(wrong_s: list[float]) -> None:
    rows = rows_at([0, 0, 3])
    with pytest.raises(AssertionError):
        assert_spread(rows, [r._replace(time_ns=round(s * 1e9)) for r, s in zip(rows, wrong_s, strict=True)])


@given(gaps=st.lists(st.sampled_from([0, 0, 0, 1, 3, 9]), max_size=40), seed=st.integers(0, 5))
def test_spread_requests_stay_in_their_tick_and_in_order(gaps: list[int], seed: int) -> None:
    times, now = [], 0
    for gap in gaps:
        now += gap
        times.append(now)
    rows = rows_at(times)
    moved = list(spread(rows, 3 * 10**9, seed))
    assert_spread(rows, moved)
    assert moved == list(spread(rows, 3 * 10**9, seed))


def test_the_draws_of_a_tick_by_hand() -> None:
    moved = [row.time_ns for row in spread(rows_at([0, 0, 3, 9]), 3 * 10**9, 0)]
    drawn = [int(3 * 10**9 * uniform(0, "jitter", n, 0)) for n in range(4)]
    assert moved == [*sorted(drawn[:2]), 3 * 10**9 + drawn[2], 9 * 10**9 + drawn[3]]
    assert moved[0] == 1_908_612_457
    other = [row.time_ns for row in spread(rows_at([0, 0, 3, 9]), 3 * 10**9, 1)]
    assert moved != other


@needs_mooncake
def test_the_ticks_of_the_real_trace_are_spread() -> None:
    def times_ms(jitter: bool) -> list[int]:
        return [r.arrival_ns // 10**6 for r in open_trace(MOONCAKE, jitter=jitter).recorded()]

    plain, spread_out = times_ms(False), times_ms(True)
    assert sum(a == b for a, b in pairwise(plain)) == 10_851  # 90 % of the gaps are 0
    assert sum(a == b for a, b in pairwise(spread_out)) < 50
    assert spread_out[0] == 0
    assert abs(spread_out[-1] - plain[-1]) <= 3000


# -- chains ------------------------------------------------------------------------------------------------------------

LINES = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}

{"hash_ids": []}
{"hash_ids": [7]}"""


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_chains_are_read_plain_or_gzip(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pack(LINES.encode()))
    assert list(mooncake_chains(path)) == [[0, 1], [], [7]]
    assert list(mooncake_chains(str(path))) == [[0, 1], [], [7]]


SUCH = 'write a line such as {"hash_ids": [0, 1, 2]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", f"this is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); {SUCH}"),
        ("[1, 2]", f"no object with 'hash_ids'; {SUCH}"),
        ('{"timestamp": 3}', f"no object with 'hash_ids'; {SUCH}"),
        ('{"hash_ids": "012"}', "hash_ids is '012'; it must be a list of whole numbers"),
        ('{"hash_ids": [1, 2.5]}', "an id in hash_ids is '2.5'; it must be a whole number"),
        ('{"hash_ids": [true]}', "an id in hash_ids is 'True'; it must be a whole number"),
        ('{"hash_ids": [[1]]}', "an id in hash_ids is '[1]'; it must be a whole number"),
        ('{"hash_ids": [-1]}', "an id in hash_ids is '-1'; it must be from 0 to 2^63 - 1"),
    ],
)
def test_a_bad_line_is_named_with_its_cure(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"hash_ids": [0]}\n\n' + line)
    chains = mooncake_chains(path)
    assert next(chains) == [0]
    with pytest.raises(WorkloadError) as error:
        next(chains)
    assert str(error.value) == f"{path}:3: {message}"


def test_deep_nesting_is_no_traceback(tmp_path: Path) -> None:
    path = write(tmp_path, "[" * 500_000)
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:1: "):
        list(mooncake_chains(path))
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:1: "):
        open_trace(write(tmp_path, '{"a": ' + "[" * 500_000))


def test_a_missing_trace_is_a_workload_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        list(mooncake_chains(tmp_path / "none.jsonl"))


# -- writing -----------------------------------------------------------------------------------------------------------


def request(id: int, ms: float, *spans: tuple[str, int, int], prompt: int | None = None) -> Request:
    tokens = prompt or sum(length for _, _, length in spans)
    return Request(id, id, 0, round(ms * 1e6), tokens, 5, 9, spans)


def test_the_lines_that_are_written(tmp_path: Path) -> None:
    made = [
        request(0, 1000.9, ("system", 0, 600), ("a", 0, 10)),
        request(1, 1001, ("system", 0, 600), ("b", 0, 700)),
        request(2, 4000, prompt=3),
    ]
    write_mooncake(made, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == (
        '{"timestamp": 0, "input_length": 610, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 2, 3]}\n'
        '{"timestamp": 2999, "input_length": 3, "output_length": 5, "hash_ids": [4]}\n'
    )
    write_mooncake(made, tmp_path / "small.jsonl.gz", block_size=600)
    lines = gzip.decompress((tmp_path / "small.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["hash_ids"] for line in lines] == [[0, 1], [0, 2, 3], [4]]


def test_requests_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"^request 1 arrives before the one above it; sort by arrival_ns$"):
        write_mooncake([request(0, 5, ("a", 0, 9)), request(1, 4, ("a", 0, 9))], tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


@given(
    drawn=st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1, 5, 512, 700])), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_written_shares_what_was_shared(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[tuple[str, int]]]
) -> None:
    made = [request(i, i, *((stream, 0, length) for stream, length in pieces)) for i, pieces in enumerate(drawn)]
    path = tmp_path_factory.mktemp("mooncake") / "out.jsonl"
    write_mooncake(made, path)
    back = list(open_trace(path).recorded())
    before, after = (
        reuse_curve((block_chain(r.spans, 512, partial=True) for r in requests), [0, 2, 5, None])
        for requests in (made, back)
    )
    assert before == after == reuse_curve(mooncake_chains(path), [0, 2, 5, None])
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in back] == [
        (r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in made
    ]


@needs_mooncake
def test_the_real_trace_written_and_read_again(tmp_path: Path) -> None:
    requests = list(open_trace(MOONCAKE, num_prompts=2000).recorded())
    write_mooncake(requests, tmp_path / "again.jsonl")
    again = list(open_trace(tmp_path / "again.jsonl").recorded())
    assert [r._replace(spans=()) for r in again] == [r._replace(spans=()) for r in requests]
    assert reuse_curve(mooncake_chains(tmp_path / "again.jsonl"), SIZES) == reuse_curve(
        list(mooncake_chains(MOONCAKE))[:2000], SIZES
    )


def test_ids_that_are_swapped_would_be_caught() -> None:
    """A planted fault: ids of blocks, not of prefixes, are equal where what stands before differs."""
    made = [request(0, 0, ("a", 0, 512), ("c", 0, 512)), request(1, 1, ("b", 0, 512), ("c", 0, 512))]
    right = [block_chain(r.spans, 512, partial=True) for r in made]
    wrong = [list(r.spans) for r in made]
    assert reuse_curve(right, [None]).distinct == 4
    assert reuse_curve(wrong, [None]).distinct == 3
