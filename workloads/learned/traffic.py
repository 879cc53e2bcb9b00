"""Requests of a learned model: every client's windows one by one, merged in order of time.

::

    window 0                    window 1                  ...  the last window, then window 0 again
    client 0  .  . .   .        client 0  ...  ..
    client 1     ..  .          client 1 (none)
    merged    .  ....  .        merged    ...  ..              one window is held at a time

Draws are keyed by client, window and number, so that lengths do not move arrivals, nor one client another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose
from hbmtwin.workloads.learned.arrivals import arrivals_in, requests_in, window_key, window_lap
from hbmtwin.workloads.learned.model import Client, LengthWindow, TrafficModel
from hbmtwin.workloads.learned.prompts import Prompts
from hbmtwin.workloads.learned.strata import stratified
from hbmtwin.workloads.plural import counted
from hbmtwin.workloads.records import Request, WorkloadError, user_stream

_LAST_S = 2**62 / 1e9
_CHUNK = 2**16
"""Requests turned into objects at a time."""


class _Arrived(NamedTuple):
    """What one client sends in one window, in order."""

    times_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    serials: IntArray
    """Numbers of the client's requests, from 0."""


@dataclass(frozen=True, slots=True)
class _Sender:
    client: Client
    windows: dict[int, int]
    """Where in ``client.windows`` the window of an index stands."""


