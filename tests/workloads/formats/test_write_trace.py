"""Our own files written and read: the same requests in every kind, with what they share; a file is whole or absent."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import (
    Request,
    WorkloadError,
    builtin,
    merge_spans,
    open_trace,
    write_trace,
)
from hbmtwin.workloads.formats import reader, write_requests

Play = Callable[..., list[Any]]
KINDS = ("out.csv", "out.csv.gz", "out.jsonl", "out.jsonl.gz", "out.parquet")

TWO = [
    Request(0, 4, 0, 1_000_000_001, 70, 9, 9, (("system", 0, 50), ("user/4/0", 0, 20)), tenant=3, has_next=True),
    Request(1, 4, 1, 12 * 10**9, 99, 1, 1, (("system", 0, 50), ("user/4/0", 0, 20), ("x", 7, 29)), tenant=3),
]


def since_first(requests: list[Request]) -> list[Request]:
    return [r._replace(arrival_ns=r.arrival_ns - requests[0].arrival_ns) for r in requests]


def test_the_files_are_plain(tmp_path: Path) -> None:
    write_trace(TWO, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == (
        "arrival_s,prompt_tokens,output_tokens,session,turn,tenant,spans\n"
        '1.000000001,70,9,4,0,3,"[[""system"", 0, 50], [""user/4/0"", 0, 20]]"\n'
        '12.000000000,99,1,4,1,3,"[[""system"", 0, 50], [""user/4/0"", 0, 20], [""x"", 7, 29]]"\n'
    )
    write_trace(TWO, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text().splitlines()[0] == (
        '{"arrival_s": 1.000000001, "prompt_tokens": 70, "output_tokens": 9, "session": 4, "turn": 0, "tenant": 3, '
        '"spans": [["system", 0, 50], ["user/4/0", 0, 20]]}'
    )
    write_trace(TWO, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist()[1] == {
        **json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1], parse_float=str),
        "arrival_s": pytest.approx(12),
        "spans": '[["system", 0, 50], ["user/4/0", 0, 20], ["x", 7, 29]]',
    }


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_come_back_as_they_were(tmp_path: Path, play: Play, kind: str) -> None:
    played = [r for r, _ in play(builtin(num_prompts=300), 10**9)]
    made = [r._replace(id=id) for id, r in enumerate(sorted(played, key=lambda r: (r.arrival_ns, r.id)))]
    assert any(r.turn for r in made)
    write_trace(made, tmp_path / kind)
    assert list(open_trace(tmp_path / kind).recorded()) == since_first(made)


STREAMS = st.one_of(st.text(max_size=5), st.integers(-3, 2**60))
SPANS = st.lists(st.tuples(STREAMS, st.integers(0, 2**73), st.integers(1, 2**30)), min_size=1, max_size=4)
DRAWN = st.lists(
    st.tuples(st.integers(0, 10**12), SPANS, st.integers(1, 2**40), st.integers(0, 9)), min_size=1, max_size=6
)


@given(drawn=DRAWN, kind=st.sampled_from(KINDS))
def test_any_requests_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, Any, int, int]], kind: str
) -> None:
    made, now_ns = [], 0
    for id, (gap_ns, pieces, output, tenant) in enumerate(drawn):
        now_ns += gap_ns
        spans = merge_spans(tuple(pieces))
        tokens = sum(length for _, _, length in spans)
        made.append(Request(id, id, 0, now_ns, tokens, output, output, spans, tenant))
    path = tmp_path_factory.getbasetemp() / kind
    write_trace(made, path)
    assert list(open_trace(path).recorded()) == since_first(made)


def test_times_as_floats_would_be_caught(tmp_path: Path) -> None:
    """A planted fault: seconds through a float lose the nanosecond after 104 days."""
    late = [TWO[0], TWO[1]._replace(arrival_ns=10**17 + 1)]
    write_trace(late, tmp_path / "out.jsonl")
    assert list(open_trace(tmp_path / "out.jsonl").recorded()) == since_first(late)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    (tmp_path / "floats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(open_trace(tmp_path / "floats.jsonl").recorded()) != since_first(late)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_that_a_trace_names_by_a_text_come_back(tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "burstgpt.csv"
    trace.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,a,2.2,ChatGPT,472,18,490,Conversation log\n45,a,3,ChatGPT,1087,230,1317,Conversation log\n"
    )
    requests = list(open_trace(trace).recorded())
    assert requests[0].session > 1 << 52
    write_trace(requests, tmp_path / kind)
    assert list(open_trace(tmp_path / kind).recorded()) == requests


@pytest.mark.parametrize("kind", KINDS)
def test_same_requests_same_bytes(tmp_path: Path, kind: str) -> None:
    write_trace(TWO, tmp_path / kind)
    (tmp_path / "other").mkdir()
    write_trace(TWO, tmp_path / "other" / kind)
    assert (tmp_path / kind).read_bytes() == (tmp_path / "other" / kind).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_text("old")

    def broken() -> Iterator[Request]:
        yield TWO[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(broken(), path)
    with pytest.raises(WorkloadError, match=r"^request 0 arrives before the one above it; sort by arrival_ns$"):
        write_trace(reversed(TWO), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"out\.txt: no kind of file is called 'txt'; let its name end in \.csv,"):
        write_trace(TWO, tmp_path / "out.txt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["out.csv", "out.jsonl", "out.parquet"])
def test_long_files_are_written_and_read_in_flat_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(write_requests, "_ROWS_AT_ONCE", 256)
    monkeypatch.setattr(reader, "_ROWS_AT_ONCE", 256)

    def peak_bytes(rows: int) -> int:
        tracemalloc.start()
        made = (
            Request(i, i % 50, i // 50, i * 10**7, 100, 5, 5, (("system", 0, 60), (f"user/{i}/0", 0, 40)))
            for i in range(rows)
        )
        write_trace(made, tmp_path / kind)
        assert sum(r.prompt_tokens for r in open_trace(tmp_path / kind).recorded()) == 100 * rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)  # what is imported or cached on first use
    assert peak_bytes(4_000) < peak_bytes(1_000) + 60_000  # the file grows by 300,000 bytes
