"""Times of a backend's kernels, case by case: warm, over operands that no cache holds, medians of rounds apart in time.

::

    pool of operands, larger than any cache     [ w0 | w1 | w2 | ... ]     call i takes the next one, as layers do
    round 1   case A: samples    case B: samples   ...                     a sample is so many calls that they take
    round 2   case A: samples    case B: samples   ...                     MIN_SAMPLE_NS together, timed by events
    case A    quartiles of all its samples, whichever round: a burst of another's load spoils one round, not a case
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hbmtwin.kernels.attention.backends import kernels_for, load
from hbmtwin.kernels.attention.interface import AttentionKernels, Backend, Kind
from hbmtwin.kernels.records import ModelShape
from hbmtwin.validation.bench.memory import Meter, meter_of, no_figures
from hbmtwin.validation.bench.memory_cap import cap_memory
from hbmtwin.validation.bench.records import DTYPE_BYTES, Bench, BenchError, Case, Point
from hbmtwin.validation.small_decoder import (
    Layer,
    LayerShape,
    Sequences,
    SmallDecoder,
    after_attention,
    attention_inputs,
    rotary_table,
)

if TYPE_CHECKING:
    from torch import Tensor

POOL_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20, "npu": 512 << 20}
"""Larger than the last cache of such a device."""
MAX_VIEWS = 4096
MIN_BLOCKS = 2048
"""Of a decoder's KV cache, so that it is made once for several cases."""
MIN_SAMPLE_NS = 300_000
MAX_CALLS = 256
ROUNDS, SAMPLES = 3, 5
WARM_UPS = 10
"""Calls before the first that counts; fewer, but two, where they take longer than :data:`WARM_UP_NS`."""
WARM_UP_NS = 30e6

Call = Callable[[], object]


class Timer(Protocol):
    """Times calls on a device."""

    @property
    def clock(self) -> str:
        """By what: ``events``, ``wall``, ``thread``."""
        ...

    def time_ns(self, call: Call, calls: int) -> float:
        """Of one call, when so many are made in a row."""
        ...


