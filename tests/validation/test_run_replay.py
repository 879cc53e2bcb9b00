"""``validate run`` end to end: a run is simulated and saved, and its directory held to the real torch_npu.

The four policies, with every tensor of the forward pass, expandable segments on and off and under a memory fraction, to
their death: no number differs at any operation, and memory is out at the same one. Then whatever could be wrong with a
trace, or with what does it again, is planted, and told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hbmtwin.allocators.caching import releases
from hbmtwin.sim.result import ResultError
from hbmtwin.sim.run import run as simulate_run
from hbmtwin.sim.scenario import Scenario
from hbmtwin.validation.allocator import EmulatedBackend
from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.run_replay.case import set_up
from hbmtwin.validation.run_replay.coverage import map_moments
from hbmtwin.validation.run_replay.memory import MemoryReplay, replay_memory
from hbmtwin.validation.run_replay.region import PlainRegion
from hbmtwin.validation.run_replay.source import load_run
from hbmtwin.workloads.formats.memory_trace import MemoryOp

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
COMMON = (
    "device.name=ascend-910b4",
    "memory.activations=per_layer",
    "results.memory_trace=true",
    "results.steps=true",
    "results.interval_s=0.001",
    "workload.request_rate=inf",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "engine.max_model_len=1024",
)
TIGHT = ("engine.gpu_memory_utilization=0.018",)
"""92 MiB of KV beside 300 MiB of weights."""
EXPANDABLE = ("memory.alloc_conf='expandable_segments:True'",)
FRACTION = ("memory.alloc_conf='per_process_memory_fraction:0.0145'",)
ARRIVING = (
    "memory.activation_bytes=0",
    "workload.request_rate=30",
    "workload.num_prompts=30",
    "workload.prompt_tokens={distribution='lognormal',mean=200,sigma=1,max=900}",
    "workload.output_tokens=4",
)
"""A pool that leaves hardly anything: activations of the first large prompt find no room."""
TORCH = "torch's allocator refused"


def requests(count: int, prompt: int, output: int) -> tuple[str, ...]:
    return (
        f"workload.num_prompts={count}",
        f"workload.prompt_tokens={prompt}",
        f"workload.output_tokens={output}",
    )


class Run(NamedTuple):
    preset: str
    settings: tuple[str, ...]
    ended_by: str = ""


RUNS = {
    "exact": Run("caching", (*TIGHT, *requests(16, 344, 40)), f"{TORCH} 17956864 bytes (workspace)"),
    "exact, expandable": Run(
        "caching", (*TIGHT, *EXPANDABLE, *requests(24, 340, 12)), f"{TORCH} 17956864 bytes (workspace)"
    ),
    "exact, memory fraction": Run(
        "caching", (*FRACTION, *requests(16, 490, 40)), f"{TORCH} 17956864 bytes (workspace)"
    ),
    "doubling": Run("doubling", (*TIGHT, *requests(16, 230, 60)), f"{TORCH} 8388608 bytes (kv)"),
    "doubling, expandable": Run(
        "doubling", (*TIGHT, *EXPANDABLE, *requests(17, 240, 60)), f"{TORCH} 8388608 bytes (kv)"
    ),
    "doubling, preempting": Run("doubling", (*TIGHT, *requests(18, 250, 8), "memory.oom=preempt")),
    "pooled": Run("pooled", (*TIGHT, *requests(16, 350, 20)), "pooled refused"),
    "paged": Run("paged", (*ARRIVING, "engine.gpu_memory_utilization=0.9966"), f"{TORCH} 17956864 bytes (workspace)"),
    "paged, expandable": Run(
        "paged", (*ARRIVING, *EXPANDABLE, "engine.gpu_memory_utilization=0.9967"), f"{TORCH} 17956864 bytes (workspace)"
    ),
    "paged, to the end": Run("paged", requests(6, 100, 6)),
}
SHORT = Run("doubling", requests(3, 60, 6))
EARLY = Run("caching", (*TIGHT, *requests(16, 344, 400)), f"{TORCH} 17956864 bytes (workspace)")
"""Dies before anybody is done."""
SHORT_POOLED = Run("pooled", requests(3, 60, 6))


@cache
def home() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="hbmtwin-run-replay-")


@cache
def recorded(planned: Run) -> Path:
    """The result directory of a run; nobody writes in it."""
    folder = Path(home().name)
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    out = folder / f"run-{sum(1 for _ in folder.iterdir())}"
    overrides = [*COMMON, f"model.name='{folder / 'config.json'}'", *planned.settings]
    simulate_run(Scenario.load(preset=planned.preset, overrides=overrides)).save(out)
    return out


def replayed(directory: Path, backend: EmulatedBackend) -> MemoryReplay:
    run = load_run(directory)
    return replay_memory(run, backend, set_up(run, "emulated"))


def told(m: MemoryReplay) -> dict[str, str]:
    """The first difference of each check that found one."""
    return {check.name: check.first for check in m.checks if check.differing}


@pytest.mark.parametrize("name", RUNS)
def test_no_number_differs_and_memory_is_out_at_the_same_operation(npu: EmulatedNpu, name: str) -> None:
    planned = RUNS[name]
    m = replayed(recorded(planned), EmulatedBackend(npu))
    assert m.case.difference is None
    assert told(m) == {}
    assert m.agrees
    assert m.case.counters == 126
    assert m.ended_by.startswith(planned.ended_by)
    if planned.ended_by:
        assert m.oom.predicted == m.oom.measured > 0
        assert m.ooms >= 1
    assert len(m.steps) >= 2
    for series, predicted in m.predicted.items():
        assert predicted.tolist() == m.measured[series].tolist()
        assert len(predicted) == len(m.steps)
    held = {check.name: check.compared for check in m.checks}
    assert held["operations in the order of the forward program"] > 80 * len(m.steps)
    assert held["the run's books at step ends"] >= 4 * len(m.steps)
    assert held["the run's address maps"] > 0
    assert held["the run's peaks, retries and death"] >= 3


def test_the_runs_are_what_they_are_called() -> None:
    """They die, preempt and retry; every kind of operation that a run has is among them."""
    summaries = {name: json.loads((recorded(run) / "summary.json").read_text()) for name, run in RUNS.items()}
    assert {name for name, s in summaries.items() if s["oom"]} == {n for n, run in RUNS.items() if run.ended_by}
    assert summaries["doubling, preempting"]["preemptions"] > 3
    assert sum(s["num_alloc_retries"] for s in summaries.values()) >= len(RUNS) // 2


def test_kernels_stand_where_a_layers_kv_has_grown(npu: EmulatedNpu) -> None:
    directory = recorded(SHORT)
    m = replayed(directory, EmulatedBackend(npu))
    rows = pq.read_table(directory / "memory_trace.parquet").to_pylist()
    assert len(m.passes) == len(m.steps)
    for p in m.passes:
        assert len(p.layers) == 4
        names = []
        for at in p.layers:
            before, behind = rows[at - 1], rows[at]
            assert behind["tag"] == "activation", "what attention writes to"
            names.append(before["tag"])
            assert p.begin < at < p.end
        assert sorted(p.layers) == list(p.layers)
        if p.step == 0:
            assert names[0] == "kv"


# -- planted in the trace ----------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def edited(tmp_path: Path, directory: Path, edit: Callable[[Rows], None]) -> Path:
    """A copy of a result directory with an edited trace."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    table = pq.read_table(directory / "memory_trace.parquet")
    rows = table.to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), copy / "memory_trace.parquet")
    return copy


