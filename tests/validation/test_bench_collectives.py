"""All-reduces of several ranks: real ones over gloo, made-up ones that stall, die or cannot capture, and the figure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, load
from hbmtwin.validation.bench import collective_rank
from hbmtwin.validation.bench import collectives as bench_collectives
from hbmtwin.validation.bench.collectives import (
    GroupFailed,
    check_devices,
    communicator_figure,
    groups_of,
    run_collectives,
)
from hbmtwin.validation.bench.grid import collectives_of, grid_of
from hbmtwin.validation.bench.memory_cap import cap_memory
from hbmtwin.validation.bench.records import Bench, BenchError, Case, case, read_bench, work_of

from ..patience import PATIENCE_S, until

MIB = 1 << 20
CASES = tuple(case("all_reduce", {"ranks": 2, "bytes": size}) for size in (64, 4096))


@pytest.fixture(autouse=True)
def _torch() -> None:
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def played(program: str) -> tuple[str, ...]:
    """A rank that says what it is told to."""
    head = (
        "import json, os, sys, time\n"
        "task = json.loads(sys.argv[1]); rank = task['rank']\n"
        "def say(**told): print('rank ' + json.dumps(told), flush=True)\n"
        "def times(*samples, graph=False):\n"
        "    for size in task['sizes']:\n"
        "        say(bytes=size, samples=[x + rank for x in samples], **({'graph': True} if graph else {}))\n"
        "def eager():\n"
        "    say(at=64); times(10, 30); say(communicator=[5, 7], library='played'); say(eager=True)\n"
    )
    return (sys.executable, "-c", head + program)


def test_two_ranks_of_gloo_send_to_each_other(tmp_path: Path) -> None:
    told: list[str] = []
    bench = run_collectives(CASES, "cpu", dtype="float32", rounds=1, done=told.append)
    assert (bench.kernels, bench.backend, bench.clock, bench.dtype) == ("gloo", "cpu", "wall", "float32")
    assert [p.case for p in bench.points] == list(CASES)
    assert {p.runs for p in bench.points} == {5}
    assert all(p.median_ns > 1000 for p in bench.points)  # a message takes microseconds, a thread's own time less
    assert told == ["all_reduce ranks=2 bytes=64", "all_reduce ranks=2 bytes=4096"]
    assert [(f.name, f.bytes) for f in bench.memory] == [("communicator_bytes", None)]
    (tmp_path / "b.json").write_text(bench.to_json(), encoding="utf-8")
    assert read_bench(tmp_path / "b.json") == bench


def test_what_a_rank_of_a_ring_sends() -> None:
    """2 (n - 1) / n of the message: 4096 of two ranks, 6144 of four."""
    assert work_of(CASES[1], 2) == (4096, 0)
    assert work_of(case("all_reduce", {"ranks": 4, "bytes": 4096}), 2) == (6144, 0)


def test_a_sample_is_the_mean_over_ranks() -> None:
    bench = run_collectives(CASES, "cpu", dtype="float32", command=played("eager()"))
    assert [(p.median_ns, p.runs) for p in bench.points] == [(20.5, 2), (20.5, 2)]  # (10.5 + 30.5) / 2
    assert bench.kernels == "played"


def test_times_in_a_graph_stand_beside_the_others() -> None:
    # rank 1 is done first, and ends as a library may that is taken down
    program = "eager(); rank or time.sleep(1); times(4, 4, 4, graph=True); rank and os.abort()"
    bench = run_collectives(CASES, "cpu", dtype="float32", command=played(program))
    assert [(p.case.op, p.case.sizes, p.runs) for p in bench.points] == [
        ("all_reduce", (2, 64), 2),
        ("all_reduce", (2, 4096), 2),
        ("all_reduce_in_graph", (2, 64), 3),
        ("all_reduce_in_graph", (2, 4096), 3),
    ]


def found(program: str, *stalls_s: float) -> Bench:
    """With the first stall that is longer than a busy machine takes to start the ranks: they say nothing meanwhile."""
    for stall_s in stalls_s[:-1]:
        with suppress(GroupFailed):
            return run_collectives(CASES, "cpu", dtype="float32", stall_s=stall_s, command=played(program))
    return run_collectives(CASES, "cpu", dtype="float32", stall_s=stalls_s[-1], command=played(program))


@pytest.mark.parametrize(
    ("program", "stalls_s"),
    [
        (
            "eager(); times(4, graph=True) if rank else (say(no_graph='not permitted'), sys.exit(0)); time.sleep(900)",
            (PATIENCE_S,),
        ),
        ("eager(); times(4, graph=True) if rank else os._exit(3); time.sleep(900)", (PATIENCE_S,)),
        ("eager(); time.sleep(900)", (2.0, 20.0, PATIENCE_S)),
    ],
)
def test_a_capture_that_fails_takes_no_times_with_it(program: str, stalls_s: tuple[float, ...]) -> None:
    begin = time.monotonic()
    bench = found(program, *stalls_s)
    assert {p.case.op for p in bench.points} == {"all_reduce"}
    assert len(bench.points) == 2
    assert time.monotonic() - begin < 600  # nobody has waited for a rank's own end


@pytest.mark.parametrize(
    ("program", "stall_s", "said"),
    [
        ("say(at=64); time.sleep(60)", 1.0, "no rank said anything for 1 s"),
        ("rank and sys.exit('no device left'); time.sleep(600)", PATIENCE_S, "rank 1 ended with 1: no device left"),
        ("rank and os.abort(); time.sleep(600)", PATIENCE_S, "rank 1 ended with -6"),
        ("rank and sys.exit(0); time.sleep(600)", PATIENCE_S, "rank 1 ended with 0"),
    ],
)
def test_a_group_that_cannot_end_is_told_and_none_of_it_is_left(
    program: str, stall_s: float, said: str, tmp_path: Path
) -> None:
    noted = played(f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid())); time.sleep(0.3); {program}")
    with pytest.raises(GroupFailed, match=f"all_reduce of 2 ranks: {said}.*take fewer with --ranks"):
        run_collectives(CASES, "cpu", dtype="float32", stall_s=stall_s, command=noted)
    assert [pid for path in sorted(tmp_path.iterdir()) if alive(pid := int(path.read_text()))] == []


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


PARENT = """
import signal, sys
from hbmtwin.validation.bench import collectives
from hbmtwin.validation.bench.records import case
collectives.load = lambda backend: None
rank = '''
import signal, sys, threading, time
from hbmtwin.validation.bench.collective_rank import end_with_stdin
signal.signal(signal.SIGINT, signal.SIG_IGN)
threading.Thread(target=end_with_stdin, daemon=True).start()
print('rank {"at": 64}', flush=True)
time.sleep(600)
'''
collectives.run_collectives(
    [case("all_reduce", {"ranks": 2, "bytes": 4096})],
    "cpu",
    command=(sys.executable, "-P", "-c", rank),
    done=lambda name: print(name, flush=True),
)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_whoever_started_them(sign: signal.Signals) -> None:
    """By Ctrl-C, which each of the group gets, and where the parent has no time to end them."""
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"all_reduce ranks=2")
        children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert len(children) == 2
        if sign is signal.SIGINT:
            os.killpg(parent.pid, sign)
        else:
            parent.kill()
        parent.wait(PATIENCE_S)
        assert until(lambda: not any(map(alive, children)))
    finally:
        parent.kill()
        parent.communicate()


