"""Runs on a Ray cluster, through joblib's Ray backend: one that is there already, or one of this machine's cores.

::

    this process                      the cluster
    scenario, key  --- joblib --->    actor of Ray's pool: run_row
    row  <-------------------------   (no directory is shared: the row comes back, and is stored here)

Ray is told to be silent: no dashboard, no usage statistics, no log of workers. A cluster that was started here ends
with us; of another one only our actors end.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from joblib import Parallel, parallel_config, register_parallel_backend

from hbmtwin.sim.processes import give_up
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.sweep.workers import Call, Pool, PoolBroke, WorkersLost, at_the_end, first_line

BACKEND = "hbmtwin-ray"
ANSWERS_S = 10.0
"""In which a cluster's address must take a connection."""
ACTOR = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
"""A run takes one core; Ray's own pool counts none, and may put all on one node."""


@contextmanager
def on_a_cluster(address: str | None, jobs: int) -> Iterator[Pool]:
    """A pool of *jobs* of the cluster's cores (-1: all). Raise WorkersLost where there is no Ray, or no cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when a cluster starts
    try:
        import ray
        from ray.util.joblib.ray_backend import RayBackend
    except ImportError:
        raise WorkersLost("Ray is not installed here; run pip install ray") from None
    register_parallel_backend(BACKEND, lambda **options: _streaming(RayBackend, options))
    if not ray.is_initialized():
        _connect(ray, address, jobs)
    try:
        yield lambda calls: _from_actors(calls, _cores(ray, jobs), ray.exceptions.RayError)
    except BaseException:
        ray.shutdown()
        raise
    at_the_end(ray.shutdown)


def _connect(ray: Any, address: str | None, jobs: int) -> None:
    if address:
        _check_answers(address)
    own: dict[str, Any] = {} if address else {"num_cpus": jobs if jobs > 0 else None, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)
        if current_thread() is main_thread():  # Ray's own prints where every thread was, and leaves with 15
            signal.signal(signal.SIGTERM, before)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        raise WorkersLost(f"{where} cannot be had: {first_line(error)}") from None


def _check_answers(address: str) -> None:
    """Raise WorkersLost where nothing listens at ``host:port``, which Ray would tell after minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or a form that Ray refuses at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise WorkersLost(f"the Ray cluster at {address} cannot be had: {first_line(error)}") from None


def _cores(ray: Any, jobs: int) -> int:
    """Of *jobs* (-1: all) as many as the cluster has now: nodes come and go."""
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return cores if jobs < 0 else min(jobs, cores)


def _streaming(backend: Any, options: dict[str, Any]) -> Any:
    """Ray's backend, which hands over a result as soon as it is there; joblib asks it whether it can."""
    made = backend(**options)
    made.__class__ = type("StreamingRayBackend", (backend,), {"supports_return_generator": True})
    return made


def _from_actors(calls: Iterator[Call], processes: int, lost: type[Exception]) -> Generator[Row, None, None]:
    coming: Generator[Row, None, None] | None = None
    ended = False
    try:
        with parallel_config(BACKEND, ray_remote_args=ACTOR):
            coming = Parallel(n_jobs=processes, return_as="generator_unordered", batch_size=1)(calls)
        while (row := next(coming, None)) is not None:  # `yield from` would close it where we are closed
            yield row
        ended = True
    except ImportError as error:
        raise WorkersLost(f"a worker of the cluster lacks this release of hbmtwin: {first_line(error)}") from None
    except (lost, ValueError) as error:  # Ray's word for a node that has just gone
        raise PoolBroke(first_line(error)) from None
    finally:
        if not ended:
            give_up(coming)
