"""Kernels are timed by a clock of ours, over other operands at each call, and a small decoder serves a schedule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for, load
from hbmtwin.kernels.records import BatchShape, ModelShape
from hbmtwin.validation.bench.kernels import ClockTimer, run_bench
from hbmtwin.validation.bench.records import BenchError, Case, case
from hbmtwin.validation.small_decoder import Sequences, SmallDecoder, serve

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LAYER = {"hidden_size": 32, "intermediate_size": 48, **HEADS}
CASES = (
    case("copy", {"bytes": 4096}),
    case("matmul", {"tokens": 3, "out_features": 16, "in_features": 32}),
    case("layer", {"tokens": 5, **LAYER}),
    case("prefill", {"batch": 2, "new_tokens": 3, "context_tokens": 4, **HEADS}),
    case("decode", {"batch": 2, "context_tokens": 9, **HEADS}),
    case("paged_decode", {"batch": 3, "context_tokens": 9, **HEADS, "block_size": 4}),
    case("step", {"batch": 3, "context_tokens": 9, "block_size": 4, "num_layers": 2, "vocab_size": 50, **LAYER}),
)
MODEL = ModelShape("toy", 2, 32, 48, 4, 2, 8, 50, 4096)


@pytest.fixture(scope="module")
def torch() -> Any:
    try:
        loaded = load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    loaded.set_num_threads(1)
    return loaded


class FakeTimer:
    """Calls, and takes as long as it is told: a quarter longer each time."""

    clock = "fake"

    def __init__(self) -> None:
        self.calls = 0

    def time_ns(self, call: Callable[[], object], calls: int) -> float:
        for _ in range(calls):
            call()
        self.calls += calls
        return 1e6 * (1 + self.calls % 4)


def test_every_op_is_called_and_its_point_is_the_quartiles_of_all_rounds(torch: Any) -> None:
    timer = FakeTimer()
    told: list[str] = []
    done = run_bench(CASES, "cpu", dtype="float32", threads=1, rounds=2, timer=timer, done=told.append)
    assert [p.case for p in done.points] == list(CASES)
    assert (done.kernels, done.dtype, done.threads, done.clock) == ("cpu-flash", "float32", 1, "fake")
    assert {p.runs for p in done.points} == {10}
    assert all(1e6 <= p.p25_ns <= p.median_ns <= p.p75_ns <= 4e6 for p in done.points)
    assert len(told) == 2 * len(CASES)
    assert timer.calls == 2 * len(CASES) * (10 + 5)


def test_a_long_case_is_warm_after_two_calls(torch: Any) -> None:
    class Slow(FakeTimer):
        def time_ns(self, call: Callable[[], object], calls: int) -> float:
            super().time_ns(call, calls)
            return 1.5e7  # two of them are all that is spent on it

    timer = Slow()
    run_bench(CASES[:1], "cpu", dtype="float32", threads=1, rounds=1, timer=timer)
    assert timer.calls == 2 + 5


def test_a_case_that_finds_no_memory_is_told_by_its_sizes(torch: Any) -> None:
    """Each token's row is short, and there are more of them than any machine holds."""
    huge = case("matmul", {"tokens": 1 << 40, "out_features": 1, "in_features": 1 << 16})
    with pytest.raises(BenchError, match=r"matmul tokens=1099511627776 .*; take smaller sizes, or leave it out"):
        run_bench([huge], "cpu", timer=FakeTimer())


def test_a_cap_is_set_before_anything_is_made(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capped: list[tuple[Any, int]] = []
    monkeypatch.setattr("hbmtwin.validation.bench.kernels.cap_memory", lambda *asked: capped.append(asked))
    run_bench(CASES[:1], "cpu", timer=FakeTimer(), rounds=1)
    assert capped == []
    run_bench(CASES[:1], "cpu", timer=FakeTimer(), rounds=1, memory_bytes=5)
    assert capped == [(torch.cpu, 5)]
    huge = case("matmul", {"tokens": 1 << 40, "out_features": 1, "in_features": 1 << 16})
    with pytest.raises(BenchError, match="take smaller sizes, or more than 2 GiB with --memory-gib, or leave it out"):
        run_bench([huge], "cpu", timer=FakeTimer(), memory_bytes=2 << 30)


def test_a_clock_is_read_around_all_calls() -> None:
    ticks = iter((100, 1300))
    called: list[int] = []
    assert ClockTimer("fake", lambda: next(ticks)).time_ns(lambda: called.append(1), 4) == 300.0
    assert len(called) == 4


def decoder(kind: Any = "flash") -> SmallDecoder:
    return SmallDecoder(MODEL, kernels_for("cpu", kind), dtype="float32", num_blocks=40, block_size=4, seed=3)


def test_a_prompt_in_chunks_gives_the_token_of_the_whole_prompt(torch: Any) -> None:
    """By two kinds of attention: what is in the blocks is what was computed, whoever else is in the batch."""
    with torch.inference_mode():
        whole, chunks, standard = decoder(), decoder(), decoder("standard")
        wanted = whole.step(Sequences([7], [13], [0])).tolist()
        assert standard.step(Sequences([7], [13], [0])).tolist() == wanted
        chunks.step(Sequences([7, 8], [5, 2], [0, 0]))
        chunks.step(Sequences([8, 7], [1, 7], [2, 5]))
        assert chunks.step(Sequences([8, 7], [1, 1], [3, 12])).tolist()[1] == wanted[0]


def test_sequences_that_left_give_their_blocks_back(torch: Any) -> None:
    with torch.inference_mode():
        one = decoder()
        for round_ in range(9):  # of 40 blocks each takes 25
            one.keep_only([round_])
            one.step(Sequences([round_], [100], [0]))


def test_a_schedule_is_served_step_by_step_and_leaps_are_taken_apart(torch: Any) -> None:
    steps = pd.DataFrame(
        {
            "step": [0, 1, 4],
            "repeat": [1, 3, 1],
            "seq_ids": [[0], [0], [1, 0]],
            "new_tokens": [[6], [1], [4, 1]],
            "context_tokens": [[0], [6], [0, 9]],
        }
    )
    with torch.inference_mode():
        served = serve(decoder(), steps, FakeTimer(), warm_up=1)
    assert served.steps == [0, 1, 2, 3, 4]
    assert served.batches == [
        BatchShape(((6, 0),)),
        BatchShape((), 1, 7, 1),
        BatchShape((), 1, 8, 1),
        BatchShape((), 1, 9, 1),
        BatchShape(((4, 0),), 1, 10, 1),
    ]
    assert len(served.measured_ns) == 5


class Spy:
    """Kernels that only remember the lengths they were asked for."""

    name, device = "spy", "cpu"

    def __init__(self) -> None:
        self.lens: list[list[int]] = []

    def paged_decode(self, *tensors: Any, context_lens: list[int], **others: Any) -> None:
        self.lens.append(list(context_lens))


def test_lengths_of_a_paged_batch_differ_and_sum_to_what_the_case_says(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy()
    monkeypatch.setattr("hbmtwin.validation.bench.kernels.kernels_for", lambda *names: spy)
    sizes = ((1, 9), (2, 9), (8, 9), (8, 1))
    cases = [Case("paged_decode", (batch, length, 4, 2, 8, 4)) for batch, length in sizes]
    run_bench(cases, "cpu", dtype="float32", threads=1, rounds=1, timer=FakeTimer())
    assert {(len(lens), sum(lens)) for lens in spy.lens} == {(b, b * length) for b, length in sizes}
    for lens in spy.lens:
        assert len(lens) == 1 or max(lens) == 1 or all(a != b for a, b in pairwise(lens))
