"""``hbmtwin validate allocator``: the verdict, the difference in words, and what it says where it cannot compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators.caching import AllocatorConf, releases
from hbmtwin.validation.emulated import EmulatorUnavailable, build, npu

Shell = Callable[..., Any]

TRACE = "op,id,size,stream,arg\nmalloc,0,3000000,0,\nmalloc,1,480,0,\nfree,0,,,\nmalloc,2,50000000,0,\n"


@pytest.fixture
def emulated() -> None:
    try:
        build.build_emulator()
    except EmulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    return tmp_path / "trace.csv"


@pytest.mark.usefixtures("emulated")
def test_a_trace_file_without_a_difference(shell: Shell, trace: Path) -> None:
    answer = shell("validate", "allocator", trace, "--capacity-bytes", 40 << 20)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("no difference from torch_npu 2.13.0 on the emulated driver\n")
    assert "1 traces, 4 operations, 1 of them OutOfMemory; 504 numbers compared." in answer.out


@pytest.mark.usefixtures("emulated")
def test_made_up_traces_as_json(shell: Shell) -> None:
    found = json.loads(shell("validate", "allocator", "--operations", 600, "--seed", 5, "--json").out)
    assert found["differences"] == 0
    assert found["operations"] >= 600
    assert found["numbers_compared"] == found["operations"] * 126
    assert len(found["cases"]) >= 30
    assert found["cases"][0]["name"] == "default"
    assert found["cases"][0]["difference"] is None


@pytest.mark.usefixtures("emulated")
def test_a_difference_is_told_and_exits_with_3(shell: Shell, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "NPU_PAD", 64)
    answer = shell("validate", "allocator", trace, "--capacity-bytes", 40 << 20)
    assert answer.code == 3
    assert answer.out.startswith("1 of 1 traces differ from torch_npu 2.13.0 on the emulated driver\n")
    assert "trace.csv, operation 1 (malloc, 1, 480, 0):" in answer.out
    assert "  allocated_bytes.small_pool.current: ours 1024, real 512\n" in answer.out
    assert "  before, both, besides 1 segments that no side touched:\n" in answer.out
    assert "[active_allocated 1024 for 480] [inactive 2096128]" in answer.out
    assert "[active_allocated 512 for 480] [inactive 2096640]" in answer.out
    json_answer = shell("validate", "allocator", trace, "--capacity-bytes", 40 << 20, "--json")
    assert json_answer.code == 3
    (case,) = json.loads(json_answer.out)["cases"]
    assert case["difference"]["operation"] == 1
    assert case["difference"]["op"] == {"op": "malloc", "id": 1, "size": 480, "stream": 0, "arg": ""}


def test_without_the_real_one_it_says_what_to_do_and_exits_with_1(
    shell: Shell, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise EmulatorUnavailable("torch_npu is not installed; pip install 'hbmtwin[npu]'")

    monkeypatch.setattr(npu, "build_emulator", missing)
    answer = shell("validate", "allocator", trace)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "error: torch_npu is not installed; pip install 'hbmtwin[npu]'\n"


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_without_a_device_it_names_what_needs_none(shell: Shell, trace: Path, backend: str) -> None:
    answer = shell("validate", "allocator", trace, "--backend", backend)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.endswith("; --backend emulated needs no device\n")


@pytest.mark.usefixtures("emulated")
def test_a_trace_that_cannot_be_read(shell: Shell) -> None:
    answer = shell("validate", "allocator", "gone.csv")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: gone.csv: no such file")


@pytest.mark.usefixtures("emulated")
def test_settings_that_both_refuse_compare_nothing_and_exit_with_2(shell: Shell, trace: Path) -> None:
    answer = shell("validate", "allocator", trace, "--alloc-conf", "foo:1")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"error: {trace}: both sides refuse the settings 'foo:1', so nothing was run "
        "(ours ValueError: Unrecognized key 'foo' in NPU allocator config; "
        "real ValueError: Unrecognized key 'foo' in NPU allocator config,); correct the settings\n"
    )


@pytest.mark.usefixtures("emulated")
def test_settings_that_only_the_real_one_refuses_differ(
    shell: Shell, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllocatorConf, "parse", lambda self, text: None)
    answer = shell("validate", "allocator", trace, "--alloc-conf", "foo:1")
    assert answer.code == 3
    assert "  settings: ours no error, real ValueError: Unrecognized key 'foo'" in answer.out


@pytest.mark.usefixtures("emulated")
def test_a_trace_that_is_not_legal_is_one_line_and_exits_with_2(shell: Shell, trace: Path) -> None:
    trace.write_text(TRACE + "malloc,1,512,0,\n", encoding="utf-8")
    answer = shell("validate", "allocator", trace)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"error: {trace}: operation 4, malloc: id 1 stands for another tensor already; give each a number of its own\n"
    )