class ModelTraffic:
    """The requests that *model* makes, at the times it gives them.

    They end before *duration_s* (by default the model's own span, unless *num_prompts* is given) and after
    *num_prompts*; past its span the model begins anew, with other draws. *rate_scale* multiplies all rates;
    *num_clients* takes that many of its clients, by a draw of *seed*. Memory: the requests of one window, and of
    clients that share prompts those that are as old as the longest wait. Raise WorkloadError on bad figures.
    """

    def __init__(
        self,
        model: TrafficModel,
        *,
        seed: int = 0,
        num_prompts: int | None = None,
        duration_s: float | None = None,
        num_clients: int | None = None,
        rate_scale: float = 1.0,
    ) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise WorkloadError(f"num_prompts must be at least 1, not {num_prompts}")
        if duration_s is not None and not 0 < duration_s <= 1e9:
            raise WorkloadError(f"a duration is above 0 and up to 1e9 seconds, not {duration_s}")
        if not 0 < rate_scale <= 1e6:
            raise WorkloadError(f"a rate scale is above 0 and up to 1e6, not {rate_scale}")
        self.model = model
        self.seed = seed
        self.num_prompts = num_prompts
        self.duration_s = model.span_s if duration_s is None and num_prompts is None else duration_s
        self.rate_scale = rate_scale
        self.clients = _chosen(model, num_clients, seed)
        expected = model.expected_requests(self.clients)
        if not expected:
            raise WorkloadError("the clients that the seed chose send nothing; take more of them, or another seed")
        if (
            num_prompts is not None
            and duration_s is None
            and num_prompts > expected * rate_scale * _LAST_S / model.span_s
        ):
            asked = f"{counted(num_prompts, 'request')} at that times {expected / model.span_s:.3g} a second"
            raise WorkloadError(
                f"rate_scale {rate_scale:g}: {asked} take over 146 years, which is as far as the clock goes; raise it, "
                "or ask for fewer"
            )

    def requests(self) -> Iterator[Request]:
        """In order of arrival, none of them waiting for its predecessor; the same at every call. O(1) each."""
        prompts = {
            client.id: Prompts(client.id, client.sharing, self.seed)
            for client in self.clients
            if client.sharing is not None
        }
        id = 0
        for tenants, columns in self._windows():
            for first in range(0, len(tenants), _CHUNK):
                rows = [column[first : first + _CHUNK].tolist() for column in (tenants, *columns)]
                for tenant, time_ns, prompt, output, serial in zip(*rows, strict=True):
                    if id == self.num_prompts:
                        return
                    if tenant in prompts:
                        session, turn, spans = prompts[tenant].next(id, serial, time_ns, prompt, output)
                    else:
                        session, turn, spans = id, 0, ((user_stream(id, 0), 0, prompt),)
                    yield Request(id, session, turn, time_ns, prompt, output, output, spans, tenant)
                    id += 1

    def _windows(self) -> Iterator[tuple[IntArray, _Arrived]]:
        """Of each window the client of each request and its columns, in order of time."""
        model = self.model
        senders = [
            _Sender(client, {round(w.start_s / model.window_s): i for i, w in enumerate(client.windows)})
            for client in self.clients
        ]
        sent = dict.fromkeys((client.id for client in self.clients), 0)
        end_ns = None if self.duration_s is None else round(self.duration_s * 1e9)
        for number in count():
            start_s = number // model.num_windows * model.span_s + number % model.num_windows * model.window_s
            if end_ns is not None and start_s * 1e9 >= end_ns:
                return
            if start_s > _LAST_S:
                raise WorkloadError("the requests take over 146 years; ask for fewer, or raise rate_scale")
            parts: list[_Arrived] = []
            tenants: list[IntArray] = []
            for sender in senders:
                part = self._arrived(sender, number, start_s, sent)
                if part is not None:
                    parts.append(part)
                    tenants.append(np.full(len(part.times_ns), sender.client.id, dtype=np.int64))
            if not parts:
                continue
            columns = _Arrived(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            order = np.argsort(columns.times_ns, kind="stable")
            if end_ns is not None:
                order = order[: int(np.searchsorted(columns.times_ns[order], end_ns))]
            yield np.concatenate(tenants)[order], _Arrived(*(column[order] for column in columns))

    def _arrived(self, sender: _Sender, number: int, start_s: float, sent: dict[int, int]) -> _Arrived | None:
        model, client, seed = self.model, sender.client, self.seed
        index = number % model.num_windows
        place = sender.windows.get(index)
        if place is None:
            return None
        window, length_s, key = client.windows[place], model.window_length_s(index), window_key(client.id, number)
        n = requests_in(window, length_s, self.rate_scale, seed=seed, key=key, lap=window_lap(number))
        if not n:
            return None
        seconds = arrivals_in(window, n, length_s, client.minute_cv, seed=seed, key=key)
        serials = np.arange(sent[client.id], sent[client.id] + n, dtype=np.int64)
        sent[client.id] += n
        lengths = _lengths_at(model, client, window.start_s)
        prompts = lengths.prompt_tokens.at_many(stratified(seed, Purpose.PROMPT_TOKENS, client.id, serials))
        outputs = _outputs(lengths, prompts, stratified(seed, Purpose.OUTPUT_TOKENS, client.id, serials))
        # Rounding must not carry the last of a burst over the window's end.
        within_ns = np.minimum(np.rint(seconds * 1e9).astype(np.int64), round(length_s * 1e9) - 1)
        times_ns = round(start_s * 1e9) + within_ns
        return _Arrived(times_ns, prompts, outputs, serials)


def _chosen(model: TrafficModel, num_clients: int | None, seed: int) -> tuple[Client, ...]:
    """All clients, or the *num_clients* of them whose draws are the least."""
    clients = tuple(client for client in model.clients if client.windows)
    if num_clients is None:
        return clients
    if not 1 <= num_clients <= len(clients):
        raise WorkloadError(
            f"the model has {counted(len(clients), 'client')} that send{'s' if len(clients) == 1 else ''} something; "
            f"ask for 1 to {len(clients)}, not {num_clients}"
        )
    drawn = sorted((draws.uniform(seed, Purpose.CLIENTS, client.id, 0), client.id) for client in clients)
    chosen = {id for _, id in drawn[:num_clients]}
    return tuple(client for client in clients if client.id in chosen)


def _lengths_at(model: TrafficModel, client: Client, start_s: float) -> LengthWindow:
    if not client.lengths:
        assert model.pooled is not None, "checked when the model was made"
        return model.pooled
    before = [lengths for lengths in client.lengths if lengths.start_s <= start_s]
    return before[-1] if before else client.lengths[0]


def _outputs(lengths: LengthWindow, prompts: IntArray, u: FloatArray) -> IntArray:
    if not lengths.prompt_below:
        return lengths.output_tokens[0].at_many(u)
    classes = np.searchsorted(np.array(lengths.prompt_below), prompts, side="right")
    outputs = np.empty_like(prompts)
    for number, table in enumerate(lengths.output_tokens):
        chosen = classes == number
        outputs[chosen] = table.at_many(u[chosen])
    return outputs
