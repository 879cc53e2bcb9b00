"""Learned traffic beside what it was learned from, by the rule of acceptance; what breaks the rule is seen.

``benchmarks/learn_acceptance.py`` does the same on ten seeds, and on a whole day of ServeGen's clients.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.learned.acceptance import HIT_SHARE, Figure, figures
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import Client, TrafficModel
from hbmtwin.workloads.learned.traffic import ModelTraffic
from hbmtwin.workloads.statistics.describe import Description, describe
from hbmtwin.workloads.statistics.reuse_curve import reuse_curve

ROOT = Path(__file__).resolve().parents[3]
TRACES = ROOT.parent / "shared" / "traces"
SEEDS = (0, 1)
BLOCK_SIZE = 512
HOURS = 1.0

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")
Case = tuple[Description, TrafficModel | None]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learn_acceptance", ROOT / "benchmarks" / "learn_acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(script: ModuleType) -> dict[str, Case]:
    return {name: (trace, model) for name, trace, model in script.cases(TRACES, HOURS)}


def beside(trace: Description, model: TrafficModel, seed: int, *, hours: float | None = None) -> dict[str, Figure]:
    traffic = ModelTraffic(model, seed=seed, duration_s=None if hours is None else hours * 3600)
    return {figure.name: figure for figure in figures(trace, describe(traffic.requests(), block_size=BLOCK_SIZE))}


@pytest.mark.parametrize("name", ["azure", "mooncake", "servegen", "relearned"])
def test_generated_traffic_is_accepted(cases: dict[str, Case], name: str) -> None:
    trace, model = cases[name]
    assert model is not None
    for seed in SEEDS if name == "azure" else SEEDS[:1]:
        found = beside(trace, model, seed, hours=HOURS if name == "servegen" else None)
        assert {figure.name: figure.deviation for figure in found.values() if not figure.holds} == {}
        expected = 13 if trace.reuse is None else 21
        assert len(found) == expected


def test_one_poisson_stream_with_pooled_lengths_is_not(script: ModuleType, cases: dict[str, Case]) -> None:
    trace, _ = cases["poisson"]
    for seed in SEEDS:
        found = {figure.name: figure for figure in figures(trace, describe(script.poisson(trace, seed)))}
        assert not found["IDC(60 s)"].holds
        assert found["IDC(60 s)"].generated < 6
        assert found["request rate /s"].holds


def every(model: TrafficModel, **changes: object) -> TrafficModel:
    def changed(client: Client) -> Client:
        return replace(client, **changes)

    return replace(model, clients=tuple(changed(client) for client in model.clients))


def test_a_bug_in_the_model_is_seen(cases: dict[str, Case]) -> None:
    """Each of these is planted in a model that is accepted without it."""
    trace, model = cases["azure"]
    assert model is not None
    (client,) = model.clients
    rate = model.request_rate
    flat = every(model, windows=tuple(w._replace(request_rate=rate) for w in client.windows), minute_cv=0.0)
    assert not beside(trace, flat, 0)["IDC(60 s)"].holds
    bursty = every(model, windows=tuple(w._replace(shape=0.6) for w in client.windows))
    assert not beside(trace, bursty, 0)["window CV, median"].holds
    dense = every(model, windows=tuple(w._replace(request_rate=1.03 * w.request_rate) for w in client.windows))
    assert not beside(trace, dense, 0)["request rate /s"].holds
    lengths = client.lengths[0]
    smooth = replace(lengths, output_tokens=(Measured((0.0, 1.0), (16, 954)),))
    assert not beside(trace, every(model, lengths=(smooth,)), 0)["output tokens p50"].holds


def test_a_bug_in_the_sharing_is_seen(cases: dict[str, Case]) -> None:
    trace, model = cases["mooncake"]
    assert model is not None
    sharing = model.clients[0].sharing
    assert sharing is not None
    at_once = replace(sharing, follow_after_s=tuple(wait / 10 for wait in sharing.follow_after_s))
    share = {}
    for planted in (sharing, at_once):
        requests = ModelTraffic(every(model, sharing=planted)).requests()
        curve = reuse_curve((block_chain(r.spans, BLOCK_SIZE, partial=True) for r in requests), (10_000,))
        share[planted] = curve.hits[0] / curve.references
    assert trace.reuse is not None
    real = trace.reuse.curve.hits[trace.reuse.curve.capacities.index(10_000)] / trace.reuse.curve.references
    assert Figure("", real, share[sharing], HIT_SHARE, False).holds
    assert not Figure("", real, share[at_once], HIT_SHARE, False).holds


def test_the_rule_by_hand() -> None:
    assert Figure("rate", 50.0, 51.0, 0.02, True).holds
    assert not Figure("rate", 50.0, 51.1, 0.02, True).holds
    assert Figure("share", 0.5, 0.47, 0.031, False).deviation == pytest.approx(-0.03)
    assert not Figure("share", 0.5, 0.46, 0.03, False).holds
    assert Figure("cv", 0.0, 0.05, 0.1, True).holds
