"""A server's run as it was recorded: its settings, and what its log said of every interval.

::

    DIRECTORY/meta.json        model, vllm_version, engine_kwargs, num_requests      what it was told
              timeseries.csv   t, prompt_throughput, gen_throughput, running ...     what a fit may see
              requests.jsonl   lengths, arrival_time, first_token_ts, last_token_ts  what it is judged by

    interval      t-1 ............................................. t
    running       of the step before                                of the last step that ended in it: a snapshot
    prompts       whole prompts whose prefill ended in it, however many steps that took
    generated     one token of each sequence of each step that ended in it

The form is that of LLMServingSim's ``bench run`` (github.com/casys-kaist/LLMServingSim, MIT), and its reading follows
``bench/core/stat_logger.py`` there. A log of vLLM says the same every ten seconds
(:mod:`hbmtwin.validation.served_runs.log`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

META, SERIES, REQUESTS = "meta.json", "timeseries.csv", "requests.jsonl"
COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting")


class ServedRunError(ValueError):
    """A recorded run that cannot be used: the file, what is wrong with it, and the cure."""


class Interval(NamedTuple):
    """What a log tells of some seconds of serving, all engines of the server together."""

    end_s: float
    seconds: float
    prompt_tokens: float
    """Of prompts whose prefill ended."""
    generated_tokens: float
    running: float
    """At its end."""
    waiting: float
    kv_usage: float = 0.0
    """Share of the KV cache at its end; 0: not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What bounds a step of the server, by vLLM's names. Raise ServedRunError for what a fit cannot be made of."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    """0.19's default; 0.92 from 0.21 on."""
    async_scheduling: bool = True
    """vLLM's default since 0.14."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds, as the boot log says; makes a recorded usage a number of tokens."""
    num_requests: int | None = None
    """How many requests the whole run served; None: not known, and told from the log's rise."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ServedRunError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.data_parallel_size > 1 and (self.tensor_parallel_size > 1 or not self.enable_expert_parallel):
            raise ServedRunError(
                "data_parallel_size above 1 is understood with expert parallelism and tensor_parallel_size 1 only: "
                "then the ranks step together; of other servers give the log of one engine"
            )

    @property
    def ranks(self) -> int:
        """Devices among which each layer is divided.

        Ranks that are data-parallel over shared experts step together, and so do those of one tensor-parallel engine:
        the first are taken as one engine of twice the batch, whose experts, KV and prefills are divided alike. What
        that gets wrong is attention's weights, which each of them has whole, and prompts, which each prefills alone.
        """
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def most_sequences(self) -> int:
        """That run at once, on all engines."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def most_tokens(self) -> int:
        """That a step computes, on all engines."""
        return self.max_num_batched_tokens * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A recorded run without what it is judged by: that is read where it is judged."""

    directory: Path
    model: str
    version: str
    settings: ServerSettings
    intervals: tuple[Interval, ...]

    @property
    def requests(self) -> Path:
        """Its log of requests, which is also the traffic."""
        return self.directory / REQUESTS


def read_served_run(directory: Path) -> ServedRun:
    """The run of a directory. O(bytes). Raise ServedRunError for one that is none, with the file and the key."""
    where = directory / META
    try:
        meta = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is no JSON ({error})"
        if isinstance(error, FileNotFoundError):
            what = "is not there"
        raise ServedRunError(
            f"{where}: {what}; a served run has {META}, {SERIES} and {REQUESTS}: name its directory, or the file of a "
            "server's log"
        ) from None
    if not isinstance(meta, dict) or not isinstance(meta.get("engine_kwargs"), dict):
        raise ServedRunError(f"{where}: engine_kwargs: missing; it holds the server's settings")
    for key in ("model", "vllm_version"):
        if not isinstance(meta.get(key), str):
            raise ServedRunError(f"{where}: {key}: a text is wanted, not {meta.get(key)!r}")
    settings = _settings(meta["engine_kwargs"], meta.get("num_requests"), meta["vllm_version"], where)
    return ServedRun(directory, meta["model"], meta["vllm_version"], settings, read_time_series(directory / SERIES))


def _settings(given: Mapping[str, Any], num_requests: object, version: str, where: Path) -> ServerSettings:
    known: dict[str, Any] = {}
    sizes = ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens")
    for key, value in (*((key, given.get(key)) for key in sizes), ("num_requests", num_requests)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ServedRunError(f"{where}: {key}: a whole number is wanted, not {value!r}")
        known[key] = value
    share = given.get("gpu_memory_utilization")
    if isinstance(share, float):
        known["gpu_memory_utilization"] = share
    ahead = given.get("async_scheduling")
    known["async_scheduling"] = ahead if isinstance(ahead, bool) else _plans_ahead(version)
    return ServerSettings(enable_expert_parallel=given.get("enable_expert_parallel") is True, **known)


def _plans_ahead(version: str) -> bool:
    """What a release does that was not told; one that cannot be read is taken for a new one."""
    numbers = version.split(".")[:2]
    return not all(one.isdecimal() for one in numbers) or tuple(map(int, numbers)) >= (0, 14)


def read_time_series(path: Path) -> tuple[Interval, ...]:
    """The intervals of a CSV with :data:`COLUMNS`. O(rows). Raise ServedRunError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ServedRunError(f"{path}: {what}; a served run has {META}, {SERIES} and {REQUESTS}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ServedRunError(f"{path}: is no CSV ({error}); a served run has {META}, {SERIES} and {REQUESTS}") from None
    found: list[Interval] = []
    before = 0.0
    for line, row in enumerate(rows, 2):
        end, prompts, generated, running, waiting = (_number(row, key, f"{path}, line {line}") for key in COLUMNS)
        seconds = end - before
        if seconds <= 0:
            raise ServedRunError(f"{path}, line {line}: t is {end:g}, and {before:g} before; times must rise")
        usage = _number(row, "kv_cache_pct", f"{path}, line {line}") / 100 if row.get("kv_cache_pct") else 0.0
        found.append(Interval(end, seconds, prompts * seconds, generated * seconds, running, waiting, usage))
        before = end
    if not found:
        raise ServedRunError(f"{path}: no rows in it")
    return tuple(found)


def _number(row: Mapping[str, str | None], key: str, where: str) -> float:
    text = row.get(key)
    try:
        value = float(text or "")
    except ValueError:
        raise ServedRunError(f"{where}: {key}: a number is wanted, not {text!r}") from None
    if not isfinite(value) or value < 0:
        raise ServedRunError(f"{where}: {key}: {text} is no rate, count or time")
    return value
