"""A recorded trace as traffic: every line is sent at its own time, whatever the server does.

The one exception is a session: its next turn is not sent before the last one ended, so under load it is later than
the file says. Every line is sent, even if an earlier turn was rejected, so that the traffic is the file's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from hbmtwin.workloads.formats.rows import Row
from hbmtwin.workloads.records import Request, Span, Status, WorkloadError, output_stream, user_stream

_LAST_NS = 2**62


class Replay:
    """A :class:`~hbmtwin.workloads.records.Source` of the rows of one file, the first of which arrives at time 0.

    *rows* reads the file anew on each call, *path* names it in errors. Times are multiplied by *time_scale* (2 makes
    the trace half as dense), only the first *num_prompts* rows behind *skip* others are taken, and answers are cut at
    *max_tokens*, by default their own length. Where a format says which prompts share tokens, they do; else a session's
    prompt begins with its last prompt and answer if it is at least as long as both together, and is new text if not.

    The file is read once here, so that every fault in it is found before anything is simulated and ``has_next`` is
    known, and again, line by line, by each :meth:`open`. Kept are two integers for each session that has more than
    one turn, and those turns that wait for their predecessor; while it is read here, for each session that the file
    names (120 bytes; a file without sessions takes none). One replay serves one run at a time. Raise WorkloadError on
    a fault in the file, a file without requests, or bad figures.
    """

    def __init__(
        self,
        path: Path,
        rows: Callable[[], Generator[Row, None, None]],
        *,
        time_scale: float = 1.0,
        num_prompts: int | None = None,
        max_tokens: int | None = None,
        skip: int = 0,
    ) -> None:
        if not 0 < time_scale <= 1e9:
            raise WorkloadError(f"time_scale must be above 0 and up to 1e9, not {time_scale}")
        for name, value in (("num_prompts", num_prompts), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise WorkloadError(f"{name} must be at least 1, not {value}")
        if skip < 0:
            raise WorkloadError(f"skip must be at least 0, not {skip}")
        self._read = rows
        self._time_scale = time_scale
        self._rows = (skip, None if num_prompts is None else skip + num_prompts)
        self._max_tokens = max_tokens
        self.total_requests: int | None
        with closing(rows()) as scanned:
            self.total_requests, self._first_ns, self._turn_counts = self._scan(path, islice(scanned, *self._rows))
        self._waiting: dict[int, deque[Request]] = {}
        self.notes: tuple[str, ...] = ()
        """What whoever runs this has to know of the file, a sentence each."""
        self.block_size: int | None = None
        """Tokens that an id of the file stands for; None where it has none."""

    @property
    def has_turns(self) -> bool:
        """Whether a session of the file has more than one turn."""
        return bool(self._turn_counts)

    def open(self) -> Iterator[Request]:
        """Rows in order of time, but those whose predecessor has not ended yet: :meth:`next_turn` gives them."""
        self._waiting = {}
        with closing(self.recorded()) as requests:
            for request in requests:
                queue = self._waiting.get(request.session)
                if queue is not None:
                    queue.append(request)
                    continue
                if request.has_next:
                    self._waiting[request.session] = deque()
                yield request

    def recorded(self) -> Generator[Request, None, None]:
        """Every row in order of time, as it was recorded: what the traffic is before a server makes turns wait."""
        histories: dict[int, Request] = {}
        with closing(self._read()) as rows:
            for id, row in enumerate(islice(rows, *self._rows)):
                yield self._request(id, row, histories)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The next turn of *r*'s session if its row has been read by now; else None, and :meth:`open` gives it."""
        queue = self._waiting.get(r.session)
        if queue:
            request = queue.popleft()
            if not request.has_next:
                del self._waiting[r.session]
            return request._replace(arrival_ns=max(request.arrival_ns, end_ns))
        self._waiting.pop(r.session, None)
        return None

    def _scan(self, path: Path, rows: Iterable[Row]) -> tuple[int, int, dict[int, int]]:
        count, first_ns, last_ns = 0, 0, 0
        turn_counts: dict[int, int] = {}
        for row in rows:
            if count == 0:
                first_ns = row.time_ns
            count, last_ns = count + 1, row.time_ns
            if row.session is None:
                continue
            turn_counts[row.session] = turn_counts.get(row.session, 0) + 1
        if count == 0:
            behind = f" behind the first {self._rows[0]:,}" if self._rows[0] else ""
            raise WorkloadError(f"{path}: no requests in it{behind}")
        if (last_ns - first_ns) * self._time_scale > _LAST_NS:
            raise WorkloadError(f"{path}: at a time_scale of {self._time_scale} it lasts over 146 years; lower it")
        return count, first_ns, {session: turns for session, turns in turn_counts.items() if turns > 1}

    def _request(self, id: int, row: Row, histories: dict[int, Request]) -> Request:
        session = id if row.session is None else row.session
        before = histories.pop(session, None)
        turn = 0 if before is None else before.turn + 1
        max_tokens = row.output_tokens if self._max_tokens is None else self._max_tokens
        history: tuple[Span, ...] = ()
        new = row.prompt_tokens
        if row.spans is not None:
            history, new = row.spans, 0
        elif before is not None and new >= before.prompt_tokens + before.output_tokens:
            history = (*before.spans, (output_stream(session, before.turn), 0, before.output_tokens))
            new -= before.prompt_tokens + before.output_tokens
        since_first_ns = row.time_ns - self._first_ns
        request = Request(
            id=id,
            session=session,
            turn=turn,
            arrival_ns=since_first_ns if self._time_scale == 1 else round(since_first_ns * self._time_scale),
            prompt_tokens=row.prompt_tokens,
            output_tokens=min(row.output_tokens, max_tokens),
            max_tokens=max_tokens,
            spans=(*history, (user_stream(session, turn), 0, new)) if new else history,
            tenant=row.tenant,
            has_next=turn + 1 < self._turn_counts.get(session, 1) if row.session is not None else False,
        )
        if request.has_next:
            histories[session] = request
        return request
