"""Replays with sessions: a turn never overtakes its predecessor, and its prompt continues the conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Replay, Request, Status, open_trace
from hbmtwin.workloads.formats.rows import Row

Play = Callable[..., list[Any]]
HEADER = "arrival_s,prompt_tokens,output_tokens,session,turn\n"
SECOND = 10**9


def trace(folder: Path, lines: str, header: str = HEADER) -> Replay:
    path = folder / "sessions.csv"
    path.write_text(header + lines)
    return open_trace(path)


def of_rows(cls: type[Replay], rows: list[Row]) -> Replay:
    return cls(Path("rows"), lambda: (row for row in rows))


def assert_no_turn_overtakes(source: Replay, served: list[Any]) -> None:
    """Each row is sent once, at its own time or when its predecessor ended, whichever is later."""
    assert len(served) == source.total_requests
    ended: dict[int, tuple[int, int]] = {}
    at_file_time = {row.id: row.arrival_ns for row in sorted(source.open(), key=lambda r: r.id)}
    for r, end_ns in served:
        turn, before_end_ns = ended.get(r.session, (-1, 0))
        assert r.turn == turn + 1
        assert r.arrival_ns >= before_end_ns
        assert r.id not in at_file_time or r.arrival_ns >= at_file_time[r.id]
        ended[r.session] = (r.turn, end_ns)


def test_a_turn_waits_for_its_own_time_and_for_its_predecessor(tmp_path: Path, play: Play) -> None:
    lines = "0,10,5,7,0\n1,20,5,8,0\n3,20,5,7,1\n4,30,5,7,2\n20,50,5,7,3\n"
    log = [
        (r.id, r.session, r.turn, r.arrival_ns // SECOND, r.has_next)
        for r, _ in play(trace(tmp_path, lines), 5 * SECOND)
    ]
    assert log == [
        (0, 7, 0, 0, True),
        (1, 8, 0, 1, False),
        (2, 7, 1, 5, True),  # at 3 in the file, but turn 0 ended at 5
        (3, 7, 2, 10, True),
        (4, 7, 3, 20, False),
    ]


def test_a_fast_server_sees_the_file_s_times(tmp_path: Path, play: Play) -> None:
    lines = "0,10,5,7,0\n1,20,5,8,0\n3,20,5,7,1\n4,30,5,7,2\n20,50,5,7,3\n"
    assert [r.arrival_ns // SECOND for r, _ in play(trace(tmp_path, lines), 1)] == [0, 1, 3, 4, 20]


def test_claim_b2_from_a_file(tmp_path: Path) -> None:
    source = trace(tmp_path, "0,50,200,0,1\n60,280,150,0,2\n120,431,9,0,3\n")
    first, second, third = source.open(), None, None
    one = next(first)
    second = source.next_turn(one, SECOND, Status.COMPLETED)
    assert second is None  # its row has not been read yet: it comes at its own time
    two = next(first)
    assert two.spans == (("user/0/0", 0, 50), ("out/0/0/0", 0, 200), ("user/0/1", 0, 30))
    assert source.next_turn(two, 61 * SECOND, Status.COMPLETED) is None
    third = next(first)
    assert third.spans[:-1] == (*two.spans, ("out/0/1/0", 0, 150))
    assert third.spans[-1] == ("user/0/2", 0, 1)
    assert 250 + 180 == 430 == third.prompt_tokens - 1


def test_a_prompt_that_is_exactly_the_history_adds_no_text(tmp_path: Path) -> None:
    source = trace(tmp_path, "0,50,200,0,0\n60,250,150,0,1\n")
    (*_,) = source.open()
    assert source.next_turn(next(iter(source.open())), 0, Status.COMPLETED) is None
    requests = drained(source)
    assert requests[1].spans == (("user/0/0", 0, 50), ("out/0/0/0", 0, 200))


def test_a_prompt_shorter_than_the_history_is_new_text(tmp_path: Path) -> None:
    requests = drained(trace(tmp_path, "0,50,200,0,0\n60,249,150,0,1\n90,400,1,0,2\n"))
    assert requests[1].spans == (("user/0/1", 0, 249),)
    assert requests[2].spans == (("user/0/1", 0, 249), ("out/0/1/0", 0, 150), ("user/0/2", 0, 1))


def drained(source: Replay) -> list[Request]:
    """All requests of a replay whose server answers at once."""
    requests = []
    for r in source.open():
        requests.append(r)
        assert source.next_turn(r, r.arrival_ns, Status.COMPLETED) is None
    return requests


def test_sessions_need_no_turn_column(tmp_path: Path) -> None:
    source = trace(tmp_path, "0,5,5,3\n1,5,5,4\n2,15,5,3\n", "arrival_s,prompt_tokens,output_tokens,session\n")
    assert [(r.session, r.turn, r.has_next) for r in drained(source)] == [(3, 0, True), (4, 0, False), (3, 1, False)]


def test_has_next_knows_where_num_prompts_cuts(tmp_path: Path) -> None:
    path = tmp_path / "sessions.csv"
    path.write_text(HEADER + "0,5,5,3,0\n1,15,5,3,1\n2,25,5,3,2\n")
    assert [r.has_next for r in drained(open_trace(path, num_prompts=2))] == [True, False]


@pytest.mark.parametrize("status", [Status.REJECTED, Status.FAILED])
def test_every_row_is_sent_whatever_became_of_the_turn_before(tmp_path: Path, play: Play, status: Status) -> None:
    source = trace(tmp_path, "0,10,5,7,0\n3,20,5,7,1\n4,30,5,7,2\n")
    served = play(source, SECOND, lambda r: status)
    assert [(r.turn, r.arrival_ns // SECOND) for r, _ in served] == [(0, 0), (1, 3), (2, 4)]
    assert served[2].request.spans[:2] == (("user/7/0", 0, 10), ("out/7/0/0", 0, 5))


def test_a_replay_may_be_opened_again(tmp_path: Path, play: Play) -> None:
    source = trace(tmp_path, "0,10,5,7,0\n3,20,5,7,1\n4,30,5,7,2\n")
    next(source.open())  # a run that was given up at once
    assert play(source, 5 * SECOND) == play(source, 5 * SECOND)


def test_reading_everything_before_serving_gives_the_same_traffic(tmp_path: Path) -> None:
    source = trace(tmp_path, "0,10,5,7,0\n1,20,5,8,0\n3,20,5,7,1\n4,30,5,7,2\n")
    first, other = list(source.open())
    assert (first.session, other.session) == (7, 8)
    second = source.next_turn(first, 9 * SECOND, Status.COMPLETED)
    assert second is not None
    assert (second.id, second.arrival_ns) == (2, 9 * SECOND)
    third = source.next_turn(second, 9 * SECOND + 1, Status.COMPLETED)
    assert third is not None
    assert (third.id, third.arrival_ns) == (3, 9 * SECOND + 1)
    assert source.next_turn(third, 10 * SECOND, Status.COMPLETED) is None


rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=40
)


def as_rows(drawn: list[tuple[int, int, int, int]]) -> list[Row]:
    time_ns, made = 0, []
    for line, (gap, prompt, output, session) in enumerate(drawn, 2):
        time_ns += gap
        made.append(Row(line, time_ns, prompt, output, session, None))
    return made


@given(drawn=rows, service_ns=st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_no_turn_overtakes_whatever_the_server_does(
    play: Play, drawn: list[tuple[int, int, int, int]], service_ns: list[int]
) -> None:
    source = of_rows(Replay, as_rows(drawn))
    served = play(source, lambda r: service_ns[r.id % len(service_ns)])
    assert_no_turn_overtakes(source, served)
    for r, _ in served:
        assert sum(length for _, _, length in r.spans) == r.prompt_tokens
    last_of_session = {r.session: r for r, _ in served}
    assert [r.has_next for r, _ in served] == [r is not last_of_session[r.session] for r, _ in served]


def test_a_replay_that_does_not_hold_turns_back_would_be_caught(play: Play) -> None:
    class Hasty(Replay):
        def open(self) -> Iterator[Request]:
            histories: dict[int, Request] = {}
            for id, row in enumerate(self._read()):
                yield self._request(id, row, histories)

    source = of_rows(Hasty, as_rows([(0, 10, 5, 1), (1, 20, 5, 1)]))
    with pytest.raises(AssertionError):
        assert_no_turn_overtakes(source, play(source, 5))
