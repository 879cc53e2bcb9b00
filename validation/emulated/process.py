"""The client's end of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from hbmtwin.validation.emulated.build import Build, EmulatorUnavailable
from hbmtwin.validation.emulated.worker import READY

TAIL = 4000
"""Characters of a dead process's output that are told."""
SETTING_VARIABLES = ("PYTORCH_", "TORCH_", "ASCEND_", "HCCL_", "MULTI_STREAM_", "OOM_SNAPSHOT_")
"""Variables of the user's that might set the allocator; a job's settings say what stands there."""


class WorkerDied(Exception):
    """The worker process ended or could not do a job; the text has the last it wrote."""


class Worker:
    """A process that has torch_npu imported, for one CANN version, since that is asked for at import.

    Starting takes seconds; raise EmulatorUnavailable if torch_npu cannot be imported. :meth:`close` ends it.
    """

    def __init__(self, build: Build, cann: str, output: Path) -> None:
        ours = {name: text for name, text in os.environ.items() if not name.startswith(SETTING_VARIABLES)}
        self._output = output
        with ExitStack() as opened:
            self._process = opened.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "hbmtwin.validation.emulated.worker", str(build.folder), cann],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=opened.enter_context(output.open("w")),
                    text=True,
                    env=ours | build.environment(),
                )
            )
            if self._answer() != READY:
                raise EmulatorUnavailable(f"torch_npu could not be imported: {tail(output)}")
            self._opened = opened.pop_all()

    def do(self, folder: Path) -> int:
        """Have the job in *folder* done; return how its child ended: 0, or below 0 the signal that killed it.

        Raise WorkerDied if the child ended otherwise.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            raise WorkerDied(f"the worker ended with {self._process.wait()}: {tail(self._output)}")
        return int(answer)

    def close(self) -> None:
        """End the process."""
        self._opened.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def tail(path: Path) -> str:
    """The last that was written to *path*."""
    return path.read_text(errors="replace")[-TAIL:].strip()