class ClockTimer:
    """The host's clock: a CPU has done its work when the call comes back.

    Of one thread it is that thread's own time, so that what another process takes of the core does not count; the
    memory that they share still does. Several threads have only the clock on the wall.
    """

    def __init__(self, clock: str = "wall", clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._clock_ns = clock_ns

    def time_ns(self, call: Call, calls: int) -> float:
        """Wall time."""
        start = self._clock_ns()
        for _ in range(calls):
            call()
        return (self._clock_ns() - start) / calls


class EventTimer:
    """Events on the device's stream, so that the host's own time does not count."""

    clock = "events"

    def __init__(self, module: Any) -> None:
        self._module = module

    def time_ns(self, call: Call, calls: int) -> float:
        """Between two events."""
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6 / calls


def run_bench(
    cases: Sequence[Case],
    backend: Backend = "cpu",
    *,
    kind: Kind = "flash",
    dtype: str = "bfloat16",
    threads: int = 0,
    rounds: int = ROUNDS,
    memory_bytes: int = 0,
    timer: Timer | None = None,
    meter: Meter | None = None,
    done: Callable[[str], None] | None = None,
) -> Bench:
    """Time the *cases*. *threads* of a CPU are set for as long as it takes; 0: as torch has them.
    *memory_bytes*: cap of a device's allocator; 0: none.

    Raise BackendUnavailable, BenchError for a case that the device cannot do. Deterministic but for the times
    themselves: the same tensors in the same order.
    """
    torch = load(backend)
    kernels = kernels_for(backend, kind)
    if memory_bytes:
        cap_memory(getattr(torch, backend), memory_bytes)
    with _threads(torch, threads), torch.inference_mode():
        timer, meter = timer or timer_of(torch, backend), meter or meter_of(torch, backend)
        operands = operands_of(torch, kernels, dtype, backend)
        samples: dict[Case, list[float]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in samples:
                try:
                    samples[case] += _case_samples(operands.call_of(case), case, timer, meter)
                except (RuntimeError, MemoryError) as error:  # torch's, of memory above all
                    what = (str(error) or type(error).__name__).strip().splitlines()[0]
                    cap = f", or more than {memory_bytes / 2**30:g} GiB with --memory-gib" if memory_bytes else ""
                    raise BenchError(f"{case}: {what}; take smaller sizes{cap}, or leave it out of the grid") from error
                if done is not None:
                    done(str(case))
        if meter is not None and (steps := [case for case in samples if case.op == "step"]):
            operands.release()  # the step is captured by another process, which has the same cap
            meter.capture(steps[-1], dtype)
        return Bench(
            backend=backend,
            kernels=kernels.name,
            device=device_called(torch, backend),
            dtype=dtype,
            threads=torch.get_num_threads() if backend == "cpu" else 0,
            torch=str(torch.__version__),
            clock=timer.clock,
            points=tuple(point_of(case, found) for case, found in samples.items()),
            memory=no_figures() if meter is None else meter.figures(),
        )


def timer_of(torch: Any, backend: Backend) -> Timer:
    """What times are taken by on that backend, with as many threads as torch has now."""
    if backend != "cpu":
        return EventTimer(getattr(torch, backend))
    return ClockTimer("thread", time.thread_time_ns) if torch.get_num_threads() == 1 else ClockTimer()


def device_called(torch: Any, backend: Backend) -> str:
    """What the machine calls its device."""
    if backend == "cpu":
        return _cpu_name()
    return str(getattr(torch, backend).get_device_name())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@contextmanager
def _threads(torch: Any, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _case_samples(call: Call, case: Case, timer: Timer, meter: Meter | None) -> list[float]:
    if meter is not None:
        meter.watch(case.op, call)
    return _samples(call, timer)


def _samples(call: Call, timer: Timer) -> list[float]:
    warm = [timer.time_ns(call, 1) for _ in range(2)]
    while len(warm) < WARM_UPS and sum(warm) < WARM_UP_NS:
        warm.append(timer.time_ns(call, 1))
    once = min(warm)
    calls = max(1, min(MAX_CALLS, round(MIN_SAMPLE_NS / max(1.0, once))))
    return [timer.time_ns(call, calls) for _ in range(SAMPLES)]


def point_of(case: Case, samples: Sequence[float]) -> Point:
    """Quartiles of a case's samples, in ns."""
    low, median, high = (float(q) for q in np.percentile(np.asarray(samples), [25, 50, 75]))
    return Point(case, max(1.0, median), max(1.0, low), max(1.0, high), len(samples))


def operands_of(torch: Any, kernels: AttentionKernels, dtype: str, backend: Backend) -> Operands:
    """Over a pool of the backend's size."""
    return Operands(torch, kernels, dtype, POOL_BYTES[backend])


class Operands:
    """What cases compute on: views of one pool of random values, so that the next call finds nothing in a cache."""

    def __init__(self, torch: Any, kernels: AttentionKernels, dtype: str, pool_bytes: int) -> None:
        self.torch, self.kernels = torch, kernels
        self._bytes = DTYPE_BYTES[dtype]
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._decoder: SmallDecoder | None = None
        self._pool_elements = pool_bytes // self._bytes
        self._pool: Tensor | None = None

    def release(self) -> None:
        """Give all of it back to the device."""
        self._pool = self._decoder = None
        if self.kernels.device != "cpu":
            getattr(self.torch, str(self.kernels.device).partition(":")[0]).empty_cache()

    def call_of(self, case: Case) -> Call:
        """A function that does the case once, each time on other operands."""
        n = case.named()
        if case.op == "copy":
            return self._copy(n["bytes"])
        if case.op == "matmul":
            return self._matmul(n["tokens"], (n["out_features"], n["in_features"]))
        if case.op == "layer":
            tokens, hidden, wide, heads, kv_heads, head_dim = case.sizes
            return self._layer(tokens, LayerShape(hidden, wide, heads, kv_heads, head_dim))
        if case.op == "prefill":
            return self._prefill(**n)
        if case.op == "step":
            return self._step(**n)
        if case.op == "decode":
            return self._decode(**n)
        return self._paged_decode(**n)

    def _copy(self, size: int) -> Call:
        elements = size // self._bytes
        source = self._views(2 * elements)
        turn = count()

        def call() -> object:
            pair = source[next(turn) % len(source)]
            return pair[:elements].copy_(pair[elements:])

        return call

    def _matmul(self, tokens: int, size: tuple[int, int]) -> Call:
        from torch.nn.functional import linear

        x, weights = self._random(tokens, size[1]), self._shaped(size)
        turn = count()
        return lambda: linear(x, weights[next(turn) % len(weights)])

    def _layer(self, tokens: int, shape: LayerShape) -> Call:
        sizes = shape.matrices()
        elements = [rows * columns for rows, columns in sizes]
        ones = self.torch.ones(2, shape.hidden_size, dtype=self._dtype, device=self.kernels.device)
        layers = []
        for view in self._views(sum(elements)):
            parts = zip(view.split(elements), sizes, strict=True)
            qkv, output, gate_up, down = (part.view(size) for part, size in parts)
            layers.append(Layer(qkv, output, gate_up, down, ones))
        x = self._random(tokens, shape.hidden_size)
        positions = self.torch.arange(tokens, device=self.kernels.device)
        rotary = rotary_table(self.torch, positions, shape.head_dim, self._dtype)
        caches = [self._random(-(-tokens // 16), 16, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
        turn = count()

        def call() -> object:
            layer = layers[next(turn) % len(layers)]
            q, k, v = attention_inputs(layer, shape, x, rotary)
            self.kernels.write_kv(k, v, *caches, slots=positions)
            return after_attention(layer, shape, x, q)

        return call

    def _prefill(
        self, batch: int, new_tokens: int, context_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> Call:
        length = new_tokens + context_tokens
        q = self._random(batch * new_tokens, num_heads, head_dim)
        kv = self._shaped((2, batch * length, num_kv_heads, head_dim))
        q_lens, kv_lens, scale, turn = [new_tokens] * batch, [length] * batch, head_dim**-0.5, count()

        def call() -> object:
            k, v = kv[next(turn) % len(kv)]
            return self.kernels.prefill(q, k, v, q_lens=q_lens, kv_lens=kv_lens, scale=scale)

        return call

    def _decode(self, batch: int, context_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Call:
        q = self._random(batch, num_heads, head_dim)
        kv = self._shaped((2, batch, context_tokens, num_kv_heads, head_dim))
        lens, scale, turn = [context_tokens] * batch, head_dim**-0.5, count()

        def call() -> object:
            k, v = kv[next(turn) % len(kv)]
            return self.kernels.decode(q, k, v, kv_lens=lens, scale=scale)

        return call

    def _paged_decode(
        self, batch: int, context_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> Call:
        """Lengths differ, as those of requests do, and sum to what the case says within a token a sequence: a kernel
        that takes runs of one length together gains nothing by it."""
        lens = _unlike(batch, context_tokens)
        columns = -(-max(lens) // block_size)
        block = block_size * num_kv_heads * head_dim
        half = self._all(2 * batch * columns * block)
        half = half[: half.numel() // (2 * block) * 2 * block]
        k_cache, v_cache = half.view(2, -1, block_size, num_kv_heads, head_dim)
        order = self.torch.randperm(k_cache.size(0), generator=self.torch.Generator().manual_seed(0))
        order = order.to(self.torch.int32).to(self.kernels.device)
        wanted = batch * columns
        tables = [order[i * wanted : (i + 1) * wanted].view(batch, columns) for i in range(len(order) // wanted)]
        q, scale, turn = self._random(batch, num_heads, head_dim), head_dim**-0.5, count()

        def call() -> object:
            table = tables[next(turn) % len(tables)]
            return self.kernels.paged_decode(q, k_cache, v_cache, block_table=table, context_lens=lens, scale=scale)

        return call

    def _step(self, batch: int, context_tokens: int, num_layers: int, block_size: int, **sizes: int) -> Call:
        """Contexts differ as those of ``_paged_decode``."""
        model = ModelShape(
            name="bench",
            num_layers=num_layers,
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_attention_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            vocab_size=sizes["vocab_size"],
            max_position_embeddings=1 << 20,
            dtype_bytes=self._bytes,
        )
        lens = _unlike(batch, context_tokens)
        wanted = sum(-(-length // block_size) for length in lens)
        held = self._decoder
        if held is None or (held.model, held.block_size) != (model, block_size) or held.num_blocks < wanted:
            self._decoder = None  # its memory first
            blocks = max(wanted, MIN_BLOCKS)
            held = self._decoder = SmallDecoder(
                model, self.kernels, dtype=self._dtype_name, num_blocks=blocks, block_size=block_size, seed=0
            )
        held.keep_only(())
        step = Sequences(range(batch), [1] * batch, [length - 1 for length in lens])
        return partial(held.step, step)

    def _shaped(self, size: tuple[int, ...]) -> list[Tensor]:
        elements = int(np.prod(size))
        return [view[:elements].view(size) for view in self._views(elements)]

    def _views(self, elements: int) -> list[Tensor]:
        """Pieces of the pool, each of at least so many elements: one where it must grow for it."""
        pool = self._all(elements)
        aligned = -(-elements // 64) * 64
        views = min(MAX_VIEWS, max(1, pool.numel() // aligned))
        return [pool[i * aligned : i * aligned + elements] for i in range(views)]

    def _all(self, elements: int) -> Tensor:
        wanted = max(self._pool_elements, elements)
        if self._pool is None or self._pool.numel() < wanted:
            self._pool = self._random(wanted)
        return self._pool

    def _random(self, *size: int) -> Tensor:
        generator = self.torch.Generator().manual_seed(0)
        made = self.torch.randn(*size, generator=generator, dtype=self.torch.float32).mul_(0.05)
        random: Tensor = made.to(self._dtype).to(self.kernels.device)
        return random


def _unlike(batch: int, length: int) -> list[int]:
    """So many lengths around *length*, neighbours unlike, and their sum *batch* times it where the batch is even."""
    apart = min(batch // 2, length - 1)
    signs = (1, -1) if apart else (0, 0)
    return [length + signs[i % 2] * min(apart, i // 2 + 1) * (i + 1 < batch or batch % 2 == 0) for i in range(batch)]
