"""Learns a model from a trace: arrivals by window, measured lengths, and what prompts share.

::

    requests in order -> one _Seen a client: times, prompt and output lengths        8 bytes each a request
                      -> one SharingMeter a client: blocks, who touched them last
    then a window     -> its rate, the CV of its gaps; over all: gamma or Weibull, drift of the minutes
    lengths           -> a table of quantiles and mass points; outputs by class of the prompt where they depend

Source of the plan: ``fit(trace)`` with rates by 5 minutes, CV within, measured lengths by client; ServeGen's windows of
gamma or Weibull gaps (Xiang et al., 2025).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np

from hbmtwin.workloads import inverse
from hbmtwin.workloads.draws import FloatArray, IntArray
from hbmtwin.workloads.gaps import burstiness_of
from hbmtwin.workloads.learned.measured import Measured, measured
from hbmtwin.workloads.learned.model import MAX_RATE, Client, Family, LengthWindow, TrafficModel, Window
from hbmtwin.workloads.learned.sharing import SharingMeter
from hbmtwin.workloads.plural import counted
from hbmtwin.workloads.records import Request, WorkloadError
from hbmtwin.workloads.statistics.describe import BLOCK_SIZE

WINDOW_S = 300.0
_LEAST_GAPS = 10
"""Gaps from which a window has a CV of its own; below, it takes that of the client's others."""
_DEPENDENT = 0.1
"""Rank correlation of prompt and output from which outputs are learned by class of the prompt."""
_LEAST_DEPENDENT = 200
"""Requests from which such a correlation means anything."""
_CLASSES = 8
_HIGHEST_GAMMA_CV = 100.0
_LEAST_IN_A_MINUTE = 5
"""Requests a minute from which the minutes of a window can be told apart."""
_MINUTE_NS = 60 * 10**9
_TICK_SHARE = 0.5


class _Seen:
    """What is kept of one client's requests."""

    def __init__(self, block_size: int) -> None:
        self.times_ns, self.prompts, self.outputs = array("q"), array("q"), array("q")
        self.sharing = SharingMeter(block_size)

    def add(self, r: Request) -> None:
        self.times_ns.append(r.arrival_ns)
        self.prompts.append(r.prompt_tokens)
        self.outputs.append(r.output_tokens)
        self.sharing.add(r)


def learn(
    requests: Iterable[Request], *, source: str = "", window_s: float = WINDOW_S, block_size: int = BLOCK_SIZE
) -> TrafficModel:
    """The model of requests in order of arrival, read once.

    Requests of one tenant are one client. Sharing is measured in blocks of *block_size* tokens. O(requests log
    requests + blocks); memory 24 bytes a request and, where prompts share anything, an entry for each different block.
    Raise WorkloadError where there are fewer than two requests, all arrive at once, or one before the one above it.
    """
    if not 1 <= window_s <= 1e6:
        raise WorkloadError(f"a window is from 1 to 1e6 seconds, not {window_s}")
    seen: dict[int, _Seen] = {}
    first_ns = last_ns = count = 0
    for r in requests:
        if not count:
            first_ns = last_ns = r.arrival_ns
        if r.arrival_ns < last_ns:
            raise WorkloadError(f"request {r.id} arrives before the one above it; sort by time of arrival")
        last_ns, count = r.arrival_ns, count + 1
        if r.tenant not in seen:
            seen[r.tenant] = _Seen(block_size)
        seen[r.tenant].add(r)
    if count < 2 or last_ns == first_ns:
        raise WorkloadError(
            f"{counted(count, 'request')} over {(last_ns - first_ns) / 1e9:g} s tell no rate; take a longer trace"
        )
    span_ns = last_ns - first_ns
    notes: list[str] = []
    clients = tuple(
        _client(id, seen[tenant], first_ns, span_ns, window_s, notes) for id, tenant in enumerate(sorted(seen))
    )
    return TrafficModel(source, span_ns / 1e9, window_s, clients, notes=tuple(notes))


def learn_lengths(pairs: Iterable[tuple[int, int]], *, request_rate: float, source: str = "") -> TrafficModel:
    """The model of prompt and output lengths without times: Poisson arrivals at *request_rate* a second, of as many
    requests as there are pairs. Raise WorkloadError where there are none, or on a bad rate."""
    if not 0 < request_rate <= MAX_RATE:
        raise WorkloadError(f"request_rate is above 0 and up to 1e6 a second, not {request_rate}")
    prompts, outputs = array("q"), array("q")
    for prompt, output in pairs:
        prompts.append(prompt)
        outputs.append(output)
    if not prompts:
        raise WorkloadError("there are no lengths to learn from")
    span_s = len(prompts) / request_rate
    lengths = _lengths(np.frombuffer(prompts, dtype=np.int64), np.frombuffer(outputs, dtype=np.int64))
    client = Client(0, (Window(0.0, request_rate, "gamma", 1.0),), (lengths,))
    note = f"the trace has no times: arrivals are Poisson's, at {request_rate:g} a second"
    return TrafficModel(source, span_s, span_s, (client,), notes=(note,))


