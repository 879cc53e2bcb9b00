"""Traffic by name: what wins over what, and that each has the lengths, turns and rate of its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, pvariance, quantiles
from typing import NamedTuple

import pytest

from hbmtwin.api import Request, Scenario, ScenarioError, run, workload_preset, workload_presets
from hbmtwin.cli.commented import commented_scenario
from hbmtwin.sim.catalog import CatalogError, model, models
from hbmtwin.sim.catalog.workload_table import preset_of
from hbmtwin.sim.scenario import known_keys
from hbmtwin.sim.traffic import source_of
from hbmtwin.sim.workload_presets import context_notes
from hbmtwin.workloads import Status, user_stream
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.statistics.reuse_curve import reuse_curve

NAMES = (
    *("azure-conv", "mooncake-conversation", "sharegpt", "arxiv-summarization", "reasoning-r1", "interactive-chat"),
    *("rag", "agentic", "synthetic-data", "deep-research"),
)


def requests_of(name: str, *settings: str) -> list[Request]:
    """What a server that answers at once would get, session by session."""
    given = [f"workload.preset={name}", "workload.num_prompts=12000", *settings]
    source = source_of(Scenario.load(overrides=given, seed=1))
    requests = []
    for first in source.open():
        r: Request | None = first
        while r is not None:
            requests.append(r)
            r = source.next_turn(r, r.arrival_ns, Status.COMPLETED)
    return requests


# -- what each is held to ----------------------------------------------------------------------------------------------


def percentile(share: int) -> Callable[[Sequence[float]], float]:
    return lambda values: quantiles(values, n=100)[share - 1]


def turns(requests: Sequence[Request]) -> float:
    return len(requests) / len({r.session for r in requests})


class Figure(NamedTuple):
    """One figure of a source; *values* are prompts, answers, or prompts without the system prompt."""

    name: str
    values: str
    what: str
    source: float
    bound: float
    """Largest relative difference."""


FIGURES = [
    # Section 3's tables of the traces: the mean, and quantiles within 5 %.
    *(Figure("azure-conv", "prompt", w, x, b) for w, x, b in (("mean", 1154.7, 0.03), ("p50", 1020, 0.05))),
    *(Figure("azure-conv", "prompt", w, x, 0.05) for w, x in (("p95", 4083), ("p99", 4142), ("p25", 396))),
    *(Figure("azure-conv", "output", w, x, 0.05) for w, x in (("mean", 211.1), ("p50", 129), ("p75", 395))),
    *(Figure("azure-conv", "output", w, x, 0.05) for w, x in (("p95", 451), ("p99", 601))),
    # Whole prompts of a session are first prompts and what turns add: they come near, they are not drawn.
    *(Figure("mooncake-conversation", "prompt", w, x, 0.1) for w, x in (("mean", 12_035), ("p50", 6_909))),
    *(Figure("mooncake-conversation", "prompt", w, x, 0.15) for w, x in (("p90", 27_367), ("p95", 39_550))),
    *(Figure("mooncake-conversation", "output", w, x, 0.05) for w, x in (("mean", 342.6), ("p50", 350), ("p95", 698))),
    Figure("mooncake-conversation", "turns", "mean", 12_031 / 8_057, 0.03),
    *(Figure("sharegpt", "prompt", w, x, 0.05) for w, x in (("mean", 862), ("p50", 728), ("p95", 1814), ("p99", 2768))),
    *(Figure("sharegpt", "output", w, x, 0.05) for w, x in (("mean", 665), ("p50", 638), ("p95", 814), ("p99", 1001))),
    *(Figure("arxiv-summarization", "prompt", w, x, 0.05) for w, x in (("mean", 2588), ("p50", 2730), ("p99", 3933))),
    *(Figure("arxiv-summarization", "output", w, x, 0.05) for w, x in (("mean", 291), ("p50", 167), ("p99", 3271))),
    *(Figure("reasoning-r1", "prompt", w, x, 0.1) for w, x in (("mean", 1268.2), ("p50", 208), ("p99", 23_423))),
    *(Figure("reasoning-r1", "output", w, x, 0.1) for w, x in (("mean", 1527.4), ("p50", 792), ("p95", 5701))),
    # inference-perf's profiles tell means.
    *(Figure("interactive-chat", v, "mean", x, 0.05) for v, x in (("new", 4000), ("output", 300), ("turns", 4))),
    *(Figure("rag", v, "mean", x, 0.05) for v, x in (("new", 15_000), ("output", 500), ("turns", 1))),
    *(Figure("synthetic-data", v, "mean", x, 0.05) for v, x in (("new", 500), ("output", 4000), ("turns", 1))),
    *(Figure("agentic", v, "mean", x, 0.15) for v, x in (("prompt", 49_141), ("output", 659), ("turns", 21.9))),
    *(Figure("deep-research", v, "mean", x, 0.1) for v, x in (("new", 45_000), ("output", 300), ("turns", 15))),
]


def figure(name: str, wanted: Figure, requests: Sequence[Request]) -> float:
    system = workload_preset(name).keys["workload.system_prompt_tokens"]
    values: list[float]
    match wanted.values:
        case "turns":
            return turns(requests)
        case "new":
            values = [r.prompt_tokens - system for r in requests]
        case "prompt":
            values = [r.prompt_tokens for r in requests]
        case _:
            values = [r.output_tokens for r in requests]
    return mean(values) if wanted.what == "mean" else percentile(int(wanted.what[1:]))(values)


def far_off(name: str, requests: Sequence[Request]) -> list[str]:
    """The figures of *name* that *requests* miss."""
    return [
        f"{wanted.values} {wanted.what}: {found:.1f}, not {wanted.source}"
        for wanted in FIGURES
        if wanted.name == name
        if not abs((found := figure(name, wanted, requests)) / wanted.source - 1) <= wanted.bound
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_the_figures_of_its_source(name: str) -> None:
    assert any(wanted.name == name for wanted in FIGURES)
    assert far_off(name, requests_of(name)) == []


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("azure-conv", 'workload.output_tokens={distribution="lognormal", mean=211.1, stddev=163}'),
        ("mooncake-conversation", "session.turns=1"),
        ("interactive-chat", "workload.first_prompt_tokens={distribution='lognormal', mean=4000, stddev=2500}"),
    ],
)
def test_a_log_normal_for_data_or_a_history_forgotten_is_caught(name: str, planted: str) -> None:
    assert far_off(name, requests_of(name, planted))


def test_rates_are_those_of_the_sources() -> None:
    """Sessions a second; gaps of the measured ones are Poisson's, so that 12,000 of them are within 3 %."""
    for name, rate in (("sharegpt", 10.3), ("reasoning-r1", 16.0)):
        first = [r.arrival_ns for r in requests_of(name)]
        assert len(first) / (max(first) / 1e9) == pytest.approx(rate, rel=0.03)
    assert workload_preset("mooncake-conversation").keys["workload.request_rate"] == pytest.approx(
        8057 / 3537, rel=1e-3
    )


