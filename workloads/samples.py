"""Several answers to each prompt (OpenAI's and vLLM's parameter ``n``), as requests that come together."""

from __future__ import annotations

from collections.abc import Iterator

from hbmtwin.workloads.records import Request, Source, Status, WorkloadError


class Samples:
    """A :class:`~hbmtwin.workloads.records.Source` that sends each request of another *samples* times.

    They have the same session, turn, prompt, arrival and lengths, and an output stream each
    (:func:`~hbmtwin.workloads.records.output_stream`). Request k of the other source becomes the requests
    ``k * samples`` and following. A conversation would not know which of its answers to go on with: only sources
    without further turns may be sampled. Raise WorkloadError if *samples* is below 1, and, where a further turn is
    announced, from :meth:`open`.
    """

    def __init__(self, source: Source, samples: int) -> None:
        if samples < 1:
            raise WorkloadError(f"samples must be at least 1, not {samples}")
        self.source = source
        self._samples = samples
        total = source.total_requests
        self.total_requests: int | None = None if total is None else total * samples

    def open(self) -> Iterator[Request]:
        """The samples of each request, one after the other. O(1) each."""
        for r in self.source.open():
            if r.has_next or r.turn:
                raise WorkloadError(
                    f"session {r.session} has several turns, and {self._samples} samples of a turn leave no one answer "
                    "to go on with: take traffic whose sessions have one turn, or samples = 1"
                )
            for sample in range(self._samples):
                yield r._replace(id=r.id * self._samples + sample, sample=sample)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """None: no turn follows."""
        return None
