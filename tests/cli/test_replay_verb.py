"""``hbmtwin replay``: the table, the JSON, and complaints."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.workloads.formats.memory_trace import MemoryOp, write_memory_trace

Shell = Callable[..., Any]

TRACE = """op,id,size,stream,arg
malloc,0,100,0,
malloc,1,31457280,0,
malloc,2,31457280,0,
free,1,,,
free,2,,,
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    return tmp_path / "trace.csv"


def test_for_people(shell: Shell, trace: Path) -> None:
    answer = shell("replay", trace, "--capacity-bytes", 40 << 20)
    assert answer.code == 0
    assert answer.out.startswith("caching: 5 operations, 1 ran out of memory, operation 2 first\n")
    assert answer.out.splitlines()[1].startswith("  NPU out of memory. Tried to allocate 32.00 MiB (")
    assert answer.err == ""


def test_json_has_torchs_keys_and_the_counts(shell: Shell, trace: Path) -> None:
    found = json.loads(shell("replay", trace, "--capacity-bytes", 40 << 20, "--json").out)
    assert found["num_ooms"] == 1
    assert found["first_oom_index"] == 2
    assert found["first_oom_message"].startswith("NPU out of memory. Tried to allocate 32.00 MiB (")
    assert found["operations"] == 5
    assert found["operations_per_second"] > 0
    assert found["reserved_bytes.all.current"] == 34 << 20
    assert found["reserved_bytes.all.peak"] == 34 << 20
    assert found["allocation.all.allocated"] == 2


def test_flavour_and_settings_change_the_result(shell: Shell, trace: Path) -> None:
    cuda = json.loads(
        shell("replay", trace, "--capacity-bytes", 40 << 20, "--flavour", "torch_cuda", "--json").out,
    )
    assert cuda["reserved_bytes.all.peak"] == 32 << 20
    conf = json.loads(
        shell("replay", trace, "--capacity-bytes", 80 << 20, "--alloc-conf", "max_split_size_mb:32", "--json").out,
    )
    assert conf["max_split_size"] == 32 << 20
    assert conf["first_oom_index"] is None
    assert conf["first_oom_message"] is None


def test_per_op(shell: Shell, trace: Path, tmp_path: Path) -> None:
    assert shell("replay", trace, "--capacity-bytes", 40 << 20, "--per-op", "rows.csv").code == 0
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == (
        "index,op,id,address,reserved_bytes,allocated_bytes,requested_bytes,active_bytes,"
        "num_device_alloc,num_device_free,num_alloc_retries,oom"
    )
    assert [row["oom"] for row in rows] == ["0", "0", "1", "0", "0"]
    assert [row["address"] for row in rows] == ["0", "2097152", "", "2097152", ""]
    assert shell("replay", trace, "--capacity-bytes", 40 << 20, "--per-op", "rows.parquet").code == 0
    assert (tmp_path / "rows.parquet").read_bytes().startswith(b"PAR1")


def test_an_older_release_counts_less_and_replays_all_the_same(shell: Shell, trace: Path) -> None:
    arguments = ("replay", trace, "--capacity-bytes", 40 << 20, "--release", "2.7.1")
    assert "retries" not in shell(*arguments, "--per-op", "rows.csv").out
    assert "num_device_alloc" not in json.loads(shell(*arguments, "--json").out)
    answer = shell("replay", trace, "--capacity-bytes", 40 << 20, "--release", "2.4.0")
    assert answer.code == 2
    assert "caching: release '2.4.0' of torch_npu is not modelled; there are 2.5.1, " in answer.err


def test_the_table_does_not_replace_what_is_printed(trace: Path) -> None:
    link = trace.parent / "rows.csv"
    link.symlink_to("/dev/stdout")
    command = [sys.executable, "-m", "hbmtwin", "replay", str(trace), "--capacity-bytes", "1000", "--per-op", str(link)]
    with (trace.parent / "printed").open("w+b") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.PIPE, check=False)
        printed.seek(0)
        assert printed.read() == (trace.parent / "printed").read_bytes() == b""
    assert done.returncode == 2
    assert b"rows.csv: is where this program prints to; choose another" in done.stderr


def test_a_request_for_nothing_has_an_empty_address(shell: Shell, trace: Path, tmp_path: Path) -> None:
    trace.write_text("op,id,size,stream,arg\nmalloc,0,0,0,\nfree,0,,,\nmalloc,1,100,0,\n", encoding="utf-8")
    answer = shell("replay", trace, "--capacity-bytes", 2**44, "--per-op", "rows.csv", "--json")
    assert answer.err == ""
    assert json.loads(answer.out)["allocation.all.allocated"] == 1
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()[1:] == [
        "0,malloc,0,,0,0,0,0,0,0,0,0",
        "1,free,0,,0,0,0,0,0,0,0,0",
        "2,malloc,1,0,2097152,512,100,512,1,0,0,0",
    ]