def test_the_communicator_is_that_of_the_largest_group_and_as_sure_as_its_readings() -> None:
    def figure(*readings: list[int]) -> Any:
        return communicator_figure("npu", {2: [[100 * MIB, 100 * MIB]] * 2, 4: list(readings)})

    sure = figure(*[[400 * MIB, 410 * MIB, 410 * MIB]] * 4)
    assert (sure.name, sure.bytes, sure.confidence) == ("communicator_bytes", 410 * MIB, "H")
    assert f"2 ranks {100 * MIB}, 4 ranks {410 * MIB}; noise 0 bytes; HCCL_BUFFSIZE=not set" in sure.how
    assert figure([400 * MIB] * 2, [420 * MIB] * 2).confidence == "M"
    assert figure([400 * MIB] * 2, [500 * MIB] * 2).confidence == "L"
    assert figure([400 * MIB, 300 * MIB], [400 * MIB] * 2).confidence == "L"  # somebody came or went
    assert figure([-MIB] * 2, [400 * MIB] * 2)[1:4:2] == (0, "L")
    assert communicator_figure("npu", {2: [[5, 5]]}, ["2 ranks: not permitted"]).how.endswith(
        "no graph, 2 ranks: not permitted"
    )


class Devices:
    """Counts."""

    def __init__(self, count: int) -> None:
        self.cuda = self
        self.count = count

    def device_count(self) -> int:
        return self.count


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="4 ranks want a device each, and 2 can be seen; take fewer with --ranks"):
        check_devices(Devices(2), "cuda", 4)
    check_devices(Devices(4), "cuda", 4)
    for count, groups in ((2, (2,)), (7, (2, 4)), (8, (2, 4, 8))):
        monkeypatch.setattr(bench_collectives, "load", lambda backend, count=count: Devices(count))
        assert groups_of("cuda") == groups
    monkeypatch.setattr(bench_collectives, "load", lambda backend: Devices(1))
    with pytest.raises(BenchError, match="2 ranks want a device each, and 1 can be seen"):
        groups_of("cuda")


