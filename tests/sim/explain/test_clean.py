"""Lines without what stands around and in front of them."""

from __future__ import annotations

import io
import time

import pytest

from hbmtwin.sim.explain import decode as decoding
from hbmtwin.sim.explain.clean import clean
from hbmtwin.sim.explain.decode import decode, read_limited
from hbmtwin.sim.explain.findings import Line

MESSAGE = "Available KV cache memory: 3.00 GiB"


def lines(text: str | bytes) -> list[Line]:
    return clean(decode(text))


@pytest.mark.parametrize(
    ("front", "rank"),
    [
        ("", ""),
        ("INFO 11-30 05:12:33 [gpu_worker.py:298] ", ""),
        ("INFO 11-30 05:12:33.481 [v1/worker/gpu_worker.py:298] ", ""),
        ("INFO 08-06 01:39:22 worker.py:267] ", ""),
        ("(Worker_TP0 pid=123) INFO 11-30 05:12:33 [gpu_worker.py:298] ", "TP0"),
        ("\x1b[0;36m(Worker_TP3_EP3 pid=123)\x1b[0;0m INFO 11-30 05:12:33 [gpu_worker.py:298] ", "TP3"),
        ("(Worker_PP1_TP0 pid=123) ", "PP1_TP0"),
        ("(EngineCore_DP0 pid=9) ", "EngineCore_DP0"),
        ("(EngineCore pid=9) ", "EngineCore"),
        ("(VllmWorkerProcess pid=240) INFO 02-14 08:23:15 worker.py:266] ", "VllmWorkerProcess 240"),
        ("(VllmWorker rank=1 pid=245) INFO 02-14 08:23:15 [worker.py:266] ", "rank 1"),
        ("(RayWorkerWrapper pid=77, ip=10.1.2.3) ", "RayWorkerWrapper 77"),
        ("#033[1;36m(RayWorkerWrapper pid=77)#033[0;0m ", "RayWorkerWrapper 77"),
        ("[1;36m(EngineCore_0 pid=1102)[0;0m ", "EngineCore_0"),
        ("[rank5]: ", "rank 5"),
        ("[default5]:", "rank 5"),
        ("[TP2] ", "TP2"),
        ("[2026-01-23 19:35:20 DP1 TP2 EP2] ", "DP1 TP2 EP2"),
        ("[2026-01-23 19:35:20] ", ""),
        ("2026-11-30T05:12:33.123456789Z ", ""),
        ("2026-11-30T05:12:33.1Z stderr F (Worker_TP1 pid=8) ", "TP1"),
        ("2026-04-19 12:18:36.353 | (APIServer pid=1) INFO 04-19 10:18:36 [utils.py:299] ", "APIServer"),
        ("[pod/vllm-0/server] INFO 11-30 05:12:33 [gpu_worker.py:298] ", ""),
        ("vllm-1  | INFO 11-30 05:12:33 [gpu_worker.py:298] ", ""),
        ("Nov 30 05:12:33 node-7 vllm[4321]: INFO 11-30 05:12:33 [gpu_worker.py:298] ", ""),
        ("[TensorRT-LLM][INFO] ", ""),
        ("[12/20/2025-03:40:47] [TRT-LLM] [RANK 2] [I] ", "rank 2"),
        ("INFO:vllm.worker: ", ""),
        ("2026-01-02 03:04:05,678 - vllm.worker - INFO - ", ""),
        ("I1130 05:12:33.123456 1234 file.cc:12] ", ""),
        ("> ", ""),
    ],
)
def test_fronts_are_taken_away_and_name_the_rank(front: str, rank: str) -> None:
    assert lines(front + MESSAGE) == [Line(1, MESSAGE, rank)]


@pytest.mark.parametrize(
    "text",
    [
        "| 0     910B3     | OK | 93.0   40   0 / 0 |",
        "# GPU blocks: 13033, # CPU blocks: 2048",
        "[ERROR] 2026-01-16-10:20:16 (PID:5393, Device:0, RankID:0) ERR00100 PTA call acl api failed.",
        "GPU 0 has a total capacity of 79.19 GiB",
        "RuntimeError: NPU out of memory",
    ],
)
def test_what_only_looks_like_a_front_stays(text: str) -> None:
    assert lines(text) == [Line(1, text)]


def test_a_line_without_any_front_is_the_rest_of_the_one_above() -> None:
    found = lines("(Worker_TP1 pid=8) CUDA out of mem\nory. Tried to allocate\nINFO 11-30 05:12:33 [a.py:1] main\n")
    assert [(line.text, line.rank) for line in found] == [
        ("CUDA out of mem", "TP1"),
        ("ory. Tried to allocate", "TP1"),
        ("main", ""),
    ]


def test_progress_bars_leave_their_line_number() -> None:
    found = lines("a first line\r\nLoading:  50%|###  \rLoading: 100%|#####\rdone with loading\nthe last line\n")
    assert [(line.number, line.text) for line in found] == [
        (1, "a first line"),
        (2, "Loading:  50%|###"),
        (2, "Loading: 100%|#####"),
        (2, "done with loading"),
        (3, "the last line"),
    ]