def place(rows: Rows, op: str, tag: str, step: int = 2) -> int:
    """The first such operation of a step; a free by the tag of what it frees."""
    tags = {row["id"]: row["tag"] for row in rows if row["op"] == "malloc"}
    return next(i for i, row in enumerate(rows) if row["op"] == op and row["step"] == step and tags[row["id"]] == tag)


def without(op: str, tag: str, step: int = 2) -> Callable[[Rows], None]:
    return lambda rows: rows.pop(place(rows, op, tag, step))


def resized(tag: str, by: int, step: int = 2) -> Callable[[Rows], None]:
    def edit(rows: Rows) -> None:
        rows[place(rows, "malloc", tag, step)]["size"] += by

    return edit


def swapped(op: str, tag: str, by: int, step: int = 2) -> Callable[[Rows], None]:
    """The operation changes places with the one *by* rows behind it; each keeps its place's stamps."""

    def edit(rows: Rows) -> None:
        i = place(rows, op, tag, step)
        rows[i], rows[i + by] = rows[i + by], rows[i]

    return edit


def kv_late(rows: Rows) -> None:
    """What stands behind a layer's KV changes places with the last of its operations."""
    i = next(i for i, row in enumerate(rows) if row["tag"] == "kv" and rows[i + 1]["tag"] == "activation")
    rows[i], rows[i + 1] = rows[i + 1], rows[i]