def test_named_grids_are_messages_of_a_step_and_files_are_of_one_verb(tmp_path: Path) -> None:
    small, full = (collectives_of(name, "npu", (2, 8), 2) for name in ("small", "full"))
    assert {c.named()["ranks"] for c in full} == {2, 8}
    assert (small[0], full[13]) == (Case("all_reduce", (2, 8192)), Case("all_reduce", (2, 64 * MIB)))
    assert set(small) < set(full)
    path = tmp_path / "g.json"
    path.write_text('[{"op": "all_reduce", "ranks": [2, 3], "bytes": 100}]')
    assert collectives_of(str(path), "cpu", (), 2) == (Case("all_reduce", (2, 100)), Case("all_reduce", (3, 100)))
    with pytest.raises(BenchError, match="0: all_reduce is timed by hbmtwin bench collectives; here take copy, matmul"):
        grid_of(str(path), "cpu")
    path.write_text('[{"op": "copy", "bytes": 100}]')
    with pytest.raises(BenchError, match="0: copy is timed by hbmtwin bench kernels; here take all_reduce"):
        collectives_of(str(path), "cpu", (), 2)
    path.write_text('[{"op": "all_reduce", "ranks": 65, "bytes": 100}]')
    with pytest.raises(BenchError, match="ranks is at most 64, not 65"):
        collectives_of(str(path), "cpu", (), 2)
    path.write_text('[{"op": "all_reduce", "ranks": 1, "bytes": 100}]')
    with pytest.raises(BenchError, match="ranks is a whole number from 2, not 1"):
        collectives_of(str(path), "cpu", (), 2)


class Capped:
    """A device of 10 GiB."""

    fraction = 0.0

    def mem_get_info(self) -> tuple[int, int]:
        return 5 << 30, 10 << 30

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fraction = fraction


def test_a_cap_is_a_share_of_the_device_and_leaves_a_tenth() -> None:
    device = Capped()
    assert cap_memory(device, 4 << 30) == 4 << 30
    assert device.fraction == 0.4
    assert cap_memory(device, 16 << 30) == 9 << 30
    assert device.fraction == 0.9


