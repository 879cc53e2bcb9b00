"""Writing traffic down: what is read back is what was made, and a file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hbmtwin.workloads import Request, WorkloadError, builtin, open_trace, write_csv

ONE = Request(
    id=0, session=4, turn=2, arrival_ns=1_000_000_001, prompt_tokens=50, output_tokens=7, max_tokens=9, spans=()
)


def test_the_file_is_plain(tmp_path: Path) -> None:
    write_csv([ONE, ONE._replace(session=5, turn=0, arrival_ns=12 * 10**9)], tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == (
        b"arrival_s,prompt_tokens,output_tokens,session,turn\n1.000000001,50,7,4,2\n12.000000000,50,7,5,0\n"
    )


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    made = list(builtin(num_prompts=500).open())
    write_csv(made, tmp_path / name)
    back = list(open_trace(tmp_path / name).open())
    start_ns = made[0].arrival_ns
    assert [(r.arrival_ns - start_ns, r.session, r.prompt_tokens, r.output_tokens) for r in made] == [
        (r.arrival_ns, r.session, r.prompt_tokens, r.output_tokens) for r in back
    ]


def test_the_same_requests_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.csv.gz", "b.csv.gz"):
        write_csv([ONE], tmp_path / name)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    assert (tmp_path / "a.csv.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def broken() -> Iterator[Request]:
        yield ONE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_csv(broken(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_requests_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"^request 3 arrives before the one above it; sort by arrival_ns$"):
        write_csv([ONE, ONE._replace(id=3, arrival_ns=5)], tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []
