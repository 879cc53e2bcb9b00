"""The steps of a run on a real decoder: how long each takes whole, beside what was predicted for it.

::

    steps.parquet -> a sample by batch size -> each on a decoder of the model's own shape, its KV there and random
                          |                        embedding | layer ... layer | norm, head, argmax
                          +-> what the run says of that step's time            medians of rounds, each behind a warm-up

Where all layers do not fit the machine, or would take too long, D of L are made, and each step runs through D and
through none. Layers are alike, so ``t(L) = t(D) + (L - D) (t(D) - t(0)) / D``, and it is said that D were measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hbmtwin.kernels.attention.backends import kernels_for, load
from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.kernels.records import ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.calibration import shipped_profile
from hbmtwin.sim.catalog.device_table import device, devices_called
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.bench.kernels import device_called
from hbmtwin.validation.run_replay.decodable import (
    NoDecoder,
    blocks_of,
    check_decoder,
    layers_are_alike,
    need_of,
    read_model,
)
from hbmtwin.validation.run_replay.meter import DecoderRunner, StepRunner, stopwatch_of, threads_of, threads_told
from hbmtwin.validation.run_replay.predicted import is_it, predicted_attention
from hbmtwin.validation.run_replay.program import batch_shape
from hbmtwin.validation.run_replay.room import Room, gib, layers_that_fit, room_of
from hbmtwin.validation.run_replay.sampling import Batch
from hbmtwin.validation.run_replay.source import RecordedRun
from hbmtwin.validation.run_replay.step_report import StepReplay
from hbmtwin.validation.run_replay.strata import Chosen, RunSteps, choose

ROUNDS = (9, 5, 3, 1)
"""Through all chosen steps, so that a burst of another's load spoils a round and not a step: the first of these that is
thought to take half the limit. In each a step runs twice: warming up, with attention told apart, and timed."""
LIMIT_S = 120
"""Of all measurements, unless told otherwise; as much is chosen as is thought to take half of it."""
FEW_STEPS = 8
"""As many are kept before rounds become one, and then layers are left out."""
MAKING_BYTES_PER_S = 1e9
"""Of weights and KV, roughly."""
HOST_PROFILE = "cpu-epyc-1-thread"
"""By which times of a CPU are guessed where the run is of another device."""

Told = Callable[[str], None]


@dataclass(frozen=True)
class StepOptions:
    """What a user may say."""

    steps: int = 24
    """Measured at most."""
    layers: int | None = None
    """Made at most; None: as many as fit."""
    limit_s: float = LIMIT_S
    threads: int = 1
    """Of a CPU; 0: as torch has them."""


class _Choice(NamedTuple):
    """What will be measured."""

    chosen: tuple[Chosen, ...]
    depth: int
    rounds: int
    seconds: float
    """As guessed."""
    why_fewer_layers: str
    """A sentence; empty where all are made."""


def replay_steps(
    run: RecordedRun,
    plan: ServerPlan,
    backend: Backend,
    options: StepOptions,
    *,
    told: Told = lambda words: None,
    done: Told = lambda words: None,
    room: Room | None = None,
    runner: Callable[[ModelShape, int, int], StepRunner] | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> StepReplay:
    """Measure sampled steps. What is to come is *told* before anything is made.

    *room* stands in for what the machine has; *runner*, which is given model, blocks and layers, and *now_s* for a
    decoder and the clock, in tests. Raise NoDecoder for a run that cannot be done, BackendUnavailable.
    """
    check_decoder(plan)
    torch = load(backend)
    steps = RunSteps(run.steps)
    if not len(steps):
        raise NoDecoder("the run has no step with a sequence")
    model, kernels = read_model(plan), kernels_for(backend, run.scenario.engine.attention)
    called = device_called(torch, backend)
    same = is_it(plan.device, backend, called)
    width, dtype = _dtype(model, backend)
    cap = None if backend == "cpu" else run.scenario.device.memory_bytes
    room = room or room_of(torch, backend, cap)
    choice = _choose(steps, plan, model, room, width, _pace(plan, model, backend, called, same), options)
    told(_announced(choice, len(steps), model.num_layers, options))
    num_blocks = blocks_of([c.batch for c in choice.chosen], plan.block_size)
    until_s = now_s() + options.limit_s
    with _prepared(torch, backend, options.threads, room), torch.inference_mode():
        watch, used = stopwatch_of(torch, backend), torch.get_num_threads()
        if runner is None:
            made: StepRunner = DecoderRunner(
                model,
                kernels,
                watch,
                dtype=dtype,
                num_blocks=num_blocks,
                block_size=plan.block_size,
                num_layers=choice.depth,
            )
        else:
            made = runner(model, num_blocks, choice.depth)
        threads = f", {threads_told(torch)}" if backend == "cpu" else ""
        measured = _measure(made, choice, model.num_layers, until_s, done, now_s)
    timed = choice.chosen[: len(measured)]
    batches = [c.batch for c in timed]
    columns = np.array(measured, np.int64).reshape(-1, 5)
    partial_depth = choice.depth < model.num_layers
    return StepReplay(
        measured_on=f"a decoder over {kernels.name} on {called}{threads}, torch {torch.__version__}",
        predicted_for=plan.device.name,
        basis=plan.cost.basis,
        same_device=same,
        clock=watch.clock,
        steps=np.array([b.step for b in batches], np.int64),
        kinds=tuple(b.kind for b in batches),
        sequences=np.array([len(b.new_tokens) for b in batches], np.int64),
        stands_for=np.array([c.stands_for for c in timed], np.float64),
        predicted_ns=np.array([b.duration_ns for b in batches], np.int64),
        measured_ns=columns[:, 0],
        predicted_attention_ns=predicted_attention(plan, batches),
        least_ns=columns[:, 1],
        measured_attention_ns=columns[:, 2],
        num_layers=model.num_layers,
        layers_measured=choice.depth,
        at_depth_ns=columns[:, 3],
        without_layers_ns=columns[:, 4] if partial_depth else np.empty(0, np.int64),
        total_steps=len(steps),
        total_predicted_ns=int(steps.times_ns.sum()),
        left_out=len(choice.chosen) - len(timed),
        notes=tuple(
            _notes(run, plan, backend, called, choice, len(timed), len(steps), model.num_layers, watch.clock, used)
        ),
    )


# -- what is measured --------------------------------------------------------------------------------------------------


def _choose(
    steps: RunSteps,
    plan: ServerPlan,
    model: ModelShape,
    room: Room,
    dtype_bytes: int,
    pace_ns: Callable[[Batch], float],
    options: StepOptions,
) -> _Choice:
    """So many steps and layers as fit the memory and the time: steps give way down to FEW_STEPS, then rounds, then
    layers, then the other steps. Raise NoDecoder."""
    whole, most = model.num_layers, options.steps
    while True:
        why = ""
        chosen = choose(steps, most)
        batches = [c.batch for c in chosen]
        need = need_of(plan, model, batches, dtype_bytes)
        depth = layers_that_fit(need, room, whole)
        sizes = (
            f"all {whole} layers of {model.name} take {gib(need.of(whole))} ({gib(need.ends)} for embedding and head, "
            f"{gib(need.layer)} a layer with its KV, {gib(need.step)} in a step); {room.said}"
        )
        if depth < 1:
            raise NoDecoder(f"{sizes}: not even one layer fits")
        if depth < whole:
            why = f"{sizes[0].upper()}{sizes[1:]}."
        if options.layers is not None and options.layers < depth:
            depth, why = options.layers, f"--layers {options.layers} was asked for."
        if depth < whole and not layers_are_alike(model):
            raise NoDecoder(f"{why} Its layers are not alike (some have a window), so that some do not tell of all")
        while True:
            seconds = {n: _seconds(batches, depth, need.of(depth), whole, n, pace_ns) for n in ROUNDS}
            fit = (n for n in ROUNDS if seconds[n] <= options.limit_s / 2 and (n > 1 or len(chosen) <= FEW_STEPS))
            rounds = next(fit, None)
            if rounds is not None:
                return _Choice(chosen, depth, rounds, seconds[rounds], why)
            if len(chosen) > FEW_STEPS or depth == 1 or not layers_are_alike(model):
                break
            depth //= 2
            why = why or f"All {whole} layers would take longer than half the limit of {options.limit_s:g} s."
        if len(chosen) == 1:
            raise NoDecoder(
                f"one step through {depth} of {whole} layers, {2 * ROUNDS[-1]} times, takes about "
                f"{ceil(seconds[ROUNDS[-1]]):,} s here; give --limit-s {2 * ceil(seconds[ROUNDS[-1]])} for it"
            )
        most = max(FEW_STEPS, len(chosen) // 2) if len(chosen) > FEW_STEPS else len(chosen) // 2


def _seconds(
    batches: Sequence[Batch],
    depth: int,
    made_bytes: int,
    num_layers: int,
    rounds: int,
    pace_ns: Callable[[Batch], float],
) -> float:
    """What making and measuring will take, about."""
    share = 2 * depth / num_layers + (1 / num_layers if depth < num_layers else 0)
    return made_bytes / MAKING_BYTES_PER_S + rounds * share * sum(pace_ns(b) for b in batches) / 1e9


def _pace(plan: ServerPlan, model: ModelShape, backend: Backend, called: str, same: bool) -> Callable[[Batch], float]:
    """How long a step may take on the machine at hand: as predicted where the run is of it, else by what the catalog
    knows of such a device."""
    if same:
        return lambda b: float(b.duration_ns)
    if backend == "cpu":
        on = shipped_profile(HOST_PROFILE).applied_to(device("cpu"))
    else:
        known = devices_called(called)
        on = device(known[0]) if known else plan.device
    token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * model.dtype_bytes
    cost = RooflineCost(model, on, kv_token_bytes=token_bytes, attention=plan.scenario.engine.attention)
    return lambda b: float(cost.steps(batch_shape(b.new_tokens, b.context_tokens)).first_ns)


def _announced(choice: _Choice, total: int, num_layers: int, options: StepOptions) -> str:
    depth = f"all {num_layers}" if choice.depth == num_layers else f"{choice.depth} of {num_layers}"
    return (
        f"measuring {len(choice.chosen):,} of {total:,} steps through {depth} layers, in {_rounds(choice)}: about "
        f"{max(1, round(choice.seconds)):,} s, and none begins after {options.limit_s:,.0f} s (--limit-s)"
    )


def _rounds(choice: _Choice) -> str:
    return f"{choice.rounds} round{'' if choice.rounds == 1 else 's'}"


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measure(
    runner: StepRunner, choice: _Choice, num_layers: int, until_s: float, done: Told, now_s: Callable[[], float]
) -> list[tuple[int, int, int, int, int]]:
    """Of each step ns of all layers, by the median and by the least of its rounds, of their attention, through the
    layers that are made, and through none. When the time is up the round ends there; in the first the steps behind are
    left out."""
    depth = choice.depth
    runs: list[list[tuple[float, float, float]]] = [[] for _ in choice.chosen]
    for i, c in [(i, c) for _ in range(choice.rounds) for i, c in enumerate(choice.chosen)]:
        if runs[0] and now_s() > until_s:
            break
        runner.place(c.batch)
        attention = runner.attention_ns(depth)
        runs[i].append((attention, runner.time_ns(depth), runner.time_ns(0) if depth < num_layers else 0.0))
        done(f"step {c.batch.step}")
    found = []
    for own in filter(None, runs):
        columns = list(zip(*own, strict=True))
        attention, at_depth, without = map(median, columns)
        whole = scaled(at_depth, without, depth, num_layers)
        least = scaled(min(columns[1]), min(columns[2]), depth, num_layers)
        times = (whole, least, attention * num_layers / depth, at_depth, without)
        found.append((round(times[0]), round(times[1]), round(times[2]), round(times[3]), round(times[4])))
    return found


def scaled(at_depth: float, without_layers: float, depth: int, num_layers: int) -> float:
    """The time of *num_layers* by those of *depth* of them and of none, all layers alike."""
    return at_depth + (num_layers - depth) * (at_depth - without_layers) / depth


@contextmanager
def _prepared(torch: Any, backend: Backend, threads: int, room: Room) -> Iterator[None]:
    """A CPU's threads, or the cap of a device's allocator. Raise NoDecoder where memory is out under the cap."""
    if backend == "cpu":
        with threads_of(torch, threads):
            yield
        return
    module = getattr(torch, backend)
    total = module.mem_get_info()[1]
    module.set_per_process_memory_fraction(min(1.0, room.bytes / total))
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = (str(error) or "out of memory").splitlines()[0]
        raise NoDecoder(f"memory ran out under the cap of {gib(room.bytes)}: {first}") from None
    finally:
        module.empty_cache()
        module.set_per_process_memory_fraction(1.0)


def _dtype(model: ModelShape, backend: Backend) -> tuple[int, str]:
    if model.dtype_bytes == 4:
        return 4, "float32"
    return 2, "float16" if backend == "npu" else "bfloat16"


def _notes(
    run: RecordedRun,
    plan: ServerPlan,
    backend: Backend,
    called: str,
    choice: _Choice,
    timed: int,
    total: int,
    num_layers: int,
    clock: str,
    threads: int,
) -> Iterator[str]:
    yield f"{timed:,} of {total:,} steps were measured" + (
        "."
        if timed == total
        else ": by kind and number of sequences, shares by predicted time, the longest step among them."
    )
    if run.total_steps > len(run.steps):
        yield f"Only the first {len(run.steps):,} of {run.total_steps:,} rows of steps were read."
    if timed < len(choice.chosen):
        yield f"{len(choice.chosen) - timed:,} chosen steps were left out: the time limit was reached."
    if choice.depth < num_layers:
        yield (
            f"{choice.why_fewer_layers} Measured {choice.depth} of {num_layers} layers, all alike: a step's time is "
            f"t({choice.depth}) + {num_layers - choice.depth} x (t({choice.depth}) - t(0)) / {choice.depth}, where "
            "t(n) is what n layers took."
        )
    yield f"Medians of {_rounds(choice)} through these steps, by {clock} time."
    yield (
        "Every step ran alone: embedding, layers, KV writes, head, argmax; weights and KV are random, blocks dealt out "
        "in turn. The scheduler, sampling beyond argmax, and what the run adds for driver calls or swaps were not run."
    )
    if backend != "cpu":
        yield "Ops were launched one by one from Python; an engine replays decode steps as graphs, which take less."
    elif plan.profile is not None and not (
        called in plan.profile.source and f"threads {threads}," in plan.profile.source
    ):
        yield f"The profile is of another CPU, or of other threads: {plan.profile.source}."
    yield from (note for note in run.summary["notes"] if note.startswith("calibration.profile "))