def test_unknown_ids_are_noted(shell: Shell, trace: Path) -> None:
    trace.write_text(TRACE + "free,7,,,\nrecord_stream,8,,1,\n", encoding="utf-8")
    answer = shell("replay", trace, "--capacity-bytes", 40 << 20, "--json")
    assert answer.err == (
        "note: 2 operations are on ids that no malloc before them has, and did nothing; "
        "the first: operation 5, free of id 7\n"
    )
    assert json.loads(answer.out)["operations_on_unknown_ids"] == 2


def test_a_bad_operation_of_parquet_is_told_by_its_row(shell: Shell, tmp_path: Path) -> None:
    write_memory_trace([MemoryOp("malloc", 0, 512, 0), MemoryOp("malloc", 0, 512, 0)], tmp_path / "t.parquet")
    answer = shell("replay", "t.parquet", "--capacity-bytes", 40 << 20)
    assert answer.code == 2
    assert answer.err.startswith("error: t.parquet: row 1: operation 1, malloc: id 0 was used by a malloc")


def test_another_allocator(shell: Shell, trace: Path) -> None:
    answer = shell("replay", trace, "--capacity-bytes", 40 << 20, "--allocator", "pooled")
    assert answer.out.startswith("pooled: 5 operations, 1 ran out of memory, operation 2 first\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gone.csv", "--capacity-bytes", "1000000"], 1, "gone.csv: no such file"),
        (["trace.csv"], 2, "Missing option '--capacity-bytes'"),
        (
            ["trace.csv", "--capacity-bytes", str(2**44 + 1)],
            2,
            "17592186044417, more than 17592186044416 (16 TiB); give",
        ),
        (["trace.csv", "--capacity-bytes", "1000000", "--allocator", "cashing"], 2, "no device allocator is called"),
        (
            ["trace.csv", "--capacity-bytes", "1000000", "--alloc-conf", "max_split_size_mb:1"],
            2,
            "caching: max_split_size_mb too small, must be >= 20",
        ),
        (
            ["trace.csv", "--capacity-bytes", "1000000", "--flavour", "torch_tpu"],
            2,
            "caching: flavour must be one of torch_npu, torch_cuda, not 'torch_tpu'",
        ),
        (
            ["trace.csv", "--capacity-bytes", "1000000", "--allocator", "pooled", "--flavour", "torch_npu"],
            2,
            "pooled has no setting 'flavour'",
        ),
        (
            ["streams.csv", "--capacity-bytes", "99999999", "--allocator", "pooled"],
            2,
            "streams.csv:2: operation 0, record_stream: ",
        ),
        (
            ["twice.csv", "--capacity-bytes", "99999999"],
            2,
            "twice.csv:5: operation 2, malloc: id 0 was used by a malloc",
        ),
        (["bad.csv", "--capacity-bytes", "1000000"], 1, "bad.csv:2: unknown operation 'maloc'; did you mean 'malloc'?"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "no/where.csv"], 1, "no; create it first, or choose"),
        (
            ["trace.csv", "--capacity-bytes", "1000000", "--per-op", "rows.txt"],
            2,
            "must end in .csv, .csv.gz, .parquet",
        ),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "/dev/full"], 2, "must end in .csv, .csv.gz"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "folder.csv"], 2, "is there and no regular file"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "full.csv"], 2, "is there and no regular file"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "loop.csv"], 2, "is there and no regular file"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "trace.csv"], 2, "is the trace that is replayed"),
        (["trace.csv", "--capacity-bytes", "1000000", "--per-op", "same.csv"], 2, "is the trace that is replayed"),
    ],
)
def test_complaints(shell: Shell, trace: Path, arguments: list[str], code: int, said: str) -> None:
    (trace.parent / "bad.csv").write_text("op,id,size,stream,arg\nmaloc,0,512,0,\n", encoding="utf-8")
    (trace.parent / "streams.csv").write_text("op,id,size,stream,arg\nrecord_stream,0,,1,\n", encoding="utf-8")
    (trace.parent / "twice.csv").write_text(
        "op,id,size,stream,arg\nmalloc,0,1,0,\n\nfree,0,,,\nmalloc,0,1,0,\n", encoding="utf-8"
    )
    (trace.parent / "folder.csv").mkdir()
    for name, target in (("full", "/dev/full"), ("loop", "loop.csv"), ("same", "trace.csv")):
        (trace.parent / f"{name}.csv").symlink_to(target)
    answer = shell("replay", *arguments)
    assert trace.read_text(encoding="utf-8") == TRACE
    assert ".partial" not in answer.err
    assert answer.code == code
    assert answer.err.startswith("error: ")
    assert said in answer.err
    assert answer.out == ""
