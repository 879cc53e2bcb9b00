"""The forward pass in memory: what it asks for, in which order, for whom; leaps over it, and its deaths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.caching import CachingAllocator
from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import KVLayout, Segment, Tag, Work
from hbmtwin.kernels.activations import ActivationModel, Instruction
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim import catalog
from hbmtwin.sim.forward import Activations, Forward
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

MIB = 1 << 20
GIB = 1 << 30
WORKSPACE = 17_956_864
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two requests of 5 + 3 tokens on a model of two layers: a hidden state of a token is 512 bytes."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return (
        f"model.name={path}",
        "device.memory_bytes=1GiB",
        "engine.max_model_len=512",
        "memory.activations=per_layer",
        "results.memory_trace=true",
        "results.steps=true",
        *traffic(2, 5, 3),
    )


def traffic(count: int, prompt: int, output: int) -> tuple[str, ...]:
    return (
        f"workload.num_prompts={count}",
        f"workload.prompt_tokens={prompt}",
        f"workload.output_tokens={output}",
        "workload.request_rate=inf",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
    )


def ran(preset: str, *overrides: str, step_mode: bool = False) -> tuple[Twin, Result]:
    twin = Twin(Scenario.load(preset=preset, overrides=overrides))
    return twin, twin.run(step_mode=step_mode)


def rows_of(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    assert table is not None
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def told(result: Result, step: int | None = None) -> str:
    """The trace of a step: ``A512`` an activation of 512 bytes, ``a512`` its end, ``!512`` a use of the workspace."""
    made: dict[int, str] = {}
    words = []
    for row in rows_of(result.memory_trace):
        if row["op"] == "malloc":
            made[row["id"]] = word = f"{row['tag'][0].upper()}{row['size']}"
        elif row["op"] == "free":
            word = made.pop(row["id"]).lower()
        else:
            word = f"!{row['size']}"
        if step in (None, row["step"]):
            words.append(word)
    return " ".join(words)


# -- program order -----------------------------------------------------------------------------------------------------


def test_weights_come_first_tensor_by_tensor_then_the_pool(tiny: tuple[str, ...]) -> None:
    twin, result = ran("paged", *tiny)
    layer = "W393216 W131072 W524288 W262144 W512 W512"  # qkv, o, gate and up, down, two norms
    tokens = 128 * twin.kv.usage().pool // (128 * 2048)
    pool = " ".join([f"K{tokens * 512}"] * 4)  # K and V of two layers
    assert told(result).startswith(f"W524288 {layer} {layer} W512 W524288 W262144 {pool} A5120 ")
    trace = result.memory_trace
    assert trace is not None
    assert "kv" not in set(trace.loc[trace["step"] > 0, "tag"])


MLP_OF_10 = "A5120 A20480 A10240 A5120 a10240 a20480 a5120 a5120"
HEAD_OF_2 = "A1024 A4000 a1024 A8000 A8000 A8000 A16 a8000 a8000 a8000 a4000 a16"


def test_a_step_is_taken_in_program_order(tiny: tuple[str, ...]) -> None:
    """Two prompts of 5 tokens. KV grows between the projection and attention, which then has a workspace."""
    _, result = ran("caching", *tiny)
    attention = f"A5120 A15360 K2560 K2560 K2560 K2560 A5120 W{WORKSPACE} w{WORKSPACE} A5120 a5120 a15360 a5120 a5120"
    layer = f"{attention} {MLP_OF_10}"
    loaded = " ".join(w for w in told(result, 0).split() if w[0] == "W" and w != f"W{WORKSPACE}")
    assert told(result, 0) == f"{loaded} A5120 {layer} {layer} A5120 {HEAD_OF_2} a5120 a5120"


def test_concatenation_replaces_each_tensor_where_its_layer_is(tiny: tuple[str, ...]) -> None:
    _, result = ran("caching", *tiny)
    step = told(result, 1)
    grown = "A1024 A3072 K3072 k2560 K3072 k2560 K3072 k2560 K3072 k2560 A1024 "
    assert step.count(grown) == 2
    assert step.count("K") == 8
    trace = result.memory_trace
    assert trace is not None
    made = trace[(trace["step"] == 1) & (trace["tag"] == "kv")]
    assert made["owner"].tolist() == [0, 0, 1, 1] * 2
    assert set(trace.loc[trace["tag"].isin(["activation", "workspace", "weight"]), "owner"]) == {-1}


def test_old_copies_of_a_doubled_buffer_die_when_the_sampler_is_done(tiny: tuple[str, ...]) -> None:
    """Of 64 tokens the buffer is full: the 65th doubles it, all layers at once."""
    _, result = ran("doubling", *tiny, *traffic(1, 64, 3))
    step = told(result, 1)
    assert step.startswith(f"A512 A512 A1536 K{128 * 2048} A512 W{WORKSPACE} w{WORKSPACE} A512 ")
    assert step.endswith(f"a8 a512 a512 k{64 * 2048}")
    assert told(result, 2).count("K") == 0


@pytest.mark.parametrize("level", [0, 1])
def test_task_queue_below_2_takes_workspaces_from_the_caching_allocator(tiny: tuple[str, ...], level: int) -> None:
    _, result = ran("caching", *tiny, f"engine.task_queue_enable={level}")
    assert told(result).count(f"W{WORKSPACE} w{WORKSPACE}") == 2 * 3
    assert "!" not in told(result)
    assert result.timeline["activations"].max() == 0


def test_task_queue_2_takes_them_from_the_workspace_allocator(tiny: tuple[str, ...]) -> None:
    """One block of 18 MiB beside all books of tensors, from the first use to the end."""
    inside, below = ran("caching", *tiny)
    outside, result = ran("caching", *tiny, "engine.task_queue_enable=2")
    assert told(result) == told(below).replace(f"W{WORKSPACE} w{WORKSPACE}", f"!{WORKSPACE}")
    assert result.timeline["activations"].tolist() == [0] + [18 * MIB] * (len(result.timeline) - 1)
    assert inside.general.usage().reserved - outside.general.usage().reserved == 18 * MIB


def test_cuda_has_no_workspace_whatever_the_task_queue(tiny: tuple[str, ...]) -> None:
    cuda = [*tiny, "device.name=a100-80gb", "device.memory_bytes=8GiB"]
    _, result = ran("caching", *cuda)
    assert " A5120 A160 a160 A5120 " in told(result, 0)  # a sum of exponentials: 10 tokens, 4 heads, fp32
    assert WORKSPACE not in set(result.memory_trace["size"] if result.memory_trace is not None else ())
    _, other = ran("caching", *cuda, "engine.task_queue_enable=2")
    assert told(other) == told(result)


def test_with_peak_each_step_takes_one_tensor_and_with_none_the_run_holds_one(tiny: tuple[str, ...]) -> None:
    _, result = ran("caching", *tiny, "memory.activations=peak")
    held = WORKSPACE + 6 * 5120
    assert told(result, 0).endswith(f" A{held} {' '.join(['K2560'] * 8)} a{held}")
    _, result = ran("caching", *tiny, "memory.activations=none")
    words = told(result).split()
    assert [w for w in words if w[0] in "Aa"] == [f"A{result.timeline['activations'].iloc[0]}"]
    assert words.index(f"A{31_331_450}") == 16  # behind the weights


@pytest.mark.parametrize(
    ("preset", "attention"),
    [
        ("caching", "flash"),
        ("caching", "standard"),
        ("doubling", "flash"),
        ("doubling", "standard"),
        ("paged", "flash"),
    ],
)
def test_what_a_step_holds_at_once_is_what_its_program_says(tiny: tuple[str, ...], preset: str, attention: str) -> None:
    twin, result = ran(preset, *tiny, *traffic(5, 90, 9), f"engine.attention={attention}")
    model = ActivationModel(twin.model, twin.device, tensor_parallel_size=1, attention=attention)
    steps = rows_of(result.steps)
    live: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for row in rows_of(result.memory_trace):
        if row["op"] == "malloc" and row["tag"] in ("activation", "workspace"):
            live[row["id"]] = row["size"]
            peaks[row["step"]] = max(peaks.get(row["step"], 0), sum(live.values()))
        elif row["op"] == "free":
            live.pop(row["id"], None)
    assert live == {}
    assert list(peaks) == [step["step"] for step in steps]
    for step in steps:
        lengths = list(zip(step["new_tokens"], step["context_tokens"], strict=True))
        prompts = tuple(pair for pair in lengths if pair[0] > 1)
        decodes = [context + 1 for new, context in lengths if new == 1]
        batch = BatchShape(prefill=prompts, decode_count=len(decodes), kv_read_tokens=sum(decodes))
        assert peaks[step["step"]] == model.program(batch).peak_bytes


# -- one step, by hand -------------------------------------------------------------------------------------------------


class Noted(ContiguousPolicy):
    """Notes what it is told, with the bytes that are live then, and fails in one layer."""

    def __init__(self, arena: CachingAllocator, fails_at: int = -1) -> None:
        super().__init__(KVLayout(2, 1, 1), arena, ContiguousPolicy.Config(max_model_len=16))
        self.fails_at = fails_at
        self.log: list[tuple[str, int]] = []

    def grow_layer(self, layer: int) -> None:
        self.log.append((f"grow_layer {layer}", self.arena.usage().requested))
        if layer == self.fails_at:
            self.arena.malloc(2 * GIB, tag=Tag.KV, owner=7)

    def end_step(self) -> None:
        self.log.append(("end_step", self.arena.usage().requested))


def by_hand(activations: Activations, fails_at: int = -1) -> tuple[Forward, Noted]:
    """Two layers of Llama-2-7B on a device of 1 GiB."""
    device = catalog.device("ascend-910b4")
    model = replace(catalog.model("llama-2-7b"), num_layers=2)
    program = ActivationModel(model, device, tensor_parallel_size=1, attention="flash")
    allocator = CachingAllocator(HbmDriver(GIB), CachingAllocator.Config())
    return Forward(allocator, 2, activations, program), Noted(allocator, fails_at)


PROMPT_OF_10 = BatchShape(prefill=((10, 0),))


def test_a_step_grows_each_layer_once_and_ends_with_nothing_live() -> None:
    forward, kv = by_hand("per_layer")
    forward.step(kv, PROMPT_OF_10)
    live = 5 * 10 * 4096 * 2  # hidden, normed, and three of query, key and value
    assert kv.log == [("grow_layer 0", live), ("grow_layer 1", live), ("end_step", 0)]
    kv.arena.check()


@pytest.mark.parametrize(("activations", "live"), [("per_layer", 409_600), ("peak", 18_448_384)])
def test_a_step_that_fails_keeps_what_it_took_until_it_is_aborted(activations: Activations, live: int) -> None:
    forward, kv = by_hand(activations, fails_at=1)
    with pytest.raises(OutOfMemory) as caught:
        forward.step(kv, PROMPT_OF_10)
    assert caught.value.facts.owner == 7
    assert kv.arena.usage().requested_by_tag == (0, live, 0, 0)
    assert kv.log == [("grow_layer 0", live), ("grow_layer 1", live)]
    forward.abort()
    assert kv.arena.usage().requested == 0
    kv.arena.check()
    kv.fails_at = -1
    forward.step(kv, PROMPT_OF_10)
    assert kv.log[-1] == ("end_step", 0)


# -- leaps -------------------------------------------------------------------------------------------------------------


def scenarios() -> st.SearchStrategy[Scenario]:
    """Small traffic with counted activations, under every way to grow KV that can leap, with little memory or much."""

    def build(
        seed: int, kv: tuple[str, ...], utilization: int, rate: float, output: int, interval_ms: int, conf: str
    ) -> Scenario:
        return Scenario.load(
            preset=kv[0],
            seed=seed,
            overrides=[
                "memory.activations=peak",
                "engine.max_model_len=512",
                f"engine.gpu_memory_utilization={utilization / 1000}",
                "workload.num_prompts=8",
                f"workload.request_rate={rate}",
                'workload.prompt_tokens={distribution="uniform",low=1,high=200}',
                f'workload.output_tokens={{distribution="uniform",low=1,high={output}}}',
                "workload.system_prompt_tokens=0",
                "session.turns=2",
                "session.think_time_s=0.2",
                f"results.interval_s={interval_ms / 1000}",
                f"memory.alloc_conf={conf!r}",
                *kv[1:],
            ],
        )

    return st.builds(
        build,
        seed=st.integers(0, 2**32),
        kv=st.sampled_from(
            [
                ("paged", "memory.oom=preempt"),
                ("paged", "memory.oom=reject", "memory.general=direct"),
                ("doubling", "memory.oom=preempt"),
                ("doubling", "memory.oom=reject", "kv_cache.tensors=per_layer", "session.between_turns=keep"),
                ("doubling", "memory.oom=stop", "kv_cache.growth=step", "kv_cache.step_tokens=32"),
                ("caching", "kv_cache.growth=static"),
                ("caching", "kv_cache.growth=hybrid", "kv_cache.retention=sliding_window(100)"),
            ]
        ),
        utilization=st.integers(470, 560),
        rate=st.sampled_from([0.5, 5.0, 50.0]),
        output=st.sampled_from([20, 150]),
        interval_ms=st.sampled_from([1, 70, 1000]),
        conf=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:30", "roundup_power2_divisions:4"]),
    )


def unequal(leaps: tuple[Twin, Result], steps: tuple[Twin, Result]) -> list[str]:
    """Tables, and statistics of allocators, that differ."""
    (a, x), (b, y) = leaps, steps
    names = [name for name in ("timeline", "requests", "checkpoints") if not getattr(x, name).equals(getattr(y, name))]
    names += [] if x.summary == y.summary else ["summary"]
    for one, other in ((a.general, b.general), (a.arena, b.arena)):
        mine, theirs = one.stats(), other.stats()
        assert len(mine) == 123
        names += [name for name in mine if mine[name] != theirs[name]]
    return names


def both_ways(scenario: Scenario) -> list[str]:
    leaps, steps = Twin(scenario), Twin(scenario)
    return unequal((leaps, leaps.run()), (steps, steps.run(step_mode=True)))


def test_a_leap_leaves_all_statistics_of_single_steps() -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(scenarios())
    def equal(scenario: Scenario) -> None:
        assert both_ways(scenario) == []

    equal()


class Watched(Forward):
    """Compares the allocator before and after each step that calls itself steady."""

    steady = unsteady = 0

    def step(self, kv: KVPolicy, batch: BatchShape) -> None:
        self.found = list(self.general.walk())
        super().step(kv, batch)

    def is_steady(self, work: Work) -> bool:
        is_steady = super().is_steady(work)
        Watched.steady += is_steady
        Watched.unsteady += not is_steady
        if is_steady and (now := list(self.general.walk())) != self.found:
            raise Unsteady([*set(now) ^ set(self.found)])
        return is_steady


class Unsteady(AssertionError):
    """Segments that are not as they were."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(segments)


