"""A decoder with a stopwatch: a step's time through so many layers, and what of it was attention.

::

    step     | tables | embedding | layer: norm qkv [ attention ] output MLP | ... | norm head argmax |
    time_ns  |<--------------------------------------------------------------------------------------->|
    attention_ns, of a step of its own          |<--------->|

A CPU has done its work when a call comes back; of one thread it is that thread's own time, so that what another program
takes of the core does not count. On a device both are events on its stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from hbmtwin.kernels.attention.interface import AttentionKernels, Backend
from hbmtwin.kernels.records import ModelShape
from hbmtwin.validation.run_replay.sampling import Batch
from hbmtwin.validation.small_decoder import Sequences, SmallDecoder

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], Any]


class Stopwatch(Protocol):
    """Tells how long calls take."""

    @property
    def clock(self) -> str:
        """By what: ``events``, ``wall``, ``thread``."""
        ...

    def around(self, call: Call) -> Any:
        """What *call* gives; its time is kept."""
        ...

    def taken_ns(self) -> float:
        """The sum of what was kept since last asked."""
        ...


class ClockStopwatch:
    """By a clock of the host."""

    def __init__(self, clock: str, clock_ns: Callable[[], int]) -> None:
        self.clock, self._clock_ns, self._taken = clock, clock_ns, 0

    def around(self, call: Call) -> Any:
        """Between two looks at the clock."""
        begin = self._clock_ns()
        found = call()
        self._taken += self._clock_ns() - begin
        return found

    def taken_ns(self) -> float:
        """The sum."""
        taken, self._taken = self._taken, 0
        return float(taken)


class EventStopwatch:
    """By events on the device's stream, which is waited for when the sum is asked."""

    clock = "events"

    def __init__(self, module: Any) -> None:
        self._module = module
        self._pairs: list[tuple[Any, Any]] = []

    def around(self, call: Call) -> Any:
        """Between two events."""
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        found = call()
        end.record()
        self._pairs.append((begin, end))
        return found

    def taken_ns(self) -> float:
        """The sum."""
        self._module.synchronize()
        taken = sum(float(begin.elapsed_time(end)) for begin, end in self._pairs) * 1e6
        self._pairs = []
        return taken


def stopwatch_of(torch: Any, backend: Backend) -> Stopwatch:
    """What that backend is timed by, with as many threads as torch has now."""
    if backend != "cpu":
        return EventStopwatch(getattr(torch, backend))
    if torch.get_num_threads() == 1:
        return ClockStopwatch("thread", time.thread_time_ns)
    return ClockStopwatch("wall", time.perf_counter_ns)


@contextmanager
def threads_of(torch: Any, threads: int) -> Iterator[None]:
    """So many threads of a CPU for a while; 0: as many as torch has."""
    if not threads:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_told(torch: Any) -> str:
    """``1 thread``."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'}"


class StepRunner(Protocol):
    """Does one step after another."""

    def place(self, b: Batch) -> None:
        """Make room for the KV of a batch, which is the next to be timed."""
        ...

    def time_ns(self, num_layers: int) -> float:
        """Of one step through so many layers."""
        ...

    def attention_ns(self, num_layers: int) -> float:
        """Of the attention in one such step."""
        ...


class DecoderRunner:
    """On a decoder."""

    def __init__(
        self,
        model: ModelShape,
        kernels: AttentionKernels,
        watch: Stopwatch,
        *,
        dtype: str,
        num_blocks: int,
        block_size: int,
        num_layers: int,
    ) -> None:
        self._decoder = _Metered(
            model, kernels, dtype=dtype, num_blocks=num_blocks, block_size=block_size, seed=0, num_layers=num_layers
        )
        self._watch = watch
        self._batch = Sequences((), (), ())

    def place(self, b: Batch) -> None:
        """Of sequences that grew together, a block each in turn."""
        self._batch = Sequences(range(len(b.new_tokens)), b.new_tokens, b.context_tokens)
        self._decoder.keep_only(())
        lens = [n + c for n, c in zip(b.new_tokens, b.context_tokens, strict=True)]
        self._decoder.place_in_turn(self._batch.ids, lens)

    def time_ns(self, num_layers: int) -> float:
        """Its host work among it."""
        self._watch.around(lambda: self._decoder.step(self._batch, num_layers))
        return self._watch.taken_ns()

    def attention_ns(self, num_layers: int) -> float:
        """Layer by layer."""
        self._decoder.watch = self._watch
        self._decoder.step(self._batch, num_layers)
        self._decoder.watch = None
        return self._watch.taken_ns()


class _Metered(SmallDecoder):
    """Attention is told apart while *watch* is there."""

    watch: Stopwatch | None = None

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        new: list[int],
        lens: list[int],
        prompts: int,
        window: int,
    ) -> Tensor:
        if self.watch is None:
            return super().attend(q, k_cache, v_cache, table, new, lens, prompts, window)
        attended: Tensor = self.watch.around(
            lambda: super(_Metered, self).attend(q, k_cache, v_cache, table, new, lens, prompts, window)
        )
        return attended