def _client(id: int, seen: _Seen, first_ns: int, span_ns: int, window_s: float, notes: list[str]) -> Client:
    times_ns = np.frombuffer(seen.times_ns, dtype=np.int64) - first_ns
    window_ns = round(window_s * 1e9)
    # The last arrival stands at the very end of the span: it belongs to the window that ends there.
    windows = np.minimum(times_ns, span_ns - 1) // window_ns
    gaps = np.diff(times_ns).astype(np.float64)
    if ticks := len(gaps) > _LEAST_GAPS and float(np.mean(gaps == 0)) > _TICK_SHARE:
        notes.append(
            f"client {id}: most requests share their time with another, as of a clock with coarse ticks: gaps within a "
            "window are taken to be Poisson's"
        )
    found = _windows(times_ns, windows, window_ns, span_ns, poisson=ticks)
    prompts, outputs = (np.frombuffer(column, dtype=np.int64) for column in (seen.prompts, seen.outputs))
    return Client(
        id=id,
        windows=tuple(found),
        lengths=(_lengths(prompts, outputs),),
        minute_cv=_minute_cv(times_ns, windows, window_ns, span_ns, found),
        sharing=seen.sharing.sharing(times_ns, prompts),
    )


def _windows(times_ns: IntArray, windows: IntArray, window_ns: int, span_ns: int, *, poisson: bool) -> list[Window]:
    cvs: dict[int, tuple[int, float, FloatArray]] = {}
    numbers, starts = np.unique(windows, return_index=True)
    ends = np.append(starts[1:], len(times_ns))
    for number, start, end in zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True):
        gaps = np.diff(times_ns[start:end]).astype(np.float64)
        enough = len(gaps) >= _LEAST_GAPS and not poisson and gaps.any()
        cvs[number] = (end - start, float(gaps.std() / gaps.mean()) if enough else math.nan, gaps)
    told = [cv for _, cv, _ in cvs.values() if not math.isnan(cv)]
    usual = float(np.median(told)) if told else 1.0
    family = _family([(cv, gaps) for _, cv, gaps in cvs.values() if not math.isnan(cv)])
    found: list[Window] = []
    for number, (count, cv, _) in cvs.items():
        length_ns = min(window_ns, span_ns - number * window_ns)
        shape = _shape(family, usual if math.isnan(cv) else cv)
        rate = count * 1e9 / length_ns
        found.append(Window(number * window_ns / 1e9, float(f"{rate:.9g}"), family, float(f"{shape:.6g}")))
    return found


def _shape(family: Family, cv: float) -> float:
    cv = min(max(cv, 0.001), _HIGHEST_GAMMA_CV)
    return 1 / cv**2 if family == "gamma" else burstiness_of("weibull", cv)


def _family(windows: list[tuple[float, FloatArray]]) -> Family:
    """Which of the two makes the gaps likelier, each with the shape that has the gaps' CV."""
    better = 0.0
    for cv, gaps in windows:
        cv = min(max(cv, 0.05), 10.0)
        x = np.maximum(gaps / gaps.mean(), 1e-6)
        logs = inverse.logs(x)
        k = 1 / cv**2
        gamma = len(x) * (k * inverse.log(k) - inverse.log_gamma(k)) + float(((k - 1) * logs - k * x).sum())
        c = burstiness_of("weibull", cv)
        log_scale = -inverse.log_gamma(1 + 1 / c)
        z = logs - log_scale
        powers = inverse.exps(np.minimum(c * z, 600.0))
        weibull = len(x) * (inverse.log(c) - log_scale) + float(((c - 1) * z - powers).sum())
        better += gamma - weibull
    return "gamma" if better >= 0 else "weibull"


def _minute_cv(times_ns: IntArray, windows: IntArray, window_ns: int, span_ns: int, found: list[Window]) -> float:
    """How much the counts of whole minutes within a window vary beyond what its gaps alone make them; 0 where that may
    be chance: below two standard errors of the variance of Poisson counts, scaled by the gaps'."""
    excess = squares = chance = 0.0
    for window in found:
        number = round(window.start_s * 1e9 / window_ns)
        minutes = min(window_ns, span_ns - number * window_ns) // _MINUTE_NS
        if minutes < 2:
            continue
        since_ns = times_ns[windows == number] - number * window_ns
        counts = np.bincount(since_ns // _MINUTE_NS, minlength=minutes)[:minutes]
        mean = float(counts.mean())
        if mean < _LEAST_IN_A_MINUTE:
            continue
        # Counts of a renewal process vary as its gaps do: variance / mean is the square of their CV.
        gap_cv2 = min(1 / window.shape, 4.0) if window.family == "gamma" else 1.0
        excess += float(counts.var(ddof=1)) - mean * gap_cv2
        squares += mean * mean
        chance += 2 * (gap_cv2 * mean) ** 2 / (minutes - 1) + gap_cv2 * mean / minutes
    return round(math.sqrt(excess / squares), 4) if excess > 2 * math.sqrt(chance) else 0.0


def _lengths(prompts: IntArray, outputs: IntArray) -> LengthWindow:
    table = _table(prompts)
    if len(prompts) < _LEAST_DEPENDENT or abs(_rank_correlation(prompts, outputs)) < _DEPENDENT:
        return LengthWindow(0.0, table, (_table(outputs),))
    below = sorted({int(bound) for bound in np.quantile(prompts, [k / _CLASSES for k in range(1, _CLASSES)])})
    below = [bound for bound in below if prompts.min() < bound]
    classes = np.searchsorted(np.array(below, dtype=np.int64), prompts, side="right")
    tables = tuple(_table(outputs[classes == number]) for number in range(len(below) + 1))
    return LengthWindow(0.0, table, tables, tuple(below))


def _table(lengths: IntArray) -> Measured:
    values, counts = np.unique(lengths, return_counts=True)
    return measured(values.tolist(), counts.tolist())


def _rank_correlation(x: IntArray, y: IntArray) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing theirs. 0 where one of the two never changes."""
    a, b = _ranks(x), _ranks(y)
    norm = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0


def _ranks(x: IntArray) -> FloatArray:
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    held = np.cumsum(counts) - counts / 2
    ranks: FloatArray = held[place] - len(x) / 2
    return ranks
