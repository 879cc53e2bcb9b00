"""Reading traces: what is accepted, and what every fault is called."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import WorkloadError, open_trace
from hbmtwin.workloads.formats.azure import timestamp_ns
from hbmtwin.workloads.formats.rows import seconds_ns

OURS = "arrival_s,prompt_tokens,output_tokens\n"
SESSIONS = "arrival_s,prompt_tokens,output_tokens,session,turn\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def write(folder: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **settings: float) -> list[tuple[int, int, int]]:
    return [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in open_trace(path, **settings).open()]


def test_our_csv_begins_at_its_first_arrival(tmp_path: Path) -> None:
    path = write(tmp_path, OURS + "10.5,100,20\n10.5,7,1\n12.000000001,300,40\n")
    trace = open_trace(path)
    assert trace.total_requests == 3
    assert read(path) == [(0, 100, 20), (0, 7, 1), (1_500_000_001, 300, 40)]
    last = list(trace.open())[2]
    assert (last.id, last.session, last.turn, last.max_tokens, last.has_next) == (2, 2, 0, 40, False)
    assert last.spans == (("user/2/0", 0, 300),)


def test_azure_times_have_seven_digits_six_digits_none_or_a_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE
        + "2023-11-16 18:15:46.6805901,374,44\r\n"
        + "2023-11-16 18:15:47,5,6\r\n"
        + "2023-11-16 18:15:48.000001+00:00,7,8\r\n"
        + "2023-11-16 19:15:48.5+01:00,9,10\r\n"
        + "2023-11-16T18:15:49Z,11,12",
    )
    assert read(path) == [
        (0, 374, 44),
        (319_409_900, 5, 6),
        (1_319_410_900, 7, 8),
        (1_819_409_900, 9, 10),
        (2_319_409_900, 11, 12),
    ]


@pytest.mark.parametrize(
    "content",
    [
        OURS + "0,1,2\n1,3,4\n",
        OURS + "0,1,2\r\n1,3,4",
        "\ufeff" + OURS + "0,1,2\n1,3,4\n",
        OURS + "\n0,1,2\n\n1,3,4\n\n",
        "output_tokens, arrival_s ,prompt_tokens\n2,0,1\n4,1,3\n",
        '"arrival_s","prompt_tokens","output_tokens"\n"0","1","2"\n"1","3","4"\n',
        OURS + "0.0, 1, 2\n1e0, 3, 4\n",
    ],
)
def test_the_same_requests_in_many_spellings(tmp_path: Path, content: str) -> None:
    assert read(write(tmp_path, content)) == [(0, 1, 2), (10**9, 3, 4)]


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path) -> None:
    content = (OURS + "0,1,2\n1,3,4\n").encode()
    packed = write(tmp_path, gzip.compress(content), "packed.csv")
    plain = write(tmp_path, content, "plain.csv.gz")
    assert read(packed) == read(plain) == [(0, 1, 2), (10**9, 3, 4)]


def test_time_scale_multiplies_times_and_num_prompts_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path, OURS + "5,1,1\n6,2,2\n9,3,3\nnot even a number,,\n")
    assert read(path, time_scale=0.5, num_prompts=3) == [(0, 1, 1), (500_000_000, 2, 2), (2_000_000_000, 3, 3)]
    assert read(path, time_scale=3, num_prompts=2) == [(0, 1, 1), (3_000_000_000, 2, 2)]
    assert open_trace(path, num_prompts=2).total_requests == 2


def test_max_tokens_is_told_and_cuts(tmp_path: Path) -> None:
    path = write(tmp_path, OURS + "0,10,5\n0,10,500\n")
    assert [(r.output_tokens, r.max_tokens) for r in open_trace(path, max_tokens=100).open()] == [(5, 100), (100, 100)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: the file is empty; it needs a header such as arrival_s,prompt_tokens,output_tokens"),
        (OURS, ": no requests in it; it has a header only"),
        (OURS + "\n\n", ": no requests in it; it has a header only"),
        (OURS + "0,1,2\n1,x,2\n", ":3: prompt_tokens is 'x'; it must be a whole number"),
        (OURS + "0,1,2\n1,,2\n", ":3: prompt_tokens is ''; it must be a whole number"),
        (OURS + "0,1.5,2\n", ":2: prompt_tokens is '1.5'; it must be a whole number"),
        (OURS + "0,nan,2\n", ":2: prompt_tokens is 'nan'; it must be a whole number"),
        (OURS + "0,0,2\n", ":2: prompt_tokens is 0; it must be at least 1; drop lines of failed calls"),
        (OURS + "0,1,0\n", ":2: output_tokens is 0; it must be at least 1; drop lines of failed calls"),
        (OURS + "0,1,-7\n", ":2: output_tokens is -7; it must be at least 1; drop lines of failed calls"),
        (OURS + "0,1099511627777,2\n", ":2: prompt_tokens is 1099511627777; it must be at most 2^40"),
        (OURS + f"0,{'9' * 5000},2\n", f":2: prompt_tokens is '{'9' * 40}'; it must be a whole number"),
        (OURS + "\n\nnoon,1,2\n", ":4: arrival_s is 'noon'; it must be a number of seconds"),
        (OURS + ",1,2\n", ":2: arrival_s is ''; it must be a number of seconds"),
        (OURS + "nan,1,2\n", ":2: arrival_s is 'nan'; it must be a finite number of seconds, not negative"),
        (OURS + "inf,1,2\n", ":2: arrival_s is 'inf'; it must be a finite number of seconds, not negative"),
        (OURS + "-1,1,2\n", ":2: arrival_s is '-1'; it must be a finite number of seconds, not negative"),
        (
            OURS + "1700000000000,1,2\n",
            ":2: arrival_s is '1700000000000'; it must be at most 8589934592 seconds; is it in milliseconds?",
        ),
        (OURS + "0,1\n", ":2: 2 fields where the header has 3; write arrival_s,prompt_tokens,output_tokens"),
        (OURS + "0,1,2,3\n", ":2: 4 fields where the header has 3; write arrival_s,prompt_tokens,output_tokens"),
        (OURS + "5,1,2\n6,1,2\n5.5,1,2\n", ":4: arrival_s is 0.5 s before line 3; sort the file by arrival_s"),
        ("arrival_s,prompt_tokens,output_token\n0,1,2\n", ":1: no column 'output_tokens'; is it 'output_token'?"),
        (
            "arrival_s,prompt_tokens\n0,1\n",
            ":1: no column 'output_tokens'; a file of requests needs arrival_s,prompt_tokens,output_tokens",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,sesion\n0,1,2,3\n",
            ":1: unknown column 'sesion'; did you mean 'session'?",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,colour\n0,1,2,3\n",
            ":1: unknown column 'colour'; known are arrival_s, prompt_tokens, output_tokens, session, turn, tenant,",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,turn\n0,1,2,3\n",
            ":1: a column 'turn' without 'session'; add 'session'",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,arrival_s\n0,1,2,3\n",
            ":1: two columns are called 'arrival_s'; remove one",
        ),
        (
            "0,1,2\n1,3,4\n",
            ":1: no known column in '0,1,2'; write arrival_s,prompt_tokens,output_tokens, or one of the formats azure,",
        ),
        (SESSIONS + "0,1,2,a,0\n", ":2: session is 'a'; it must be a whole number"),
        (
            SESSIONS + "0,1,2,4,1\n1,1,2,4,1\n",
            ":3: turn 1 of session 4 follows its turn 1; the turns of a session must rise with time",
        ),
        (
            "TIMESTAMP,ContextTokens,Generated\n2023-11-16 18:15:46,1,2\n",
            ":1: no column 'GeneratedTokens'; is it 'Generated'?",
        ),
        (
            AZURE + "2023-11-16,1,2\n",
            ":2: TIMESTAMP is '2023-11-16'; it must be a time such as 2023-11-16 18:15:46.6805900",
        ),
        (
            AZURE + "2023-13-16 18:15:46,1,2\n",
            ":2: TIMESTAMP is '2023-13-16 18:15:46'; it must be a time such as 2023-11-16 18:15:46.6805900",
        ),
        (
            AZURE + "2023-11-16 18:15:46.5,1,2\n2023-11-16 18:15:46.4,1,2\n",
            ":3: TIMESTAMP is 0.1 s before line 2; sort the file by TIMESTAMP",
        ),
        (AZURE + "2023-11-16 18:15:46.5,1,0\n", ":2: GeneratedTokens is 0; it must be at least 1; drop lines of"),
        (OURS.encode() + b"0,1,2\n1,\xff,2\n", ":3: this is not UTF-8 text; save the file as UTF-8"),
        (b"a" * 2**21, ":1: the line is over 1 MiB long; is this a text file?"),
        (b"PK\x03\x04rest", ": this is a zip archive; unpack it first"),
        (b"PAR1rest", ": this Parquet file is damaged (Parquet magic bytes not found in footer. Either the file is"),
        (b"\x1f\x8bbroken header", ":1: the gzip file is damaged (Unknown compression method)"),
        (OURS + '0,1,"' + "2\n" * 70_000, ": this is no CSV (field larger than field limit (131072)); check the"),
    ],
)
def test_a_fault_names_file_line_and_cure(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(WorkloadError) as error:
        open_trace(path)
    assert str(error.value).startswith(str(path))
    told = str(error.value).removeprefix(str(path))
    if "no CSV" in message:  # the line is wherever the reader gave up
        told = told[told.index(": this") :]
    assert told.startswith(message)


@pytest.mark.parametrize("cut", [1, 4, 8, 100])
def test_a_truncated_gzip_says_so(tmp_path: Path, cut: int) -> None:
    content = OURS + "".join(f"{n},{n % 977 + 1},{n % 89 + 1}\n" for n in range(20_000))
    path = write(tmp_path, gzip.compress(content.encode())[:-cut])
    with pytest.raises(WorkloadError, match=r"trace\.csv:\d+: the gzip file ends early; fetch or write it again$"):
        open_trace(path)


@pytest.mark.parametrize(("rows", "members"), [(400, 1), (400, 2), (60_000, 1), (60_000, 3)])
def test_a_damaged_gzip_is_told_at_the_line_where_it_stops(tmp_path: Path, rows: int, members: int) -> None:
    lines = [OURS, *(f"{n},{n % 977 + 1},{n % 89 + 1}\n" for n in range(rows))]
    share = -(-len(lines) // members)
    parts = ["".join(lines[first : first + share]).encode() for first in range(0, len(lines), share)]
    packed = bytearray(b"".join(gzip.compress(part) for part in parts))
    # The last member's stream ends in a block of a kind that there is not: all that stands before it can be read.
    stream = zlib.compressobj(wbits=-15)
    start = stream.compress(parts[-1][:-100]) + stream.flush(zlib.Z_FULL_FLUSH)
    packed[len(packed) - len(gzip.compress(parts[-1])) + 10 :] = start + b"\xff" * 40
    line = len(lines) - parts[-1][-100:].count(b"\n") + 1
    with pytest.raises(WorkloadError) as error:
        open_trace(write(tmp_path, bytes(packed)))
    told = str(error.value).removeprefix(str(tmp_path) + "/")
    assert told.startswith(f"trace.csv:{line}: the gzip file is damaged ("), told
    assert told.endswith("; fetch or write it again")


def test_a_gzip_with_a_wrong_checksum_says_so(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress((OURS + "0,1,2\n").encode()))
    packed[-8] ^= 1
    with pytest.raises(WorkloadError, match=r"trace\.csv:3: the gzip file is damaged \(CRC check failed"):
        open_trace(write(tmp_path, bytes(packed)))


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, OURS + "0,1,2\n", "azure2023.csv")
    with pytest.raises(WorkloadError, match=r"azure2032\.csv: no such file; did you mean 'azure2023\.csv'\?$"):
        open_trace(tmp_path / "azure2032.csv")
    with pytest.raises(WorkloadError, match=r"no such file; check the path$"):
        open_trace(tmp_path / "nowhere" / "azure2032.csv")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"cannot be read \(Is a directory\)"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_scale": 0}, "time_scale must be above 0 and up to 1e9, not 0"),
        ({"time_scale": float("nan")}, "time_scale must be above 0 and up to 1e9, not nan"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, not 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"time_scale": 1e9}, "it lasts over 146 years; lower it"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, float], message: str) -> None:
    path = write(tmp_path, OURS + "0,1,2\n10,1,2\n")
    with pytest.raises(WorkloadError) as error:
        open_trace(path, **settings)
    assert str(error.value).endswith(message)


@given(ns=st.integers(0, 2**33 * 10**9))
def test_decimal_seconds_are_exact_to_the_nanosecond(ns: int) -> None:
    assert seconds_ns(f"{ns // 10**9}.{ns % 10**9:09d}") == ns


@given(text=st.from_regex(r"[0-9]{0,11}(\.[0-9]{0,12})?", fullmatch=True))
def test_seconds_are_what_decimal_says(text: str) -> None:
    try:
        seconds = Decimal(text)
    except InvalidOperation:
        seconds = Decimal(-1)
    if 0 <= seconds <= 2**33:
        assert seconds_ns(text) == round(seconds * 10**9)
    else:
        with pytest.raises(ValueError, match="it must be"):
            seconds_ns(text)


@given(moment=st.datetimes(), digits=st.integers(0, 9_999_999))
def test_time_stamps_are_exact_to_their_seventh_digit(moment: object, digits: int) -> None:
    second = str(moment).partition(".")[0]
    assert timestamp_ns(f"{second}.{digits:07d}") == timestamp_ns(second) + digits * 100


def test_a_known_time_stamp() -> None:
    assert timestamp_ns("2023-11-16 18:15:46.6805900") == 1_700_158_546_680_590_000


def test_a_long_file_is_never_in_memory(tmp_path: Path) -> None:
    rows = 40_000
    with (tmp_path / "long.csv").open("w") as out:
        out.write(OURS)
        out.writelines(f"{n * 0.01:.2f},{n % 4000 + 1},{n % 500 + 1}\n" for n in range(rows))
    tracemalloc.start()
    trace = open_trace(tmp_path / "long.csv")
    tokens = sum(r.prompt_tokens for r in trace.open())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.total_requests == rows
    assert tokens == rows * 4001 // 2
    assert peak_bytes < 200_000  # the file has 600,000 bytes, its requests as objects over 10 million


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not beside this checkout")
def test_the_azure_2023_conversation_trace() -> None:
    trace = open_trace(TRACES / "azure2023_conv.csv.gz")
    assert trace.total_requests == 19_366
    requests = list(trace.open())
    assert (requests[0].arrival_ns, requests[0].prompt_tokens, requests[0].output_tokens) == (0, 374, 44)
    assert requests[-1].arrival_ns == 3_501_721_937_000
    assert sum(r.prompt_tokens for r in requests) == 22_361_870  # 1,154.7 a request
    assert sum(r.output_tokens for r in requests) == 4_088_665  # 211.1
    assert max(r.prompt_tokens for r in requests) == 14_050
    assert max(r.output_tokens for r in requests) == 1_000
