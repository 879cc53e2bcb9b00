"""Broken traces of every format: one line with key, file, line, what and cure, exit 1; and which can be skipped."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Request, WorkloadError, open_trace, write_trace

Shell = Callable[..., Any]

OURS = "arrival_s,prompt_tokens,output_tokens\n"
GOOD = "0,5,2\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_GOOD = "2023-11-16 18:15:46.5,5,2\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_GOOD = "5,ChatGPT,5,2,7,API log\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
SPLIT = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
AGENTS = "session,call,t_s,input_chars,output_chars,shared_prefix_chars\n"


def mooncake(**changes: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], **changes}) + "\n"


def bailian(**changes: Any) -> str:
    record = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 20, "output_length": 5}
    return json.dumps({**record, "hash_ids": [0, 1], **changes}) + "\n"


def weka(**changes: Any) -> str:
    return json.dumps({"id": "a", "t": 0, "in": 100, "out": 5, "hash_ids": [0], **changes}) + "\n"


def ours(**changes: Any) -> str:
    return json.dumps({"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 2, **changes}) + "\n"


def damaged(content: str) -> bytes:
    packed = bytearray(gzip.compress(content.encode()))
    packed[-8] ^= 1
    return bytes(packed)


LONG = OURS + "".join(f"{n},{n * 7919 % 911 + 1},{n % 89 + 1}\n" for n in range(5_000))


class Case(NamedTuple):
    id: str
    content: str | bytes
    line: int | None
    """None: an error of the file, not of a line of it; -1: wherever its reader gave up."""
    said: str
    skipped: int | None = 1
    """Lines that ``skip_bad_lines`` leaves out; None where the file is broken as a whole."""


CASES = [
    # whole files
    Case("empty", "", 1, "the file is empty; it needs a header such as arrival_s,prompt_tokens,output_tokens", None),
    Case("blank", "\n \n\n", 1, "the file is empty; it needs a header such as arrival_s,prompt_tokens,outpu", None),
    Case("header_only", OURS, None, "no requests in it; it has a header only", None),
    Case("azure_header_only", AZURE, None, "no requests in it; it has a header only", None),
    Case("all_failed", BURST + "5,GPT-4,5,0,5,API log\n", None, "no requests in it; its only call failed; ke", None),
    Case("cut_gzip", gzip.compress(LONG.encode())[:-9], -1, "the gzip file ends early; fetch or write it again", None),
    Case("damaged_gzip", damaged(OURS + GOOD), -1, "the gzip file is damaged (CRC check failed", None),
    Case("not_utf8", OURS.encode() + b"0,5,2\n1,\xff,2\n", 3, "this is not UTF-8 text; save the file as UTF-8", None),
    Case("utf16", (OURS + GOOD).encode("utf-16"), 1, "this is not UTF-8 text; save the file as UTF-8", None),
    Case("zip", b"PK\x03\x04rest", None, "this is a zip archive; unpack it first", None),
    Case("zstd", b"\x28\xb5\x2f\xfdrest", None, "this is zstd compressed; unpack it first (zstd -d)", None),
    Case("parquet_cut", b"PAR1rest", None, "this Parquet file is damaged (", None),
    Case("long_line", b"a" * 2**21, 1, "the line is over 1 MiB long; is this a text file?", None),
    Case("binary", bytes(range(128)) * 9, 1, "no known column in", None),
    Case("json_array", '[{"conversations": []}]', 1, "this is a JSON array; write one object a line; texts such", None),
    Case("long_array", "[" + "1," * 2**20, 1, "this is a JSON array; write one object a line", None),
    Case(
        "sharegpt_texts", '{"id": "x", "conversations": []}\n', 1, "these are ShareGPT's texts, and how many to", None
    ),
    Case(
        "servegen", '{"client": 0, "windows": [], "dataset": {}}\n', 1, "this is a ServeGen file, a model of cli", None
    ),
    Case(
        "step_times", "model,prompt_time,token_time\nx,1,2\n", 1, "these are measured step times (splitwise-sim", None
    ),
    Case(
        "nested_weka",
        '{"id": "a", "block_size": 64, "requests": []}\n',
        1,
        "this is a conversation with all of i",
        None,
    ),
    Case("engine_log", "t,running,waiting\n1,2,3\n", 1, "this is an engine's log over time, no requests; take", None),
    Case(
        "no_times", "num_prefill_tokens,num_decode_tokens\n5,2\n", None, "a Vidur file with lengths and no times", None
    ),
    Case("no_header", "0,5,2\n1,5,2\n", 1, "no known column in '0,5,2'; write arrival_s,prompt_tokens,output_to", None),
    # headers
    Case(
        "missing_column", "arrival_s,prompt_tokens\n0,5\n", 1, "no column 'output_tokens'; a file of requests ne", None
    ),
    Case(
        "misspelt", "TIMESTAMP,ContextTokens,Generated\nx,5,2\n", 1, "no column 'GeneratedTokens'; is it 'Generat", None
    ),
    Case(
        "unknown_column", "arrival_s,prompt_tokens,output_tokens,sesion\n0,5,2,1\n", 1, "unknown column 'sesion'", None
    ),
    Case(
        "two_columns", "arrival_s,arrival_s,prompt_tokens,output_tokens\n0,0,5,2\n", 1, "two columns are called", None
    ),
    Case(
        "turn_alone", "arrival_s,prompt_tokens,output_tokens,turn\n0,5,2,0\n", 1, "a column 'turn' without 'sess", None
    ),
    Case(
        "azure_columns", "TIMESTAMP,ContextTokens,GeneratedTokens,User\nx,1,2,3\n", 1, "unknown column 'User'; kn", None
    ),
    Case(
        "json_keys",
        '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_id": [0]}',
        1,
        "no column 'hash",
        None,
    ),
    # lines of CSV
    Case("few_fields", OURS + GOOD + "1,5\n", 3, "2 fields where the header has 3; write arrival_s,prompt_tokens,o"),
    Case("many_fields", OURS + GOOD + "1,5,2,9\n", 3, "4 fields where the header has 3; write arrival_s,prompt_tok"),
    Case("text", OURS + GOOD + "1,ten,2\n", 3, "prompt_tokens is 'ten'; it must be a whole number"),
    Case("nothing", OURS + GOOD + "1,,2\n", 3, "prompt_tokens is ''; it must be a whole number"),
    Case("half_a_token", OURS + GOOD + "1,1.5,2\n", 3, "prompt_tokens is '1.5'; it must be a whole number"),
    Case("nan_tokens", OURS + GOOD + "1,nan,2\n", 3, "prompt_tokens is 'nan'; it must be a whole number"),
    Case("negative", OURS + GOOD + "1,5,-7\n", 3, "output_tokens is -7; it must be at least 1; drop lines of faile"),
    Case("zero", OURS + GOOD + "1,0,2\n", 3, "prompt_tokens is 0; it must be at least 1; drop lines of failed cal"),
    Case("huge", OURS + GOOD + "1,1099511627777,2\n", 3, "prompt_tokens is 1099511627777; it must be at most 2^40"),
    Case("endless", OURS + GOOD + f"1,{'9' * 5000},2\n", 3, f"prompt_tokens is '{'9' * 40}'; it must be a whole num"),
    Case("nan_time", OURS + GOOD + "nan,5,2\n", 3, "arrival_s is 'nan'; it must be a finite number of seconds, not"),
    Case("no_time", OURS + GOOD + "soon,5,2\n", 3, "arrival_s is 'soon'; it must be a number of seconds"),
    Case("negative_time", OURS + "-1,5,2\n" + GOOD, 2, "arrival_s is '-1'; it must be a finite number of seconds, no"),
    Case("milliseconds", OURS + GOOD + "1700000000000,5,2\n", 3, "arrival_s is '1700000000000'; it must be at most"),
    Case("out_of_order", OURS + "5,5,2\n6,5,2\n5.5,5,2\n", 4, "arrival_s is 0.5 s before line 3; sort the file by arr"),
    Case("quote", OURS + '0,5,"' + "2\n" * 70_000, -1, "this is no CSV (field larger than field limit", None),
    Case("same_turn", OURS[:-1] + ",session,turn\n0,5,2,4,1\n1,5,2,4,1\n", 3, "turn 1 of session 4 follows its turn"),
    Case("session", OURS[:-1] + ",session\n0,5,2,4\n1,5,2,a\n", 3, "session is 'a'; it must be a whole number"),
    Case("spans", OURS[:-1] + ',spans\n0,5,2,\n1,5,2,"[[""a"",0,4]]"\n', 3, "spans have 4 tokens for prompt_tokens 5;"),
    Case("day", AZURE + AZURE_GOOD + "2023-11-16,5,2\n", 3, "TIMESTAMP is '2023-11-16'; it must be a time such as 20"),
    Case("month", AZURE + AZURE_GOOD + "2023-13-16 18:15:46,5,2\n", 3, "TIMESTAMP is '2023-13-16 18:15:46'; it mus"),
    Case("azure_zero", AZURE + AZURE_GOOD + "2023-11-16 18:15:47,5,0\n", 3, "GeneratedTokens is 0; it must be at le"),
    Case("azure_order", AZURE + AZURE_GOOD + "2023-11-16 18:15:46,5,2\n", 3, "TIMESTAMP is 0.5 s before line 2; so"),
    Case("burst_text", BURST + BURST_GOOD + "6,GPT-4,5,many,7,API log\n", 3, "Response tokens is 'many'; it must be"),
    Case("burst_negative", BURST + BURST_GOOD + "6,GPT-4,-5,2,7,API log\n", 3, "Request tokens is -5; it must be at"),
    Case("vidur_time", VIDUR + "0,5,2\ninf,5,2\n", 3, "arrived_at is 'inf'; it must be a finite number of seconds"),
    Case(
        "batch", SPLIT + "0,2,0,0.1,1,5,2\n1,2,0,0.2,4,5,2\n", 3, "batch_size is 4; write one line for each request of"
    ),
    Case("agent_shared", AGENTS + "0,1,0,40,4,0\n0,2,1,40,4,41\n", 3, "shared_prefix_chars is 41; it must be at most"),
    Case(
        "agent_calls", AGENTS + "0,2,0,40,4,0\n0,1,1,40,4,0\n", 3, "call 1 follows call 2; the calls of a session must"
    ),
    Case(
        "agent_order", AGENTS + "1,1,0,40,4,0\n0,1,1,40,4,0\n", 3, "session 0 follows session 1; sort the file by ses"
    ),
    # lines of JSON
    Case("cut_object", mooncake() + '{"timestamp": 3', 2, "this is no JSON (Expecting ',' delimiter: line 1 column"),
    Case("a_list", mooncake() + "[1, 2]\n", 2, "this is a list where an object is needed; write an object such a"),
    Case("a_number", mooncake() + "12\n", 2, "this is the value '12' where an object is needed; write an object s"),
    Case("json_nan", mooncake() + mooncake(timestamp=float("nan")), 2, "this is no JSON (NaN is no number); write an"),
    Case(
        "two_keys", ours() + '{"arrival_s": 1, "arrival_s": 2, "prompt_tokens": 5, "output_tokens": 2}', 2, "this is n"
    ),
    Case("other_key", ours() + ours(arrival_s=1, sesion=3), 2, "unknown column 'sesion'; did you mean 'session'?"),
    Case("no_output", ours() + '{"arrival_s": 1, "prompt_tokens": 5}', 2, "output_tokens is ''; it must be a whole nu"),
    Case("true", ours() + ours(arrival_s=1, output_tokens=True), 2, "output_tokens is 'True'; it must be a whole numb"),
    Case("turn_no_session", ours() + ours(arrival_s=1, turn=3), 2, "a turn without a session; write its session too"),
    Case("bad_piece", ours() + ours(arrival_s=1, spans=[["a", 0]]), 2, "a piece of spans is \"['a', 0]\"; write piec"),
    Case("few_ids", mooncake() + mooncake(input_length=1025), 2, "2 hash_ids for input_length 1025; there must be one"),
    Case("ids_no_list", mooncake() + mooncake(hash_ids="01"), 2, "hash_ids is '01'; it must be a list of whole number"),
    Case("id_text", mooncake() + mooncake(hash_ids=[0, "1"]), 2, "an id in hash_ids is '1'; it must be a whole number"),
    Case("id_negative", mooncake() + mooncake(hash_ids=[0, -1]), 2, "an id in hash_ids is '-1'; it must be from 0 to"),
    Case("negative_ms", mooncake() + mooncake(timestamp=-3), 2, "timestamp / 1000 is '-0.003'; it must be a finite nu"),
    Case("text_ms", mooncake() + mooncake(timestamp="soon"), 2, "timestamp is 'soon'; it must be a number of millisec"),
    Case("ticks_back", mooncake(timestamp=3000) + mooncake(), 2, "timestamp is 3 s before line 1; sort the file by ti"),
    Case("chat", bailian() + bailian(chat_id="x"), 2, "chat_id is 'x'; it must be a whole number from 0"),
    Case(
        "chat_ids", bailian() + bailian(chat_id=2, hash_ids=[0]), 2, "1 hash_ids for input_length 20; there must be o"
    ),
    Case("weka_ids", weka() + weka(t=1, hash_ids=[0, 1, 2]), 2, "3 hash_ids for in 100; there must be one for each"),
    Case("weka_id", weka() + weka(t=1, id=None), 2, "id is ''; it must name the conversation"),
    Case(
        "text_only",
        '{"prompt": "a", "output_tokens": 2}\n',
        1,
        "a prompt of text without prompt_tokens; how many",
        None,
    ),
]


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 30
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_broken_trace(shell: Shell, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "trace"
    path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    place = "trace: " if case.line is None else f"trace:{case.line}: "

    def said(error: str) -> None:
        if case.line == -1:
            where, _, error = error.partition(": ")
            assert re.fullmatch(r"trace:\d+", where)
            assert error.startswith(case.said)
        else:
            assert error.startswith(place + case.said)

    answer = shell("run", "--set", "workload.trace=trace")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: workload.trace: trace")
    assert answer.err.count("\n") == 1
    said(answer.err.removeprefix("error: workload.trace: "))
    if case.skipped is None:
        with pytest.raises(WorkloadError) as error:
            open_trace(path, skip_bad_lines=True)
        told = str(error.value).removeprefix(str(tmp_path) + "/")
        if case.id == "text_only":
            assert told.startswith("trace: no requests in it; its only line is bad: ")
        else:
            said(told)
    else:
        trace = open_trace(path, skip_bad_lines=True)
        assert trace.total_requests is not None
        assert trace.total_requests >= 1
        told = "1 bad line was" if case.skipped == 1 else f"{case.skipped} bad lines were"
        assert trace.notes[0].startswith(f"{told} skipped; the first: {path}:{case.line}: ")
        assert len(list(trace.recorded())) == trace.total_requests
        assert trace.notes[0].startswith(told)


def test_no_such_file_and_a_folder(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "azure2023.csv").write_text(AZURE + AZURE_GOOD)
    answer = shell("run", "--set", "workload.trace=azure2032.csv")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "error: workload.trace: azure2032.csv: no such file; did you mean 'azure2023.csv'?\n"
    answer = shell("run", "--set", f"workload.trace={tmp_path}")
    assert answer.err.startswith(f"error: workload.trace: {tmp_path}: cannot be read (Is a directory)")
    assert answer.code == 1


def test_a_pipe_and_a_name_that_no_file_has(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = shell("run", "--set", "workload.trace=pipe")
    assert answer.code == 1
    assert answer.err == (
        "error: workload.trace: pipe: this is no regular file, and a trace is read more than once; write it to a file\n"
    )
    with pytest.raises(WorkloadError, match=r"^'a\\x00b': no file has such a name \(embedded null byte\); check"):
        open_trace("a\0b")


def test_skipped_lines_are_told_on_the_terminal_and_in_the_summary(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(OURS + GOOD + "1,ten,2\n2,5,2\n3,5\n4,5,2\n")
    answer = shell(
        "run", "--json", "--set", "workload.trace=trace.csv", "--set", "workload.skip_bad_lines=true",
        "--set", "workload.priorities=[1,1]", "--set", "workload.samples=2",
    )  # fmt: skip
    note = (
        "workload.trace: 2 bad lines were skipped; the first: trace.csv:3: prompt_tokens is 'ten'; it must be a whole "
        "number"
    )
    assert answer.code == 0
    assert f"note: {note}\n" in answer.err
    summary = json.loads(answer.out)
    assert note in summary["notes"]
    assert summary["requests_total"] == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["workload.trace_format=azur"], "no trace format 'azur'; did you mean 'azure'?"),
        (["workload.trace_format=burstgpt"], "trace.csv:1: no column 'Timestamp'; a BurstGPT trace needs Timestamp,"),
        (["workload.trace_jitter=true"], "trace.csv: jitter spreads times that are ticks; those of a file of requests"),
    ],
)
def test_settings_that_do_not_go_with_the_trace(shell: Shell, tmp_path: Path, settings: list[str], said: str) -> None:
    (tmp_path / "trace.csv").write_text(OURS + GOOD)
    answer = shell("run", "--set", "workload.trace=trace.csv", *(x for s in settings for x in ("--set", s)))
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: workload.trace: {said}")


# -- anything at all -------------------------------------------------------------------------------------------------

HEADS = st.sampled_from(
    [
        OURS,
        OURS[:-1] + ",session,turn,tenant,spans\n",
        AZURE,
        BURST,
        VIDUR,
        SPLIT,
        AGENTS,
        "",
        mooncake(),
        bailian(),
        weka(),
        ours(),
    ]
)
CELLS = st.one_of(
    st.sampled_from(
        ["0", "1", "-1", "5", "nan", "1e999999999", "1e-999999999", "[]", '""', '"', "2023-11-16 18:15:46"]
    ),
    st.text(max_size=6),
)
CSV_LINES = st.lists(CELLS, max_size=8).map(lambda cells: ",".join(cells) + "\n")
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2**65), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        *(
            "timestamp",
            "input_length",
            "output_length",
            "hash_ids",
            "chat_id",
            "parent_chat_id",
            "id",
            "t",
            "in",
            "out",
        ),
        *("arrival_s", "prompt_tokens", "output_tokens", "session", "turn", "tenant", "spans"),
    ]
)
JSON_LINES = st.dictionaries(KEYS, VALUES, max_size=8).map(lambda record: json.dumps(record) + "\n")
TEXT_LINES = st.text(max_size=20).map(lambda text: text + "\n")


def reads_or_says_why(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for skip in (False, True):
        try:
            requests = list(open_trace(path, skip_bad_lines=skip).recorded())
        except WorkloadError:
            continue
        for r in requests:
            assert sum(length for _, _, length in r.spans) == r.prompt_tokens >= 1
            assert r.arrival_ns >= 0


@given(head=HEADS, lines=st.lists(CSV_LINES | JSON_LINES | TEXT_LINES, max_size=6))
def test_any_lines_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, head: str, lines: list[str]) -> None:
    text = head + "".join(lines)
    reads_or_says_why(tmp_path_factory.getbasetemp() / "any_lines", text.encode("utf-8", "surrogatepass"))


@given(
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4), cut=st.integers(0, 9)
)
def test_any_damage_to_a_parquet_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    """Damage from the end, where Parquet has its names and types."""
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    spans = (("system", 0, 60), ("mine", 0, 40))
    write_trace((Request(i, i, 0, i * 10**8, 100, 5, 5, spans) for i in range(40)), path)
    content = bytearray(path.read_bytes())
    for where, byte in flips:
        content[-1 - where % len(content)] = byte
    reads_or_says_why(path, bytes(content[: len(content) - cut]))


@given(
    start=st.sampled_from([b"", b"PAR1", b"\x1f\x8b\x08\x00", b"{", b"[", b"\xef\xbb\xbf"]), rest=st.binary(max_size=60)
)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, start: bytes, rest: bytes) -> None:
    reads_or_says_why(tmp_path_factory.getbasetemp() / "any_bytes", start + rest)
