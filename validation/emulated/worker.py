"""The process that holds torch_npu: it imports once and forks a child for every job.

Settings are parsed at the first use of the device, so each child can have its own; only the CANN version is asked for
at import. The client names a job's folder in
a line on our standard input; we answer with a line, how the child ended: its exit code, below 0 the signal that killed
it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from hbmtwin.validation.emulated.build import Build

READY = "ready"


def main() -> None:
    """Serve jobs until standard input ends. Arguments: the folder of the build, the CANN version."""
    folder, cann = sys.argv[1:]
    build = Build(Path(folder))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver, *_ = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in build.libraries]
    driver.hbmtwin_set_cann(cann.encode())
    # This imports torch, which must find the libraries above.
    from hbmtwin.validation.emulated.child import run_job

    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run_job(Path(line.rstrip("\n")), driver, build.probe)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    os._exit(0)  # nothing of torch_npu's is worth waiting for


if __name__ == "__main__":
    main()
