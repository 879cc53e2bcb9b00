"""Ctrl-C and SIGTERM in mid-run: the exit code that shells expect, nothing half-written, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hbmtwin.sim import experiment
from hbmtwin.sim.scenario import Scenario

CURES = ("run", "--what-would-hold", "--set", "kv_cache.preset=doubling")
"""It dies of what comes first, and its alternatives run on."""


@contextmanager
def running(verb: Sequence[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a day's traffic, in a session of its own, three seconds after its start, and with its workers."""
    trace = tmp_path / "trace" / "endless.csv"
    trace.parent.mkdir()
    first = "0,3000,200\n" * (60 if verb is CURES else 0)
    rows = "".join(f"{i / 2},100,{200 + i % 7}\n" for i in range(60_000 if verb is CURES else 300_000))
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
        time.sleep(3)
        for _ in range(100 if verb != ("run",) else 0):
            if len(alive(server.pid)) > 1:
                time.sleep(0.5)
                break
            time.sleep(0.2)
        assert server.poll() is None, "the run ended before it could be interrupted"
        yield server
    finally:
        server.kill()


def alive(session: int) -> list[str]:
    """Processes of a session that have not ended, by their command lines."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found.append(stat.with_name("cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("verb", [("run",), ("compare",), CURES], ids=("run", "compare", "what-would-hold"))
def test_ctrl_c_leaves_nothing_behind(verb: Sequence[str], tmp_path: Path) -> None:
    with running(verb, tmp_path) as server:
        os.killpg(server.pid, signal.SIGINT)  # a terminal interrupts workers as well
        out, err = server.communicate(timeout=30)
    assert server.returncode == 130
    assert (out, err) == (b"", b"interrupted\n")
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize("verb", [("run",), ("compare",), CURES], ids=("run", "compare", "what-would-hold"))
def test_sigterm_leaves_nothing_behind_and_no_process(verb: Sequence[str], tmp_path: Path) -> None:
    with running(verb, tmp_path) as server:
        assert len(alive(server.pid)) >= (1 if verb == ("run",) else 2)
        server.terminate()  # this process only, as a service manager or `timeout` does
        out, err = server.communicate(timeout=30)
        for _ in range(50):
            if not alive(server.pid):
                break
            time.sleep(0.1)
        assert alive(server.pid) == []
    assert server.returncode == 143
    assert (out, err) == (b"", b"")
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
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if line.rpartition(b"|")[2].strip() == module.encode():
                break
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
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


def test_ctrl_c_while_workers_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
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