def twice(rows: Rows) -> None:
    i = place(rows, "free", "kv", 5)
    rows.insert(i, dict(rows[i]))


PLANTED: dict[str, tuple[Callable[[Rows], None], str]] = {
    "no free of an activation": (without("free", "activation"), "operations in the order of the forward program"),
    "no malloc of an activation": (without("malloc", "activation"), "operations in the order of the forward program"),
    "no workspace": (without("malloc", "workspace"), "operations in the order of the forward program"),
    "no free of KV": (without("free", "kv", 5), "the run's books at step ends"),
    "no malloc of KV": (without("malloc", "kv", 0), "the run's books at step ends"),
    "an activation 512 larger": (resized("activation", 512), "operations in the order of the forward program"),
    "a workspace 512 smaller": (resized("workspace", -512), "operations in the order of the forward program"),
    "KV 512 larger": (resized("kv", 512, 0), "the run's books at step ends"),
    "KV one byte larger": (resized("kv", 1, 0), "the run's books at step ends"),
    "a weight 512 larger": (resized("weight", 512, 0), "weights and pools, as planned"),
    "two activations change places": (
        swapped("malloc", "activation", 1),
        "operations in the order of the forward program",
    ),
    "a free too early": (swapped("free", "activation", -1), "operations in the order of the forward program"),
    "a free twice": (twice, "operations in the order of the forward program"),
    "KV grows an operation too late": (kv_late, "operations in the order of the forward program"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_what_is_wrong_with_a_trace_is_told(npu: EmulatedNpu, tmp_path: Path, bug: str) -> None:
    edit, by = PLANTED[bug]
    m = replayed(edited(tmp_path, recorded(SHORT), edit), EmulatedBackend(npu))
    assert not m.agrees
    assert by in told(m)


def test_a_step_that_is_stamped_as_the_next_is_told(npu: EmulatedNpu, tmp_path: Path) -> None:
    def edit(rows: Rows) -> None:
        last = max(i for i, row in enumerate(rows) if row["step"] == 2)
        rows[last]["step"] = 3

    m = replayed(edited(tmp_path, recorded(SHORT), edit), EmulatedBackend(npu))
    assert "operation" in told(m)["operations in the order of the forward program"]


def trace_edits() -> int:
    """As many as the page says: those above, the stamp, and two of a region."""
    return len(PLANTED) + 1 + len(LOST_OF_A_REGION)


def test_the_page_counts_them() -> None:
    words = {17: "Seventeen", 18: "Eighteen", 19: "Nineteen"}
    page = (Path(__file__).resolve().parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    assert f"\n{words[trace_edits()]} edits of a trace " in page


# -- planted in the table of steps -------------------------------------------------------------------------------------


def with_steps(tmp_path: Path, directory: Path, edit: Callable[[Rows], Rows]) -> Path:
    copy = edited(tmp_path, directory, lambda rows: None)
    table = pq.read_table(directory / "steps.parquet")
    pq.write_table(pa.Table.from_pylist(edit(table.to_pylist()), table.schema), copy / "steps.parquet")
    return copy


STEP_EDITS: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "empty": (lambda rows: [], "a request was completed at .*, where no step ends: rows are missing"),
    "cut in half": (lambda rows: rows[: len(rows) // 2], "a request was completed at .*, where no step ends"),
    "a row lost": (lambda rows: rows[:3] + rows[4:], "step 3 is missing"),
    "the first lost": (lambda rows: rows[1:], "step 0 is missing"),
    "a row twice": (lambda rows: rows[:3] + rows[2:], "step 3 is missing"),
    "shorter": (lambda rows: [*rows[:-1], {**rows[-1], "duration_ns": 1}], "step 5 has other ends than its duration"),
    "more often": (lambda rows: [*rows[:-1], {**rows[-1], "repeat": 2}], "step 5 has other ends than its duration"),
}


@pytest.mark.parametrize("most", [50, 300_000])
@pytest.mark.parametrize("bug", STEP_EDITS)
def test_a_table_of_steps_that_lost_rows_is_refused_however_few_operations_are_read(
    tmp_path: Path, bug: str, most: int
) -> None:
    edit, why = STEP_EDITS[bug]
    with pytest.raises(ResultError, match=rf"steps.parquet: is damaged \({why}"):
        load_run(with_steps(tmp_path, recorded(SHORT), edit), max_operations=most)


@pytest.mark.parametrize("most", [50, 300_000])
@pytest.mark.parametrize("left", [0, 1])
def test_steps_that_end_before_the_trace_are_told_where_no_request_was_completed(
    npu: EmulatedNpu, tmp_path: Path, left: int, most: int
) -> None:
    directory = with_steps(tmp_path, recorded(EARLY), lambda rows: rows[:left])
    run = load_run(directory, max_operations=most)
    m = replay_memory(run, EmulatedBackend(npu), set_up(run, "emulated"))
    assert not m.agrees
    assert f"and the steps end in front of {left}" in told(m)["operations are those of the steps"]


# -- planted in what the run wrote of itself ---------------------------------------------------------------------------


def with_table(tmp_path: Path, directory: Path, name: str, edit: Callable[[Rows], Rows]) -> Path:
    copy = edited(tmp_path, directory, lambda rows: None)
    table = pq.read_table(directory / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist(edit(table.to_pylist()), table.schema), copy / f"{name}.parquet")
    return copy


def none(rows: Rows) -> Rows:
    return []


def first_half(rows: Rows) -> Rows:
    return rows[: len(rows) // 2]


def second_half(rows: Rows) -> Rows:
    return rows[len(rows) // 2 :]


TABLE_EDITS: tuple[tuple[str, Callable[[Rows], Rows], str], ...] = (
    ("timeline", none, "it holds no row"),
    ("timeline", first_half, "no row at 0.048610 s, where a request ended or the run died"),
    ("timeline", second_half, "its first row is at 0.0.* s, behind the first step"),
    ("timeline", lambda rows: [*rows[:3], *rows[4:]], "no row at 0.0.* s, where results.interval_s makes one due"),
    ("timeline", lambda rows: rows[::-1], "row 2 lies before the one in front of it"),
    ("checkpoints", none, "no address map at 0.000000 s, where the run made one"),
    ("checkpoints", first_half, "no address map at 0.0.* s, where the run made one"),
    ("requests", none, "0 requests completed, and summary.json says 3"),
    ("requests", first_half, "1 requests completed, and summary.json says 3"),
    ("requests", lambda rows: [{**row, "output_tokens": 5} for row in rows], "15 output tokens, and summary.json says"),
)


@pytest.mark.parametrize("most", [50, 300_000])
@pytest.mark.parametrize("at", range(len(TABLE_EDITS)))
def test_a_table_that_lost_rows_is_refused_and_agrees_with_nothing(tmp_path: Path, at: int, most: int) -> None:
    name, edit, why = TABLE_EDITS[at]
    with pytest.raises(ResultError, match=rf"{name}.parquet: is damaged \({why}.*; run it again"):
        load_run(with_table(tmp_path, recorded(SHORT), name, edit), max_operations=most)


def test_a_timeline_without_its_death_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"no row at 0\.031269 s, where a request ended or the run died"):
        load_run(with_table(tmp_path, recorded(EARLY), "timeline", lambda rows: rows[:-1]))


def test_the_page_counts_the_edits_of_tables() -> None:
    assert len(TABLE_EDITS) == 10
    page = (Path(__file__).resolve().parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    assert "\nTen edits of the timeline, the address maps and the requests " in page


def test_the_sums_of_a_timeline_are_those_of_the_summary(npu: EmulatedNpu) -> None:
    run = load_run(recorded(SHORT))
    timeline = run.timeline.assign(kv_unfilled=run.timeline["kv_unfilled"] + 1)
    m = replay_memory(replace(run, timeline=timeline), EmulatedBackend(npu), set_up(run, "emulated"))
    assert not m.agrees
    assert told(m)["the means of the run's books"].startswith("kv_utilization_mean: the run says 0.")


@pytest.mark.parametrize("checkpoint_s", [0, 0.003, 0.05])
@pytest.mark.parametrize("interval_s", [0.0005, 0.02, 0.1])
def test_moments_of_address_maps_follow_from_the_rows(tmp_path: Path, interval_s: float, checkpoint_s: float) -> None:
    """Beside the recorder itself, over runs with few maps and with so many that they are thinned out twice."""
    settings = (
        *(f"results.interval_s={interval_s}", f"results.checkpoint_s={checkpoint_s}", "memory.activations=peak"),
        *("workload.output_tokens=60", "workload.prompt_tokens=60", "workload.num_prompts=9"),
        "workload.request_rate=20",
    )
    run = load_run(recorded(Run("doubling", settings)))
    assert run.scenario.results.interval_s == interval_s
    times = run.timeline["time_ns"].tolist()
    due = map_moments(times, round(interval_s * 1e9), round(checkpoint_s * 1e9), None)
    assert due.tolist() == list(dict.fromkeys(run.checkpoints["time_ns"].tolist()))
    assert len(due) > 1


# -- planted in what does it again -------------------------------------------------------------------------------------


class Wrong(EmulatedBackend):
    """The real one is given an edited list of operations."""

    def __init__(self, npu: EmulatedNpu, edit: Callable[[list[MemoryOp]], None]) -> None:
        super().__init__(npu)
        self._edit = edit

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        wrong = list(ops)
        if len(wrong) > 150:  # fewer: both sides up to a difference, for what they held
            self._edit(wrong)
        return self.ours(ops, settings), self.npu.replay(wrong, settings, entries=True)


def drop(ops: list[MemoryOp]) -> None:
    ops[100] = MemoryOp("synchronize")


def grow_by_512(ops: list[MemoryOp]) -> None:
    i = next(i for i, op in enumerate(ops) if i > 100 and op.op == "malloc")
    ops[i] = ops[i]._replace(size=ops[i].size + 512)


def change_places(ops: list[MemoryOp]) -> None:
    i = next(i for i, op in enumerate(ops) if i > 100 and op.op == "malloc" and ops[i + 1].op == "malloc")
    ops[i], ops[i + 1] = ops[i + 1], ops[i]


@pytest.mark.parametrize("edit", [drop, grow_by_512, change_places])
def test_a_replay_that_goes_wrong_is_told(npu: EmulatedNpu, edit: Callable[[list[MemoryOp]], None]) -> None:
    m = replayed(recorded(SHORT), Wrong(npu, edit))
    assert not m.agrees
    assert m.case.difference is not None
    assert 100 <= m.case.difference.operation <= 130


def test_a_wrong_rule_of_ours_is_told_and_counted(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = recorded(RUNS["doubling"])
    monkeypatch.setattr(releases, "NPU_PAD", 4096)
    m = replayed(directory, EmulatedBackend(npu))
    assert m.case.difference is not None
    assert "allocated_bytes.all.current" in {name for name, _, _ in m.case.difference.what}
    assert (m.predicted["allocated"] != m.measured["allocated"]).any()


def test_memory_that_is_out_elsewhere_is_told(npu: EmulatedNpu) -> None:
    """The real device has 64 MiB less: it runs out earlier, and so do the numbers."""

    class Smaller(EmulatedBackend):
        def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
            less = settings.capacity_bytes // 500
            cap = replace(settings, tenants_bytes=settings.tenants_bytes)
            lower = [ops[0]._replace(arg=repr(float(ops[0].arg) - less / settings.capacity_bytes)), *ops[1:]]
            return self.ours(ops, cap), self.npu.replay(lower, cap, entries=True)

    m = replayed(recorded(RUNS["doubling"]), Smaller(npu))
    assert not m.oom.same
    assert 0 < m.oom.measured < m.oom.predicted
    assert "predicted at operation" in m.oom_in_words


# -- the region --------------------------------------------------------------------------------------------------------


def test_a_region_is_held_to_a_second_model(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = recorded(RUNS["pooled"])
    m = replayed(directory, EmulatedBackend(npu))
    assert "The region of KV (memory.kv_arena = 'pooled') has no binary anywhere." in m.not_compared[-1]
    assert any(check.name == "the region's blocks, by a second model" and check.compared > 1000 for check in m.checks)

    def worst(self: PlainRegion, need: int) -> tuple[int, int, None] | None:
        free = [(a, n, None) for a, n, tensor in self._pieces if tensor is None and n >= need]
        return max(free, key=lambda piece: piece[1], default=None)

    monkeypatch.setattr(PlainRegion, "_search", worst)
    m = replayed(recorded(RUNS["pooled"]), EmulatedBackend(npu))
    assert set(told(m)) == {"the region's blocks, by a second model"}


LOST_OF_A_REGION = (0, -1)


@pytest.mark.parametrize("which", LOST_OF_A_REGION)
def test_a_lost_operation_of_the_region_is_told(npu: EmulatedNpu, tmp_path: Path, which: int) -> None:
    def edit(rows: Rows) -> None:
        rows.pop([i for i, row in enumerate(rows) if row["allocator"] == "pooled" and row["op"] == "free"][which])

    m = replayed(edited(tmp_path, recorded(SHORT_POOLED), edit), EmulatedBackend(npu))
    assert "the run's books at step ends" in told(m)


@pytest.mark.parametrize(
    "settings", [("memory.kv_arena=buddy",), ("memory.kv_arena=tlsf",), ("memory.kv_arena=bump",), ("memory.fit=next",)]
)
def test_a_region_without_a_second_model_is_held_to_the_runs_books_and_says_so(
    npu: EmulatedNpu, settings: tuple[str, ...]
) -> None:
    m = replayed(recorded(SHORT_POOLED._replace(settings=(*SHORT_POOLED.settings, *settings))), EmulatedBackend(npu))
    assert m.agrees, told(m)
    (words,) = m.not_compared
    assert "the region's blocks have neither a binary nor a second model" in words


OTHERS = {
    "no activations": Run("caching", (*requests(3, 60, 6), "memory.activations=none")),
    "a peak a step": Run("paged", (*requests(3, 60, 6), "memory.activations=peak")),
    "standard attention": Run("doubling", (*requests(3, 60, 6), "engine.attention=standard")),
    "workspaces apart": Run("caching", (*requests(3, 60, 6), "engine.task_queue_enable=2")),
    "two ranks": Run("caching", (*requests(3, 60, 6), "engine.tensor_parallel_size=2")),
    "chunks": Run("paged", (*requests(5, 400, 3), "scheduler.max_num_batched_tokens=333")),
    "a static batch": Run("caching", (*requests(4, 60, 6), "scheduler.policy=static_batch")),
    "a window": Run("caching", (*requests(3, 60, 6), "kv_cache.retention='sliding_window(40)'")),
    "another tenant": Run("doubling", (*requests(3, 60, 6), "device.other_tenant_bytes=1GiB")),
    "garbage collection": Run(
        "doubling", (*requests(3, 60, 6), "memory.alloc_conf='garbage_collection_threshold:0.5,max_split_size_mb:64'")
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_kind_of_run_is_called_different(npu: EmulatedNpu, name: str) -> None:
    m = replayed(recorded(OTHERS[name]), EmulatedBackend(npu))
    assert m.case.difference is None
    assert told(m) == {}
    assert m.agrees
