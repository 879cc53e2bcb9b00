"""A learned model as a scenario's traffic: its requests, each turn of a session held back until the last one ended."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from hbmtwin.workloads.formats.replay import Replay
from hbmtwin.workloads.formats.rows import Row
from hbmtwin.workloads.learned.model_file import read_model
from hbmtwin.workloads.learned.traffic import ModelTraffic
from hbmtwin.workloads.records import WorkloadError


def open_model(
    path: str | Path,
    *,
    seed: int = 0,
    num_prompts: int | None = None,
    rate_scale: float = 1.0,
    time_scale: float = 1.0,
) -> Replay:
    """A :class:`~hbmtwin.workloads.records.Source` of the model in a file: *num_prompts* requests, by default those of
    its span. Raise WorkloadError on a bad file or bad figures.

    It is a replay of requests that are made anew each time they are read, so that two runs have the same.
    """
    path = Path(path)
    model = read_model(path)
    try:
        traffic = ModelTraffic(model, seed=seed, num_prompts=num_prompts, rate_scale=rate_scale)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from None
    replay = Replay(path, lambda: _rows(traffic), time_scale=time_scale)
    replay.notes = model.notes
    return replay


def _rows(traffic: ModelTraffic) -> Generator[Row, None, None]:
    turning = {client.id for client in traffic.clients if client.sharing is not None}
    for number, r in enumerate(traffic.requests(), 1):
        session = r.session if r.tenant in turning else None
        yield Row(number, r.arrival_ns, r.prompt_tokens, r.output_tokens, session, None, r.spans, r.tenant)
