"""Ctrl-C and SIGTERM in mid-run: the exit code that shells expect, nothing half-written, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hbmtwin.sim import experiment
from hbmtwin.sim.scenario import Scenario

from ..patience import PATIENCE_S, alive, until, worked_s

CURES = ("run", "--what-would-hold", "--set", "kv_cache.preset=doubling")
"""It dies of what comes first, and its alternatives run on."""
BARS = ("run", "--error-bars")
"""Of a run that ends soon: it is interrupted in those at the ends."""
TOLD_FIRST = b"note: error bars take 33 further runs\n"
REQUESTS = {CURES: 60_000, BARS: 3_000}


@contextmanager
def running(verb: Sequence[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a day's traffic, in a session of its own: under way, or its workers are."""
    trace = tmp_path / "trace" / "endless.csv"
    trace.parent.mkdir()
    first = "0,3000,200\n" * (60 if verb is CURES else 0)
    rows = "".join(f"{i / 2},100,{200 + i % 7}\n" for i in range(REQUESTS.get(tuple(verb), 300_000)))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{first}{rows}", encoding="utf-8")
    (tmp_path / "work").mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "hbmtwin", *verb, "--set", f"workload.trace={trace}", "--out", "result"],
        cwd=tmp_path / "work",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert until(lambda: server.poll() is not None or under_way(server.pid, verb)), alive(server.pid)
        assert server.poll() is None, "the run ended before it could be interrupted"
        yield server
    finally:
        server.kill()


def under_way(session: int, verb: Sequence[str]) -> bool:
    """Modules take a second of a core; a worker is started when they are there, and takes as long for its own."""
    workers = [pid for pid, command in alive(session).items() if "popen_loky" in command]
    return worked_s(session) > 2.5 if verb == ("run",) else len(workers) > 1 and any(worked_s(w) > 0.5 for w in workers)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")


@needs_proc
@pytest.mark.parametrize(
    "verb", [("run",), ("compare",), CURES, BARS], ids=("run", "compare", "what-would-hold", "error-bars")
)
def test_ctrl_c_leaves_nothing_behind(verb: Sequence[str], tmp_path: Path) -> None:
    with running(verb, tmp_path) as server:
        os.killpg(server.pid, signal.SIGINT)  # a terminal interrupts workers as well
        out, err = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 130
    assert (out, err.removeprefix(TOLD_FIRST)) == (b"", b"interrupted\n")
    assert list((tmp_path / "work").iterdir()) == []


@needs_proc
@pytest.mark.parametrize(
    "verb", [("run",), ("compare",), CURES, BARS], ids=("run", "compare", "what-would-hold", "error-bars")
)
def test_sigterm_leaves_nothing_behind_and_no_process(verb: Sequence[str], tmp_path: Path) -> None:
    with running(verb, tmp_path) as server:
        assert len(alive(server.pid)) >= (1 if verb == ("run",) else 2)
        server.terminate()  # this process only, as a service manager or `timeout` does
        out, err = server.communicate(timeout=PATIENCE_S)
        until(lambda: not alive(server.pid))
        assert alive(server.pid) == {}
    assert server.returncode == 143
    assert (out, err.removeprefix(TOLD_FIRST)) == (b"", b"")
    assert list((tmp_path / "work").iterdir()) == []


# -- from the first import on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["typer", "hbmtwin.cli.exits", "numpy", "pandas", "hbmtwin.workloads", "hbmtwin.api"]
)
def test_ctrl_c_while_modules_are_imported(module: str, tmp_path: Path) -> None:
    """Python tells each module when it is there; the next one is then under way."""
    server = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "hbmtwin", "run", "--set", "workload.num_prompts=200000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what is read ahead here would be missing there, where the rest is read
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if line.rpartition(b"|")[2].strip() == module.encode():
                break
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
    told = [line for line in err.splitlines() if not line.startswith(b"import time:")]
    assert (server.returncode, out, told) == (130, b"", [b"interrupted"])


def test_an_interrupt_in_code_that_is_run_from_a_string_has_the_same_exit_code(tmp_path: Path) -> None:
    """As it does while a module makes its dataclasses; only `python -m` would end by the signal itself."""
    (tmp_path / "stopped.py").write_text(
        "import sys, hbmtwin.cli.process as process\n"
        "try:\n    exec('raise KeyboardInterrupt')\n"
        "except KeyboardInterrupt:\n    code = process.interrupted() if sys.argv[1:] else 130\nsys.exit(code)\n",
        encoding="utf-8",
    )
    codes = [
        subprocess.run([sys.executable, "-m", "stopped", *told], cwd=tmp_path, capture_output=True).returncode
        for told in ([], ["told"])
    ]
    assert codes[1] == 130
    assert codes[0] in (-signal.SIGINT, 130)  # what Python itself makes of it: a later one may mend it


def test_typer_and_the_metadata_of_the_package_are_not_imported_before_somebody_takes_an_interrupt() -> None:
    code = "import sys, hbmtwin.cli; print({'typer', 'importlib.metadata', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"set()\n"


# -- the moments at which workers start and end ----------------------------------------------------------------------


def interrupt_another_thread() -> None:
    """The system hands a signal to a thread that does not block it, if there is one; it has taken it when we go on."""

    def interrupted() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it has begun as deaf as we are
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=interrupted)
    other.start()
    other.join()


def interrupt_this_thread() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [interrupt_this_thread, interrupt_another_thread])
def test_ctrl_c_while_workers_start_is_not_lost(interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> object:
        interrupt()
        reached.append("the rest of the start")
        return lambda calls: iter(calls)

    reached: list[str] = []
    monkeypatch.setattr(experiment, "Parallel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment.in_processes(lambda _: None, [Scenario()] * 2, jobs=2)
    assert reached == ["the rest of the start"]  # no worker is half started
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_are_deaf_to_ctrl_c_and_gone_at_the_end() -> None:
    """A thread that waits for workers would be joined as the interpreter ends, where an interrupt is a traceback."""
    threads = set(threading.enumerate())
    told = experiment.in_processes(
        lambda _: (signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getpid()), [Scenario()] * 4, jobs=2
    )
    assert all(signal.SIGINT in blocked for blocked, _ in told)
    assert os.getpid() not in {pid for _, pid in told}
    assert not any(Path(f"/proc/{pid}").exists() for _, pid in told)
    assert set(threading.enumerate()) <= threads
