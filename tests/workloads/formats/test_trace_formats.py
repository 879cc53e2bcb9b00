"""Every format by a tiny file with its requests as literals, and the recorded traces by their figures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hbmtwin.workloads import Replay, WorkloadError, open_trace, trace_lengths
from hbmtwin.workloads.formats.agent_sessions import cut, tokens_of
from hbmtwin.workloads.formats.session_numbers import session_number
from hbmtwin.workloads.formats.traces import FORMATS
from hbmtwin.workloads.records import Span

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not beside this checkout")


def write(folder: Path, content: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def figures(trace: Replay) -> list[tuple[int, int, int]]:
    return [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in trace.recorded()]


class Sample(NamedTuple):
    format: str
    content: str
    requests: list[tuple[int, int, int]]


MS = 10**6
SAMPLES = [
    Sample("requests", "arrival_s,prompt_tokens,output_tokens\n1,10,2\n1.5,20,3\n", [(0, 10, 2), (500 * MS, 20, 3)]),
    Sample(
        "requests",
        '{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 2}\n'
        '{"arrival_s": 1.5, "prompt_tokens": 20, "output_tokens": 3, "session": 4, "turn": 0}\n',
        [(0, 10, 2), (500 * MS, 20, 3)],
    ),
    Sample(
        "azure",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        [(0, 374, 44), (4_314_579_000, 396, 109)],
    ),
    Sample(
        "azure",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:00.017335+00:00,2399,6\n2024-05-10 00:00:01,7,1\n",
        [(0, 2162, 5), (7_405_000, 2399, 6), (990_070_000, 7, 1)],
    ),
    Sample(
        "azure",
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15 12:00:00.0000000,0,100,10\n2024-10-15 12:00:00.5000000,2,1700,11\n",
        [(0, 100, 10), (500 * MS, 1700, 11)],
    ),
    Sample(
        "mooncake",
        '{"timestamp": 27482, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30535.5, "input_length": 512, "output_length": 26, "hash_ids": [46]}\n',
        [(0, 655, 52), (3_053_500_000, 512, 26)],
    ),
    Sample(
        "burstgpt",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n",
        [(0, 472, 18), (113 * 10**9, 417, 276)],
    ),
    Sample(
        "bailian",
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
        '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 30, "output_length": 80, '
        '"type": "text", "turn": 2, "hash_ids": [1089, 1090]}\n',
        [(0, 33, 132), (1_386 * MS, 30, 80)],
    ),
    Sample(
        "weka",
        '{"id": "a", "t": 0, "in": 150, "out": 20, "hash_ids": [0, 1]}\n'
        '{"id": "a", "t": 0.25, "in": 192, "out": 9, "hash_ids": [0, 1, 2]}\n',
        [(0, 150, 20), (250 * MS, 192, 9)],
    ),
    Sample(
        "vidur",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,4\n0.75,200,5\n",
        [(0, 100, 4), (250 * MS, 200, 5)],
    ),
    Sample(
        "splitwise",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        "0,2,0,0.1,1,374,44\n1,2,3,0.35,1,396,109\n",
        [(0, 374, 44), (250 * MS, 396, 109)],
    ),
    Sample(
        "lengths",
        "arrival_s,input_tokens,output_tokens\n0.5,2361,532\n1,1128,772\n",
        [(0, 2361, 532), (500 * MS, 1128, 772)],
    ),
    Sample(
        "served",
        '{"request_id": "bench-0", "input_toks": 2361, "output_toks": 532, "arrival_time": 1777142984.5786855, '
        '"queued_ts": 479894.5}\n'
        '{"request_id": "bench-1", "input_toks": 1128, "output_toks": 772, "arrival_time": 1777142984.5786857}\n',
        [(0, 2361, 532), (200, 1128, 772)],
    ),
    Sample(
        "agents",
        "session,call,t_s,input_chars,output_chars,shared_prefix_chars\n"
        "0,1,0.0,4000,400,0\n0,2,2.5,4400,1,4000\n1,1,0.0,800,0,0\n",
        [(0, 1000, 100), (2_500 * MS, 1100, 1), (2_500 * MS, 200, 1)],
    ),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{i}-{sample.format}" for i, sample in enumerate(SAMPLES)])
def test_a_tiny_file_of_each_format(tmp_path: Path, sample: Sample) -> None:
    path = write(tmp_path, sample.content)
    assert figures(open_trace(path)) == sample.requests
    assert figures(open_trace(path, format=sample.format)) == sample.requests
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(sample.content.encode()))
    assert figures(open_trace(packed)) == sample.requests


def test_each_format_that_has_times_is_among_the_samples() -> None:
    assert {sample.format for sample in SAMPLES} == {format.name for format in FORMATS} - {"custom"}


@pytest.mark.parametrize(
    ("format", "content", "lengths"),
    [
        ("vidur", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n", [(3772, 54)]),
        ("lengths", "input_tokens,output_tokens\n2361,532\n1128,772\n", [(2361, 532), (1128, 772)]),
        (
            "custom",
            '{"prompt": "What is the capital of India?", "prompt_tokens": 7, "output_tokens": 10}\n',
            [(7, 10)],
        ),
    ],
)
def test_a_file_without_times_has_lengths_and_is_no_traffic(
    tmp_path: Path, format: str, content: str, lengths: list[tuple[int, int]]
) -> None:
    path = write(tmp_path, content)
    assert list(trace_lengths(path)) == list(trace_lengths(path, format=format)) == lengths
    assert list(trace_lengths(path, num_prompts=1)) == lengths[:1]
    with pytest.raises(WorkloadError, match=r"with lengths and no times, so it cannot be replayed; add a column"):
        open_trace(path)


def test_failed_calls_are_dropped_and_counted_or_sent(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES[6].content)
    trace = open_trace(path)
    assert trace.notes == (f"{path}: 1 failed call was dropped",)
    kept = open_trace(path, keep_failed=True)
    assert figures(kept) == [(0, 472, 18), (40 * 10**9, 1087, 1), (113 * 10**9, 417, 276)]
    assert kept.notes == ()


def test_burstgpt_sessions_have_numbers_above_those_of_lines(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = write(
        tmp_path,
        head + "0.0,1722ac82,43,GPT-4,100,10,110,Conversation log\n1.0,,3,GPT-4,50,5,55,API log\n"
        "2.0,1722ac82,1,GPT-4,200,20,220,Conversation log\n",
    )
    number = session_number("1722ac82")
    assert number is not None
    assert 2**52 <= number < 2**53
    requests = list(open_trace(path).recorded())
    assert [(r.session, r.turn, r.has_next) for r in requests] == [(number, 0, True), (1, 0, False), (number, 1, False)]
    assert requests[2].spans == (
        (f"user/{number}/0", 0, 100),
        (f"out/{number}/0/0", 0, 10),
        (f"user/{number}/1", 0, 90),
    )


def test_bailian_children_go_on_with_their_parent_s_session(tmp_path: Path) -> None:
    def line(chat: int, parent: int, ids: list[int], at: float) -> str:
        tokens = 16 * len(ids) - 3
        record = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": tokens}
        return json.dumps({**record, "output_length": 5, "hash_ids": ids}) + "\n"

    path = write(
        tmp_path,
        line(100, -1, [0, 1], 1)
        + line(101, 100, [0, 1, 2], 2)
        + line(102, 100, [0, 1, 3], 3)  # the parent has a child already
        + line(103, 101, [0, 1, 2, 4], 4)
        + line(104, 7, [5], 5),  # its parent is not in the file
    )
    requests = list(open_trace(path).recorded())
    assert [(r.session, r.turn) for r in requests] == [(100, 0), (100, 1), (102, 0), (100, 2), (104, 0)]
    assert [r.has_next for r in requests] == [True, True, False, False, False]
    assert requests[2].spans == (("bailian", 0, 32), ("bailian", 48, 13))


def test_weka_ids_are_full_blocks_and_the_rest_is_new(tmp_path: Path) -> None:
    requests = list(open_trace(write(tmp_path, SAMPLES[8].content)).recorded())
    assert requests[0].spans == (("weka", 0, 128), ("weka/1", 0, 22))
    assert requests[1].spans == (("weka", 0, 192),)
    assert requests[0].session == requests[1].session == session_number("a")
    with_partial = write(tmp_path, '{"id": "a", "t": 0, "in": 150, "out": 20, "hash_ids": [0, 1, 5]}')
    assert next(open_trace(with_partial).recorded()).spans == (("weka", 0, 128), ("weka", 320, 22))


def test_applications_are_tenants(tmp_path: Path) -> None:
    assert [r.tenant for r in open_trace(write(tmp_path, SAMPLES[10].content)).recorded()] == [0, 3]


def test_an_agent_s_call_begins_with_the_latest_that_is_long_enough(tmp_path: Path) -> None:
    head = "session,call,t_s,input_chars,output_chars,shared_prefix_chars\n"
    path = write(tmp_path, head + "0,1,0,400,4,0\n0,2,1,80,4,8\n0,3,2,480,4,400\n0,4,3,40,4,40\n1,1,0,40,4,0\n")
    spans = [r.spans for r in open_trace(path).recorded()]
    assert spans == [
        (("agent/0/1", 0, 100),),
        (("agent/0/1", 0, 2), ("agent/0/2", 0, 18)),
        (("agent/0/1", 0, 100), ("agent/0/3", 0, 20)),
        (("agent/0/1", 0, 10),),
        (("agent/1/1", 0, 10),),
    ]


def test_characters_and_cuts() -> None:
    assert [tokens_of(chars) for chars in (0, 1, 4, 5562, 10)] == [1, 1, 1, 1390, 2]
    assert cut((("a", 5, 10), ("b", 0, 10)), 12) == (("a", 5, 10), ("b", 0, 2))


def test_our_own_with_spans_tenants_and_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"arrival_s": 0, "prompt_tokens": 70, "output_tokens": 9, "session": 4, "tenant": 2, '
        '"spans": [["system", 0, 50], ["system", 50, 5], ["mine", 3, 15]]}\n'
        '{"arrival_s": 1, "prompt_tokens": 30, "output_tokens": 9}\n',
    )
    first, second = open_trace(path).recorded()
    assert (first.session, first.tenant) == (4, 2)
    assert first.spans == (("system", 0, 55), ("mine", 3, 15))
    assert (second.session, second.tenant, second.spans) == (1, 0, (("user/1/0", 0, 30),))


PARQUETS: list[tuple[str, dict[str, Any]]] = [
    ("ours", {"arrival_s": [1.5, 2.0], "prompt_tokens": [10, 20], "output_tokens": [1, 2]}),
    (
        "azure",
        {
            "TIMESTAMP": pa.array([1_500_000, 2_000_000], pa.timestamp("us")),
            "ContextTokens": [10, 20],
            "GeneratedTokens": pa.array([1, 2], pa.int32()),
        },
    ),
    ("texts", {"arrived_at": ["1.5", "2"], "num_prefill_tokens": ["10", "20"], "num_decode_tokens": ["1", "2"]}),
]


@pytest.mark.parametrize("columns", [columns for _, columns in PARQUETS], ids=[name for name, _ in PARQUETS])
def test_a_parquet_file_is_read_whatever_its_name(tmp_path: Path, columns: dict[str, Any]) -> None:
    pq.write_table(pa.table(columns), tmp_path / "trace.data", row_group_size=1)
    assert figures(open_trace(tmp_path / "trace.data")) == [(0, 10, 1), (500 * MS, 20, 2)]


# -- the recorded traces -----------------------------------------------------------------------------------------------


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests", "sessions", "last_ns", "prompt_tokens", "output_tokens"),
    [
        ("azure2023_conv.csv.gz", 19_366, 19_366, 3_501_721_937_000, 22_361_870, 4_088_665),
        ("mooncake_fast25_conversation.jsonl.gz", 12_031, 12_031, 3_536_999_000_000, 144_793_823, 4_122_048),
        ("lmcache_agent_miniswe_lengths.csv.gz", 402, 20, 461_400_000_000, 2_418_553, 45_742),
        ("lmcache_agent_taubench_lengths.csv.gz", 471, 24, 167_363_000_000, 78_044, 10_430),
        ("served_runs/sharegpt-300-sps10_qwen3.csv", 300, 300, 29_136_836_000, 258_691, 199_486),
        ("served_runs/RTXPRO6000_Qwen3-32B/requests.jsonl", 300, 300, 29_122_213_500, 258_691, 199_486),
    ],
)
def test_the_recorded_traces(
    name: str, requests: int, sessions: int, last_ns: int, prompt_tokens: int, output_tokens: int
) -> None:
    read = list(open_trace(TRACES / name).recorded())
    assert len(read) == requests
    assert len({r.session for r in read}) == sessions
    assert read[-1].arrival_ns == last_ns
    assert sum(r.prompt_tokens for r in read) == prompt_tokens
    assert sum(r.output_tokens for r in read) == output_tokens
    for r in read:
        assert sum(length for _, _, length in r.spans) == r.prompt_tokens


def common_tokens(a: tuple[Span, ...], b: tuple[Span, ...]) -> int:
    tokens = 0
    for (stream, start, length), (other, begin, size) in zip(a, b, strict=False):
        if (stream, start) != (other, begin):
            break
        tokens += min(length, size)
        if length != size:
            break
    return tokens


@needs_traces
@pytest.mark.parametrize(("name", "shared"), [("miniswe", 2_264_185), ("taubench", 67_532)])
def test_agents_share_what_the_file_says(name: str, shared: int) -> None:
    """0.94 and 0.87 of what was sent was in an earlier call of the same session: by the file, and by the spans."""
    sessions: dict[int, list[tuple[Span, ...]]] = {}
    by_spans = 0
    for r in open_trace(TRACES / f"lmcache_agent_{name}_lengths.csv.gz").recorded():
        earlier = sessions.setdefault(r.session, [])
        by_spans += max((common_tokens(r.spans, spans) for spans in earlier), default=0)
        earlier.append(r.spans)
    assert by_spans == pytest.approx(shared, rel=0.002)


@needs_traces
def test_the_lengths_of_vidur_s_arxiv_papers() -> None:
    lengths = list(trace_lengths(TRACES / "vidur_arxiv_summarization_lengths.csv.gz"))
    assert len(lengths) == 28_257
    assert round(sum(prompt for prompt, _ in lengths) / 28_257) == 2588
    assert round(sum(output for _, output in lengths) / 28_257) == 291
    assert max(output for _, output in lengths) == 4056


@needs_traces
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("servegen_reason_deepseek-r1.jsonl.gz", "this is a ServeGen file, a model of clients and no trace"),
        ("splitwise_perf_model.csv.gz", "these are measured step times"),
        ("served_runs/RTXPRO6000_Qwen3-32B/timeseries.csv", "this is an engine's log over time"),
        ("inference_perf_workload_catalog.json", "this is no JSON"),
        ("vidur_arxiv_summarization_lengths.csv.gz", "a Vidur file with lengths and no times"),
    ],
)
def test_what_stands_beside_traces_is_told_apart(name: str, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        open_trace(TRACES / name)
    assert said in str(error.value)
