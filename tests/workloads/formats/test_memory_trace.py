"""Operation traces: CSV and Parquet hold the same, a bad row is told by file and line."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from hbmtwin.workloads.formats.memory_trace import OPERATIONS, MemoryOp, read_memory_trace, write_memory_trace
from hbmtwin.workloads.records import WorkloadError

EVERY_OPERATION = [
    MemoryOp("malloc", 0, 1 << 20, 0, tag="kv", owner=7, step=3, time_ns=5_000),
    MemoryOp("malloc", 1, 512, 2),
    MemoryOp("record_stream", 0, stream=2),
    MemoryOp("erase_stream", 0, stream=2, arg="0"),
    MemoryOp("free", 0),
    MemoryOp("event_complete"),
    MemoryOp("event_complete", stream=2, arg="3"),
    MemoryOp("synchronize"),
    MemoryOp("empty_cache"),
    MemoryOp("empty_virt_addr_cache"),
    MemoryOp("set_conf", arg="max_split_size_mb:40,expandable_segments:False"),
    MemoryOp("set_fraction", arg="0.75"),
    MemoryOp("reset_peak"),
    MemoryOp("reset_accumulated"),
    MemoryOp("mempool_begin", "graphs", arg="use_on_oom|no_split"),
    MemoryOp("mempool_end", "graphs"),
    MemoryOp("mempool_delete", "graphs"),
    MemoryOp("workspace", None, 3_000_000, 1),
    MemoryOp("other_memory", None, 1 << 30),
]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(path: Path, allocator: str | None = None) -> str:
    with pytest.raises(WorkloadError) as refused:
        list(read_memory_trace(path, allocator=allocator))
    return str(refused.value).replace(str(path), "trace")


def test_the_list_above_has_every_operation() -> None:
    assert {op.op for op in EVERY_OPERATION} == set(OPERATIONS)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace.parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    write_memory_trace(EVERY_OPERATION, tmp_path / name, stamps=True)
    assert list(read_memory_trace(tmp_path / name)) == EVERY_OPERATION
    write_memory_trace(EVERY_OPERATION, tmp_path / f"again-{name}", stamps=True)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()
    write_memory_trace(EVERY_OPERATION, tmp_path / name)
    assert next(read_memory_trace(tmp_path / name)) == MemoryOp("malloc", 0, 1 << 20, 0)


def test_the_text_of_a_csv(tmp_path: Path) -> None:
    write_memory_trace(EVERY_OPERATION[9:12] + EVERY_OPERATION[14:15], tmp_path / "trace.csv")
    assert (tmp_path / "trace.csv").read_text(encoding="utf-8") == (
        "op,id,size,stream,arg\n"
        "empty_virt_addr_cache,,,,\n"
        'set_conf,,,,"max_split_size_mb:40,expandable_segments:False"\n'
        "set_fraction,,,,0.75\n"
        "mempool_begin,graphs,,,use_on_oom|no_split\n"
    )


def test_rows_are_read_and_written_as_a_stream(tmp_path: Path) -> None:
    made = 0

    def many() -> Iterator[MemoryOp]:
        nonlocal made
        for made in range(1, 200_001):
            yield MemoryOp("malloc", made, 512, 0)

    write_memory_trace(many(), tmp_path / "trace.parquet")
    assert made == 200_000
    rows = read_memory_trace(tmp_path / "trace.parquet")
    assert next(rows).id == 1
    rows.close()
    assert sum(1 for _ in read_memory_trace(tmp_path / "trace.parquet")) == 200_000


def test_an_index_in_front_and_columns_behind_are_passed_over(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv", "index,op,id,size,stream,arg,address,note\n5,malloc,3,100,,,0,x\n\n6,free,3,,,,,\n"
    )
    assert list(read_memory_trace(path)) == [MemoryOp("malloc", 3, 100, 0), MemoryOp("free", 3)]


def test_columns_that_an_operation_does_not_use_may_hold_anything(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv", "op,id,size,stream,arg\nfree,3,0,0,x\nempty_cache,-1,0,0,\nevent_complete,-1,0,-1,\n"
    )
    assert list(read_memory_trace(path)) == [
        MemoryOp("free", 3),
        MemoryOp("empty_cache"),
        MemoryOp("event_complete"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("maloc,1,512,0,", "trace:3: unknown operation 'maloc'; did you mean 'malloc'?"),
        (",1,512,0,", "trace:3: unknown operation ''; known are malloc, free, "),
        ("malloc,one,512,0,", "trace:3: id of malloc is 'one'; it must be a whole number"),
        ("malloc,-1,512,0,", "trace:3: id of malloc is -1; it must be at least 0 and below 2^63"),
        ("malloc,1,,0,", "trace:3: size of malloc is ''; it must be a whole number"),
        ("malloc,1,-512,0,", "trace:3: size of malloc is -512; it must be at least 0 and below 2^63"),
        ("malloc,1,9223372036854775808,0,", "trace:3: size of malloc is 9223372036854775808; it must be at least 0"),
        ("malloc,1,512,-2,", "trace:3: stream of malloc is -2; it must be at least 0"),
        ("erase_stream,1,,2,", "trace:3: arg of erase_stream is ''; it must be a whole number"),
        ("event_complete,,,0,many", "trace:3: arg of event_complete is 'many'; it must be a whole number"),
        ("set_fraction,,,,1.5", "trace:3: arg of set_fraction is '1.5'; it must be a number from 0 to 1"),
        ("set_fraction,,,,", "trace:3: arg of set_fraction is ''; it must be a number from 0 to 1"),
        ("mempool_begin,p,,,no-split", "trace:3: arg of mempool_begin is 'no-split'; write use_on_oom, no_split, "),
        ("mempool_end,,,,", "trace:3: mempool_end without an id; write the pool's name there"),
        (
            "set_conf,,,,a:1,b:2",
            "trace:3: 6 fields where the header has 5; put a value with commas between double quotes",
        ),
    ],
)
def test_a_bad_row_is_told_by_file_and_line(tmp_path: Path, row: str, said: str) -> None:
    path = written(tmp_path / "t.csv", f"op,id,size,stream,arg\nmalloc,0,512,0,\n{row}\n")
    assert complaint(path).startswith(said)


def test_a_bad_row_of_parquet_is_told_by_its_number_from_0(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"op": ["malloc", "melt"], "id": [0, 0], "size": [512, 0], "stream": [0, 0], "arg": ["", ""]},
    )
    frame.to_parquet(tmp_path / "t.parquet")
    assert complaint(tmp_path / "t.parquet").startswith("trace: row 1: unknown operation 'melt'; known are ")


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    assert complaint(written(tmp_path / "a.csv", "op,id,size,stream\n")) == (
        "trace:1: no column 'arg'; an operation trace needs op,id,size,stream,arg"
    )
    assert complaint(written(tmp_path / "b.csv", "op,id,size,stream,arg,op\n")) == (
        "trace:1: two columns are called 'op'; remove one"
    )
    assert complaint(written(tmp_path / "c.csv", "")).startswith("trace:1: no column 'op'")
    assert "no such file" in complaint(tmp_path / "gone.csv")
    pd.DataFrame({"op": ["malloc"]}).to_parquet(tmp_path / "d.parquet")
    assert complaint(tmp_path / "d.parquet").startswith("trace: no column 'id'")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[: len(whole) // 2])
    assert complaint(tmp_path / "e.parquet").startswith("trace: this Parquet file is damaged")
    (tmp_path / "f.csv.gz").write_bytes(gzip.compress(b"op,id,size,stream,arg\n" + b"malloc,0,512,0,\n" * 99)[:40])
    assert "the gzip file ends early" in complaint(tmp_path / "f.csv.gz")


@pytest.mark.parametrize("text", ["", "op,id,size,stream,arg\n"])
def test_a_text_called_parquet(tmp_path: Path, text: str) -> None:
    assert complaint(written(tmp_path / "t.parquet", text)) == (
        "trace: this is not a Parquet file; if it is CSV, let its name end in .csv"
    )


def test_columns_of_parquet_that_hold_no_single_values(tmp_path: Path) -> None:
    columns = {"op": ["malloc"], "id": [[0]], "size": [512], "stream": [0], "arg": [""]}
    pd.DataFrame(columns).to_parquet(tmp_path / "t.parquet")
    said = complaint(tmp_path / "t.parquet")
    assert said.startswith("trace: column 'id' is of type list<")
    assert said.endswith("; write one number or text a row")
    pd.DataFrame(columns | {"id": [pd.Timestamp(0)]}).to_parquet(tmp_path / "t.parquet")
    assert complaint(tmp_path / "t.parquet").startswith("trace: row 0: id of malloc is ")


def test_a_trace_knows_where_it_is(tmp_path: Path) -> None:
    text = "op,id,size,stream,arg,allocator\n\nempty_cache,,,,,b\nmalloc,0,512,0,,a\nfree,0,,,,a\n"
    path = written(tmp_path / "t.csv", text)
    pd.read_csv(path).to_parquet(tmp_path / "t.parquet")
    for name, places in (("t.csv", [":4", ":5"]), ("t.parquet", [": row 1", ": row 2"])):
        trace = read_memory_trace(tmp_path / name, allocator="a")
        assert trace.place == str(tmp_path / name)
        assert [trace.place for _ in trace] == [f"{tmp_path / name}{place}" for place in places]


def test_a_trace_of_several_allocators_is_read_one_at_a_time(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv",
        "op,id,size,stream,arg,allocator\nmalloc,0,512,0,,caching\nmalloc,0,1024,0,,pooled\nfree,0,,,,caching\n",
    )
    assert (
        complaint(path) == "trace:3: operations of 'pooled' among those of 'caching'; choose one of the two allocators"
    )
    assert list(read_memory_trace(path, allocator="pooled")) == [MemoryOp("malloc", 0, 1024, 0)]
    assert [op.op for op in read_memory_trace(path, allocator="caching")] == ["malloc", "free"]
