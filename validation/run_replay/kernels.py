"""The batches of a run on attention kernels: how long each step's attention takes, beside what was predicted for it.

::

    steps.parquet -> batches -> a sample -> one layer's tensors -> kernels, median of some runs -> times the layers
                                   |
                                   +-> the cost model's attention of that step, on the device of the scenario

What is measured is attention alone. It is compared with the step's attention as predicted, never with the whole step.
Where the kernels ran on another device than the prediction is for, sizes say nothing: then the factor between both is
told, and how far steps lie off it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hbmtwin.kernels.attention.backends import kernels_for, load
from hbmtwin.kernels.attention.interface import AttentionKernels, Backend
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.bench.kernels import device_called
from hbmtwin.validation.run_replay.errors import ErrorRow, error_row
from hbmtwin.validation.run_replay.meter import threads_of, threads_told
from hbmtwin.validation.run_replay.predicted import is_it, predicted_attention
from hbmtwin.validation.run_replay.sampling import Batch, StepKind, sample
from hbmtwin.validation.run_replay.source import RecordedRun, load_run

if TYPE_CHECKING:
    from torch import Tensor

MAX_STEPS = 24
"""Steps timed unless told otherwise."""
MAX_LAYER_BYTES = 2 << 30
"""Of one layer's tensors in a step; heavier steps are left out, and counted."""
WARM_UPS, RUNS = 1, 3

Ints = NDArray[np.int64]


class NoKernels(Exception):
    """Why a run's attention cannot be done here."""


@dataclass(frozen=True)
class KernelReplay:
    """Attention of sampled steps."""

    measured_on: str
    predicted_for: str
    basis: str
    """Of the prediction: ``default, uncalibrated``, or on what it was calibrated."""
    same_device: bool
    """The prediction is for the device that was measured."""
    steps: Ints
    kinds: tuple[StepKind, ...]
    predicted_step_ns: Ints
    """The whole step."""
    predicted_attention_ns: Ints | None
    """None: the cost model does not tell it apart."""
    measured_ns: Ints
    """Attention of all layers."""
    num_layers: int
    total_steps: int
    left_out: int
    """Sampled, and too heavy for this machine."""
    notes: tuple[str, ...]

    @property
    def factor(self) -> float | None:
        """Median of measured by predicted."""
        if self.predicted_attention_ns is None or not len(self.measured_ns):
            return None
        return float(np.median(self.measured_ns / np.maximum(1, self.predicted_attention_ns)))

    @property
    def factor_in_words(self) -> str:
        """``1,520 times``."""
        factor = self.factor
        if factor is None:
            return "-"
        return f"{factor:,.0f} times" if factor >= 100 else f"{factor:.3g} times"

    def errors(self) -> tuple[ErrorRow, ...]:
        """Of attention in ns: as predicted for the device that was measured, else behind the one factor."""
        factor = self.factor
        if factor is None or self.predicted_attention_ns is None:
            return ()
        if self.same_device:
            return (error_row("attention time (ns)", self.steps, self.predicted_attention_ns, self.measured_ns),)
        scaled = np.rint(self.predicted_attention_ns * factor).astype(np.int64)
        return (error_row("attention time (ns), behind one factor", self.steps, scaled, self.measured_ns),)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        attention = self.predicted_attention_ns
        return {
            "measured_on": self.measured_on,
            "predicted_for": self.predicted_for,
            "basis": self.basis,
            "same_device": self.same_device,
            "what": "attention of all layers: one layer's kernels, times the layers",
            "num_layers": self.num_layers,
            "steps_of_the_run": self.total_steps,
            "steps_too_heavy": self.left_out,
            "factor": self.factor,
            "errors": [row._asdict() for row in self.errors()],
            "steps": {
                "step": self.steps.tolist(),
                "kind": list(self.kinds),
                "predicted_step_ns": self.predicted_step_ns.tolist(),
                "predicted_attention_ns": None if attention is None else attention.tolist(),
                "measured_attention_ns": self.measured_ns.tolist(),
            },
            "notes": list(self.notes),
        }