def watch(max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(scenarios())
    def watched(scenario: Scenario) -> None:
        Twin(scenario).run()

    watched()


def test_a_step_that_calls_itself_steady_leaves_every_block_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.sim.server_memory.Forward", Watched)
    Watched.steady = Watched.unsteady = 0
    watch(40)
    assert Watched.steady > 300
    assert Watched.unsteady > 100


# -- planted bugs of leaps ---------------------------------------------------------------------------------------------


def leaping(*overrides: str, preset: str = "paged") -> Scenario:
    return Scenario.load(
        preset=preset,
        overrides=["memory.activations=peak", "results.interval_s=0.1", *traffic(6, 100, 60), *overrides],
    )


def test_steps_that_are_not_counted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both_ways(leaping()) == []
    monkeypatch.setattr(Forward, "repeat", lambda self, steps: None)
    assert {"allocation.all.freed", "requested_bytes.large_pool.allocated"} <= set(both_ways(leaping()))


def test_steps_that_are_counted_on_top_of_counted_ones_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leap in two halves: the second would repeat what the first had repeated."""
    honest = Forward.repeat

    def halves(self: Forward, steps: int) -> None:
        honest(self, steps // 2)
        honest(self, steps - steps // 2)

    monkeypatch.setattr(Forward, "repeat", halves)
    assert "allocation.all.freed" in both_ways(leaping())


def test_operations_that_are_not_counted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forward, "repeated_operations", 0)
    assert both_ways(leaping()) == ["checkpoints"]  # an address map tells after which operation it was drawn


def test_a_forward_pass_that_always_calls_itself_steady_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forward, "is_steady", lambda self, work: True)
    growing = leaping("engine.gpu_memory_utilization=0.5", "engine.max_model_len=512", preset="doubling")
    with pytest.raises(ValueError, match="what has changed the allocator cannot be repeated by counting"):
        both_ways(growing)


def test_a_forward_pass_that_does_not_look_at_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """``direct`` asks the driver at each step and holds as much after it as before."""
    scenario = leaping("memory.general=direct")
    assert both_ways(scenario) == []
    honest = Forward.is_steady
    monkeypatch.setattr(Forward, "is_steady", lambda self, work: honest(self, Work()))
    assert "requests" in both_ways(scenario)


def test_a_forward_pass_that_does_not_look_at_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hbmtwin.sim.server_memory.Forward", Watched)
    one_after_another = leaping("workload.request_rate=0.2", preset="doubling")
    Twin(one_after_another).run()
    monkeypatch.setattr(Forward, "is_steady", lambda self, work: work == Work())
    with pytest.raises(Unsteady):  # the second finds the memory of the first in the cache: no work, and other blocks
        Twin(one_after_another).run()


# -- where every step is taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "overrides", "leaps"),
    [
        ("paged", [], True),
        ("paged", ["results.memory_trace=true"], False),
        ("paged", ["memory.alloc_conf=garbage_collection_threshold:0.8"], False),
        ("paged", ["memory.activations=none", "memory.alloc_conf=garbage_collection_threshold:0.8"], True),
        ("paged", ["memory.activations=none", "results.memory_trace=true"], True),
        ("paged", ["memory.activations=per_layer"], False),
        ("paged", ["memory.general=direct"], False),
        ("doubling", [], True),
        ("doubling", ["engine.attention=standard"], False),
        ("doubling", ["engine.attention=standard", "memory.activations=none"], True),
        ("caching", [], False),
    ],
    ids=str,
)
def test_leaps_are_made_only_where_equal_steps_are_equal_in_memory(
    preset: str, overrides: list[str], leaps: bool
) -> None:
    result = Twin(leaping("results.steps=true", *overrides, preset=preset)).run()
    assert result.steps is not None
    assert (result.steps["repeat"].max() > 1) == leaps
    assert result.steps["repeat"].sum() == 60


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oom", ["stop", "reject", "preempt"])
@pytest.mark.parametrize(
    ("overrides", "tag", "message"),
    [
        (["engine.task_queue_enable=1"], "workspace", "NPU out of memory. Tried to allocate 18.00 MiB"),
        (["engine.task_queue_enable=2"], "workspace", "NPUWorkspaceAllocator tried to allocate 17.12 MiB"),
        (["memory.activations=peak"], "activation", "NPU out of memory. Tried to allocate 18.00 MiB"),
    ],
    ids=["level 1", "level 2", "peak"],
)
def test_activations_that_do_not_fit_end_the_server_whatever_is_done_about_kv(
    tiny: tuple[str, ...], oom: str, overrides: list[str], tag: str, message: str
) -> None:
    """The pool takes all but 6 MiB of the device: no sequence could give way so that the pass has room."""
    full = ("memory.activation_bytes=0", "engine.gpu_memory_utilization=0.93")
    _, result = ran("paged", *tiny, *full, f"memory.oom={oom}", *overrides)
    death = result.oom
    assert death is not None
    assert (death["tag"], death["cause"], death["owner"], death["request"]) == (tag, "shortage", -1, -1)
    assert message in death["torch_message"]
    assert result.requests["status"].tolist() == ["failed"] * 2
    assert result.requests["reason"].tolist() == ["server_died"] * 2
    assert result.requests["scheduled_ns"].tolist() == [0, 0]  # they were in the step that failed
    assert result.timeline["running"].iloc[-1] == 2
    assert result.summary["preemptions"] == 0


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_it_ends_in_the_middle_of_a_traffic_that_gives_way_for_kv(oom: str) -> None:
    """Buffers of K and V of 40 sequences: KV that does not fit is answered, until a workspace does not find 18 MiB in
    one piece. Its allocator outside (TASK_QUEUE 2) needs none."""
    scenario = [
        *("memory.activations=per_layer", "kv_cache.tensors=per_layer", "engine.max_model_len=1024"),
        *("engine.gpu_memory_utilization=0.5", f"memory.oom={oom}", *traffic(40, 60, 100)),
    ]
    _, result = ran("doubling", *scenario)
    death = result.oom
    assert death is not None
    assert (death["tag"], death["cause"], death["asked_bytes"]) == ("workspace", "external_fragmentation", WORKSPACE)
    assert death["largest_free_bytes"] < death["need_bytes"] < death["free_bytes"]
    answered = result.summary["preemptions"] if oom == "preempt" else (result.requests["status"] == "rejected").sum()
    assert answered > 0
    assert set(result.requests["status"]) <= {"failed", "rejected"}
    _, outside = ran("doubling", *scenario, "engine.task_queue_enable=2")
    assert outside.summary["requests_completed"] > 0


def test_the_sampler_is_in_no_ascend_budget() -> None:
    """vllm-ascend profiles with bf16 logits alone; the run makes 12 bytes a logit more. With Llama-3.1-8B, which has
    128,256 of them a row, a paged server lives on what the utilisation leaves unplanned; where that is little, it dies
    of a float copy while it admits its 256 sequences."""
    eight_b = ["model.name=llama-3.1-8b", "engine.max_model_len=1024", *traffic(300, 64, 20)]
    twin, result = ran("paged", *eight_b, "memory.activations=per_layer")
    assert result.oom is None
    granted = twin.budget.weights_bytes + twin.budget.activation_bytes + twin.budget.kv_bytes
    assert result.summary["peak_requested_bytes"] > granted + 190 * MIB
    tight = "engine.gpu_memory_utilization=0.98"
    twin, result = ran("paged", *eight_b, "memory.activations=per_layer", tight)
    death = result.oom
    assert death is not None
    assert death["tag"] == "activation"
    rows, rest = divmod(death["asked_bytes"], 4 * 128_256)
    assert (rows, rest) == (156, 0)
    assert twin.budget.activation_bytes == 254_678_138
    whole = ActivationModel(twin.model, twin.device, tensor_parallel_size=1, attention="flash")
    full = whole.program(BatchShape(decode_count=256, kv_read_tokens=256 * 64)).peak_bytes
    assert full == 14 * 256 * 128_256 + 2 * 256 * 8192 + 256 * 8 == 463_865_856
    _, planned = ran("paged", *eight_b, "memory.activations=per_layer", "memory.activation_bytes=600MiB", tight)
    assert planned.summary["requests_completed"] == 300


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["model.name=llama-2-7b"], 224),  # all blocks; 14 x 224 x 32,000 bytes: less than its MLP takes for a prompt
        (["model.name=llama-3.1-8b", "device.name=a100-80gb"], 256),  # vLLM profiles with all 14 bytes
    ],
    ids=str,
)
def test_it_fits_where_the_budget_is_as_large_by_chance_or_by_plan(overrides: list[str], rows: int) -> None:
    settings = ["engine.max_model_len=1024", "memory.activations=per_layer", *traffic(300, 64, 40)]
    _, result = ran("paged", *settings, *overrides)
    assert result.oom is None
    assert result.summary["requests_completed"] == 300
    assert result.timeline["running"].max() == rows


# -- planted bugs of the program ---------------------------------------------------------------------------------------


def test_a_layer_that_skips_a_free_shows_in_the_books(tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Forward._run

    def skips(self: Forward, instructions: Sequence[Instruction], kv: KVPolicy, layer: int) -> None:
        honest(self, [i for i in instructions if (i.verb, i.name) != ("free", "activated")], kv, layer)

    monkeypatch.setattr(Forward, "_run", skips)
    _, result = ran("caching", *tiny)
    assert result.timeline["activations"].max() == 2 * (10_240 + 2048 + 2048)


def test_memory_that_no_program_accounts_for_stops_the_run(
    tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = BlockAllocator.free

    def loses(self: CachingAllocator, handle: int) -> None:
        lost = self._live[handle].tag is Tag.WORKSPACE
        honest(self, handle)
        self._requested_by_tag[Tag.WORKSPACE] += lost

    monkeypatch.setattr(BlockAllocator, "free", loses)
    with pytest.raises(AssertionError, match="the row sums to"):
        ran("caching", *tiny)