def dispersion(requests: Sequence[Request], window_s: int) -> float:
    """Variance by mean of the arrivals in whole windows (IDC)."""
    counts = Counter(r.arrival_ns // (window_s * 10**9) for r in requests)
    found = [counts[w] for w in range(max(r.arrival_ns for r in requests) // (window_s * 10**9))]
    return pvariance(found) / mean(found)


def test_the_minutes_of_azure_are_uneven_and_its_seconds_nearly_poisson() -> None:
    """The trace has 1.39 over seconds and 16.1 over its 58 whole minutes; one rate alone has 1 and 1."""
    whole = requests_of("azure-conv", "workload.num_prompts=19366")
    assert len(whole) / (whole[-1].arrival_ns / 1e9) == pytest.approx(19_366 / 3501.7, rel=0.02)
    assert dispersion(whole, 60) == pytest.approx(16.1, rel=0.3)
    assert dispersion(whole, 1) == pytest.approx(1.39, rel=0.2)
    planted = requests_of("azure-conv", "workload.num_prompts=19366", "workload.rate_curve=[[0, 1], [1, 1]]")
    assert dispersion(planted, 60) < 2


def test_the_history_of_mooncakes_sessions_is_found_as_in_the_trace() -> None:
    """Block 0 and what turns repeat: an endless cache hits 36.6 % of the trace's blocks of 512 tokens."""
    requests = sorted(requests_of("mooncake-conversation"), key=lambda r: r.arrival_ns)
    found = reuse_curve((block_chain(r.spans, 512, partial=True) for r in requests), [100_000, None])
    for hits, share in zip(found.hits, (0.364, 0.366), strict=True):
        assert hits / found.references == pytest.approx(share, abs=0.03)


# -- a preset is keys --------------------------------------------------------------------------------------------------


def test_the_names_and_that_every_key_is_known_and_has_a_source() -> None:
    assert workload_presets() == NAMES
    for name in NAMES:
        preset = workload_preset(name)
        assert preset.keys.keys() <= set(known_keys())
        assert preset.keys.keys() == preset.sources.keys()
        assert {"workload.prompt_tokens", "workload.output_tokens", "session.turns"} <= preset.keys.keys()
        assert preset.credit
        assert all("(confidence " in source for source in preset.sources.values())


def test_a_number_without_a_source_is_refused() -> None:
    entry = {"summary": "s", "credit": "c", "session.turns": {"value": 1, "source": "", "confidence": "H"}}
    with pytest.raises(CatalogError, match=r"workload x, session.turns: a value, a source and a confidence of H, M, L"):
        preset_of("x", entry)
    with pytest.raises(CatalogError, match="workload x: a summary and a credit are needed"):
        preset_of("x", {"summary": "s"})


def test_a_given_key_wins_over_the_preset_in_the_file_and_in_set(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[workload]\npreset = "interactive-chat"\noutput_tokens = 7\n[session]\nthink_time_s = 1\n')
    s = Scenario.load(path, overrides=["session.turns=2"])
    assert (s.workload.output_tokens, s.session.think_time_s, s.session.turns) == (7, 1, 2)
    assert (s.workload.system_prompt_tokens, s.workload.request_rate) == (1000, 0.5)
    s = Scenario.load(path, overrides=["workload.preset=rag"])
    assert (s.workload.system_prompt_tokens, s.workload.output_tokens) == (500, 7)


def test_a_preset_over_a_file_that_spells_out_every_default(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(commented_scenario(), encoding="utf-8")
    for name in NAMES:
        given = [f"workload.preset={name}"]
        spelt_out, alone = Scenario.load(tmp_path / "s.toml", overrides=given), Scenario.load(overrides=given)
        assert (spelt_out.workload, spelt_out.session) == (alone.workload, alone.session)


def test_users_of_a_closed_loop_take_the_place_of_the_presets_arrivals() -> None:
    s = Scenario.load(overrides=["workload.preset=azure-conv", "workload.users=3"])
    assert (s.workload.request_rate, s.workload.rate_curve) == (None, None)
    assert len(list(source_of(s).open())) == 3


@pytest.mark.parametrize(
    "settings",
    [
        ["workload.request_rate=inf"],
        ["workload.rescale_gaps=true"],
        ["workload.clients=[{request_rate=2}, {request_rate=0.5, cv=3}]"],
        ["workload.ramp_up_strategy=linear", "workload.ramp_up_start_rps=1", "workload.ramp_up_end_rps=4"],
    ],
)
def test_arrivals_of_ones_own_take_the_place_of_the_curve(settings: list[str]) -> None:
    given = ["workload.preset=azure-conv", "workload.num_prompts=9", *settings]
    assert Scenario.load(overrides=given).workload.rate_curve is None
    assert len(list(source_of(Scenario.load(overrides=given)).open())) == 9


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_scenario_reads_back_and_takes_another_preset(name: str, tmp_path: Path) -> None:
    s = Scenario.load(overrides=[f"workload.preset={name}", "session.turns=3", "workload.users=2"])
    (tmp_path / "s.toml").write_text(s.to_toml())
    assert Scenario.load(tmp_path / "s.toml") == s
    other = Scenario.load(tmp_path / "s.toml", overrides=["workload.preset=synthetic-data"])
    assert other.workload == Scenario.load(overrides=["workload.preset=synthetic-data", "workload.users=2"]).workload


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["workload.preset=azure_con"],
            "workload.preset: unknown workload 'azure_con': did you mean 'azure-conv'? The catalog has agentic, ",
        ),
        (
            ["workload.preset=rag", "workload.trace=a.csv"],
            "workload.preset: workload.trace says by itself who asks for what; give one of the two",
        ),
        (
            ["workload.preset=rag", "workload.prefix_repetition={prefix_len=1}"],
            "workload.preset: workload.prefix_repetition says by itself who asks for what",
        ),
        (["workload.preset=3"], "workload.preset: input should be a valid string, not 3"),
    ],
)
def test_what_cannot_be_is_told(settings: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(overrides=settings)
    assert str(caught.value).startswith(said)


# -- runs --------------------------------------------------------------------------------------------------------------

LONG = ["model.name=llama-3.1-8b", "engine.max_model_len=90000", "workload.num_prompts=24"]


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_from_end_to_end(name: str) -> None:
    summary = run(Scenario.load(overrides=[f"workload.preset={name}", *LONG])).summary
    rejected = sum(summary["requests_rejected"].values())
    assert summary["requests_completed"] + rejected + summary["requests_unfinished"] == 24
    assert summary["requests_completed"] >= 12
    assert (rejected > 0) == any("workload.preset" in note for note in summary["notes"])


class Lengths:
    """A source of prompts of these lengths, each with an answer of one token."""

    def __init__(self, *prompts: int) -> None:
        self.total_requests = len(prompts)
        self._prompts = prompts

    def open(self) -> Iterator[Request]:
        for id, tokens in enumerate(self._prompts):
            yield Request(id, id, 0, 0, tokens, 1, 1, ((user_stream(id, 0), 0, tokens),))

    def next_turn(self, r: Request, end_ns: int, status: Status) -> None:
        return None


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([100] * 99 + [5000], "99 % are of at most 101 tokens, and fit"),
        ([100] * 98 + [5000, 8000], "The p99, 5001 tokens, is held by qwen2.5-0.5b, "),
        (
            [65_535],
            "The p99, 65536 tokens, is held by llama-3.2-1b, youtu-llm-2b, granite-4.0-h-micro, llama-3.2-3b",
        ),
        ([10**6], "The p99, 1000001 tokens, is held by no model of the catalog"),
    ],
)
def test_the_remark_says_which_models_hold_the_p99(prompts: list[int], said: str) -> None:
    (note,) = context_notes("rag", Lengths(*prompts), 4096)
    assert note.rpartition("session.turns. ")[2].startswith(said)
    longer = sum(tokens >= 4096 for tokens in prompts)
    assert f"{longer} of its {len(prompts)} requests {'is' if longer == 1 else 'are'} longer than" in note


def test_models_that_hold_are_the_smallest_with_as_many_positions() -> None:
    (note,) = context_notes("rag", Lengths(32_767), 4096)
    *named, others = note.rpartition(" is held by ")[2].replace(" and ", ", ").split(", ")
    hold = {name for name in models() if model(name).max_position_embeddings >= 32_768}
    assert len(named) == 5
    assert set(named) < hold
    assert others == f"{len(hold) - 5} larger ones"
    assert {"gemma-3-1b", "qwen2.5-0.5b"} <= set(named)
    assert "gemma-2-9b" not in named
    assert context_notes("rag", Lengths(4095), 4096) == ()


def test_requests_longer_than_the_context_are_told_with_the_cure() -> None:
    shown = run(Scenario.load(overrides=["workload.preset=rag", "workload.num_prompts=8"])).summary
    (note,) = [note for note in shown["notes"] if "workload.preset" in note]
    assert note.startswith("workload.preset = 'rag': 6 of its 8 requests are longer than max_model_len, 4096 (up to ")
    assert "or clip workload.prompt_tokens, first_prompt_tokens or session.turns. The p99, " in note
    assert " tokens, is held by llama-3.2-1b, " in note
    fits = run(Scenario.load(overrides=["workload.preset=rag", "workload.prompt_tokens=9", "workload.num_prompts=8"]))
    assert not [note for note in fits.summary["notes"] if "workload.preset" in note]