def replay_kernels(
    run: RecordedRun,
    plan: ServerPlan,
    backend: Backend,
    *,
    max_steps: int = MAX_STEPS,
    kernels: AttentionKernels | None = None,
    clock_ns: Callable[[], int] | None = None,
    done: Callable[[str], None] = lambda name: None,
    times_ns: Mapping[int, int] | None = None,
    threads: int = 0,
) -> KernelReplay:
    """Time the attention of sampled steps. *kernels* and *clock_ns* stand in for the backend's own, for tests;
    *times_ns* were measured already, by step, between the operations. *threads* of a CPU; 0: as torch has them.

    Raise NoKernels for attention that these kernels do not do, BackendUnavailable.
    """
    check_attention(plan)
    kernels = kernels or kernels_for(backend, run.scenario.engine.attention)
    torch = load(backend)
    batches = all_batches(run)
    chosen = sample(batches, max_steps)
    layer = LayerCalls(plan, run, kernels, torch)
    measured: list[int] = []
    timed: list[Batch] = []
    with threads_of(torch, threads), torch.inference_mode():
        said = f", {threads_told(torch)}" if backend == "cpu" else ""
        one = backend == "cpu" and torch.get_num_threads() == 1
        clock_ns = clock_ns or (time.thread_time_ns if one else time.perf_counter_ns)
        for batch in chosen:
            if layer.bytes_of(batch) > MAX_LAYER_BYTES or (times_ns is not None and batch.step not in times_ns):
                continue
            timed.append(batch)
            measured.append(layer.time_ns(batch, clock_ns) if times_ns is None else times_ns[batch.step])
            done(f"step {batch.step}")
    predicted = predicted_attention(plan, timed)
    called = device_called(torch, backend)
    return KernelReplay(
        measured_on=f"{kernels.name} on {called}{said}, torch {torch.__version__}",
        predicted_for=plan.device.name,
        basis=plan.cost.basis,
        same_device=is_it(plan.device, backend, called),
        steps=np.array([b.step for b in timed], np.int64),
        kinds=tuple(b.kind for b in timed),
        predicted_step_ns=np.array([b.duration_ns for b in timed], np.int64),
        predicted_attention_ns=predicted,
        measured_ns=np.array(measured, np.int64),
        num_layers=plan.rank_model.num_attention_layers,
        total_steps=len(batches),
        left_out=len(chosen) - len(timed),
        notes=_notes(run, len(batches), len(timed), len(chosen) - len(timed), between=times_ns is not None),
    )


def check_attention(plan: ServerPlan) -> None:
    """Raise NoKernels for a model whose attention these kernels do not do."""
    model = plan.rank_model
    if model.latent_dim:
        raise NoKernels(f"{model.name} keeps a latent (MLA), which these kernels do not read")
    if not model.num_attention_layers:
        raise NoKernels(f"{model.name} has no attention")