class MadeUpDevice:
    """Of ``torch.cuda``: the first all-reduce takes 300 MiB, a capture 5 more; an event is a tick of 1 ms."""

    def __init__(self, capture: str = "works") -> None:
        self.capture, self.ticks, self.replays, self.taken = capture, 0, 0, 0
        self.chosen: list[int] = []
        self.fraction = 0.0
        if capture == "absent":
            self.CUDAGraph = None  # as a torch that has none

    class nccl:
        """Its version."""

        @staticmethod
        def version() -> tuple[int, int, int]:
            return 2, 27, 3

    def set_device(self, rank: int) -> None:
        self.chosen.append(rank)

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fraction = fraction

    def synchronize(self) -> None:
        """Nothing runs."""

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 * MIB - self.taken, 1000 * MIB

    def memory_stats(self) -> dict[str, int]:
        return {}

    def Event(self, enable_timing: bool) -> Any:
        return MadeUpEvent(self)

    def CUDAGraph(self) -> Any:
        return MadeUpGraph(self)

    @contextmanager
    def graph(self, graph: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if self.capture == "fails":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        yield


class MadeUpEvent:
    """A tick later than the last."""

    def __init__(self, device: MadeUpDevice) -> None:
        self.device, self.at = device, 0

    def record(self) -> None:
        self.device.ticks += 1
        self.at = self.device.ticks

    def synchronize(self) -> None:
        """Done."""

    def elapsed_time(self, end: MadeUpEvent) -> float:
        return float(end.at - self.at)


class MadeUpGraph:
    """Counts replays."""

    def __init__(self, device: MadeUpDevice) -> None:
        self.device = device

    def replay(self) -> None:
        self.device.replays += 1


class OnHost:
    """torch, whose tensors are made on the host whatever device is named."""

    def __init__(self, torch: Any, device: MadeUpDevice) -> None:
        self.torch, self.cuda = torch, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    def zeros(self, *size: int, dtype: Any, device: str) -> Any:
        return self.torch.zeros(*size, dtype=dtype)

    def tensor(self, values: list[float], dtype: Any, device: str) -> Any:
        return self.torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("capture", ["works", "fails", "absent"])
def test_a_rank_of_a_device_measures_its_communicator_and_replays_a_graph(
    capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of one over gloo, of a device that we make up: every line of a rank, but for the real driver's."""
    torch, device = load("cpu"), MadeUpDevice(capture)
    real, ended = torch.distributed.all_reduce, []

    def reduce(message: Any, **options: Any) -> None:
        device.taken = 300 * MIB
        real(message, **options)

    monkeypatch.setattr(collective_rank, "load", lambda backend: OnHost(torch, device))
    monkeypatch.setattr(collective_rank, "GROUPS", {"cuda": "gloo"})
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    monkeypatch.setattr(collective_rank.os, "_exit", ended.append)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told: list[dict[str, Any]] = []
    task = collective_rank.Task("cuda", "float32", 0, 1, [64, 4096], 2, 30.0, str(tmp_path / "store"), 500 * MIB)
    rank = collective_rank.Rank(task, lambda **words: told.append(words))
    rank.run()
    assert (device.chosen, device.fraction) == ([0], 0.5)
    assert [words["at"] for words in told if "at" in words] == [64, 4096, 64, 4096]
    # two events lie one tick of 1 ms apart; two calls make a sample of 2 ms
    assert {
        size: words["samples"]
        for words in told
        if "samples" in words and "graph" not in words
        for size in [words["bytes"]]
    } == {64: [5e5] * 10, 4096: [5e5] * 10}
    assert {"communicator": [300 * MIB] * 3, "library": "gloo"} in told
    monkeypatch.setattr(collective_rank, "GROUPS", {"cuda": "nccl"})
    assert rank.library() == "nccl 2.27.3"
    graphs = [words for words in told if "graph" in words]
    if capture == "works":
        assert [words["bytes"] for words in graphs] == [64, 4096]
        assert graphs[0]["samples"] == [5e4] * 10  # 1 ms of twenty calls
        assert device.replays == 2 * (2 + 10)
        assert ended == []
    else:
        why = "operation not permitted" if capture == "fails" else "this torch has no graphs of the device"
        assert told[-1] == {"no_graph": why}
        assert (graphs, ended) == ([], [0] if capture == "fails" else [])


def test_every_backend_has_a_library() -> None:
    assert collective_rank.GROUPS == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
