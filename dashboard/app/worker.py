"""A process beside the app that does one job, and ends: ``python -m hbmtwin.dashboard.app.worker``.

::

    app                                   worker
                                          imports the simulator
      <----------- {"ready": true} ------
      ---- {"verb": "run", ...} -------->  runs
      <------ {"fraction": 0.3, ...} ----
      <------ {"done": true} ------------  or {"error": "what, where, cure"}

One line of JSON each. The app says nothing more than the job: its end of the pipe, once closed, ends the worker, so
that none outlives the app. A job's memory is bounded: what is too large for it fails, not the machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hbmtwin import api
from hbmtwin.api import Progress, Result, Scenario

MOST_BYTES = 8 << 30
"""Of memory that a job may take: a million requests take one."""
EVERY_S = 0.1
"""Between two words on how far a job is."""

Tell = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Do the job that standard input tells."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is none of our words
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    tell = _teller(out)
    tell({"ready": True})
    line = sys.stdin.readline()
    if not line:
        return 0
    threading.Thread(target=_end_with_the_app, args=(sys.stdin,), daemon=True).start()
    try:
        tell({"done": True, **do(json.loads(line), tell)})
    except MemoryError:
        tell(
            {"error": f"this takes more than {most >> 30} GiB of memory: ask for fewer requests (workload.num_prompts)"}
        )
    except Exception as error:
        tell({"error": f"{_where(error)}{error}" if _known(error) else f"{type(error).__name__}: {error}"})
    return 0


def do(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Do one job; return what is told of it beside its results. Raise what the simulator raises."""
    return VERBS[job["verb"]](job, tell)


def run(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "out": directory}``: the result lands there, whole."""
    scenario = Scenario.load(overrides=job["settings"])
    api.run(scenario, progress=_progress(tell)).save(Path(job["out"]))
    return {}


def compare(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "policies": [...], "variants": {name: [...]}, "out": {name: directory}}``.

    Each result lands in its directory; presets that are illegal here have none, and are told with the reason.
    """
    done = 0
    left_out: dict[str, str] = {}

    def one(name: str) -> None:
        nonlocal done
        done += 1
        tell({"runs": done, "total": len(job["out"]), "name": name})

    tell({"runs": 0, "total": len(job["out"]), "name": "–"})
    results = api.compare(
        None,
        job["policies"],
        variants=job["variants"],
        overrides=job["settings"],
        finished=one,
        left_out=left_out.__setitem__,
    )
    for name, result in results.items():
        result.save(Path(job["out"][name]))
    return {"left_out": left_out}


def what_would_hold(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"result": directory}``: its traffic under single changes, a row each."""
    done = 0

    def one(name: str) -> None:
        nonlocal done
        done += 1
        tell({"runs": done, "name": name})

    return {"rows": api.what_would_hold(Result.load(Path(job["result"])), finished=one)}


def operations(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"result": directory, "out": directory}``: the last operations before its death, in two tables."""
    last = api.last_operations(Result.load(Path(job["result"])))
    out = Path(job["out"])
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    staging.mkdir(parents=True)
    last.operations.to_parquet(staging / "operations.parquet", index=False)
    last.maps.to_parquet(staging / "maps.parquet", index=False)
    staging.rename(out)
    return {}


VERBS: Mapping[str, Callable[[Mapping[str, Any], Tell], dict[str, Any]]] = {
    "run": run,
    "compare": compare,
    "what_would_hold": what_would_hold,
    "operations": operations,
}


def _progress(tell: Tell) -> Callable[[Progress], None]:
    last = time.monotonic()

    def progress(p: Progress) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= EVERY_S:
            last = now
            tell({"simulated_s": p.simulated_s, "completed": p.completed, "total": p.total, "running": p.running})

    return progress


def _teller(out: IO[str]) -> Tell:
    def tell(words: Mapping[str, Any]) -> None:
        out.write(json.dumps(words, allow_nan=False) + "\n")
        out.flush()

    return tell


def _end_with_the_app(stdin: IO[str]) -> None:
    stdin.read()
    os._exit(1)


def _known(error: Exception) -> bool:
    """Whether its message says what, where and the cure."""
    kinds = (
        *(api.ScenarioError, api.CatalogError, api.WorkloadError, api.DoesNotFit, api.ResultError, api.UnknownPolicy),
        OSError,
    )
    return isinstance(error, kinds)


def _where(error: Exception) -> str:
    return "".join(f"{note}: " for note in getattr(error, "__notes__", ()))


if __name__ == "__main__":
    sys.exit(main())