def all_batches(run: RecordedRun) -> list[Batch]:
    """One a row of the table of steps; of steps that were taken at once the first. Empty steps are none."""
    s = run.steps
    columns = (s["step"], s["new_tokens"], s["context_tokens"], s["duration_ns"], s["repeat"])
    return [
        Batch(row, int(step), tuple(map(int, new)), tuple(map(int, context)), int(duration) // int(repeat))
        for row, (step, new, context, duration, repeat) in enumerate(zip(*columns, strict=True))
        if len(new)
    ]


class LayerCalls:
    """One layer's tensors and calls for a batch."""

    def __init__(self, plan: ServerPlan, run: RecordedRun, kernels: AttentionKernels, torch: Any) -> None:
        model, tp = plan.rank_model, run.scenario.engine.tensor_parallel_size
        self._torch, self._kernels = torch, kernels
        self._heads = model.num_attention_heads // tp
        self._kv_heads = max(1, model.num_kv_heads // tp)
        self._dim, self._v_dim = model.head_dim, model.v_head_dim or model.head_dim
        self._block = plan.block_size if plan.pool.block_bytes and run.scenario.kv_cache.policy == "paged" else 0
        self._window = plan.window
        self._windowed = model.num_window_layers if plan.window else 0
        self._full = model.num_attention_layers - self._windowed
        self._scale = 1 / sqrt(self._dim)

    def bytes_of(self, b: Batch) -> int:
        """Of K, V, Q and the output, at two bytes."""
        kv = sum(n + c for n, c in zip(b.new_tokens, b.context_tokens, strict=True))
        if not self._block:
            lens = [c + 1 for n, c in zip(b.new_tokens, b.context_tokens, strict=True) if n == 1]
            kv += len(lens) * max(lens, default=0) - sum(lens)
        width = self._dim + self._v_dim
        return 2 * width * (kv * self._kv_heads + sum(b.new_tokens) * self._heads)

    def time_ns(self, b: Batch, clock_ns: Callable[[], int]) -> int:
        """Median of some runs for each kind of layer, times its layers."""
        total = 0
        for layers, window in ((self._full, 0), (self._windowed, self._window)):
            if layers:
                calls = self.calls(b, window)
                times = []
                for i in range(WARM_UPS + RUNS):
                    self._wait()
                    begin = clock_ns()
                    for call in calls:
                        call()
                    self._wait()
                    if i >= WARM_UPS:
                        times.append(clock_ns() - begin)
                total += layers * int(median(times))
        return total

    def _wait(self) -> None:
        if self._kernels.device != "cpu":
            getattr(self._torch, self._kernels.device).synchronize()

    def windows(self, plan: ServerPlan) -> list[int]:
        """Of each layer that keeps KV the tokens that it sees, 0: all."""
        windows = [w for w in plan.rank_model.layer_windows if self._windowed]
        layers = self._full + self._windowed
        return windows if len(windows) == layers else [0] * layers

    def calls(self, b: Batch, window: int) -> list[Callable[[], Tensor]]:
        """One for those that prefill, one for those that decode; their tensors are made now."""
        pairs = list(zip(b.new_tokens, b.context_tokens, strict=True))
        prefill = [(n, n + c) for n, c in pairs if n > 1]
        decode = [c + 1 for n, c in pairs if n == 1]
        calls: list[Callable[[], Tensor]] = []
        if prefill:
            calls.append(self._prefill([n for n, _ in prefill], [kv for _, kv in prefill], window))
        if decode:
            calls.append(self._decode(decode, window))
        return calls

    def _prefill(self, q_lens: list[int], kv_lens: list[int], window: int) -> Callable[[], Tensor]:
        kernels, scale = self._kernels, self._scale
        q = self._random(sum(q_lens), self._heads, self._dim)
        if self._block:
            k, v, table = self._paged(kv_lens)
            return lambda: kernels.paged_prefill(
                q, k, v, block_table=table, q_lens=q_lens, context_lens=kv_lens, scale=scale, window=window
            )
        k = self._random(sum(kv_lens), self._kv_heads, self._dim)
        v = self._random(sum(kv_lens), self._kv_heads, self._v_dim)
        return lambda: kernels.prefill(q, k, v, q_lens=q_lens, kv_lens=kv_lens, scale=scale, window=window)

    def _decode(self, kv_lens: list[int], window: int) -> Callable[[], Tensor]:
        kernels, scale = self._kernels, self._scale
        q = self._random(len(kv_lens), self._heads, self._dim)
        if self._block:
            k, v, table = self._paged(kv_lens)
            return lambda: kernels.paged_decode(
                q, k, v, block_table=table, context_lens=kv_lens, scale=scale, window=window
            )
        longest = max(kv_lens)
        k = self._random(len(kv_lens), longest, self._kv_heads, self._dim)
        v = self._random(len(kv_lens), longest, self._kv_heads, self._v_dim)
        return lambda: kernels.decode(q, k, v, kv_lens=kv_lens, scale=scale, window=window)

    def _paged(self, lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Caches whose blocks go to the sequences in turn, as those of sequences that grow together do."""
        counts = [-(-length // self._block) for length in lens]
        blocks = sum(counts)
        table = np.zeros((len(lens), max(counts)), np.int32)
        at = 0
        for column in range(max(counts)):
            for row, count in enumerate(counts):
                if column < count:
                    table[row, column] = at
                    at += 1
        k = self._random(blocks, self._block, self._kv_heads, self._dim)
        v = self._random(blocks, self._block, self._kv_heads, self._v_dim)
        return k, v, self._torch.from_numpy(table).to(self._kernels.device)

    def _random(self, *shape: int) -> Tensor:
        """16-bit values that depend on nothing but the shape."""
        torch, device = self._torch, self._kernels.device
        dtype = torch.float16 if device == "npu" else torch.bfloat16
        made: Tensor = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(generator=torch.Generator(device=device).manual_seed(0))


class SampledKernels:
    """The attention of a result's sampled steps, for :mod:`hbmtwin.validation.run_replay.worker`."""

    def __init__(self, directory: Path, backend: str, max_steps: int) -> None:
        run = load_run(directory, trace=False)
        self._plan = ServerPlan(run.scenario)
        which: Backend = "npu" if backend == "npu" else "cuda"
        self._layer = LayerCalls(self._plan, run, kernels_for(which, run.scenario.engine.attention), load(which))
        chosen = sample(all_batches(run), max_steps)
        self._batches = {b.step: b for b in chosen if self._layer.bytes_of(b) <= MAX_LAYER_BYTES}
        self.steps: Sequence[int] = tuple(self._batches)

    def calls(self, step: int) -> list[list[Callable[[], Tensor]]]:
        """One layer's tensors stand for all layers of its kind."""
        windows = self._layer.windows(self._plan)
        made = {window: self._layer.calls(self._batches[step], window) for window in dict.fromkeys(windows)}
        return [made[window] for window in windows]


def _notes(run: RecordedRun, total: int, timed: int, left_out: int, *, between: bool) -> tuple[str, ...]:
    notes = [
        f"Attention of {timed:,} of {total:,} steps was timed"
        + ("." if timed == total else ": a fixed sample, every n-th step of each kind, the heaviest among them.")
    ]
    if left_out:
        notes.append(
            f"{left_out:,} sampled steps were left out: a layer's tensors take more than {MAX_LAYER_BYTES >> 30} GiB."
        )
    if between:
        notes.append(
            "Every layer's kernels ran in their place between the run's operations, from tensors of their own, and "
            "were timed by events; matrices, sampling and the host were not run."
        )
    else:
        notes.append("One layer's kernels were timed and multiplied; matrices, sampling and the host were not run.")
    if run.scenario.kv_cache.dtype != "auto":
        notes.append(f"kv_cache.dtype = '{run.scenario.kv_cache.dtype}': the kernels read 16-bit K and V instead.")
    return tuple(notes)