def test_json_lines_of_containers_are_what_they_log() -> None:
    record = '{"log":"(Worker_TP1 pid=8) boom is here\\n","stream":"stderr","time":"2026-01-02T03:04:05Z"}'
    assert lines(record) == [Line(1, "boom is here", "TP1")]
    assert lines('{"npuMemSize": -1, "a": 2}') == [Line(1, '{"npuMemSize": -1, "a": 2}')]
    assert lines('{"log": broken}') == [Line(1, '{"log": broken}')]


def test_full_width_punctuation_and_odd_blanks_are_ascii() -> None:
    assert lines("GPU\u00a0KV cache size：１tokens\u200b（2）")[0].text == "GPU KV cache size:１tokens(2)"


@pytest.mark.parametrize(
    "data",
    [
        MESSAGE.encode("utf-16"),
        b"\xff\xfe" + MESSAGE.encode("utf-16-le"),
        b"\xfe\xff" + MESSAGE.encode("utf-16-be"),
        MESSAGE.encode("utf-16-le"),
        MESSAGE.encode("utf-16-be"),
        MESSAGE.encode("utf-32"),
        b"\xef\xbb\xbf" + MESSAGE.encode(),
        MESSAGE.replace(" ", "\x00 ").encode(),
        (MESSAGE + "\x07").encode(),
    ],
)
def test_encodings_and_stray_bytes(data: bytes) -> None:
    assert [line.text for line in lines(data)] == [MESSAGE]


def test_a_chinese_windows_is_read_and_bad_bytes_are_counted() -> None:
    assert lines("显存不足，请检查".encode("gb18030"))[0].text == "显存不足,请检查"
    told = decode(MESSAGE.encode() + b" \xff\xff")
    assert told.text.strip() == MESSAGE
    assert str(told.notes[0]).startswith("2 bytes")


def test_nothing_that_moves_a_cursor_or_turns_text_round_is_left() -> None:
    text = "\x1b]0;title\x07\x1b[2J\x9b31mhello\u202e there \x08\x7fworld"
    (line,) = lines(text)
    assert all(character.isprintable() for character in line.text)
    assert "\u202e" not in line.text


def test_binary_data_is_told_as_such() -> None:
    told = decode(bytes(range(256)) * 20)
    assert told.binary
    assert told.text == ""


def test_a_long_text_keeps_its_two_ends_and_the_numbers_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LIMIT_BYTES", 1000)
    rows = [f"row number {number:04}" for number in range(1, 1001)]
    whole = "\n".join(rows)
    for told in (decode(whole), read_limited(io.BytesIO(whole.encode()))):
        found = clean(told)
        assert found[0] == Line(1, rows[0])
        assert found[-1] == Line(1000, rows[-1])
        assert all(line.text == rows[line.number - 1] for line in found if line.text in rows)
        assert sum(line.text in rows for line in found) >= len(found) - 2
        assert 50 < len(found) < 70
        skipped = 1000 - len(found)
        assert f"and {skipped:,} lines" in str(told.notes[0]) or f"and {skipped + 1:,} lines" in str(told.notes[0])


def test_a_pipe_that_gives_its_bytes_in_pieces_is_read_to_its_end() -> None:
    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(7, size if size is not None and size >= 0 else 7))

    text = f"{MESSAGE}\n" * 40
    assert read_limited(Trickle(text.encode())) == decode(text)


def test_a_column_of_single_characters_becomes_few_lines() -> None:
    assert lines("a\n" * 5000) == [Line(1, " ".join("a" * 5000))]


def test_binary_data_without_an_end_is_known_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size: int = -1) -> bytes:
            self.taken += size
            return (bytes(range(256)) * (size // 256 + 1))[:size]

    monkeypatch.setattr(decoding, "LIMIT_BYTES", 1 << 16)
    stream = Endless()
    assert read_limited(stream).binary
    assert stream.taken < 1 << 20


def test_a_page_is_read_without_its_tags_and_a_traceback_keeps_its_module() -> None:
    page = "<code class='h'>Available&nbsp;KV cache <span\nstyle='color: red'>memory</span>: 3.00 GiB</code>\nX: it"
    assert " ".join(line.text for line in lines(page)) == f"{MESSAGE} X: it"
    assert lines("error: a &lt; b &amp;&amp; it&#39;s")[0].text == "error: a < b && it's"
    frame = 'File "run.py", line 3, in <module>'
    assert lines(frame)[0].text == frame


def test_tags_that_never_end_cost_no_more_than_a_page() -> None:
    begun = time.process_time()
    lines("</p>" + "<span " * 150_000)
    assert time.process_time() - begun < 1.0


def test_a_log_that_was_truncated_while_it_was_written_begins_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(bytes(5_000) + MESSAGE.encode()) == [Line(1, MESSAGE)]
    monkeypatch.setattr(decoding, "LIMIT_BYTES", 1_000)
    sparse = bytes(5_000) + f"{MESSAGE}\n{MESSAGE}".encode()
    assert [line.text for line in clean(read_limited(io.BytesIO(sparse)))][-1] == MESSAGE
    assert read_limited(io.BytesIO(bytes(5_000))).binary
    assert decode(bytes(500)).binary
